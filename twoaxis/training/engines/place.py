"""Which of a run's processes this is, and the device it trains on, from what torchrun puts into the environment."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

TIMEOUT = datetime.timedelta(minutes=30)
"""How long a process waits for the others before the run fails."""


class Place(NamedTuple):
    """A process of a run.

    Attributes:
        rank: its number; process 0 writes all files.
        world: how many processes there are.
        device: the device it trains on.
    """

    rank: int
    world: int
    device: torch.device


def rank() -> int:
    """The number of this process."""
    return int(os.environ.get("RANK", "0")) if world() > 1 else 0


def world() -> int:
    """The number of processes that train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def warn(message: str) -> None:
    """Print a line on stderr, in the first process only."""
    if rank() == 0:
        print(f"twoaxis: {message}", file=sys.stderr, flush=True)


def find_place(name: str | None) -> Place:
    """This process, with the device called `name`; None is a GPU where there is one."""
    import torch

    from twoaxis.base.machine import pick_device

    device = pick_device(name)
    if world() > 1 and device.type == "cuda":
        if name is not None and ":" in name:
            raise ValueError(f"device is {name}, but {world()} processes train on a GPU each; give device cuda")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return Place(rank(), world(), device)


def join_processes(place: Place) -> None:
    """Open the process group, unless there is one process or the group is open.

    The group is closed when the process ends. Closing it after a run and opening it for the next one would be a race
    between processes that finish at different times.
    """
    import torch
    import torch.distributed as dist

    if place.world == 1 or dist.is_initialized():
        return
    cuda = place.device.type == "cuda"
    if cuda:
        torch.cuda.set_device(place.device)  # before anything opens a context on the first GPU
    dist.init_process_group("nccl" if cuda else "gloo", timeout=TIMEOUT)
    atexit.register(dist.destroy_process_group)


LOST = ("closed by peer", "reset by peer", "Broken pipe", "Timed out", "timed out", "NCCL", "connectFullMesh")
"""What the errors of gloo and NCCL say when a process they talk to is gone."""


@contextlib.contextmanager
def lost_processes() -> Iterator[None]:
    """Context manager that turns an error about a process that is gone into a line that says what to do."""
    try:
        yield
    except RuntimeError as error:
        if world() == 1 or not any(words in str(error) for words in LOST):
            raise
        reason = str(error).strip().splitlines()[0][:200]
        raise ValueError(
            f"another process of this run has ended ({reason}); start it again: it goes on from its last checkpoint"
        ) from error
