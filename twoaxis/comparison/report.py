"""The report of a comparison: the terminal table, and OUT/report/ with everything a reader or a program wants.

    report.md              tables and what they say
    report.html            the same as one page of its own: sortable tables, curves with toggles
    table.json             every number, and the losses and curves they come from
    curves*.png, .svg      held-out loss against tokens, operations and time
    differences*.png, .svg differences to the baseline with their intervals

The folder is made beside its place and takes it whole.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import NamedTuple

from twoaxis.base.files import atomic_folder, write_bytes, write_text
from twoaxis.comparison.document import to_document
from twoaxis.comparison.summary import Summary, Table, summarise
from twoaxis.comparison.tables import Cell, Grid, grids
from twoaxis.comparison.words import closing, facts, headline

REPORT = "report"
NAME = 20
"""Columns that the name of a contender keeps in a narrow terminal."""
TONES = {"better": "32", "worse": "31", "warn": "33"}
"""Colours of a terminal."""


class Report(NamedTuple):
    """What was written."""

    summary: Summary
    folder: Path
    files: tuple[str, ...]
    """Names in it."""
    note: str
    """What is left out and why, if something is."""


def make_report(folder: str | Path, *, l_inf: float | None = None, alpha: float | None = None) -> Report:
    """Summarise a comparison and write OUT/report/.

    Args:
        folder: the --out of `twoaxis compare`, finished or not.
        l_inf: irreducible loss, for the effective speed-up.
        alpha: exponent of the scaling law.
    """
    from twoaxis.comparison.page import render_page

    summary = summarise(folder, l_inf=l_inf, alpha=alpha)
    document = to_document(summary)
    place = Path(folder) / REPORT
    figures, note = _figures(summary)
    with atomic_folder(place, replace=True) as made:
        for name, content in figures.items():
            write_bytes(made / name, content)
        write_text(made / "table.json", json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n")
        write_text(made / "report.md", render_markdown(summary, tuple(figures)))
        write_text(made / "report.html", render_page(summary))
    names = ("report.md", "report.html", "table.json", *figures)
    return Report(summary, place, names, note)


def _figures(summary: Summary) -> tuple[dict[str, bytes], str]:
    """The figures by file name, and why there are none."""
    try:
        import matplotlib as _  # noqa: F401
    except ImportError:
        return {}, 'no plots: matplotlib is not installed; pip install "twoaxis[report]" brings it'
    from twoaxis.comparison.plots import draw_curves, draw_differences, render

    made = {}
    for table in summary.tables:
        if not any(entry.curves for entry in table.entries):
            continue
        end = figure_ending(summary, table)
        figures = {f"curves{end}": draw_curves(summary, table)}
        if table.contenders:
            figures[f"differences{end}"] = draw_differences(summary, table)
        for name, figure in figures.items():
            for kind in ("png", "svg"):
                made[f"{name}.{kind}"] = render(figure, kind)
    return made, ""


def figure_ending(summary: Summary, table: Table) -> str:
    """What tells the files of a table apart; nothing where there is one table."""
    if len(summary.tables) == 1:
        return ""
    plain = re.sub(r"[^A-Za-z0-9._=-]+", "-", f"{table.data}-{table.size}").strip("-.")[:60]
    return f"-{summary.tables.index(table) + 1}-{plain}"


def render_markdown(summary: Summary, figures: tuple[str, ...] = ()) -> str:
    """The report as Markdown."""
    lines = [f"# Comparison {_escape(summary.name)}", "", _escape(headline(summary)), ""]
    for table in summary.tables:
        lines += [f"## {_escape(table.data)}, {_escape(table.size)}", ""]
        for grid in grids(summary, table):
            lines += [f"### {grid.title}", "", *_markdown_table(grid), ""]
            lines += [f"{_escape(note)}  " for note in grid.notes]
            lines += [""] if grid.notes else []
        end = figure_ending(summary, table)
        for name in (f"curves{end}.png", f"differences{end}.png"):
            if name in figures:
                lines += [f"![{name.partition('.')[0]}]({name})", ""]
    lines += ["## What this says", ""]
    for paragraph in closing(summary):
        lines += [_escape(paragraph), ""]
    lines += [f"- {name}: `{value.replace('`', ' ')}`" for name, value in facts(summary)]
    return "\n".join(lines) + "\n"


def _markdown_table(grid: Grid) -> list[str]:
    rows = [[_escape(cell.text) for cell in row] for row in grid.rows]
    head = "| " + " | ".join(grid.heads) + " |"
    rule = "|---|" + "---:|" * (len(grid.heads) - 1)
    return [head, rule, *("| " + " | ".join(row) + " |" for row in rows)]


def _escape(text: str) -> str:
    """Text that Markdown shows as it is."""
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", text.replace("\n", " "))


def render_terminal(summary: Summary, *, width: int | None = None, colour: bool | None = None) -> str:
    """The report as text for a terminal.

    Args:
        summary: what to show.
        width: columns; None is the terminal's, and 120 where there is none.
        colour: with colours; None asks whether stdout is a terminal.
    """
    import shutil
    import sys

    width = width or shutil.get_terminal_size((120, 24)).columns
    watched = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    paint = watched if colour is None else colour
    parts = [_wrap(headline(summary), width), ""]
    for table in summary.tables:
        parts.append(f"{table.data}, {table.size}")
        for grid in grids(summary, table):
            parts += ["", grid.title, text_table(grid, width, colour=paint)]
            parts += [_wrap(note, width) for note in grid.notes]
        parts.append("")
    parts += [_wrap(paragraph, width) + "\n" for paragraph in closing(summary)]
    parts += [_wrap(f"{name}: {value}", width) for name, value in facts(summary)]
    return "\n".join(parts) + "\n"


def _wrap(text: str, width: int) -> str:
    import textwrap

    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def text_table(grid: Grid, width: int, *, colour: bool = False) -> str:
    """A table in columns; long cells go on in the next line."""
    widths = _widths(grid, width)
    heads = tuple(Cell(head) for head in grid.heads)
    lines = [*_text_row(heads, widths, colour), "  ".join("─" * wide for wide in widths)]
    for row in grid.rows:
        lines += _text_row(row, widths, colour)
    return "\n".join(lines)


def _text_row(cells: tuple[Cell, ...], widths: list[int], colour: bool) -> list[str]:
    """The lines of a row: names to the left, everything else to the right."""
    folded = [_fold(cell.text, wide) for cell, wide in zip(cells, widths, strict=True)]
    lines = []
    for number in range(max(len(parts) for parts in folded)):
        line = ""
        for place, (cell, parts, wide) in enumerate(zip(cells, folded, widths, strict=True)):
            text = parts[number] if number < len(parts) else ""
            room = " " * (wide - len(text))
            painted = f"\x1b[{TONES[cell.tone]}m{text}\x1b[0m" if colour and text and cell.tone else text
            line += f"  {room}{painted}" if place else painted + room
        lines.append(line.rstrip())
    return lines


def _widths(grid: Grid, width: int) -> list[int]:
    """Widths of the columns: what they need, less in the widest ones until the table fits."""
    columns = [[head, *(row[i].text for row in grid.rows)] for i, head in enumerate(grid.heads)]
    widths = [max(map(len, column)) for column in columns]
    least = [max((len(word) for text in column for word in _pieces(text)), default=1) for column in columns]
    while sum(widths) + 2 * (len(widths) - 1) > width:
        able = [i for i in range(len(widths)) if widths[i] > least[i]]
        if not able:
            break
        # The contender's name gives way first; then whatever is widest.
        first = 0 in able and widths[0] > NAME
        widths[0 if first else max(able, key=lambda i: widths[i])] -= 1
    return widths


def _pieces(text: str) -> list[str]:
    """Where a cell may be broken: behind spaces, colons and commas."""
    return re.findall(r"[^ :,]+[:,]*|[:,]+", text)


def _fold(text: str, width: int) -> list[str]:
    """Lines of at most `width`, broken at pieces."""
    lines, line = [], ""
    for piece in re.findall(r"[^ :,]*[:,]* *", text):
        if line and len((line + piece).rstrip()) > width:
            lines.append(line.rstrip())
            line = ""
        line += piece
    return [*lines, line.rstrip()] if line.strip() or not lines else lines
