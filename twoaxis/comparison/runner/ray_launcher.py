"""Workers as tasks of a Ray cluster.

A task is told the folder and nothing else, and returns an exit code: results are files, and the object store holds a
few bytes. Ray starts a task again whose process or node has died; its run is claimed anew when the dead claim expires
and goes on from its checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from twoaxis.base.options import NotNegative, Options, at_least
from twoaxis.comparison.runner.launchers import judge, serve


@dataclass(frozen=True, kw_only=True)
class RayOptions(Options):
    """What a run asks of a Ray cluster."""

    address: str | None = None
    """Such as auto or ray://HOST:10001; None is RAY_ADDRESS, else a cluster of this machine alone."""
    cpus: NotNegative = 1.0
    """Cores of a run."""
    gpus: NotNegative | None = None
    """GPUs of a run; None is one where the cluster has GPUs."""
    retries: Annotated[int, at_least(-1)] = 3
    """How often a worker is started again whose process or node has died; -1 is without end."""


class RayLauncher:
    """Starts a worker per run as Ray tasks.

    Args:
        options: of the cluster.
    """

    def __init__(self, options: RayOptions) -> None:
        self.options, self.tasks, self.opened = options, [], False
        self.end: tuple[int, str] = (1, "nothing")

    def _ray(self) -> Any:
        try:
            import ray
        except ImportError as error:
            raise ValueError("launcher ray needs the package ray: pip install 'twoaxis[ray]'") from error
        if not ray.is_initialized():
            try:
                ray.init(address=self.options.address, log_to_driver=False, configure_logging=False)
            except (ConnectionError, RuntimeError) as error:
                raise ValueError(
                    f"no Ray cluster answers at {self.options.address or 'RAY_ADDRESS'}: {error}"
                ) from error
            self.opened = True
        return ray

    def _needs(self) -> dict[str, float]:
        """What a run needs, by Ray's names."""
        gpus = self.options.gpus
        if gpus is None:
            gpus = 1.0 if self._ray().cluster_resources().get("GPU", 0) else 0.0
        return {"CPU": self.options.cpus, "GPU": gpus}

    def places(self, device: str | None) -> int:
        """As many as the cluster has room for now; it may grow later."""
        there, needs = self._ray().cluster_resources(), self._needs()
        room = [int(there.get(name, 0) // amount) for name, amount in needs.items() if amount]
        if not room or min(room) < 1:
            asked = ", ".join(f"{name} {amount:g} of {there.get(name, 0):g}" for name, amount in needs.items())
            raise ValueError(f"the Ray cluster has no room for a run: {asked}. Give fewer cpus or gpus")
        return min(room)

    def start(self, work: str, folder: Path, jobs: int, use: Sequence[str] = ()) -> None:
        """Submit `jobs` workers; those the cluster has no room for wait."""
        ray, needs = self._ray(), self._needs()
        task = ray.remote(serve).options(
            num_cpus=needs["CPU"], num_gpus=needs["GPU"], max_retries=self.options.retries, name="twoaxis worker"
        )
        files = tuple(str(Path(file).resolve()) for file in use)
        self.tasks = [task.remote(work, folder, files) for _ in range(jobs)]

    def ended(self) -> int | None:
        """The exit code as soon as all workers have ended; None before."""
        ray = self._ray()
        done, waiting = ray.wait(self.tasks, num_returns=len(self.tasks), timeout=0)
        if waiting:
            return None
        ends: list[Any] = []
        for task in done:
            try:
                ends.append(ray.get(task))
            except Exception as error:  # a worker's own, or Ray's about a process or node that died too often
                ends.append(error)
        self.end = judge(ends)
        return self.end[0]

    def stop(self, seconds: float = 60.0) -> None:
        """Interrupt the tasks, which have their runs save."""
        self._cancel(force=False)
        with contextlib.suppress(Exception):
            self._ray().wait(self.tasks, num_returns=len(self.tasks), timeout=seconds)

    def _cancel(self, force: bool) -> None:
        for task in self.tasks:
            with contextlib.suppress(Exception):  # one that has ended cannot be cancelled
                self._ray().cancel(task, force=force)

    def close(self) -> None:
        """End what is left, and the connection if it was opened here."""
        if self.tasks:
            self._cancel(force=True)
        if self.opened:
            self._ray().shutdown()

    def said(self) -> str:
        """The last line of the worker that decided the exit code."""
        return self.end[1]
