"""Finding a method by name, with errors that list what exists."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from importlib import import_module
from typing import Any, Generic, TypeVar

from twoaxis.base.options import check_options

T = TypeVar("T")


class Registry(Generic[T]):
    """Names and the classes behind them, imported on first use.

    Args:
        what: what the entries are, for messages.
        entries: name to `module:Class`.
    """

    def __init__(self, what: str, entries: dict[str, str | type[T]]) -> None:
        self.what = what
        self.entries = entries

    def names(self) -> tuple[str, ...]:
        """Every name."""
        return tuple(self.entries)

    def find(self, name: str) -> type[T]:
        """The class behind a name."""
        if not isinstance(name, str) or name not in self.entries:
            listed = ", ".join(self.entries)
            raise ValueError(
                f"unknown {self.what} {name!r}{_nearest(str(name), self.entries)}; the {self.what}s are {listed}"
            )
        found = self.entries[name]
        if not isinstance(found, str):
            return found
        module, _, attribute = found.partition(":")
        return getattr(import_module(module), attribute)

    def add(self, name: str, cls: type[T]) -> None:
        """Make one's own class available under `name`."""
        if name in self.entries:
            raise ValueError(f"there is already a {self.what} named {name!r} ({self.entries[name]})")
        self.entries[name] = cls

    def config(self, name: str, options: dict[str, Any]) -> Any:
        """The Config of a method from options, refusing those it does not have."""
        config: Any = self.find(name).Config  # type: ignore[attr-defined]
        known = [field.name for field in dataclasses.fields(config)]
        for option in options:
            if option not in known:
                listed = ", ".join(known) if known else "none"
                raise ValueError(f"{name} has no option {option!r}{_nearest(option, known)}; its options are {listed}")
        check_options(config, options)
        return config(**options)


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
