"""Spec strings: one spelling of a name with options everywhere, `NAME[:k=v,k=v]`.

    deep_delta:value_channels=4,expand=conv

Values are JSON where they can be read as such (numbers, true, false, null, lists), and text otherwise. Commas inside
brackets do not separate.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """`NAME[:k=v,...]` as a name and its options."""
    name, _, rest = text.partition(":")
    name = name.strip()
    if not name:
        raise ValueError(f"{text!r} names no method; write NAME or NAME:option=value,option=value")
    wrong = lambda part: f"{part!r} in {text!r} is no option; write NAME:option=value,option=value"  # noqa: E731
    return name, parse_options([rest], repr(text), wrong)


def parse_options(texts: Iterable[str], what: str, wrong: Callable[[str], str]) -> dict[str, Any]:
    """Lists `k=v,...` as options, each once; `what` they are and what is `wrong` with a part are for messages."""
    options: dict[str, Any] = {}
    for part in (part for text in texts for part in split(text)):
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ValueError(wrong(part))
        if key in options:
            raise ValueError(f"{what} gives {key} twice")
        options[key] = parse_value(value)
    return options


def parse_value(text: str) -> Any:
    """JSON where it can be read as such, else the text itself; True, False and None are understood too."""
    text = text.strip()
    words = {"True": True, "False": False, "None": None}
    if text in words:
        return words[text]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # thousands of open brackets, or of digits
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
