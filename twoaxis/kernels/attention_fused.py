"""Attention through torch's fused kernels: the full prefix everywhere, and on GPUs whatever is masked by position.

FlexAttention compiles a mask into a fused kernel that visits only the tiles named by a block mask. Which tiles a window
needs is known without looking at a single pair of positions, so the block mask is written down directly:

    queries of tile r, 128 of them, see keys from  128 r + shift - (w-1)  to  128 r + shift + 127

The kernel keeps logits and softmax in float32 and multiplies in the dtype of its inputs, as the fused kernels for full
attention do. On a CPU the same mask runs without a kernel in the tests, against the definition. Its gradients are
torch's own and exist on GPUs only; neither they nor the time have been measured. Meta tensors whose kernels are a GPU's
take it as one operation, `twoaxis::window_attention`, with the products of the tiles that it visits.
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
from torch.utils.flop_counter import register_flop_formula

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
    fits = device_of(q) == "cuda" and q.dtype != torch.float64 and min(q.shape[-1], v.shape[-1]) >= NARROWEST
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
    rows, window = math.prod(lead), m if window is None else window
    q, k, v = (t.reshape(rows, *t.shape[-3:]) for t in (q, k, v))
    if q.is_meta:
        out, lse = _operation(q, k, v, window, scale)
    else:
        known = None if reach is None else reach.expand(*lead, n).reshape(rows, n)
        run: Any = flex_attention if torch.compiler.is_compiling() else _kernel()
        mask, aux = window_mask(n, m, window, known, q.device), None if sink is None else AuxRequest(lse=True)
        out = run(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1], return_aux=aux)
        out, lse = (out, None) if sink is None else (out[0], out[1].lse)
    if sink is not None:
        # a logit without a value takes its share of the weight: exp(lse) of exp(lse) + exp(sink)
        out = (out * torch.sigmoid(lse - sink[:, None]).unsqueeze(-1)).to(q.dtype)
    return out.reshape(*lead, *out.shape[1:]), ()


def window_mask(n: int, m: int, window: int, reach: Tensor | None, device: torch.device) -> BlockMask:
    """The block mask of n queries that are the last of m keys, in tiles of 128 x 128; `reach` is (rows, n)."""
    shift, across = m - n, -(-m // TILE)

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return in_sight(query + shift - key, window, None if reach is None else reach[row, query])

    first, count = _tiles(n, m, window, device)
    indices = (first[:, None] + torch.arange(across, device=device)).clamp_max(across - 1)
    counts, blocks = (count.to(torch.int32)[None, None], indices.to(torch.int32)[None, None])
    return BlockMask.from_kv_blocks(counts, blocks, BLOCK_SIZE=TILE, mask_mod=visible, seq_lengths=(n, m))


def _tiles(n: int, m: int, window: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """For each tile of queries its first tile of keys, and how many."""
    start = torch.arange(-(-n // TILE), device=device) * TILE + m - n
    first = (start - (window - 1)).clamp_min(0) // TILE
    return first, (start + TILE - 1).clamp_max(m - 1) // TILE - first + 1


# The kernel as one operation: it cannot be compiled on meta tensors, where it is counted for what it is.


@torch.library.custom_op("twoaxis::window_attention", mutates_args=())
def _operation(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> tuple[Tensor, Tensor]:
    """The output and the logarithm of each softmax's denominator."""
    raise NotImplementedError("twoaxis::window_attention is counted; what runs is the form flex of attention")


@_operation.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("twoaxis::window_attention_backward", mutates_args=())
def _operation_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError("twoaxis::window_attention is counted; what runs is the form flex of attention")


@_operation_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(t) for t in (q, k, v))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output)


def _of_operation(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return (*_operation_backward(grad, *ctx.saved_tensors, *ctx.options), None, None)


_operation.register_autograd(_of_operation, setup_context=_keep)


def _pairs(q: Sequence[int], k: Sequence[int], v: Sequence[int], window: int) -> int:
    """Multiply-adds of a forward pass, two for each channel of a query and a key of a tile that is visited."""
    visited = TILE**2 * int(_tiles(q[-2], k[-2], window, "cpu")[1].sum())
    return math.prod(q[:-2]) * visited * (q[-1] + v[-1])


@register_flop_formula(torch.ops.twoaxis.window_attention)
def _(q: Any, k: Any, v: Any, window: int, *_: Any, **__: Any) -> int:
    return 2 * _pairs(q, k, v, window)


@register_flop_formula(torch.ops.twoaxis.window_attention_backward)
def _(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, window: int, *_: Any, **__: Any) -> int:
    """Four products; the scores that it computes again are not charged."""
    return 4 * _pairs(q, k, v, window)
