"""What `train --dry-run` shows: how processes would share a run, and the memory of the fullest of them.

weights, gradients, moments   float32, 16 bytes a number, of what a process holds
gathered                      what sharded processes hold whole for a while: the ends, the stream, two blocks
activations                   as `twoaxis cost` counts them, with the micro-batches that a pipeline has in flight
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twoaxis.show.document import Document, Prose, Showable, table
from twoaxis.show.numbers import si, whole

if TYPE_CHECKING:
    from twoaxis.training.config import TrainConfig
    from twoaxis.training.engines.processes import Degrees

NUMBER = 4
"""Bytes of a weight, of its gradient and of each of its two moments."""


@dataclass(frozen=True, kw_only=True)
class TrainPlan(Showable):
    """A run before it starts."""

    degrees: dict[str, Any]  # of parallelism, above one
    processes: int  # that torchrun starts
    examples: int  # examples of a micro-batch
    passes: int  # micro-batches of a process and step
    parameters: int  # of the whole model
    held: int  # numbers that the fullest process holds
    memory: dict[str, float]  # its bytes, by what they are
    boundaries: tuple[int, ...]  # bytes per token that cross each boundary of a pipeline, forward

    @property
    def total(self) -> float:
        """Bytes of the fullest process."""
        return sum(self.memory.values())

    def document(self) -> Document:
        """A table of the memory, and the command."""
        spelled = ",".join(f"{name}={value}" for name, value in self.degrees.items()) or "none"
        said = (
            f"{self.processes} {'process' if self.processes == 1 else 'processes'} (parallel: {spelled}), "
            f"{self.passes} micro-batches of {self.examples} examples each per step. The fullest holds "
            f"{whole(self.held)} of {whole(self.parameters)} parameters."
        )
        if self.boundaries:
            said += f" Boundaries carry {', '.join(map(si, self.boundaries))} per token, and as much in gradients."
        body = [(name, si(size)) for name, size in {**self.memory, "all": self.total}.items()]
        return Document("", (Prose(said), table(["memory of the fullest process", "bytes"], body)))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "boundaries": list(self.boundaries), "total": self.total}


def plan_training(run: TrainConfig, vocabulary: int) -> TrainPlan:
    """How a run would be shared; degrees that do not fit are refused.

    Args:
        run: the run, of a model that is described and not read from files.
        vocabulary: tokens of its data.
    """
    import torch

    from twoaxis.costs.costs import cost
    from twoaxis.model.decoder import Decoder
    from twoaxis.model.deployment import Deployment
    from twoaxis.model.variant import make_contender
    from twoaxis.training.engines.processes import Degrees, read_degrees, world
    from twoaxis.training.setup import model_config

    if run.source is not None or run.family is not None:
        raise ValueError(f"dry_run plans our decoder, and the model is one of {run.source or run.family}")
    degrees = read_degrees(run, world() if run.parallel is None else Degrees.read(run.parallel, None).world)
    config: Any = model_config(run, vocabulary)
    rows = run.batch // (run.accumulate * degrees.shares * degrees.pieces)
    deployment = Deployment(
        tensor_parallel=degrees.tp,
        pipeline_stages=degrees.pp,
        virtual_stages=degrees.virtual,
        micro_batch=rows,
        context=run.context,
        dtype=run.dtype,
        recompute="block" if run.recompute else "none",
    )
    found = cost(config, make_contender(run.stream, run.mixer), deployment)
    with torch.device("meta"):
        model = Decoder(config)
    held, gathered = _numbers(model, degrees)
    memory = {
        "weights": held * NUMBER,
        "gradients": held * NUMBER,
        "moments": 2 * held * NUMBER,
        "gathered": gathered * NUMBER,
        "activations": found.memory.activations,
        "backward pass": found.memory.backward,
    }
    return TrainPlan(
        degrees={name: value for name, value in degrees.to_dict().items() if value not in (1, None)},
        processes=degrees.world,
        examples=rows,
        passes=run.accumulate * degrees.pieces,
        parameters=sum(p.numel() for p in model.parameters()),
        held=held,
        memory=memory,
        boundaries=tuple(boundary.cached for boundary in found.pipeline.boundaries),
    )


def _numbers(model: Any, degrees: Degrees) -> tuple[int, int]:
    """Numbers that the fullest process holds, and those that it holds whole for a while."""
    from twoaxis.parallel.tensor import COLUMNS, ROWS, spread_plan

    styles = spread_plan(model, degrees.tp) if degrees.tp > 1 else {}

    def count(parts: int, *names: str) -> int:
        """Numbers of a part of the parameters whose names begin so; rows that do not divide make one part larger."""
        total = 0
        for name, parameter in model.named_parameters():
            if name.startswith(names):
                style, rows, rest = styles.get(name.rpartition(".")[0]), len(parameter), parameter[0].numel()
                rows //= degrees.tp if style == COLUMNS else 1
                rest //= degrees.tp if style == ROWS and parameter.dim() > 1 else 1
                total += -(-rows // parts) * rest
        return total

    blocks, stages, tied = len(model.layers), degrees.pp, model.lm_head is None
    per, found = blocks // (stages * degrees.virtual), []
    for stage in range(stages):
        first, last = stage == 0, stage == stages - 1
        own = [f"layers.{number}." for number in range(blocks) if number // per % stages == stage]
        ends = ["embed_tokens."] * (first or (last and tied)) + ["norm.", "lm_head."] * last
        ends += ["stream."] * (stages == 1)
        held = count(degrees.fsdp, *own, *ends) + (count(1, "stream.") if stages > 1 else 0)
        gathered = count(1, *ends) + 2 * max(count(1, block) for block in own)
        found.append((held, gathered if degrees.fsdp > 1 else 0))
    return max(found)
