"""A claim is a named function that measures one property; what it measured is a `Result`, and a `Report` shows them.

    @claim("gradients", "gradients: finite differences")
    def finite_differences(subject: Subject) -> Result: ...

    measure([claims], [subjects])  ─►  one Result per claim, the worst over the subjects  ─►  Report

`twoaxis check`, `twoaxis verify` and the tests run the same claims. A claim raises nothing: an exception of what it
measures is a failure that names it.
"""

from __future__ import annotations

import functools
import math
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from twoaxis.base.registry import did_you_mean
from twoaxis.show import numbers
from twoaxis.show.document import Block, Cell, Column, Document, Heading, Items, Prose, Showable, table

F = TypeVar("F", bound=Callable[..., Any])
Axis = Literal["depth", "sequence"]


class Result(NamedTuple):
    """What a claim measured: on one variant of a method, or the worst over all of them."""

    error: float  # the number it is about: a deviation, a count of faults, a ratio or an exponent
    bound: float = 0.0  # what it may be at most; 0 claims equality to the last bit, or no fault at all
    detail: str = ""  # what is wrong, and with which options; or why there is nothing to measure
    instances: int = 1  # how many random instances were measured; 0 where the claim does not apply
    family: str = ""  # of the claim
    name: str = ""  # of the claim
    subject: str = ""  # the method; empty for a theorem

    @property
    def holds(self) -> bool:
        """Whether the error is a number within its bound."""
        return math.isfinite(self.error) and self.error <= self.bound

    @property
    def severity(self) -> tuple[bool, float]:
        """Orders results by how bad they are."""
        error = math.inf if math.isnan(self.error) else self.error
        return not self.holds, error / self.bound if self.bound else error


@dataclass(frozen=True)
class Claim:
    """A property and the function that measures it."""

    family: str  # properties that belong together; what `twoaxis verify --only` names
    name: str  # what is claimed; what `only=` names
    # from a `Subject`, or the seed of a theorem, to what was measured, or to why nothing was
    measure: Callable[[Any], Result | str]
    axes: tuple[Axis, ...]  # methods along which axis it is about; none is a theorem
    slow: bool = False  # measured only where asked for
    first: bool = False  # nothing else is measured where it fails

    def __str__(self) -> str:
        return self.name


OURS = re.compile(r"[/\\](twoaxis|torch)[/\\]|^<")
"""Files that an error of somebody's method does not come from."""

CLAIMS: dict[str, Claim] = {}
"""Every claim by its name, in the order in which a report has them."""


def claim(
    family: str,
    name: str,
    axes: Sequence[Axis] = ("depth", "sequence"),
    *,
    over: Callable[[Any], Iterable[tuple[str, Any]]] | None = None,
    bound: float = 0.0,
    **options: bool,
) -> Callable[[F], F]:
    """Decorator: register a function that measures a property of a subject, or of parts of it, as a `Claim`.

    It returns a `Result`; a number, or numbers by what they are of, held to `bound`; a list of what is wrong; or a text
    that says why there is nothing to measure.

    Args:
        family: of the claim.
        name: of the claim.
        axes: of the methods.
        over: from a subject to labels and parts, the runs or the steppers of it; None measures the subject itself.
        bound: of the numbers.
        **options: `slow` and `first` of the claim.
    """

    def add(measure: F) -> F:
        @functools.wraps(measure)
        def measured(subject: Any) -> Result | str:
            parts = [("", subject)] if over is None else over(subject)
            return worst([(where, as_result(measure(part), bound)) for where, part in parts])

        assert name not in CLAIMS, f"there is already a claim {name!r}"
        CLAIMS[name] = Claim(family, name, measured, tuple(axes), **options)
        return measure

    return add


def as_result(found: Any, bound: float = 0.0) -> Result | str:
    """The result of what a claim's function returned."""
    if isinstance(found, Mapping):
        return worst([(label, as_result(each, bound)) for label, each in found.items()])
    if isinstance(found, list):
        return Result(len(found), 0.0, "; ".join(found[:3]))
    return Result(found, bound) if isinstance(found, float | int) else found


