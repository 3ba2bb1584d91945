"""Everything that is claimed about a method, or about all of them.

check(MyStream)       every claim on one class, registered or not
check_file("my.py")   the same on every stream and mixer that a file defines
verify()              theorems, and the claims that say most, on every registered method
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from twoaxis.depth.stream import Stream
from twoaxis.sequence.mixer import LocalOperator
from twoaxis.verify import contract, costs, definition, depth, gradients, start, theorems, time
from twoaxis.verify.claim import CLAIMS, Claim, Report, Result, choose, measure, raised
from twoaxis.verify.subject import SUBJECTS, registered, registries_restored, subjects

MODULES = (contract, definition, gradients, time, depth, start, costs, theorems)
"""Where the claims are."""

FAMILIES = (
    *("contract", "definition", "gradients", "time", "depth", "start", "neutral", "blend", "costs"),
    *("duality", "algebra", "reduction", "orders"),
)
"""Families of claims in the order of a report."""

VERIFIED = ("duality", "algebra", "reduction", "orders", "definition", "neutral", "blend", "time")
"""What `verify` measures unless others are named."""


def claims(axis: str | None = None) -> list[Claim]:
    """Every claim about methods along an axis, or about methods at all and theorems."""
    found = [each for each in CLAIMS.values() if axis is None or axis in each.axes]
    return sorted(found, key=lambda each: (not each.first, FAMILIES.index(each.family)))


def check(
    method: type[Any] | str,
    variants: Sequence[Mapping[str, Any]] | None = None,
    *,
    seed: int = 0,
    compile: bool = False,
    only: Sequence[str] = (),
) -> Report:
    """Measure everything that is claimed about a stream or a mixer, over its variants.

    Args:
        method: a subclass of `Stream` or `LocalOperator`, registered or not, or a registered name.
        variants: options to check it with; None is the class's own `variants`.
        seed: of parameters, inputs and sub-layers.
        compile: also compile it with `fullgraph=True` and compare outputs and gradients; slow.
        only: names or families of claims; none named is all of them.
    """
    with registered(method) as (kind, known):
        chosen = choose(claims(kind.axis), only)
        if compile and not only:
            chosen.append(CLAIMS[contract.COMPILE])
        if not chosen[0].first:  # what the others build on is measured, and shown where it fails
            chosen.insert(0, claims(kind.axis)[0])
        name = method if isinstance(method, str) else method.__name__
        results = tuple(measure(chosen, subjects(known, variants, seed), name))
    waiting = tuple(each.name for each in chosen[len(results) :])
    if only and results[0].holds and not {results[0].name, results[0].family} & set(only):
        results = results[1:]
    return Report(name, results, seed, waiting=waiting)


def planned(seed: int = 0, only: Sequence[str] = ()) -> list[tuple[str, Callable[[], list[Result]]]]:
    """What `verify` measures: labels, and functions that measure."""
    plan: list[tuple[str, Callable[[], list[Result]]]] = []
    order = (*VERIFIED, *FAMILIES)
    for each in sorted(choose(claims(), only or VERIFIED), key=lambda each: order.index(each.family)):
        if not each.axes:
            plan.append((each.name, lambda each=each: list(measure([each], [seed]))))
        for name in (name for kind in SUBJECTS if kind.axis in each.axes for name in kind.registry.names()):
            variants = subjects(name, seed=seed)
            plan.append((f"{name}: {each.name}", lambda each=each, v=variants, n=name: list(measure([each], v, n))))
    return plan


def verify(seed: int = 0, only: Sequence[str] = ()) -> Iterator[Result]:
    """Measure theorems, and claims about every registered method, one after the other.

    Args:
        seed: of the random instances.
        only: names or families of claims; none named is what says most about a method.
    """
    for _, measured in planned(seed, only):
        yield from measured()


# Files.


def check_file(path: str | Path, *, compile: bool = False, seed: int = 0, only: Sequence[str] = ()) -> list[Report]:
    """Import a Python file and check every `Stream` and `LocalOperator` that it defines, in the order of the file.

    The file is run, like any import: check only files you trust. What it registers is forgotten again afterwards.

    Args:
        path: the file.
        compile: also compile each subject with `fullgraph=True`; slow.
        seed: of parameters, inputs and sub-layers.
        only: names or families of claims; none named is all of them.

    Raises:
        ValueError: there is no such file, it cannot be imported, or it defines neither a stream nor a mixer.
    """
    with registries_restored(), imported(Path(path)) as module:
        methods = defined_in(module)
        if not methods:
            raise ValueError(f"{path} defines no subclass of twoaxis.Stream or of twoaxis.LocalOperator")
        return [check(method, seed=seed, compile=compile, only=only) for method in methods]


@contextmanager
def imported(path: Path) -> Iterator[ModuleType]:
    """Context manager: the file as a module, under a name of its own; an error of the file is shown with its line."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    if path.suffix != ".py":
        raise ValueError(f"{path} is no Python file: its name does not end in .py")
    name = f"twoaxis_checked_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up by name
    try:
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise ValueError(f"{path} cannot be imported: {raised(error)}") from error
        yield module
    finally:
        sys.modules.pop(name, None)


def defined_in(module: ModuleType) -> list[type[Any]]:
    """The streams and mixers a module defines itself; a class that others in it build on is theirs, not a method."""
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Stream | LocalOperator) and value.__module__ == module.__name__
    ]
    unique = list(dict.fromkeys(found))
    bases = {base for cls in unique for base in cls.__mro__[1:]}
    return [cls for cls in unique if hasattr(cls, "Config") or cls not in bases]
