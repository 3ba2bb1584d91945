"""Read residual streams out of other people's checkpoints, and write them back.

    found = read_stream(load_file("model.safetensors"), config={"attn_res_block_size": 12})
    found.stream, found.options, found.state            # "attention_residuals", {"block_size": 24, ...}, its state dict
    stream = found.build()

    to_original(stream), original_config(stream)        # the original's names and settings again

A whole model's state dict may be given: keys that are not the method's are passed over, and `found.consumed` names
those that were taken. Each family has a table of names, `FAMILIES[name].rows`, which
docs/howto/foreign_checkpoints.md prints. A key of the method's own that is missing, left over or of another shape is a
ValueError that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from twoaxis.depth.blend import Blend
from twoaxis.depth.stream import Stream
from twoaxis.model.originals.convert import Keys, ReadStream, read, write
from twoaxis.model.originals.families import FAMILIES
from twoaxis.model.originals.table import REQUIRED, Family, Row, Setting

__all__ = [
    "FAMILIES",
    "REQUIRED",
    "Family",
    "ReadStream",
    "Row",
    "Setting",
    "original_config",
    "read_stream",
    "to_original",
]


def read_stream(
    tensors: Mapping[str, Tensor],
    like: str | None = None,
    *,
    config: Any = None,
    prefix: str = "",
    **options: Any,
) -> ReadStream:
    """The residual stream in a foreign state dict.

    Args:
        tensors: names to tensors, of a whole model or of the stream alone.
        like: whose names they are; None finds out.
        config: the original's configuration, for what tensors do not tell: a mapping or an object with `to_dict`.
        prefix: look only at keys that begin with it, where several models share a state dict.
        **options: options of our stream that override what was found.
    """
    if like is None:
        like = _recognise(tensors, prefix)
    if like not in FAMILIES:
        raise ValueError(f"unknown family {like!r}; the families are {', '.join(FAMILIES)}")
    return read(Keys(FAMILIES[like], tensors, prefix), config, options)


def to_original(stream: Stream, like: str | None = None, *, prefix: str = "") -> dict[str, Tensor]:
    """A stream's parameters under the original's names, as copies.

    Args:
        stream: with options that the original has.
        like: whose names; None takes the first family of that stream in `FAMILIES`.
        prefix: goes before every name.
    """
    tensors, _ = _write(stream, like)
    return {prefix + name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


def original_config(stream: Stream, like: str | None = None) -> dict[str, Any]:
    """The settings of the original that go with `to_original`, for what tensors do not tell."""
    return _write(stream, like)[1]


def _write(stream: Stream, like: str | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if isinstance(stream, Blend):
        raise ValueError(f"a blend has gates that no original knows; write its method: {stream.method.name}")
    able = {name: f for name, f in FAMILIES.items() if f.writes and f.stream == stream.name}
    if not able:
        known = ", ".join(sorted({f.stream for f in FAMILIES.values() if f.writes}))
        raise ValueError(f"no original's names are known for {stream.name}; they are for {known}")
    if like is not None and like not in able:
        raise ValueError(f"{stream.name} can be written like {', '.join(able)}, not like {like!r}")
    return write(able[like or next(iter(able))], stream)


def _recognise(tensors: Mapping[str, Tensor], prefix: str) -> str:
    fitting = [name for name, family in FAMILIES.items() if Keys(family, tensors, prefix).recognised]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise ValueError(f"these could be the names of {' or '.join(fitting)}; give like=")
    known = "; ".join(f"{name}: {family.rows[0].theirs}" for name, family in FAMILIES.items())
    raise ValueError(f"no family's names were recognised among {len(tensors)} keys; the families are {known}")
