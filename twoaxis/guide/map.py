"""The map of methods: every registered one with its card, its exact numbers for a shape of decoder, and the columns.

Modules are built on the meta device, where parameters have a size and no storage, so that any shape can be asked about.
What a method adds is what the whole decoder has more with it than without, counted as everywhere else: by
`twoaxis.model.flops` and `twoaxis.depth.counts`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

from twoaxis.base.method import Card
from twoaxis.base.options import field_docs
from twoaxis.base.registry import Registry, did_you_mean
from twoaxis.depth.counts import count
from twoaxis.depth.registry import STREAMS
from twoaxis.depth.stream import Stream
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Trunk
from twoaxis.model.flops import Parameters, count_parameters, forward_flops
from twoaxis.sequence.mixer import LocalOperator
from twoaxis.sequence.registry import MIXERS
from twoaxis.show import document, numbers

CONTEXT = 4096
"""Tokens of the sequences that operations are counted for; what a method adds does not depend on it."""


class Measured(NamedTuple):
    """What a method with some options adds to a decoder; None where it cannot be built for the shape.

    Attributes:
        options: the options that are not the defaults.
        parameters: numbers learned, all blocks.
        flops: operations per token and forward pass.
        live: numbers per token carried from layer to layer, at their most.
        kept: numbers per sequence kept between tokens.
        neutral: its class.
        dead: parameters that can never get a gradient, and why.
        problem: why it cannot be built.
    """

    options: Mapping[str, Any]
    parameters: int | None = None
    flops: int | None = None
    live: int | None = None
    kept: int | None = None
    neutral: str | None = None
    dead: Mapping[str, str] = {}
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One method for one shape."""

    name: str
    """What the registry calls it."""
    method: type[Stream] | type[LocalOperator]
    """The class."""
    card: Card
    """What it says about itself."""
    shape: ModelConfig
    """The decoder that numbers are for."""
    default: Measured
    """With its default options."""

    @property
    def axis(self) -> str:
        """Stream or mixer."""
        return "stream" if issubclass(self.method, Stream) else "mixer"

    def variants(self) -> tuple[Measured, ...]:
        """With the defaults, and with each of the options that between them use every part of the method."""
        others = (measure(self.name, self.shape, options) for options in self.method.variants if options)
        return (self.default, *others)

    def row(self) -> dict[str, Any]:
        """The values of all columns, by key."""
        weights, found = block_parameters(self.shape), self.default._asdict()
        share = {"parameters_share": ("parameters", weights), "flops_share": ("flops", 2 * weights)}
        shares = {key: None if found[of] is None else found[of] / whole for key, (of, whole) in share.items()}
        return dataclasses.asdict(self.card) | {key: found[key] for key in COUNTED} | shares


