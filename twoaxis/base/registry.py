"""Finding a method by name, with errors that list what exists."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint for an unknown word, such as ` (did you mean 'window'?)`, or nothing if no known word is near."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


class Registry(Generic[T]):
    """Names and the classes behind them, imported on first use.

    Args:
        what: what the entries are, for messages.
        entries: name to `module:Class`.
        aliases: other names that people know, in any case and with - or _, to the name here.
    """

    def __init__(self, what: str, entries: dict[str, str | type[T]], aliases: Mapping[str, str] | None = None) -> None:
        self.what = what
        self.entries = entries
        self.aliases = dict(aliases or {})

    def names(self) -> tuple[str, ...]:
        """Every name, those of installed packages included."""
        self._load_installed()
        return tuple(self.entries)

    def canonical(self, name: str) -> str:
        """The name here of a method, given that or an alias; an unknown one is an error."""
        if isinstance(name, str):
            if name in self.entries:
                return name
            plain = name.lower().replace("-", "_").replace(" ", "_")
            if (alias := self.aliases.get(plain.replace("_", ""), plain)) in self.entries:
                return alias
            self._load_installed()
            if name in self.entries:
                return name
        listed = ", ".join(self.entries)
        hint = did_you_mean(str(name), self.entries)
        shown = f"{str(name)[:60]!r}" if isinstance(name, str) else repr(name)
        raise ValueError(f"unknown {self.what} {shown}{hint}; the {self.what}s are {listed}")

    def find(self, name: str) -> type[T]:
        """The class behind a name or an alias."""
        entry = self.entries[self.canonical(name)]
        if not isinstance(entry, str):
            return entry
        module, _, attribute = entry.partition(":")
        return getattr(import_module(module), attribute)

    def add(self, name: str, cls: type[T]) -> None:
        """Make a class available under `name`."""
        if name in self.entries:
            raise ValueError(f"there is already a {self.what} named {name!r} ({self.entries[name]})")
        self.entries[name] = cls

    def config(self, name: str, options: Mapping[str, Any]) -> Any:
        """The Config of a method from options, refusing those it does not have."""
        from twoaxis.base.options import from_fields  # which needs did_you_mean of this file

        config: Any = self.find(name).Config  # type: ignore[attr-defined]
        return from_fields(config, options, self.canonical(name))

    def _load_installed(self) -> None:
        """Run the entry points of installed packages once; they register their methods themselves."""
        from twoaxis.base.plugins import load_entry_points

        load_entry_points()
