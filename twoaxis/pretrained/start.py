"""How a method starts on a pretrained model: which options, neutral or blended, and why.

    class with these options    start
    bitwise, rounding           the method's own neutral parameters
    scale, none                 `Blend`: the plain stream beside the method, gates closed

Where a default has no exact neutral start but another form of the same method has one, and the user did not choose, the
other form is taken and said.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from twoaxis.base.spec import spell
from twoaxis.model.variant import parse_methods

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig

    from twoaxis.depth.stream import Stream
    from twoaxis.model.decoder import Trunk
    from twoaxis.model.hf_config import TwoAxisConfig
    from twoaxis.sequence.mixer import LocalOperator

EXACT = ("bitwise", "rounding")
"""Neutral classes that need no Blend."""


class Method(NamedTuple):
    """What the user asks for.

    Attributes:
        stream, stream_options: the residual stream and the options given for it.
        mixer, mixer_options: the same of the local mixer.
        placement: which blocks and sites use the stream's method; None is all.
        mixer_blocks: blocks that have the mixer; None is all.
        blend: None uses Blend where there is no exact neutral start; True always; False refuses it.
    """

    stream: str
    stream_options: dict[str, Any]
    mixer: str | None
    mixer_options: dict[str, Any]
    placement: str | None
    mixer_blocks: list[int] | None
    blend: bool | None


def read_method(
    stream: str,
    mixer: str | None = None,
    placement: str | None = None,
    mixer_blocks: list[int] | None = None,
    blend: bool | None = None,
) -> Method:
    """A method from its spellings; `placement`, `blend` and `mixer_blocks` may stand among the options too."""
    (name, options), (mixer_name, mixer_options) = parse_methods(stream, mixer)
    placement = _once("placement", placement, options)
    blend = _once("blend", blend, options)
    mixer_blocks = _once("mixer_blocks", mixer_blocks, mixer_options)
    if isinstance(placement, int):
        placement = str(placement)  # the spelling of a lone block reads as a number
    if blend is not None and not isinstance(blend, bool):
        raise ValueError(f"blend must be true or false, got {blend!r}")
    return Method(name, options, mixer_name, mixer_options, placement, mixer_blocks, blend)


def _once(name: str, given: Any, options: dict[str, Any]) -> Any:
    """A setting from its own argument or from a method's options, not from both."""
    if name not in options:
        return given
    if given is not None:
        raise ValueError(f"{name} is given twice: {options[name]!r} with the method and {given!r} beside it")
    return options.pop(name)


class Start(NamedTuple):
    """What was decided.

    Attributes:
        config: of the two-axis model.
        neutral: the class of the stream: bitwise, rounding, or blend.
        notes: what was chosen for the user, one line each.
    """

    config: TwoAxisConfig
    neutral: str
    notes: tuple[str, ...]


def choose(source: PreTrainedConfig, method: Method) -> Start:
    """The configuration of the retrofitted model.

    Args:
        source: the pretrained model's configuration.
        method: what the user asks for.
    """
    from twoaxis.depth.registry import STREAMS

    base: dict[str, Any] = {"stream": method.stream, "placement": method.placement}
    base |= {"mixer": method.mixer, "mixer_blocks": method.mixer_blocks}
    blend = method.blend
    notes: list[str] = []
    mixer_options = _mixer_options(method, cast(Any, source).hidden_size, notes)
    base |= {"mixer_options": mixer_options or None}
    options = _with_own_norm(source, base, dict(method.stream_options))
    kind = _stream_class(source, base, options)
    if blend is not True and kind not in EXACT:
        forms = STREAMS.find(method.stream).neutral_options
        form = {name: value for name, value in forms.items() if name not in options}
        if form and (better := _stream_class(source, base, {**options, **form})) in EXACT:
            options |= form
            notes.append(f"{spell(method.stream, form)} is taken: with it the start is exact ({better}), not {kind}")
            kind = better
    blended = blend is True or kind not in EXACT
    if blended and blend is False:
        raise ValueError(
            f"{spell(method.stream, options)} has no exact neutral start (its class is {kind!r}) and Blend is refused; "
            "allow it, or choose other options"
        )
    if blended and blend is None:
        notes.append(f"{spell(method.stream, options)} starts through Blend: its neutral class is {kind!r}")
    config = _config(source, base, options, blend=blended)
    return Start(config, "blend" if blended else kind, tuple(notes))


def _config(source: PreTrainedConfig, base: dict[str, Any], options: dict[str, Any], **more: Any) -> TwoAxisConfig:
    from twoaxis.pretrained.families import map_config

    return map_config(source, **base, stream_options=options or None, **more)


def _with_own_norm(source: PreTrainedConfig, base: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The stream's options; one that normalises its own reads has the epsilon of the source's norms."""
    import torch

    decoder = _config(source, base, options).decoder_config()
    with torch.device("meta"):
        stream = decoder.make_stream()
    own = not all(stream.normed(site) for site in stream.layout.sites)
    return {"eps": decoder.rms_norm_eps, **options} if own else options


def adopt_norms(stream: Stream, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors but the scales of norms that the stream takes over, because it normalises its own reads."""
    from twoaxis.model.decoder import norm_name
    from twoaxis.pretrained.families import TRUNK

    own = {TRUNK + norm_name(site): site for site in stream.layout.sites if not stream.normed(site)}
    for name, tensor in tensors:
        if (site := own.get(name)) is not None:
            stream.adopt_norm_(site, tensor.detach())
        else:
            yield name, tensor


def _stream_class(source: PreTrainedConfig, base: dict[str, Any], options: dict[str, Any]) -> str:
    import torch

    decoder = _config(source, base, options).decoder_config()
    with torch.device("meta"):
        return decoder.make_stream().neutral


def _mixer_options(method: Method, width: int, notes: list[str]) -> dict[str, Any]:
    """The mixer's options, with a form that has a neutral start where the user left it open."""
    from twoaxis.sequence.registry import MIXERS

    options = dict(method.mixer_options)
    if method.mixer is None:
        return options
    if _mixer_is_neutral(method.mixer, options, width):
        return options
    forms: Mapping[str, Any] = MIXERS.find(method.mixer).neutral_options
    form = {name: value for name, value in forms.items() if name not in options}
    if not form or not _mixer_is_neutral(method.mixer, {**options, **form}, width):
        hint = f"; leave {', '.join(forms)} to the retrofit" if forms else ""
        raise ValueError(
            f"{spell(method.mixer, options)} has no neutral parameters: the model would not start as its source{hint}"
        )
    notes.append(f"{spell(method.mixer, form)} is taken: without it the mixer has no neutral start")
    return {**options, **form}


def _mixer_is_neutral(name: str, options: dict[str, Any], width: int) -> bool:
    import torch

    from twoaxis.sequence.registry import mixer

    made = mixer(name, **options)
    with torch.device("meta"):
        return all(made.build(point, width).neutral != "none" for point in made.points)


def locals_of(trunk: Trunk) -> Iterator[tuple[str, LocalOperator]]:
    """The operators of the mixer in a trunk, by name."""
    from twoaxis.sequence.mixer import LocalOperator

    for name, module in trunk.named_modules():
        if isinstance(module, LocalOperator):
            yield name, module


def is_norm(name: str) -> bool:
    """Whether a parameter of ours is the scale of a site's pre-norm."""
    return name.startswith("model.trunk.layers.") and ("_layernorm." in name or ".mixer.norm." in name)
