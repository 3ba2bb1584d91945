"""What hand-written backward passes share: when one is needed, when there is none, and the second derivative.

A fused operation saves its inputs and a few small numbers found on the way. Those numbers carry no history, so a
second derivative may not use them: where the backward pass is itself differentiated, it runs through the operation's
readable reference instead.

A backward pass runs in whatever mixed-precision region it is called in, not in that of its forward pass: where it has
matrix products it is marked `full_precision` too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from twoaxis.kernels.precision import full_precision


def readable() -> bool:
    """Whether the readable forms run: a compiler fuses them, `torch.func` differentiates and batches through them."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def differentiated(*tensors: Tensor | None) -> bool:
    """Whether autograd will ask for the gradient of an operation on `tensors`."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


@full_precision
def reference_gradients(
    reference: Callable[..., Tensor | tuple[Tensor, ...]],
    tensors: Sequence[Tensor | None],
    needs: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Differentiable gradients of `reference(*tensors)`.

    Args:
        reference: a function of the tensors in plain differentiable torch.
        tensors: its inputs, as saved by the forward pass.
        needs: which of them need a gradient.
        grads: the gradients of its outputs; None where an output was not used.
    """
    # every input gets a place of its own in the graph, also where one tensor is given twice
    own = [None if t is None else t.view_as(t) for t in tensors]
    with torch.enable_grad():
        found = reference(*own)
    outputs = found if isinstance(found, tuple) else (found,)
    used = [(out, g.to(out.dtype)) for out, g in zip(outputs, grads, strict=True) if g is not None]
    wanted = [t for t, need in zip(own, needs, strict=True) if need and t is not None]
    if not used or not wanted:
        return tuple(None for _ in own)
    outs, out_grads = zip(*used, strict=True)
    found_grads = iter(torch.autograd.grad(outs, wanted, out_grads, create_graph=True, allow_unused=True))
    return tuple(next(found_grads) if need and t is not None else None for t, need in zip(own, needs, strict=True))
