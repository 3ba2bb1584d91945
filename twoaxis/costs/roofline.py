"""Seconds of counted work on a device.

    eager   every operation is a kernel, as the code runs without a compiler
    fused   matrix products are kernels, and every stretch of other operations between them is one

On a data sheet's device a kernel takes the slower of its arithmetic and its memory, at the peak rates times an assumed
efficiency, and a launch. On a measured machine a call takes what it took there, see `here`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from twoaxis.costs.fuse import VIEW, Kernel, Work
from twoaxis.costs.hardware import Profile
from twoaxis.costs.memory import SIZES
from twoaxis.costs.trace import StepTrace, TrainTrace
from twoaxis.model.deployment import Deployment
from twoaxis.model.stages import Pipeline


class Seconds(NamedTuple):
    """A time as the code runs and as it could run, or a ratio of two."""

    eager: float  # every operation for itself
    fused: float  # in as few kernels as possible

    def ratio(self, other: Seconds) -> Seconds:
        """How many times as long, eager over eager and fused over fused."""
        return Seconds(self.eager / other.eager, self.fused / other.fused)


def work_seconds(work: Work, profile: Profile, dtype: str, share: int = 1) -> Seconds:
    """The work, spread over `share` devices."""
    rate = getattr(profile.matmul, dtype) * profile.efficiency.matmul * share
    bandwidth = profile.bandwidth * profile.efficiency.bandwidth * share

    def seconds(kernel: Kernel) -> float:
        if profile.clock is not None and (taken := profile.clock.seconds(kernel)) is not None:
            return taken
        if kernel == VIEW:
            return 0.0
        return max(kernel.flops / rate, kernel.bytes / bandwidth) + profile.launch

    return Seconds(*(sum(seconds(kernel) * n for kernel, n in kernels.items()) for kernels in work))


def computing(trace: TrainTrace | StepTrace, deployment: Deployment, profile: Profile, *kinds: str) -> Iterator[float]:
    """Eager and fused seconds of some kinds of parts, on all stages."""
    tp = deployment.tensor_parallel
    shares = {"stream": deployment.spread, "sublayers": tp, "head": tp, "embedding": 1}
    parts = [work_seconds(trace.work(kind), profile, deployment.dtype, shares[kind]) for kind in kinds]
    return map(sum, zip(*parts, strict=True))


def train_seconds(
    width: int, trace: TrainTrace, pipeline: Pipeline, deployment: Deployment, profile: Profile
) -> Seconds:
    """One micro-batch on one device of a pipeline whose stages are alike, transfers in full view.

    The trace is that of the deployment: where blocks are made anew, it has them.
    """
    tp, stages = deployment.tensor_parallel, deployment.pipeline_stages
    tokens, link = deployment.micro_batch * deployment.context, (profile.link or math.inf) * profile.efficiency.link
    reduced = 2 if deployment.recompute == "none" else 3  # passes with one all-reduce per sub-layer
    vector = tokens * width * SIZES[deployment.dtype]
    gathered = trace.sites / stages * reduced * 2 * (tp - 1) / tp * vector
    sent = 2 * pipeline.received() * tokens / deployment.spread
    taken = computing(trace, deployment, profile, "stream", "sublayers", "head", "embedding")
    return Seconds(*(seconds / stages + (gathered + sent) / link for seconds in taken))


def infer_seconds(trace: StepTrace, deployment: Deployment, profile: Profile) -> Seconds:
    """A forward pass over all stages."""
    return Seconds(*computing(trace, deployment, profile, "stream", "sublayers", "head"))
