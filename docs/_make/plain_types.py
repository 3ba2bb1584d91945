"""Extension of griffe for the page of the Python functions: types without the notes for the command line."""

from __future__ import annotations

from typing import Any

import griffe


class PlainTypes(griffe.Extension):
    """`Annotated[str, arg(metavar="DIR")]` is shown as `str`."""

    def on_function(self, *, func: Any, **_: Any) -> None:
        """Called for every function that is read."""
        for parameter in func.parameters:
            note = parameter.annotation
            if isinstance(note, griffe.ExprSubscript) and str(note.left) == "Annotated":
                parameter.annotation = note.slice.elements[0]  # type: ignore[union-attr]
