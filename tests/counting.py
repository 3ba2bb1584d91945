"""How much of the package a command runs through: its files and functions, counted by the interpreter itself.

    python -m tests.counting            what `twoaxis train` runs before its first step

A function counts once, however often it is called; bodies of modules and classes, lambdas and comprehensions do not
count. The fewer, the sooner somebody who reads along has seen everything.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGE = str(Path(__file__).resolve().parent.parent / "twoaxis")


class FirstStep(Exception):
    """Raised in place of the first step."""


def before_the_first_step() -> set[CodeType]:
    """Code objects of functions of the package that a small run executes until its first step."""
    from twoaxis import cli
    from twoaxis.training.engines.engine import Engine

    seen: set[CodeType] = set()

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            seen.add(frame.f_code)

    def stop(*arguments: Any) -> None:
        raise FirstStep

    original, Engine.gradients = Engine.gradients, stop  # type: ignore[method-assign]
    sys.setprofile(watch)
    try:
        with tempfile.TemporaryDirectory() as folder:
            cli.run(["train", "--out", f"{folder}/run", "--data", "task:recall", "--steps", "2", "--no-measure-memory"])
    except FirstStep:
        pass
    finally:
        sys.setprofile(None)
        Engine.gradients = original  # type: ignore[method-assign]
    return {code for code in seen if not code.co_name.startswith("<")}


def main() -> None:
    """Print the counts, and the files with how many functions of each ran."""
    functions = {code for code in before_the_first_step() if not _is_body(code)}
    files: dict[str, int] = {}
    for code in functions:
        name = str(Path(code.co_filename).relative_to(PACKAGE))
        files[name] = files.get(name, 0) + 1
    for name, count in sorted(files.items()):
        print(f"{count:5d}  {name}")
    print(f"{len(files)} files, {len(functions)} functions before the first step of twoaxis train")


def _is_body(code: CodeType) -> bool:
    """Whether the code is the body of a class, which runs when its module is imported."""
    return not code.co_flags & 0x2  # functions have fast locals


if __name__ == "__main__":
    main()
