"""The process that carries out runs: it claims folders and forks a process for each run.

    coordinator                       worker, one per machine                     run, one process each
      plan, files ──── launcher ────►   imports once, gc.freeze
      watches files                     next unit without a result: fork ───────►   performs in the unit's folder:
      ends: stdin ends ─────────────►   killpg                                       .progress, then the result
                                        ends: life line ends ───────────────────►   ends
                                        exit code: failed.json, two tries  ◄──────

Importing takes seconds, forking milliseconds; a run that crashes takes nothing with it. Nothing outlives whoever
started it: stdin ends when the coordinator dies, the life line when this process does. The process has one thread when
it forks: a lock that another thread held would stay locked in the run for ever.

The forkserver of Python's multiprocessing imports the caller's `__main__` again in every process, so that a script
without a main guard fails, and lets its processes live on when their parent is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

from twoaxis.base.files import LEASE, PARTIAL, Claimed, FileError, file_errors, read_json, write_json
from twoaxis.base.interrupt import allow, deferred
from twoaxis.base.plugins import use

PROGRESS, FAILED, OUTPUT = ".progress", "failed.json", "output.txt"
"""Files of a unit's folder while it has no result: how far it is, how it failed, what it printed."""
DISK_REFUSED, CLAIMED = 74, 75
"""Exit codes of a run: the system refused a file, as it then does for every run; another process has the folder."""
TRIES = 2
"""How often a run is started before it counts as failed."""
POLL, LOOK, PAUSE, AGAIN = 0.05, 2.0, 0.5, 5.0
"""Seconds between looks at the runs, and at the folder when no run has ended; between two reports of a run's progress;
until a folder that another process has is tried again."""
TAIL = 15
"""Lines of a failed run's output that are shown."""
FATAL = "Fatal Python error"

Beat = Callable[[float, str], None]
"""How a run tells the part of its work that is done, and a note."""


class Unit(NamedTuple):
    """A run that has a folder; finished when its result is there."""

    folder: Path  # where it leaves everything; one process at a time claims it
    name: str  # for people
    size: float  # its work, in a unit that all of them share
    outcome: Callable[[], str | None]  # how it ended, in words; None while it is not finished
    perform: Callable[[Beat, int], None]  # carries it out, in a process of its own, as a number of those at once


class Work(Protocol):
    """What a folder wants done. It is loaded by its name, with the folder, by coordinator and workers alike."""

    def prepare(self) -> None:
        """What all runs share, before the first fork: imports, weights."""
        ...

    def units(self) -> Sequence[Unit]:
        """Everything that can be done by now, finished or not, in order: read anew from the folder."""
        ...

    def later(self) -> Sequence[float]:
        """Sizes of the units that come when others have ended."""
        ...


