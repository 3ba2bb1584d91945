"""Asking for what advice depends on, one question after the other, on a terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

from rich.console import Console
from rich.prompt import Prompt

from twoaxis.costs.hardware import find_profile
from twoaxis.guide.advise import Question
from twoaxis.guide.suggest import Goal, Start
from twoaxis.model.deployment import Deployment
from twoaxis.model.presets import find_shape


class Asked(NamedTuple):
    """One question."""

    option: str  # what it answers: a field of `Question` or of `Deployment`
    text: str  # the question
    choices: tuple[str, ...] = ()  # the answers there are; none is any text
    read: Callable[[str], Any] = str  # turns an answer into the value


def _shape(text: str) -> str:
    find_shape(text)
    return text


def _hardware(text: str) -> str:
    if text.lower() != "here":
        find_profile(text)
    return text


def _number(text: str) -> float | None:
    return float(text.rstrip("% ")) if text else None


QUESTIONS = (
    Asked("shape", "Model: a preset, a public model or a config.json", read=_shape),
    Asked("goal", "Goal: a better shortcut, local mixing, cross-depth retrieval", get_args(Goal)),
    Asked("start", "Start: from scratch, or onto a trained model", get_args(Start)),
    Asked("hardware", "Hardware: a100, h100, h200, b200, here, or a file that --save wrote", read=_hardware),
    Asked("pipeline_stages", "Pipeline stages (1 is no pipeline)", read=int),
    Asked("context", "Tokens of a sequence", read=int),
    Asked("micro_batch", "Sequences of a training pass on each replica", read=int),
    Asked("serving", "Share of all compute that will be spent decoding, 0 to 1", read=_number),
    Asked("max_overhead", "Time a method may add, in percent (empty: any)", read=_number),
    Asked("headroom", "Memory a method may add on a device, in GB (empty: any)", read=_number),
)
"""In the order they are asked."""


def ask(question: Question) -> Question:
    """A question with the answers of a person in place of its values; the end of the input leaves the rest.

    Each answer is checked by the option it is for, and asked for again if that refuses it.
    """
    console = Console(stderr=True)
    devices = {field.name for field in dataclasses.fields(Deployment)}
    for asked in QUESTIONS:
        before = getattr(question.deployment if asked.option in devices else question, asked.option)
        shown = "" if before is None else f"{before:g}" if isinstance(before, float) else str(before)
        while True:
            try:
                text = Prompt.ask(asked.text, console=console, choices=list(asked.choices) or None, default=shown)
                value = asked.read(text.strip())
                changed: dict[str, Any] = {asked.option: value}
                if asked.option in devices:
                    changed = {"deployment": dataclasses.replace(question.deployment, **changed)}
                question = dataclasses.replace(question, **changed)
                break
            except EOFError:
                console.print()
                return question
            except ValueError as error:
                console.print(f"  {error}", markup=False, highlight=False)
    return question
