"""What advice chooses from: the forms that methods suggest in their own files, spelled for a decoder."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from twoaxis.base.method import Card, Shape, Suggestion
from twoaxis.base.registry import spell
from twoaxis.depth.registry import STREAMS
from twoaxis.model.config import ModelConfig
from twoaxis.model.variant import Contender, make_contender, with_method
from twoaxis.sequence.registry import MIXERS

if TYPE_CHECKING:
    from twoaxis.model.graft_config import TwoAxisConfig

Goal = Literal["any", "shortcut", "mixing", "retrieval"]
Start = Literal["scratch", "retrofit"]


class Place(NamedTuple):
    """Where a method is wanted."""

    config: ModelConfig | TwoAxisConfig  # the decoder
    start: Start = "scratch"  # from scratch or onto a trained model
    gpu: bool = False  # whether it runs on a GPU


class Candidate(NamedTuple):
    """A method in one form."""

    name: str  # of the stream or mixer
    axis: Literal["stream", "mixer"]  # stream or mixer
    card: Card  # of the method
    suggestion: Suggestion  # the form
    neutral_options: dict[str, Any]  # of the method

    @property
    def form(self) -> str:
        """As the records call it."""
        return self.suggestion.form

    @property
    def title(self) -> str:
        """Name and form."""
        return f"{self.name} ({self.form})" if self.form else self.name

    @property
    def why(self) -> str:
        """What it does."""
        return self.suggestion.why or self.card.purpose

    def spelled(self, place: Place) -> Spelled:
        """The method with its options for a place.

        On a trained model a stream that does not start plain takes its neutral options, and is faded in where these
        are not enough.
        """
        config = place.config
        sizes = (config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.kv_heads)
        shape = Shape(*sizes, place.gpu)
        text = spell(self.name, options := self.suggestion.options(shape))
        if place.start == "scratch" or self.axis == "mixer":
            return Spelled(text, self._contender(text), None if place.start == "scratch" else "bitwise")
        for extra in ({}, {k: v for k, v in self.neutral_options.items() if k not in options}):
            text = spell(self.name, options | extra)
            contender = self._contender(text)
            with torch.device("meta"):
                neutral = with_method(config, contender).make_stream().neutral
            if neutral in ("bitwise", "rounding"):  # it gives the logits of its source
                return Spelled(text, contender, neutral)
        text = spell(self.name, options)
        contender = self._contender(text)
        return Spelled(text, replace(contender, model={**contender.model, "blend": True}), "blend")

    def _contender(self, text: str) -> Contender:
        return make_contender(text) if self.axis == "stream" else make_contender(None, text)


class Spelled(NamedTuple):
    """A candidate for one place."""

    method: str  # as commands take it
    contender: Contender  # for the cost model
    neutral: str | None  # how it starts on a trained model: bitwise, rounding or blend; None from scratch


def candidates(goal: Goal = "any") -> tuple[Candidate, ...]:
    """The forms that all registered methods suggest for a goal, in no order that matters: the ranking gives one."""
    found: list[Candidate] = []
    axes: dict[Literal["stream", "mixer"], Any] = {"stream": STREAMS, "mixer": MIXERS}
    for axis, registry in axes.items():
        for name in registry.names():
            method: Any = registry.find(name)
            card = getattr(method, "card", None) or Card.blank(name)
            if goal in ("any", card.goal):
                found += [Candidate(name, axis, card, each, method.neutral_options) for each in method.suggestions]
    return tuple(found)
