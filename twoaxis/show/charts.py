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
"""Colours that differ for everybody, the baseline's grey not counted."""

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
distinct with colour blindness, and lines also by their markers."""


class Axis(NamedTuple):
    """One axis of a panel, or its scale of colours."""

    title: str = ""  # what is on it
    unit: str = ""  # how its numbers are written, a key of `numbers.UNITS`
    # linear, logarithmic (with ticks at 1, 2, 5 or at powers of two), or root: for colours, so that small values are
    # seen beside large ones
    scale: Literal["linear", "log", "log2", "root"] = "linear"
    low: float | None = None  # where it begins; None is by the data
    high: float | None = None  # where it ends; None is by the data
    rule: float | None = None  # value at which a dashed line crosses the panel
    names: tuple[str, ...] = ()  # of the columns of a heat map, in place of numbers


class Line(NamedTuple):
    """A curve."""

    label: str  # its name in the legend; lines of one label have one colour in the whole chart
    x: tuple[float, ...]  # places
    y: tuple[float | None, ...]  # heights; None is a gap
    low: tuple[float, ...] = ()  # lower edge of its band, or empty
    high: tuple[float, ...] = ()  # upper edge of its band, or empty
    colour: int | None = None  # number of its colour; 0 is the baseline's grey, None the next that is free
    dashed: bool = False  # for a second form of the same thing


class Mark(NamedTuple):
    """A value with its interval: a row of a panel of intervals, or a bar."""

    label: str  # name of the row
    value: float | None  # None leaves the row empty
    low: float | None = None  # lower end of the interval, if it has one
    high: float | None = None  # upper end
    tone: Tone = ""  # its colour by meaning, for intervals
    hollow: bool = False  # drawn as an open circle, for a value that is only indicative
    group: str = ""  # which of several bars of a row it is, in the legend


class Row(NamedTuple):
    """A row of a heat map; None is an empty cell."""

    label: str
    values: tuple[float | None, ...]


class Panel(NamedTuple):
    """One pair of axes."""

    kind: Literal["lines", "intervals", "bars", "heat"]
    title: str  # above it
    x: Axis  # the horizontal axis
    y: Axis  # the vertical axis
    marks: tuple[Line, ...] | tuple[Mark, ...] | tuple[Row, ...]  # lines, marks or rows, as the kind asks
    colours: Axis = Axis()  # the scale of a heat map's colours
    # where panels show one thing in several forms: the name of each choice and the value that shows this panel. A page
    # shows one at a time and has a selector per name; files have all of them.
    choice: Mapping[str, str] = {}


class Chart(NamedTuple):
    """Panels under one title."""

    name: str  # of its files and its anchor: lower case letters, digits, - and _
    title: str  # what it shows, also for readers who cannot see it
    rows: tuple[tuple[Panel, ...], ...]  # the panels as they stand in a file
    note: str = ""  # a sentence under it

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All panels, row by row."""
        return tuple(panel for row in self.rows for panel in row)


class Cells(NamedTuple):
    """A row of a grid."""

    label: str  # its name
    # nested lists, a level for each choice and then the cells; a level of one entry is the same for all
    values: list[Any]
    columns: tuple[int, ...] | None = None  # which columns the cells stand in; None is all of them

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
    """Numbers as coloured cells; a page has a selector for each choice, and selectors of one name move together."""

    name: str  # of its files and its anchor: lower case letters, digits, - and _
    title: str  # what it shows
    columns: tuple[str, ...]  # their names
    rows: tuple[Cells, ...]  # their names and numbers
    # what can be chosen, by name; the first of each is what files and terminals show
    choices: Mapping[str, tuple[str, ...]] = {}
    # what the colours of cells are relative to: the whole table, or each column
    within: Literal["table", "column"] = "table"
    corner: str = ""  # what the rows are
    note: str = ""  # a sentence under it

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
