"""The kit passes small correct methods and catches one planted fault each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.verify.streams import Gain, History, NoOptions, One, Past
from twoaxis.base.method import ParameterGroup
from twoaxis.depth.registry import STREAMS
from twoaxis.depth.site import OUT, Site
from twoaxis.depth.stream import Seen, Stream, Tokens
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
PACK = "pack: continues after any block"
CHUNKS = "time: chunks = one pass"
DOCUMENTS = "time: packed documents = separate documents"
PADDING = "time: left padding changes nothing"
FUTURE = "time: the past does not see the future"
TRIM = "time: trimmed tokens leave no trace"
DEPTH = "depth: every increment and the embedding arrive"
NEUTRAL = "neutral class"
MEMORY = "memory grows linearly with depth"
LEARN = "gradients: each parameter learns or is dead"


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, gains: list[Tensor]) -> Tensor:
        ctx.gains = gains  # in a list, autograd does not know that it is used
        return y * gains[0].detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.gains[0], None


class KeepsTheHistoryInAList(Gain):
    """The history of the pass in a list of the module, emptied when a pass begins."""

    def __init__(self, *made: Any) -> None:
        super().__init__(*made)
        self.history: list[Tensor] = []

    def _open(self, x: Tensor, tokens: Tokens) -> One:
        self.history.clear()
        return One(x)

    def _write(self, value: One, site: Site, y: Tensor, seen: Seen, c: Seen) -> One:
        self.history.append(self._scaled(site, y))
        return One(value.x + self.history[-1])

    def _read(self, value: One, site: Site) -> Seen:
        return Seen(value.x + 0.1 * self.history[0] if self.history and self.uses(site) else value.x)


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


class CarriesItsParameter(Gain):
    """The gains of the stream that opened the pass travel in the state, with or without their gradients."""

    def _open(self, x: Tensor, tokens: Tokens) -> Any:
        return Late(x, self.gain * 1.0)

    def _write(self, value: Any, site: Site, y: Tensor, seen: Seen, c: Seen) -> Any:
        gain = value.before[self.rows[site.index]] if self.uses(site) else 1.0
        return Late(value.x + (y * gain).to(y.dtype), value.before)

    def _pack(self, value: Any, site: Site) -> tuple[Tensor, ...]:
        return (value.x,)

    def _unpack(self, tensors: tuple[Tensor, ...], site: Site, tokens: Tokens) -> Any:
        return self._open(tensors[0], tokens)


class ReadsAParameterWhenItIsTooLate(Gain):
    """Each increment is scaled by the last gain too, which a backward pass reads when it has been stepped."""

    def __init__(self, *made: Any) -> None:
        super().__init__(*made)
        self.drop("gain")
        self.gain: Any = nn.ParameterList(torch.empty(()) for _ in self.rows)

    def reset_parameters(self, generator: Any = None, std: float = 0.02) -> None:
        for gain in self.gain:
            nn.init.ones_(gain)

    def _scaled(self, site: Site, y: Tensor) -> Tensor:
        row = self.rows[site.index]
        late: Any = _Late.apply(y, [self.gain[-1]]) if row + 1 < len(self.rows) else y
        return late * self.gain[row]


class HasAnUnusedParameter(Gain):
    def __init__(self, *made: Any) -> None:
        super().__init__(*made)
        self.parameter("unused", 1, needed=bool(self.rows))


class KeepsParametersOfOtherSites(Gain):
    """One gain per sub-layer whether the method acts there or not."""

    def __init__(self, *made: Any) -> None:
        super().__init__(*made)
        self.rows = {site.index: site.index for site in self.layout.sublayers}
        self.parameter("gain", len(self.rows), start=1.0, neutral=1.0)


class CallsItselfNeutralByNothing(Gain):
    """Says that it has no neutral parameters and sets some."""

    neutral = "none"

    def neutral_(self) -> None:
        self.reset_parameters()


def made(name: str, base: type[Any], **methods: Any) -> type[Any]:
    """A class with a fault: `base` with other methods; a test is called after it."""
    return type(name, (base,), {"__module__": __name__, **methods})


def cached(self: Any, x: Tensor, tokens: Any) -> One:
    self.cache["embedding"] = x
    return One(x)


def constant_embedding(self: Any, value: Past, theta: Tensor) -> Tensor:
    """Reads after the first site take the embedding as a constant; every increment still arrives."""
    first, *rest = value.states
    return History.mixed(self, Past(value.x, (first.detach() if rest else first, *rest)), theta)


def stacked(self: Any, value: Past, theta: Tensor) -> Tensor:
    """The same numbers from one tensor per read that holds all states."""
    states = torch.stack(value.states)
    weight = theta.to(torch.promote_types(states.dtype, torch.float32)).view(-1, 1, 1, 1)
    return (states * weight).sum(0).to(value.x.dtype)


def half_set(self: Any, generator: Any = None, std: float = 0.02) -> None:
    self.gain.data[1:].fill_(1.0)


StacksAtEveryLayer = made("StacksAtEveryLayer", History, mixed=stacked)
DecaysTwice = made(
    *("DecaysTwice", Gain),
    parameter_groups=lambda self: (ParameterGroup(("gain",)), ParameterGroup(("gain",), decay=True)),
)


FAULTS: list[tuple[type[Any], tuple[str, ...]]] = [
    (KeepsTheHistoryInAList, ("purity: passes interleave", MODULE)),
    (
        CarriesItsParameter,
        ("gradients: begun without, continued with them", "gradients: continued on a deep copy"),
    ),
    (ForgetsTheOutputRead, (DEPTH, NEUTRAL)),
    (ReadsAParameterWhenItIsTooLate, ("gradients: optimiser steps inside backward", DIFFERENCES)),
    (HasAnUnusedParameter, (LEARN,)),
    (KeepsParametersOfOtherSites, ("placement: none = standard", "placement: anywhere")),
    (CallsItselfNeutralByNothing, (NEUTRAL,)),
    (
        made(
            *("LeaksTheFuture", Gain),
            _read=lambda self, value, site: Seen(
                value.x - 0.1 * value.x.mean(1, keepdim=True) if self.uses(site) else value.x
            ),
        ),
        (FUTURE, CHUNKS, DOCUMENTS, PADDING, NEUTRAL),
    ),
    (made("CachesOnTheClass", Gain, cache={}, _open=cached), (MODULE,)),
    (made("DetachesASource", History, mixed=constant_embedding), (DEFINITION, DIFFERENCES)),
    (made("DropsTheEmbedding", Gain, _open=lambda self, x, tokens: One(torch.zeros_like(x))), (DEPTH, NEUTRAL)),
    (
        made(
            *("WeighsTwoSourcesOfOne", Gain),
            sources=lambda self, site: ("embedding",),
            _weights=lambda self, value, site: value.x.new_ones(*value.x.shape[:2], 1, 2),
        ),
        ("weights match sources",),
    ),
    (
        made(
            *("MutatesItsInput", Gain),
            _write=lambda self, value, site, y, seen, c: One(
                (value.x.add if value.x.requires_grad else value.x.add_)(self._scaled(site, y))
            ),
        ),
        (INPUTS,),
    ),
    (made("CallsALiveParameterDead", Gain, dead=lambda self: {"gain[0]": "no"} if self.rows else {}), (LEARN,)),
    (
        made(
            *("PacksWhatDependsOnTheInput", History),
            _pack=lambda self, value, site: value.states if value.x.shape[0] == 2 else value.states[-1:],
        ),
        ("pack: structure depends on the site alone",),
    ),
    (StacksAtEveryLayer, (MEMORY,)),
    (made("LeavesAParameterUnset", Gain, reset_parameters=half_set), ("start: every parameter is set",)),
    (
        made(
            *("WidensItsRead", Gain),
            _read=lambda self, value, site: Seen(value.x.to(torch.promote_types(value.x.dtype, torch.float32))),
        ),
        ("dtypes",),
    ),
    (DecaysTwice, ("parameter groups",)),
    (made("UnderstatesItsOperations", History, flops=lambda self: 0), ("cost: flops",)),
    (made("AcceptsAnyState", Gain, _checked=lambda self, state, site: state), ("misuse is refused",)),
    (
        made(
            *("DefinesItselfByItsReads", Gain),
            definition=lambda self, x, apply: self.close(visit(self, self.open(x), self.sites, apply)),
        ),
        ("definition: independent of the fast form",),
    ),
]


@pytest.mark.parametrize(("cls", "claims"), FAULTS, ids=[cls.__name__ for cls, _ in FAULTS])
def test_a_planted_fault_is_caught(cls: type[Stream], claims: tuple[str, ...]) -> None:
    report = check(cls, only=claims)
    assert {result.name for result in report.failed} == set(claims), report.results
    with pytest.raises(AssertionError, match=r"measured \S+, bound"):
        report.raise_if_failed()


def test_a_fault_is_caught_by_the_claim_that_names_it_and_by_no_other() -> None:
    names = STREAMS.names()
    report = check(DecaysTwice)
    assert [result.name for result in report.failed] == ["parameter groups"]
    assert len(report.results) == 37
    assert STREAMS.names() == names, "the kit leaves the registry as it was"
    assert check(Gain, only=["parameter groups"]).ok, "without the fault"


def test_the_exponent_of_a_stack_is_near_two() -> None:
    (stack,), (summed,) = (check(cls, only=[MEMORY]).results for cls in (StacksAtEveryLayer, History))
    assert 1.5 < stack.error < 2.1
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


MISSING = r"raises AttributeError: 'One' object has no attribute 'y' \(test_planted_faults.py, line \d+\)$"


@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (MisspellsItsRead, r"MisspellsItsRead does not define _read \(is it meant by '_raed'\?\)$"),
        (RaisesInItsRead, MISSING),
    ],
)
def test_what_cannot_run_is_one_failure(cls: type[Stream], said: str) -> None:
    for only in ((), [PACK]):
        report = check(cls, only=only)
        (result,) = report.results
        assert result.name == "declarations"
        assert re.search(said, result.detail), result.detail
        assert len(report.waiting) == (1 if only else 36)


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

    def reset_parameters(self, generator: torch.Generator | None = None, std: float = 0.02) -> None:
        self.inner.reset_parameters(generator, std)

    def definition(self, x: Tensor) -> Tensor:
        before, now = self.inner.weight[:, 0].unbind(-1)
        return x * now + torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1) * before

    def flops(self) -> int:
        return self.inner.flops()


def looks_ahead(self: Any, x: Tensor, past: Ring, *, reach: Tensor | None = None) -> tuple[Tensor, Ring]:
    y, ring = Shift.step(self, x, past, reach=reach)
    return y + 0.1 * x.flip(1), ring


def keeps_all(self: Any, x: Tensor, past: Ring, *, reach: Tensor | None = None) -> tuple[Tensor, Ring]:
    y, _ = Shift.step(self, x, Shift.start(self)._replace(kept=past.kept), reach=reach)
    return y, past.append(x)


MIXER_FAULTS: list[tuple[type[Any], tuple[str, ...]]] = [
    (made("LooksAhead", Shift, step=looks_ahead), (FUTURE, CHUNKS)),
    (made("KeepsTooMuch", Shift, start=lambda self, spare=0: Shift.start(self, spare + 3)), ("cost: kept",)),
    (made("KeepsNothingToSpare", Shift, start=lambda self, spare=0: Shift.start(self, 0)), (TRIM,)),
    (
        # a window as long as the sequence, for an operator that sees two tokens
        made("GrowsItsMemory", Shift, start=lambda self, spare=0: Ring(None, axis=1), step=keeps_all),
        ("time: memory does not grow", "cost: kept"),
    ),
]


def test_a_correct_mixer_passes() -> None:
    names = MIXERS.names()
    report = check(Shift)
    report.raise_if_failed()
    assert len(report.results) == 21
    assert MIXERS.names() == names


@pytest.mark.parametrize(("cls", "claims"), MIXER_FAULTS, ids=[cls.__name__ for cls, _ in MIXER_FAULTS])
def test_a_planted_fault_of_a_mixer_is_caught(cls: type[Shift], claims: tuple[str, ...]) -> None:
    assert {result.name for result in check(cls, only=claims).failed} == set(claims)


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
