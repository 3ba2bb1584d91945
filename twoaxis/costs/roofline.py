"""Seconds of counted work on a device.

    eager   every operation is a kernel, as the code runs without a compiler
    fused   matrix products are kernels, and every stretch of other operations between them is one

On a data sheet's device a kernel takes the slower of its arithmetic and its memory, at the peak rates times an assumed
efficiency, and a launch. On a measured machine a call takes what it took there, see `here`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from twoaxis.costs.fuse import VIEW, Kernel, Work
from twoaxis.costs.hardware import Profile
from twoaxis.costs.memory import SIZES
from twoaxis.costs.trace import StepTrace, TrainTrace
from twoaxis.model.config import ModelConfig
from twoaxis.model.deployment import Deployment
from twoaxis.model.stages import Pipeline


class Seconds(NamedTuple):
    """A time as the code runs and as it could run, or a ratio of two.

    Attributes:
        eager: every operation for itself.
        fused: in as few kernels as possible.
    """

    eager: float
    fused: float

    def __add__(self, other: Seconds) -> Seconds:  # type: ignore[override]
        return Seconds(self.eager + other.eager, self.fused + other.fused)

    def over(self, count: float) -> Seconds:
        """Divided."""
        return Seconds(self.eager / count, self.fused / count)

    def ratio(self, other: Seconds) -> Seconds:
        """How many times as long, eager over eager and fused over fused."""
        return Seconds(self.eager / other.eager, self.fused / other.fused)


def work_seconds(work: Work, profile: Profile, dtype: str, share: int = 1) -> Seconds:
    """The work, spread over `share` devices."""
    rate = profile.matmul[dtype] * profile.efficiency["matmul"] * share
    bandwidth = profile.bandwidth * profile.efficiency["bandwidth"] * share

    def seconds(kernel: Kernel) -> float:
        if profile.clock is not None and (taken := profile.clock.seconds(kernel)) is not None:
            return taken
        if kernel == VIEW:
            return 0.0
        return max(kernel.flops / rate, kernel.bytes / bandwidth) + profile.launch

    return Seconds(*(sum(seconds(kernel) * n for kernel, n in kernels.items()) for kernels in work))


def train_seconds(
    shape: ModelConfig, trace: TrainTrace, pipeline: Pipeline, deployment: Deployment, profile: Profile
) -> Seconds:
    """One micro-batch on one device of a pipeline whose stages are alike, transfers in full view.

    The trace is that of the deployment: where blocks are made anew, it has them.
    """
    tp, spread, dtype = deployment.tensor_parallel, deployment.spread, deployment.dtype
    shares = {"stream": spread, "sublayers": tp, "head": tp, "embedding": 1}
    parts = [work_seconds(trace.work(kind), profile, dtype, share) for kind, share in shares.items()]
    computing = functools.reduce(Seconds.__add__, parts).over(deployment.pipeline_stages)
    tokens, link = deployment.micro_batch * deployment.context, profile.link * profile.efficiency["link"]
    vector = tokens * shape.hidden_size * SIZES[dtype]
    sites = trace.sites / deployment.pipeline_stages
    reduced = 2 if deployment.recompute == "none" else 3  # passes with one all-reduce per sub-layer
    gathered = sites * reduced * 2 * (tp - 1) / tp * vector
    sent = 2 * pipeline.received() * tokens / spread
    waiting = (gathered + sent) / link
    return computing + Seconds(waiting, waiting)


def infer_seconds(trace: StepTrace, deployment: Deployment, profile: Profile) -> Seconds:
    """A forward pass over all stages."""
    shares = {"stream": deployment.spread, "sublayers": deployment.tensor_parallel, "head": deployment.tensor_parallel}
    parts = [work_seconds(trace.work(kind), profile, deployment.dtype, share) for kind, share in shares.items()]
    return functools.reduce(Seconds.__add__, parts)
