"""Bytes on the fullest device of a deployment while it trains.

    weights      sub-layers over tensor and pipeline devices; stream and norms over pipeline devices; embedding and head
    gradients    as many, in the weights' dtype
    optimiser    AdamW's two float32 moments and, for narrow weights, a float32 copy; spread over data-parallel replicas
    activations  what passes in flight have left for their backward pass, and what one backward pass needs beside it

A pipeline stage has several micro-batches in flight: P - r of them on stage r of P with one chunk per stage, and
2(P - r - 1) + (V - 1)P + 1 chunks with V virtual stages. Received state is kept too, each tensor once per stage.

Sub-layers keep 1/t of their activations on each of t tensor-parallel devices; the stream and the norms keep all of
theirs on each, unless sequence parallelism spreads them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from twoaxis.costs.trace import TrainTrace
from twoaxis.model.config import ModelConfig
from twoaxis.model.deployment import Deployment
from twoaxis.model.flops import Parameters
from twoaxis.model.stages import Pipeline

if TYPE_CHECKING:
    from twoaxis.model.graft_config import TwoAxisConfig

SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a number."""


class DeviceMemory(NamedTuple):
    """Bytes on the fullest device."""

    stage: int  # the pipeline stage it belongs to
    weights: float  # parameters
    gradients: float  # of all of them
    optimizer: float  # state and float32 copies
    activations: float  # kept for backward passes, received state included
    backward: float  # more, while a backward pass runs

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self[1:])


def in_flight(stage: int, stages: int, virtual: int) -> int:
    """Chunks whose backward pass a stage still owes at its fullest, with as many micro-batches as it takes."""
    if virtual == 1:
        return stages - stage
    return 2 * (stages - stage - 1) + (virtual - 1) * stages + 1


def device_memory(
    shape: ModelConfig | TwoAxisConfig,
    counts: Parameters,
    trace: TrainTrace,  # of a pass that keeps everything
    again: TrainTrace | None,  # of one that makes blocks anew, where the deployment does
    pipeline: Pipeline,
    deployment: Deployment,
) -> DeviceMemory:
    """The fullest device of a training pass."""
    blocks, stages = shape.num_hidden_layers, range(deployment.pipeline_stages)
    weights = [_weights(stage, shape, counts, deployment) for stage in stages]
    kept = [_activations(stage, blocks, trace, again, pipeline, deployment) for stage in stages]
    return max((DeviceMemory(stage, *weights[stage], *kept[stage]) for stage in stages), key=lambda m: m.total)


def _weights(
    stage: int, shape: ModelConfig | TwoAxisConfig, counts: Parameters, deployment: Deployment
) -> tuple[float, float, float]:
    """Bytes of weights, gradients and the optimiser's state."""
    size, tp, stages = SIZES[deployment.dtype], deployment.tensor_parallel, deployment.pipeline_stages
    first, last = stage == 0, stage == stages - 1
    numbers = (counts.attention + counts.mlp + counts.mixer) / tp / stages + (counts.norms + counts.stream) / stages
    if first or (last and shape.tie_word_embeddings):
        numbers += counts.embedding / tp
    if last:
        numbers += counts.head / tp
    state = (8 if deployment.dtype == "float32" else 12) / deployment.data_parallel
    return numbers * size, numbers * size, numbers * state


def _activations(
    stage: int, blocks: int, trace: TrainTrace, again: TrainTrace | None, pipeline: Pipeline, deployment: Deployment
) -> tuple[float, float]:
    """Bytes kept by the chunks in flight, and what one backward pass needs beside them."""
    tp, spread, stages = deployment.tensor_parallel, deployment.spread, deployment.pipeline_stages
    per, chunks = blocks // deployment.chunks, range(stage, deployment.chunks, stages)
    own = [block for chunk in chunks for block in range(chunk * per, (chunk + 1) * per)]
    first, last = stage == 0, stage == stages - 1

    def shared(of: TrainTrace, *chosen: int) -> float:
        found = of.saved_by(*chosen)
        return found.stream / spread + found.inside / tp

    run = trace if again is None else again
    kept = pipeline.held[stage] * deployment.micro_batch * deployment.context / spread + run.saved_by_kind("embedding")
    kept += shared(run, -1) if first else 0.0
    ends: tuple[int, ...] = (blocks,)
    remade = whole = 0.0  # what is made anew at once on this device, and the undivided block of it that was traced
    if again is None:
        kept += shared(trace, *own)
    else:
        ends = (blocks - 1, blocks)  # what the last block made and the read-out keeps
        if deployment.recompute == "block":  # what a block made enters the next, which may be another stage's
            kept += shared(again, *(block for block in own if (block + 1) % per))
        at_once = [[block] for block in own] if deployment.recompute == "block" else [own[-per:]]
        remade = max(shared(trace, *group) for group in at_once)
        whole = max(sum(trace.saved_by(block)) for block in own)
    # of the stage's whole depth
    kept *= in_flight(stage, stages, deployment.virtual_stages) / deployment.virtual_stages
    backward = max(0.0, remade + (max(_above(run, chunk, per, blocks) for chunk in chunks) - whole) / spread)
    if last:
        head = run.saved_by_kind("head")
        kept += shared(run, *ends) + head / tp
        backward = max(backward - head / tp, run.extra["head", blocks] / tp)
    return kept, backward


def _above(run: TrainTrace, chunk: int, per: int, blocks: int) -> float:
    """Bytes that the backward pass of a chunk needs above what it and all before it keep.

    Gradients of the sources that came from earlier stages are among them: this is no share of the whole model's.
    """
    end = (chunk + 1) * per
    own = range(chunk * per, end if end < blocks else blocks + 1)
    ran = (block for block in own if ("blocks", block) in run.extra)
    return max(run.extra["blocks", block] - sum(run.saved_by(*own[block + 1 - own.start :])) for block in ran)
