"""Options are checked against their annotations before anything computes with them.

Without it a mistyped option (`window="3"`, `block_size=2.5`, `heads=True`) fails far from where it was written, or does
not fail at all: True counts as 1, and any text is true.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_WORDS = {int: "an integer", float: "a finite number", bool: "True or False", str: "text", types.NoneType: "None"}


def check_types(config: object) -> None:
    """Refuse a dataclass of options whose values are not what its annotations say.

    Knows int, float, bool, str, None, Literal, unions of these and tuples of one of them; other annotations pass.

    Args:
        config: an instance, usually `self` in `__post_init__`.
    """
    for name, hint in _hints(type(config)).items():
        check_type(name, getattr(config, name), hint)


def check_options(config: type, options: Mapping[str, object]) -> None:
    """The same for options by name, before the dataclass `config` is made of them."""
    for name, value in options.items():
        if name in _hints(config):
            check_type(name, value, _hints(config)[name])


def check_type(name: str, value: object, hint: Any) -> None:
    """Refuse one value that is not of the type `hint`.

    Args:
        name: what the value is called, for the message.
        value: the value.
        hint: its annotation.
    """
    if _fits(value, hint):
        return
    choices = [choice for part in _parts(hint) if get_origin(part) is Literal for choice in get_args(part)]
    if choices:
        raise ValueError(f"unknown {name} {value!r}; it is one of {', '.join(map(str, choices))}")
    raise ValueError(f"{name} must be {' or '.join(map(_words, _parts(hint)))}, got {value!r}")


@cache
def _hints(config: type) -> dict[str, Any]:
    """Annotation of each field; nothing where they cannot be evaluated, as in a class inside a function."""
    try:
        hints = get_type_hints(config)
    except NameError:
        return {}
    return {name: hint for name, hint in hints.items() if name in getattr(config, "__dataclass_fields__", ())}


def _parts(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fits(value: object, hint: Any) -> bool:
    parts = _parts(hint)
    if len(parts) > 1:
        return any(_fits(value, part) for part in parts)
    if get_origin(hint) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(hint))
    if get_origin(hint) is tuple:
        return isinstance(value, tuple | list) and all(_fits(item, get_args(hint)[0]) for item in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return hint not in _WORDS or isinstance(value, hint)


def _words(hint: Any) -> str:
    if get_origin(hint) is tuple:
        return f"a tuple (each {' or '.join(map(_words, _parts(get_args(hint)[0])))})"
    return _WORDS.get(hint, str(hint))
