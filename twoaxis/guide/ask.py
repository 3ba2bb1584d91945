"""Asking for what advice depends on, one question after the other, on a terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, get_args

from rich.console import Console
from rich.prompt import Prompt

from twoaxis.base.options import field_docs, field_types
from twoaxis.base.registry import parse_value
from twoaxis.costs.hardware import find_profile
from twoaxis.guide.advise import Question
from twoaxis.model.presets import find_shape

QUESTION = ("shape", "goal", "start", "serving", "max_overhead", "headroom")
DEPLOYMENT = ("hardware", "pipeline_stages", "context", "micro_batch")
"""Fields that are asked for; types, choices and words are those of the field."""
ASKED = (*QUESTION[:3], *DEPLOYMENT, *QUESTION[3:])
FIND: dict[str, Callable[[str], Any]] = {
    "shape": find_shape,
    "hardware": lambda text: text.lower() == "here" or find_profile(text),  # which would measure it at once
}
"""What refuses a text that no bound does."""


def ask(question: Question) -> Question:
    """A question with the answers of a person in place of its values; the end of the input leaves the rest.

    Each answer is checked by the option it is for, and asked for again if that refuses it.
    """
    console = Console(stderr=True)
    for name in ASKED:
        owner: Any = question.deployment if name in DEPLOYMENT else question
        before, said = getattr(owner, name), field_docs(type(owner))[name].rstrip(".")
        choices = [each for each in get_args(field_types(type(owner))[name]) if isinstance(each, str)]
        shown = "" if before is None else f"{before:g}" if isinstance(before, float) else str(before)
        text = f"{name.replace('_', ' ').capitalize()}: {said[0].lower()}{said[1:]}"
        while True:
            try:
                answer = Prompt.ask(text, console=console, choices=choices or None, default=shown).strip()
                FIND.get(name, str)(answer)
                value = answer if isinstance(before, str) else parse_value(answer.rstrip("% ") or "None")
                owner = dataclasses.replace(owner, **{name: value})
                break
            except EOFError:
                console.print()
                return question
            except ValueError as error:
                console.print(f"  {error}", markup=False, highlight=False)
        question = dataclasses.replace(question, deployment=owner) if name in DEPLOYMENT else owner
    return question
