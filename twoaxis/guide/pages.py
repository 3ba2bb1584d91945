"""What is shown of the map: the tables, a method's page, and the whole of it for the docs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import twoaxis
from twoaxis.guide.evidence import read_evidence, sentences
from twoaxis.guide.map import (
    GROUPS,
    MEANINGS,
    TITLES,
    Entry,
    block_parameters,
    choose,
    entries,
    header,
    make_shape,
    table,
    text,
)
from twoaxis.guide.source import notes, options
from twoaxis.model.config import ModelConfig
from twoaxis.show import markdown, numbers
from twoaxis.show.document import Block, Column, Document, Heading, Items, Prose, Showable, Table
from twoaxis.show.document import table as make_table


def setting(shape: ModelConfig) -> str:
    """The shape in words, with what shares are shares of."""
    body = block_parameters(shape)
    heads = "1 head" if shape.num_attention_heads == 1 else f"{shape.num_attention_heads} heads"
    kv = f", {shape.kv_heads} for keys and values" if shape.num_key_value_heads else ""
    return (
        f"Costs are for {shape.num_hidden_layers} blocks of width {shape.hidden_size} with {heads} of width "
        f"{shape.head_size}{kv} and MLPs of hidden width {shape.hidden_width(0)}: attention and MLP matrices of "
        f"{body:,} parameters and {2 * body:,} FLOPs per token. "
        "Every method has its default options."
    )


@dataclass(frozen=True)
class MethodMap(Showable):
    """The map of every method, for one shape of decoder.

    Attributes:
        shape: the decoder that costs are counted for.
        columns: columns, groups of them, or `all`; nothing is the short map.
    """

    shape: ModelConfig
    columns: tuple[str, ...] = ()

    def document(self) -> Document:
        """The tables for the columns, and the shape they are for."""
        tables = choose(self.columns)
        rows = entries(self.shape)
        blocks: list[Block] = []
        for title, keys in tables:
            blocks += [Heading(title), table(rows, keys)]
        if any(key in GROUPS["cost"] for _, keys in tables for key in keys):
            blocks.append(Prose(setting(self.shape)))
            unbuilt = [(e.name, e.default.problem) for e in rows if e.default.problem]
            problems = tuple(f"`{name}` cannot be built for this shape: {problem}" for name, problem in unbuilt)
            blocks += [Items(problems)] if problems else []
        return Document("", (*blocks, *(() if self.columns else (NEXT,))))

    def to_dict(self) -> dict[str, Any]:
        """Everything about every method."""
        if self.columns:
            raise ValueError("--columns belongs to the map; --json always has everything")
        return _plain(self.shape, entries(self.shape))


NEXT = Prose(
    "`twoaxis methods NAME` prints a method's page; `--columns all` the other columns "
    f"({', '.join(GROUPS)}); `--blocks`, `--width`, `--heads` another shape."
)
"""What to ask next, under the short map."""


# The page of one method.


@dataclass(frozen=True)
class MethodPage(Showable):
    """Everything about one method."""

    entry: Entry

    def document(self) -> Document:
        """What it does, its place on the map, its options and costs, and what is published about it."""
        return Document(self.entry.name, tuple(page(self.entry, level=1)))

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        return _plain(self.entry.shape, (self.entry,))


def page(entry: Entry, level: int) -> list[Block]:
    """What stands under a method's heading, which has a level."""
    card, said = entry.card, notes(entry.method)
    blocks: list[Block] = [
        Prose(f"**{card.title}** ({card.paper}, {card.year}): {card.purpose}."),
        Prose(f"A {entry.axis} on the {card.axis} axis."),
    ]
    blocks += [Prose(said.summary), *said.body] if said.summary else []
    blocks += [Heading("On the map", level + 1), _facts(entry)]
    blocks += [Heading("Options", level + 1), *_options(entry)]
    blocks += [Heading("Cost and neutral class", level + 1), *_costs(entry)]
    if entry.default.dead:
        dead = tuple(f"`{name}`: {why}" for name, why in entry.default.dead.items())
        blocks += [Heading("Parameters that never get a gradient", level + 1), Items(dead)]
    results = sentences(read_evidence().of(entry.name))
    blocks += [Heading("Published", level + 1), Items(results)] if results else []
    return blocks


