"""Processes of their own: starting, watching and ending them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
"""The project's folder."""


def environment(**more: str) -> dict[str, str]:
    """Variables for a child: this tree's modules, one thread, no GPU, UTF-8, no width of a terminal; `more` wins.

    A child that dies by a signal of the machine, such as SIGSEGV, says in which line.
    """
    ours = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONIOENCODING": "utf-8", "PYTHONFAULTHANDLER": "1"}
    ours["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {name: value for name, value in os.environ.items() if name != "COLUMNS"} | ours | more


def start(
    *words: str,
    program: tuple[str, ...] = ("-m", "twoaxis"),
    stdout: int | None = subprocess.PIPE,
    stderr: int | None = subprocess.PIPE,
    **options: Any,
) -> subprocess.Popen[str]:
    """Start a command that the test will watch, signal or kill."""
    command = [sys.executable, *program, *words]
    return subprocess.Popen(command, stdout=stdout, stderr=stderr, text=True, env=environment(), **options)


def wait_for(what: Callable[[], Any], seconds: float = 120.0) -> Any:
    """The first true answer of `what`, asked again and again."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        answer = what()
        if answer:
            return answer
        time.sleep(0.02)
    raise AssertionError(f"waited {seconds:.0f} s for {what}")


def children(pid: int) -> list[int]:
    """Processes that `pid` started, and theirs."""
    try:
        direct = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [number for child in direct for number in (child, *children(child))]


def alive(pid: int) -> bool:
    """Whether a process runs; a dead one that nobody has waited for counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def end(process: subprocess.Popen[str], number: int) -> tuple[int, str]:
    """Send a signal to a process; its exit code and stderr, once it and all it had started are gone."""
    family = children(process.pid)
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    wait_for(lambda: not any(alive(pid) for pid in family), seconds=20)
    return process.returncode, said
