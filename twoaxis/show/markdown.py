"""A document as GitHub-flavoured Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence

from twoaxis.show.charts import Chart, Grid
from twoaxis.show.document import (
    Block,
    Cell,
    Code,
    Column,
    Document,
    Facts,
    Heading,
    Items,
    Prose,
    Table,
    address,
    grid_table,
    slug,
    spans,
)

_SIGNS = re.compile(r"[*<]|(?<!\w)_|(?<=\])\(")
"""Signs that would make emphasis, an element or a link; an underscore after a letter does not."""
_BEGINNINGS = re.compile(r"^(#{1,6}\s|[-+>]|\d+[.)]\s)")
"""What would make a paragraph something else."""


def render(document: Document, figures: str | None = None) -> str:
    """The document.

    Args:
        document: what is written.
        figures: charts are links to svg files whose names begin so; None leaves them out.
    """
    parts = [f"# {escape(document.title)}"] if document.title else []
    parts += [made for block in document.blocks if (made := _block(block, figures))]
    return "\n\n".join(parts) + "\n"


def _block(block: Block, figures: str | None) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {escape(text)}"
        case Prose(text):
            return _BEGINNINGS.sub(r"\\\1", words(text))
        case Items(items):
            return "\n".join(f"- {words(item)}" for item in items)
        case Code(text):
            fence = "```" if "```" not in text else "````"
            return f"{fence}text\n{text}\n{fence}"
        case Facts(pairs):
            return "\n".join(f"- **{escape(name)}**: {words(value)}" for name, value in pairs)
        case Table():
            return _table(block)
        case Grid():
            made = grid_table(block)
            drawn = _block(block.chart(), figures) if block.within == "table" else ""
            parts = (f"### {escape(block.title)}", _table(made) if made else "", drawn)
            return "\n\n".join(part for part in parts if part) if made or drawn else ""
        case Chart():
            if figures is None:
                return ""
            note = f"\n\n{words(block.note)}" if block.note else ""
            return f"![{escape(block.title)}]({figures}{block.name}.svg){note}"


def words(text: str) -> str:
    """Words with their bold and code; other signs are escaped so that they mean themselves."""
    marks = {"": "", "bold": "**", "code": "`"}
    made = []
    for text_, style in spans(text):
        made.append(f"{marks[style]}{text_ if style == 'code' else escape(text_)}{marks[style]}")
    return "".join(made)


def escape(text: str) -> str:
    """Plain text so that Markdown leaves it as it is."""
    return _SIGNS.sub(lambda found: f"\\{found[0]}", text)


def _table(table: Table) -> str:
    heads = [escape(column.head) for column in table.columns]
    lines = [_line(heads), _line(["---:" if column.number else "---" for column in table.columns])]
    for number, row in enumerate(table.rows):
        if number in table.sections:
            lines.append(_line([f"**{escape(table.sections[number])}**", *[""] * (len(row) - 1)]))
        lines.append(_line([_cell(column, cell) for column, cell in zip(table.columns, row, strict=True)]))
    return "\n\n".join(["\n".join(lines), *(words(note) for note in table.notes)])


def _cell(column: Column, cell: Cell) -> str:
    if column.code:
        return f"`{cell.text}`" if cell.text else ""
    if cell.href:
        return f"[{escape(cell.text)}]({address(cell.href)})"
    if column.link:
        return f"[{escape(cell.text)}](#{slug(cell.text)})"
    return f"**{words(cell.text)}**" if cell.tone in ("better", "worse") else words(cell.text)


def _line(cells: Sequence[str]) -> str:
    joined = " | ".join(" ".join(cell.replace("|", "\\|").splitlines()) for cell in cells)
    return f"| {joined} |"