def make_shape(
    blocks: int = 12,
    width: int = 768,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_width: int | None = None,
    hidden: int | None = None,
) -> ModelConfig:
    """A decoder's shape; `heads` None is one per 64 channels or a few less, the rest as in `ModelConfig`."""
    if heads is None:
        heads = next((h for h in range(width // 64, 1, -1) if width % (2 * h) == 0), 1)
    return ModelConfig(
        num_hidden_layers=blocks,
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_width,
        intermediate_size=hidden,
    )


def block_parameters(shape: ModelConfig) -> int:
    """Parameters of the decoder's attention and MLP matrices, all blocks; without embedding, norms and head."""
    counts = _plain(shape)
    return counts.attention + counts.mlp


def _plain(shape: ModelConfig) -> Parameters:
    """Of the decoder without methods; remembered, since every method asks."""
    if (key := repr(shape)) not in _PLAIN:
        _PLAIN[key] = count_parameters(shape)
    return _PLAIN[key]


_PLAIN: dict[str, Parameters] = {}


def names() -> tuple[str, ...]:
    """Every method: the streams, then the mixers."""
    return (*STREAMS.names(), *MIXERS.names())


def find(name: str) -> type[Stream] | type[LocalOperator]:
    """The class behind a name, stream or mixer."""
    entries: dict[str, Any] = {**STREAMS.entries, **MIXERS.entries}
    return cast("type[Stream] | type[LocalOperator]", Registry("method", entries).find(name))


def entry(name: str, shape: ModelConfig) -> Entry:
    """One method for `shape`."""
    method = find(name)
    axis = "depth" if issubclass(method, Stream) else "sequence"
    name = (STREAMS if axis == "depth" else MIXERS).canonical(name)
    card = getattr(method, "card", None) or Card.blank(name, axis)
    return Entry(name=name, method=method, card=card, shape=shape, default=measure(name, shape, {}))


def entries(shape: ModelConfig) -> tuple[Entry, ...]:
    """Every method for `shape`, depth axis first."""
    return tuple(entry(name, shape) for name in names())


def measure(name: str, shape: ModelConfig, options: Mapping[str, Any]) -> Measured:
    """A method with `options` for `shape`; options that do not go with the shape are reported, not raised."""
    axis = "stream" if issubclass(find(name), Stream) else "mixer"
    try:
        config = dataclasses.replace(shape, **{axis: name, f"{axis}_options": dict(options)})
        with torch.device("meta"):
            trunk = Trunk(config)
    except ValueError as error:
        return Measured(options, problem=str(error))
    flops, stream = forward_flops(config, CONTEXT, trunk=trunk), count(trunk.stream)
    locals_ = [module for module in trunk.modules() if isinstance(module, LocalOperator)]
    neutral = trunk.stream.neutral if axis == "stream" else min((local.neutral for local in locals_), key="none".__ne__)
    return Measured(
        options,
        count_parameters(config, trunk=trunk).total - _plain(shape).total,
        flops.stream + flops.mixer,
        stream.live,
        stream.kept + sum(local.cost().kept for local in locals_),
        neutral,
        trunk.stream.dead() | {name: why for local in locals_ for name, why in local.dead().items()},
    )


# Columns.

COUNTED = ("parameters", "flops", "live", "kept", "neutral")
MEANINGS: dict[str, str] = {
    **{field.name: field_docs(Card)[field.name] for field in dataclasses.fields(Card)},
    "parameters": "Numbers learned beyond the plain model's, all blocks.",
    "parameters_share": "The same as a share of the attention and MLP matrices.",
    "flops": "Added floating-point operations per token and forward pass; a multiply-add is 2.",
    "flops_share": "The same as a share of those of the attention and MLP matrices.",
    "live": "Numbers per token carried from layer to layer, at their most; the plain residual's is the width.",
    "kept": "Numbers per sequence kept between tokens.",
    "neutral": "How exactly some parameters make the model the plain one: bitwise, rounding (order of sums), "
    "scale (up to the pre-norm's epsilon) or none.",
}
"""Every column by its key, and what stands in it."""

HEADERS = {
    "literal_qkv": "QKV",
    "depth_state": "between layers",
    "token_state": "between tokens",
    "parameters_share": "of blocks",
    "flops": "FLOPs per token",
    "flops_share": "of matmuls",
    "live": "live per token",
    "kept": "kept per sequence",
}
"""What stands over a column, where it is not its key."""

GROUPS: dict[str, tuple[str, ...]] = {
    "about": ("title", "paper", "year", "goal", "purpose"),
    "read": ("axis", "source", "window", "granularity", "ways"),
    "weights": ("query", "key", "value", "literal_qkv", "normaliser", "adaptivity", "gating"),
    "wiring": ("injection", "sharing", "depth_state", "token_state"),
    "cost": ("parameters", "parameters_share", "flops", "flops_share", "live", "kept", "neutral"),
}
"""Every column once, in tables that can be read."""

TITLES = {
    "map": "The map",
    "about": "What there is",
    "read": "What is read",
    "weights": "How it is weighed",
    "wiring": "Where it goes, what is shared and carried",
    "cost": "What it costs",
}
"""Headings of the groups."""

SHORT: dict[str, tuple[str, ...]] = {"about": ("title", "paper", "year", "purpose"), "cost": GROUPS["cost"]}
"""What a terminal shows unless asked for more."""


def header(key: str) -> str:
    """What stands over a column."""
    return HEADERS.get(key, key)


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
    known = ["all", *GROUPS, *MEANINGS]
    for word in words:
        if word not in known:
            raise ValueError(
                f"unknown column {word!r}{did_you_mean(word, known)}; the groups are {', '.join(['all', *GROUPS])}, "
                f"the columns are {', '.join(MEANINGS)}"
            )
    single = tuple(dict.fromkeys(w for w in words if w in MEANINGS))
    tables = [(TITLES[w], GROUPS[w]) for w in dict.fromkeys(words) if w in GROUPS]
    return [(TITLES["map"], single), *tables] if single else tables


def table(entries: Sequence[Entry], keys: Sequence[str], *, link: bool = False) -> document.Table:
    """The table of some columns, a section per axis; `link` leads from a name to its page in the same document."""
    right = {*GROUPS["cost"], "year"} - {"neutral"}
    heads = [document.Column("method", number=False, link=link)]
    heads += [document.Column(header(key), number=key in right) for key in keys]
    body = []
    for each in entries:
        row = each.row()
        cells = (document.Cell(text(key, row[key]), row[key] if key in right else None) for key in keys)
        body.append((each.name, *cells))
    axes = [each.card.axis for each in entries]
    sections = {i: f"{axis} axis" for i, axis in enumerate(axes) if i == 0 or axis != axes[i - 1]}
    return document.table(heads, body, sections=sections)


def text(key: str, value: Any) -> str:
    """A value as people read it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) or value is None:
        return numbers.share(value)
    return numbers.whole(value) if isinstance(value, int) and key != "year" else str(value)
