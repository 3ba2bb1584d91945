"""The kit passes small correct streams and catches one planted fault each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.verify.streams import Bank, Gain, History, NoOptions, One, Pair, Past, Runs, Two
from twoaxis.base.method import ParameterGroup
from twoaxis.depth.deep_delta import DeepDelta
from twoaxis.depth.manifold_hyper_connections import ManifoldHyperConnections
from twoaxis.depth.parallel import Route, Row, Streams
from twoaxis.depth.registry import STREAMS
from twoaxis.depth.site import OUT, Site
from twoaxis.depth.stream import Cost, Layout, Seen, Stream, Tokens
from twoaxis.ring import Ring
from twoaxis.sequence.mixer import LocalOperator
from twoaxis.sequence.registry import MIXERS
from twoaxis.sequence.short_conv import ShortConv, ShortConvConfig
from twoaxis.show import terminal
from twoaxis.verify import check_mixer, check_stream
from twoaxis.verify.mixer import MIXER_CHECKS
from twoaxis.verify.stream import STREAM_CHECKS

DEFINITION = "definition: values and every gradient"
DIFFERENCES = "gradients: finite differences"
MODULE = "purity: nothing is kept on the module"
INPUTS = "purity: inputs and old states are untouched"
INTERLEAVE = "purity: passes interleave"
COPIES = "purity: deep copies continue"
PACK = "pack: continues after any block"
STRUCTURE = "pack: structure depends on the site alone"
FUTURE = "time: the past does not see the future"
DOCUMENTS = "time: documents and padding stay apart"
DEPTH = "depth: every increment and the embedding arrive"
NEUTRAL = "neutral class"
NOWHERE = "placement: none = standard"
ANYWHERE = "placement: anywhere"
MEMORY = "memory grows linearly with depth"
LEARN = "gradients: each parameter learns or is dead"


@pytest.mark.parametrize("cls", [Gain, Pair, History, Runs])
def test_correct_streams_pass(cls: type[Stream]) -> None:
    names = STREAMS.names()
    report = check_stream(cls)
    report.raise_if_failed()
    assert report.ok
    assert len(report.checks) == len(STREAM_CHECKS) >= 30
    assert STREAMS.names() == names, "the kit leaves the registry as it was"


class LeaksTheFuture(Gain):
    """Every read subtracts a mean over all tokens."""

    def _read(self, value: One, site: Site) -> Seen:
        return Seen(value.x - 0.1 * value.x.mean(1, keepdim=True) if self.uses(site) else value.x)


class KeepsTheLastIncrement(Gain):
    """A diagnostic left on the module: no number is wrong, but copies and recomputation see it."""

    def _write(self, value: One, site: Site, y: Tensor, seen: Seen, c: Seen) -> One:
        self.last = y.detach()
        return super()._write(value, site, y, seen, c)


class KeepsTheHistoryInAList(Gain):
    """The history of the pass in a list of the module, emptied when a pass begins."""

    def __init__(self, config: Any, layout: Layout) -> None:
        super().__init__(config, layout)
        self.history: list[Tensor] = []

    def _open(self, x: Tensor, tokens: Tokens) -> One:
        self.history.clear()
        return One(x)

    def _write(self, value: One, site: Site, y: Tensor, seen: Seen, c: Seen) -> One:
        self.history.append(self._scaled(site, y))
        return One(value.x + self.history[-1])

    def _read(self, value: One, site: Site) -> Seen:
        return Seen(value.x + 0.1 * self.history[0] if self.history and self.uses(site) else value.x)


class CachesOnTheClass(Gain):
    """The same on the class, where no attribute of the module shows it."""

    cache: dict[str, Tensor] = {}  # noqa: RUF012

    def _open(self, x: Tensor, tokens: Tokens) -> One:
        self.cache["embedding"] = x
        return One(x)


class Late(NamedTuple):
    x: Tensor
    before: Tensor


class ForgetsTheOutputRead(Gain):
    """The head gets the state before the last sub-layer."""

    def _open(self, x: Tensor, tokens: Tokens) -> Late:
        return Late(x, x)

    def _read(self, value: Late, site: Site) -> Seen:
        return Seen(value.before if site.kind == OUT and self.uses(site) else value.x)

    def _write(self, value: Late, site: Site, y: Tensor, seen: Seen, c: Seen) -> Late:
        return Late(value.x + self._scaled(site, y), value.x)

    def _unpack(self, tensors: tuple[Tensor, ...], site: Site, tokens: Tokens) -> Late:
        return Late(*tensors)

    def cost(self) -> Cost:
        return super().cost()._replace(live=2 * self.layout.width)


class TransposesItsMixing(Pair):
    """The mixing matrix the wrong way round; seen because the neutral matrix is not symmetric."""

    def matrix(self, site: Site) -> Tensor:
        return super().matrix(site).mT


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2.0 * grads[0]


class HasABackwardOffByTwo(Gain):
    """The numbers are right; the gradient of one gain is doubled by a backward pass written by hand."""

    def _scaled(self, site: Site, y: Tensor) -> Tensor:
        gain = self.gain[self.rows[site.index]] if self.uses(site) else None
        if gain is None or site.index != 1:
            return super()._scaled(site, y)
        twice: Tensor = _Twice.apply(gain)  # type: ignore[assignment]
        return (y * twice).to(y.dtype)


class DetachesASource(History):
    """Reads after the first site take the embedding as a constant; every increment still arrives."""

    def mixed(self, value: Past, theta: Tensor) -> Tensor:
        first, *rest = value.states
        return super().mixed(Past(value.x, (first.detach() if rest else first, *rest)), theta)


class ScalesItsReadWrongly(History):
    """One per cent too much of the history; neutral all the same, because the weights are then zero."""

    def mixed(self, value: Past, theta: Tensor) -> Tensor:
        return 1.01 * super().mixed(value, theta)


class MixesTransposed(ManifoldHyperConnections):
    """Carries stream j to stream i: every sum over rows and columns is still one."""

    def route(self, z: Tensor | None, h: Tensor, p: Row) -> Route:
        route = super().route(z, h, p)
        assert route.mix is not None
        return route._replace(mix=route.mix.mT)


class TakesTheValueFromTheNormalisedRead(DeepDelta):
    """The value is a map of the read before its norm."""

    def put(self, value: Streams, site: Site, p: Row, y: Tensor, seen: Seen, c: Seen) -> Streams:
        return super().put(value, site, p, y, seen._replace(x=c.x), c)


class DropsTheEmbedding(Runs):
    """Sources are sub-layer outputs alone once there are any."""

    def found(self, value: Bank, theta: Tensor) -> tuple[list[Tensor], Tensor]:
        sources, logits = super().found(value, theta)
        return (sources, logits) if len(sources) == 1 else ([torch.zeros_like(sources[0]), *sources[1:]], logits)


class AbsentPartialIsZero(Runs):
    """A run that has not begun counts as a source of zeros and takes its share of the softmax."""

    def found(self, value: Bank, theta: Tensor) -> tuple[list[Tensor], Tensor]:
        sources, logits = super().found(value, theta)
        if value.part is not None or len(sources) == 1:
            return sources, logits
        return [*sources, torch.zeros_like(sources[0])], torch.cat([logits, logits.new_zeros(1)])


class MutatesItsInput(Gain):
    """Adds in place."""

    def _write(self, value: One, site: Site, y: Tensor, seen: Seen, c: Seen) -> One:
        return One(
            value.x.add_(self._scaled(site, y)) if not value.x.requires_grad else value.x + self._scaled(site, y)
        )


class ScalesTheIncrementInPlace(Gain):
    """Changes the sub-layer's output, which others may still use."""

    def _scaled(self, site: Site, y: Tensor) -> Tensor:
        if torch.is_grad_enabled() or not self.uses(site):
            return super()._scaled(site, y)
        return y.mul_(self.gain[self.rows[site.index]])


