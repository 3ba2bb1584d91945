"""Windowed attention through torch's FlexAttention, for GPUs.

FlexAttention compiles a mask into a fused kernel that visits only the tiles named by a block mask. Which tiles a window
needs is known without looking at a single pair of positions, so the block mask is written down directly:

    queries of tile r, 128 of them, see keys from  128 r + shift - (w-1)  to  128 r + shift + 127

The kernel keeps logits and softmax in float32 and multiplies in the dtype of its inputs, as the fused kernels for full
attention do. On a CPU `band.py` is faster; there the same mask runs without a kernel in the tests, against the
definition. Gradients are torch's own and exist on GPUs only; neither they nor the time have been measured.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

TILE = 128
SMALLEST = 16
"""Head widths below it have no kernel."""


def flex_serves(q: Tensor, v: Tensor) -> bool:
    """Whether the fused kernel takes these tensors: on a CUDA device, not float64, heads wide enough."""
    return q.device.type == "cuda" and q.dtype != torch.float64 and min(q.shape[-1], v.shape[-1]) >= SMALLEST


def flex_window(
    q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, sink: Tensor | None, reach: Tensor | None
) -> Tensor:
    """Causal attention over the last `window` positions, through the compiled kernel; arguments as `band_attention`."""
    run = flex_attention if torch.compiler.is_compiling() else _kernel()
    return flex_form(run, q, k, v, window, scale, sink, reach)


@functools.cache
def _kernel() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)


def flex_form(
    run: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    scale: float,
    sink: Tensor | None,
    reach: Tensor | None,
) -> Tensor:
    """The same through `run`, which is `flex_attention` or its compiled form.

    Args:
        run: the function.
        q: (..., H, N, D); the N queries are the last of the M keys.
        k: (..., Hkv, M, D).
        v: (..., Hkv, M, Dv).
        window: positions visible, the current one included.
        scale: of the logits.
        sink: (H,) or None.
        reach: (..., N) or None: how many earlier positions belong to the query's document.
    """
    lead, (n, m) = q.shape[:-3], (q.shape[-2], k.shape[-2])
    rows = math.prod(lead)
    q, k, v = (t.reshape(rows, *t.shape[-3:]) for t in (q, k, v))
    known = None if reach is None else reach.expand(*lead, n).reshape(rows, n)
    aux = None if sink is None else AuxRequest(lse=True)
    mask = window_mask(n, m, window, known, q.device)
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
        counts[None, None],
        indices.to(torch.int32)[None, None],
        BLOCK_SIZE=TILE,
        mask_mod=visible,
        seq_lengths=(n, m),
    )