def _facts(entry: Entry) -> Table:
    told, row = {"axis", *GROUPS["about"], *GROUPS["cost"]}, entry.row()
    chosen = [key for keys in GROUPS.values() for key in keys if key not in told]
    return make_table(("column", Column("value", number=False)), [(header(k), text(k, row[k])) for k in chosen])


def _options(entry: Entry) -> list[Block]:
    found = options(entry.method.Config)
    blocks: list[Block] = []
    if found:
        heads = [
            Column(head, number=False, code=head != "meaning") for head in ("option", "type", "default", "meaning")
        ]
        blocks.append(make_table(heads, [(o.name, o.type, o.default, o.meaning) for o in found]))
    else:
        blocks.append(Prose("None of its own."))
    if entry.axis == "stream":
        blocks.append(
            Prose(
                "As every stream also `placement` (which blocks and sites use it) and `blend` (start as the plain "
                "residual)."
            )
        )
    return blocks


def _costs(entry: Entry) -> list[Block]:
    measured, keys = entry.variants(), ("parameters", "flops", "live", "kept")
    rows = [
        (written(m.options), *(numbers.whole(getattr(m, key)) for key in keys), m.neutral or numbers.NOTHING)
        for m in measured
    ]
    options, neutral = Column("options", number=False, code=True), Column("neutral", number=False)
    shape = entry.shape
    blocks: list[Block] = [
        Prose(f"For {shape.num_hidden_layers} blocks of width {shape.hidden_size}:"),
        make_table((options, *map(header, keys), neutral), rows),
    ]
    problems = tuple(f"`{written(m.options)}`: {m.problem}" for m in measured if m.problem)
    return [*blocks, Items(problems)] if problems else blocks


def written(given: Mapping[str, Any]) -> str:
    """Options in a line."""
    return ", ".join(f"{key}={value}" for key, value in given.items()) or "defaults"


# All of it.


def docs() -> str:
    """The reference page of the documentation, for the default shape."""
    shape = make_shape()
    blocks: list[Block] = [
        Prose(
            "Every residual stream and local mixer stands here on one map, in the same words: which axis it reads "
            "along, what it reads, how it weighs and where the result goes. "
            "The cells come from the cards in the code, and the costs are those of modules built for one shape, not "
            "estimates. This file is written by `make docs`; `twoaxis methods` prints the same for any shape, "
            "`twoaxis methods NAME` one page."
        ),
    ]
    rows = entries(shape)
    for name, keys in GROUPS.items():
        blocks += [Heading(TITLES[name]), table(rows, keys, link=True)]
    meanings = tuple(f"**{header(key)}**: {MEANINGS[key]}" for keys in GROUPS.values() for key in keys)
    blocks += [Prose(setting(shape)), Heading("What the columns mean"), Items(meanings)]
    for row in rows:
        blocks += [Heading(row.name), *page(row, level=2)]
    return markdown.render(Document("Methods", tuple(blocks)))


# Plain values.


def _plain(shape: ModelConfig, rows: Sequence[Entry]) -> dict[str, Any]:
    """Everything about some methods."""
    return {
        "twoaxis": twoaxis.__version__,
        "shape": {
            "blocks": shape.num_hidden_layers,
            "width": shape.hidden_size,
            "heads": shape.num_attention_heads,
            "kv_heads": shape.kv_heads,
            "head_width": shape.head_size,
            "hidden": shape.hidden_width(0),
            "block_parameters": block_parameters(shape),
        },
        "methods": [_plain_entry(row) for row in rows],
    }


def _plain_entry(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "kind": entry.axis,
        **entry.row(),
        "dead": dict(entry.default.dead),
        "problem": entry.default.problem,
        "summary": notes(entry.method).summary,
        "published": [record.to_dict() for record in read_evidence().of(entry.name)],
        "options": [o._asdict() for o in options(entry.method.Config)],
        "variants": [m._asdict() for m in entry.variants()],
    }
