"""What to install where an optional package is missing: one line, the same in every message and in the README."""

from __future__ import annotations


def install(extra: str = "lab") -> str:
    """The command, run in a clone, that adds an extra of this package; `lab` has what most people need."""
    return f'pip install -e ".[{extra}]" (in a clone of twoaxis)'


def needs(what: str, package: str, extra: str = "lab") -> str:
    """A message: what is asked for, the package that it needs, and how it is installed."""
    return f"{what} needs the package {package}, which is not installed: {install(extra)}"
