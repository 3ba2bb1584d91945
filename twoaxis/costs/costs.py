"""`cost(shape, method, deployment)`: everything a method costs at a scale, beside the plain residual.

    costs = cost("llama-3-8b", "attention_residuals:block_size=8", Deployment(pipeline_stages=8, virtual_stages=4))
    costs.parameters_added, costs.train.fused, costs.pipeline.cached

Counts come from the model itself, run on meta tensors: parameters and operations from `twoaxis.model.flops`, bytes,
calls and activations from `trace`, transfers from the state that `Stream.pack` gives. Times are estimates from those
counts and a hardware profile, or measured call by call on this machine. Each number is counted when it is first asked
for, and a pass is traced only if one of them needs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from twoaxis.costs.deepen import Trace, trace_deep
from twoaxis.costs.fuse import VIEW
from twoaxis.costs.hardware import Profile, find_profile
from twoaxis.costs.memory import SIZES, DeviceMemory, device_memory
from twoaxis.costs.roofline import Seconds, infer_seconds, train_seconds
from twoaxis.costs.trace import (
    Kept,
    Recompute,
    StepTrace,
    TrainTrace,
    meta_model,
    trace_decoding,
    trace_step,
    trace_training,
)
from twoaxis.depth.counts import count_live
from twoaxis.model.config import ModelConfig
from twoaxis.model.deployment import Deployment
from twoaxis.model.flops import Flops, Parameters, count_parameters, forward_flops, training_flops, uncounted
from twoaxis.model.presets import find_shape
from twoaxis.model.stages import Pipeline, plan
from twoaxis.model.variant import Contender, make_contender, with_method

if TYPE_CHECKING:
    from twoaxis.model.graft_config import TwoAxisConfig


class CostModel:
    """A shape, or the name of one, in a deployment, of which any method can be asked.

    The stream and mixer of the shape do not matter. No deployment is one H100 with a context of 4096.
    """

    def __init__(self, shape: ModelConfig | TwoAxisConfig | str, deployment: Deployment | None = None) -> None:
        self.deployment = deployment or Deployment()
        self.profile = find_profile(self.deployment.hardware)
        self.shape = find_shape(shape) if isinstance(shape, str) else shape

    @cached_property
    def plain(self) -> Costs:
        """Of the plain residual without a mixer."""
        return self._make(make_contender(), None)

    def of(self, method: Contender | str | None = None, mixer: str | None = None) -> Costs:
        """Of a stream as `NAME[:k=v,...]`, or a contender; and of a mixer."""
        return self._make(method if isinstance(method, Contender) else make_contender(method, mixer), self.plain)

    def _make(self, contender: Contender, plain: Costs | None) -> Costs:
        self.deployment.check(config := with_method(self.shape, contender))
        return Costs(contender.label, config, self.deployment, self.profile, plain)


def cost(
    shape: ModelConfig | TwoAxisConfig | str,
    method: Contender | str | None = None,
    deployment: Deployment | None = None,
    *,
    mixer: str | None = None,
) -> Costs:
    """What a method costs; arguments as those of `CostModel` and of its `of`."""
    return CostModel(shape, deployment).of(method, mixer)


@dataclass(frozen=True, eq=False)
class Costs:
    """What a method costs on a shape in a deployment."""

    label: str  # of the method
    shape: ModelConfig | TwoAxisConfig  # the model with the method
    deployment: Deployment
    profile: Profile  # of the device
    base: Costs | None = None  # those of the same shape with the plain residual; None is that these are they

    @property
    def plain(self) -> Costs:
        """Of the same shape with the plain residual and no mixer."""
        return self.base or self

    # Counts.

    @cached_property
    def model(self) -> Any:
        """The decoder or the graft on meta tensors."""
        return meta_model(self.shape, self.deployment.dtype)

    @cached_property
    def parameters(self) -> Parameters:
        """By part."""
        return count_parameters(self.model)

    @property
    def parameters_added(self) -> int:
        """Beyond the plain residual's."""
        return self.parameters.total - self.plain.parameters.total

    @cached_property
    def forward(self) -> Flops:
        """Operations per token of a forward pass."""
        return forward_flops(self.model, self.deployment.context)

    @cached_property
    def training(self) -> Flops:
        """Operations per token of a training pass."""
        again = int(self.deployment.recompute != "none")
        return training_flops(self.model, self.deployment.context, recompute=again)

    @cached_property
    def uncounted(self) -> tuple[str, ...]:
        """Classes of a family's modules whose operations are counted for their matrices alone."""
        return uncounted(self.model)

    @cached_property
    def unmetered(self) -> str | None:
        """Why the model cannot run on meta tensors, where it cannot: then it has no bytes, no memory and no times."""
        if isinstance(self.shape, ModelConfig):
            return None
        try:
            trace_training(self.model, 1, 2, self.device)
            trace_decoding(self.model, 1, 3, self.device)
        except Exception as error:  # whatever a family's code does with tensors that have no numbers
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return None

    @property
    def activations(self) -> int:
        """Bytes a micro-batch leaves for its backward pass over all devices, nothing recomputed."""
        return self.trained.saved

    @cached_property
    def live(self) -> Live:
        """What the stream's state holds across sites at its most."""
        d, numbers = self.deployment, count_live(self.model.stream)
        tokens = (d.micro_batch * d.context, d.batch * d.chunk_tokens)
        return Live(numbers, *(numbers * SIZES[d.dtype] * n for n in tokens))

    @property
    def kept(self) -> Kept:
        """Bytes kept between tokens."""
        return self.decoded.kept

    @cached_property
    def pipeline(self) -> Pipeline:
        """What crosses stages."""
        return plan(self.model, self.deployment.pipeline_stages, self.deployment.virtual_stages)

    @cached_property
    def memory(self) -> DeviceMemory:
        """Of the fullest device in training."""
        return self.memory_with(self.deployment)

    def memory_with(self, deployment: Deployment) -> DeviceMemory:
        """The same where other activations are made anew."""
        again = self.remade if deployment.recompute != "none" else None
        return device_memory(self.shape, self.parameters, self.trained, again, self.pipeline, deployment)

    @property
    def fits(self) -> bool:
        """Whether that is less than the device has."""
        return self.memory.total <= self.profile.memory

    # Times.

    @cached_property
    def train_time(self) -> Seconds:
        """One micro-batch on one device, forward and backward, with its transfers; no optimiser, no bubble."""
        trace = self.trained if self.deployment.recompute == "none" else self.remade
        return train_seconds(self.shape.hidden_size, trace, self.pipeline, self.deployment, self.profile)

    @cached_property
    def prefill_time(self) -> Seconds:
        """The context of all sequences, without transfers."""
        return infer_seconds(self.prefilled, self.deployment, self.profile)

    @cached_property
    def decode_time(self) -> Seconds:
        """One token of all sequences, without transfers."""
        return infer_seconds(self.decoded, self.deployment, self.profile)

    @property
    def train(self) -> Seconds:
        """Ratio of a training pass to the plain residual's; both run the same way."""
        return self.train_time.ratio(self.plain.train_time)

    @property
    def prefill(self) -> Seconds:
        """Ratio of a prefill."""
        return self.prefill_time.ratio(self.plain.prefill_time)

    @property
    def decode(self) -> Seconds:
        """Ratio of a decoding step."""
        return self.decode_time.ratio(self.plain.decode_time)

    @cached_property
    def kernels(self) -> Kernels:
        """What the stream of a training pass runs in at present."""
        found = Counter({k: n for k, n in self.trained.forward["stream"].eager.items() if k != VIEW})
        own = sorted({kernel.op for kernel in found if kernel.op.startswith("twoaxis::")})
        return Kernels(found.total() / self.trained.sites, tuple(own))

    # Passes, traced when something needs them.

    @property
    def device(self) -> str:
        """Whose kernels are counted."""
        return "cpu" if self.profile.kind == "cpu" else "cuda"

    @cached_property
    def trained(self) -> TrainTrace:
        """A training pass that keeps everything."""
        return self._train("none")

    @cached_property
    def remade(self) -> TrainTrace:
        """A training pass that makes blocks anew."""
        return self._train("block")

    def _train(self, recompute: Recompute) -> TrainTrace:
        d = self.deployment
        return self._traced(lambda model: trace_training(model, d.micro_batch, d.context, self.device, recompute))

    @cached_property
    def prefilled(self) -> StepTrace:
        """The whole context; it has what the stream moves per token, `eager`, `fused` and at each of its `sites`."""
        d = self.deployment
        return self._traced(lambda model: trace_step(model, d.batch, d.context, self.device))

    @cached_property
    def decoded(self) -> StepTrace:
        """The last token of the context."""
        d = self.deployment
        return self._traced(lambda model: trace_decoding(model, d.batch, d.context, self.device))

    def _traced(self, trace: Callable[[Any], Trace]) -> Trace:
        """A pass; where each call is timed, every one must be there."""
        if self.profile.clock is not None:
            return trace(self.model)
        return trace_deep(self.model, self.shape, self.deployment.dtype, trace)


class Live(NamedTuple):
    """What a state holds."""

    numbers: int  # per token
    training: int  # bytes in a training pass
    prefill: int  # bytes in a prefill pass of all sequences


class Kernels(NamedTuple):
    """What a stream runs in."""

    calls: float  # per sub-layer of a forward pass, pre-norms included
    own: tuple[str, ...]  # kernels of this library among them

    def __str__(self) -> str:
        own = f"with {', '.join(self.own)}" if self.own else "none of them a kernel made for it"
        return f"{self.calls:.3g} calls a sub-layer, {own}"
