"""The command that puts a method on a pretrained model: retrofit."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import tyro

from twoaxis.commands.parsing import Folder, Name, plain

if TYPE_CHECKING:
    from twoaxis.pretrained.retrofit import Retrofitted


@plain
def retrofit(
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")],
    *,
    out: Folder,
    stream: Annotated[str, Name] = "standard",
    mixer: Annotated[str | None, Name] = None,
    placement: str | None = None,
    mixer_blocks: str | None = None,
    blend: bool = True,
    dtype: str | None = None,
    text: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None,
    tokens: int = 768,
    seed: int = 0,
) -> Retrofitted:
    """Put a stream or a mixer on a pretrained model without changing what it computes.

    Args:
        source: Folder with safetensors, GGUF file, or name on the hub, of a causal language model.
        out: Folder to write; it must not exist or be empty.
        stream: Residual stream.
        mixer: Local mixer.
        placement: Blocks and sites that use the stream's method, such as 8-11/attention. None is all of them.
        mixer_blocks: Blocks that have the mixer, such as 0,8-11. None is all of them.
        blend: Whether a method without an exact neutral start may be faded in over the plain stream.
        dtype: float32, bfloat16, float16 or float64. None is the source's.
        text: File to measure the difference on. None is a few kilobytes of Python's standard library.
        tokens: How many of its tokens.
        seed: Seed of the new parameters that start at random.
    """
    from twoaxis.base.machine import quiet
    from twoaxis.depth.site import Placement
    from twoaxis.pretrained.record import closed_paths
    from twoaxis.pretrained.retrofit import retrofit as make

    quiet()
    blocks = None if mixer_blocks is None else Placement.parse(mixer_blocks).blocks
    if mixer_blocks is not None and blocks is None:
        raise ValueError(f"--mixer-blocks {mixer_blocks!r} names no blocks; write them like 0,8-11")
    made = make(
        source,
        stream=stream,
        mixer=mixer,
        placement=placement,
        mixer_blocks=None if blocks is None else list(blocks),
        blend=None if blend else False,
        dtype=dtype,
        out=out,
        text=text,
        tokens=tokens,
        seed=seed,
        say=lambda line: print(f"retrofit: {line}", file=sys.stderr, flush=True),
    )
    for note in made.record.notes:
        print(f"note: {note}", file=sys.stderr)
    for line in closed_paths(made.record.stuck):
        print(f"warning: {line}", file=sys.stderr)
    return made
