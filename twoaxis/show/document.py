"""A document is a title and blocks, as plain data; what has one can be printed, saved and seen in a notebook.

Words (prose, items, notes, values of facts, cells) may have `code` between backticks and **bold** between two stars;
everything else in them means itself, whatever the form it is written in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

from twoaxis.show.charts import Chart, Grid, Tone
from twoaxis.show.numbers import digits


class Heading(NamedTuple):
    """A title inside a document; level 1 is the document's own."""

    text: str
    level: int = 2


class Prose(NamedTuple):
    """A paragraph."""

    text: str


class Items(NamedTuple):
    """A list of paragraphs."""

    items: tuple[str, ...]


class Code(NamedTuple):
    """Lines that keep their form: a command, an equation, a drawing."""

    text: str


class Facts(NamedTuple):
    """Names and what they have for a value, one under the other."""

    pairs: tuple[tuple[str, str], ...]


class Cell(NamedTuple):
    """A place in a table."""

    text: str  # what is shown
    value: float | None = None  # the number behind it, for sorting; None sorts by the text
    tone: Tone = ""  # its colour by meaning
    href: str = ""  # a file or folder it leads to, relative to where the document is saved; nothing leads nowhere


class Column(NamedTuple):
    """A column of a table."""

    head: str  # its title
    number: bool = True  # whether it is set to the right
    code: bool = False  # whether its cells are code
    link: bool = False  # whether its cells lead to the heading of the same name


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns; the first column names the row."""

    columns: tuple[Column, ...]  # what the cells are
    rows: tuple[tuple[Cell, ...], ...]  # as many cells as columns in each
    notes: tuple[str, ...] = ()  # sentences under the table
    # for the number of a row, the title of the section that begins with it
    sections: Mapping[int, str] = field(default_factory=dict)
    baseline: int | None = None  # number of the row that the others are compared with

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row) == len(self.columns), f"a row of {len(row)} cells under {len(self.columns)} columns"


def table(
    heads: Iterable[str | Column],
    rows: Iterable[Sequence[str | Cell]],
    *,
    notes: Sequence[str] = (),
    sections: Mapping[int, str] | None = None,
    baseline: int | None = None,
) -> Table:
    """A table from plain strings: a head is a column of numbers, the first one of names; a `Column` is what it says."""
    columns = [h if isinstance(h, Column) else Column(h, number=place > 0) for place, h in enumerate(heads)]
    cells = tuple(tuple(c if isinstance(c, Cell) else Cell(c) for c in row) for row in rows)
    return Table(tuple(columns), cells, tuple(notes), sections or {}, baseline)


WIDE = 16
"""Columns of a grid that are still a table of numbers."""


def grid_table(grid: Grid) -> Table | None:
    """The first choice of a grid as a table of numbers; None where it has too many columns to be read as one."""
    if len(grid.columns) > WIDE:
        return None
    rows = [(row.label, *map(digits, row.first(len(grid.columns)))) for row in grid.rows]
    return table((grid.corner, *grid.columns), rows, notes=(grid.note,) if grid.note else ())


Block = Heading | Prose | Items | Code | Facts | Table | Chart | Grid


class Document(NamedTuple):
    """A title, which may be empty, and what stands under it."""

    title: str
    blocks: tuple[Block, ...]

    @property
    def charts(self) -> tuple[Chart, ...]:
        """The charts among its blocks; a grid is one if its colours go by the whole table."""
        grids = [b.chart() if isinstance(b, Grid) and b.within == "table" else b for b in self.blocks]
        return tuple(block for block in grids if isinstance(block, Chart))


# Words.


class Span(NamedTuple):
    """A piece of words in one style."""

    text: str
    style: Literal["", "bold", "code"] = ""


_MARKED = re.compile(r"`([^`]+)`|(?<![\w*])\*\*(?=\S)(.+?)(?<=\S)\*\*(?![\w*])")


def spans(text: str) -> Iterator[Span]:
    """Words in pieces of one style each."""
    end = 0
    for found in _MARKED.finditer(text):
        if found.start() > end:
            yield Span(text[end : found.start()])
        yield Span(found[1], "code") if found[1] is not None else Span(found[2], "bold")
        end = found.end()
    if end < len(text):
        yield Span(text[end:])


def slug(text: str) -> str:
    """A heading's anchor, as web sites make it from Markdown."""
    return re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")


