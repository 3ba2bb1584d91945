"""Everything that is claimed about a method, or about all of them.

check(MyStream)      every claim on one class, registered or not
verify()             theorems, and the claims that say most, on every registered method
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from twoaxis.verify import contract, costs, definition, depth, gradients, start, theorems, time
from twoaxis.verify.claim import CLAIMS, Claim, Report, Result, choose, measure
from twoaxis.verify.subject import SUBJECTS, find, registered, subjects

MODULES = (contract, definition, gradients, time, depth, start, costs, theorems)
"""Where the claims are."""

FAMILIES = (
    *("contract", "definition", "gradients", "time", "depth", "start", "neutral", "blend", "costs"),
    *("duality", "algebra", "reduction", "orders"),
)
"""Families of claims in the order of a report."""

VERIFIED = ("duality", "algebra", "reduction", "orders", "definition", "neutral", "blend", "time")
"""What `verify` measures unless told."""


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
    with registered(method) as kind:
        chosen = choose(claims(kind.axis), only)
        if compile and not only:
            chosen.append(CLAIMS[contract.COMPILE])
        if not chosen[0].first:  # what the others build on is measured, and shown where it fails
            chosen.insert(0, claims(kind.axis)[0])
        name = method if isinstance(method, str) else method.__name__
        results = tuple(measure(chosen, subjects(find(method)[1], variants, seed), name))
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
