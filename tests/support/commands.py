"""Commands as a person gives them, run in this process or, where the process itself is tested, in a child."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks import __main__ as benchmarks
from tests.support.processes import ROOT, environment
from twoaxis import cli
from twoaxis.depth.registry import STREAMS
from twoaxis.sequence.registry import MIXERS

REGISTRIES: list[dict[str, Any]] = [STREAMS.entries, MIXERS.entries]  # pyright: ignore[reportAssignmentType]


class Done(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


@contextlib.contextmanager
def registries_restored() -> Iterator[None]:
    """Context manager: methods registered inside are gone afterwards, and a file of them can be used again."""
    before, modules = [dict(each) for each in REGISTRIES], set(sys.modules)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.startswith("twoaxis_own_") and name not in modules]:
            del sys.modules[name]  # `use` runs a file once in a process
        for each, entries in zip(REGISTRIES, before, strict=True):
            each.clear()
            each.update(entries)


def _notes() -> tuple[int, bool] | None:
    """Verbosity and progress bars of transformers; None before it was imported."""
    logging = sys.modules.get("transformers.utils.logging")
    return None if logging is None else (logging.get_verbosity(), logging.is_progress_bar_enabled())


def _set_notes(wanted: tuple[int, bool] | None) -> None:
    logging = sys.modules.get("transformers.utils.logging")
    if logging is None:
        return
    level, bars = wanted or (logging.WARNING, True)  # what a fresh import has
    logging.set_verbosity(level)
    (logging.enable_progress_bar if bars else logging.disable_progress_bar)()


@contextlib.contextmanager
def process_restored() -> Iterator[None]:
    """Context manager: what a command may change in its process is afterwards what it was.

    The working directory, environment, import path, signal handlers, torch's threads, determinism and random numbers,
    the verbosity of transformers, and the registries. A command may change all of them, as its process ends with it;
    here the next test goes on in the same process.
    """
    folder, path, notes = Path.cwd(), list(sys.path), _notes()
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with mock.patch.dict(os.environ), torch.random.fork_rng(devices=[]), registries_restored():
        try:
            yield
        finally:
            os.chdir(folder)
            sys.path[:] = path
            for number, handler in handlers.items():
                if signal.getsignal(number) is not handler:
                    signal.signal(number, handler)
            gc.unfreeze()  # the benchmarks freeze
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(deterministic)
            _set_notes(notes)


def _pipe(encoding: str) -> io.TextIOWrapper:
    """A stream as a pipe gives it: bytes underneath, and no terminal."""
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="", write_through=True)


def _read(pipe: io.TextIOWrapper) -> str:
    pipe.seek(0)
    return pipe.read()


def call(
    entry: Callable[[], object],
    argv: list[str],
    *,
    stdin: bytes = b"",
    folder: Path | None = None,
    env: dict[str, str] | None = None,
    encoding: str = "utf-8",
) -> Done:
    """Run a program's entry point in this process and return its exit code and what it printed.

    Args:
        entry: the function; one that returns has ended with 0. Any exception but SystemExit passes through: as a
            process of its own, the program would have ended in a traceback.
        argv: the command line, the program's name first.
        stdin: what can be read from the standard input.
        folder: working directory; this process's where none is named.
        env: variables of the environment, added to those of this process.
        encoding: of what is printed, as `PYTHONIOENCODING` sets it.
    """
    out, err, code = _pipe(encoding), _pipe(encoding), 0
    with process_restored(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        os.environ.pop("COLUMNS", None)
        os.environ |= env or {}
        if folder is not None:
            os.chdir(folder)
        with mock.patch.object(sys, "argv", argv), mock.patch.object(sys, "stdin", _stdin(stdin)):
            try:
                entry()
            except SystemExit as ended:
                code = _exit_code(ended, err)
    return Done(code, _read(out), _read(err))


def _stdin(content: bytes) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8")


def _exit_code(ended: SystemExit, err: io.TextIOWrapper) -> int:
    """The code of a process that ends this way: a text is printed and means 1."""
    if isinstance(ended.code, str):
        err.write(ended.code + "\n")
        return 1
    return ended.code or 0


def run(*words: str, **options: Any) -> Done:
    """Run `twoaxis WORDS` in this process; see `call` for the options."""
    return call(cli.main, ["twoaxis", *words], **options)


def run_line(line: str, **options: Any) -> Done:
    """Run a line of the documentation in this process, from the project's folder: `twoaxis ...` or `python ...`."""
    program, *words = shlex.split(line)
    if program == "twoaxis":
        return run(*words, folder=ROOT, **options)
    if program != "python":
        raise ValueError(f"{line!r}: no known way to run it in a test")
    if words[0] == "-m":
        return run_module(*words[1:], folder=ROOT, **options)
    return call(lambda: runpy.run_path(str(ROOT / words[0]), run_name="__main__"), words, folder=ROOT, **options)


def run_module(module: str, *words: str, **options: Any) -> Done:
    """Run `python -m MODULE WORDS` in this process; see `call` for the options."""
    if module == "benchmarks":
        # with the allocator's setting in the environment it does not replace this process by one that has it
        return call(benchmarks.main, [module, *words], env=benchmarks.ALLOCATOR, **options)
    return call(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True), [module, *words], **options)


def run_child(*words: str, program: tuple[str, ...] = ("-m", "twoaxis"), stdin: str | None = None, **env: str) -> Done:
    """Run a command in a process of its own, for what only a process shows: what it imports, its streams, its end.

    Args:
        words: its arguments.
        program: what follows the interpreter, `("-c", code)` for a piece of code.
        stdin: what can be read from the standard input.
        env: variables of the environment.
    """
    done = subprocess.run(
        [sys.executable, *program, *words],
        input=None if stdin is None else stdin.encode(),
        capture_output=True,
        check=False,
        env=environment(**env),
    )
    return Done(done.returncode, done.stdout.decode(), done.stderr.decode())
