"""What a probe runs, and the file that holds it: how much, on which text, and the rungs that are put on the source.

All rungs start as the source. The control is there because a model gains on a text by adapting to it, whatever learns:
what the scales of its norms gain on the same text in the same steps is not the stream's merit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from twoaxis.base.files import read_json, short_hash, write_json
from twoaxis.base.options import Count, NotNegative, Options, Positive, at_least, from_record
from twoaxis.pretrained.start import read_method

PLAN = "probe.json"
RATE_SEED = 1000
"""The seed on which learning rates are chosen; it is no data seed."""
UNKNOWN = 0.1
"""A method that is not on the ladder is tried with these parts of the factors given too: its rate is anyone's guess."""
ROWS = 4
"""Windows of an evaluation pass."""
THIRDS = {1: ("all",), 2: ("early", "late"), 3: ("early", "middle", "late")}
"""Groups of sites by how many there are: thirds of the blocks, the out site with the last ones."""


@dataclass(frozen=True, kw_only=True)
class ProbeConfig(Options):
    """How much a probe trains and measures."""

    data: tuple[str, ...] = ("stdlib",)
    """Text: stdlib, files, folders or hf:DATASET."""
    text_field: str = "text"
    """Where records keep their text."""
    context: Annotated[int, at_least(2)] = 128
    """Tokens of a window."""
    batch: Count = 1
    """Windows per training step."""
    steps: Count = 12
    """Training steps of each rung and seed."""
    seconds: Positive | None = None
    """Training time of each rung and seed instead of steps: turned into steps once, when the folder is new."""
    held_out: Count = 12
    """Held-out windows that each seed measures."""
    site_windows: Annotated[int, at_least(0)] = 3
    """Of them, those measured again with each group of sites switched off; 0 leaves the sites out."""
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    """Data seeds."""
    rates: tuple[Positive, ...] = (1.0, 0.3)
    """Factors of each rung's own learning rate; of several, each rung gets its best on training text. A method that is
    not on the ladder is also tried with a tenth of them."""

    def validate(self) -> None:
        """At least one seed and one rate, and no seed twice."""
        if not self.rates:
            raise ValueError("rates must be positive factors, at least one, got none")
        if len(set(self.seeds)) < len(self.seeds) or not self.seeds or min(self.seeds) < 0:
            raise ValueError(f"seeds must be different numbers from 0 on, at least one, got {list(self.seeds)}")
        if RATE_SEED in self.seeds:
            raise ValueError(f"seeds must not have {RATE_SEED}, on which learning rates are chosen")


@dataclass(frozen=True, kw_only=True)
class Costs(Options):
    """What a rung adds to the source, by the formulas."""

    parameters: int = 0
    """That learn here. The control's are the source's own: it adds none."""
    flops: int = 0
    """Per token and forward pass."""
    flops_share: float = 0.0
    """The same divided by the source's."""
    live: float = 1.0
    """Numbers per token alive across sites at their most, in widths; the plain residual has 1."""
    kept: int = 0
    """Numbers per sequence kept between tokens when decoding."""


@dataclass(frozen=True, kw_only=True)
class Rung(Options):
    """A method, or the control, on a frozen model."""

    name: str
    """What tables call it."""
    what: str = "as asked"
    """What a read may choose, in words."""
    stream: str = "standard"
    """NAME[:option=value,...]"""
    mixer: str | None = None
    """The same, of a mixer."""
    rate: Positive = 0.001
    """Learning rate: the ladder's, or the one of several that is tried."""
    rates: tuple[Positive, ...] = ()
    """Learning rates that are tried."""
    steps: Annotated[int, at_least(0)] = 0
    """Training steps."""
    costs: Costs = Costs()
    """By the formulas."""

    @property
    def control(self) -> bool:
        """Whether the norms' scales learn, because there is no method."""
        return self.stream == "standard" and self.mixer is None

    @property
    def spelling(self) -> tuple[str, str | None]:
        """Its stream and mixer, which make it what it is."""
        return self.stream, self.mixer

    @property
    def method(self) -> str:
        """Its spelling, for people."""
        named = [name for name in self.spelling if name not in ("standard", None)]
        return " + ".join(map(str, named)) or "norm scales"

    @property
    def key(self) -> str:
        """Stands for everything that can change a number; the names are not part of it."""
        return short_hash({"stream": self.stream, "mixer": self.mixer, "rate": self.rate})

    @property
    def candidates(self) -> tuple[Rung, ...]:
        """The same with each learning rate that is tried."""
        return tuple(dataclasses.replace(self, rate=rate) for rate in self.rates)


