"""A method equals its definition: the fast form against the paper written with plain lists of tensors.

    ours   = run(x)              reads, writes, kernels and their backward passes
    theirs = run.definition(x)   the equations, differentiated by autograd

Values are compared, and the gradients of a random cotangent in the input and in every parameter. Parameters are moved
far off their initial values first, because a gate of zero hides whatever stands behind it.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from twoaxis.depth.stream import Stream
from twoaxis.sequence.mixer import LocalOperator
from twoaxis.verify.claim import claim, disagreement
from twoaxis.verify.subject import Run, runs

PERTURB = 0.3
BOUND = 1e-10
NONE_GIVEN = "none given"
"""What the row of a method without a definition says."""


def given(cls: type[Any]) -> bool:
    """Whether a class has a definition."""
    return cls.definition is not (LocalOperator if issubclass(cls, LocalOperator) else Stream).definition


def from_definition(run: Run) -> float:
    """How far a run is from its definition."""
    x = run.input(grad=True)
    return disagreement(run(x), run.definition(x), run.leaves(x), run.seed)


@claim("definition", "definition: values and every gradient", over=runs(perturb=PERTURB, width=8), bound=BOUND)
def equals_definition(run: Run) -> float | str:
    """The method equals its definition everywhere: values, and the gradients of input and parameters."""
    return from_definition(run) if given(type(run.method)) else NONE_GIVEN


@claim("definition", "definition: independent of the fast form", over=runs(layouts="one"))
def independent(run: Run) -> list[str] | str:
    """The definition uses neither kernels nor what it is compared with, so that a fault cannot be in both."""
    cls, x = type(run.method), run.input()
    if not given(cls):
        return NONE_GIVEN
    with alone(cls) as used, contextlib.suppress(UsedError):
        run.definition(x)
    return [f"the definition uses {name}" for name in used]


class UsedError(Exception):
    """Raised by what a definition must not use."""


@contextlib.contextmanager
def alone(cls: type[Any]) -> Iterator[list[str]]:
    """Context manager: kernels, rings and methods of the class raise, but `definition` and what it is made of.

    Helpers that a definition of the library may use begin with `_defined`; somebody's own may use any of their
    helpers, but nothing of the contract. Yields the names that were used.
    """
    used: list[str] = []
    kernels = ("twoaxis.kernels", "twoaxis.window", "twoaxis.ring", "twoaxis.sequence.rope")

    def refuse(name: str) -> Any:
        def raising(*_: Any, **__: Any) -> Any:
            used.append(name)
            raise UsedError(name)

        return raising

    with contextlib.ExitStack() as stack:
        rooms = [m for name, m in sys.modules.items() if name.startswith(("twoaxis.depth.", "twoaxis.sequence."))]
        for module in {id(m): m for m in (*rooms, sys.modules[cls.__module__])}.values():
            for name, value in list(vars(module).items()):
                if callable(value) and str(getattr(value, "__module__", "")).startswith(kernels):
                    stack.enter_context(mock.patch.object(module, name, refuse(name)))
        root = LocalOperator if issubclass(cls, LocalOperator) else Stream
        strict = cls.__module__.startswith("twoaxis.")
        for base in cls.__mro__[: cls.__mro__.index(root) + 1]:
            for name, value in list(vars(base).items()):
                allowed = name in ("definition", "sites", "sites_of") or name.startswith(("_defined", "__"))
                allowed |= not strict and not hasattr(root, name)
                if not allowed and (inspect.isfunction(value) or isinstance(value, property)):
                    refused = refuse(name)
                    patched = property(refused) if isinstance(value, property) else refused
                    stack.enter_context(mock.patch.object(base, name, patched))
        yield used
