"""Launchers: what starts workers on machines that see the folder.

A launcher starts `python -m twoaxis.comparison.runner.worker` and knows nothing of what the worker does; everything
else goes through the files of the folder. One for another system is a class with the five methods of `Launcher`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Protocol

from twoaxis.base.machine import physical_cores


class Launcher(Protocol):
    """Starts workers."""

    def start(self, work: str, folder: Path, jobs: int, use: Sequence[str] = ()) -> None:
        """Have the work MODULE:CLASS done on a folder, `jobs` runs at once, with methods from the files `use`."""
        ...

    def ended(self) -> int | None:
        """Exit code of the worker; None while it runs."""
        ...

    def stop(self, seconds: float = 60.0) -> None:
        """Have the runs save and end; what takes longer is killed."""
        ...

    def close(self) -> None:
        """End everything at once and give back what the launcher holds."""
        ...

    def said(self) -> str:
        """The last line that the worker printed."""
        ...


class LocalLauncher:
    """Starts one worker on this machine."""

    def __init__(self) -> None:
        self.worker: subprocess.Popen[bytes] | None = None
        self.output: IO[bytes] | None = None

    def start(self, work: str, folder: Path, jobs: int, use: Sequence[str] = ()) -> None:
        """Start the worker; it ends with this process, as its stdin does."""
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # looking for GPUs must not open one before the fork
        environment.setdefault("OMP_NUM_THREADS", "1")  # the pool is made before a run can say how many it wants
        self.output = tempfile.TemporaryFile()  # noqa: SIM115  it stays open while the worker runs
        files = [word for file in use for word in ("--use", file)]
        module = "twoaxis.comparison.runner.worker"
        self.worker = subprocess.Popen(
            [sys.executable, "-m", module, work, str(folder), "--jobs", str(jobs), *files],
            stdin=subprocess.PIPE,
            stdout=self.output,
            stderr=self.output,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then has the runs save
            env=environment,
        )

    def ended(self) -> int | None:
        """Exit code of the worker; None while it runs."""
        return None if self.worker is None else self.worker.poll()

    def stop(self, seconds: float = 60.0) -> None:
        """SIGTERM, which the worker passes on."""
        if self.worker is not None:
            self.worker.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.worker.wait(seconds)

    def close(self) -> None:
        """Kill the worker's process group: whatever it started is in it."""
        if self.worker is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.worker.pid, signal.SIGKILL)
            self.worker.wait()
            assert self.worker.stdin is not None
            self.worker.stdin.close()
        if self.output is not None:
            self.output.close()

    def said(self) -> str:
        """The last line that the worker printed."""
        if self.output is None or self.output.closed:
            return "nothing"
        size = self.output.seek(0, os.SEEK_END)
        self.output.seek(max(0, size - 4096))
        lines = self.output.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "nothing"


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