def address(path: str) -> str:
    """A relative path as a link; what would be an address elsewhere or a script leads into the folder instead."""
    return ("" if path.startswith(".") else "./") + quote(path, safe="/")


# What has a document.


class Saved(NamedTuple):
    """What `Showable.save` wrote."""

    files: tuple[Path, ...]  # where they are
    note: str = ""  # what was left out and why, or nothing


class Showable:
    """Base class of results: whatever has a document can be printed, saved and seen in a notebook."""

    data_file = ""  # name of its JSON among the files that are saved; nothing is that of the others

    @property
    def exit_code(self) -> int:
        """What a command ends with that has this result: 0 where all is well."""
        return 0

    def document(self) -> Document:
        """The result in words, tables and charts."""
        raise NotImplementedError(f"{type(self).__name__} has no document")

    def to_dict(self) -> dict[str, Any]:
        """The result as plain values, for JSON."""
        raise NotImplementedError(f"{type(self).__name__} has no dictionary")

    def __init_subclass__(cls) -> None:
        # a dataclass keeps the one that it finds; its own would print whole models
        cls.__repr__ = Showable.__repr__

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: .show() prints it, .rows(), .frame() and .to_dict() have its values>"

    def show(self, width: int | None = None) -> None:
        """Print it; `width` None is the terminal's, or 80 columns where there is none."""
        from twoaxis.show import terminal

        terminal.show(self.document(), width)

    def _repr_html_(self) -> str:
        from twoaxis.show import page

        return page.render(self.document(), whole=False)

    def rows(self) -> list[dict[str, Any]]:
        """The first table as a dictionary for each row, by column; of a result without tables, its facts as one row.

        A cell is its number where it has one, else its text.
        """
        blocks = self.document().blocks
        table = next((block for block in blocks if isinstance(block, Table)), None)
        if table is None:
            facts = {name: value for block in blocks if isinstance(block, Facts) for name, value in block.pairs if name}
            return [facts] if facts else []
        heads = [column.head for column in table.columns]
        values = ((cell.text if cell.value is None else cell.value for cell in row) for row in table.rows)
        return [dict(zip(heads, row, strict=True)) for row in values]

    def frame(self) -> Any:
        """The same as a data frame of pandas, or of polars where pandas is not installed."""
        from importlib import import_module
        from importlib.util import find_spec

        for name in ("pandas", "polars"):
            if find_spec(name):
                return import_module(name).DataFrame(self.rows())
        raise ValueError("a frame needs pandas or polars, and neither is installed; rows() needs none of them")

    def save(self, folder: str | Path, stem: str = "report") -> Saved:
        """Write it as Markdown, as a page and as JSON, and its charts as svg and png beside them."""
        from twoaxis.base.files import json_text, write_bytes
        from twoaxis.show import figures, markdown, page

        document, note = self.document(), ""
        drawn: dict[str, bytes] = {}
        try:
            for chart in document.charts:
                drawn[f"{stem}-{chart.name}.svg"] = figures.svg(chart).encode()
                drawn[f"{stem}-{chart.name}.png"] = figures.png(chart)
        except figures.NoFiguresError as missing:
            note = str(missing)
        files = {
            f"{stem}.md": markdown.render(document, figures=None if note else f"{stem}-").encode(),
            f"{stem}.html": page.render(document).encode(),
            self.data_file or f"{stem}.json": json_text(self.to_dict()).encode(),
            **drawn,
        }
        for name, data in files.items():
            write_bytes(Path(folder) / name, data)
        return Saved(tuple(Path(folder) / name for name in files), note)


@dataclass(frozen=True)
class Shown(Showable):
    """A result that is plain values and a document of them."""

    values: Any  # for JSON
    page: Document  # what is shown of them

    def to_dict(self) -> Any:
        """The values."""
        return self.values

    def document(self) -> Document:
        """The page."""
        return self.page