CONTROL = Rung(name="control", what="nothing: the pre-norms' scales learn", rate=0.003)
LADDER = tuple(
    Rung(name=name, rate=rate, what=what, stream=stream, mixer=mixer)
    for name, stream, mixer, rate, what in (
        ("scalar", "denseformer", None, 3e-4, "one number per earlier block"),
        (
            "channel",
            "deep_cross_attention:version=2,ways=single",
            None,
            3e-3,
            "one number per earlier block and channel",
        ),
        ("token", "attention_residuals:block_size=4", None, 1e-4, "one number per four sub-layers, for each token"),
        ("window", "depth_attention:heads=3,head_width=16", None, 3e-5, "attention over the last four sub-layers"),
        ("multiway", "muddformer", None, 3e-5, "numbers for each token, for q, k, v and the residual"),
        ("conv", "standard", "short_conv", 3e-3, "the last four tokens, by fixed taps"),
        ("swa", "standard", "short_swa:heads=3,head_width=16", 1e-3, "the last sixteen tokens, by attention"),
    )
)
"""The default rungs.

Their rates are such that one first step of Adam, which moves every number by the rate, costs SmolLM2 at most 0.02 nats
per token on text that the step has not seen. Numbers that act in sums, as those of a matrix that every site shares,
need smaller ones: the projections of `window` wreck a model of 30 blocks in one step of 0.0003.
"""


def choose_rungs(streams: Sequence[str], mixers: Sequence[str], factors: Sequence[float] = (1.0,)) -> tuple[Rung, ...]:
    """The control and the rungs asked for, or the whole ladder, with the learning rates that are tried.

    Args:
        streams: spellings.
        mixers: spellings.
        factors: of each rung's own rate. A method that the ladder has with other options has the ladder's rate.
    """
    known = {rung.spelling: rung for rung in LADDER}
    own = {_names(rung): rung.rate for rung in (CONTROL, *LADDER)}
    asked = [Rung(name=stream, stream=stream) for stream in streams] + [Rung(name=m, mixer=m) for m in mixers]
    rungs = [known.get(rung.spelling, rung) for rung in asked] or list(LADDER)
    if double := [rung.name for rung in rungs if rungs.count(rung) > 1]:
        raise ValueError(f"{double[0]} is asked for twice")
    if any(rung.control for rung in rungs):
        raise ValueError("standard adds nothing to a model; the control is always there")
    made = []
    for rung in (CONTROL, *rungs):
        guess = len(factors) > 1 and _names(rung) not in own
        tried = dict.fromkeys((*factors, *(UNKNOWN * factor for factor in factors if guess)))
        rate = own.get(_names(rung), rung.rate)
        made.append(dataclasses.replace(rung, rate=rate, rates=tuple(rate * factor for factor in tried)))
    return tuple(made)


def _names(rung: Rung) -> tuple[str, str | None]:
    method = read_method(rung.stream, rung.mixer).methods
    return method.stream, method.mixer


class Amounts(NamedTuple):
    """How much a run trains and measures.

    Attributes:
        steps: optimiser steps; 0 measures the source.
        batch: windows per step.
        held_out: windows measured.
        site_windows: of them, those measured with each group of sites switched off.
        choosing: whether they are of the training documents, because a learning rate is chosen by them.
    """

    steps: int
    batch: int
    held_out: int
    site_windows: int
    choosing: bool = False

    def passes(self, groups: int) -> int:
        """Passes through the model, with so many groups of sites."""
        switched = min(self.site_windows, self.held_out) if self.steps else 0
        return self.steps + math.ceil(self.held_out / ROWS) + groups * math.ceil(switched / ROWS)