def load_work(name: str, folder: Path) -> Work:
    """The work MODULE:CLASS on a folder."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)(folder)


class Stop:
    """Whether SIGTERM has come. Its handler does nothing else, so that no moment is bad for one."""

    heard = passed_on = False

    def hear(self, number: int, frame: Any) -> None:
        """Handle it."""
        self.heard = True


def work(name: str, folder: Path, jobs: int) -> int:
    """Carry out the units of a folder, `jobs` at once, until each has a result or has failed twice; the exit code."""
    stop = Stop()
    signal.signal(signal.SIGTERM, stop.hear)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started the worker decides what stops
    todo = load_work(name, folder)
    todo.prepare()
    gc.collect()
    gc.freeze()  # a collection in a run does not copy the pages it shares
    life_line, held = os.pipe()  # runs keep the read end alone: it ends with this process
    running: dict[int, tuple[Unit, int]] = {}
    slots, tries, after = set(range(jobs)), Counter[Path](), dict[Path, float]()
    looked, refused = 0.0, False
    while True:
        now = time.monotonic()
        if any(moment <= now for moment in after.values()):
            after = {folder: moment for folder, moment in after.items() if moment > now}
            looked = 0.0  # else nothing would be left to wait for, and the worker would end with these runs open
        while slots and not stop.heard and now - looked >= LOOK:
            busy = {unit.folder for unit, _ in running.values()} | set(after)
            unit = _next(todo, busy, tries)
            if unit is None:
                looked = now
                break
            slot = min(slots)
            with file_errors(unit.folder):
                unit.folder.mkdir(parents=True, exist_ok=True)
                if not _leased(unit):  # else it may be the output of a run on another machine
                    (unit.folder / OUTPUT).write_bytes(b"")
            tries[unit.folder] += 1
            with deferred():  # a signal that comes here must not find the worker's handler in the run
                if (pid := os.fork()) == 0:
                    become_run(unit, slot, life_line, held)
                running[pid] = unit, slot
            slots.remove(slot)
        if not running and (stop.heard or (looked and not after)):
            return DISK_REFUSED if refused else 0
        if stop.heard and not stop.passed_on:
            stop.passed_on = True
            for pid in running:
                os.kill(pid, signal.SIGTERM)  # a run saves and ends
        if stdin_ended(POLL):
            os.killpg(0, signal.SIGKILL)
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            looked, code = 0.0, os.waitstatus_to_exitcode(status)
            unit, slot = running.pop(pid)
            slots.add(slot)
            if code == CLAIMED:
                tries[unit.folder] -= 1
                after[unit.folder] = time.monotonic() + AGAIN
            elif unit.outcome() is None and (code == DISK_REFUSED or not stop.heard):
                note_failure(unit.folder, code, tries[unit.folder])
            if code == DISK_REFUSED:  # every other run would meet the same
                refused = stop.heard = True


def _next(todo: Work, busy: Collection[Path], tries: Counter[Path]) -> Unit | None:
    """The next unit to start: new ones first, then those that failed once, then those that somebody else may have."""
    left = [unit for unit in todo.units() if unit.folder not in busy and unit.outcome() is None]
    for unit in left:  # another worker's attempts count
        tries[unit.folder] = max(tries[unit.folder], read_failure(unit.folder).tries)
    open_units = (unit for unit in left if tries[unit.folder] < TRIES)
    return min(open_units, key=lambda unit: (_leased(unit), tries[unit.folder]), default=None)


def _leased(unit: Unit) -> bool:
    """Whether a process has, or had, the folder; only claiming it tells which."""
    return (unit.folder / LEASE).exists()


class Failure(NamedTuple):
    """How a run did not come to its end."""

    message: str = ""  # why, in words; with the end of what it printed where it crashed
    tries: int = 0  # 0 while the worker has not looked at it


def read_failure(folder: Path) -> Failure:
    """How a run failed, as its folder says."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        said = read_json(folder / FAILED) if (folder / FAILED).exists() else {}
        return Failure(str(said["message"]), int(said.get("tries", 0)))
    return Failure()


def become_run(unit: Unit, slot: int, life_line: int, held: int) -> NoReturn:
    """What a forked process does; it never returns."""
    code = 1
    try:
        os.close(held)
        end_with(life_line)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        allow()
        with open(os.devnull) as nothing, open(unit.folder / OUTPUT, "ab") as output:
            os.dup2(nothing.fileno(), 0)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        faulthandler.enable()
        unit.perform(Progress(unit.folder), slot)
        code = 0
    except Claimed:
        code = CLAIMED
    except KeyboardInterrupt:
        code = 130
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException as error:  # whatever it is, it ends this run only
        code = DISK_REFUSED if isinstance(error, FileError) else 1
        traceback.print_exc()
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        tell_failure(unit.folder, f"{kind}{error}")
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # the worker's clean-up is the worker's


def tell_failure(folder: Path, message: str) -> None:
    """Leave word why a run failed; of its processes the first one that fails knows, the others only miss it."""
    with contextlib.suppress(Exception):
        said, tries = read_failure(folder)
        if tries or not said:  # of the attempt before
            write_json(folder / FAILED, {"message": message})


