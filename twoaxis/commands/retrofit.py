"""The command that puts a method on a pretrained model: retrofit."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    from twoaxis.pretrained.record import Record


def retrofit(
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")],
    *,
    out: Annotated[str, tyro.conf.arg(metavar="DIR")],
    stream: Annotated[str, tyro.conf.arg(metavar="NAME[:k=v,k=v]")] = "standard",
    mixer: Annotated[str | None, tyro.conf.arg(metavar="NAME[:k=v,k=v]")] = None,
    placement: str | None = None,
    mixer_blocks: str | None = None,
    blend: bool = True,
    dtype: str | None = None,
    text: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None,
    tokens: int = 768,
    seed: int = 0,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Put a stream or a mixer on a pretrained model without changing what it computes.

    Args:
        source: Folder with safetensors, GGUF file, or name on the hub, of a Llama, Mistral, Qwen2, Qwen3 or SmolLM.
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
        json_output: Print one JSON document instead of lines.
    """
    from twoaxis.depth.site import Placement
    from twoaxis.model import load
    from twoaxis.pretrained.convert import retrofit as convert
    from twoaxis.pretrained.record import closed_paths

    load.quiet()
    blocks = None if mixer_blocks is None else Placement.parse(mixer_blocks).blocks
    if mixer_blocks is not None and blocks is None:
        raise ValueError(f"--mixer-blocks {mixer_blocks!r} names no blocks; write them like 0,8-11")
    made = convert(
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
    for line in closed_paths(made.record.still):
        print(f"warning: {line}", file=sys.stderr)
    if json_output:
        print(json.dumps({"folder": out, **made.record.to_dict()}, indent=1))
    else:
        _show(out, made.record)
    return 0


def _show(out: str, record: Record) -> None:
    method, source, text = record.method, record.measured["source"], record.measured["text"]
    plain = record.measured["plain"]["largest"]
    mixer = f", {method['mixer']}" if method["mixer"] else ""
    exact = "0, bit for bit" if plain == 0 else f"{plain:.2e}"
    share = record.added_parameters / record.source_parameters
    print(f"folder      {out}")
    print(f"source      {record.source['name']} ({record.source['family']}, {record.source['kind']})")
    print(f"method      {method['stream']}{mixer}; start: {record.neutral}; {record.dtype}")
    print(
        f"logits      differ from the source's by at most {source['largest']:.2e} ({source['relative']:.1e} relative),"
    )
    print(f"            likeliest token equal at {source['agree']:,} of {source['tokens']:,}")
    print(f"            from the plain stream's by at most {exact}")
    print(f"text        {text['name']}: {text['tokens']:,} tokens, {text['bytes']:,} bytes")
    print(f"added       {record.added_parameters:,} parameters ({share:.3%}), {record.added_bytes:,} bytes")
