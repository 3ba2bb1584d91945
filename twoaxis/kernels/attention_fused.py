"""Attention through torch's fused kernels: the full prefix everywhere, and on GPUs whatever is masked by position.

FlexAttention compiles a mask into a fused kernel that visits only the tiles named by a block mask. Which tiles a window
needs is known without looking at a single pair of positions, so the block mask is written down directly:

    queries of tile r, 128 of them, see keys from  128 r + shift - (w-1)  to  128 r + shift + 127

The kernel keeps logits and softmax in float32 and multiplies in the dtype of its inputs, as the fused kernels for full
attention do. On a CPU the same mask runs without a kernel in the tests, against the definition. Its gradients are
torch's own and exist on GPUs only; neither they nor the time have been measured.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from twoaxis.kernels.attention import attention, in_sight
from twoaxis.kernels.dispatch import device_of
from twoaxis.kernels.operator import Given, Grads
from twoaxis.kernels.precision import widen

TILE = 128
"""Queries and keys of a tile of a block mask."""
NARROWEST = 16
"""Heads that are narrower have no kernel."""


def _unmasked(q: Tensor, k: Tensor, v: Tensor, *masks: Any, window: int | None, scale: float) -> bool:
    """Whether this is attention over the full prefix, which fused kernels know: every query, or the last alone."""
    plain = window is None and all(mask is None for mask in masks)
    return plain and scale > 0.0 and q.shape[-2] > 0 and q.shape[-2] in (1, k.shape[-2])


def _rows(tensors: Sequence[Tensor]) -> list[Tensor]:
    """(rows, H, N, D) each; wide on a CPU, where narrow types have no fast units and wide is exact and faster."""
    wide = device_of(tensors[0]) == "cpu"
    rows = [(widen(t) if wide else t).reshape(math.prod(t.shape[:-3]), *t.shape[-3:]) for t in tensors]
    return [t if t.stride(-1) == 1 else t.contiguous() for t in rows]  # what the kernels take


@attention.form("sdpa", serves=_unmasked, compiled=None, differentiable=True)
def _sdpa(q: Tensor, k: Tensor, v: Tensor, *_: None, window: None, scale: float) -> tuple[Tensor, tuple[()]]:
    (a, b, c), grouped = _rows((q, k, v)), q.shape[-3] != k.shape[-3]
    out = F.scaled_dot_product_attention(a, b, c, is_causal=q.shape[-2] > 1, scale=scale, enable_gqa=grouped)
    return out.reshape(*q.shape[:-1], v.shape[-1]).to(q.dtype), ()


def _on_a_cpu(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> bool:
    """Meta tensors go here too: every device has a fused kernel, and torch spells it out."""
    return q.device.type in ("cpu", "meta") and q.shape[-1] == v.shape[-1] and _unmasked(q, k, v, *rest, **options)


@attention.form("flash", serves=_on_a_cpu)
def _flash(
    q: Tensor, k: Tensor, v: Tensor, *_: None, window: None, scale: float
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Saves the output and the logarithm of each softmax's denominator."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(*_rows((q, k, v)), 0.0, q.shape[-2] > 1, scale=scale)
    return out.view(*q.shape[:-1], v.shape[-1]).to(q.dtype), (out, lse)


@attention.backward("flash")
def _flash_backward(inputs: Given, saved: Given, grads: Given, needs: Given, *, window: None, scale: float) -> Grads:
    """The kernel's own: with m_i = <g_i, out_i>,  d_v = wᵀ g,  d_logits = w (g vᵀ - m),  d_q and d_k from these."""
    (out, lse), tensors = saved, inputs[:3]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    found = kernel(*_rows((grads[0], *tensors)), out, lse, 0.0, out.shape[-2] > 1, scale=scale)
    return (*(d.view(t.shape) for d, t in zip(found, tensors, strict=True)), None, None, None)


def _on_a_gpu(q: Tensor, k: Tensor, v: Tensor, bias: Any, *rest: Any, **options: Any) -> bool:
    """On a CUDA device, masked, not float64, heads wide enough."""
    fits = q.device.type == "cuda" and q.dtype != torch.float64 and min(q.shape[-1], v.shape[-1]) >= NARROWEST
    return fits and bias is None and not _unmasked(q, k, v, bias, *rest, **options)


def _pays(q: Tensor, *_: Any, **__: Any) -> bool:
    """A tile of queries at least: decoding has fewer."""
    return q.shape[-2] >= TILE


@functools.cache
def _kernel() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)


@attention.form("flex", serves=_on_a_gpu, pays=_pays, compiled=None, differentiable=True)
def _flex(
    q: Tensor, k: Tensor, v: Tensor, bias: None, sink: Any, reach: Any, *, window: int | None, scale: float
) -> tuple[Tensor, tuple[()]]:
    lead, (n, m) = q.shape[:-3], (q.shape[-2], k.shape[-2])
    rows = math.prod(lead)
    q, k, v = (t.reshape(rows, *t.shape[-3:]) for t in (q, k, v))
    known = None if reach is None else reach.expand(*lead, n).reshape(rows, n)
    aux = None if sink is None else AuxRequest(lse=True)
    mask = window_mask(n, m, m if window is None else window, known, q.device)
    run: Any = flex_attention if torch.compiler.is_compiling() else _kernel()
    out = run(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1], return_aux=aux)
    if sink is not None:
        out, found = out
        # a logit without a value takes its share of the weight: exp(lse) of exp(lse) + exp(sink)
        out = (out * torch.sigmoid(found.lse - sink[:, None]).unsqueeze(-1)).to(q.dtype)
    return out.reshape(*lead, *out.shape[1:]), ()


def window_mask(n: int, m: int, window: int, reach: Tensor | None, device: torch.device) -> BlockMask:
    """The block mask of n queries that are the last of m keys, in tiles of 128 x 128; `reach` is (rows, n)."""
    shift = m - n

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return in_sight(query + shift - key, window, None if reach is None else reach[row, query])

    tiles = torch.arange(-(-n // TILE), device=device)
    first = (tiles * TILE + shift - (window - 1)).clamp_min(0) // TILE
    last = ((tiles + 1) * TILE - 1 + shift).clamp_max(m - 1) // TILE
    across = -(-m // TILE)
    indices = (first[:, None] + torch.arange(across, device=device)).clamp_max(across - 1)
    counts, blocks = ((last - first + 1).to(torch.int32)[None, None], indices.to(torch.int32)[None, None])
    return BlockMask.from_kv_blocks(counts, blocks, BLOCK_SIZE=TILE, mask_mod=visible, seq_lengths=(n, m))
