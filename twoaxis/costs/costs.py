"""`cost(shape, method, deployment)`: everything a method costs at a scale, beside the plain residual.

    costs = cost("llama-3-8b", "attention_residuals:block_size=8", Deployment(pipeline_stages=8, virtual_stages=4))
    costs.parameters_added, costs.train.fused, costs.pipeline.cached

Counts come from the model's own modules run on tensors without numbers: parameters and operations from
`twoaxis.model.flops`, bytes, calls and activations from `trace`, transfers from the state that `Stream.pack` gives.
Times are estimates from those counts and a hardware profile.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from twoaxis.costs.deployment import Deployment
from twoaxis.costs.hardware import Profile, find_profile
from twoaxis.costs.memory import SIZES, DeviceMemory, device_memory
from twoaxis.costs.pipeline import Pipeline, plan
from twoaxis.costs.roofline import Seconds, Times, infer_seconds, train_seconds
from twoaxis.costs.shapes import find_shape, with_method
from twoaxis.costs.trace import InferTrace, Model, SiteTraffic, TrainTrace
from twoaxis.model.config import DecoderConfig
from twoaxis.model.flops import Flops, Parameters, count_parameters, forward_flops, training_flops
from twoaxis.model.variant import Contender, make_contender


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


class Kept(NamedTuple):
    """Bytes that all decoding sequences together keep between tokens, over all devices.

    Attributes:
        attention: keys and values, which grow with the context.
        local: rings of windows and convolutions.
        stream: the stream's own rings, such as Deep Delta's TC and EC.
    """

    attention: int
    local: int
    stream: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


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
    shape: DecoderConfig
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
    shape: DecoderConfig | str,
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
    model, train, prefill, decode = _traces(_Asked(config, deployment))
    before = _traces(_Asked(plain, deployment))
    trunk = model.trunk
    counts, bare = count_parameters(config, trunk=trunk), count_parameters(plain, trunk=before[0].trunk)
    pipeline = plan(trunk, *_cut(deployment))
    memory = device_memory(config, counts, train, pipeline, deployment)
    live, size = model.stream.cost().live, SIZES[deployment.dtype]
    context = deployment.context
    return Costs(
        label=contender.label,
        shape=config,
        deployment=deployment,
        parameters=counts,
        parameters_added=counts.total - bare.total,
        forward=forward_flops(config, context, trunk=trunk),
        training=training_flops(config, context, recompute=int(deployment.recompute != "none"), trunk=trunk),
        traffic=Traffic(model.traffic(deployment.micro_batch, context)),
        activations=train.saved,
        live_numbers=live,
        live_training=live * size * deployment.micro_batch * context,
        live_prefill=live * size * deployment.batch * deployment.chunk_tokens,
        kept=Kept(decode.attention, decode.local, decode.kept),
        pipeline=pipeline,
        memory=memory,
        fits=memory.total <= profile.memory,
        times=_times(config, (model, train, prefill, decode), pipeline, deployment, profile),
        plain=_times(plain, before, plan(before[0].trunk, *_cut(deployment)), deployment, profile),
    )


Traces = tuple[Model, TrainTrace, InferTrace, InferTrace]


class _Asked:
    """A configuration in a deployment, equal to another that is counted the same."""

    def __init__(self, config: DecoderConfig, deployment: Deployment) -> None:
        self.config, self.deployment = config, deployment
        d = deployment
        self.device = "cpu" if find_profile(d.hardware).kind == "cpu" else None
        self.key = repr((config, d.micro_batch, d.context, d.dtype, d.batch, self.device))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Asked) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@functools.lru_cache(maxsize=32)
def _traces(asked: _Asked) -> Traces:
    deployment = asked.deployment
    model = Model(asked.config, deployment.dtype, asked.device)
    train = model.train(deployment.micro_batch, deployment.context)
    prefill = model.infer(deployment.batch, 0, deployment.context)
    decode = model.infer(deployment.batch, deployment.context - 1, 1)
    return model, train, prefill, decode


def _cut(deployment: Deployment) -> tuple[int, int]:
    return deployment.pipeline_stages, deployment.virtual_stages


def _times(
    config: DecoderConfig, traces: Traces, pipeline: Pipeline, deployment: Deployment, profile: Profile
) -> Times:
    _, train, prefill, decode = traces
    return Times(
        train_seconds(config, train, pipeline, deployment, profile),
        infer_seconds(prefill, deployment, profile),
        infer_seconds(decode, deployment, profile),
    )
