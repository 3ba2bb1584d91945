"""What claims are measured on: one variant of a stream or of a mixer, alone and inside small decoders.

    Subject    a method with options         streams: four layouts with toy sub-layers   mixers: every point of a block
    Run        one of these, ready to call   Composed(stream, toy sub-layers)            the operator
    Stepper    the same, token by token      a small decoder around the stream           the operator, and decoders

    toy sub-layer     y = tanh( Σ_ways  rms_norm(way) A_way )         one matrix per way and site, drawn from the seed

Everything is tiny and in float64 unless a claim is about something else, so that all claims take seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis.base.registry import Registry, spell
from twoaxis.depth.compose import Composed, compose
from twoaxis.depth.registry import STREAMS, stream
from twoaxis.depth.site import Site
from twoaxis.depth.stream import Applied, Seen, State, Stream
from twoaxis.depth.walk import visit
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.ring import Ring
from twoaxis.sequence.mixer import LocalOperator
from twoaxis.sequence.registry import MIXERS, mixer
from twoaxis.verify.claim import Axis, random_tensors
from twoaxis.verify.time import Stepper

SMALL = ModelConfig(
    vocab_size=61,
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=24,
)
"""The decoder around a method; norms have an epsilon of 1e-5."""

WIDTH = 16
LAYOUTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "sequential": (("attention", "mlp"),) * 3,
    "mixers": (("mixer", "attention", "mlp"),) * 3,
    "parallel": (("parallel",),) * 3,
    "uneven": (("mlp",), ("mixer", "parallel"), ("attention", "mlp"), ("attention",)),
}
"""Sub-layers of each block; between them they have every kind of site, first, last and in between."""
CHANNELS = {"site": WIDTH, "attention": WIDTH, "qkv": 32, "mlp": WIDTH, "hidden": 40}
"""Channels of the tensor at each point of a block where a mixer acts."""


def runs(**how: Any) -> Callable[[Subject], Iterator[tuple[str, Run]]]:
    """What a claim is measured over: the runs of a subject, by where they are; takes what `Subject.runs` takes."""
    return lambda subject: ((run.where, run) for run in subject.runs(**how))


class Step(NamedTuple):
    """What happens at one site: the state before it, the read, the normalised read and the increment."""

    site: Site
    before: State
    seen: Seen
    c: Seen
    y: Tensor


class Run(nn.Module):
    """A method ready to be called: a stream with toy sub-layers in one layout, or an operator at one point.

    Args:
        where: the layout or the point.
        run: the stream with its sub-layers, or the operator.
        seed: of the inputs.
    """

    def __init__(self, where: str, run: Composed | LocalOperator, seed: int) -> None:
        super().__init__()
        self.where, self.run, self.seed = where, run, seed

    @property
    def method(self) -> Any:
        """The stream or the operator."""
        return self.run.stream if isinstance(self.run, Composed) else self.run

    def forward(self, x: Tensor) -> Tensor:
        """The output for whole sequences."""
        return self.run(x)

    def definition(self, x: Tensor) -> Tensor:
        """The same from the method's definition."""
        return self.method.definition(*((x,) if isinstance(self.run, LocalOperator) else (x, self.act)))

    def input(self, *, time: int | None = None, batch: int = 2, offset: int = 0, grad: bool = False) -> Tensor:
        """A random input (B, T, C) in float64; an operator's is long enough for its window to move."""
        method, local = self.method, isinstance(self.run, LocalOperator)
        shape = batch, time or (24 if local else 5), method.channels if local else method.layout.width
        return random_tensors(1000 + self.seed + offset, shape)[0].requires_grad_(grad)

    def leaves(self, x: Tensor) -> list[Tensor]:
        """What gradients are taken in: the input and every parameter."""
        return [x, *(p for p in self.parameters() if p.numel())]

    def redrawn(self, draw: int) -> Run:
        """The same method with other sub-layers and other inputs."""
        seed = self.seed + draw
        again = self.run if isinstance(self.run, LocalOperator) else with_toy_sublayers(self.method, seed)
        return Run(self.where, again, seed)

    # Pieces of a pass along depth.

    def act(self, site: Site, seen: Seen) -> Applied:
        """The toy norm and sub-layer of a site."""
        assert isinstance(self.run, Composed)
        return self.run.sublayer(site, seen)

    def go(self, state: State, until: int | None = None, method: Stream | None = None) -> State:
        """Continue a pass up to a site, with another stream in place of the run's where given."""
        walked: Stream = method or self.method
        return visit(walked, state, walked.sites[state.index : until], self.act)

    def end(self, state: State, method: Stream | None = None) -> Tensor:
        """Continue a pass to its output."""
        return (method or self.method).close(self.go(state, method=method))

    def steps(self, x: Tensor) -> tuple[list[Step], State]:
        """What happens at every site of a pass, and the last state."""
        steps: list[Step] = []
        method, before = self.method, []

        def act(site: Site, seen: Seen) -> Applied:
            applied = self.act(site, seen)
            steps.append(Step(site, before[-1], seen, *applied))
            return applied

        last = visit(method, method.open(x), method.sites, act, lambda site, state, seen: before.append(state))
        return steps, last


