"""A document as a list of blocks, written as Markdown, as plain text or, where `rich` is installed, in colour.

    blocks ──┬──► markdown(blocks)        files and web pages
             ├──► text(blocks, width)     pipes, and terminals without rich
             └──► show(blocks)            whichever suits standard output

A table wider than the page wraps the words of its cells; where even that leaves columns too narrow to read, it becomes
several tables with the first column repeated.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

GAP = 2
"""Blank columns between the columns of a text table."""
READABLE = 14
"""A column of prose is not made narrower than this to fit one more beside it."""
PROSE = 100
"""Paragraphs are not wider than this however wide the terminal."""
PIPE = 120
"""Width where standard output has none; COLUMNS in the environment says otherwise."""


class Heading(NamedTuple):
    """A title; level 1 is the document's."""

    text: str
    level: int = 2


class Prose(NamedTuple):
    """A paragraph, with Markdown's bold and code."""

    text: str


class Code(NamedTuple):
    """Lines that keep their form: an equation, a drawing."""

    text: str


class Items(NamedTuple):
    """A list of paragraphs."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """Rows under headers.

    Attributes:
        headers: one per column; the first column names the row.
        rows: cells as plain text.
        right: columns that are numbers.
        sections: for the number of a row, the title of the section that begins with it.
        anchors: link the first column to the heading of the same name, where the form has links.
        code: columns that are code.
    """

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[int] = frozenset()
    sections: dict[int, str] = field(default_factory=dict)
    anchors: bool = False
    code: frozenset[int] = frozenset()


Block = Heading | Prose | Code | Items | Table


# Markdown.


def markdown(blocks: Sequence[Block]) -> str:
    """The document as GitHub-flavoured Markdown."""
    return "\n\n".join(_markdown_block(block) for block in blocks) + "\n"


def _markdown_block(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {text}"
        case Prose(text):
            return text
        case Code(text):
            return f"```text\n{text}\n```"
        case Items(items):
            return "\n".join(f"- {item}" for item in items)
        case Table():
            return _markdown_table(block)


def _markdown_table(table: Table) -> str:
    columns = range(len(table.headers))
    lines = [_pipes(table.headers), _pipes(["---:" if i in table.right else "---" for i in columns])]
    for number, row in enumerate(table.rows):
        if number in table.sections:
            lines.append(_pipes([f"**{table.sections[number]}**", *[""] * (len(row) - 1)]))
        lines.append(_pipes([_markdown_cell(table, i, cell) for i, cell in enumerate(row)]))
    return "\n".join(lines)


def _pipes(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown_cell(table: Table, column: int, cell: str) -> str:
    if column == 0 and table.anchors:
        return f"[{cell}](#{cell})"
    if column in table.code:
        return f"`{cell}`".replace("|", "\\|") if cell else ""
    return escape(cell).replace("|", "\\|")


def escape(text: str) -> str:
    """Plain words so that Markdown leaves them as they are; code between backticks stays code."""
    pieces = text.split("`")
    for i in range(0, len(pieces), 2):
        for sign in "*<":
            pieces[i] = pieces[i].replace(sign, f"\\{sign}")
    return "`".join(pieces)


def unmark(text: str) -> str:
    """A paragraph without Markdown's bold and escapes."""
    for marked, plain in (("**", ""), ("\\*", "*"), ("\\<", "<")):
        text = text.replace(marked, plain)
    return text


# The layout of tables, for text and rich alike.


def wrap(text: str, width: int) -> list[str]:
    """Words in lines of at most `width`; a longer word is cut."""
    return textwrap.wrap(text, width, break_on_hyphens=False) or [""]


def fit(table: Table, width: int) -> list[tuple[Table, list[int]]]:
    """The table as one or several that fit into `width`, each with the widths of its columns."""
    columns = [[*header.split(), *(row[i] for row in table.rows)] for i, header in enumerate(table.headers)]
    natural = [max(map(len, cells)) for cells in columns]  # a header takes as many lines as it has words
    longest = [max(len(word) for cell in cells for word in cell.split() or [""]) for cells in columns]
    needed = [min(n, max(w, READABLE)) for n, w in zip(natural, longest, strict=True)]
    groups: list[list[int]] = [[0]]
    for i in range(1, len(columns)):
        if len(groups[-1]) > 1 and sum(needed[j] + GAP for j in groups[-1]) + needed[i] > width:
            groups.append([0])
        groups[-1].append(i)
    return [(_select(table, g), _widths([natural[i] for i in g], [needed[i] for i in g], width)) for g in groups]


def _select(table: Table, columns: list[int]) -> Table:
    return Table(
        headers=tuple(table.headers[i] for i in columns),
        rows=tuple(tuple(row[i] for i in columns) for row in table.rows),
        right=frozenset(n for n, i in enumerate(columns) if i in table.right),
        sections=table.sections,
        code=frozenset(n for n, i in enumerate(columns) if i in table.code),
    )


