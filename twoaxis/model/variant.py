"""What is changed of a model, in one spelling: a stream, a mixer, fields of the model and of the training.

deep_delta:value_channels=4,expand=conv        a stream with options
attention_residuals:block_size=4,placement=2-3 the options every stream has: placement, blend, init
standard:model.hidden_size=160                 a changed field of the model, as for a wider baseline
standard:train.lr=0.001                        a changed field of the training
deep_delta:update=write,label=write only       a name for tables
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from twoaxis.base.files import short_hash
from twoaxis.base.registry import did_you_mean, parse, spell
from twoaxis.depth.registry import STREAMS
from twoaxis.model.config import COMMON, SHORT, ModelConfig
from twoaxis.sequence.registry import MIXERS


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A stream, a mixer or both, and what else is changed: one row of a comparison."""

    label: str
    """What tables call it."""
    stream: str = "standard"
    """Name of the stream."""
    stream_options: dict[str, Any] = field(default_factory=dict)
    """Its own options."""
    mixer: str | None = None
    """Name of the mixer, if there is one."""
    mixer_options: dict[str, Any] = field(default_factory=dict)
    """Its own options."""
    model: dict[str, Any] = field(default_factory=dict)
    """Changed fields of `ModelConfig`, placement, blend and init among them."""
    train: dict[str, Any] = field(default_factory=dict)
    """Changed fields of `TrainConfig`."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @property
    def key(self) -> str:
        """Stands for everything that can change a number: the label is not part of it."""
        return short_hash({name: value for name, value in self.to_dict().items() if name != "label"})

    def model_fields(self) -> dict[str, Any]:
        """The fields of `ModelConfig` it sets."""
        fields: dict[str, Any] = {"stream": self.stream, **self.model}
        if self.stream_options:
            fields["stream_options"] = dict(self.stream_options)
        if self.mixer is not None:
            fields["mixer"] = self.mixer
            if self.mixer_options:
                fields["mixer_options"] = dict(self.mixer_options)
        return fields


def make_contender(stream: str | None = None, mixer: str | None = None) -> Contender:
    """A contender from the spellings of a stream and a mixer; None is the plain residual, or no mixer.

    Names and options are checked against the methods when a model is configured with them, not here.
    """
    name, options = STREAMS.expand(*parse("standard" if stream is None else stream))
    mixer_name, mixer_options = (None, {}) if mixer is None else MIXERS.expand(*parse(mixer))
    model: dict[str, Any] = {}
    train: dict[str, Any] = {}
    labels = [given.pop("label") for given in (options, mixer_options) if "label" in given]
    own: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for given, kept in zip((options, mixer_options), own, strict=True):
        for key, value in given.items():
            place, _, field_name = key.partition(".")
            if place == "model" and field_name:
                model[field_name] = value
            elif place == "train" and field_name:
                train[field_name] = value
            elif key in COMMON:
                model[key] = value
            else:
                kept[key] = value
    plain = [spell(name, options)] if mixer_name is None else [spell(name, options), spell(mixer_name, mixer_options)]
    return Contender(
        label=" + ".join(str(label) for label in labels) or " + ".join(plain),
        stream=name,
        stream_options=own[0],
        mixer=mixer_name,
        mixer_options=own[1],
        model=model,
        train=train,
    )


def with_method(shape: Any, method: Contender) -> Any:
    """A decoder's or a family's shape with the stream and the mixer of a contender in place of its own."""
    if method.train:
        raise ValueError(f"{method.label}: train.{next(iter(method.train))} changes the training, not the model")
    known = {field.name for field in dataclasses.fields(ModelConfig)} | set(SHORT)
    decoder = isinstance(shape, ModelConfig)
    for key in method.model:
        if decoder and key not in known:
            raise ValueError(f"{method.label}: a decoder has no field {key!r}{did_you_mean(key, sorted(known))}")
    changed = {SHORT.get(key, key): value for key, value in method.model_fields().items()}
    if method.mixer is None:
        changed.pop("mixer_blocks", None)
    if decoder:
        return ModelConfig.from_dict({**shape.plain().to_dict(), **changed}, method.label)
    return shape.changed(changed, method.label)
