"""Tables of figures: what every benchmark returns, printed, stored and written into the documentation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.timing import Timing

MISSING = "-"
SPREAD = "± "
"""Begins the name of the column that holds another one's spread."""


class Table(NamedTuple):
    """One table.

    Attributes:
        title: what was measured.
        note: how to read it.
        rows: figures by row and column; a row may leave columns out.
    """

    title: str
    note: str
    rows: dict[str, dict[str, float]]

    @property
    def columns(self) -> list[str]:
        """All columns, in the order they first appear; a spread stands in the column it belongs to."""
        found = dict.fromkeys(column for row in self.rows.values() for column in row)
        return [column for column in found if not column.startswith(SPREAD)]

    def lines(self) -> list[str]:
        """The table in Markdown."""
        lines = [f"| | {' | '.join(self.columns)} |", "|---|" + "---:|" * len(self.columns)]
        for name, row in self.rows.items():
            cells = [_cell(row, column) for column in self.columns]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        return lines


def _cell(row: Mapping[str, float], column: str) -> str:
    if column not in row:
        return MISSING
    spread = row.get(SPREAD + column)
    return figure(row[column]) + ("" if spread is None else f" ± {figure(spread)}")


def figure(value: float) -> str:
    """Three digits that count."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 20 else f"{value:.3f}"


def timed(timing: Timing, column: str = "time") -> dict[str, float]:
    """A ratio and its spread."""
    return {column: timing.ratio, SPREAD + column: timing.spread}


def from_json(document: Mapping[str, Any]) -> dict[str, Table]:
    """The tables of a stored run."""
    return {key: Table(**table) for key, table in document["tables"].items()}
