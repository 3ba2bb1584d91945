"""Seconds of counted work on a device: the slower of arithmetic and memory for each kernel, and a launch for each.

    naive   every operation is a kernel, as the code runs without a compiler
    fused   matrix products are kernels, and every stretch of other operations between them is one

On a data sheet's device, rates are the peak times an assumed efficiency. On a measured machine, an operation takes what
it took there at that size, see `calibrate`.
"""

from __future__ import annotations

from typing import NamedTuple

from twoaxis.costs.deployment import Deployment
from twoaxis.costs.hardware import Profile
from twoaxis.costs.measured import Table, op_seconds
from twoaxis.costs.memory import SIZES
from twoaxis.costs.pipeline import Pipeline
from twoaxis.costs.recorder import Op, Work
from twoaxis.costs.trace import InferTrace, TrainTrace
from twoaxis.model.config import DecoderConfig


class Seconds(NamedTuple):
    """A time as the code runs and as it could run.

    Attributes:
        naive: every operation for itself.
        fused: in as few kernels as possible.
    """

    naive: float
    fused: float

    def __add__(self, other: Seconds) -> Seconds:  # type: ignore[override]
        return Seconds(self.naive + other.naive, self.fused + other.fused)

    def over(self, count: float) -> Seconds:
        """Divided."""
        return Seconds(self.naive / count, self.fused / count)


class Times(NamedTuple):
    """What a deployment takes.

    Attributes:
        train: one micro-batch on one device, forward and backward, with its transfers; no optimiser, no bubble.
        prefill: the context of all sequences, without transfers.
        decode: one token of all sequences, without transfers.
    """

    train: Seconds
    prefill: Seconds
    decode: Seconds


def work_seconds(work: Work, profile: Profile, dtype: str, share: int = 1) -> Seconds:
    """The work, spread over `share` devices."""
    if profile.ops:
        table = Table.of(profile)
        naive = sum(op_seconds(table, op) * n for op, n in work.ops.items()) + table.view * work.views
        heavy = sum(op_seconds(table, op) * n for op, n in work.heavy.items())
        return Seconds(naive, heavy + work.fused_bytes / profile.bandwidth + table.call * work.segments)
    rate = profile.matmul[dtype] * profile.efficiency["matmul"] * share
    bandwidth = profile.bandwidth * profile.efficiency["bandwidth"] * share

    def kernel(op: Op) -> float:
        return max(op.flops / rate, op.bytes / bandwidth) + profile.launch

    naive = sum(kernel(op) * n for op, n in work.ops.items())
    heavy = sum(kernel(op) * n for op, n in work.heavy.items())
    return Seconds(naive, heavy + work.fused_bytes / bandwidth + profile.launch * work.segments)


def train_seconds(
    shape: DecoderConfig, trace: TrainTrace, pipeline: Pipeline, deployment: Deployment, profile: Profile
) -> Seconds:
    """One micro-batch on one device of a pipeline whose stages are alike, transfers in full view."""
    tp, spread, dtype = deployment.tensor_parallel, deployment.spread, deployment.dtype

    def of(work: Work, share: int) -> Seconds:
        return work_seconds(work, profile, dtype, share)

    stream = of(trace.stream.forward, spread) + of(trace.stream.backward, spread)
    passes = 3 if deployment.recompute == "none" else 4
    inside = of(trace.sublayers, tp)
    if deployment.recompute != "none":
        inside += of(trace.sublayers_forward, tp)
        stream += of(trace.stream.forward, spread)
    ends = of(trace.head.forward, tp) + of(trace.head.backward, tp)
    ends += of(trace.embedding.forward, 1) + of(trace.embedding.backward, 1)
    computing = (stream + inside + ends).over(deployment.pipeline_stages)
    tokens, link = deployment.micro_batch * deployment.context, profile.link * profile.efficiency["link"]
    vector = tokens * shape.width * SIZES[dtype]
    sites = sum(map(len, trace.pieces)) / deployment.pipeline_stages
    gathered = sites * (passes - 1) * 2 * (tp - 1) / tp * vector  # one all-reduce per sub-layer and pass
    sent = 2 * pipeline.received() * tokens / spread
    waiting = (gathered + sent) / link
    return computing + Seconds(waiting, waiting)


def infer_seconds(trace: InferTrace, deployment: Deployment, profile: Profile) -> Seconds:
    """A forward pass over all stages."""
    tp, dtype = deployment.tensor_parallel, deployment.dtype
    inside = work_seconds(trace.sublayers, profile, dtype, tp) + work_seconds(trace.head, profile, dtype, tp)
    return inside + work_seconds(trace.stream, profile, dtype, deployment.spread)
