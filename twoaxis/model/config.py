"""The decoder's configuration, validated when it is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from twoaxis.base.options import Count, NotNegative, Options, Positive, between
from twoaxis.depth.registry import STREAMS, stream
from twoaxis.depth.site import MOST_BLOCKS, Placement
from twoaxis.depth.stream import Stream
from twoaxis.sequence.mixer import Mixer
from twoaxis.sequence.registry import MIXERS, mixer

Width = Annotated[int, between(1, 2**20)]
"""Channels of a vector."""

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(Options):
    """Shape of a decoder and its methods along the two axes."""

    vocabulary: Annotated[int, between(1, 2**27)] = 256
    """Number of tokens."""
    width: Width = 128
    """D, the width of the residual stream."""
    blocks: Annotated[int, between(1, MOST_BLOCKS)] = 4
    """Number of blocks."""
    heads: Annotated[int, between(1, 4096)] = 4
    """Query heads of the attention."""
    kv_heads: Count | None = None
    """Key and value heads; None is as many as query heads."""
    head_width: Width | None = None
    """Width of a head; None is width / heads."""
    hidden: Width | None = None
    """Hidden width of the MLP; None is 8/3 of the width, rounded up to a multiple of 8."""
    hidden_ramp: bool = False
    """MUDDFormer's re-allocation: hidden widths from half of `hidden` in the first block to 1.5 times in the last."""
    block: Literal["sequential", "parallel"] = "sequential"
    """Attention then MLP, or both side by side in one site."""
    activation: str = "silu"
    """Of the MLP's gate: silu, gelu, gelu_pytorch_tanh or relu."""
    qkv_bias: bool = False
    """Biases on the attention's query, key and value projections."""
    output_bias: bool = False
    """A bias on the attention's output projection."""
    mlp_bias: bool = False
    """Biases in the MLP."""
    qk_norm: bool = False
    """RMS-normalise queries and keys per head, before the rotary positions."""
    windows: tuple[Count | None, ...] | None = None
    """Attention window of each block, the current token included; None, whole or in a place, is the full prefix."""
    rope_theta: Positive = 10_000.0
    """Base of the rotary positions."""
    nope_blocks: tuple[int, ...] = ()
    """Blocks whose attention has no rotary positions."""
    norm_eps: NotNegative = 1e-5
    """Inside every RMSNorm."""
    tied: bool = True
    """The head shares the embedding's weights."""
    std: NotNegative = 0.02
    """Standard deviation of the initial weights."""
    init: Literal["paper", "paired"] = "paper"
    """Rescale the initial output projections where a stream's paper prescribes it, or start all streams alike."""
    stream: str = "standard"
    """Name of the residual stream; see `twoaxis.stream_names()`."""
    stream_options: Mapping[str, Any] = field(default_factory=dict)
    """Its options."""
    placement: str | None = None
    """Which blocks and sites use the stream's method, e.g. "2-3/attention"."""
    blend: bool = False
    """Start as the plain residual whatever the method; see `twoaxis.Blend`."""
    mixer: str | None = None
    """Name of the local mixer; see `twoaxis.mixer_names()`."""
    mixer_options: Mapping[str, Any] = field(default_factory=dict)
    """Its options."""
    mixer_blocks: tuple[int, ...] | None = None
    """Blocks that have the mixer; None is all of them."""

    def validate(self) -> None:
        """Rules between fields; aliases of methods become their names."""
        for place, registry in (("stream", STREAMS), ("mixer", MIXERS)):
            if (name := getattr(self, place)) is not None:
                name, options = registry.expand(name, getattr(self, f"{place}_options"))
                object.__setattr__(self, place, name)
                object.__setattr__(self, f"{place}_options", options)
        if self.head_width is None and self.width % self.heads:
            raise ValueError(f"heads ({self.heads}) must divide the width ({self.width}), or give head_width")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"kv_heads ({self.kv_heads}) must divide heads ({self.heads})")
        if self.head_size % 2:
            raise ValueError(f"rotary positions need an even head width, got {self.head_size}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {self.activation!r}; it is one of {', '.join(ACTIVATIONS)}")
        if self.windows is not None and len(self.windows) != self.blocks:
            raise ValueError(f"windows has {len(self.windows)} entries, the decoder has {self.blocks} blocks")
        beyond = [b for b in self.nope_blocks if not 0 <= b < self.blocks]
        if beyond:
            raise ValueError(f"nope_blocks names block {beyond[0]}, the decoder has blocks 0 to {self.blocks - 1}")
        beyond = [b for b in self.mixer_blocks or () if not 0 <= b < self.blocks]
        if beyond:
            raise ValueError(f"mixer_blocks names block {beyond[0]}, the decoder has blocks 0 to {self.blocks - 1}")
        if self.mixer is None and (self.mixer_options or self.mixer_blocks is not None):
            raise ValueError("mixer_options or mixer_blocks are given but no mixer")
        for block in range(self.blocks if self.hidden_ramp else 0):
            self.hidden_width(block)

    @property
    def head_size(self) -> int:
        """Width of an attention head."""
        return self.head_width or self.width // self.heads

    def hidden_width(self, block: int) -> int:
        """Hidden width of the MLP of one block."""
        hidden = self.hidden or -(-8 * self.width // 24) * 8
        if not self.hidden_ramp or self.blocks == 1:
            return hidden
        ramped = 128 * round(hidden * (block / (self.blocks - 1) + 0.5) / 128)
        if ramped < 128:
            raise ValueError(
                f"hidden_ramp rounds to multiples of 128: block {block} of {self.blocks} would get {ramped} "
                f"of hidden={hidden}"
            )
        return ramped

    def make_mixer(self) -> Mixer | None:
        """The local mixer, if there is one."""
        if self.mixer is None:
            return None
        MIXERS.config(self.mixer, self.mixer_options)  # here an option called name is unknown, and no keyword of ours
        return mixer(self.mixer, **self.mixer_options)

    def kinds(self) -> list[tuple[str, ...]]:
        """The sub-layers of each block."""
        made = self.make_mixer()
        body = ("parallel",) if self.block == "parallel" else ("attention", "mlp")
        has_site = made is not None and "site" in made.points
        return [("mixer", *body) if has_site and self.has_mixer(b) else body for b in range(self.blocks)]

    def has_mixer(self, block: int) -> bool:
        """Whether `block` has the mixer."""
        return self.mixer is not None and (self.mixer_blocks is None or block in self.mixer_blocks)

    def make_stream(self) -> Stream:
        """The residual stream for this shape."""
        STREAMS.config(self.stream, self.stream_options)  # here blocks is an unknown option, and no keyword of ours
        return stream(
            self.stream,
            blocks=self.blocks,
            width=self.width,
            kinds=self.kinds(),
            placement=Placement.parse(self.placement),
            blend=self.blend,
            **self.stream_options,
        )