def worst(found: Sequence[tuple[str, Result | str]]) -> Result | str:
    """The worst of labelled results, or the last reason why there are none."""
    results = [(label, result) for label, result in found if isinstance(result, Result)]
    if not results:
        return "".join(reason for _, reason in found[-1:] if isinstance(reason, str))
    label, result = max(results, key=lambda pair: pair[1].severity)
    detail = ": ".join(filter(None, (label if result.error else "", result.detail)))
    return result._replace(detail=detail, instances=sum(each.instances for _, each in results))


def choose(claims: Iterable[Claim], only: Sequence[str]) -> list[Claim]:
    """The claims whose name or family is named; all but the slow ones where none is."""
    claims = list(claims)
    known = list(dict.fromkeys(word for each in claims for word in (each.family, each.name)))
    for word in only:
        if word not in known:
            families = ", ".join(dict.fromkeys(each.family for each in claims))
            raise ValueError(f"there is no check {word!r}{did_you_mean(word, known)}; the families are {families}")
    return [c for c in claims if c.name in only or (not c.slow and (not only or c.family in only))]


def measure(claims: Iterable[Claim], subjects: Sequence[Any], subject: str = "") -> Iterator[Result]:
    """One result per claim, the worst over the subjects; ends with a failed claim that the others build on."""
    for each in claims:
        tried = [(str(one), attempt(each, one)) for one in subjects]
        holds = [result.holds for _, result in tried if isinstance(result, Result)]
        share = f"{holds.count(False)} of {len(holds)} variants fail, the worst: "
        told = not all(holds) and len(holds) > 1
        found = worst([(share + label if told else "", result) for label, result in tried])
        result = Result(0.0, detail=found, instances=0) if isinstance(found, str) else found
        yield result._replace(family=each.family, name=each.name, subject=subject)
        if each.first and not result.holds:
            return


def attempt(claim: Claim, subject: Any) -> Result | str:
    """Measure a claim on one subject; an exception is a failure that says where it arose."""
    with torch.random.fork_rng(devices=()):
        try:
            return claim.measure(subject)
        except Exception as error:
            return Result(math.inf, 0.0, raised(error))


def raised(error: Exception) -> str:
    """An exception in one line, with the last place outside this package and torch."""
    first = (str(error).strip().splitlines() or [""])[0]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not OURS.search(f.filename)]
    place = [(f.filename, f.lineno) for f in frames[-1:]]
    if isinstance(error, SyntaxError) and error.filename:
        place = [(error.filename, error.lineno)]
    return f"raises {type(error).__name__}: {first}" + "".join(f" ({Path(f).name}, line {n})" for f, n in place)


def accepted(what: str, call: Callable[..., Any], *arguments: Any) -> list[str]:
    """What is wrong if a call does not refuse its arguments with a ValueError."""
    try:
        call(*arguments)
    except ValueError:
        return []
    return [f"{what} raises no ValueError"]