def in_children(functions: Iterable[Callable[[], Any]], jobs: int = 1) -> list[Any]:
    """What functions return in forked processes, so many at once; None for one that raises or crashes.

    For trying code of others in a process that must go on whatever it does. A child says nothing and ends with this
    process.
    """
    context = multiprocessing.get_context("fork")

    def answer(function: Callable[[], Any], said: Connection) -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        end_with(parent.sentinel)
        faulthandler.disable()
        with open(os.devnull, "r+") as nothing:
            for number in range(3):
                os.dup2(nothing.fileno(), number)
        said.send(function())

    found: dict[int, Any] = {}
    running: dict[Connection, tuple[int, Any]] = {}

    def collect() -> None:
        ready: list[Any] = wait(list(running))
        for heard in ready:
            number, child = running.pop(heard)
            try:
                found[number] = heard.recv()
            except EOFError:
                found[number] = None
            child.join()

    for number, function in enumerate(functions):
        while len(running) >= jobs:
            collect()
        heard, said = context.Pipe(duplex=False)
        child = context.Process(target=answer, args=(function, said), daemon=True)
        child.start()
        said.close()  # else its end would not be heard
        running[heard] = number, child
    while running:
        collect()
    return [found[number] for number in sorted(found)]


def end_with(life_line: int) -> None:
    """End this process when whoever holds the other end of a pipe is gone."""

    def wait() -> None:
        os.read(life_line, 1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


class Progress:
    """Callback that notes in a run's folder how far it is, now and then; the coordinator reads it."""

    def __init__(self, folder: Path) -> None:
        self.path, self.first, self.told = folder / PROGRESS, None, 0.0

    def __call__(self, part: float, note: str) -> None:
        """A part of the run's work is done."""
        now = time.monotonic()
        first = self.first = part if self.first is None else self.first
        if now - self.told >= PAUSE:
            self.told = now
            with contextlib.suppress(OSError):  # a run does not end for this
                partial = self.path.with_name(f"{PROGRESS}{PARTIAL}")
                partial.write_text(f"{first!r} {part!r} {note}", encoding="utf-8")
                partial.replace(self.path)


def note_failure(folder: Path, code: int, tries: int) -> None:
    """Write down why a run ended and how often it was tried; on a full disk the exit code alone says it."""
    said = read_failure(folder).message if code in (1, DISK_REFUSED) else ""
    message, tries = said or explain(code, folder / OUTPUT), TRIES if code == DISK_REFUSED else tries
    with contextlib.suppress(FileError):
        write_json(folder / FAILED, {"message": message, "tries": tries})
    print(message.splitlines()[0], flush=True)


def explain(code: int, output: Path) -> str:
    """Why a process ended, in words, with the end of what it printed."""
    if code == -signal.SIGKILL:
        reason = "killed by the system, which does this when memory runs out; fewer --jobs need less"
    elif code < 0:
        reason = f"crashed with {signal.Signals(-code).name}"
    else:
        reason = f"ended with code {code}"
    try:
        lines = output.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    fatal = [number for number, line in enumerate(lines) if line.startswith(FATAL)]
    shown = lines[fatal[-1] :][:TAIL] if fatal else lines[-TAIL:]  # a crash lists the most recent call first
    return "\n".join([reason, *[f"    {line}" for line in shown]])


def stdin_ended(seconds: float) -> bool:
    """Whether the coordinator is gone; waits for so long to see."""
    ready, _, _ = select.select([0], [], [], seconds)
    return bool(ready) and not os.read(0, 4096)


def main(arguments: Sequence[str]) -> int:
    """Command line of a worker."""
    parser = argparse.ArgumentParser(prog="python -m twoaxis.comparison.runner.worker")
    parser.add_argument("work", metavar="MODULE:CLASS")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--use", action="append", default=[], help="Python file with methods of your own; it is run")
    given = parser.parse_args(arguments)
    try:
        use(*given.use)
        return work(given.work, given.folder, given.jobs)
    except FileError as error:
        print(error, flush=True)
        return DISK_REFUSED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
