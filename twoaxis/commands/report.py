"""The command that reports on a comparison: report."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import tyro


def report(
    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")],
    *,
    l_inf: float | None = None,
    alpha: float | None = None,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Show what a comparison found, finished or not, and write DIR/report: Markdown, a page, plots and JSON.

    Args:
        folder: The --out of twoaxis compare.
        l_inf: Loss that compute cannot take away, for the effective speed-up. None fits it over three or more sizes.
        alpha: Exponent of the scaling law; with --l-inf, one size is enough.
        json_output: Print one JSON document, that of DIR/report/table.json, instead of tables.
    """
    from twoaxis.comparison.report import make_report, render_terminal

    made = make_report(folder, l_inf=l_inf, alpha=alpha)
    if json_output:
        from twoaxis.comparison.document import to_document

        print(json.dumps(to_document(made.summary), indent=1, allow_nan=False))
    else:
        print(render_terminal(made.summary))
    print(f"written to {made.folder}: {', '.join(made.files)}", file=sys.stderr)
    if made.note:
        print(made.note, file=sys.stderr)
    return 0
