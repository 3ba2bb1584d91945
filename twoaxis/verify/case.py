"""What every check starts from: streams in several layouts with toy sub-layers, the operators of mixers, and a walk.

    toy sub-layer     y = tanh( Σ_ways  rms_norm(way) A_way )         one matrix per way and site, drawn from the seed

Everything is tiny and in float64 unless a check is about something else, so that a whole kit takes seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis.base.registry import Registry
from twoaxis.depth.compose import Composed, compose
from twoaxis.depth.registry import stream
from twoaxis.depth.site import Site
from twoaxis.depth.stream import Seen, State, Stream
from twoaxis.model.config import DecoderConfig
from twoaxis.sequence.mixer import LocalOperator
from twoaxis.sequence.registry import mixer
from twoaxis.verify.properties import SMALL

T = TypeVar("T")

WIDTH = 16
BATCH, TIME, LONG_TIME = 2, 5, 24
CHANNELS = {"site": WIDTH, "attention": WIDTH, "qkv": 32, "mlp": WIDTH, "hidden": 40}
"""Channels of the tensor at each point of a block where a mixer acts."""
LAYOUTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "sequential": (("attention", "mlp"),) * 3,
    "mixers": (("mixer", "attention", "mlp"),) * 3,
    "parallel": (("parallel",),) * 3,
    "uneven": (("mlp",), ("mixer", "parallel"), ("attention", "mlp"), ("attention",)),
}
"""Sub-layers of each block; between them they have every kind of site, first, last and in between."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One variant of a stream under test.

    Attributes:
        name: what the registry calls it, for as long as the kit runs.
        options: its options.
        seed: of parameters, inputs and toy sub-layers.
        number: its number among the variants; the slowest checks run on the first only.
        placement: which sites use the method, unless a check says otherwise.
    """

    name: str
    options: Mapping[str, Any]
    seed: int = 0
    number: int = 0
    placement: str | None = None

    @property
    def first(self) -> bool:
        """Whether it is the first of the variants."""
        return self.number == 0

    @property
    def layouts(self) -> tuple[str, ...]:
        """Where the dearer checks run: everywhere for the first variant, for the others where every kind of site is."""
        return tuple(LAYOUTS) if self.first else ("mixers", "uneven")

    def stream(
        self,
        layout: str | Sequence[Sequence[str]] = "sequential",
        *,
        width: int = WIDTH,
        placement: str | None = None,
        perturb: float = 0.1,
        dtype: torch.dtype = torch.float64,
    ) -> Stream:
        """The stream, with its parameters moved off their initial values by `perturb` times a normal draw."""
        kinds = LAYOUTS[layout] if isinstance(layout, str) else layout
        placed = self.placement if placement is None else placement
        made = stream(self.name, blocks=len(kinds), width=width, kinds=kinds, placement=placed, **self.options)
        generator = torch.Generator().manual_seed(self.seed)
        made.reset_parameters(generator)
        made = made.to(torch.float64)
        shift(made, perturb, generator)
        return made.to(dtype)

    def run(self, made: Stream) -> Composed:
        """`made` with toy sub-layers of its dtype."""
        dtype = next((p.dtype for p in made.parameters()), torch.float64)
        return toys(made, self.seed, dtype)

    def embedding(
        self, *, width: int = WIDTH, time: int = TIME, batch: int = BATCH, offset: int = 0, grad: bool = False
    ) -> Tensor:
        """A random embedding (B, T, D)."""
        generator = torch.Generator().manual_seed(1000 + self.seed + offset)
        return torch.randn(batch, time, width, generator=generator, dtype=torch.float64).requires_grad_(grad)


def shift(module: nn.Module, amount: float, generator: torch.Generator) -> None:
    """Add `amount` times a standard normal draw to every parameter."""
    with torch.no_grad():
        for parameter in module.parameters():
            draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += amount * draw.to(parameter.dtype)


@dataclasses.dataclass(frozen=True)
class MixerCase:
    """One variant of a mixer under test; see `Case`."""

    name: str
    options: Mapping[str, Any]
    seed: int = 0
    number: int = 0

    @property
    def first(self) -> bool:
        """Whether it is the first of the variants."""
        return self.number == 0

    def operators(
        self, dtype: torch.dtype = torch.float64, perturb: float = 0.1
    ) -> Iterator[tuple[str, LocalOperator]]:
        """The operator at each point, with its parameters moved off their initial values."""
        made = mixer(self.name, **self.options)
        for point in made.points:
            operator = made.build(point, WIDTH, CHANNELS[point])
            generator = torch.Generator().manual_seed(self.seed)
            operator.reset_parameters(generator=generator)
            operator = operator.to(torch.float64)
            shift(operator, perturb, generator)
            yield point, operator.to(dtype)

    def tensor(self, point: str, *, time: int = LONG_TIME, batch: int = BATCH, offset: int = 0) -> Tensor:
        """A random input (B, T, C)."""
        generator = torch.Generator().manual_seed(1000 + self.seed + offset)
        return torch.randn(batch, time, CHANNELS[point], generator=generator, dtype=torch.float64)

    def decoders(self) -> list[DecoderConfig]:
        """Small decoders with the mixer: plain, parallel, and around a stream that reads all earlier outputs."""
        base = dataclasses.replace(SMALL, mixer=self.name, mixer_options=dict(self.options))
        return [
            base,
            dataclasses.replace(base, block="parallel"),
            dataclasses.replace(base, stream="attention_residuals", mixer_blocks=(0, 2)),
        ]


class ToyNorm(nn.Module):
    """RMSNorm without a scale."""

    def forward(self, x: Tensor) -> Tensor:
        """`x` over its root mean square."""
        return F.rms_norm(x, (x.shape[-1],), eps=1e-5)


class ToySublayer(nn.Module):
    """tanh of a sum of linear maps, one per way."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, *ways: Tensor) -> Tensor:
        """The increment."""
        total = ways[0] @ self.weight[0]
        for way, weight in zip(ways[1:], self.weight[1:], strict=True):
            total = total + way @ weight
        return torch.tanh(total)


