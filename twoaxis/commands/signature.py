"""The annotations that commands share: what the command line reads of a parameter, and what `help` shows instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar, Unpack, get_args, get_origin

import tyro
from tyro.conf import Positional, UseAppendAction, arg

F = TypeVar("F", bound=Callable[..., Any])


def plain(command: F) -> F:
    """Decorator: `help` shows `stream: Sequence[str] = ()`, not the annotations that tyro reads."""
    signature = inspect.signature(command)
    shown = [each.replace(annotation=_plain(each.annotation, command)) for each in signature.parameters.values()]
    command.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return command


def _plain(note: Any, command: Callable[..., Any]) -> Any:
    """An annotation without its metadata; the names in it are the command's module's."""
    found = eval(note, command.__globals__) if isinstance(note, str) else note
    while get_origin(found) in (Annotated, Unpack):
        found = get_args(found)[0]
    return found


def word(metavar: str, read: Callable[[str], Any] = str) -> Any:
    """For `Annotated`: an option that Python gives in several forms and the command line as one word, which is read."""
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: read(words[0]),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [str(value)],
    )


def _named(text: str) -> str:
    if not text:
        raise ValueError("it names no folder")  # an empty path would be the current one
    return text


Folder = Annotated[str, word("DIR", _named)]
SavedFolder = Annotated[str, Positional, arg(metavar="DIR")]
File = Annotated[str | None, arg(metavar="FILE")]
Shape = arg(metavar="NAME|config.json")
Names = Annotated[Sequence[str], UseAppendAction, arg(metavar="NAME[:k=v,...]")]
Name = arg(metavar="NAME[:k=v,k=v]")
Numbers = Annotated[int | str | Sequence[int] | None, word("N|A,B,C")]
Rates = Annotated[float | str | Sequence[float] | None, word("RATE[,RATE,...]")]
Launcher = Annotated[str | None, arg(metavar="local|ray[:k=v,...]|slurm[:k=v,...]")]
AsBytes = Annotated[bool, arg(name="bytes")]
