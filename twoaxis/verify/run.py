"""All certificates, in order."""

from __future__ import annotations

from collections.abc import Iterator

from twoaxis.verify.algebra import algebra
from twoaxis.verify.certificate import Certificate, Family
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
