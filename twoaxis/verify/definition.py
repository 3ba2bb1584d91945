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
from types import FrameType
from typing import Any

from twoaxis.depth.stream import Stream
from twoaxis.sequence.mixer import LocalOperator
from twoaxis.verify.claim import claim, disagreement
from twoaxis.verify.subject import Run, runs

PERTURB = 0.3
BOUND = 1e-10
NONE_GIVEN = "none given"
"""What the row of a method without a definition says."""
KERNELS = ("twoaxis.kernels", "twoaxis.window", "twoaxis.ring", "twoaxis.sequence.rope")
"""Where no part of a definition stands."""


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
    if not given(cls := type(run.method)):
        return NONE_GIVEN
    with watching(cls) as used:
        run.definition(run.input())
    return [f"the definition uses {name}" for name in used]


@contextlib.contextmanager
def watching(cls: type[Any]) -> Iterator[dict[str, None]]:
    """Context manager: yields the names of functions, as they are called, that a definition must not use.

    These are kernels, rings and the class's own but `definition` and what it is made of. Helpers that a definition of
    the library may use begin with `_defined`; somebody's own may use any of their helpers, but nothing of the contract.
    """
    root = LocalOperator if issubclass(cls, LocalOperator) else Stream
    strict, used, refused = cls.__module__.startswith("twoaxis."), {}, {}
    for base in cls.__mro__[: cls.__mro__.index(root) + 1]:
        for name, value in vars(base).items():
            allowed = name in ("definition", "sites", "sites_of") or name.startswith(("_defined", "__"))
            allowed |= not strict and not hasattr(root, name)
            function: Any = inspect.unwrap(getattr(value, "fget", value))
            if not allowed and inspect.isfunction(function):
                refused[function.__code__] = name

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and (frame.f_code in refused or str(frame.f_globals.get("__name__")).startswith(KERNELS)):
            used[refused.get(frame.f_code, frame.f_code.co_name)] = None

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield used
    finally:
        sys.setprofile(before)
