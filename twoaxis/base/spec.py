"""One spelling of methods everywhere: `NAME[:k=v,k=v]`.

    deep_delta:value_channels=4,expand=conv        a stream with options
    attention_residuals:block_size=4,placement=2-3 the options every stream has: placement, blend, init
    standard:model.hidden_size=160                 a changed field of the model, as for a wider baseline
    standard:train.lr=0.001                        a changed field of the training
    deep_delta:update=write,label=write only       a name of one's own in tables

Values are JSON where they can be read as such (numbers, true, false, null, lists), and text otherwise. Commas inside
brackets do not separate.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from twoaxis.base.files import short_hash

COMMON = ("placement", "blend", "init", "mixer_blocks")
"""Options of every method that are fields of the model."""


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """`NAME[:k=v,...]` as a name and its options."""
    name, colon, rest = text.partition(":")
    name = name.strip()
    if not name:
        raise ValueError(f"{text!r} names no method; write NAME or NAME:option=value,option=value")
    options: dict[str, Any] = {}
    for part in split(rest) if colon else ():
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ValueError(f"{part!r} in {text!r} is no option; write NAME:option=value,option=value")
        if key in options:
            raise ValueError(f"{text!r} gives {key} twice")
        options[key] = parse_value(value)
    return name, options


def parse_value(text: str) -> Any:
    """JSON where it can be read as such, else the text itself; True, False and None are understood too."""
    text = text.strip()
    words = {"True": True, "False": False, "None": None}
    if text in words:
        return words[text]
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if value == value and value not in (float("inf"), float("-inf")) else text


def split(text: str) -> list[str]:
    """Parts between commas that are not inside brackets or quotation marks."""
    parts, depth, quoted, start = [], 0, False, 0
    for place, letter in enumerate(text):
        if letter == '"':
            quoted = not quoted
        elif not quoted and letter in "[{(":
            depth += 1
        elif not quoted and letter in ")}]":
            depth -= 1
        elif letter == "," and depth == 0 and not quoted:
            parts.append(text[start:place])
            start = place + 1
    parts.append(text[start:])
    return [part for part in parts if part.strip()]


def spell(name: str, options: dict[str, Any]) -> str:
    """The inverse of `parse`."""
    if not options:
        return name
    return f"{name}:" + ",".join(f"{key}={spell_value(value)}" for key, value in options.items())


def spell_value(value: Any) -> str:
    """The inverse of `parse_value`."""
    if isinstance(value, str) and parse_value(value) == value and not set(value) & set(',[]{}()"'):
        return value
    return json.dumps(value, separators=(",", ":"))


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
    """Changed fields of `TwoAxisConfig`, placement, blend and init among them."""
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
        """The fields of `TwoAxisConfig` it sets."""
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
    name, options = ("standard", {}) if stream is None else parse(stream)
    mixer_name, mixer_options = (None, {}) if mixer is None else parse(mixer)
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
