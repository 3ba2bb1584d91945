"""The kit passes small correct streams and catches one planted fault each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.verify.streams import Bank, Echo, Gain, History, NoOptions, One, Pair, Past, Runs, Turn, Two
from twoaxis.base.method import ParameterGroup
from twoaxis.depth.registry import STREAMS
from twoaxis.depth.site import OUT, Site
from twoaxis.depth.stream import Apply, Layout, Seen, Stream, Tokens
from twoaxis.depth.walk import visit
from twoaxis.ring import Ring
from twoaxis.sequence.mixer import LocalOperator
from twoaxis.sequence.registry import MIXERS
from twoaxis.sequence.short_conv import ShortConv, ShortConvConfig
from twoaxis.verify import check

DEFINITION = "definition: values and every gradient"
DIFFERENCES = "gradients: finite differences"
MODULE = "purity: nothing is kept on the module"
INPUTS = "purity: inputs and old states are untouched"
INTERLEAVE = "purity: passes interleave"
COPIES = "purity: deep copies continue"
PACK = "pack: continues after any block"
STRUCTURE = "pack: structure depends on the site alone"
FUTURE = "time: the past does not see the future"
CHUNKS = "time: chunks = one pass"
DOCUMENTS = "time: packed documents = separate documents"
PADDING = "time: left padding changes nothing"
DEPTH = "depth: every increment and the embedding arrive"
NEUTRAL = "neutral class"
NOWHERE = "placement: none = standard"
ANYWHERE = "placement: anywhere"
MEMORY = "memory grows linearly with depth"
STEPPING = "gradients: optimiser steps inside backward"
BEGUN = "gradients: begun without, continued with them"
GROUPS = "parameter groups"
COPIED = "gradients: continued on a deep copy"
INDEPENDENT = "definition: independent of the fast form"
LEARN = "gradients: each parameter learns or is dead"


@pytest.mark.parametrize("cls", [Gain, Echo, Turn, Pair, History, Runs])
def test_correct_streams_pass(cls: type[Stream]) -> None:
    names = STREAMS.names()
    report = check(cls)
    report.raise_if_failed()
    assert len(report.results) >= 40
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


class TransposesADoublyStochasticMixing(Turn):
    """Carries stream j to stream i: every sum over rows and columns is still one, and the start is symmetric."""

    def matrix(self, site: Site) -> Tensor:
        return super().matrix(site).mT


class TakesTheValueFromTheNormalisedRead(Echo):
    """The value is a map of the read before its norm."""

    def _write(self, value: One, site: Site, y: Tensor, seen: Seen, c: Seen) -> One:
        return super()._write(value, site, y, c, c)


class LosesTheScaleInItsBackward(Echo):
    """The value is right and its gradient misses the factor in front of it."""

    def value(self, x: Tensor) -> Tensor:
        value = super().value(x)
        return (value - value / self.scale).detach() + value / self.scale


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


class HasAnUnusedParameter(Gain):
    def __init__(self, config: Any, layout: Layout) -> None:
        super().__init__(config, layout)
        self.parameter("unused", 1, needed=bool(self.rows))


class KeepsParametersOfOtherSites(Gain):
    """One gain per sub-layer whether the method acts there or not."""

    def __init__(self, config: Any, layout: Layout) -> None:
        super().__init__(config, layout)
        self.rows = {site.index: site.index for site in layout.sublayers}
        self.parameter("gain", len(self.rows), start=1.0, neutral=1.0)


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
    def flops(self) -> int:
        return 0


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

    def neutral_(self) -> None:
        self.reset_parameters()

    @property
    def neutral(self) -> Any:
        return "none"


class Carried(NamedTuple):
    x: Tensor
    gain: Tensor


class CarriesItsParameter(Gain):
    """The gains of the stream that opened the pass travel in the state, with or without their gradients."""

    def _open(self, x: Tensor, tokens: Tokens) -> Any:
        return Carried(x, self.gain * 1.0)

    def _write(self, value: Any, site: Site, y: Tensor, seen: Seen, c: Seen) -> Any:
        gain = value.gain[self.rows[site.index]] if self.uses(site) else 1.0
        return Carried(value.x + (y * gain).to(y.dtype), value.gain)

    def _pack(self, value: Any, site: Site) -> tuple[Tensor, ...]:
        return (value.x,)

    def _unpack(self, tensors: tuple[Tensor, ...], site: Site, tokens: Tokens) -> Any:
        return Carried(tensors[0], self.gain * 1.0)


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, gains: list[Tensor]) -> Tensor:
        ctx.gains = gains  # in a list, autograd does not know that it is used
        return y * gains[0].detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.gains[0], None


class ReadsAParameterWhenItIsTooLate(Gain):
    """Each increment is scaled by the last gain too, which a backward pass reads when it has been stepped."""

    def __init__(self, config: Any, layout: Layout) -> None:
        super().__init__(config, layout)
        self.drop("gain")
        self.gain: Any = nn.ParameterList(torch.empty(()) for _ in self.rows)

    def reset_parameters(self, generator: torch.Generator | None = None, std: float = 0.02) -> None:
        with torch.no_grad():
            for gain in self.gain:
                gain.fill_(1.0)

    def _scaled(self, site: Site, y: Tensor) -> Tensor:
        row = self.rows[site.index]
        late: Tensor = _Late.apply(y, [self.gain[-1]]) if row + 1 < len(self.rows) else y  # type: ignore[assignment]
        return late * self.gain[row]


class DefinesItselfByItsReads(Gain):
    """The definition goes through the state, so that whatever is wrong is wrong in both."""

    def definition(self, x: Tensor, apply: Apply) -> Tensor:
        return self.close(visit(self, self.open(x), self.sites, apply))


class MissesATermOfItsRead(Runs):
    """The sum begun is read with the weight of the newest run; no weight says so."""

    def _read(self, value: Bank, site: Site) -> Seen:
        seen = super()._read(value, site)
        return seen if value.part is None or not self.uses(site) else Seen(seen.x - 0.5 * value.part)


FAULTS: dict[type[Stream], tuple[str, ...]] = {
    LeaksTheFuture: (FUTURE, CHUNKS, DOCUMENTS, PADDING, NEUTRAL),
    KeepsTheLastIncrement: (MODULE,),
    KeepsTheHistoryInAList: (INTERLEAVE, MODULE),
    CachesOnTheClass: (MODULE,),
    ForgetsTheOutputRead: (DEPTH, NEUTRAL),
    TransposesItsMixing: (NEUTRAL, DEFINITION),
    HasABackwardOffByTwo: (DEFINITION, DIFFERENCES),
    DetachesASource: (DEFINITION, DIFFERENCES),
    ScalesItsReadWrongly: (DEFINITION,),
    TransposesADoublyStochasticMixing: (DEFINITION,),
    LosesTheScaleInItsBackward: (DEFINITION, DIFFERENCES),
    TakesTheValueFromTheNormalisedRead: (DEFINITION,),
    DropsTheEmbedding: (DEPTH, NEUTRAL),
    AbsentPartialIsZero: (NEUTRAL, "weights match sources"),
    MutatesItsInput: (INPUTS,),
    ScalesTheIncrementInPlace: (INPUTS,),
    HasAnUnusedParameter: (LEARN,),
    KeepsParametersOfOtherSites: (NOWHERE, ANYWHERE),
    CallsALiveParameterDead: (LEARN,),
    IsNotNeutral: (NEUTRAL,),
    ForgetsATensor: (PACK,),
    PacksWhatDependsOnTheInput: (STRUCTURE,),
    StacksAtEveryLayer: (MEMORY,),
    LeavesAParameterUnset: ("start: every parameter is set",),
    WidensItsRead: ("dtypes",),
    DecaysTwice: (GROUPS,),
    UnderstatesItsOperations: ("cost: flops",),
    AcceptsAnyState: ("misuse is refused",),
    CrossesDocuments: (CHUNKS, DOCUMENTS, PADDING),
    CarriesItsParameter: (BEGUN, COPIED),
    ReadsAParameterWhenItIsTooLate: (STEPPING, DIFFERENCES),
    DefinesItselfByItsReads: (INDEPENDENT,),
    MissesATermOfItsRead: (NEUTRAL,),
    CallsItselfNeutralByNothing: (NEUTRAL,),
}


@pytest.mark.parametrize("cls", list(FAULTS), ids=lambda cls: cls.__name__)
def test_a_planted_fault_is_caught(cls: type[Stream]) -> None:
    report = check(cls, only=FAULTS[cls])
    assert {result.name for result in report.failed} == set(FAULTS[cls]), report.results
    with pytest.raises(AssertionError, match=r"measured \S+, bound"):
        report.raise_if_failed()


@pytest.mark.parametrize(
    ("cls", "names"),
    [(TransposesItsMixing, {NEUTRAL, DEFINITION}), (StacksAtEveryLayer, {MEMORY}), (DecaysTwice, {GROUPS})],
)
def test_a_fault_is_caught_by_the_claim_that_names_it(cls: type[Stream], names: set[str]) -> None:
    assert {result.name for result in check(cls).failed} == names


def test_the_exponent_of_a_stack_is_near_two() -> None:
    (stacked,), (summed,) = (check(cls, only=[MEMORY]).results for cls in (StacksAtEveryLayer, History))
    assert 1.5 < stacked.error < 2.1
    assert summed.error <= 1.05


class MisspellsItsRead(Stream):
    """A stream of its own with one letter out of place."""

    name = "misspelt"
    Config = NoOptions
    _open, _write, _pack, _unpack = Gain._open, History._write, Gain._pack, Gain._unpack
    _raed = Gain._read


class RaisesInItsRead(Gain):
    def _read(self, value: One, site: Site) -> Seen:
        return Seen(value.y)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (MisspellsItsRead, r"MisspellsItsRead does not define _read \(is it meant by '_raed'\?\)$"),
        (
            RaisesInItsRead,
            r"raises AttributeError: 'One' object has no attribute 'y' \(test_planted_faults.py, line \d+\)$",
        ),
    ],
)
def test_what_cannot_run_is_one_failure(cls: type[Stream], said: str) -> None:
    for only in ((), [PACK]):
        report = check(cls, only=only)
        (result,) = report.results
        assert result.name == "declarations"
        assert re.search(said, result.detail), result.detail
        assert len(report.waiting) == (1 if only else 40)


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


class GrowsItsMemory(Shift):
    """A window as long as the sequence, for an operator that sees two tokens."""

    def start(self, spare: int = 0) -> Ring:
        return Ring(None, axis=1)

    def step(self, x: Tensor, past: Ring, *, reach: Tensor | None = None) -> tuple[Tensor, Ring]:
        y, _ = super().step(x, super().start()._replace(pieces=past.pieces), reach=reach)
        return y, past.append(x)


class IsNeutralByNameAlone(Shift):
    @property
    def neutral(self) -> Any:
        return "bitwise"

    def neutral_(self) -> None:
        with torch.no_grad():
            self.inner.weight.mul_(1e-9)


class KeepsNothingToSpare(Shift):
    def start(self, spare: int = 0) -> Ring:
        return super().start(0)


MIXER_FAULTS = {
    ForgetsTheCurrentTokenInItsBackward: (DEFINITION, DIFFERENCES),
    LooksAhead: (FUTURE, CHUNKS),
    IgnoresItsMemory: (CHUNKS, "time: reordered and repeated rows continue", "time: trimmed tokens leave no trace"),
    IgnoresDocuments: (DOCUMENTS, PADDING),
    KeepsTooMuch: ("cost: kept",),
    KeepsNothingToSpare: ("time: trimmed tokens leave no trace",),
    GrowsItsMemory: ("time: memory does not grow", "cost: kept"),
    IsNeutralByNameAlone: ("neutral mixer",),
}


def test_a_correct_mixer_passes() -> None:
    names = MIXERS.names()
    report = check(Shift)
    report.raise_if_failed()
    assert len(report.results) >= 20
    assert MIXERS.names() == names


@pytest.mark.parametrize("operator", list(MIXER_FAULTS), ids=lambda cls: cls.__name__)
def test_a_planted_fault_of_a_mixer_is_caught(operator: type[Shift]) -> None:
    expected = MIXER_FAULTS[operator]
    assert {result.name for result in check(operator, only=expected).failed} == set(expected)


@dataclass(frozen=True, kw_only=True)
class SomeOptions:
    power: float = 1.0


class Optional(Gain):
    """Fails with one of its options only."""

    Config = SomeOptions
    variants = ({}, {"power": 2.0})

    def _scaled(self, site: Site, y: Tensor) -> Tensor:
        return super()._scaled(site, y) * self.config.power


def test_a_report_names_the_options_that_fail() -> None:
    report = check(Optional, only=["declarations", DEFINITION])
    assert [(result.name, result.holds) for result in report.results] == [("declarations", True), (DEFINITION, False)]
    assert "1 of 2 variants fail, the worst: power=2.0" in report.results[1].detail
    assert check(Optional, variants=[{}], only=[DEFINITION]).ok
    with pytest.raises(ValueError, match="no variants"):
        check(Gain, variants=[])
