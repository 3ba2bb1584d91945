"""Attention with a window, documents or a sink through torch's FlexAttention, for GPUs.

FlexAttention compiles a mask into a fused kernel that visits only the tiles named by a block mask. Which tiles a window
needs is known without looking at a single pair of positions, so the block mask is written down directly:

    queries of tile r, 128 of them, see keys from  128 r + shift - (w-1)  to  128 r + shift + 127

The kernel keeps logits and softmax in float32 and multiplies in the dtype of its inputs, as the fused kernels for full
attention do. On a CPU the same mask runs without a kernel in the tests, against the definition. Grads are torch's
own and exist on GPUs only; neither they nor the time have been measured.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from twoaxis.kernels.attention import attention, unmasked

TILE = 128
SMALLEST = 16
"""Head widths below it have no kernel."""


def _serves(q: Tensor, k: Tensor, v: Tensor, bias: Any, *rest: Any, **options: Any) -> bool:
    """On a CUDA device, masked, not float64, heads wide enough."""
    fits = q.device.type == "cuda" and q.dtype != torch.float64 and min(q.shape[-1], v.shape[-1]) >= SMALLEST
    return fits and bias is None and not unmasked(q, k, v, bias, *rest, **options)


def _pays(q: Tensor, *_: Any, **__: Any) -> bool:
    """A tile of queries at least: decoding has fewer."""
    return q.shape[-2] >= TILE


@attention.form("flex", serves=_serves, pays=_pays, compiled=None, differentiable=True)
def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: None,
    sink: Tensor | None,
    reach: Tensor | None,
    *,
    window: int | None,
    scale: float,
) -> tuple[Tensor, tuple[()]]:
    """Through the compiled kernel."""
    run = flex_attention if torch.compiler.is_compiling() else _kernel()
    return through(run, q, k, v, sink, reach, window=window, scale=scale), ()


@functools.cache
def _kernel() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)


def through(
    run: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    reach: Tensor | None,
    *,
    window: int | None,
    scale: float,
) -> Tensor:
    """Attention through `run`, which is `flex_attention` or its compiled form; the other arguments as `attention`."""
    lead, (n, m) = q.shape[:-3], (q.shape[-2], k.shape[-2])
    rows = math.prod(lead)
    q, k, v = (t.reshape(rows, *t.shape[-3:]) for t in (q, k, v))
    known = None if reach is None else reach.expand(*lead, n).reshape(rows, n)
    aux = None if sink is None else AuxRequest(lse=True)
    mask = window_mask(n, m, m if window is None else window, known, q.device)
    out = run(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1], return_aux=aux)
    if sink is not None:
        out, found = out
        # a logit without a value takes its share of the weight: exp(lse) of exp(lse) + exp(sink)
        out = (out * torch.sigmoid(found.lse - sink[:, None]).unsqueeze(-1)).to(q.dtype)
    return out.reshape(*lead, *out.shape[1:])


def window_mask(n: int, m: int, window: int, reach: Tensor | None, device: torch.device) -> BlockMask:
    """The block mask of N queries that are the last of M keys, in tiles of 128 x 128.

    Args:
        n: queries.
        m: keys.
        window: positions visible, the current one included.
        reach: (rows, N) or None.
        device: of the mask.
    """
    shift = m - n

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        lag = query + shift - key
        seen = (lag >= 0) & (lag < window)
        return seen if reach is None else seen & (lag <= reach[row, query])

    tiles = torch.arange(-(-n // TILE), device=device)
    first = (tiles * TILE + shift - (window - 1)).clamp_min(0) // TILE
    last = ((tiles + 1) * TILE - 1 + shift).clamp_max(m - 1) // TILE
    across = -(-m // TILE)
    indices = (first[:, None] + torch.arange(across, device=device)).clamp_max(across - 1)
    counts = (last - first + 1).to(torch.int32)
    return BlockMask.from_kv_blocks(
        counts[None, None], indices.to(torch.int32)[None, None], BLOCK_SIZE=TILE, mask_mod=visible, seq_lengths=(n, m)
    )
