"""The processes of a run: which of them this is, by what torchrun puts into the environment, and how they share work.

--parallel dp=4                       replicas, each with a part of every batch
--parallel fsdp=8                     every process holds an eighth of every tensor, and has a part of every batch
--parallel fsdp=4,tp=2                pairs of processes share the matrices of each sub-layer
--parallel dp=2,pp=4,micro_batches=8  two pipelines of four stages; virtual=2 gives each two chunks of the depth
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from twoaxis.base.options import Count, Options
from twoaxis.base.registry import parse

if TYPE_CHECKING:
    import torch

    from twoaxis.training.config import TrainConfig
    from twoaxis.training.engines.engine import Engine

Said = TypeVar("Said")
TIMEOUT = datetime.timedelta(minutes=30)
"""How long a process waits for the others before the run fails."""
FIND = datetime.timedelta(minutes=1)
"""How long it looks for torchrun, which is there before the processes it starts, or is gone."""


class Place(NamedTuple):
    """A process of a run."""

    rank: int  # its number; process 0 writes all files
    world: int  # how many processes there are
    device: torch.device  # the device it trains on


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
    from torch.distributed.rendezvous import rendezvous

    if place.world == 1 or dist.is_initialized():
        return
    cuda = place.device.type == "cuda"
    if cuda:
        torch.cuda.set_device(place.device)  # before anything opens a context on the first GPU
    backend, started = "nccl" if cuda else "gloo", "TORCHELASTIC_RUN_ID" in os.environ
    if started:
        _end_with_launcher(signal.SIGKILL)  # nothing is to be saved yet, and opening a group hears no other signal
    # without torchrun's own the first process answers, when it has read its data
    there = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store, rank, world = next(rendezvous("env://", timeout=FIND if there else TIMEOUT))
    store.set_timeout(TIMEOUT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    atexit.register(dist.destroy_process_group)
    if started:
        _end_with_launcher(signal.SIGTERM)  # upon which a run saves and ends


def gather(said: Said, world: int) -> list[Said]:
    """What every one of so many processes says, in all of them."""
    import torch.distributed as dist

    listed = [said] * world
    if world > 1:
        dist.all_gather_object(listed, said)
    return listed


def _end_with_launcher(number: signal.Signals) -> None:
    """Have the system send a signal to this process when torchrun is killed, which ends nobody.

    Only Linux can do this; elsewhere they train on to the end.
    """
    if sys.platform == "linux":
        launcher = os.getppid()
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
        if os.getppid() != launcher:  # it died in between
            os.kill(os.getpid(), number)


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


@dataclass(frozen=True, kw_only=True)
class Degrees(Options):
    """How processes share a run."""

    dp: Count = 1
    """Replicas of the model, or of each of its shards and stages."""
    fsdp: Count = 1
    """Processes that share every tensor and each have a part of the batch."""
    tp: Count = 1
    """Processes that share the matrices of each sub-layer."""
    pp: Count = 1
    """Stages of a pipeline."""
    virtual: Count = 1
    """Chunks of the depth on each stage."""
    micro_batches: Count | None = None
    """That a pipeline cuts its part of a pass into; None is as many as it has chunks."""
    schedule: Literal["gpipe", "1f1b", "interleaved"] | None = None
    """Of a pipeline; None is 1f1b, or interleaved for several chunks."""

    @property
    def world(self) -> int:
        """Processes."""
        return self.dp * self.fsdp * self.tp * self.pp

    @property
    def shares(self) -> int:
        """Parts that a batch is dealt out in."""
        return self.dp * self.fsdp

    @property
    def pieces(self) -> int:
        """Micro-batches of a pipeline's pass."""
        return 1 if self.pp == 1 else self.micro_batches or self.pp * self.virtual

    def validate(self) -> None:
        """Rules between degrees."""
        if self.pp > 1 and self.tp > 1:
            raise ValueError(f"parallel pp={self.pp},tp={self.tp}: a pipeline goes with dp or fsdp, not with tp")
        if self.pp == 1 and (self.virtual > 1 or self.micro_batches is not None or self.schedule is not None):
            raise ValueError("parallel: virtual, micro_batches and schedule are a pipeline's; give pp of at least 2")

    def check(self, run: TrainConfig, shape: Any = None) -> None:
        """Refuse what does not fit a run and the shape of its model, where that is known, with the numbers."""
        if shape is not None and self.tp * self.pp > 1:
            from twoaxis.parallel.pipeline import check_pipeline
            from twoaxis.parallel.tensor import check_heads

            check_heads(shape, self.tp)
            check_pipeline(self.kind, shape.num_hidden_layers, self.pp, self.virtual, self.pieces)
        if run.batch % (run.accumulate * self.shares * self.pieces):
            pieces = f" times {self.pieces} micro-batches" if self.pp > 1 else ""
            raise ValueError(
                f"batch ({run.batch}) is the batch of all processes: accumulate ({run.accumulate}) times the "
                f"{self.shares} processes{pieces} must divide it"
            )

    @property
    def kind(self) -> Literal["gpipe", "1f1b", "interleaved"]:
        """The schedule."""
        return self.schedule or ("interleaved" if self.virtual > 1 else "1f1b")

    @staticmethod
    def read(text: str | None, world: int | None) -> Degrees:
        """From `--parallel`, for so many processes, or as many as it takes; None is a replica in each."""
        if text is None:
            return Degrees(dp=world or 1)
        made = Degrees.from_dict(parse(f"parallel:{text}")[1], "parallel")
        if world is not None and made.world != world:
            raise ValueError(
                f"parallel {text} needs {made.world} processes and there are {world}: start it with torchrun "
                f"--nproc-per-node {made.world}"
            )
        return made


def read_degrees(run: TrainConfig, world: int) -> Degrees:
    """The degrees of a run, checked against its model where that is described and not read from files."""
    from twoaxis.training.setup import ANY, model_config

    degrees = Degrees.read(run.parallel, world)
    degrees.check(run, None if run.source is not None else model_config(run, run.model.get("vocab_size", ANY)))
    return degrees


def make_engine(run: TrainConfig, place: Place, degrees: Degrees) -> Engine:
    """The engine of a run's degrees."""
    if degrees.fsdp * degrees.tp * degrees.pp == 1:
        from twoaxis.training.engines.engine import Engine

        return Engine(run, place)
    from twoaxis.training.engines.distributed import PipelinedEngine, ShardedEngine

    return (PipelinedEngine if degrees.pp > 1 else ShardedEngine)(run, place, degrees)