def toys(made: Stream, seed: int, dtype: torch.dtype = torch.float64) -> Composed:
    """`made` with one toy sub-layer per site."""
    generator = torch.Generator().manual_seed(2000 + seed)
    width, sublayers = made.layout.width, []
    for site in made.sites:
        ways = len(made.ways(site))
        weight = torch.randn(ways, width, width, generator=generator, dtype=torch.float64) / (ways * width) ** 0.5
        sublayers.append((site.kind, ToyNorm(), ToySublayer(weight.to(dtype))))
    return compose(made, sublayers)


class Step(NamedTuple):
    """What happened at one site."""

    site: Site
    before: State
    seen: Seen
    c: Seen
    y: Tensor
    after: State


def step(run: Composed, state: State, site: Site, made: Stream | None = None) -> Step:
    """Read, normalise, run the toy sub-layer and write, with `made` in place of the stream of `run` where given."""
    made = run.stream if made is None else made
    seen = made.read(state, site)
    c, y = run.sublayer(site, seen)
    return Step(site, state, seen, c, y, made.write(state, site, y, seen, c))


def walk(run: Composed, x: Tensor) -> Iterator[Step]:
    """Every site of one pass."""
    state = run.stream.open(x)
    for site in run.stream.sites:
        taken = step(run, state, site)
        yield taken
        state = taken.after


def resume(run: Composed, state: State, made: Stream | None = None) -> Tensor:
    """The rest of a pass, from wherever `state` is."""
    made = run.stream if made is None else made
    for site in made.sites[state.index :]:
        state = step(run, state, site, made).after
    return made.close(state)


def ways_of(seen: Seen) -> dict[str, Tensor]:
    """The entries of `seen` that are there."""
    return {name: way for name in ("x", "q", "k", "v") if (way := getattr(seen, name)) is not None}


def tensors_in(value: Any, _met: set[int] | None = None) -> list[Tensor]:
    """Every tensor reachable from `value` through containers, dataclasses and plain objects."""
    met = set() if _met is None else _met
    if isinstance(value, Tensor):
        return [value]
    if value is None or isinstance(value, str | bytes | int | float | bool | type) or id(value) in met:
        return []
    met.add(id(value))
    if isinstance(value, Mapping):
        inside = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        inside = list(value)
    else:
        inside = list(getattr(value, "__dict__", {}).values())
    return [t for item in inside for t in tensors_in(item, met)]


@contextmanager
def registered(registry: Registry[T], subject: type[T] | str) -> Iterator[tuple[str, type[T]]]:
    """The name and the class of `subject`; a class that is not registered is, for the time of the block."""
    if isinstance(subject, str):
        yield subject, registry.find(subject)
        return
    for name, entry in registry.entries.items():
        if entry is subject or entry == f"{subject.__module__}:{subject.__qualname__}":
            yield name, subject
            return
    name = f"{subject.__module__}.{subject.__qualname__}"
    registry.add(name, subject)
    try:
        yield name, subject
    finally:
        del registry.entries[name]
