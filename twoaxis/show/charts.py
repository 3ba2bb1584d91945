"""Charts as plain data: declared once, drawn by `figures` as png and svg, and put into pages with selectors.

Chart        a grid of panels under one title
  Panel      one pair of axes, of one of four kinds
    lines        `Line`s over x, each with a band if it has one
    intervals    a `Mark` per row: a value and its interval, rows from top to bottom
    bars         a `Mark` per bar; marks of one label stand together, one bar per group
    heat         a `Row` per row of cells, the columns named by the x axis
Grid         numbers as coloured cells under selectors; a heat map of its first choice where nothing can be selected
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Tone = Literal["", "better", "worse", "warn"]
"""What a value means to the reader, for colours."""

COLOURS = 8
"""Colours that can be told apart, the baseline's grey not counted."""

PALETTE: dict[str, tuple[str, str]] = {
    "paper": ("#ffffff", "#14181f"),
    "card": ("#f6f8fa", "#1b212a"),
    "head": ("#edf0f4", "#232b36"),
    "line": ("#dce1e8", "#333d4b"),
    "ink": ("#1c2430", "#e4e9f0"),
    "soft": ("#586374", "#9ba7b8"),
    "accent": ("#0b5cad", "#78b4f5"),
    "better": ("#00713f", "#4fc58c"),
    "worse": ("#b3271e", "#ff8d80"),
    "warn": ("#875800", "#e2b54a"),
    "c0": ("#5f6875", "#a4adba"),
    "c1": ("#0067a8", "#5bb0f0"),
    "c2": ("#c94f08", "#ff9a57"),
    "c3": ("#00805d", "#41c99b"),
    "c4": ("#a8418a", "#ea98cc"),
    "c5": ("#9a7000", "#e8c250"),
    "c6": ("#3490c7", "#9bdcf7"),
    "c7": ("#7b4a2b", "#cfa589"),
    "c8": ("#6650b4", "#b7a1f5"),
    "heat": ("#0a4a8f", "#8cc5ff"),
    "cold": ("#b84a0a", "#ffa468"),
}
"""Every colour on light and on dark paper. Lines and words have a contrast of at least 3 and 4.5 on both; the hues are
told apart with colour blindness, and lines also by their markers."""


class Axis(NamedTuple):
    """One axis of a panel, or its scale of colours.

    Attributes:
        title: what is on it.
        unit: how its numbers are written, a key of `numbers.UNITS`.
        scale: linear, logarithmic (with ticks at 1, 2, 5 or at powers of two), or root: for colours, so that small
            values are seen beside large ones.
        low: where it begins; None is by the data.
        high: where it ends; None is by the data.
        rule: value at which a dashed line crosses the panel.
        names: of the columns of a heat map, in place of numbers.
    """

    title: str = ""
    unit: str = ""
    scale: Literal["linear", "log", "log2", "root"] = "linear"
    low: float | None = None
    high: float | None = None
    rule: float | None = None
    names: tuple[str, ...] = ()


class Line(NamedTuple):
    """A curve.

    Attributes:
        label: its name in the legend; lines of one label have one colour in the whole chart.
        x: places.
        y: heights; None is a gap.
        low: lower edge of its band, or empty.
        high: upper edge of its band, or empty.
        colour: number of its colour; 0 is the baseline's grey, None the next that is free.
        dashed: for a second form of the same thing.
    """

    label: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    colour: int | None = None
    dashed: bool = False


class Mark(NamedTuple):
    """A value with its interval: a row of a panel of intervals, or a bar.

    Attributes:
        label: name of the row.
        value: None leaves the row empty.
        low: lower end of the interval, if it has one.
        high: upper end.
        tone: its colour by meaning, for intervals.
        hollow: drawn as an open circle, for a value that is only indicative.
        group: which of several bars of a row it is, in the legend.
    """

    label: str
    value: float | None
    low: float | None = None
    high: float | None = None
    tone: Tone = ""
    hollow: bool = False
    group: str = ""


class Row(NamedTuple):
    """A row of a heat map; None is an empty cell."""

    label: str
    values: tuple[float | None, ...]


class Panel(NamedTuple):
    """One pair of axes.

    Attributes:
        kind: lines, intervals, bars or heat.
        title: above it.
        x: the horizontal axis.
        y: the vertical axis.
        marks: lines, marks or rows, as the kind asks.
        colours: the scale of a heat map's colours.
        choice: where panels show one thing in several forms: the name of each choice and the value that shows this
            panel. A page shows one at a time and has a selector per name; files have all of them.
    """

    kind: Literal["lines", "intervals", "bars", "heat"]
    title: str
    x: Axis
    y: Axis
    marks: tuple[Line, ...] | tuple[Mark, ...] | tuple[Row, ...]
    colours: Axis = Axis()
    choice: Mapping[str, str] = {}


class Chart(NamedTuple):
    """Panels under one title.

    Attributes:
        name: of its files and its anchor: lower case letters, digits, - and _.
        title: what it shows, also for readers who cannot see it.
        rows: the panels as they stand in a file.
        note: a sentence under it.
    """

    name: str
    title: str
    rows: tuple[tuple[Panel, ...], ...]
    note: str = ""

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All panels, row by row."""
        return tuple(panel for row in self.rows for panel in row)


class Cells(NamedTuple):
    """A row of a grid.

    Attributes:
        label: its name.
        values: nested lists, a level for each choice and then the cells; a level of one entry is the same for all.
        columns: which columns the cells stand in; None is all of them.
    """

    label: str
    values: list[Any]
    columns: tuple[int, ...] | None = None

    def first(self, width: int) -> tuple[float | None, ...]:
        """The cells of all columns under the first choices."""
        cells = self.values
        while cells and isinstance(cells[0], list):
            cells = cells[0]
        found: list[float | None] = [None] * width
        for place, value in zip(range(width) if self.columns is None else self.columns, cells, strict=True):
            found[place] = value
        return tuple(found)


class Grid(NamedTuple):
    """Numbers as coloured cells; a page has a selector for each choice, and selectors of one name move together.

    Attributes:
        name: of its files and its anchor: lower case letters, digits, - and _.
        title: what it shows.
        columns: their names.
        rows: their names and numbers.
        choices: what can be chosen, by name; the first of each is what files and terminals show.
        within: what the colours of cells are relative to: the whole table, or each column.
        corner: what the rows are.
        note: a sentence under it.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[Cells, ...]
    choices: Mapping[str, tuple[str, ...]] = {}
    within: Literal["table", "column"] = "table"
    corner: str = ""
    note: str = ""

    def chart(self) -> Chart:
        """The first choice as a heat map."""
        rows = tuple(Row(row.label, row.first(len(self.columns))) for row in self.rows)
        panel = Panel("heat", "", Axis(names=self.columns), Axis(self.corner), rows, colours=Axis(scale="root"))
        return Chart(self.name, self.title, ((panel,),), self.note)


def legend(chart: Chart) -> dict[str, int]:
    """The number of the colour of each label that needs one, in the order of the legend."""
    found: dict[str, int] = {}
    for panel in chart.panels:
        for mark in panel.marks:
            if isinstance(mark, Line) and mark.label and mark.label not in found:
                chosen = next_colour(found) if mark.colour is None else mark.colour
                found[mark.label] = chosen
            elif isinstance(mark, Mark) and mark.group and mark.group not in found:
                found[mark.group] = next_colour(found)
    return found


def next_colour(used: Mapping[str, int]) -> int:
    """The first colour that nothing has, or the one used longest ago."""
    free = [number for number in range(1, COLOURS + 1) if number not in used.values()]
    return free[0] if free else 1 + len(used) % COLOURS
