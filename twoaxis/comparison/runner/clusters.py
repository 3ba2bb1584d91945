"""Workers as tasks of a Ray cluster, or as an array of Slurm jobs through submitit.

A task or job gets the folder and nothing else, and returns an exit code: results are files, and Ray's object store
holds a few bytes. Ray starts a task again whose process or node has died; its run is claimed anew when the dead claim
expires and goes on from its checkpoint. Before the time of a Slurm job is over, or when it is preempted, Slurm sends a
signal: the runs save, the job goes back into the queue, and whatever is free then claims the run and goes on.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from twoaxis.base.machine import needs
from twoaxis.base.options import Count, NotNegative, Options, Positive, at_least
from twoaxis.comparison.runner.launchers import End, Launcher, LocalLauncher, serve


@dataclass(frozen=True, kw_only=True)
class RayOptions(Options):
    """What a run asks of a Ray cluster."""

    address: str | None = None
    """Such as auto or ray://HOST:10001; None is RAY_ADDRESS, else a cluster of this machine alone."""
    cpus: NotNegative | None = None
    """Cores of a run; None is one per process."""
    gpus: NotNegative | None = None
    """GPUs of a run; None is one per process where the cluster has GPUs."""
    retries: Annotated[int, at_least(-1)] = 3
    """How often a worker is started again whose process or node has died; -1 is without end."""


class RayLauncher(Launcher):
    """Starts a worker per run as Ray tasks."""

    Config, opened = RayOptions, False
    tasks: Sequence[Any] = ()

    @property
    def ray(self) -> Any:
        """Ray, connected to the cluster."""
        try:
            import ray
        except ImportError as error:
            raise ValueError(needs("launcher ray", "ray", "ray")) from error
        address = self.options.address
        if not ray.is_initialized():
            try:
                ray.init(address=address, log_to_driver=False, configure_logging=False)
            except (ConnectionError, RuntimeError) as error:
                raise ValueError(f"no Ray cluster answers at {address or 'RAY_ADDRESS'}: {error}") from error
            self.opened = True
        return ray

    def _needs(self, processes: int) -> dict[str, float]:
        """What a run needs, by Ray's names."""
        cpus, gpus = self.options.cpus, self.options.gpus
        if gpus is None:
            gpus = float(processes) if self.ray.cluster_resources().get("GPU", 0) else 0.0
        return {"CPU": float(processes) if cpus is None else cpus, "GPU": gpus}

    def places(self, device: str | None, processes: int = 1) -> int:
        """As many as the cluster has places for now; it may grow later."""
        there, needs = self.ray.cluster_resources(), self._needs(processes)
        room = [int(there.get(name, 0) // amount) for name, amount in needs.items() if amount]
        if not room or min(room) < 1:
            asked = ", ".join(f"{name} {amount:g} of {there.get(name, 0):g}" for name, amount in needs.items())
            raise ValueError(f"the Ray cluster has no place for a run: {asked}. Give fewer cpus or gpus")
        return min(room)

    def submit(self, work: str, folder: Path, jobs: int, use: tuple[str, ...], processes: int) -> Sequence[Any]:
        """A task per run; those the cluster has no place for wait."""
        needs, retries = self._needs(processes), self.options.retries
        task = self.ray.remote(serve).options(
            num_cpus=needs["CPU"], num_gpus=needs["GPU"], max_retries=retries, name="twoaxis worker"
        )
        self.tasks = [task.remote(work, folder, use) for _ in range(jobs)]
        return [made.future() for made in self.tasks]

    def cancel(self, force: bool) -> None:
        """Interrupt the tasks, so that their runs save, or end them at once."""
        for task in self.tasks:
            with contextlib.suppress(Exception):  # one that has ended cannot be cancelled
                self.ray.cancel(task, force=force)

    def close(self) -> None:
        """End what is left, and the connection if it was opened here."""
        super().close()
        if self.opened:
            self.ray.shutdown()


JOBS = ".slurm"
"""Folder of what submitit writes, inside the comparison's."""
NOTICE = 120
"""Seconds before the end of a job's time in which runs save."""


@dataclass(frozen=True, kw_only=True)
class SlurmOptions(Options):
    """What a run asks of Slurm."""

    partition: str | None = None
    """Partition; None is the cluster's default."""
    account: str | None = None
    """Account to charge."""
    gpus: Annotated[int, at_least(0)] = 0
    """GPUs of a run."""
    cpus: Count | None = None
    """Cores of a run; None is one per process."""
    memory: Positive | None = None
    """Gigabytes of a run; None is the cluster's default."""
    minutes: Count = 240
    """Time of a job, after which it goes back into the queue."""
    requeues: Count = 100
    """How often a job may run out of time."""
    more: dict[str, Any] = field(default_factory=dict)
    """Further parameters of submitit, such as {"slurm_qos": "low"}."""
    cluster: Literal["slurm", "local"] = "slurm"
    """`local` runs the jobs on this machine, to try it out."""


class Job:
    """What a job of the array calls, with the arguments of `serve`; submitit sends it there."""

    def __init__(self, work: str, folder: Path, use: tuple[str, ...]) -> None:
        self.arguments, self.launcher = (work, folder, use), LocalLauncher()

    def __call__(self) -> End:
        """Run a worker to its end."""
        return serve(*self.arguments, self.launcher)

    def checkpoint(self) -> Any:
        """Have the runs save; submitit puts what this returns back into the queue."""
        from submitit.helpers import DelayedSubmission

        self.launcher.stop()
        self.launcher.close()
        return DelayedSubmission(Job(*self.arguments))


class SlurmLauncher(Launcher):
    """Starts a worker per run as Slurm jobs."""

    Config = SlurmOptions

    def places(self, device: str | None, processes: int = 1) -> int:
        """Slurm does not say how many jobs a user may have."""
        raise ValueError("launcher slurm cannot tell how many runs at once the cluster has places for; give --jobs")

    def submit(self, work: str, folder: Path, jobs: int, use: tuple[str, ...], processes: int) -> Sequence[Any]:
        """An array of jobs, one per run."""
        asked = self.options
        if 0 < asked.gpus < processes:
            raise ValueError(f"a run has {processes} processes, and launcher slurm asks for {asked.gpus} GPUs for it")
        try:
            import submitit
        except ImportError as error:
            raise ValueError(needs("launcher slurm", "submitit", "slurm")) from error
        if asked.cluster == "slurm" and shutil.which("sbatch") is None:
            raise ValueError("launcher slurm finds no sbatch here: start the comparison on a login node of the cluster")
        requeues = {f"{asked.cluster}_max_num_timeout": asked.requeues}
        executor = submitit.AutoExecutor(folder=folder / JOBS, cluster=asked.cluster, **requeues)
        executor.update_parameters(  # None is not set, and those of Slurm alone are passed over elsewhere
            name="twoaxis",
            timeout_min=asked.minutes,
            gpus_per_node=asked.gpus,
            cpus_per_task=asked.cpus or processes,
            mem_gb=asked.memory,
            slurm_partition=asked.partition,
            slurm_account=asked.account,
            slurm_array_parallelism=jobs,
            **{"slurm_signal_delay_s": NOTICE} | asked.more,
        )
        with executor.batch():
            return [executor.submit(Job(work, folder, use)) for _ in range(jobs)]

    def cancel(self, force: bool) -> None:
        """Cancel the jobs: Slurm sends SIGTERM to the worker, which has its runs save."""
        for job in self.jobs:
            if not job.done():
                job.cancel(check=False)
