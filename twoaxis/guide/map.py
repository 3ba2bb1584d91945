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
from twoaxis.base.registry import Registry, did_you_mean
from twoaxis.depth.counts import count
from twoaxis.depth.registry import STREAMS
from twoaxis.depth.stream import Stream
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.model.flops import Parameters, count_parameters, forward_flops
from twoaxis.sequence.mixer import LocalOperator
from twoaxis.sequence.registry import MIXERS
from twoaxis.show import document, numbers

CONTEXT = 4096
"""Tokens of the sequences that operations are counted for; what a method adds does not depend on it."""

WIDEST = 1 << 20
"""Width up to which a number of heads is looked for."""


class Measured(NamedTuple):
    """What a method with some options adds to a decoder; None where it cannot be built for the shape."""

    options: Mapping[str, Any]  # the options that are not the defaults
    parameters: int | None = None  # numbers learned, all blocks
    flops: int | None = None  # operations per token and forward pass
    live: int | None = None  # numbers per token carried from layer to layer, at their most
    kept: int | None = None  # numbers per sequence kept between tokens
    neutral: str | None = None  # its class
    dead: Mapping[str, str] = {}  # parameters that can never get a gradient, and why
    problem: str = ""  # why it cannot be built


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One method for one shape."""

    name: str  # what the registry calls it
    method: type[Stream] | type[LocalOperator]
    card: Card  # what it says about itself
    shape: ModelConfig  # the decoder that numbers are for
    default: Measured  # with its default options

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
        called = {"known_as": ", ".join(each.partition(":")[0] for each in vars(self.method).get("aliases", ()))}
        return dataclasses.asdict(self.card) | called | {key: found[key] for key in COUNTED} | shares


def make_shape(
    blocks: int = 12,
    width: int = 768,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_width: int | None = None,
    hidden: int | None = None,
) -> ModelConfig:
    """A decoder's shape; `heads` None is one per 64 channels or a few less, the rest as in `ModelConfig`."""
    if width > WIDEST:
        raise ValueError(f"width must be at most {WIDEST:,}, got {width:,}")
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
    names()  # those of installed packages are known from here on
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
            model = Decoder(config)
    except ValueError as error:
        return Measured(options, problem=str(error))
    flops, stream = forward_flops(model, CONTEXT), count(model.stream)
    locals_ = [module for module in model.modules() if isinstance(module, LocalOperator)]
    neutral = model.stream.neutral if axis == "stream" else min((local.neutral for local in locals_), key="none".__ne__)
    return Measured(
        options,
        count_parameters(model).total - _plain(shape).total,
        flops.stream + flops.mixer,
        stream.live,
        stream.kept + sum(local.cost().kept for local in locals_),
        neutral,
        model.stream.dead() | {name: why for local in locals_ for name, why in local.dead().items()},
    )


# Columns.

COUNTED = ("parameters", "flops", "live", "kept", "neutral")
HEADERS = {
    "known_as": "known as",
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
    "about": ("title", "known_as", "paper", "year", "goal", "purpose"),
    "read": ("axis", "source", "window", "granularity", "ways"),
    "weights": ("query", "key", "value", "literal_qkv", "normaliser", "adaptivity", "gating"),
    "wiring": ("injection", "sharing", "depth_state", "token_state"),
    "cost": ("parameters", "parameters_share", "flops", "flops_share", "live", "kept", "neutral"),
}
"""Every column once, in tables that can be read."""
COLUMNS = tuple(key for keys in GROUPS.values() for key in keys)

TITLES = {
    "map": "The map",
    "about": "What there is",
    "read": "What is read",
    "weights": "How it is weighed",
    "wiring": "Where it goes, what is shared and carried",
    "cost": "What it costs",
}
"""Headings of the groups."""

SHORT: dict[str, tuple[str, ...]] = {
    "about": ("known_as", "purpose"),
    "cost": ("parameters", "parameters_share", "flops_share", "live", "neutral"),
}
"""What is shown unless more is asked for: tables that a terminal of 80 columns holds."""


def header(key: str) -> str:
    """What stands over a column."""
    return HEADERS.get(key, key)


def choose(asked: Sequence[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Titles and columns of the tables to show for columns, groups of them, or `all`; nothing is the short map."""
    if not asked:
        return [(TITLES[name], keys) for name, keys in SHORT.items()]
    words = [word for part in asked for word in part.split(",") if word]
    if "all" in words:
        return [(TITLES[name], keys) for name, keys in GROUPS.items()]
    known = ["all", *GROUPS, *COLUMNS]
    for word in words:
        if word not in known:
            raise ValueError(
                f"unknown column {word!r}{did_you_mean(word, known)}; the groups are {', '.join(['all', *GROUPS])}, "
                f"the columns are {', '.join(COLUMNS)}"
            )
    single = tuple(dict.fromkeys(w for w in words if w in COLUMNS))
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
