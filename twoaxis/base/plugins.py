"""Streams and mixers of one's own: Python files that register them, used by name like ours."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path


def use_files(paths: Iterable[str | Path]) -> None:
    """Run Python files that call `twoaxis.register`. A file is run once in a process; name only files you trust.

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


def fingerprints(paths: Iterable[str | Path]) -> dict[str, str]:
    """SHA-256 of each file's content."""
    found = {}
    for path in paths:
        try:
            found[str(path)] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    return found
