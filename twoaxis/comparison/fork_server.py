"""The process that starts runs: it imports what training needs once and forks a process for each run.

    compare ----- orders, JSON lines on stdin -----> fork server --- fork ---> run
       ^                                                  |                     |
       +---------------- events, JSON lines on a pipe ----+---------------------+

Importing takes seconds, forking milliseconds. A run that crashes takes nothing with it. When the comparison dies,
however it dies, stdin ends: the server kills its runs and ends. When the server dies, the system kills the runs.

    orders   {"start": 3, "config": {...}, "folder": "...", "output": "..."}    {"stop": "SIGTERM"}
    events   {"ready": true}   {"job": 3, "step": 40, "loss": 2.5}   {"job": 3, "error": "...", "trouble": false}
             {"job": 3, "exit": 0}
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import select
import signal
import sys
import time
import traceback
from importlib import import_module
from typing import Any, NoReturn

LONGEST = 600
"""Characters of an error that are passed on: even escaped, an event stays below what a pipe writes in one piece."""
PAUSE = 0.25
"""Seconds between two reports of a run's progress."""
PR_SET_PDEATHSIG = 1


def serve(events: int, use: list[str]) -> None:
    """Start runs as ordered until stdin ends.

    Args:
        events: descriptor of the pipe for events.
        use: Python files that register streams and mixers of one's own.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started the server decides what stops
    preload(use)
    gc.collect()
    gc.freeze()  # a collection in a run does not write to the pages it shares
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, int] = {}
    send(events, {"ready": True})
    rest = b""
    try:
        while True:
            ready, _, _ = select.select([0, woken], [], [])
            if woken in ready:
                os.read(woken, 4096)
            for job, code in reap(running):
                send(events, {"job": job, "exit": code})
            if 0 not in ready:
                continue
            data = os.read(0, 65536)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                if "start" in order:
                    running[start(order, events)] = order["start"]
                else:
                    for pid in running:
                        os.kill(pid, getattr(signal, order["stop"]))
    finally:
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def preload(use: list[str]) -> None:
    """Import what a run imports, and the files with methods of one's own."""
    for name in ("data.load", "training.measure", "training.train", "training.loop"):
        import_module(f"twoaxis.{name}")
    from twoaxis.base.plugins import use_files
    from twoaxis.model.load import quiet

    quiet()
    use_files(use)


def reap(running: dict[int, int]) -> list[tuple[int, int]]:
    """Jobs that have ended, with their exit code or the negative number of the signal that killed them."""
    ended = []
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            break
        if pid in running:
            ended.append((running.pop(pid), os.waitstatus_to_exitcode(status)))
    return ended


def start(order: dict[str, Any], events: int) -> int:
    """Fork a run; the number of its process."""
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        become_run(order, events, server)
    return pid


def become_run(order: dict[str, Any], events: int, server: int) -> NoReturn:
    """What a forked process does; it never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        die_with(server)
        with open(os.devnull) as nothing, open(order["output"], "ab") as output:
            os.dup2(nothing.fileno(), 0)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        code = run(order, events)
    except KeyboardInterrupt:
        code = 130
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException as error:  # whatever it is, it ends this run only
        traceback.print_exc()
        from twoaxis.base.files import FileError

        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        message = f"{kind}{error}"[:LONGEST]
        with contextlib.suppress(OSError):
            send(events, {"job": order["start"], "error": message, "trouble": isinstance(error, FileError)})
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # the server's clean-up is the server's


def run(order: dict[str, Any], events: int) -> int:
    """Train, reporting now and then."""
    import faulthandler

    from twoaxis.training.config import TrainConfig
    from twoaxis.training.train import train

    faulthandler.enable()
    config = TrainConfig.from_dict(order["config"])
    if config.device is not None and config.device.startswith("cuda:"):
        config = dataclasses.replace(config, device=only_gpu(config.device))
    told = 0.0

    def on_step(step: int, loss: float | None) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= PAUSE:
            told = now
            send(events, {"job": order["start"], "step": step, "loss": loss})

    train(config, order["folder"], on_step=on_step)
    return 0


def only_gpu(device: str) -> str:
    """Hide all GPUs but one from this process, which has opened none yet; what that one is called then."""
    number = int(device.removeprefix("cuda:"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[number] if visible else str(number)
    return "cuda:0"


def die_with(server: int) -> None:
    """Have the system kill this process when the server is gone, where the system can (Linux)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:  # it was gone before
        os._exit(1)


def send(events: int, event: dict[str, Any]) -> None:
    """Write an event; short enough to arrive in one piece between those of other processes."""
    os.write(events, json.dumps(event).encode() + b"\n")


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2:])
