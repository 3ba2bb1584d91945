"""Launchers: what starts workers on machines that see the folder.

A launcher starts `python -m twoaxis.comparison.runner.worker` and knows nothing of what the worker does; everything
else goes through the files of the folder. One for another system is a class with the six methods of `Launcher`; its
jobs call `serve`.

    local                                    one worker on this machine, several runs at once
    ray:address=ray://head:10001,gpus=1      a worker per run, as tasks of a Ray cluster
    slurm:partition=gpu,gpus=1,minutes=240   a worker per run, as an array of Slurm jobs
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Protocol

from twoaxis.base.machine import physical_cores
from twoaxis.base.registry import did_you_mean
from twoaxis.base.spec import parse


class Launcher(Protocol):
    """Starts workers."""

    def places(self, device: str | None) -> int:
        """How many runs at once, unless the user says."""
        ...

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

    def places(self, device: str | None) -> int:
        """One per GPU, else one per physical core."""
        return default_jobs(device)[0]

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


def serve(work: str, folder: Path, use: Sequence[str] = (), launcher: LocalLauncher | None = None) -> tuple[int, str]:
    """Run a worker of one run at once to its end, as a job of a cluster does; its exit code and its last line.

    Args:
        work: MODULE:CLASS.
        folder: which this machine shares with the others.
        use: files with methods.
        launcher: to start it with, for whoever wants to stop it.
    """
    if not folder.is_dir():
        raise ValueError(f"{socket.gethostname()} does not see {folder}: share the folder between the machines")
    with contextlib.closing(launcher or LocalLauncher()) as local:
        local.start(work, folder, 1, use)
        try:
            while (code := local.ended()) is None:
                time.sleep(0.1)
        except KeyboardInterrupt:
            local.stop()
            raise
        return code, local.said()


def find_launcher(spelling: str | None) -> Launcher:
    """The launcher called NAME[:option=value,...]; None is local."""
    name, options = parse(spelling or "local")
    if name == "ray":
        from twoaxis.comparison.runner.ray_launcher import RayLauncher, RayOptions

        return RayLauncher(RayOptions.from_dict(options))
    if name == "slurm":
        from twoaxis.comparison.runner.slurm_launcher import SlurmLauncher, SlurmOptions

        return SlurmLauncher(SlurmOptions.from_dict(options))
    if name != "local" or options:
        hint = did_you_mean(name, ("local", "ray", "slurm"))
        raise ValueError(f"unknown launcher {spelling!r}{hint}; give local, ray[:...] or slurm[:...]")
    return LocalLauncher()


def judge(ends: Sequence[tuple[int, str] | BaseException]) -> tuple[int, str]:
    """What several workers come to: the work is at its end as soon as one of them says so."""
    for end in ends:
        if not isinstance(end, BaseException) and end[0] == 0:
            return end
    codes = [(1, f"{type(end).__name__}: {end}") if isinstance(end, BaseException) else end for end in ends]
    return codes[0] if codes else (1, "no worker was started")


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