@dataclasses.dataclass(frozen=True)
class Subject:
    """One variant of a method."""

    name: str  # what the registry calls it, for as long as the claims are measured
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0  # of parameters, inputs and toy sub-layers
    number: int = 0  # its number among the variants; the slowest claims are measured on the first alone
    axis: ClassVar[Axis]
    registry: ClassVar[Registry[Any]]

    def __str__(self) -> str:
        return spell("", dict(self.options)).removeprefix(":") or "defaults"

    @property
    def cls(self) -> type[Any]:
        """The class of the method."""
        return self.registry.find(self.name)

    @property
    def first(self) -> bool:
        """Whether it is the first of the variants."""
        return self.number == 0

    def runs(self, *, layouts: Literal["all", "few", "one"] = "all", **how: Any) -> Iterator[Run]:
        """The method everywhere it can stand, its parameters moved off their initial values.

        Args:
            layouts: for expensive claims, a stream runs where every kind of site is alone; "few": later variants do.
            **how: `perturb`, by how much times a normal draw; `dtype` of its parameters; `width` of a stream.
        """
        raise NotImplementedError

    def configs(self) -> Iterator[tuple[str, ModelConfig]]:
        """Small decoders with the method: plain; for the first variant parallel, and with one of the other axis."""
        yield "decoder", (base := self._config())
        if self.first:
            yield "parallel decoder", dataclasses.replace(base, parallel_block=True)
            other, changes = self._other
            yield f"decoder with {other}", dataclasses.replace(base, **changes)

    _other: ClassVar[tuple[str, dict[str, Any]]]
    """A method of the other axis, and what a decoder with it has besides."""

    def _config(self) -> ModelConfig:
        raise NotImplementedError

    def steppers(self) -> Iterator[tuple[str, Stepper]]:
        """What reads a sequence whole or in steps: these decoders, perturbed."""
        for where, config in self.configs():
            yield where, stepping(build(config, self.seed, perturb=0.1), self.seed)

    def _moved(self, method: Any, perturb: float = 0.1, dtype: torch.dtype = torch.float64, **_: Any) -> Any:
        generator = torch.Generator().manual_seed(self.seed)
        method.reset_parameters(generator=generator)
        return perturbed(method.to(torch.float64), perturb, generator).to(dtype)


