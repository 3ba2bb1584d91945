"""The command that measures theorems and claims about every method: verify."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import tyro

from twoaxis.commands.parsing import plain

if TYPE_CHECKING:
    from twoaxis.verify.claim import Report


@plain
def verify(*, seed: int = 0, only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FAMILY")] = ()) -> Report:
    """Measure theorems, and what is claimed about every method, on random instances; exit with 1 if a claim fails.

    Args:
        seed: Seed of the random instances.
        only: Families to measure, or single claims by name. Theorems: duality, algebra, reduction, orders. About every
            method: definition, neutral, blend, time, and, unless named left out, contract, gradients, depth, start,
            costs.
    """
    import torch

    from twoaxis.base.progress import Progress
    from twoaxis.verify.claim import Report
    from twoaxis.verify.run import planned

    torch.set_num_threads(1)  # the instances are small
    plan, results = planned(seed, only), []
    with Progress("verify", len(plan), "claims") as bar:
        for what, measured in plan:
            results += measured()
            bar.advance(1, what[:60])
    return Report("Certificates", tuple(results), seed, by="family")
