"""The columns of the map, and the groups of them that make readable tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from twoaxis.base.method import Card
from twoaxis.base.options import field_docs
from twoaxis.base.registry import did_you_mean
from twoaxis.guide.entries import Entry, block_parameters
from twoaxis.show import document, numbers


class Column(NamedTuple):
    """One column of the map.

    Attributes:
        key: its name for `--columns` and in JSON.
        header: over the column.
        meaning: what stands in it, a sentence.
        value: of an entry, a plain value; None where there is none.
        right: whether it holds numbers.
    """

    key: str
    header: str
    meaning: str
    value: Callable[[Entry], Any]
    right: bool = False

    def text(self, entry: Entry) -> str:
        """The value as people read it."""
        value = self.value(entry)
        if isinstance(value, bool):
            return "yes" if value else "no"
        if value is None:
            return numbers.NOTHING
        if isinstance(value, float):
            return numbers.share(value)
        return numbers.whole(value) if isinstance(value, int) and self.key != "year" else str(value)


_HEADERS = {"literal_qkv": "QKV", "depth_state": "between layers", "token_state": "between tokens"}
_NOT_COLUMNS = ("quirks", "published")


def _card_columns() -> list[Column]:
    docs = field_docs(Card)

    def reader(key: str) -> Callable[[Entry], Any]:
        return lambda entry: getattr(entry.card, key)

    keys = [f.name for f in fields(Card) if f.name not in _NOT_COLUMNS]
    return [Column(k, _HEADERS.get(k, k), docs[k], reader(k), right=k == "year") for k in keys]


def _cost_columns() -> list[Column]:
    def count(key: str) -> Callable[[Entry], Any]:
        return lambda e: None if e.default.cost is None else getattr(e.default.cost, key)

    def ratio(key: str, per_parameter: int) -> Callable[[Entry], Any]:
        def value(e: Entry) -> float | None:
            whole = per_parameter * block_parameters(e.shape)
            return None if e.default.cost is None else getattr(e.default.cost, key) / whole

        return value

    return [
        Column("parameters", "parameters", "Numbers learned, all blocks.", count("parameters"), True),
        Column(
            "parameters_share",
            "of blocks",
            "The same as a share of the attention and MLP matrices.",
            ratio("parameters", 1),
            True,
        ),
        Column(
            "flops",
            "FLOPs per token",
            "Added floating-point operations per token and forward pass; a multiply-add is 2.",
            count("flops"),
            True,
        ),
        Column(
            "flops_share",
            "of matmuls",
            "The same as a share of those of the attention and MLP matrices.",
            ratio("flops", 2),
            True,
        ),
        Column("reads", "reads per token", "Source vectors that the reads of one token touch.", count("reads"), True),
        Column(
            "live",
            "live per token",
            "Numbers per token carried from layer to layer, at their most; the plain residual's is the width.",
            count("live"),
            True,
        ),
        Column("kept", "kept per sequence", "Numbers per sequence kept between tokens.", count("kept"), True),
        Column(
            "neutral",
            "neutral",
            "How exactly some parameters make the model the plain one: bitwise, rounding (order of sums), "
            "scale (up to the pre-norm's epsilon) or none.",
            lambda e: e.default.neutral,
        ),
    ]


COLUMNS: dict[str, Column] = {c.key: c for c in (*_card_columns(), *_cost_columns())}
"""Every column by its key."""

GROUPS: dict[str, tuple[str, ...]] = {
    "read": ("axis", "source", "window", "granularity", "ways"),
    "weights": ("query", "key", "value", "literal_qkv", "normaliser", "adaptivity", "gating"),
    "wiring": ("injection", "sharing", "depth_state", "token_state"),
    "cost": ("parameters", "parameters_share", "flops", "flops_share", "reads", "live", "kept", "neutral"),
    "origin": ("title", "paper", "year"),
}
"""Every column once, in tables that can be read."""

TITLES = {
    "map": "The map",
    "read": "What is read",
    "weights": "How it is weighed",
    "wiring": "Where it goes, what is shared and carried",
    "cost": "What it costs",
    "origin": "Where it comes from",
}
"""Headings of the groups."""

SHORT: dict[str, tuple[str, ...]] = {
    "map": ("literal_qkv", "source", "window", "normaliser", "adaptivity"),
    "cost": ("parameters", "parameters_share", "flops", "flops_share", "live", "kept", "neutral"),
}
"""What a terminal shows unless asked for more."""


def choose(asked: Sequence[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Titles and columns of the tables to show.

    Args:
        asked: columns, groups of them, or `all`; nothing is the short map.
    """
    if not asked:
        return [(TITLES[name], keys) for name, keys in SHORT.items()]
    words = [word for part in asked for word in part.split(",") if word]
    if "all" in words:
        return [(TITLES[name], keys) for name, keys in GROUPS.items()]
    known = ["all", *GROUPS, *COLUMNS]
    for word in words:
        if word not in known:
            hint = did_you_mean(word, known)
            raise ValueError(
                f"unknown column {word!r}{hint}; the groups are {', '.join(['all', *GROUPS])}, "
                f"the columns are {', '.join(COLUMNS)}"
            )
    single = tuple(dict.fromkeys(w for w in words if w in COLUMNS))
    tables = [(TITLES[w], GROUPS[w]) for w in dict.fromkeys(words) if w in GROUPS]
    return [(TITLES["map"], single), *tables] if single else tables


def table(entries: Sequence[Entry], keys: Sequence[str], *, link: bool = False) -> document.Table:
    """The table of some columns, a section per axis; `link` leads from a name to its page in the same document."""
    columns = [COLUMNS[key] for key in keys]
    heads = [document.Column("method", number=False, link=link)]
    heads += [document.Column(column.header, number=column.right) for column in columns]
    axes = [e.card.axis for e in entries]
    return document.table(
        heads,
        [(e.name, *(_cell(column, e) for column in columns)) for e in entries],
        sections={i: f"{axis} axis" for i, axis in enumerate(axes) if i == 0 or axis != axes[i - 1]},
    )


def _cell(column: Column, entry: Entry) -> document.Cell:
    return document.Cell(column.text(entry), column.value(entry) if column.right else None)