class StreamSubject(Subject):
    """One variant of a stream."""

    axis = "depth"
    registry = STREAMS
    _other = "short_swa", {"mixer": "short_swa", "mixer_options": {"window": 3, "heads": 2, "start": "normal"}}

    def stream(self, layout: str | Sequence[Sequence[str]] = "sequential", **how: Any) -> Stream:
        """The stream in a layout; takes what `runs` takes, and a placement."""
        kinds = LAYOUTS[layout] if isinstance(layout, str) else layout
        placed, width = how.get("placement"), how.get("width", WIDTH)
        made = stream(self.name, blocks=len(kinds), width=width, kinds=kinds, placement=placed, **self.options)
        return self._moved(made, **how)

    def run(self, layout: str | Sequence[Sequence[str]] = "sequential", **how: Any) -> Run:
        """The stream in a layout with toy sub-layers."""
        sublayers = with_toy_sublayers(self.stream(layout, **how), self.seed, how.get("dtype", torch.float64))
        return Run(str(layout), sublayers, self.seed)

    def runs(self, *, layouts: Literal["all", "few", "one"] = "all", **how: Any) -> Iterator[Run]:
        """The stream in every layout."""
        few = ("uneven",) if layouts == "one" else () if layouts == "all" or self.first else ("mixers", "uneven")
        for layout in few or LAYOUTS:
            yield self.run(layout, **how)

    def _config(self) -> ModelConfig:
        heads = self.stream().kv_heads or SMALL.kv_heads
        options = {"stream": self.name, "stream_options": dict(self.options)}
        return dataclasses.replace(SMALL, num_key_value_heads=heads, **options)


class MixerSubject(Subject):
    """One variant of a mixer."""

    axis = "sequence"
    registry = MIXERS
    _other = "attention_residuals", {"stream": "attention_residuals", "mixer_blocks": (0, 2)}

    def runs(self, **how: Any) -> Iterator[Run]:
        """The operator at every point of a block where the mixer acts."""
        made = mixer(self.name, **self.options)
        for point in made.points:
            yield Run(point, self._moved(made.build(point, WIDTH, CHANNELS[point]), **how), self.seed)

    def _config(self) -> ModelConfig:
        return dataclasses.replace(SMALL, mixer=self.name, mixer_options=dict(self.options))

    def steppers(self) -> Iterator[tuple[str, Stepper]]:
        """The operators themselves, and the decoders."""
        for run in self.runs():

            def draw(seed: int, batch: int, time: int, run: Run = run) -> Tensor:
                return run.input(batch=batch, time=2 * time, offset=seed)  # a window that has moved

            yield run.where, Stepper(run.run, draw, lambda ring: numbers_in([ring]), self.seed)
        yield from super().steppers()


SUBJECTS: tuple[type[Subject], ...] = (StreamSubject, MixerSubject)


def subjects(
    method: type[Any] | str, variants: Sequence[Mapping[str, Any]] | None = None, seed: int = 0
) -> list[Subject]:
    """A subject per variant of a registered method, or per set of options given."""
    kind, name = find(method)
    chosen = tuple(kind.registry.find(name).variants if variants is None else variants)
    if not chosen:
        raise ValueError(f"{name} has no variants to check it with; {{}} is one with the defaults")
    return [kind(name, dict(options), seed, number) for number, options in enumerate(chosen)]


def find(method: type[Any] | str) -> tuple[type[Subject], str]:
    """The kind of subject and the registered name of a method; an empty name for a class that has none."""
    if isinstance(method, str):
        kind = MixerSubject if method in MIXERS.names() else StreamSubject
        return kind, kind.registry.canonical(method)
    kind = MixerSubject if issubclass(method, LocalOperator) else StreamSubject
    path = f"{method.__module__}:{method.__qualname__}"
    return kind, next((name for name, entry in kind.registry.entries.items() if entry in (method, path)), "")


@contextmanager
def registries_restored() -> Iterator[None]:
    """Context manager: forgets what is registered inside."""
    before = [(kind.registry.entries, dict(kind.registry.entries)) for kind in SUBJECTS]
    try:
        yield
    finally:
        for entries, kept in before:
            entries.clear()
            entries.update(kept)