class MiscountsItsParameters(Gain):
    def cost(self) -> Cost:
        return super().cost()._replace(parameters=len(self.rows) + 1)


class HasAnUnusedParameter(Gain):
    def __init__(self, config: Any, layout: Layout) -> None:
        super().__init__(config, layout)
        self.unused = nn.Parameter(torch.zeros(1 if self.rows else 0))

    def reset_parameters(self, generator: torch.Generator | None = None, std: float = 0.02) -> None:
        super().reset_parameters(generator)
        with torch.no_grad():
            self.unused.zero_()

    def cost(self) -> Cost:
        return super().cost()._replace(parameters=sum(p.numel() for p in self.parameters()))


class KeepsParametersOfOtherSites(Gain):
    """One gain per sub-layer whether the method acts there or not."""

    def __init__(self, config: Any, layout: Layout) -> None:
        super().__init__(config, layout)
        self.rows = {site.index: site.index for site in layout.sublayers}
        self.gain = nn.Parameter(torch.empty(len(self.rows)))


class CallsALiveParameterDead(Gain):
    def dead(self) -> dict[str, str]:
        return {"gain[0]": "it is not"} if self.rows else {}


class IsNotNeutral(Gain):
    """Almost neutral: caught because the class is declared bitwise."""

    def neutral_(self) -> None:
        with torch.no_grad():
            self.gain.fill_(1.0 + 1e-9)


