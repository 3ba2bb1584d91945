"""Running many runs at once, each in a process of its own with its own thread.

Two single-thread processes train more than one with two threads, and a crash (a segmentation fault, a process killed
for its memory, an exception) ends one run only. See `fork_server` for how the processes start and how they end when
this one is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from twoaxis.base.files import file_errors
from twoaxis.base.machine import physical_cores
from twoaxis.training.config import TrainConfig

TAIL = 15
"""Lines of a failed run's output that are shown."""
FATAL = "Fatal Python error"
GONE = "the process that starts the runs has ended; start again, finished runs are kept. It said: "


class ServerGone(ValueError):
    """The process that starts the runs has ended."""


class Report(NamedTuple):
    """News of a run.

    Attributes:
        job: number that `Workers.start` gave it.
        step: optimiser steps it has made, if it tells.
        loss: at that step.
        ended: whether it has ended.
        error: what went wrong; None if it ended well or has not ended.
        trouble: whether the system refused a file, as it then does for every run.
    """

    job: int
    step: int | None = None
    loss: float | None = None
    ended: bool = False
    error: str | None = None
    trouble: bool = False


class Workers:
    """Processes that train.

        with Workers(folder / "output") as workers:
            job = workers.start(config, run_folder)
            for report in workers.wait(1.0):
                ...

    Leaving the block kills what still runs.

    Args:
        output: folder for what runs print; a run that ends well leaves nothing there.
        use: Python files that register streams and mixers of one's own.
    """

    def __init__(self, output: str | Path, *, use: Sequence[str] = ()) -> None:
        self.output = Path(output)
        self.use = list(use)
        self.running: dict[int, Path] = {}  # job to the file of its output
        self.errors: dict[int, tuple[str, bool]] = {}
        self.count = 0
        self.rest = b""
        self.is_ready = False
        self.server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Workers:
        return self

    def launch(self) -> None:
        """Begin with the imports, which take seconds, while there are other things to do; `start` does it otherwise."""
        if self.server is not None:
            return
        read, write = os.pipe()
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # looking for GPUs must not open one before the fork
        environment.setdefault("OMP_NUM_THREADS", "1")  # the pool is made before a run can say how many it wants
        self.noise = tempfile.TemporaryFile()  # noqa: SIM115  it stays open while the server runs
        self.server = subprocess.Popen(
            [sys.executable, "-m", "twoaxis.comparison.fork_server", str(write), *self.use],
            stdin=subprocess.PIPE,
            stdout=self.noise,
            stderr=self.noise,
            pass_fds=(write,),
            start_new_session=True,  # Ctrl-C reaches this process alone, which then tells the runs to save
            env=environment,
        )
        os.close(write)
        self.events = read

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.server is not None:
            assert self.server.stdin is not None
            with contextlib.suppress(OSError):
                self.server.stdin.close()  # the server kills its runs and ends
            if not self.running:
                self.server.kill()  # it may still be importing, which nobody needs to wait for
            try:
                self.server.wait(10)
            except subprocess.TimeoutExpired:
                self.server.kill()
                self.server.wait()
            os.close(self.events)
            self.noise.close()
        with contextlib.suppress(OSError):
            self.output.rmdir()  # only if it is empty

    def start(self, config: TrainConfig, folder: str | Path) -> int:
        """Start a run; its number.

        Args:
            config: the run.
            folder: its folder.
        """
        self.launch()
        self.count += 1
        output = self.output / f"{config.key}-{self.count}.txt"
        with file_errors(output):
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_bytes(b"")
        self.running[self.count] = output
        self._order(
            {"start": self.count, "config": config.to_dict(), "folder": str(folder), "output": str(output.resolve())}
        )
        return self.count

    def ready(self) -> None:
        """Wait until runs can start at once."""
        self.launch()
        while not self.is_ready:
            self.wait(1.0)

    def wait(self, seconds: float) -> list[Report]:
        """News of the runs, at the latest after `seconds`."""
        ready, _, _ = select.select([self.events], [], [], seconds)
        if not ready:
            return []
        data = os.read(self.events, 65536)
        if not data:
            raise ServerGone(GONE + self._noise())
        *lines, self.rest = (self.rest + data).split(b"\n")
        reports = (self._report(json.loads(line)) for line in lines)
        return [report for report in reports if report is not None]

    def stop(self, seconds: float = 60.0) -> list[Report]:
        """Have all runs save a checkpoint and end; what takes longer than `seconds` is killed.

        Returns:
            what ended well while it was waited for.
        """
        ended = []
        with contextlib.suppress(OSError):
            self._order({"stop": "SIGTERM"})
        until = time.monotonic() + seconds
        while self.running and time.monotonic() < until:
            try:
                ended += [r for r in self.wait(0.2) if r.ended and r.error is None]
            except ServerGone:
                break
        return ended

    def _order(self, order: dict[str, Any]) -> None:
        assert self.server is not None
        assert self.server.stdin is not None
        try:
            self.server.stdin.write(json.dumps(order).encode() + b"\n")
            self.server.stdin.flush()
        except BrokenPipeError:
            raise ServerGone(GONE + self._noise()) from None

    def _report(self, event: dict[str, Any]) -> Report | None:
        self.is_ready = self.is_ready or "ready" in event
        job = event.get("job")
        if job is None or job not in self.running:
            return None
        if "error" in event:
            self.errors[job] = (event["error"], event["trouble"])
            return None
        if "exit" not in event:
            return Report(job, step=event["step"], loss=event["loss"])
        output = self.running.pop(job)
        message, trouble = self.errors.pop(job, ("", False))
        if event["exit"] == 0:
            with contextlib.suppress(OSError):
                output.unlink()
            return Report(job, ended=True)
        return Report(job, ended=True, error=message or explain(event["exit"], output), trouble=trouble)

    def _noise(self) -> str:
        """The last line the server printed."""
        with contextlib.suppress(OSError, ValueError):
            self.noise.seek(0)
            lines = self.noise.read().decode(errors="replace").strip().splitlines()
            return lines[-1] if lines else "nothing"
        return "nothing"


def explain(code: int, output: Path) -> str:
    """Why a process ended, in words, with the end of what it printed."""
    import signal

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


def default_jobs(device: str | None) -> tuple[int, list[str | None]]:
    """How many runs at once, and the devices they take turns on: one per GPU, else one per physical core.

    Args:
        device: what the user asked for; None is a GPU if there is one.
    """
    import torch

    if device is None and torch.cuda.is_available():
        gpus: list[str | None] = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        return len(gpus), gpus
    if device is not None and torch.device(device).type != "cpu":
        return 1, [device]
    return physical_cores(), [device]
