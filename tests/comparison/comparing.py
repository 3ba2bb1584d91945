"""Tiny comparisons for tests: a few kilobytes of text, a model of width 32, a stream that fails on purpose."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

from tests.support import processes
from twoaxis.comparison.options import command_line
from twoaxis.training.result import Result, load_result

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
"""A model's shape."""
FRAGILE = '''
import os, signal
from dataclasses import dataclass
from pathlib import Path

import twoaxis
from twoaxis.depth.standard import Standard


@dataclass(frozen=True, kw_only=True)
class FragileConfig:
    how: str = "raise"
    once: str | None = None


@twoaxis.register("fragile")
class Fragile(Standard):
    """The plain residual, but the pass after the tenth fails; with `once` only while that file is not there."""

    Config = FragileConfig

    def _open(self, x, tokens):
        self.passes = getattr(self, "passes", 0) + 1
        once = self.config.once
        if self.passes > 10 and not (once and Path(once).exists()):
            if once:
                Path(once).write_text("")
            if self.config.how == "segmentation fault":
                os.kill(os.getpid(), signal.SIGSEGV)
            if self.config.how == "exit":
                os._exit(7)
            raise RuntimeError("fragile streams break")
        return super()._open(x, tokens)
'''


def make_text(folder: Path) -> Path:
    """Some text, the same every time."""
    if folder.exists():
        return folder
    folder.mkdir(parents=True)
    for number in range(6):
        words = [f"axis {n * (number + 3) % 17} stream {n % 5} mixes.\n" for n in range(120)]
        (folder / f"{number}.txt").write_text("".join(words))
    return folder


def make_options(folder: Path, **changes: Any) -> dict[str, Any]:
    """A comparison that takes about a second per run."""
    options: dict[str, Any] = {
        "data": [str(make_text(folder / "text"))],
        "cache": str(folder / "cache"),
        "tokenizer": "bytes",
        "context": 16,
        "batch": 2,
        "steps": 12,
        "eval_examples": 4,
        "final_examples": 8,
        "save_every": 3,
        "save_model": False,
        "measure_memory": False,
        "compile": "no",  # a run of many steps would be, for longer than its test takes
        "model": TINY,
    }
    return options | changes


def arguments(options: dict[str, Any]) -> list[str]:
    """The same as a command line."""
    return shlex.split(command_line("", None, options, command=()))[3:]


def start(*words: str, **options: Any) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    return processes.start("compare", *words, **options)


def results(out: Path) -> dict[str, Result]:
    """Of all finished runs, by their place."""
    found = {}
    for path in sorted(out.glob("runs/**/result.json")):
        result = load_result(path.parent)
        assert result is not None
        found[path.parent.relative_to(out).as_posix()] = result
    return found


def weights(out: Path) -> dict[str, str | None]:
    """Hash of the final weights of all finished runs, by their place."""
    return {place: result.weights for place, result in results(out).items()}


def stamps(out: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of every result: the same as long as nobody writes it again."""
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in out.glob("runs/**/result.json")}
