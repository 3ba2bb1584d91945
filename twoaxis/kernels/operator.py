"""Operators: a readable reference, any number of faster forms, and one place that chooses between them.

    @operator                                                # the reference: plain torch, differentiable, any dtype
    def scaled(x, weight, *, eps): ...                       # tensors or lists of tensors, then * and options

    @scaled.form("eager", serves=lambda x, weight, *, eps: x.numel() > 0)
    def _(x, weight, *, eps): return out, (small, None)      # the outputs, and what the backward needs besides inputs

    @scaled.backward("eager")
    def _(inputs, saved, grads, needs, *, eps): ...          # a gradient for each input, shaped like `inputs`

Calling the operator runs a form that serves the inputs and pays there, the last registered one of these, and the
reference where there is none. `serves` says what a form can do and `pays` where it is the faster choice; both get what
the form gets. A form that was asked for by its name need not pay. A form without a backward serves where no gradient is
asked for, unless it is registered with `differentiable=True`: plain torch, whose gradient is torch's own.

The reference alone runs under `torch.func` transforms and in forward mode, which take no hand-written backward. Under a
compiler the reference runs too, or a form that can be traced and says so: `compiled=True` is for compilers alone (and
differentiable by torch if it has no backward), `compiled=None` for both. The backward of a form is never
differentiated: where a second derivative or a batch of gradients is asked for, the gradients are those of the
reference.

In a backward, `grads` holds a gradient for each output, None where an output was not used (not all are None); `needs`
says which inputs want a gradient, shaped like `inputs`; what it returns is cast to the dtype of the inputs. It must use
what it is given alone: autograd then notices a saved tensor that was changed in place. Both passes run with autocast
off and in full float32.

Forms in calls of PyTorch, for every device, stand below their reference in NAME.py; those of attention have files of
their own. To add forms, say for a GPU, write NAME_triton.py and import it in this package's __init__: they are then
tried first. `TWOAXIS_KERNELS` in the environment, or `using` in a program, restricts the choice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import update_wrapper
from inspect import signature
from itertools import chain
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from twoaxis.kernels.precision import full_precision

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

Given = Sequence[Any]
"""What a backward gets of its inputs, of what was saved, of the outputs' gradients, and of which inputs want one."""
Grads = tuple[Any, ...]
"""What it returns."""

OPERATORS: dict[str, Operator[..., Any]] = {}
"""Every operator by its name."""

_choice = os.environ.get("TWOAXIS_KERNELS", "auto")


@contextmanager
def using(name: str) -> Iterator[None]:
    """Run the forms called `name` where they serve, the reference elsewhere; `auto` chooses, `reference` is none.

    The choice holds for the whole process: a backward pass that recomputes a block does so in another thread.
    """
    global _choice
    before, _choice = _choice, _known(name)
    try:
        yield
    finally:
        _choice = before


def _known(name: str) -> str:
    names = {"auto", "reference"}.union(*(op.forms for op in OPERATORS.values()))
    if name not in names:
        raise ValueError(f"TWOAXIS_KERNELS={name!r} names no form: choose from {', '.join(sorted(names))}")
    return name


@dataclass
class Form:
    """One way to compute an operator; the module's docstring says what each field means."""

    forward: Callable[..., Any]
    serves: Callable[..., bool] | None = None
    pays: Callable[..., bool] | None = None
    compiled: bool | None = False
    differentiable: bool = False
    backward: Callable[..., Any] | None = None


class Operator(Generic[P, R]):
    """A function of tensors with several forms; the module's docstring says which of them runs."""

    def __init__(self, reference: Callable[P, R]) -> None:
        update_wrapper(self, reference)
        parameters = signature(reference).parameters.values()
        self.inputs = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        self.reference = full_precision(reference)
        self.forms: dict[str, Form] = {}
        self.checked: Callable[P, None] | None = None
        OPERATORS[reference.__name__] = self

    def form(self, name: str, **when: Any) -> Callable[[F], F]:
        """Register the decorated forward: it returns the outputs and what to save; `when` are fields of `Form`."""

        def register(forward: F) -> F:
            self.forms = {name: Form(forward, **when)} | self.forms
            return forward

        return register

    def unchanged(self, *inputs: P.args, **options: P.kwargs) -> tuple[R, tuple[()]]:
        """The reference as the forward of a form: it saves nothing."""
        return self.reference(*inputs, **options), ()

    def backward(self, name: str) -> Callable[[F], F]:
        """Register the decorated backward of the form `name`, whose forward is the reference where none was given."""

        def register(backward: F) -> F:
            if name not in self.forms:
                self.form(name)(self.unchanged)
            self.forms[name].backward = backward
            return backward

        return register

    def check(self, check: Callable[P, None]) -> Callable[P, None]:
        """Register a function that raises ValueError on arguments that do not fit each other."""
        self.checked = check
        return check

    def __call__(self, *inputs: P.args, **options: P.kwargs) -> R:
        """Run the form that the inputs, the device and the mode ask for."""
        if missing := self.inputs[len(inputs) :]:
            inputs = (*inputs, *(options.pop(name, None) for name in missing))  # type: ignore[assignment]
        if self.checked is not None:
            self.checked(*inputs, **options)
        return self._run(inputs, options)

    @full_precision
    def _run(self, inputs: tuple[Any, ...], options: dict[str, Any]) -> R:
        compiled = torch.compiler.is_compiling()
        if not compiled and (torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0):
            return self.reference(*inputs, **options)
        flat, sizes = _flatten(inputs)
        differentiated = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in flat)
        chosen = _choice if _choice in ("auto", "reference") else _known(_choice)
        for name, form in self.forms.items():
            if (
                form.compiled in (compiled, None)
                and chosen in ("auto", name)
                and (form.backward is not None or form.differentiable or form.compiled is True or not differentiated)
                and (form.serves is None or form.serves(*inputs, **options))
                and (form.pays is None or chosen == name or form.pays(*inputs, **options))
            ):
                if not differentiated or form.backward is None:
                    return form.forward(*inputs, **options)[0]
                return _Apply.apply(self, form, sizes, options, *flat)  # type: ignore[no-any-return]
        return self.reference(*inputs, **options)


