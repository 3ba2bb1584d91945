"""Every registered method for one shape of decoder: its card, its exact cost, its neutral class.

Streams are built on the meta device, where parameters have a size and no storage, so that any shape can be asked about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, cast

import torch

from twoaxis.base.method import Card
from twoaxis.base.registry import Registry
from twoaxis.depth.counts import count
from twoaxis.depth.registry import STREAMS
from twoaxis.depth.stream import Cost, Layout, Neutral, Stream
from twoaxis.model.config import ModelConfig
from twoaxis.sequence.mixer import LocalOperator, Mixer
from twoaxis.sequence.registry import MIXERS, mixer

PROBE = 64
"""Width at which a mixer's neutral class is measured."""


class Measured(NamedTuple):
    """A method with some options, for one shape.

    Attributes:
        options: the options that are not the defaults.
        cost: exact counts for the whole model; None where it cannot be built for the shape.
        neutral: its class.
        dead: parameters that can never get a gradient, and why.
        problem: why it cannot be built.
    """

    options: Mapping[str, Any]
    cost: Cost | None = None
    neutral: Neutral | None = None
    dead: Mapping[str, str] = {}
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One method for one shape.

    Attributes:
        name: what the registry calls it.
        method: the class.
        card: its row of the map.
        shape: the decoder it is costed for.
        default: with its default options.
    """

    name: str
    method: type[Stream] | type[LocalOperator]
    card: Card
    shape: ModelConfig
    default: Measured

    def variants(self) -> tuple[Measured, ...]:
        """With each of the options that between them use every part of the method, the defaults left out."""
        return tuple(measure(self.name, self.shape, options) for options in self.method.variants if options)


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
    attention = shape.hidden_size * shape.head_size * (2 * shape.num_attention_heads + 2 * shape.kv_heads)
    return sum(
        attention + 3 * shape.hidden_size * shape.hidden_width(block) for block in range(shape.num_hidden_layers)
    )


def names() -> tuple[str, ...]:
    """Every method: the streams, then the mixers."""
    return (*STREAMS.names(), *MIXERS.names())


def find(name: str) -> type[Stream] | type[LocalOperator]:
    """The class behind a name, stream or mixer."""
    entries: dict[str, Any] = {**STREAMS.entries, **MIXERS.entries}
    aliases = STREAMS.aliases | MIXERS.aliases
    return cast("type[Stream] | type[LocalOperator]", Registry("method", entries, aliases).find(name))


def entry(name: str, shape: ModelConfig) -> Entry:
    """One method for `shape`."""
    method = find(name)
    axis = "depth" if issubclass(method, Stream) else "sequence"
    name = (STREAMS if axis == "depth" else MIXERS).canonical(name)
    card = getattr(method, "card", None) or _blank(name, axis)
    return Entry(name=name, method=method, card=card, shape=shape, default=measure(name, shape))


def entries(shape: ModelConfig) -> tuple[Entry, ...]:
    """Every method for `shape`, depth axis first."""
    return tuple(entry(name, shape) for name in names())


def _blank(name: str, axis: str) -> Card:
    """The card of a method that was registered without one."""
    given = {"title": name, "axis": axis, "literal_qkv": False, "year": 0}
    return Card(**{f.name: given.get(f.name, "-") for f in fields(Card)})


def measure(name: str, shape: ModelConfig, options: Mapping[str, Any] | None = None) -> Measured:
    """A method with `options` for `shape`; options that do not go with the shape are reported, not raised."""
    options = options or {}
    try:
        return _stream(name, shape, options) if issubclass(find(name), Stream) else _mixer(name, shape, options)
    except ValueError as error:
        return Measured(options, problem=str(error))


def _stream(name: str, shape: ModelConfig, options: Mapping[str, Any]) -> Measured:
    with torch.device("meta"):
        layout = Layout.make(shape.num_hidden_layers, shape.hidden_size, shape.kinds())
        made = STREAMS.find(name)(STREAMS.config(name, dict(options)), layout)
    return Measured(options, count(made), made.neutral, made.dead())


def _mixer(name: str, shape: ModelConfig, options: Mapping[str, Any]) -> Measured:
    made = mixer(name, **options)
    heads = shape.num_attention_heads + 2 * shape.kv_heads
    total = [0, 0, 0]
    for block in range(shape.num_hidden_layers):
        channels = {"qkv": heads * shape.head_size, "hidden": 2 * shape.hidden_width(block)}
        with torch.device("meta"):
            built = [
                made.build(point, shape.hidden_size, channels.get(point, shape.hidden_size)) for point in made.points
            ]
        for local in built:
            total = [a + b for a, b in zip(total, local.cost(), strict=True)]
    parameters, flops, kept = total
    return Measured(options, Cost(parameters, flops, reads=0, live=0, kept=kept), _mixer_neutral(made))


def _mixer_neutral(made: Mixer) -> Neutral:
    """Bitwise if every operator can leave the model as it is without it: at its start, or with all parameters zero."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        x = torch.randn(1, 8, PROBE)
        for point in made.points:
            local = made.build(point, PROBE, PROBE)
            plain = torch.zeros_like(x) if point == "site" else x
            if torch.equal(local(x), plain):
                continue
            for parameter in local.parameters():
                parameter.zero_()
            if not torch.equal(local(x), plain):
                return "none"
    return "bitwise"
