"""`cost(shape, method, deployment)`: everything a method costs at a scale, beside the plain residual.

    costs = cost("llama-3-8b", "attention_residuals:block_size=8", Deployment(pipeline_stages=8, virtual_stages=4))
    costs.parameters_added, costs.train.fused, costs.pipeline.cached

Counts come from the model itself, run on meta tensors: parameters and operations from `twoaxis.model.flops`, bytes,
calls and activations from `trace`, transfers from the state that `Stream.pack` gives.
Times are estimates from those counts and a hardware profile.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import NamedTuple

from twoaxis.costs.hardware import Profile, find_profile
from twoaxis.costs.memory import SIZES, DeviceMemory, device_memory
from twoaxis.costs.roofline import Seconds, Times, infer_seconds, train_seconds
from twoaxis.costs.trace import (
    Kept,
    SiteTraffic,
    StepTrace,
    TrainTrace,
    lengthened,
    meta_model,
    trace_step,
    trace_training,
)
from twoaxis.depth.counts import count_live
from twoaxis.model.config import ModelConfig
from twoaxis.model.deployment import Deployment
from twoaxis.model.flops import Flops, Parameters, count_parameters, forward_flops, training_flops
from twoaxis.model.presets import find_shape
from twoaxis.model.stages import Pipeline, plan
from twoaxis.model.variant import Contender, make_contender, with_method


class Traffic(NamedTuple):
    """Bytes per token that the stream moves in a forward pass, pre-norms and sub-layers left out.

    Attributes:
        sites: for each site, out last.
    """

    sites: tuple[SiteTraffic, ...]

    @property
    def naive(self) -> float:
        """Every operation for itself."""
        return sum(site.naive for site in self.sites)

    @property
    def fused(self) -> float:
        """One kernel between two sub-layers."""
        return sum(site.fused for site in self.sites)


class Costs(NamedTuple):
    """What a method costs on a shape in a deployment.

    Attributes:
        label: of the method.
        shape: the decoder with the method.
        deployment: what it was asked for.
        parameters: by part.
        parameters_added: beyond the same shape with the plain residual and no mixer.
        forward: operations per token of a forward pass.
        training: and of a training pass.
        traffic: bytes per token at each site.
        activations: bytes a micro-batch leaves for its backward pass over all devices, nothing recomputed.
        live_numbers: numbers per token alive across sites at their most.
        live_training: bytes of them in a training pass.
        live_prefill: bytes of them in a prefill pass of all sequences.
        kept: between tokens.
        pipeline: what crosses stages.
        memory: of the fullest device in training.
        fits: whether that is less than the device has.
        times: seconds.
        plain: seconds of the same shape with the plain residual and no mixer.
    """

    label: str
    shape: ModelConfig
    deployment: Deployment
    parameters: Parameters
    parameters_added: int
    forward: Flops
    training: Flops
    traffic: Traffic
    activations: int
    live_numbers: int
    live_training: int
    live_prefill: int
    kept: Kept
    pipeline: Pipeline
    memory: DeviceMemory
    fits: bool
    times: Times
    plain: Times

    @property
    def train(self) -> Seconds:
        """Ratio of a training pass to the plain residual's; both run the same way."""
        return ratio(self.times.train, self.plain.train)

    @property
    def prefill(self) -> Seconds:
        """Ratio of a prefill."""
        return ratio(self.times.prefill, self.plain.prefill)

    @property
    def decode(self) -> Seconds:
        """Ratio of a decoding step."""
        return ratio(self.times.decode, self.plain.decode)


def ratio(method: Seconds, plain: Seconds) -> Seconds:
    """How many times as long, naive over naive and fused over fused."""
    return Seconds(method.naive / plain.naive, method.fused / plain.fused)


