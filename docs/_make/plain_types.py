"""Extension of griffe for the page of the Python functions: types without the notes for the command line."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import griffe


class PlainTypes(griffe.Extension):
    """Parameters of commands have the types that `help` shows: `str` for `Folder`, `Sequence[str]` for `Names`."""

    def on_function(self, *, func: Any, **_: Any) -> None:
        """Called for every function that is read."""
        if not func.path.startswith("twoaxis.commands.") or not func.parent.is_module:
            return
        command = getattr(import_module(func.parent.path), func.name)
        shown = inspect.signature(command).parameters
        for parameter in func.parameters:
            note = inspect.formatannotation(shown[parameter.name].annotation)
            parameter.annotation = note.replace("collections.abc.", "").replace("typing.", "")
