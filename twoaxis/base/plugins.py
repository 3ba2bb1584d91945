"""Streams and mixers from outside the package, used by name like those inside.

Two ways: a Python file that calls `twoaxis.register`, named with `--use FILE`, and an installed package with an entry
point of the group `twoaxis.methods`, whose module registers its methods when it is imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

from twoaxis.base.files import file_sha256

GROUP = "twoaxis.methods"
"""Entry points of this group are loaded when a name is asked for that is not known otherwise."""


def use_files(paths: Iterable[str | Path]) -> None:
    """Run Python files that register methods. A file is run once in a process; name only files you trust.

    Args:
        paths: the files.
    """
    for path in paths:
        name = f"twoaxis_own_{hashlib.sha256(str(Path(path).resolve()).encode()).hexdigest()[:12]}"
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
        except Exception as error:
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
