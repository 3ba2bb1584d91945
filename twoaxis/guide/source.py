"""What a method's file says about it: the module's docstring in parts, and the options with their docstrings.

A docstring under a field is a string that Python forgets, so it is read from the source.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from typing import Any, NamedTuple, get_args, get_type_hints

from twoaxis.base.options import field_docs
from twoaxis.show.document import Code, Items, Prose


class Option(NamedTuple):
    """One option of a method.

    Attributes:
        name: of the field.
        type: its annotation, choices listed as they are.
        default: its value as Python writes it, or "required".
        meaning: the docstring under it.
    """

    name: str
    type: str
    default: str
    meaning: str


class Notes(NamedTuple):
    """A module's docstring.

    Attributes:
        summary: the first line.
        body: what follows; equations and drawings are `Code`.
    """

    summary: str
    body: tuple[Prose | Code | Items, ...]


def options(config: Any) -> tuple[Option, ...]:
    """The options of a Config dataclass, in its order."""
    docs = field_docs(config)
    try:
        hints = get_type_hints(config)
    except NameError:  # an annotation that only a type checker can resolve
        hints = {}
    return tuple(
        Option(f.name, _annotation(hints.get(f.name, f.type)), _default(f), docs.get(f.name, ""))
        for f in dataclasses.fields(config)
        if f.init
    )


def _annotation(kind: Any) -> str:
    """A type in few signs: choices are listed as they are."""
    named = kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind).replace("typing.", "")
    optional = re.sub(r"^Optional\[(.*)\]$", r"\1 | None", named)
    return re.sub(r"Literal\[([^\]]*)\]", lambda found: found[1].replace(", ", " | "), optional)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return repr(field.default_factory())
    return "required"


def notes(cls: type) -> Notes:
    """The docstring of the module that defines `cls`, in parts."""
    module = sys.modules.get(cls.__module__)
    summary, _, rest = inspect.cleandoc(getattr(module, "__doc__", None) or "").partition("\n")
    body: list[Prose | Code | Items] = []
    for chunk in rest.strip("\n").split("\n\n"):
        if not chunk.strip():
            continue
        lines = chunk.strip("\n").split("\n")
        if not all(line.startswith("    ") for line in lines):
            body += _words(lines)
        elif body and isinstance(body[-1], Code):
            body[-1] = Code(f"{body[-1].text}\n\n{_undent(lines)}")
        else:
            body.append(Code(_undent(lines)))
    return Notes(summary, tuple(body))


def _undent(lines: list[str]) -> str:
    return "\n".join(line[4:].rstrip() for line in lines)


def _words(lines: list[str]) -> list[Prose | Items]:
    """A paragraph, and the list under it if there is one."""
    lead: list[str] = []
    items: list[str] = []
    for line in lines:
        if line.startswith("- "):
            items.append(line[2:].strip())
        elif items:
            items[-1] += f" {line.strip()}"
        else:
            lead.append(line.strip())
    parts: list[Prose | Items] = [Prose(" ".join(lead))] if lead else []
    return [*parts, Items(tuple(items))] if items else parts
