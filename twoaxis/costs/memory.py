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

from typing import NamedTuple

from twoaxis.costs.deployment import Deployment
from twoaxis.costs.pipeline import Pipeline
from twoaxis.costs.trace import TrainTrace
from twoaxis.model.config import DecoderConfig
from twoaxis.model.flops import Parameters

SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a number."""


class DeviceMemory(NamedTuple):
    """Bytes on the fullest device.

    Attributes:
        stage: the pipeline stage it belongs to.
        weights: parameters.
        gradients: of all of them.
        optimizer: state and float32 copies.
        activations: kept for backward passes, received state included.
        backward: more, while a backward pass runs.
    """

    stage: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    backward: float

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
    shape: DecoderConfig, counts: Parameters, trace: TrainTrace, pipeline: Pipeline, deployment: Deployment
) -> DeviceMemory:
    """The fullest device of a training pass."""
    stages = [_stage(r, shape, counts, trace, pipeline, deployment) for r in range(deployment.pipeline_stages)]
    return max(stages, key=lambda memory: memory.total)


def _stage(
    stage: int, shape: DecoderConfig, counts: Parameters, trace: TrainTrace, pipeline: Pipeline, deployment: Deployment
) -> DeviceMemory:
    size, tp, stages = SIZES[deployment.dtype], deployment.tensor_parallel, deployment.pipeline_stages
    first, last = stage == 0, stage == stages - 1
    numbers = (counts.attention + counts.mlp + counts.mixer) / tp / stages + (counts.norms + counts.stream) / stages
    if first or (last and shape.tied):
        numbers += counts.embedding / tp
    if last:
        numbers += counts.head / tp
    state = (8 if deployment.dtype == "float32" else 12) / deployment.data_parallel
    kept, backward = _activations(stage, trace, pipeline, deployment)
    return DeviceMemory(stage, numbers * size, numbers * size, numbers * state, kept, backward)


def _activations(stage: int, trace: TrainTrace, pipeline: Pipeline, deployment: Deployment) -> tuple[float, float]:
    """Bytes kept by the chunks in flight, and what one backward pass needs beside them."""
    tp, spread, stages, virtual = (
        deployment.tensor_parallel,
        deployment.spread,
        deployment.pipeline_stages,
        deployment.virtual_stages,
    )
    per = len(trace.pieces) // deployment.chunks
    blocks = [b for chunk in range(stage, deployment.chunks, stages) for b in range(chunk * per, (chunk + 1) * per)]
    whole = {b: trace.stream.saved[b] / spread + sum(p.saved for p in trace.pieces[b]) / tp for b in blocks}
    received = pipeline.held[stage] * deployment.micro_batch * deployment.context / spread
    flight = in_flight(stage, stages, virtual) / virtual  # of the stage's whole depth
    inputs = sum(trace.stream.entering[b] for b in blocks if b % per or b == 0) / spread
    if deployment.recompute == "none":
        kept, again = flight * (sum(whole.values()) + received), 0.0
    elif deployment.recompute == "block":
        kept, again = flight * (inputs + received), max(whole.values())
    else:
        kept = flight * (received if stage else received + trace.stream.entering[0] / spread)
        again = sum(list(whole.values())[-per:])
    backward = again + trace.stream.extra / spread / stages
    if stage == stages - 1:
        tail = (trace.stream.saved[-1] / spread) + trace.head.saved / tp
        kept += tail if deployment.recompute == "none" else tail + trace.stream.closing / spread
        backward = max(backward - trace.head.saved / tp, trace.head.extra / tp)
    return kept, backward
