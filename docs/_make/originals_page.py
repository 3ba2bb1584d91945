"""The tables of docs/howto/foreign_checkpoints.md: every tensor and every setting of other people's checkpoints."""

from __future__ import annotations

from typing import Any

from twoaxis.model.originals import FAMILIES, REQUIRED
from twoaxis.show import markdown
from twoaxis.show.document import Block, Column, Document, Heading, Items, Table, table


def names() -> str:
    """Each family's tensors; below them in which form, for which layers and in which other spelling they are there."""
    blocks: list[Block] = []
    for family in FAMILIES.values():
        called = [row.theirs for row in family.rows]
        noted: dict[str, list[str]] = {}
        for row in family.rows:
            name = f"`{row.theirs}`" + f" of `{row.shape}`" * (called.count(row.theirs) > 1)
            said = (row.note, row.form if row.option else "", row.where and f"if {row.where}")
            if note := "; ".join(filter(None, said)):
                noted.setdefault(note, []).append(name)
        rows = [(row.theirs, row.shape, row.ours) for row in family.rows]
        blocks += [Heading(family.name, 3), _table(("original name", "shape", "our parameter"), rows)]
        blocks += [Items(tuple(f"{', '.join(names)}: {note}." for note, names in noted.items()))] if noted else []
        also = [(row.theirs, other) for row in family.rows for other in row.also]
        blocks += [_table(("original name", "in files"), also)] if also else []
    return markdown.render(Document("", tuple(blocks)))


def settings() -> str:
    """A row for each field of a configuration, a section for each family."""
    rows: list[tuple[str, ...]] = []
    sections = {}
    for family in FAMILIES.values():
        sections[len(rows)] = family.name
        rows += [(s.name, s.ours, _default(s.default), s.note) for s in family.settings]
    return markdown.render(
        Document("", (_table(("original setting", "our option", "default", "note"), rows, sections),))
    )


def _default(default: Any) -> str:
    return "required" if default is REQUIRED else "found" if default is None else str(default)


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]], sections: dict[int, str] | None = None) -> Table:
    columns = [Column(head, number=False, code=head not in ("default", "note")) for head in heads]
    return table(columns, rows, sections=sections)


TABLES = {"names": names, "settings": settings}