@dataclass(frozen=True)
class Report(Showable):
    """Results as a document, as a dictionary, or as an assertion; the exit code is 1 if one does not hold."""

    title: str  # what was measured
    results: tuple[Result, ...]  # in order
    seed: int = 0  # of the random instances
    by: Literal["subject", "family"] = "subject"  # what the tables are: one per subject, or one per family
    waiting: tuple[str, ...] = ()  # names of the claims that were left out because one that they build on fails

    @property
    def failed(self) -> tuple[Result, ...]:
        """The results that do not hold."""
        return tuple(result for result in self.results if not result.holds)

    @property
    def ok(self) -> bool:
        """Whether everything holds."""
        return not self.failed

    @property
    def exit_code(self) -> int:
        """1 if something does not hold."""
        return 0 if self.ok else 1

    def raise_if_failed(self) -> None:
        """Raise an AssertionError that lists the failures with their numbers."""
        lines = [f"{self.title}: {len(self.failed)} of {len(self.results)} checks fail"]
        lines += [f"  {r.name}: measured {r.error:.3g}, bound {r.bound:.3g}. {r.detail}" for r in self.failed]
        if self.failed:
            raise AssertionError("\n".join(lines))

    def document(self) -> Document:
        """A table per subject or family, and what is wrong with the results that fail."""
        groups: dict[str, list[Result]] = {}
        for result in self.results:
            groups.setdefault(getattr(result, self.by) or self.title, []).append(result)
        blocks: list[Block] = []
        for head, results in groups.items():
            blocks += [Heading(head, 3 if self.by == "subject" else 2), self._table(results)]
            wrong = tuple(f"**{self._label(r)}**: {r.detail}" for r in results if not r.holds and r.detail)
            blocks += [Items(wrong)] if wrong else []
        if self.waiting:
            blocks.append(Prose(f"{len(self.waiting)} further checks build on this one and were not run."))
        held = f"{len(self.results) - len(self.failed)} of {len(self.results)} hold"
        closing = f"{held} (seed {self.seed}, float64, torch {torch.__version__})."
        return Document("" if self.by == "subject" else self.title, (*blocks, Prose(closing)))

    def _label(self, result: Result) -> str:
        said = result.name.removeprefix(f"{result.family}: ")
        return result.name if self.by == "subject" else f"{result.subject}: {said}" if result.subject else said

    def _table(self, results: Sequence[Result]) -> Block:
        rows = []
        for r in results:
            verdict = Cell("holds") if r.holds else Cell("FAILS", None, "worse")
            error = Cell(numbers.digits(r.error, 3), r.error if math.isfinite(r.error) else None)
            cells = (error, Cell(numbers.digits(r.bound, 3), r.bound), Cell(str(r.instances), r.instances), verdict)
            absent = (*[Cell(numbers.NOTHING)] * 3, Cell(r.detail))
            rows.append((Cell(self._label(r)), *(cells if r.instances else absent)))
        heads = (Column("claim", number=False), "measured", "bound", "instances", Column("verdict", number=False))
        if self.by == "subject":  # so that a row is a line of 80 columns
            heads, rows = (*heads[:3], heads[4]), [(*row[:3], row[4]) for row in rows]
        return table(heads, rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the versions they were measured with; an error that is no number is None."""
        import twoaxis

        results = [{**r._asdict(), "holds": r.holds} for r in self.results]
        for result in results:
            result["error"] = result["error"] if math.isfinite(result["error"]) else None
        versions = {"twoaxis": twoaxis.__version__, "torch": torch.__version__}
        return {**versions, "seed": self.seed, "ok": self.ok, "results": results, "waiting": list(self.waiting)}


# Comparing tensors.


def deviation(ours: Tensor, theirs: Tensor, least: float = 0.0) -> float:
    """Largest difference relative to the largest entry or `least`; infinite where a number is missing."""
    if ours.shape != theirs.shape:
        return math.inf
    if ours.numel() == 0:
        return 0.0
    difference = (ours.detach() - theirs.detach()).abs().max().item()
    scale = max(theirs.detach().abs().max().item(), least)
    if math.isnan(difference):
        return math.inf
    return difference / scale if scale > 0 else difference


def gradients(out: Tensor, leaves: Sequence[Tensor], probe: Tensor) -> list[Tensor]:
    """Gradients of <out, probe> in every leaf; zeros for a leaf that `out` does not depend on."""
    if not out.requires_grad or not leaves:
        return [torch.zeros_like(leaf) for leaf in leaves]
    grads = torch.autograd.grad(out, list(leaves), probe, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(grads, leaves, strict=True)]


def between(ours: Sequence[Tensor], theirs: Sequence[Tensor], floor: float = 1e-4) -> float:
    """Largest deviation between two sets of gradients.

    A leaf's differences are relative to its largest gradient, but at least to `floor` times the largest of all leaves:
    where terms cancel on paper, only their rounding is left.
    """
    least = floor * max((grad.abs().max().item() for grad in theirs if grad.numel()), default=0.0)
    return max((deviation(a, b, least) for a, b in zip(ours, theirs, strict=True)), default=0.0)


def random_tensors(seed: int, *shapes: Sequence[int]) -> list[Tensor]:
    """Independent standard normal float64 tensors."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tuple(shape), generator=generator, dtype=torch.float64) for shape in shapes]


def disagreement(ours: Tensor, theirs: Tensor, leaves: Sequence[Tensor], seed: int) -> float:
    """Largest deviation of values and of the gradients in every leaf, for one random cotangent."""
    (probe,) = random_tensors(3000 + seed, ours.shape)
    return max(deviation(ours, theirs), between(gradients(ours, leaves, probe), gradients(theirs, leaves, probe)))
