"""The registry of streams: one line per method, and the function that builds them by name."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any

from twoaxis.depth.site import Placement
from twoaxis.depth.stream import Layout, Stream

METHODS: dict[str, str | type[Stream]] = {
    "standard": "twoaxis.depth.standard:Standard",
    "depth_attention": "twoaxis.depth.depth_attention:DepthAttention",
    "denseformer": "twoaxis.depth.denseformer:DenseFormer",
    "attention_residuals": "twoaxis.depth.attention_residuals:AttentionResiduals",
    "deep_delta": "twoaxis.depth.deep_delta:DeepDelta",
}


def stream_names() -> tuple[str, ...]:
    """The names `stream` takes."""
    return tuple(METHODS)


def stream_class(name: str) -> type[Stream]:
    """The class behind a name."""
    if name not in METHODS:
        raise ValueError(f"unknown stream {name!r}{_nearest(name, METHODS)}; the streams are {', '.join(METHODS)}")
    found = METHODS[name]
    if not isinstance(found, str):
        return found
    module, _, attribute = found.partition(":")
    return getattr(import_module(module), attribute)


def register(name: str) -> Callable[[type[Stream]], type[Stream]]:
    """Class decorator: make one's own stream available under `name`."""

    def add(cls: type[Stream]) -> type[Stream]:
        if name in METHODS:
            raise ValueError(f"there is already a stream named {name!r} ({METHODS[name]})")
        cls.name = name
        METHODS[name] = cls
        return cls

    return add


def stream(
    name: str,
    *,
    blocks: int,
    width: int,
    kinds: Sequence[str] | Sequence[Sequence[str]] = ("attention", "mlp"),
    placement: Placement | str | dict[str, Any] | None = None,
    blend: bool = False,
    **options: Any,
) -> Stream:
    """Build a residual stream.

        stream("attention_residuals", blocks=12, width=768, block_size=8)

    Args:
        name: one of `stream_names()`.
        blocks: number of blocks.
        width: of the residual stream.
        kinds: the sub-layers of a block, or one sequence of them per block.
        placement: which blocks and sites use the method, e.g. "8-11/attention"; see `Placement`.
        blend: start from the plain residual whatever the method; see `Blend`.
        **options: the method's own; see its Config.
    """
    cls = stream_class(name)
    made = cls(make_config(cls.Config, name, options), Layout.make(blocks, width, kinds, placement))
    made.reset_parameters()
    if not blend:
        return made
    from twoaxis.depth.blend import Blend

    return Blend(made)


def make_config(config: type, name: str, options: dict[str, Any]) -> Any:
    """A method's Config from options, refusing those it does not have."""
    known = [field.name for field in dataclasses.fields(config)]
    for option in options:
        if option not in known:
            listed = ", ".join(known) if known else "none"
            raise ValueError(f"{name} has no option {option!r}{_nearest(option, known)}; its options are {listed}")
    return config(**options)


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
