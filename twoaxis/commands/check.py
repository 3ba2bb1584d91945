"""The command that holds somebody's own methods to the contract: check."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import tyro

from twoaxis.commands.parsing import plain

if TYPE_CHECKING:
    from twoaxis.verify.claim import Report


@plain
def check(
    path: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")],
    *,
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="CLAIM")] = (),
    compiled: Annotated[bool, tyro.conf.arg(name="compile")] = True,
    seed: int = 0,
) -> Report:
    """Measure what is claimed about every stream and mixer that a Python file defines; exit with 1 if a claim fails.

    Args:
        path: The file. It is imported: check your own files only.
        only: Claims to measure, by their names in the table ("neutral class") or by family: contract, definition,
            gradients, time, depth, start, neutral, blend, costs. None named is all.
        compiled: Also compile with fullgraph=True and compare; --no-compile leaves it out and is much quicker.
        seed: Seed of the random instances.
    """
    import torch

    from twoaxis.verify.claim import Report
    from twoaxis.verify.run import check_file

    torch.set_num_threads(1)  # the instances are small
    reports = check_file(path, compile=compiled, seed=seed, only=only)
    results = tuple(result for report in reports for result in report.results)
    return Report(path, results, seed, waiting=tuple(name for report in reports for name in report.waiting))
