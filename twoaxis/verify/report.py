"""What a run of the kit returns: measured checks, as a document, as a dictionary, or as an assertion."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from twoaxis.show import numbers
from twoaxis.show.document import Block, Cell, Column, Document, Heading, Items, Prose, Showable, Table, table


class Outcome(NamedTuple):
    """What one check measured on one variant.

    Attributes:
        measured: the number the check is about: a deviation, a count of faults, a ratio or an exponent.
        bound: what it may be at most; 0 claims equality to the last bit, or no fault at all.
        detail: what is wrong, or what was found.
    """

    measured: float
    bound: float = 0.0
    detail: str = ""

    @property
    def holds(self) -> bool:
        """Whether the measured number is a number within its bound."""
        return math.isfinite(self.measured) and self.measured <= self.bound


class Check(NamedTuple):
    """One check over all variants: its worst outcome.

    Attributes:
        name: what is checked.
        holds: whether every variant is within its bound.
        measured: of the worst variant.
        bound: of the worst variant.
        detail: what is wrong, and with which options.
        instances: how many variants it was measured on; 0 where it does not apply to any.
    """

    name: str
    holds: bool
    measured: float
    bound: float
    detail: str = ""
    instances: int = 1


def worst_of(name: str, outcomes: list[tuple[str, Outcome]], absent: str = "") -> Check:
    """The check that stands for `outcomes`, which are labelled by their options; `absent` says why there are none."""
    if not outcomes:
        return Check(name, True, 0.0, 0.0, absent, 0)
    label, worst = max(outcomes, key=lambda pair: _severity(pair[1]))
    failed = sum(not outcome.holds for _, outcome in outcomes)
    detail = worst.detail
    if failed:
        share = f"{failed} of {len(outcomes)} variants fail, the worst: " if len(outcomes) > 1 else ""
        detail = f"{share}{label}: {detail}" if detail else f"{share}{label}"
    return Check(name, not failed, worst.measured, worst.bound, detail, len(outcomes))


def _severity(outcome: Outcome) -> tuple[bool, float]:
    if math.isnan(outcome.measured):
        return True, math.inf
    return not outcome.holds, outcome.measured / outcome.bound if outcome.bound else outcome.measured


@dataclass(frozen=True)
class Report(Showable):
    """Every check of one stream or mixer.

    Attributes:
        subject: the class that was checked.
        variants: the options it was checked with, as text.
        checks: what was measured.
    """

    subject: str
    variants: tuple[str, ...]
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether every check holds."""
        return all(check.holds for check in self.checks)

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that do not hold."""
        return tuple(check for check in self.checks if not check.holds)

    def __getitem__(self, name: str) -> Check:
        """The check of a name."""
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(f"there is no check {name!r}; the checks are {', '.join(c.name for c in self.checks)}")

    def raise_if_failed(self) -> None:
        """An AssertionError that lists the failed checks with their numbers."""
        if self.ok:
            return
        lines = [f"{self.subject}: {len(self.failed)} of {len(self.checks)} checks fail"]
        lines += [f"  {c.name}: measured {c.measured:.3g}, bound {c.bound:.3g}. {c.detail}" for c in self.failed]
        raise AssertionError("\n".join(lines))

    @property
    def exit_code(self) -> int:
        """Whether a check failed."""
        return 0 if self.ok else 1

    def document(self) -> Document:
        """The verdict, a row per check, and what is wrong with those that fail."""
        return Document(self.subject, tuple(self.blocks()))

    def blocks(self) -> list[Block]:
        """What stands under the subject's name."""
        verdict = "all hold" if self.ok else f"{len(self.failed)} FAIL"
        said: list[Block] = [Prose(f"{len(self.checks)} checks over {len(self.variants)} variants, {verdict}.")]
        wrong = tuple(f"**{check.name}**: {check.detail}" for check in self.failed if check.detail)
        return [*said, self._table(), *([Items(wrong)] if wrong else [])]

    def _table(self) -> Table:
        rows = []
        for check in self.checks:
            if not check.instances:
                rows.append((check.name, numbers.NOTHING, numbers.NOTHING, check.detail))
                continue
            mark = Cell("ok") if check.holds else Cell("FAIL", None, "worse")
            rows.append((check.name, numbers.digits(check.measured, 3), numbers.digits(check.bound, 3), mark))
        return table(("check", "measured", "bound", Column("", number=False)), rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; a measured number that is none is None."""
        checks = [check._asdict() for check in self.checks]
        for check in checks:
            check["measured"] = check["measured"] if math.isfinite(check["measured"]) else None
        return {"subject": self.subject, "ok": self.ok, "variants": list(self.variants), "checks": checks}


@dataclass(frozen=True)
class Checked(Showable):
    """The reports of everything that a file defines.

    Attributes:
        seed: of the random instances.
        reports: one per stream and mixer.
    """

    seed: int
    reports: tuple[Report, ...]

    @property
    def exit_code(self) -> int:
        """Whether a check of one of them failed."""
        return max((report.exit_code for report in self.reports), default=0)

    def document(self) -> Document:
        """One report after the other."""
        return Document("", tuple(b for report in self.reports for b in (Heading(report.subject, 3), *report.blocks())))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the versions they were measured with."""
        import torch

        import twoaxis

        versions = {"twoaxis": twoaxis.__version__, "torch": torch.__version__}
        reports = [report.to_dict() for report in self.reports]
        return {**versions, "seed": self.seed, "ok": not self.exit_code, "reports": reports}
