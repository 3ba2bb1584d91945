"""The command that measures the certificates: verify."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    from twoaxis.verify.run import Certificates


def verify(*, seed: int = 0, only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FAMILY")] = ()) -> Certificates:
    """Measure the certificates on random instances; exit with 1 if one does not hold.

    Args:
        seed: Seed of the random instances.
        only: Families to measure: duality, neutral, blend, algebra, reduction, sequence, orders, definition. None
            named is all.
    """
    import torch

    from twoaxis.base.progress import Progress
    from twoaxis.verify.run import FAMILIES, Certificates, certificates

    torch.set_num_threads(1)  # the instances are small
    results = []
    families = only or tuple(FAMILIES)
    with Progress("verify", len(families), "families") as bar:
        for certificate in certificates(seed, only):
            bar.advance(int(bool(results) and results[-1].family != certificate.family), certificate.statement[:60])
            results.append(certificate)
        bar.advance(1)
    return Certificates(seed, tuple(results))
