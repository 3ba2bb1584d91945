"""Degrees of parallelism: how the processes of a run share its work, as `--parallel` spells it.

dp=4                       replicas, each with a part of every batch
fsdp=8                     every process holds an eighth of every tensor, and has a part of every batch
fsdp=4,tp=2                pairs of processes share the matrices of each sub-layer
dp=2,pp=4,micro_batches=8  two pipelines of four stages; virtual=2 gives each process two chunks of the depth
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from twoaxis.base.options import Count, Options
from twoaxis.base.spec import parse

if TYPE_CHECKING:
    from twoaxis.training.config import TrainConfig
    from twoaxis.training.engines.engine import Engine
    from twoaxis.training.engines.place import Place


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

    def check(self, run: TrainConfig, blocks: int, heads: int, kv_heads: int) -> None:
        """Refuse what does not fit a run and its model, with the numbers."""
        for count, what in ((heads, "attention heads"), (kv_heads, "key and value heads")):
            if count % self.tp:
                raise ValueError(f"parallel tp={self.tp}: {count} {what} cannot be spread over {self.tp} processes")
        if self.pp > 1:
            from twoaxis.parallel.pipeline import check_pipeline

            check_pipeline(self.kind, blocks, self.pp, self.virtual, self.pieces)
        rows, rest = divmod(run.batch, run.accumulate * self.shares * self.pieces)
        if rest or not rows:
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
    degrees = Degrees.read(run.parallel, world)
    if run.source is None:
        from twoaxis.training.setup import ANY, model_config

        shape = model_config(run, run.model.get("vocab_size", ANY))
        heads = shape.num_attention_heads
        degrees.check(run, shape.num_hidden_layers, heads, shape.num_key_value_heads or heads)
    return degrees


def make_engine(run: TrainConfig, place: Place) -> Engine:
    """The engine of a run's degrees."""
    degrees = Degrees.read(run.parallel, place.world)
    if degrees.pp > 1:
        from twoaxis.training.engines.pipelined import PipelinedEngine

        return PipelinedEngine(run, place, degrees)
    if degrees.fsdp > 1 or degrees.tp > 1:
        from twoaxis.training.engines.sharded import ShardedEngine

        return ShardedEngine(run, place, degrees)
    from twoaxis.training.engines.engine import Engine

    return Engine(run, place)
