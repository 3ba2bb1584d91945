"""Sinkhorn: matrices of logits to (nearly) doubly stochastic matrices, one per token.

    X_0 = exp(logits);  repeat: divide by the sums along one axis, then by the sums along the other

`sinkhorn_reference` is the readable form, plain differentiable torch on (..., N, N). The form that runs without a
compiler keeps the tokens in the last dimension, where all matrices are divided side by side, and its backward walks
the divisions in reverse:

    x = z / (Σ z + eps)      dz = (dx - Σ dx x) / (Σ z + eps)

It saves the logits alone; the iterates are made anew. A compiler meets this form as one operation of its own
(`twoaxis::sinkhorn`): the divisions of all sites written out would take it minutes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from twoaxis.kernels.backward import differentiated, readable, reference_gradients
from twoaxis.kernels.precision import full_precision, routing_dtype, widen


@full_precision
def sinkhorn_reference(logits: Tensor, iterations: int, eps: float, first: int) -> Tensor:
    """`sinkhorn` as one reads it; the first softmax is the exponential and the first division in one."""
    last = -3 - first  # the other of -1 and -2
    x = widen(logits)
    if eps == 0.0:
        # the first pair in the log domain: a sum over one axis cannot underflow to zero, and later ones stay above 1/N
        x = x.log_softmax(first).log_softmax(last).exp()
    else:
        x = x.softmax(first) + eps
        x = x / (x.sum(last, keepdim=True) + eps)
    for _ in range(iterations - 1):
        x = x / (x.sum(first, keepdim=True) + eps)
        x = x / (x.sum(last, keepdim=True) + eps)
    return x


@full_precision
def sinkhorn(logits: Tensor, *, iterations: int, eps: float = 0.0, first: int = -1) -> Tensor:
    """Alternately divide exp(logits) by its sums along two axes.

    Args:
        logits: (..., N, N).
        iterations: pairs of divisions.
        eps: added after the first softmax and to every later divisor; 0 is the plain iteration.
        first: the axis, -1 or -2, whose sums are divided by first; the sums along the other are one at the end.

    Returns:
        (..., N, N), non-negative, in float32 at least.
    """
    if first not in (-1, -2):
        raise ValueError(f"first must be the axis -1 or -2, got {first}")
    if torch.compiler.is_compiling():
        return _sinkhorn_op(logits, iterations, eps, first)
    if readable():
        return sinkhorn_reference(logits, iterations, eps, first)
    if not differentiated(logits):
        return _balanced(logits, iterations, eps, first)
    return _Sinkhorn.apply(logits, iterations, eps, first)  # type: ignore[no-any-return]


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, iterations: int, eps: float, first: int) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.options = iterations, eps, first
        return _balanced(logits, iterations, eps, first)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:  # type: ignore[override]
        (logits,), (iterations, eps, first) = ctx.saved_tensors, ctx.options
        if torch.is_grad_enabled():
            reference = partial(sinkhorn_reference, iterations=iterations, eps=eps, first=first)
            (found,) = reference_gradients(reference, (logits,), ctx.needs_input_grad[:1], (grad,))
            return found, None, None, None
        return _pulled(logits, grad, iterations, eps, first), None, None, None


def _balanced(logits: Tensor, iterations: int, eps: float, first: int) -> Tensor:
    """The last iterate alone, divided in place."""
    axes = _axes(first)
    _, (x, _) = _start(_tokens_last(widen(logits)), eps, axes)
    for n in range(2, 2 * iterations):
        divisor = x.sum(axes[n % 2], keepdim=True)
        x.div_(divisor.add_(eps) if eps else divisor)
    return _tokens_first(x, logits.shape)


def _pulled(logits: Tensor, grad: Tensor, iterations: int, eps: float, first: int) -> Tensor:
    """The gradient of the logits, from that of the last iterate."""
    axes = _axes(first)
    steps = _divided(_tokens_last(widen(logits)), iterations, eps, first)
    d = _tokens_last(grad)
    for n in range(len(steps) - 1, 1, -1):
        x, divisor = steps[n]
        d = (d - (d * x).sum(axes[n % 2], keepdim=True)).div_(divisor)
    (start, _), (x, divisor) = steps[0], steps[1]
    pull = (d * x).sum(axes[1], keepdim=True)
    if eps == 0.0:
        # `start` is a log-softmax and `x` the softmax of it along the other axis
        d = x * (d - pull)
        d = d - start.exp() * d.sum(axes[0], keepdim=True)
    else:
        d = (d - pull) / divisor
        d = start * (d - (d * start).sum(axes[0], keepdim=True))
    return _tokens_first(d, logits.shape).to(logits.dtype)


def _divided(x: Tensor, iterations: int, eps: float, first: int) -> list[tuple[Tensor, Tensor]]:
    """Every iterate of logits (N, N, tokens) and the divisor that led to it; the first two are the start."""
    axes = _axes(first)
    steps = _start(x, eps, axes)
    x = steps[-1][0]
    for n in range(2, 2 * iterations):
        divisor = x.sum(axes[n % 2], keepdim=True)
        divisor = divisor.add_(eps) if eps else divisor
        x = x / divisor
        steps.append((x, divisor))
    return steps


def _start(x: Tensor, eps: float, axes: tuple[int, int]) -> list[tuple[Tensor, Tensor]]:
    """The first pair of divisions of logits (N, N, tokens).

    Without epsilon the log-softmax along the first axis and the softmax of that along the second; with one the softmax
    before the epsilon and the division of it.
    """
    none = x.new_empty(())
    if eps == 0.0:
        start = x.log_softmax(axes[0])
        return [(start, none), (start.log_softmax(axes[1]).exp_(), none)]
    start = x.softmax(axes[0])
    x = start + eps
    divisor = x.sum(axes[1], keepdim=True).add_(eps)
    return [(start, none), (x / divisor, divisor)]


def _axes(first: int) -> tuple[int, int]:
    """The axes of (N, N, tokens) that are summed first and second."""
    return (1, 0) if first == -1 else (0, 1)


def _tokens_last(x: Tensor) -> Tensor:
    """(..., N, N) as contiguous (N, N, tokens)."""
    return x.reshape(-1, *x.shape[-2:]).permute(1, 2, 0).contiguous()


def _tokens_first(x: Tensor, shape: torch.Size) -> Tensor:
    return x.permute(2, 0, 1).reshape(shape)


# The operation that a compiler meets.


@torch.library.custom_op("twoaxis::sinkhorn", mutates_args=())
def _sinkhorn_op(logits: Tensor, iterations: int, eps: float, first: int) -> Tensor:
    return _balanced(logits, iterations, eps, first).contiguous()


@_sinkhorn_op.register_fake
def _(logits: Tensor, iterations: int, eps: float, first: int) -> Tensor:
    return logits.new_empty(logits.shape, dtype=routing_dtype(logits.dtype))


@torch.library.custom_op("twoaxis::sinkhorn_backward", mutates_args=())
def _sinkhorn_backward_op(logits: Tensor, grad: Tensor, iterations: int, eps: float, first: int) -> Tensor:
    return _pulled(logits, grad, iterations, eps, first).contiguous()


@_sinkhorn_backward_op.register_fake
def _(logits: Tensor, grad: Tensor, iterations: int, eps: float, first: int) -> Tensor:
    return logits.new_empty(logits.shape)


def _op_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logits, *ctx.options = inputs
    ctx.save_for_backward(logits)


def _op_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
    (logits,) = ctx.saved_tensors
    return _sinkhorn_backward_op(logits, grad, *ctx.options), None, None, None


_sinkhorn_op.register_autograd(_op_backward, setup_context=_op_setup)
