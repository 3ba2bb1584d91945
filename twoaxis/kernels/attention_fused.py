"""Attention over the full prefix through torch's fused kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.kernels.attention import attention, unmasked
from twoaxis.kernels.dispatch import device_of
from twoaxis.kernels.operator import Given, Grads
from twoaxis.kernels.precision import widen


def _on_a_cpu(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> bool:
    """Shapes without numbers (device meta) go here too: every device has a fused kernel, and torch spells it out."""
    return q.device.type in ("cpu", "meta") and q.shape[-1] == v.shape[-1] and unmasked(q, k, v, *rest, **options)


@attention.form("flash", serves=_on_a_cpu)
def _flash(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, sink: Any, reach: Any, *, window: None, scale: float
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Saves the output and the logarithm of each softmax's denominator."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *_rows((q, k, v)), 0.0, q.shape[-2] > 1, scale=scale
    )
    return out.view(*q.shape[:-1], v.shape[-1]).to(q.dtype), (out, lse)


@attention.backward("flash")
def _flash_backward(inputs: Given, saved: Given, grads: Given, needs: Given, *, window: None, scale: float) -> Grads:
    """The kernel's own: with m_i = <g_i, out_i>,  d_v = wᵀ g,  d_logits = w (g vᵀ - m),  d_q and d_k from these."""
    (out, lse), tensors = saved, inputs[:3]
    (grad,) = _rows(grads)
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, *_rows(tensors), out, lse, 0.0, out.shape[-2] > 1, scale=scale
    )
    return (*(d.view(t.shape) for d, t in zip(found, tensors, strict=True)), None, None, None)


@attention.form("sdpa", serves=unmasked, compiled=None, differentiable=True)
def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, sink: Any, reach: Any, *, window: None, scale: float
) -> tuple[Tensor, tuple[()]]:
    rows, grouped = _rows((q, k, v)), q.shape[-3] != k.shape[-3]
    causal = q.shape[-2] > 1
    out = F.scaled_dot_product_attention(rows[0], rows[1], rows[2], is_causal=causal, scale=scale, enable_gqa=grouped)
    return out.reshape(*q.shape[:-1], v.shape[-1]).to(q.dtype), ()


def _rows(tensors: Sequence[Tensor]) -> list[Tensor]:
    """(rows, H, N, D) each; wide on a CPU, where narrow types have no fast units and wide is exact and faster."""
    wide = device_of(tensors[0]) == "cpu"
    rows = [(widen(t) if wide else t).reshape(math.prod(t.shape[:-3]), *t.shape[-3:]) for t in tensors]
    return [t if t.stride(-1) == 1 else t.contiguous() for t in rows]  # what the kernels take
