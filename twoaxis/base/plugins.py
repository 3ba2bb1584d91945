"""Streams and mixers from outside the package, used by name like those inside.

Two ways: a Python file that calls `twoaxis.register`, named with `--use FILE`, and an installed package with an entry
point of the group `twoaxis.methods`, whose module registers its methods when it is imported.

A saved model keeps where its methods came from (`methods.json`), so that a program without them can say what to name.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import entry_points, packages_distributions
from pathlib import Path
from typing import Any

from twoaxis.base.files import file_sha256, read_json, write_json

PREFIX = "twoaxis_own_"
"""What the names of modules begin with that are files named by the user."""
GROUP = "twoaxis.methods"
"""Entry points of this group are loaded when a name is asked for that is not known otherwise."""
ORIGINS = "methods.json"
"""File of a saved model that says where methods came from that are not the library's."""


def used() -> tuple[str, ...]:
    """The files that were run in this process, in order."""
    return tuple(str(sys.modules[name].__file__) for name in sys.modules if name.startswith(PREFIX))


def origin(method: type) -> dict[str, str] | None:
    """Where a method came from: a file with its hash, or an installed package; None for the library's own."""
    module = method.__module__
    if module.startswith("twoaxis."):
        return None
    if module.startswith(PREFIX):
        path = str(sys.modules[module].__file__)
        return {"file": path, "sha256": file_sha256(path)}
    package = module.partition(".")[0]
    return {"package": packages_distributions().get(package, [package])[0]}


def write_origins(folder: str | Path, methods: Iterable[type]) -> None:
    """Write `methods.json` into a model's folder, if a method of the model is not the library's."""
    found: dict[str, Any] = {each.name: where for each in methods if (where := origin(each))}  # type: ignore[attr-defined]
    if found:
        write_json(Path(folder) / ORIGINS, {"format": 1, "methods": found})


def use_options(folder: str | Path) -> str:
    """What a command line needs to load a model again: ` --use FILE` for every file that its methods came from."""
    files = [where["file"] for where in _origins(folder).values() if "file" in where]
    return "".join(f" --use {file}" for file in dict.fromkeys(files))


def check_origins(folder: str | Path, known: Iterable[str]) -> None:
    """Refuse a model of methods that are not known here, and say where they came from."""
    there = set(known)
    missing = {name: where for name, where in _origins(folder).items() if name not in there}
    for name, where in missing.items():
        if "package" in where:
            raise ValueError(f"{folder} has the method {name!r} of the package {where['package']}: install it")
    if missing:
        files = list(dict.fromkeys(where["file"] for where in missing.values()))
        names, use = " and ".join(map(repr, missing)), " ".join(f"--use {file}" for file in files)
        raise ValueError(f"{folder} has {names}, not known here: add {use} (twoaxis.use in Python)")


def _origins(folder: str | Path) -> dict[str, dict[str, str]]:
    path = Path(folder) / ORIGINS
    found = read_json(path) if path.is_file() else {"methods": {}}
    methods = found.get("methods") if isinstance(found, dict) else None
    if not isinstance(methods, dict) or not all(_is_origin(where) for where in methods.values()):
        raise ValueError(f"{path} is damaged: it does not say where methods came from; save the model again")
    return methods


def _is_origin(where: Any) -> bool:
    return isinstance(where, dict) and any(isinstance(where.get(name), str) for name in ("file", "package"))


def use(*paths: str | Path) -> None:
    """Run Python files that register streams and mixers, as `--use` does. Name only files you trust.

        twoaxis.use("my_stream.py")
        twoaxis.train(out="runs/mine", stream="fading_memory")

    Args:
        *paths: the files; one that was run in this process is not run again.
    """
    for path in paths:
        name = f"{PREFIX}{hashlib.sha256(str(Path(path).resolve()).encode()).hexdigest()[:12]}"
        if name in sys.modules:
            continue
        if not Path(path).is_file():
            raise ValueError(f"there is no file {path} to take methods from")
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ValueError(f"{path} is not a Python file: its name must end in .py")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            raise ValueError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error


@cache
def load_entry_points() -> None:
    """Import the modules behind the entry points of installed packages, once in a process."""
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except Exception as error:
            raise ValueError(
                f"the methods of {point.dist.name if point.dist else point.value} cannot be loaded "
                f"({type(error).__name__}: {error}); repair or uninstall that package"
            ) from error


def fingerprints(paths: Iterable[str | Path]) -> dict[str, str]:
    """SHA-256 of each file's content."""
    return {str(path): file_sha256(path) for path in paths}