def operator(reference: Callable[P, R]) -> Operator[P, R]:
    """Make the decorated reference implementation an operator."""
    return Operator(reference)


class _Apply(torch.autograd.Function):
    """A form with its backward. Inputs are saved by reference, as second derivatives need them all."""

    @staticmethod
    def forward(ctx: Any, op: Any, form: Form, sizes: Any, options: dict[str, Any], *flat: Tensor | None) -> Any:
        outputs, saved = form.forward(*_nest(flat, sizes), **options)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*flat, *saved)
        ctx.call = op, form, sizes, options
        return outputs

    @staticmethod
    @full_precision
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        op, form, sizes, options = ctx.call
        needs = ctx.needs_input_grad[4:]
        saved = ctx.saved_tensors  # once: recomputed blocks give them out a single time
        flat, saved = saved[: len(needs)], saved[len(needs) :]
        if all(g is None for g in grads):
            found: Sequence[Tensor | None] = (None,) * len(needs)
        elif _needs_reference(grads):
            found = reference_gradients(lambda *own: op.reference(*_nest(own, sizes), **options), flat, needs, grads)
        else:
            found, _ = _flatten(form.backward(_nest(flat, sizes), saved, grads, _nest(needs, sizes), **options))
        return (None,) * 4 + tuple(
            None if g is None or t is None or not need else g if g.dtype == t.dtype else g.to(t.dtype)
            for g, t, need in zip(found, flat, needs, strict=True)
        )


def _needs_reference(grads: Sequence[Tensor | None]) -> bool:
    """Whether a backward is itself differentiated or batched; a compiler that traces it may do neither."""
    if torch.compiler.is_compiling():
        return False
    if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return True
    # `is_grads_batched` uses the older vmap, which is no transform of torch.func
    return any(g is not None and torch._C._functorch.is_legacy_batchedtensor(g) for g in grads)  # pyright: ignore[reportAttributeAccessIssue]


def reference_gradients(
    reference: Callable[..., Any], tensors: Sequence[Tensor | None], needs: Sequence[bool], grads: Given
) -> Sequence[Tensor | None]:
    """Grads of `reference(*tensors)`, differentiable where the pass that asks for them is."""
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():  # in a batched pass gradients are off, and views made so would be cut off from the inputs
        # every input gets a node of its own in the graph, also where one tensor is given twice
        own = [None if t is None else t.view_as(t) for t in tensors]
        outputs = reference(*own)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    # an input that is handed on needs no gradient where the form's output, one of several, does
    given = [(out, g) for out, g in zip(outputs, grads, strict=True) if g is not None and out.requires_grad]
    wanted = [t for t, need in zip(own, needs, strict=True) if need and t is not None]
    if not given:
        return [None for _ in needs]
    outs, out_grads = [out for out, _ in given], [g.to(out.dtype) for out, g in given]
    found = iter(torch.autograd.grad(outs, wanted, out_grads, create_graph=differentiable, allow_unused=True))
    return [next(found) if need else None for need in needs]


def _flatten(inputs: Sequence[Any]) -> tuple[Sequence[Any], tuple[int, ...] | None]:
    """The inputs without nesting, and how long each list was, -1 for one tensor; None where there are no lists."""
    if not any(isinstance(value, list | tuple) for value in inputs):
        return inputs, None
    sizes = tuple(len(value) if isinstance(value, list | tuple) else -1 for value in inputs)
    return list(chain.from_iterable(v if n >= 0 else (v,) for v, n in zip(inputs, sizes, strict=True))), sizes


def _nest(flat: Sequence[Any], sizes: tuple[int, ...] | None) -> Sequence[Any]:
    """The reverse of `_flatten`."""
    if sizes is None:
        return flat
    values = iter(flat)
    return [next(values) if n < 0 else [next(values) for _ in range(n)] for n in sizes]
