"""The configuration of a model: its methods along the two axes, and the shape of the decoder around them.

    Methods            stream, mixer, where they act, how they start         what a decoder and a graft have in common
    ModelConfig        Methods and the shape, under transformers' names      the decoder's; the only configuration of it

Both are validated when they are built. Wherever the name of a stream or a mixer stands, its options may stand behind
it, NAME:option=value,option=value, those that every method has among them: placement, blend, init, mixer_blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from twoaxis.base.options import Count, NotNegative, Options, Positive, between, check_type, field_types
from twoaxis.base.registry import Registry, parse
from twoaxis.depth.registry import STREAMS, stream
from twoaxis.depth.site import MOST_BLOCKS, Placement
from twoaxis.sequence.registry import MIXERS, mixer

if TYPE_CHECKING:  # torch, for which no help page waits
    from twoaxis.depth.stream import Stream
    from twoaxis.sequence.mixer import LocalOperator, Mixer

Width = Annotated[int, between(1, 2**20)]
"""Channels of a vector."""
Kinds = Sequence[tuple[str, ...]]
"""The kinds of sub-layers of each block."""

COMMON = ("placement", "blend", "init", "mixer_blocks")
"""Options that every method may be spelled with, and that are fields of their own."""

SHORT = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "blocks": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "hidden": "intermediate_size",
}
"""Short spellings of fields, for command lines."""

ROPE_SCALING = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Kinds of stretched rotary positions, and the numbers of each."""


