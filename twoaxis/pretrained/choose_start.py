"""How a method starts on a pretrained model: which options, neutral or blended, and why.

    class with these options    start
    bitwise, rounding           the method's own neutral parameters
    scale, none                 `Blend`: the plain stream beside the method, gates closed

Where a default has no exact neutral start but another form of the same method has one, and the user did not choose, the
other form is taken and said.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from twoaxis.base.registry import parse, spell
from twoaxis.depth.registry import STREAMS
from twoaxis.model.config import Kinds, Methods
from twoaxis.sequence.registry import MIXERS, mixer

EXACT = ("bitwise", "rounding")
"""Neutral classes that need no Blend."""


class Start(NamedTuple):
    """What was decided: the methods, the class of the stream (bitwise, rounding or blend), and what was chosen."""

    methods: Methods
    neutral: str
    notes: tuple[str, ...]


def read_method(
    stream: str,
    mixer: str | None = None,
    placement: str | None = None,
    mixer_blocks: list[int] | None = None,
    blend: bool | None = None,
) -> tuple[Methods, bool | None]:
    """Methods from their spellings, and what is said of Blend: True wants it, False refuses it, None leaves it open."""
    blocks = None if mixer_blocks is None else tuple(mixer_blocks)
    methods = Methods(stream=stream, mixer=mixer, placement=placement, blend=bool(blend), mixer_blocks=blocks)
    if "blend" not in {**parse(stream)[1], **({} if mixer is None else parse(mixer)[1])}:
        return methods, blend
    if blend is not None and blend != methods.blend:
        raise ValueError(f"blend is given twice: {methods.blend} with {stream!r} and {blend} beside it")
    return methods, methods.blend


def choose(asked: tuple[Methods, bool | None], width: int, kinds: Kinds) -> Start:
    """The methods of the retrofitted model, of a width and with the sub-layers of each block; see `read_method`."""
    notes: list[str] = []
    methods, blend = dataclasses.replace(asked[0], blend=False), asked[1]
    methods.check_blocks(len(kinds))
    methods = _neutral_mixer(methods, width, notes)
    kind = _neutral_class(methods, width, kinds)
    if blend is not True and kind not in EXACT:
        forms = STREAMS.find(methods.stream).neutral_options
        form = {name: value for name, value in forms.items() if name not in methods.stream_options}
        other = dataclasses.replace(methods, stream_options={**methods.stream_options, **form})
        if form and (better := _neutral_class(other, width, kinds)) in EXACT:
            notes.append(f"{spell(methods.stream, form)} is taken: with it the start is exact ({better}), not {kind}")
            methods, kind = other, better
    if blend is not True and kind in EXACT:
        return Start(methods, kind, tuple(notes))
    spelled = spell(methods.stream, dict(methods.stream_options))
    if blend is False:
        raise ValueError(
            f"{spelled} has no exact neutral start (its class is {kind!r}) and Blend is refused; "
            "allow it, or choose other options"
        )
    if blend is None:
        notes.append(f"{spelled} starts through Blend: its neutral class is {kind!r}")
    return Start(dataclasses.replace(methods, blend=True), "blend", tuple(notes))


def _neutral_class(methods: Methods, width: int, kinds: Kinds) -> str:
    import torch

    with torch.device("meta"):
        return methods.make_stream(width=width, kinds=methods.with_mixer(kinds)).neutral


def _neutral_mixer(methods: Methods, width: int, notes: list[str]) -> Methods:
    """The mixer with a form that has a neutral start, where the user left it open."""
    if methods.mixer is None or _mixer_is_neutral(methods.mixer, methods.mixer_options, width):
        return methods
    forms = MIXERS.find(methods.mixer).neutral_options
    form = {name: value for name, value in forms.items() if name not in methods.mixer_options}
    options = {**methods.mixer_options, **form}
    if not form or not _mixer_is_neutral(methods.mixer, options, width):
        hint = f"; leave {', '.join(forms)} to the retrofit" if forms else ""
        raise ValueError(
            f"{spell(methods.mixer, dict(methods.mixer_options))} has no neutral parameters: "
            f"the model would not start as its source{hint}"
        )
    notes.append(f"{spell(methods.mixer, form)} is taken: without it the mixer has no neutral start")
    return dataclasses.replace(methods, mixer_options=options)


def _mixer_is_neutral(name: str, options: Any, width: int) -> bool:
    import torch

    made = mixer(name, **options)
    with torch.device("meta"):
        return all(made.build(point, width).neutral != "none" for point in made.points)