class ForgetsATensor(Pair):
    """Packs the first stream alone."""

    def _pack(self, value: Two, site: Site) -> tuple[Tensor, ...]:
        return (value.first,)

    def _unpack(self, tensors: tuple[Tensor, ...], site: Site, tokens: Tokens) -> Two:
        return Two(tensors[0], tensors[0])


class PacksWhatDependsOnTheInput(Pair):
    """Leaves a stream out of the packet when it happens to be small."""

    def _pack(self, value: Two, site: Site) -> tuple[Tensor, ...]:
        return (value.first, value.second) if value.first.shape[0] == 2 else (value.first,)


class StacksAtEveryLayer(History):
    """The same numbers from one tensor per read that holds all states."""

    def mixed(self, value: Past, theta: Tensor) -> Tensor:
        stacked = torch.stack(value.states)
        weight = theta.to(torch.promote_types(stacked.dtype, torch.float32)).view(-1, 1, 1, 1)
        return (stacked * weight).sum(0).to(value.x.dtype)


class LeavesAParameterUnset(Gain):
    def reset_parameters(self, generator: torch.Generator | None = None, std: float = 0.02) -> None:
        with torch.no_grad():
            self.gain[1:].fill_(1.0)


class WidensItsRead(Gain):
    """Reads come in float32 whatever the activations."""

    def _read(self, value: One, site: Site) -> Seen:
        return Seen(value.x.to(torch.promote_types(value.x.dtype, torch.float32)))


class DecaysTwice(Gain):
    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        return (ParameterGroup(("gain",)), ParameterGroup(("gain",), decay=True))


class UnderstatesItsOperations(History):
    def cost(self) -> Cost:
        return super().cost()._replace(flops=0)


class UnderstatesItsState(History):
    def cost(self) -> Cost:
        return super().cost()._replace(live=self.layout.width)


class AcceptsAnyState(Gain):
    def _check(self, state: Any, site: Site) -> None:
        pass


class CrossesDocuments(Gain):
    """A shift along time that knows nothing of documents and keeps no memory."""

    def _read(self, value: One, site: Site) -> Seen:
        if not self.uses(site):
            return Seen(value.x)
        shifted = torch.cat([torch.zeros_like(value.x[:, :1]), value.x[:, :-1]], dim=1)
        return Seen(value.x + 0.1 * shifted)


class CallsItselfNeutralByNothing(Gain):
    """Says that it has no neutral parameters and sets some."""

    @property
    def neutral(self) -> Any:
        return "none"


