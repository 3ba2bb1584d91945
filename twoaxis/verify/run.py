"""All certificates, in order, and what they come to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import twoaxis
from twoaxis.show.document import Block, Cell, Column, Document, Heading, Prose, Showable, table
from twoaxis.show.numbers import error
from twoaxis.verify.algebra import algebra
from twoaxis.verify.certificate import Certificate, Family
from twoaxis.verify.definition import definitions
from twoaxis.verify.duality import duality
from twoaxis.verify.orders import orders
from twoaxis.verify.properties import blends, neutral_classes, sequence_side
from twoaxis.verify.reductions import reductions

FAMILIES: dict[str, Family] = {
    "duality": duality,
    "neutral": neutral_classes,
    "blend": blends,
    "algebra": algebra,
    "reduction": reductions,
    "sequence": sequence_side,
    "orders": orders,
    "definition": definitions,
}


def certificates(seed: int = 0, families: tuple[str, ...] = ()) -> Iterator[Certificate]:
    """Measure certificates one after the other.

    Args:
        seed: of the random instances.
        families: which parts to measure; none named is all of them.
    """
    for name in families:
        if name not in FAMILIES:
            raise ValueError(f"unknown family {name!r} of certificates; the families are {', '.join(FAMILIES)}")
    for name, family in FAMILIES.items():
        if not families or name in families:
            yield from family(seed)


@dataclass(frozen=True)
class Certificates(Showable):
    """Measured certificates; the exit code is 1 if one does not hold.

    Attributes:
        seed: of the random instances.
        measured: every certificate, in order.
    """

    seed: int
    measured: tuple[Certificate, ...]

    @property
    def failed(self) -> tuple[Certificate, ...]:
        """Those that do not hold."""
        return tuple(certificate for certificate in self.measured if not certificate.holds)

    @property
    def exit_code(self) -> int:
        """Whether one failed."""
        return 1 if self.failed else 0

    def closing(self) -> str:
        """How many hold, and of what."""
        held = f"{len(self.measured) - len(self.failed)} of {len(self.measured)} certificates hold"
        return f"{held} (seed {self.seed}, float64, torch {torch.__version__})"

    def document(self) -> Document:
        """A table per family."""
        heads = (Column("statement", number=False), "error", "bound", "instances", Column("verdict", number=False))
        blocks: list[Block] = [Prose(f"{self.closing()}.")]
        for family in dict.fromkeys(certificate.family for certificate in self.measured):
            rows = [
                (
                    Cell(c.statement),
                    Cell(error(c.error), c.error if math.isfinite(c.error) else None),
                    Cell(error(c.bound), c.bound),
                    Cell(str(c.instances), c.instances),
                    Cell("holds") if c.holds else Cell("FAILS", None, "worse"),
                )
                for c in self.measured
                if c.family == family
            ]
            blocks += [Heading(family), table(heads, rows)]
        return Document("Certificates", tuple(blocks))

    def to_dict(self) -> dict[str, Any]:
        """Plain values; an error that is no number is None."""
        said = [{**c._asdict(), "holds": c.holds} for c in self.measured]
        for certificate in said:
            certificate["error"] = certificate["error"] if math.isfinite(certificate["error"]) else None
        return {
            "twoaxis": twoaxis.__version__,
            "torch": torch.__version__,
            "seed": self.seed,
            "holds": not self.failed,
            "certificates": said,
        }