@dataclass(frozen=True, kw_only=True)
class Methods(Options):
    """What a model has along the two axes: a residual stream and a local mixer."""

    stream: str = "standard"
    """Name of the residual stream, see `twoaxis.stream_names()`; NAME:option=value,... gives options too."""
    stream_options: Mapping[str, Any] = field(default_factory=dict)
    """Its options."""
    placement: str | None = None
    """Which blocks and sites use the stream's method, e.g. "2-3/attention"."""
    blend: bool = False
    """Start as the plain residual whatever the method; see `twoaxis.Blend`."""
    mixer: str | None = None
    """Name of the local mixer, see `twoaxis.mixer_names()`; NAME:option=value,... gives options too."""
    mixer_options: Mapping[str, Any] = field(default_factory=dict)
    """Its options."""
    mixer_blocks: tuple[int, ...] | None = None
    """Blocks that have the mixer; None is all of them."""
    init: Literal["paper", "paired"] = "paper"
    """Rescale the initial output projections where a stream's paper prescribes it, or start all streams alike."""

    def validate(self) -> None:
        """Spellings become names and options, aliases the names they stand for; options are the method's own."""
        self._split("stream", STREAMS)
        STREAMS.config(self.stream, self.stream_options)
        if self.mixer is not None:
            self._split("mixer", MIXERS)
            MIXERS.config(self.mixer, self.mixer_options)
        elif self.mixer_options or self.mixer_blocks is not None:
            raise ValueError("mixer_options or mixer_blocks are given but no mixer")

    def _split(self, axis: str, registry: Registry[Any]) -> None:
        """Take the options out of the spelling of a method; one that it has itself is its own."""
        spelled = getattr(self, axis)
        name, options = parse(spelled)
        own = field_types(registry.find(name).Config)
        for key in [key for key in COMMON if key in options and key not in own]:
            value = options.pop(key)
            if key == "placement" and isinstance(value, int):
                value = str(value)  # the spelling of a lone block reads as a number
            check_type(key, value, field_types(type(self))[key])
            value, given = tuple(value) if isinstance(value, list) else value, getattr(self, key)
            if given not in (value, getattr(type(self), key)):
                raise ValueError(f"{key} is given twice: {value!r} with {spelled!r} and {given!r} beside it")
            object.__setattr__(self, key, value)
        if twice := sorted(set(options) & set(getattr(self, f"{axis}_options"))):
            raise ValueError(f"{twice[0]} is given in {axis} {spelled!r} and in {axis}_options; leave one out")
        name, options = registry.expand(name, {**getattr(self, f"{axis}_options"), **options})
        object.__setattr__(self, axis, name)
        object.__setattr__(self, f"{axis}_options", options)

    def plain(self) -> Self:
        """The same without methods: the plain residual and no mixer."""
        none = {"stream": Methods.stream, "stream_options": {}, "placement": None, "blend": False}
        return dataclasses.replace(self, **none, mixer=None, mixer_options={}, mixer_blocks=None)

    def methods(self) -> Methods:
        """The methods alone, without the shape around them."""
        return Methods(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Methods)})

    @property
    def classes(self) -> tuple[type, ...]:
        """The classes of the stream and of the mixer, if there is one."""
        return (STREAMS.find(self.stream), *(() if self.mixer is None else (MIXERS.find(self.mixer),)))

    def check_blocks(self, blocks: int) -> None:
        """Refuse methods that name blocks a model of so many does not have."""
        if beyond := [b for b in self.mixer_blocks or () if not 0 <= b < blocks]:
            raise ValueError(f"mixer_blocks names block {beyond[0]}, the model has blocks 0 to {blocks - 1}")

    def make_mixer(self) -> Mixer | None:
        """The local mixer, if there is one."""
        return None if self.mixer is None else mixer(self.mixer, **self.mixer_options)

    def has_mixer(self, block: int) -> bool:
        """Whether `block` has the mixer."""
        return self.mixer is not None and (self.mixer_blocks is None or block in self.mixer_blocks)

    def with_mixer(self, kinds: Kinds) -> list[tuple[str, ...]]:
        """The sub-layers of each block, a mixer that has a site of its own before the block's `kinds`."""
        made = self.make_mixer()
        own_site = made is not None and "site" in made.points
        return [("mixer", *body) if own_site and self.has_mixer(b) else body for b, body in enumerate(kinds)]

    def make_stream(self, *, width: int, kinds: Kinds, eps: float = 1e-6) -> Stream:
        """The residual stream for a width, the sub-layers of each block (see `with_mixer`) and the epsilon of norms."""
        placed, shape = Placement.parse(self.placement), {"blocks": len(kinds), "width": width, "kinds": kinds}
        return stream(
            self.stream, **shape, placement=placed, blend=self.blend, model_eps=eps, **dict(self.stream_options)
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Methods):
    """Shape of a decoder and its methods along the two axes."""

    vocab_size: Annotated[int, between(1, 2**27)] = 256
    """Number of tokens."""
    hidden_size: Width = 128
    """D, the width of the residual stream."""
    intermediate_size: Width | None = None
    """Hidden width of the MLP; None is 8/3 of the width, rounded up to a multiple of 8."""
    num_hidden_layers: Annotated[int, between(1, MOST_BLOCKS)] = 4
    """Number of blocks."""
    num_attention_heads: Annotated[int, between(1, 4096)] = 4
    """Query heads of the attention."""
    num_key_value_heads: Count | None = None
    """Key and value heads; None is as many as query heads."""
    head_dim: Width | None = None
    """Width of a head; None is width / heads."""
    hidden_act: Literal["silu", "gelu", "gelu_pytorch_tanh", "relu"] = "silu"
    """Activation of the MLP's gate."""
    max_position_embeddings: Annotated[int, between(1, 2**40)] = 2048
    """Tokens of a sequence the model is made for; none is refused for being longer."""
    initializer_range: NotNegative = 0.02
    """Standard deviation of the initial weights."""
    rms_norm_eps: NotNegative = 1e-5
    """Inside every RMSNorm."""
    eos_token_id: int | None = None
    """The token that ends a text."""
    tie_word_embeddings: bool = True
    """The head shares the embedding's weights."""
    rope_theta: Positive = 10_000.0
    """Base of the rotary positions."""
    rope_scaling: Mapping[str, Any] | None = None
    """Stretched rotary positions, as {"rope_type": "llama3" or "linear", "factor": ...}."""
    attention_bias: bool = False
    """Biases on the attention's query, key and value projections."""
    attention_output_bias: bool = False
    """A bias on the attention's output projection."""
    mlp_bias: bool = False
    """Biases in the MLP."""
    qk_norm: bool = False
    """RMS-normalise queries and keys per head, before the rotary positions."""
    attention_windows: tuple[Count | None, ...] | None = None
    """Attention window of each block, the current token included; None, whole or in a place, is the full prefix."""
    no_rope_blocks: tuple[int, ...] = ()
    """Blocks whose attention has no rotary positions."""
    parallel_block: bool = False
    """Attention and MLP side by side in one site, in place of one after the other."""
    hidden_ramp: bool = False
    """MUDDFormer's re-allocation: MLPs from half of `intermediate_size` in the first block to 1.5 times in the last."""

    def validate(self) -> None:
        """Rules between fields; methods as in `Methods`."""
        super().validate()
        blocks, heads = self.num_hidden_layers, self.num_attention_heads
        if self.head_dim is None and self.hidden_size % heads:
            raise ValueError(
                f"num_attention_heads ({heads}) must divide hidden_size ({self.hidden_size}), or give head_dim"
            )
        if heads % self.kv_heads:
            raise ValueError(f"num_key_value_heads ({self.kv_heads}) must divide num_attention_heads ({heads})")
        if self.head_size % 2:
            raise ValueError(f"rotary positions need an even head_dim, got {self.head_size}")
        if self.attention_windows is not None and len(self.attention_windows) != blocks:
            raise ValueError(
                f"attention_windows has {len(self.attention_windows)} entries, num_hidden_layers is {blocks}"
            )
        if beyond := [b for b in self.no_rope_blocks if not 0 <= b < blocks]:
            raise ValueError(f"no_rope_blocks names block {beyond[0]}, the model has blocks 0 to {blocks - 1}")
        if self.eos_token_id is not None and not 0 <= self.eos_token_id < self.vocab_size:
            raise ValueError(f"eos_token_id ({self.eos_token_id}) is outside the {self.vocab_size} tokens")
        self.check_blocks(blocks)
        self._check_rope()
        for block in range(blocks if self.hidden_ramp else 0):
            self.hidden_width(block)

    def _check_rope(self) -> None:
        if self.rope_scaling is None:
            return
        kind = self.rope_scaling.get("rope_type")
        if not isinstance(kind, str) or kind not in ROPE_SCALING:
            raise ValueError(f"unknown rope_type {kind!r} in rope_scaling; it is one of {', '.join(ROPE_SCALING)}")
        wanted = {"rope_type", *ROPE_SCALING[kind]}
        if wrong := sorted(wanted ^ set(self.rope_scaling)):
            raise ValueError(
                f"rope_scaling of type {kind} has {', '.join(ROPE_SCALING[kind])}; {wrong[0]} does not fit"
            )
        for name in ROPE_SCALING[kind]:
            value = self.rope_scaling[name]
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**40:
                raise ValueError(f"rope_scaling has {name}={value!r}; it must be a positive number")

    @property
    def head_size(self) -> int:
        """Width of an attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.num_key_value_heads or self.num_attention_heads

    def hidden_width(self, block: int) -> int:
        """Hidden width of the MLP of one block."""
        hidden, blocks = self.intermediate_size or -(-8 * self.hidden_size // 24) * 8, self.num_hidden_layers
        if not self.hidden_ramp or blocks == 1:
            return hidden
        ramped = 128 * round(hidden * (block / (blocks - 1) + 0.5) / 128)
        if ramped < 128:
            raise ValueError(
                f"hidden_ramp rounds to multiples of 128: block {block} of {blocks} would get {ramped} "
                f"of intermediate_size={hidden}"
            )
        return ramped

    def hidden_field(self) -> tuple[str, int]:
        """The field that makes MLPs wider, and what it comes to without the ramp."""
        return "intermediate_size", dataclasses.replace(self, hidden_ramp=False).hidden_width(0)

    def kinds(self) -> list[tuple[str, ...]]:
        """The sub-layers of each block."""
        body = ("parallel",) if self.parallel_block else ("attention", "mlp")
        return self.with_mixer([body] * self.num_hidden_layers)

    def check_stream(self) -> None:
        """Refuse a stream that this shape cannot have; nothing is allocated."""
        import torch

        with torch.device("meta"):
            self.make_stream()

    def make_stream(self, *, width: int | None = None, kinds: Kinds | None = None, eps: float | None = None) -> Stream:
        """The residual stream for this shape."""
        eps = self.rms_norm_eps if eps is None else eps
        return super().make_stream(width=width or self.hidden_size, kinds=kinds or self.kinds(), eps=eps)


Method = TypeVar("Method", bound="type[Stream] | type[LocalOperator]")


def register(name: str) -> Callable[[Method], Method]:
    """Class decorator: make a stream or a mixer available under a name, wherever one of ours may be named.

        @twoaxis.register("fading_memory")
        class FadingMemory(HistoryStream): ...

    Args:
        name: what nothing else is called by.
    """

    def add(cls: Method) -> Method:
        from twoaxis.depth.stream import Stream

        registry: Registry[Any] = STREAMS if issubclass(cls, Stream) else MIXERS
        registry.add(name, cls)
        cls.name = name
        return cls

    return add
