"""What is shown of the map: the tables, and a method's page."""

from __future__ import annotations

import dataclasses
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args, get_type_hints

import twoaxis
from twoaxis.base.options import field_docs
from twoaxis.guide.evidence import read_evidence, sentences
from twoaxis.guide.map import GROUPS, Entry, block_parameters, choose, entries, header, table, text
from twoaxis.model.config import ModelConfig
from twoaxis.show import numbers
from twoaxis.show.document import Block, Code, Column, Document, Facts, Heading, Items, Prose, Showable
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
    """The map of every method, for one shape of decoder."""

    shape: ModelConfig  # the decoder that costs are counted for
    columns: tuple[str, ...] = ()  # columns, groups of them, or `all`; nothing is the short map

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


# What a method's file says about it: the module's docstring in parts, and the options with their docstrings.


class Option(NamedTuple):
    """One option of a method."""

    name: str  # of the field
    type: str  # its annotation, choices listed as they are
    default: str  # its value as Python writes it, or "required"
    meaning: str  # the docstring under it


class Notes(NamedTuple):
    """A module's docstring."""

    summary: str  # the first line
    body: tuple[Prose | Code | Items, ...]  # what follows; equations and drawings are `Code`


def options(config: Any) -> tuple[Option, ...]:
    """The options of a Config dataclass, in its order."""
    docs = field_docs(config)
    try:
        hints = get_type_hints(config)
    except NameError:  # an annotation that only a type checker can resolve
        hints = {}
    return tuple(
        Option(f.name, _annotation(hints.get(f.name, f.type)), _default(f), docs.get(f.name, ""))
        for f in dataclasses.fields(config)
        if f.init
    )


def _annotation(kind: Any) -> str:
    """A type in few signs: choices are listed as they are."""
    named = kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind).replace("typing.", "")
    optional = re.sub(r"^Optional\[(.*)\]$", r"\1 | None", named)
    return re.sub(r"Literal\[([^\]]*)\]", lambda found: found[1].replace(", ", " | "), optional)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return repr(field.default_factory())
    return "required"


def notes(cls: type) -> Notes:
    """The docstring of the module that defines `cls`, in parts."""
    module = sys.modules.get(cls.__module__)
    # not cleaned: where all but the first line is an equation, that would take the equation's indentation
    said: str = getattr(module, "__doc__", None) or ""
    summary, _, rest = said.strip().partition("\n")
    body: list[Prose | Code | Items] = []
    for chunk in rest.strip("\n").split("\n\n"):
        if not chunk.strip():
            continue
        lines = chunk.strip("\n").split("\n")
        if not all(line.startswith("    ") for line in lines):
            body += _words(lines)
            continue
        code = "\n".join(line[4:].rstrip() for line in lines)
        if body and isinstance(last := body[-1], Code):
            code = f"{last.text}\n\n{code}"
            body.pop()
        body.append(Code(code))
    return Notes(summary, tuple(body))


def _words(lines: list[str]) -> list[Prose | Items]:
    """A paragraph, and the list under it if there is one."""
    lead: list[str] = []
    items: list[str] = []
    for line in lines:
        if line.startswith("- "):
            items.append(line[2:].strip())
        elif items:
            items[-1] += f" {line.strip()}"
        else:
            lead.append(line.strip())
    parts: list[Prose | Items] = [Prose(" ".join(lead))] if lead else []
    return [*parts, Items(tuple(items))] if items else parts


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
    source = "" if card.paper == numbers.NOTHING else f" ({card.paper}, {card.year})"
    purpose = "" if card.purpose == numbers.NOTHING else f": {card.purpose}"
    blocks: list[Block] = [Prose(f"**{card.title}**{source}{purpose}.")] if source or purpose else []
    blocks.append(Prose(f"A {entry.axis} on the {card.axis} axis."))
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


def _facts(entry: Entry) -> Facts:
    row = entry.row()
    chosen = [key for name in ("read", "weights", "wiring") for key in GROUPS[name] if key != "axis"]
    return Facts(tuple((header(key), text(key, row[key])) for key in chosen if row[key] != numbers.NOTHING))


def _options(entry: Entry) -> list[Block]:
    found = tuple(f"`{o.name}` (`{o.type}`, default `{o.default}`): {o.meaning}" for o in options(entry.method.Config))
    blocks: list[Block] = [Items(found) if found else Prose("None of its own.")]
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
    rows = []
    for m in measured:
        first, *more = textwrap.wrap(
            written(m.options), OPTIONS, subsequent_indent="… ", break_long_words=False, break_on_hyphens=False
        )
        rows.append((first, *(numbers.whole(getattr(m, key)) for key in keys), m.neutral or numbers.NOTHING))
        rows += [(rest, "", "", "", "", "") for rest in more]
    options, neutral = Column("options", number=False, code=True), Column("neutral", number=False)
    shape = entry.shape
    blocks: list[Block] = [
        Prose(f"For {shape.num_hidden_layers} blocks of width {shape.hidden_size}:"),
        make_table((options, *map(header, keys), neutral), rows),
    ]
    problems = tuple(f"`{written(m.options)}`: {m.problem}" for m in measured if m.problem)
    return [*blocks, Items(problems)] if problems else blocks


OPTIONS = 42
"""Letters of a cell of options; longer ones go on in the next row, after three dots."""


def written(given: Mapping[str, Any]) -> str:
    """Options in a line."""
    return ", ".join(f"{key}={value}" for key, value in given.items()) or "defaults"


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
