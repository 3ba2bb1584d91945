"""The command that reports on a comparison: report."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from twoaxis.commands.parsing import SavedFolder, plain

if TYPE_CHECKING:
    from twoaxis.comparison.results import Comparison


@plain
def report(
    folder: SavedFolder,
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
    home, pages = saved.files[0].parent, [file.name for file in saved.files[:2]]
    print(f"written to {home}: {', '.join(pages)} and {len(saved.files) - 2} more", file=sys.stderr)
    if saved.note:
        print(saved.note, file=sys.stderr)
    return found
