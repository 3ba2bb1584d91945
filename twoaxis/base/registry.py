"""Methods by name: one spelling of a name with options everywhere, and what stands behind the name.

    deep_delta:value_channels=4,expand=conv          NAME[:k=v,k=v]

Values are JSON where they can be read as such (numbers, true, false, null, lists), and text otherwise. Commas inside
brackets do not separate. An unknown name is an error that lists what exists and suggests the nearest.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint for an unknown word, such as ` (did you mean 'window'?)`, or nothing if no known word is near."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


class Registry(Generic[T]):
    """Names and the classes behind them, imported on first use.

    A name may be given in any case, with -, _ or nothing between its words, and by one of the `aliases` that its class
    declares.

    Args:
        what: what the entries are, for messages.
        entries: name to `module:Class`.
    """

    def __init__(self, what: str, entries: dict[str, str | type[T]]) -> None:
        self.what = what
        self.entries = entries
        REGISTRIES.append(self)

    @property
    def aliases(self) -> dict[str, str]:
        """Names that people use, to the name here, or to NAME:k=v,... where they stand for certain options.

        Every class is imported, and speaks for itself alone: what it inherits is another method's.
        """
        spelled = ((own, each) for own in self.entries for each in vars(self.find(own)).get("aliases", ()))
        parts = ((own, *each.partition(":")) for own, each in spelled)
        return {alias: f"{own}{colon}{options}" for own, alias, colon, options in parts}

    def names(self) -> tuple[str, ...]:
        """Every name, those of installed packages included."""
        self._load_installed()
        return tuple(self.entries)

    def canonical(self, name: str) -> str:
        """The name here of what people call by that name; one that is not known stays as it is."""
        if not isinstance(name, str) or name in self.entries:
            return name
        name, known = name.partition(":")[0], {_squeezed(own): own for own in self.entries}
        found = known.get(_squeezed(name)) or self.aliases.get(_squeezed(name), name)
        return found.partition(":")[0]

    def expand(self, name: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """The name here, and the options with those that an alias and a spelling stand for; given ones come first."""
        spelled: dict[str, Any] = {}
        if isinstance(name, str) and ":" in name:
            name, spelled = parse(name)
        named = None if name in self.entries else self.aliases.get(_squeezed(name))
        return self.canonical(name), ({} if named is None else parse(named)[1]) | spelled | dict(options)

    def find(self, name: str) -> type[T]:
        """The class behind a name or an alias; an unknown one is an error."""
        name = self.canonical(name)
        text = isinstance(name, str)
        if text and name not in self.entries:
            self._load_installed()
        if not text or name not in self.entries:
            aliases = self.aliases
            hint = did_you_mean(str(name), (*self.entries, *aliases))
            shown = repr(name[:60] if text else name)
            if kinds := [each.what for each in REGISTRIES if text and each.canonical(name) in each.entries]:
                raise ValueError(f"{shown} is a {kinds[0]}, not a {self.what}: give it as --{kinds[0]}")
            known = {own: [a for a, named in aliases.items() if named.split(":")[0] == own] for own in self.entries}
            listed = ", ".join(f"{own} ({', '.join(short)})" if short else own for own, short in known.items())
            raise ValueError(f"unknown {self.what} {shown}{hint}; the {self.what}s are {listed}")
        entry = self.entries[name]
        if not isinstance(entry, str):
            return entry
        module, _, attribute = entry.partition(":")
        return getattr(import_module(module), attribute)

    def add(self, name: str, cls: type[T]) -> None:
        """Make a class available under `name`, which nothing else may be called by."""
        known = self.canonical(name)
        if known in self.entries:
            raise ValueError(f"there is already a {self.what} named {known!r} ({self.entries[known]})")
        self.entries[name] = cls

    def config(self, name: str, options: Mapping[str, Any]) -> Any:
        """The Config of a method from options, refusing those it does not have."""
        from twoaxis.base.options import from_fields  # which needs did_you_mean of this file

        config: Any = self.find(name).Config  # type: ignore[attr-defined]
        name, options = self.expand(name, options)
        return from_fields(config, options, name)

    def _load_installed(self) -> None:
        """Run the entry points of installed packages once; they register their methods themselves."""
        from twoaxis.base.plugins import load_entry_points

        load_entry_points()


REGISTRIES: list[Registry[Any]] = []
"""Every registry, to tell a method of another kind from a word that nobody knows."""


def _squeezed(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


# Spelling.


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