FAULTS: dict[type[Stream], tuple[str, ...]] = {
    LeaksTheFuture: (FUTURE, "time: chunks = one pass", DOCUMENTS, NEUTRAL),
    KeepsTheLastIncrement: (MODULE,),
    KeepsTheHistoryInAList: (INTERLEAVE, MODULE),
    CachesOnTheClass: (MODULE,),
    ForgetsTheOutputRead: (DEPTH, NEUTRAL),
    TransposesItsMixing: (NEUTRAL, DEFINITION),
    HasABackwardOffByTwo: (DEFINITION, DIFFERENCES),
    DetachesASource: (DEFINITION, DIFFERENCES),
    ScalesItsReadWrongly: (DEFINITION,),
    MixesTransposed: (DEFINITION,),
    TakesTheValueFromTheNormalisedRead: (DEFINITION,),
    DropsTheEmbedding: (DEPTH, NEUTRAL),
    AbsentPartialIsZero: (NEUTRAL, "weights match sources"),
    MutatesItsInput: (INPUTS,),
    ScalesTheIncrementInPlace: (INPUTS,),
    MiscountsItsParameters: ("cost: parameters",),
    HasAnUnusedParameter: (LEARN,),
    KeepsParametersOfOtherSites: (NOWHERE, ANYWHERE),
    CallsALiveParameterDead: (LEARN,),
    IsNotNeutral: (NEUTRAL,),
    ForgetsATensor: (PACK,),
    PacksWhatDependsOnTheInput: (STRUCTURE,),
    StacksAtEveryLayer: (MEMORY,),
    LeavesAParameterUnset: ("start: every parameter is set",),
    WidensItsRead: ("dtypes",),
    DecaysTwice: ("parameter groups",),
    UnderstatesItsOperations: ("cost: flops",),
    UnderstatesItsState: ("cost: live",),
    AcceptsAnyState: ("misuse is refused",),
    CrossesDocuments: ("time: chunks = one pass", DOCUMENTS),
    CallsItselfNeutralByNothing: (NEUTRAL,),
}


@pytest.mark.parametrize("cls", list(FAULTS), ids=lambda cls: cls.__name__)
def test_a_planted_fault_is_caught(cls: type[Stream]) -> None:
    report = check_stream(cls, only=FAULTS[cls])
    assert {check.name for check in report.failed} == set(FAULTS[cls]), report.failed
    with pytest.raises(AssertionError, match=r"measured \S+, bound"):
        report.raise_if_failed()


def test_a_fault_is_caught_by_the_check_that_names_it() -> None:
    assert {check.name for check in check_stream(MiscountsItsParameters).failed} == {"cost: parameters", ANYWHERE}
    assert {check.name for check in check_stream(TransposesItsMixing).failed} == {NEUTRAL, DEFINITION}
    assert {check.name for check in check_stream(StacksAtEveryLayer).failed} == {MEMORY}


def test_the_exponent_of_a_stack_is_near_two() -> None:
    stacked, summed = (check_stream(c, only=[MEMORY])[MEMORY] for c in (StacksAtEveryLayer, History))
    assert 1.5 < stacked.measured < 2.1
    assert summed.measured <= 1.05


# Mixers.


class Shift(LocalOperator):
    """x_t W0 + x_{t-1} W1 per channel, as a correct operator of its own."""

    name = "shift"
    Config = NoOptions
    window = 2

    def __init__(self, channels: int, config: NoOptions | None = None) -> None:
        super().__init__(channels, config)
        self.inner = ShortConv(channels, ShortConvConfig(kernel=2, activation="none", start="uniform"))

    @classmethod
    def points(cls, config: NoOptions) -> tuple[str, ...]:
        return ("site",)

    def step(self, x: Tensor, past: Ring, *, reach: Tensor | None = None) -> tuple[Tensor, Ring]:
        return self.inner.step(x, past, reach=reach)

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        self.inner.reset_parameters(std, generator)

    def definition(self, x: Tensor) -> Tensor:
        before, now = self.inner.weight[:, 0].unbind(-1)
        return x * now + torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1) * before

    def flops(self) -> int:
        return self.inner.flops()


class LooksAhead(Shift):
    def step(self, x: Tensor, past: Ring, *, reach: Tensor | None = None) -> tuple[Tensor, Ring]:
        y, ring = super().step(x, past, reach=reach)
        return y + 0.1 * x.flip(1), ring


