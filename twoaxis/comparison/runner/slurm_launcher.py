"""Workers as an array of Slurm jobs, through submitit.

A job is told the folder and nothing else. Before its time is over, or when it is preempted, Slurm sends a signal: the
runs save, the job goes back into the queue, and whatever is free then claims the run and goes on from its checkpoint.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from twoaxis.base.options import Count, Options, Positive, at_least
from twoaxis.comparison.runner.launchers import LocalLauncher, judge, serve

JOBS = ".slurm"
"""Folder of what submitit writes, inside the comparison's."""


@dataclass(frozen=True, kw_only=True)
class SlurmOptions(Options):
    """What a run asks of Slurm."""

    partition: str | None = None
    """Partition; None is the cluster's default."""
    account: str | None = None
    """Account to charge."""
    gpus: Annotated[int, at_least(0)] = 0
    """GPUs of a run."""
    cpus: Count = 1
    """Cores of a run."""
    memory: Positive | None = None
    """Gigabytes of a run; None is the cluster's default."""
    minutes: Count = 240
    """Time of a job, after which it goes back into the queue."""
    notice: Count = 120
    """Seconds before that in which runs save."""
    requeues: Count = 100
    """How often a job may run out of time."""
    more: dict[str, Any] = field(default_factory=dict)
    """Further parameters of submitit, such as {"slurm_qos": "low"}."""
    cluster: Literal["slurm", "local"] = "slurm"
    """`local` runs the jobs on this machine, to try it out."""


class Job:
    """What a job of the array calls; submitit sends it there.

    Args:
        work: MODULE:CLASS.
        folder: shared by all machines.
        use: files with methods.
    """

    def __init__(self, work: str, folder: Path, use: tuple[str, ...]) -> None:
        self.arguments = work, folder, use
        self.launcher: LocalLauncher | None = None

    def __call__(self) -> tuple[int, str]:
        """Run a worker to its end."""
        self.launcher = LocalLauncher()
        return serve(*self.arguments, self.launcher)

    def checkpoint(self) -> Any:
        """Have the runs save; submitit puts what this returns back into the queue."""
        from submitit.helpers import DelayedSubmission

        if self.launcher is not None:
            self.launcher.stop()
            self.launcher.close()
        return DelayedSubmission(Job(*self.arguments))


class SlurmLauncher:
    """Starts a worker per run as Slurm jobs.

    Args:
        options: of the jobs.
    """

    def __init__(self, options: SlurmOptions) -> None:
        self.options, self.jobs = options, []
        self.end: tuple[int, str] = (1, "nothing")

    def places(self, device: str | None) -> int:
        """Slurm does not say how many jobs a user may have."""
        raise ValueError("launcher slurm cannot tell how many runs at once the cluster has room for; give --jobs")

    def start(self, work: str, folder: Path, jobs: int, use: Sequence[str] = ()) -> None:
        """Submit an array of `jobs` workers."""
        asked = self.options
        try:
            import submitit
        except ImportError as error:
            raise ValueError("launcher slurm needs the package submitit: pip install 'twoaxis[slurm]'") from error
        if asked.cluster == "slurm" and shutil.which("sbatch") is None:
            raise ValueError("launcher slurm finds no sbatch here: start the comparison on a login node of the cluster")
        executor = submitit.AutoExecutor(
            folder=folder / JOBS, cluster=asked.cluster, **{f"{asked.cluster}_max_num_timeout": asked.requeues}
        )
        slurm = {
            "slurm_partition": asked.partition,
            "slurm_account": asked.account,
            "slurm_array_parallelism": jobs,
            "slurm_signal_delay_s": asked.notice,
        }
        executor.update_parameters(
            name="twoaxis",
            timeout_min=asked.minutes,
            gpus_per_node=asked.gpus,
            cpus_per_task=asked.cpus,
            **({} if asked.memory is None else {"mem_gb": asked.memory}),
            **({k: v for k, v in slurm.items() if v is not None} if asked.cluster == "slurm" else {}),
            **asked.more,
        )
        files = tuple(str(Path(file).resolve()) for file in use)
        with executor.batch():
            self.jobs = [executor.submit(Job(work, folder, files)) for _ in range(jobs)]

    def ended(self) -> int | None:
        """The exit code as soon as all jobs have ended; None before."""
        if not all(job.done() for job in self.jobs):
            return None
        ends: list[Any] = []
        for job in self.jobs:
            try:
                ends.append(job.result())
            except Exception as error:  # a job that failed, was cancelled or lost
                ends.append(error)
        self.end = judge(ends)
        return self.end[0]

    def stop(self, seconds: float = 60.0) -> None:
        """Cancel the jobs: Slurm sends SIGTERM to the worker, which has its runs save."""
        for job in self.jobs:
            job.cancel(check=False)
        until = time.monotonic() + seconds
        while time.monotonic() < until and not all(job.done() for job in self.jobs):
            time.sleep(1.0)

    def close(self) -> None:
        """Cancel what is left, and remove what submitit wrote once all jobs have ended."""
        for job in self.jobs:
            if not job.done():
                job.cancel(check=False)

    def said(self) -> str:
        """The last line of the job that decided the exit code."""
        return self.end[1]
