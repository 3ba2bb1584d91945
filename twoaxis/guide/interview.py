"""Asking for what advice depends on, one question after the other, on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TextIO


class Asked(NamedTuple):
    """One question.

    Attributes:
        option: what it answers, as an argument of the command.
        text: the question.
        default: the answer of an empty line.
        read: turns a line into a value; a ValueError is shown and the question asked again.
    """

    option: str
    text: str
    default: Any
    read: Callable[[str], Any]


def one_of(*choices: str) -> Callable[[str], str]:
    """One of several words, or the beginning of just one."""

    def read(line: str) -> str:
        found = [choice for choice in choices if choice.startswith(line.lower())]
        if line.lower() in choices:
            return line.lower()
        if len(found) != 1:
            raise ValueError(f"answer one of {', '.join(choices)}")
        return found[0]

    return read


def number(least: float, most: float = float("inf")) -> Callable[[str], float]:
    """A number between two."""

    def read(line: str) -> float:
        try:
            value = float(line.rstrip("%").strip())
        except ValueError:
            raise ValueError(f"answer with a number, not {line!r}") from None
        if not least <= value <= most:
            raise ValueError(f"it must be at least {least:g}" + (f" and at most {most:g}" if most < 1e300 else ""))
        return value

    return read


def count(line: str) -> int:
    """A whole number of at least one."""
    value = number(1)(line)
    if value != int(value):
        raise ValueError(f"answer with a whole number, not {line!r}")
    return int(value)


def a_shape(line: str) -> str:
    """A shape that exists."""
    from twoaxis.model.presets import find_shape

    find_shape(line)
    return line


def hardware(line: str) -> str:
    """A device that exists."""
    from twoaxis.costs.hardware import find_profile

    find_profile(line)
    return line


QUESTIONS = (
    Asked("shape", "Model: a preset, a public model or a config.json", "llama-3-8b", a_shape),
    Asked(
        "goal",
        "Goal: a better shortcut, local mixing of tokens, cross-depth retrieval, or any",
        "any",
        one_of("any", "shortcut", "mixing", "retrieval"),
    ),
    Asked("start", "Start: from scratch, or retrofit a trained model", "scratch", one_of("scratch", "retrofit")),
    Asked("hardware", "Hardware: a100, h100, h200, b200, or a profile of twoaxis cost --calibrate", "h100", hardware),
    Asked("pipeline_stages", "Pipeline stages (1 is no pipeline)", 1, count),
    Asked("context", "Tokens of a sequence", 4096, count),
    Asked("micro_batch", "Sequences of a training pass on each replica", 1, count),
    Asked("serving", "Percent of all compute that will be spent decoding", 0, number(0, 100)),
    Asked("max_overhead", "Time a method may add, in percent (empty: any)", None, number(0)),
    Asked("headroom", "Memory a method may add on a device, in GB (empty: any)", None, number(0)),
)
"""In the order they are asked."""


def interview(
    questions: tuple[Asked, ...] = QUESTIONS, lines: TextIO | None = None, out: TextIO | None = None
) -> dict[str, Any]:
    """Ask, and return the answers by option. The end of the input answers what is left with the defaults.

    Args:
        questions: to ask.
        lines: the answers; None is standard input.
        out: where to ask; None is stderr.
    """
    answers_in: TextIO = lines or sys.stdin
    out = sys.stderr if out is None else out
    answers: dict[str, Any] = {}
    ended = False
    for asked in questions:
        answers[asked.option] = asked.default
        while not ended:
            shown = "" if asked.default is None else f" [{asked.default}]"
            print(f"{asked.text}{shown}: ", end="", file=out, flush=True)
            line = answers_in.readline()
            ended = not line
            if not line.strip():
                break
            try:
                answers[asked.option] = asked.read(line.strip())
                break
            except ValueError as error:
                print(f"  {error}", file=out)
    if ended:
        print(file=out)
    answers["serving"] = answers["serving"] / 100
    return answers