@contextmanager
def registered(method: type[Any] | str) -> Iterator[tuple[type[Subject], str]]:
    """Context manager: the kind of subject and its name; a class that has none gets one inside."""
    kind, name = find(method)
    with registries_restored():
        if not name and not isinstance(method, str):
            name = f"{method.__module__}.{method.__qualname__}"
            kind.registry.add(name, method)
        yield kind, name


# What subjects are made of.


def perturbed(module: Any, amount: float, generator: torch.Generator) -> Any:
    """Add `amount` times a standard normal draw to every parameter of a module, which is returned."""
    with torch.no_grad():
        for parameter in module.parameters() if amount else ():
            parameter += amount * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return module


class ToySublayer(nn.Module):
    """tanh of a sum of linear maps, one per way.

    Where the stream changes keys and values, they are made of that sum, two queries for each, and the tanh is of both.
    """

    def __init__(self, weight: Tensor, heads: int) -> None:
        super().__init__()
        self.weight, self.heads = nn.Parameter(weight), heads

    def forward(self, *ways: Tensor, kv: Callable[..., Any] | None = None) -> Tensor:
        """The increment."""
        products = [way @ weight for way, weight in zip(ways, self.weight, strict=True)]
        total = sum(products[1:], products[0])
        if kv is not None:
            q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in (total, total.flip(-1), total.roll(1, -1)))
            k, v = kv(torch.cat([q, q.sin()], dim=-2), k, v)
            total = k.flatten(-2) + v.flatten(-2)
        return torch.tanh(total)


def toy_norm(x: Tensor) -> Tensor:
    """RMSNorm without a scale."""
    return F.rms_norm(x, (x.shape[-1],), eps=1e-5)


def with_toy_sublayers(method: Stream, seed: int, dtype: torch.dtype = torch.float64) -> Composed:
    """A stream with one toy sub-layer per site."""
    generator = torch.Generator().manual_seed(2000 + seed)
    width, sublayers = method.layout.width, []
    for site in method.sites:
        ways = len(method.ways(site))
        weight = torch.randn(ways, width, width, generator=generator, dtype=torch.float64) / (ways * width) ** 0.5
        norm = toy_norm if method.normed(site) else None
        sublayers.append((site.kind, norm, ToySublayer(weight.to(dtype), method.kv_heads or 2)))
    return compose(method, sublayers)


def build(config: ModelConfig, seed: int, *, perturb: float = 0.0) -> Decoder:
    """A float64 decoder; `perturb` moves the parameters of the methods in it off their initial values."""
    model = Decoder(config, seed).double()
    generator = torch.Generator().manual_seed(seed)
    for method in model.modules():
        if isinstance(method, Stream | LocalOperator):
            perturbed(method, perturb, generator)
    return model


def numbers_in(rings: Iterable[Ring]) -> int:
    """Numbers per sequence in some rings."""
    return sum(t.numel() // t.shape[0] for ring in rings for t in ring.kept)


def stepping(model: Decoder, seed: int = 0) -> Stepper:
    """A decoder as a stepper; of its memory the stream's rings must not grow."""

    def draw(seed: int, batch: int, time: int) -> Tensor:
        return torch.randint(0, SMALL.vocab_size, (batch, time), generator=torch.Generator().manual_seed(seed))

    return Stepper(model, draw, lambda past: numbers_in(past.stream), seed)


def tensors_of(value: Any, _met: set[int] | None = None) -> list[Tensor]:
    """Every tensor reachable from `value` through containers, dataclasses and plain objects."""
    met = set() if _met is None else _met
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, str | bytes | type) or id(value) in met:
        return []
    met.add(id(value))
    inside = value if isinstance(value, Mapping | list | tuple | set | frozenset) else getattr(value, "__dict__", {})
    return [t for item in (inside.values() if isinstance(inside, Mapping) else inside) for t in tensors_of(item, met)]