@dataclass(frozen=True, kw_only=True)
class ProbeResult(Options):
    """What a run found."""

    rung: str
    """Name of what was put on the source."""
    rate: NotNegative
    """Its learning rate; 0 for the source."""
    seed: int
    """Of the data."""
    loss: float | None
    """On held-out text, in nats per token; None where the training diverged."""
    windows: tuple[float, ...] = ()
    """The same of every window measured."""
    training: tuple[float | None, ...] = ()
    """Of every step."""
    off: dict[str, float | None] = dataclasses.field(default_factory=dict)
    """By group of sites, the loss with it switched off minus the loss with all of them on."""
    size: dict[str, float] = dataclasses.field(default_factory=dict)
    """By group of sites; see `ladder.sizes`."""
    seconds: float
    """By the clock."""
    cpu_seconds: float
    """Of the process."""


@dataclass(frozen=True, kw_only=True)
class TextFacts(Options):
    """What the text of a probe is."""

    name: str
    """Where it comes from."""
    fingerprint: str
    """Changes if a window could."""
    train: int
    """Documents to train on."""
    held_out: int
    """Documents to measure on."""
    note: str = ""
    """What a reader should know."""


@dataclass(frozen=True, kw_only=True)
class ProbePlan(Options):
    """A probe: what was asked for, and what was measured once and for all. It is probe.json, one to one."""

    format: Literal[3] = 3
    """Version of probe.json."""
    config: ProbeConfig
    """How much is trained and measured, on which seeds."""
    source: str
    """Its name."""
    family: str
    """Its architecture."""
    blocks: Count
    """That it has."""
    digest: dict[str, str]
    """SHA-256 of its weights, by file."""
    place: str
    """Where a worker loads it from."""
    text: TextFacts
    """What is trained and measured on."""
    shared: int = 0
    """Held-out documents that several seeds, or several windows of one, share."""
    rungs: tuple[Rung, ...] = ()
    """The control first; empty until they are counted."""
    hardware: str = ""
    """That it was begun on."""
    versions: dict[str, str | None] = dataclasses.field(default_factory=dict)
    """Of the packages."""
    command: str | None = None
    """How it was started."""

    def validate(self) -> None:
        """The control comes first, and every rung has rates and steps."""
        for number, rung in enumerate(self.rungs):
            if rung.control != (number == 0) or not rung.rates or not rung.steps:
                raise ValueError(f"{rung.name} must have rates and steps, and the control is the first")

    @property
    def groups(self) -> tuple[str, ...]:
        """Of sites."""
        return group_names(self.blocks)

    @staticmethod
    def load(out: Path) -> ProbePlan | None:
        """The plan of a folder, or None where there is none; a damaged one is an error that names file and field."""
        path = out / PLAN
        return (
            from_record(ProbePlan, read_json(path), str(path), "Put back what stood there") if path.exists() else None
        )

    def save(self, out: Path) -> None:
        """Write probe.json."""
        write_json(out / PLAN, self.to_dict())

    def grow(self, out: Path, asked: ProbePlan) -> ProbePlan:
        """This plan with the seeds of another; one with other settings is refused.

        Args:
            out: the folder, for the message.
            asked: for the same source and text.
        """
        pairs: dict[str, tuple[Any, Any]] = {
            "source": (self.digest, asked.digest),
            "text": (self.text.fingerprint, asked.text.fingerprint),
        }
        for name in ("context", "batch", "held_out", "site_windows", "seconds", "rates", "steps"):
            pairs[name] = getattr(self.config, name), getattr(asked.config, name)
        if self.config.seconds is not None:
            del pairs["steps"]
        if changed := [f"{name}: {old} there, {new} now" for name, (old, new) in pairs.items() if old != new]:
            raise ValueError(
                f"{out} holds a probe with other settings ({'; '.join(changed)}); choose another folder, or give the "
                f"settings that stand in its {PLAN}"
            )
        seeds = tuple(dict.fromkeys((*self.config.seeds, *asked.config.seeds)))
        return dataclasses.replace(self, config=dataclasses.replace(asked.config, seeds=seeds), place=asked.place)


def group_names(blocks: int) -> tuple[str, ...]:
    """The groups of sites of a model with so many blocks."""
    return THIRDS[min(3, blocks)]


def group_of(block: int, blocks: int) -> str:
    """The group of a block; the out site is block `blocks` and belongs to the last group."""
    names = group_names(blocks)
    return names[min(block, blocks - 1) * len(names) // blocks]
