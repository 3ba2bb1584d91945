"""The documents of the atlas: the map, a method's page, the whole of it for the docs, and the same as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import twoaxis
from twoaxis.depth.stream import Stream
from twoaxis.guide.columns import COLUMNS, GROUPS, TITLES, choose, table
from twoaxis.guide.document import Block, Heading, Items, Prose, Table, escape, markdown
from twoaxis.guide.entries import Entry, Measured, block_parameters, entries, make_shape
from twoaxis.guide.source import notes, options
from twoaxis.model.config import DecoderConfig

COMMAND = "python -m twoaxis.guide > docs/methods.md"
"""What writes the docs."""


def setting(shape: DecoderConfig) -> str:
    """The shape in words, with what shares are shares of."""
    body = block_parameters(shape)
    heads = "1 head" if shape.heads == 1 else f"{shape.heads} heads"
    kv = f", {shape.kv_heads} for keys and values" if shape.kv_heads else ""
    return (
        f"Costs are for {shape.blocks} blocks of width {shape.width} with {heads} of width "
        f"{shape.head_size}{kv} and MLPs of hidden width {shape.hidden_width(0)}: attention and MLP matrices of "
        f"{body:,} parameters and {2 * body:,} FLOPs per token. "
        "Every method has its default options. Not counted: the pre-norms of a mixer's own site and of additional ways."
    )


def the_map(shape: DecoderConfig, columns: Sequence[str] = ()) -> list[Block]:
    """The map: the tables for the asked columns, and the shape they are for."""
    tables = choose(columns)
    rows = entries(shape)
    blocks: list[Block] = []
    for title, keys in tables:
        blocks += [Heading(title), table(rows, keys)]
    if not any(key in GROUPS["cost"] for _, keys in tables for key in keys):
        return blocks
    problems = tuple(
        f"`{e.name}` cannot be built for this shape: {e.default.problem}" for e in rows if e.default.problem
    )
    return [*blocks, Prose(setting(shape)), *([Items(problems)] if problems else [])]


def more() -> Prose:
    """What to ask next, under the short map."""
    return Prose(
        "`twoaxis methods NAME` prints a method's page; `--columns all` the other columns "
        f"({', '.join(GROUPS)}); `--blocks`, `--width`, `--heads` another shape."
    )


# The page of one method.


def page(entry: Entry, level: int = 1) -> list[Block]:
    """A method's page; `level` is that of its heading."""
    card, said = entry.card, notes(entry.method)
    kind = "stream" if issubclass(entry.method, Stream) else "mixer"
    blocks: list[Block] = [Heading(entry.name, level)]
    blocks.append(Prose(f"**{escape(card.title)}**: a {kind} on the {card.axis} axis, {card.year}."))
    blocks += [Prose(said.summary), *said.body] if said.summary else []
    blocks += [Heading("On the map", level + 1), _facts(entry)]
    blocks += [Heading("Options", level + 1), *_options(entry)]
    blocks += [Heading("Cost and neutral class", level + 1), *_costs(entry)]
    if entry.default.dead:
        dead = tuple(f"`{name}`: {why}" for name, why in entry.default.dead.items())
        blocks += [Heading("Parameters that never get a gradient", level + 1), Items(dead)]
    if card.quirks:
        blocks += [Heading("What surprises", level + 1), Items(tuple(escape(q) for q in card.quirks))]
    if card.published:
        results = tuple(f"{escape(p.result)} [{escape(p.source)}]" for p in card.published)
        blocks += [Heading("Published", level + 1), Items(results)]
    return blocks


def _facts(entry: Entry) -> Table:
    told = {"title", "axis", "year", *GROUPS["cost"]}
    chosen = [COLUMNS[key] for keys in GROUPS.values() for key in keys if key not in told]
    return Table(headers=("column", "value"), rows=tuple((c.header, c.cell(entry)) for c in chosen))


def _options(entry: Entry) -> list[Block]:
    found = options(entry.method.Config)
    blocks: list[Block] = []
    if found:
        rows = tuple((o.name, o.type, o.default, o.meaning) for o in found)
        blocks.append(Table(headers=("option", "type", "default", "meaning"), rows=rows, code=frozenset({0, 1, 2})))
    else:
        blocks.append(Prose("None of its own."))
    if issubclass(entry.method, Stream):
        blocks.append(
            Prose(
                "As every stream also `placement` (which blocks and sites use it) and `blend` (start as the plain "
                "residual)."
            )
        )
    return blocks


def _costs(entry: Entry) -> list[Block]:
    measured = (entry.default, *entry.variants())
    keys = ("parameters", "flops", "reads", "live", "kept")
    rows = tuple(
        (written(m.options), *("-" if m.cost is None else f"{getattr(m.cost, k):,}" for k in keys), m.neutral or "-")
        for m in measured
    )
    headers = ("options", *(COLUMNS[k].header for k in keys), "neutral")
    shape = entry.shape
    blocks: list[Block] = [
        Prose(f"For {shape.blocks} blocks of width {shape.width}:"),
        Table(headers=headers, rows=rows, right=frozenset(range(1, 6)), code=frozenset({0})),
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
        Heading("Methods", 1),
        Prose(
            "Every residual stream and local mixer stands here on one map, in the same words: which axis it reads "
            "along, what it reads, how it weighs and where the result goes. "
            "The cells come from the cards in the code, and the costs are those of modules built for one shape, not "
            "estimates. "
            f"This file is written by `{COMMAND}`; `twoaxis methods` prints the same for any shape, "
            "`twoaxis methods NAME` one page."
        ),
    ]
    rows = entries(shape)
    for name, keys in GROUPS.items():
        blocks += [Heading(TITLES[name]), table(rows, keys, anchors=True)]
    meanings = tuple(f"**{c.header}**: {c.meaning}" for keys in GROUPS.values() for c in map(COLUMNS.__getitem__, keys))
    blocks += [Prose(setting(shape)), Heading("What the columns mean"), Items(meanings)]
    for row in rows:
        blocks += page(row, level=2)
    return markdown(blocks)


# Plain values.


def document(shape: DecoderConfig, rows: Sequence[Entry]) -> dict[str, Any]:
    """Everything about some methods, for JSON."""
    return {
        "twoaxis": twoaxis.__version__,
        "shape": {
            "blocks": shape.blocks,
            "width": shape.width,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads or shape.heads,
            "head_width": shape.head_size,
            "hidden": shape.hidden_width(0),
            "block_parameters": block_parameters(shape),
        },
        "methods": [_plain(row) for row in rows],
    }


def _plain(entry: Entry) -> dict[str, Any]:
    said = asdict(entry.card)
    said["published"] = [p._asdict() for p in entry.card.published]
    return {
        "name": entry.name,
        "kind": "stream" if issubclass(entry.method, Stream) else "mixer",
        **said,
        **{key: COLUMNS[key].value(entry) for key in GROUPS["cost"]},
        "dead": dict(entry.default.dead),
        "problem": entry.default.problem,
        "summary": notes(entry.method).summary,
        "options": [o._asdict() for o in options(entry.method.Config)],
        "variants": [_plain_variant(m) for m in (entry.default, *entry.variants())],
    }


def _plain_variant(measured: Measured) -> dict[str, Any]:
    cost = {} if measured.cost is None else measured.cost._asdict()
    return {
        "options": dict(measured.options),
        **cost,
        "neutral": measured.neutral,
        "dead": dict(measured.dead),
        "problem": measured.problem,
    }