def cost(
    shape: ModelConfig | str,
    method: Contender | str | None = None,
    deployment: Deployment | None = None,
    *,
    mixer: str | None = None,
) -> Costs:
    """What a method costs.

    Args:
        shape: a decoder, whose own stream and mixer do not matter, or a name for `find_shape`.
        method: a stream as `NAME[:k=v,...]`, or a contender; None is the plain residual.
        deployment: devices and sizes; None is one H100 with a context of 4096.
        mixer: a local mixer as `NAME[:k=v,...]`.
    """
    deployment = deployment or Deployment()
    base = find_shape(shape) if isinstance(shape, str) else shape
    contender = method if isinstance(method, Contender) else make_contender(method, mixer)
    profile = find_profile(deployment.hardware)
    config = with_method(base, contender)
    deployment.check(config)
    plain = with_method(base, make_contender())
    traces, before = _traces(_Asked(config, deployment)), _traces(_Asked(plain, deployment))
    model, cut = traces.model, (deployment.pipeline_stages, deployment.virtual_stages)
    counts, bare = count_parameters(config, trunk=model), count_parameters(plain, trunk=before.model)
    pipeline, recompute = plan(model, *cut), deployment.recompute != "none"
    again = traces.recomputed if recompute else None
    memory = device_memory(config, counts, traces.train, again, pipeline, deployment)
    live, size = count_live(model.stream), SIZES[deployment.dtype]
    context = deployment.context
    return Costs(
        label=contender.label,
        shape=config,
        deployment=deployment,
        parameters=counts,
        parameters_added=counts.total - bare.total,
        forward=forward_flops(config, context, trunk=model),
        training=training_flops(config, context, recompute=int(recompute), trunk=model),
        traffic=Traffic(traces.prefill.sites),
        activations=traces.train.saved,
        live_numbers=live,
        live_training=live * size * deployment.micro_batch * context,
        live_prefill=live * size * deployment.batch * deployment.chunk_tokens,
        kept=traces.decode.kept,
        pipeline=pipeline,
        memory=memory,
        fits=memory.total <= profile.memory,
        times=_times(config, traces, pipeline, deployment, profile),
        plain=_times(plain, before, plan(before.model, *cut), deployment, profile),
    )


class Traces:
    """What a configuration does in a deployment, each pass traced when it is first asked for."""

    def __init__(self, config: ModelConfig, deployment: Deployment, device: str | None) -> None:
        self.deployment, self.device = deployment, device
        self.model = meta_model(config, deployment.dtype)

    @cached_property
    def train(self) -> TrainTrace:
        """A training pass that keeps everything."""
        return trace_training(self.model, self.deployment.micro_batch, self.deployment.context, self.device)

    @cached_property
    def recomputed(self) -> TrainTrace:
        """A training pass that makes blocks anew."""
        return trace_training(self.model, self.deployment.micro_batch, self.deployment.context, self.device, "block")

    @cached_property
    def prefill(self) -> StepTrace:
        """The whole context."""
        return trace_step(self.model, self.deployment.batch, self.deployment.context, self.device)

    @cached_property
    def decode(self) -> StepTrace:
        """The last token of the context."""
        past = lengthened(self.prefill.past, self.deployment.context - 1)
        return trace_step(self.model, self.deployment.batch, 1, self.device, past)


class _Asked:
    """A configuration in a deployment, equal to another that is counted the same."""

    def __init__(self, config: ModelConfig, deployment: Deployment) -> None:
        self.config, self.deployment = config, deployment
        d = deployment
        self.device = "cpu" if find_profile(d.hardware).kind == "cpu" else None
        self.key = repr((config, d.micro_batch, d.context, d.dtype, d.batch, self.device))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Asked) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@lru_cache(maxsize=32)
def _traces(asked: _Asked) -> Traces:
    return Traces(asked.config, asked.deployment, asked.device)


def _times(config: ModelConfig, traces: Traces, pipeline: Pipeline, deployment: Deployment, profile: Profile) -> Times:
    train = traces.train if deployment.recompute == "none" else traces.recomputed
    return Times(
        train_seconds(config, train, pipeline, deployment, profile),
        infer_seconds(traces.prefill, deployment, profile),
        infer_seconds(traces.decode, deployment, profile),
    )