def _widths(natural: list[int], needed: list[int], width: int) -> list[int]:
    """Every column up to a common cap, the largest that fits, and none below what it needs if that is possible."""
    room = width - GAP * (len(natural) - 1)
    if sum(needed) > room:  # one column beside the first: it gets what is left
        return [needed[0], *(max(room - needed[0], 8) for _ in natural[1:])]
    cap = 0
    while cap < max(natural) and sum(_capped(natural, needed, cap + 1)) <= room:
        cap += 1
    widths = _capped(natural, needed, cap)
    for i, full in enumerate(natural):
        if widths[i] < full and sum(widths) < room:
            widths[i] += 1
    return widths


def _capped(natural: list[int], needed: list[int], cap: int) -> list[int]:
    return [min(n, max(cap, least)) for n, least in zip(natural, needed, strict=True)]


# Plain text.


def text(blocks: Sequence[Block], width: int = PIPE) -> str:
    """The document as plain text of at most `width` columns; code keeps its own width."""
    return "\n\n".join(_text_block(block, width) for block in blocks) + "\n"


def _text_block(block: Block, width: int) -> str:
    match block:
        case Heading(words, level):
            return f"{words}\n{'=' * len(words)}" if level == 1 else words.upper() if level == 2 else words
        case Prose(words):
            return textwrap.fill(unmark(words), min(width, PROSE), break_on_hyphens=False)
        case Code(words):
            return textwrap.indent(words, "    ")
        case Items(items):
            return "\n".join(_bullet(item, min(width, PROSE)) for item in items)
        case Table():
            return "\n\n".join(_text_table(part, widths) for part, widths in fit(block, width))


def _bullet(item: str, width: int) -> str:
    return textwrap.fill(unmark(item), width, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)


def _text_table(table: Table, widths: list[int]) -> str:
    lines = _text_row(table, table.headers, widths, bottom=True)
    lines.append((" " * GAP).join("-" * w for w in widths))
    folded = any(len(_text_row(table, row, widths)) > 1 for row in table.rows)
    for number, row in enumerate(table.rows):
        if number in table.sections:
            lines += ["", f"[{table.sections[number]}]"]
        elif folded and number:
            lines.append("")  # rows of several lines need air between them
        lines += _text_row(table, row, widths)
    return "\n".join(lines)


def _text_row(table: Table, row: Sequence[str], widths: list[int], bottom: bool = False) -> list[str]:
    cells = [wrap(cell, w) for cell, w in zip(row, widths, strict=True)]
    height = max(map(len, cells))
    if bottom:
        cells = [[""] * (height - len(cell)) + cell for cell in cells]
    lines = []
    for i in range(height):
        parts = [cell[i] if i < len(cell) else "" for cell in cells]
        aligned = [
            p.rjust(w) if n in table.right else p.ljust(w) for n, (p, w) in enumerate(zip(parts, widths, strict=True))
        ]
        lines.append((" " * GAP).join(aligned).rstrip())
    return lines


# The terminal.


def show(blocks: Sequence[Block]) -> None:
    """Print to standard output: in colour on a terminal with `rich`, else as plain text."""
    width = shutil.get_terminal_size((PIPE, 24)).columns
    try:
        from rich.console import Console
    except ImportError:
        Console = None
    if Console is None or not sys.stdout.isatty():
        print(text(blocks, width), end="", flush=True)
    else:
        show_rich(blocks, Console(width=width, highlight=False))


def show_rich(blocks: Sequence[Block], console: Any) -> None:
    """Print to a `rich` console, with the layout of the plain text."""
    from rich.text import Text

    for number, block in enumerate(blocks):
        if number:
            console.print()
        match block:
            case Heading(words, level):
                console.print(Text(words, style="bold cyan" if level == 1 else "bold"))
            case Code(words):
                console.print(Text(textwrap.indent(words, "    "), style="cyan"), soft_wrap=True)
            case Table():
                for order, (part, widths) in enumerate(fit(block, console.width)):
                    if order:
                        console.print()
                    console.print(_rich_table(part, widths))
            case _:
                console.print(Text(_text_block(block, console.width)))


def _rich_table(table: Table, widths: list[int]) -> Any:
    from rich.table import Table as RichTable
    from rich.text import Text

    made = RichTable(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold underline")
    for number, (header, w) in enumerate(zip(table.headers, widths, strict=True)):
        style = "green" if number == 0 else "cyan" if number in table.code else None
        made.add_column(Text(header), width=w, justify="right" if number in table.right else "left", style=style)
    folded = any(len(_text_row(table, row, widths)) > 1 for row in table.rows)
    blank = [Text("")] * len(widths)
    for number, row in enumerate(table.rows):
        if number in table.sections:
            made.add_row(*blank)
            made.add_row(Text(table.sections[number], style="bold magenta"), *blank[1:])
        elif folded and number:
            made.add_row(*blank)
        # wrapped here, so that both forms break lines at the same words
        made.add_row(*(Text("\n".join(wrap(cell, w))) for cell, w in zip(row, widths, strict=True)))
    return made
