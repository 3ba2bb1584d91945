"""Check a file: every stream and mixer that it defines."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from twoaxis.depth.stream import Stream
from twoaxis.sequence.mixer import LocalOperator
from twoaxis.verify.claim import Report, raised
from twoaxis.verify.run import check
from twoaxis.verify.subject import SUBJECTS


def check_file(path: str | Path, *, compile: bool = False, seed: int = 0, only: Sequence[str] = ()) -> list[Report]:
    """Import a Python file and check every `Stream` and `LocalOperator` that it defines, in the order of the file.

    The file is run, like any import: check only files you trust. What it registers is forgotten again afterwards.

    Args:
        path: the file.
        compile: also compile each subject with `fullgraph=True`; slow.
        seed: of parameters, inputs and sub-layers.
        only: names or families of claims; none named is all of them.

    Raises:
        ValueError: there is no such file, it cannot be imported, or it defines neither a stream nor a mixer.
    """
    with registries_restored(), imported(Path(path)) as module:
        methods = defined_in(module)
        if not methods:
            raise ValueError(f"{path} defines no subclass of twoaxis.Stream or of twoaxis.LocalOperator")
        return [check(method, seed=seed, compile=compile, only=only) for method in methods]


@contextmanager
def registries_restored() -> Iterator[None]:
    """Context manager: forgets what is registered inside."""
    before = [(kind.registry.entries, dict(kind.registry.entries)) for kind in SUBJECTS]
    try:
        yield
    finally:
        for entries, kept in before:
            entries.clear()
            entries.update(kept)


@contextmanager
def imported(path: Path) -> Iterator[ModuleType]:
    """Context manager: the file as a module, under a name of its own; an error of the file is shown with its line."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    if path.suffix != ".py":
        raise ValueError(f"{path} is no Python file: its name does not end in .py")
    name = f"twoaxis_checked_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up by name
    try:
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise ValueError(f"{path} cannot be imported: {raised(error)}") from error
        yield module
    finally:
        sys.modules.pop(name, None)


def defined_in(module: ModuleType) -> list[type[Any]]:
    """The streams and mixers a module defines itself; a class that others in it build on is theirs, not a method."""
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Stream | LocalOperator) and value.__module__ == module.__name__
    ]
    unique = list(dict.fromkeys(found))
    bases = {base for cls in unique for base in cls.__mro__[1:]}
    return [cls for cls in unique if hasattr(cls, "Config") or cls not in bases]