class ForgetsTheCurrentTokenInItsBackward(Shift):
    """Right numbers, and no gradient along the tap of the current token."""

    def step(self, x: Tensor, past: Ring, *, reach: Tensor | None = None) -> tuple[Tensor, Ring]:
        y, ring = super().step(x, past, reach=reach)
        share = x * self.inner.weight[:, 0, 1]
        return y - share + share.detach(), ring


class IgnoresItsMemory(Shift):
    """What a published implementation does: chunks after the first begin from nothing."""

    def step(self, x: Tensor, past: Ring, *, reach: Tensor | None = None) -> tuple[Tensor, Ring]:
        return super().step(x, past if x.shape[1] == 1 else self.start(), reach=reach)


class IgnoresDocuments(Shift):
    def step(self, x: Tensor, past: Ring, *, reach: Tensor | None = None) -> tuple[Tensor, Ring]:
        return super().step(x, past)


class KeepsTooMuch(Shift):
    def start(self, spare: int = 0) -> Ring:
        return super().start(spare + 3)


class KeepsNothingToSpare(Shift):
    def start(self, spare: int = 0) -> Ring:
        return super().start(0)


MIXER_FAULTS = {
    ForgetsTheCurrentTokenInItsBackward: (DEFINITION, DIFFERENCES),
    LooksAhead: ("the past does not see the future",),
    IgnoresItsMemory: ("chunks = one pass", "reorder and repeat"),
    IgnoresDocuments: ("packed documents = separate documents", "left padding"),
    KeepsTooMuch: ("cost: kept, constant in time",),
    KeepsNothingToSpare: ("trim within the spare positions",),
}


def test_a_correct_mixer_passes() -> None:
    names = MIXERS.names()
    report = check_mixer(Shift)
    report.raise_if_failed()
    assert len(report.checks) == len(MIXER_CHECKS) >= 15
    assert MIXERS.names() == names


@pytest.mark.parametrize("operator", list(MIXER_FAULTS), ids=lambda cls: cls.__name__)
def test_a_planted_fault_of_a_mixer_is_caught(operator: type[Shift]) -> None:
    expected = MIXER_FAULTS[operator]
    report = check_mixer(operator, only=expected)
    assert {check.name for check in report.failed} == set(expected), report.failed


# Reports.


@dataclass(frozen=True, kw_only=True)
class SomeOptions:
    power: float = 1.0


class Optional(Gain):
    """Fails with one of its options only."""

    Config = SomeOptions
    variants = ({}, {"power": 2.0})

    def cost(self) -> Cost:
        return super().cost()._replace(live=int(self.config.power * self.layout.width))


def test_a_report_names_the_options_that_fail() -> None:
    report = check_stream(Optional, only=["declarations", "cost: live"])
    check = report["cost: live"]
    assert not report.ok
    assert not check.holds
    assert check.instances == 2
    assert "power=2.0" in check.detail
    assert "1 of 2 variants" in check.detail
    assert terminal.render(report.document()).count("FAIL") == 2  # the head line and the check
    assert report.to_dict()["checks"][0]["name"] == "declarations"
    assert check_stream(Optional, variants=[{}], only=["cost: live"]).ok
    with pytest.raises(KeyError, match="there is no check 'x'"):
        report["x"]


def test_an_exception_is_a_failure_that_names_it() -> None:
    class Unfinished(Gain):
        def _pack(self, value: One, site: Site) -> tuple[Tensor, ...]:
            raise NotImplementedError("pack is not written")

    report = check_stream(Unfinished, only=[PACK])
    check = report[PACK]
    assert math.isinf(check.measured)
    assert "NotImplementedError: pack is not written" in check.detail
    assert report.to_dict()["checks"][0]["measured"] is None


def test_no_variants_and_unknown_checks_are_errors() -> None:
    with pytest.raises(ValueError, match="no variants"):
        check_stream(Gain, variants=[])
    with pytest.raises(ValueError, match="there is no check 'pack'"):
        check_stream(Gain, only=["pack"])
