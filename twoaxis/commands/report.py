"""The command that reports on a comparison: report."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    from twoaxis.comparison.results import Comparison


def report(
    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")],
    *,
    l_inf: float | None = None,
    alpha: float | None = None,
    margin: float | None = None,
) -> Comparison:
    """Show what a comparison found, finished or not, and write DIR/report: Markdown, a page, figures and JSON.

    Args:
        folder: The --out of twoaxis compare.
        l_inf: Loss that compute cannot take away, for the effective speed-up. None fits it over three or more sizes.
        alpha: Exponent of the scaling law; with --l-inf, one size is enough.
        margin: A difference in loss that does not matter. None is what the comparison was given.
    """
    from twoaxis.comparison.results import Comparison

    found = Comparison.load(folder, l_inf=l_inf, alpha=alpha, margin=margin)
    saved = found.save()
    print(f"written to {saved.files[0].parent}: {', '.join(file.name for file in saved.files)}", file=sys.stderr)
    if saved.note:
        print(saved.note, file=sys.stderr)
    return found
