"""Sinkhorn: matrices of logits to (nearly) doubly stochastic matrices, one per token.

X_0 = exp(logits);  repeat: divide by the sums along one axis, then by the sums along the other

The eager form has the tokens in the last dimension, where all matrices are divided side by side; only the logits are
saved, and the backward makes the iterates anew. A compiler meets `twoaxis::sinkhorn`, one operation: the divisions of
all sites written out would take it minutes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twoaxis.kernels.operator import Given, Grads, operator
from twoaxis.kernels.precision import routing_dtype, widen


@operator
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


@sinkhorn.check
def _(logits: Tensor, *, iterations: int, eps: float = 0.0, first: int = -1) -> None:
    if first not in (-1, -2):
        raise ValueError(f"first must be the axis -1 or -2, got {first}")


@sinkhorn.form("eager")
def _balance(logits: Tensor, *, iterations: int, eps: float = 0.0, first: int = -1) -> tuple[Tensor, tuple[()]]:
    """The last iterate alone, divided in place."""
    x, axes = _start(_tokens_last(widen(logits)), eps, first)[1], _axes(first)
    for n in range(2, 2 * iterations):
        x.div_(_divisor(x, axes[n % 2], eps))
    return _tokens_first(x, logits.shape), ()


@sinkhorn.backward("eager")
def _balance_backward(
    inputs: Given, saved: Given, grads: Given, needs: Given, *, iterations: int, eps: float = 0.0, first: int = -1
) -> Grads:
    """With E = X ⊙ d_X, the gradient of log X, a division X = Z / (Σ Z + eps) hands back

        E_Z = E - X ⊙ Σ E                    since d log(Σ Z + eps) / d log Z = X

    The first softmax S of the logits L is such a division of exp(L), without epsilon. Where eps is added to it,

        d_S = E / (S + eps)        d_L = S ⊙ d_S - S ⊙ Σ (S ⊙ d_S)
    """
    (logits,), axes = inputs, _axes(first)
    steps = list(_start(_tokens_last(widen(logits)), eps, first))
    for n in range(2, 2 * iterations):
        steps.append(steps[-1] / _divisor(steps[-1], axes[n % 2], eps))
    along = _tokens_last(grads[0]) * steps[-1]
    for n in range(len(steps) - 1, 0, -1):
        along.addcmul_(steps[n], along.sum(axes[n % 2], keepdim=True), value=-1.0)
    start = steps[0]
    if eps:
        along = along.div_(start + eps).mul_(start)
    along.addcmul_(start, along.sum(axes[0], keepdim=True), value=-1.0)
    return (_tokens_first(along, logits.shape),)


def _start(x: Tensor, eps: float, first: int) -> tuple[Tensor, Tensor]:
    """The softmax of logits (N, N, tokens) along the first axis, and the first pair of divisions."""
    axes = _axes(first)
    if eps == 0.0:
        logs = x.log_softmax(axes[0])
        return logs.exp(), logs.log_softmax(axes[1]).exp_()
    start = x.softmax(axes[0])
    x = start + eps
    return start, x / _divisor(x, axes[1], eps)


def _divisor(x: Tensor, axis: int, eps: float) -> Tensor:
    total = x.sum(axis, keepdim=True)
    return total.add_(eps) if eps else total


def _axes(first: int) -> tuple[int, int]:
    """The axes of (N, N, tokens) that are summed first and second."""
    return (1, 0) if first == -1 else (0, 1)


def _tokens_last(x: Tensor) -> Tensor:
    """(..., N, N) as contiguous (N, N, tokens)."""
    return x.flatten(0, -3).permute(1, 2, 0).contiguous() if x.dim() > 2 else x.unsqueeze(-1)


def _tokens_first(x: Tensor, shape: torch.Size) -> Tensor:
    return x.permute(2, 0, 1).reshape(shape)


# The operation that a compiler meets.


@sinkhorn.form("operation", compiled=True)
def _operate(logits: Tensor, *, iterations: int, eps: float = 0.0, first: int = -1) -> tuple[Tensor, tuple[()]]:
    return _operation(logits, iterations, eps, first), ()


@torch.library.custom_op("twoaxis::sinkhorn", mutates_args=())
def _operation(logits: Tensor, iterations: int, eps: float, first: int) -> Tensor:
    return _balance(logits, iterations=iterations, eps=eps, first=first)[0].contiguous()


@_operation.register_fake
def _(logits: Tensor, iterations: int, eps: float, first: int) -> Tensor:
    return logits.new_empty(logits.shape, dtype=routing_dtype(logits.dtype))


@torch.library.custom_op("twoaxis::sinkhorn_backward", mutates_args=())
def _operation_backward(logits: Tensor, grad: Tensor, iterations: int, eps: float, first: int) -> Tensor:
    (found,) = _balance_backward((logits,), (), (grad,), (True,), iterations=iterations, eps=eps, first=first)
    return found.to(logits.dtype).contiguous()


@_operation_backward.register_fake
def _(logits: Tensor, grad: Tensor, iterations: int, eps: float, first: int) -> Tensor:
    return logits.new_empty(logits.shape)


def _keep_logits(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logits, *ctx.options = inputs
    ctx.save_for_backward(logits)


def _of_operation(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
    (logits,) = ctx.saved_tensors
    return _operation_backward(logits, grad, *ctx.options), None, None, None


_operation.register_autograd(_of_operation, setup_context=_keep_logits)
