"""Launchers: what starts workers on machines that see the folder.

A launcher starts `python -m twoaxis.comparison.runner.worker` and knows nothing of what the worker does; everything
else goes through the files of the folder. Jobs of a cluster call `serve`.

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
from typing import Any

from twoaxis.base.machine import physical_cores
from twoaxis.base.options import Options
from twoaxis.base.registry import Registry, parse

End = tuple[int, str]
"""Exit code of a worker, and the last line that it printed."""


class Launcher:
    """Starts workers as jobs, and follows them until all have ended.

    A job has the methods of `Worker`. One for another cluster has `places` and `submit`; `LAUNCHERS.add` names it.
    """

    Config: type[Options] = Options

    def __init__(self, options: Any = None) -> None:
        self.options: Any = self.Config() if options is None else options
        self.jobs: Sequence[Any] = ()
        self.said = "nothing"  # by the worker that decided the exit code

    def places(self, device: str | None, processes: int = 1) -> int:
        """How many runs of so many processes at once, unless the user says."""
        raise NotImplementedError

    def submit(self, work: str, folder: Path, jobs: int, use: tuple[str, ...], processes: int) -> Sequence[Any]:
        """Jobs that do the work MODULE:CLASS on a folder; see `start`."""
        raise NotImplementedError

    def start(self, work: str, folder: Path, jobs: int, use: Sequence[str] = (), processes: int = 1) -> None:
        """Have the work MODULE:CLASS done on a folder, so many runs at once, with methods of the files `use`.

        The processes of a run are started by its worker, on the worker's machine.
        """
        self.jobs = self.submit(work, folder, jobs, tuple(str(Path(file).resolve()) for file in use), processes)

    def ended(self) -> int | None:
        """The exit code as soon as all jobs have ended; None before."""
        if not self.jobs or not all(job.done() for job in self.jobs):
            return None
        ends: list[End] = []
        for job in self.jobs:
            try:
                ends.append(job.result())
            except Exception as error:  # a worker's own, or the cluster's about a process or node that died too often
                ends.append((1, f"{type(error).__name__}: {error}"))
        # the work is at its end as soon as one of them says so
        code, self.said = next((end for end in ends if end[0] == 0), ends[0])
        return code

    def stop(self, seconds: float = 60.0) -> None:
        """Have the runs save and end; what takes longer is left to `close`."""
        until = time.monotonic() + seconds
        self.cancel(force=False)
        while time.monotonic() < until and not all(job.done() for job in self.jobs):
            time.sleep(0.1)

    def close(self) -> None:
        """End everything at once and give back what the launcher holds."""
        self.cancel(force=True)

    def cancel(self, force: bool) -> None:
        """Have the jobs end: after their runs have saved, or at once."""
        for job in self.jobs:
            job.cancel(force)


class Worker:
    """The worker of this machine, which ends with this process, as its stdin does; arguments as `Launcher.start`'s."""

    def __init__(self, work: str, folder: Path, jobs: int, use: Sequence[str]) -> None:
        # threads are made before a run can say how many it wants, and looking for GPUs must open none before a fork
        fixed = {"TOKENIZERS_PARALLELISM": "false", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        self.output = tempfile.TemporaryFile()  # noqa: SIM115  it stays open while the worker runs
        files = [word for file in use for word in ("--use", file)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "twoaxis.comparison.runner.worker", work, str(folder), "--jobs", str(jobs), *files],
            stdin=subprocess.PIPE,
            stdout=self.output,
            stderr=self.output,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then has the runs save
            env={"OMP_NUM_THREADS": "1"} | os.environ | fixed,
        )

    def done(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None

    def result(self) -> End:
        """Its exit code and last line, when it has ended."""
        self.output.seek(max(0, self.output.seek(0, os.SEEK_END) - 4096))
        lines = self.output.read().decode(errors="replace").strip().splitlines()
        return self.process.returncode, lines[-1] if lines else "nothing"

    def cancel(self, force: bool) -> None:
        """SIGTERM, which it passes on; by force its process group is killed: whatever it started is in it."""
        if not force:
            self.process.send_signal(signal.SIGTERM)
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.output.close()


class LocalLauncher(Launcher):
    """Starts one worker on this machine."""

    def places(self, device: str | None, processes: int = 1) -> int:
        """One per GPU, else one per physical core, or per group of them."""
        return default_jobs(device, processes)[0]

    def submit(self, work: str, folder: Path, jobs: int, use: tuple[str, ...], processes: int) -> Sequence[Worker]:
        """One worker for all runs."""
        return [Worker(work, folder, jobs, use)]


def serve(work: str, folder: Path, use: Sequence[str] = (), launcher: LocalLauncher | None = None) -> End:
    """Run a worker of one run at once to its end, as a job of a cluster does; its exit code and its last line.

    Whoever wants to stop it gives the launcher to start it with.
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
        return code, local.said


CLUSTERS = "twoaxis.comparison.runner.clusters"
LAUNCHERS: Registry[Launcher] = Registry(
    "launcher", {"local": LocalLauncher, "ray": f"{CLUSTERS}:RayLauncher", "slurm": f"{CLUSTERS}:SlurmLauncher"}
)


def find_launcher(spelling: str | None) -> Launcher:
    """The launcher called NAME[:option=value,...]; None is local."""
    name, options = parse(spelling or "local")
    return LAUNCHERS.find(name)(LAUNCHERS.config(name, options))


def default_jobs(device: str | None, processes: int = 1) -> tuple[int, list[str | None]]:
    """How many runs at once, and the devices they take turns on: a GPU per process, else a physical core.

    None is a GPU if there is one. The device of a run of several processes is cuda:0,1,..., one for each.
    """
    import torch

    if (device is None or (processes > 1 and device == "cuda")) and torch.cuda.is_available():
        if (here := torch.cuda.device_count()) < processes:
            raise ValueError(f"a run of {processes} processes needs a GPU for each; {here} here")
        groups = [range(first, first + processes) for first in range(0, here - processes + 1, processes)]
        return len(groups), ["cuda:" + ",".join(map(str, group)) for group in groups]
    if device is not None and torch.device(device).type != "cpu":
        return 1, [device]
    return max(1, physical_cores() // processes), [device]
