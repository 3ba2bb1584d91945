"""Small correct streams, from which the planted faults are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from twoaxis.depth.site import Site
from twoaxis.depth.stream import Apply, Layout, Neutral, Seen, Stream, Tokens
from twoaxis.kernels.history import weighted_sum


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    pass


class One(NamedTuple):
    x: Tensor


class Gain(Stream):
    """x + g y, one gain per sub-layer."""

    name = "gain"
    Config = NoOptions
    gain: nn.Parameter

    def __init__(self, config: Any, layout: Layout) -> None:
        super().__init__(config, layout)
        self.rows = {site.index: row for row, site in enumerate(s for s in layout.sublayers if self.uses(s))}
        self.parameter("gain", len(self.rows), start=1.0, neutral=1.0)

    def drop(self, name: str) -> None:
        """Take back a parameter of the base class."""
        delattr(self, name)
        self._table.pop(name, None)

    def definition(self, x: Tensor, apply: Apply) -> Tensor:
        for site in self.sites:
            x = x + self.gain[site.index] * apply(site, Seen(x)).y
        return x

    @property
    def neutral(self) -> Neutral:
        return "bitwise"

    def _open(self, x: Tensor, tokens: Tokens) -> Any:
        return One(x)

    def _read(self, value: Any, site: Site) -> Seen:
        return Seen(value.x)

    def _scaled(self, site: Site, y: Tensor) -> Tensor:
        return (y * self.gain[self.rows[site.index]]).to(y.dtype) if self.uses(site) else y

    def _write(self, value: Any, site: Site, y: Tensor, seen: Seen, c: Seen) -> Any:
        return One(value.x + self._scaled(site, y))

    def _pack(self, value: Any, site: Site) -> tuple[Tensor, ...]:
        return tuple(value)

    def _unpack(self, tensors: tuple[Tensor, ...], site: Site, tokens: Tokens) -> Any:
        return One(*tensors)

    def flops(self) -> int:
        return len(self.rows) * self.layout.width


class Echo(Gain):
    """x + y + 2 g tanh(x), a value of what was read, beside the increment."""

    name = "echo"
    scale = 2.0

    def __init__(self, config: Any, layout: Layout) -> None:
        super().__init__(config, layout)
        self.parameter("gain", len(self.rows), start=0.0, neutral=0.0)

    def definition(self, x: Tensor, apply: Apply) -> Tensor:
        for site in self.sites:
            x = x + apply(site, Seen(x)).y + 2.0 * self.gain[site.index] * torch.tanh(x)
        return x

    def value(self, x: Tensor) -> Tensor:
        return self.scale * torch.tanh(x)

    def _write(self, value: One, site: Site, y: Tensor, seen: Seen, c: Seen) -> One:
        if not self.uses(site):
            return One(value.x + y)
        return One(value.x + y + (self.gain[self.rows[site.index]] * self.value(seen.x)).to(y.dtype))

    def flops(self) -> int:
        return 5 * len(self.rows) * self.layout.width


class Three(NamedTuple):
    streams: Tensor


class Turn(Gain):
    """Streams x, x and 0, turned by (1 - a) 1 + a P with a cyclic P; the first is read and written to."""

    name = "turn"

    def __init__(self, config: Any, layout: Layout) -> None:
        super().__init__(config, layout)
        self.parameter("gain", len(self.rows), start=0.0, neutral=0.0)

    def definition(self, x: Tensor, apply: Apply) -> Tensor:
        streams = [x, x, torch.zeros_like(x)]
        for site in self.sites:
            a, y = self.gain[site.index], apply(site, Seen(streams[0])).y
            streams = [(1 - a) * stream + a * streams[i - 1] for i, stream in enumerate(streams)]
            streams = [streams[0] + y, *streams[1:]]
        return streams[0]

    def matrix(self, site: Site) -> Tensor:
        one = torch.eye(3, dtype=self.gain.dtype, device=self.gain.device)
        return one + self.gain[self.rows[site.index]] * (one.roll(1, 0) - one)

    def _open(self, x: Tensor, tokens: Tokens) -> Three:
        return Three(torch.stack([x, x, torch.zeros_like(x)], dim=-2))

    def _read(self, value: Three, site: Site) -> Seen:
        return Seen(value.streams[..., 0, :])

    def _write(self, value: Three, site: Site, y: Tensor, seen: Seen, c: Seen) -> Three:
        streams = value.streams
        if self.uses(site):
            streams = (self.matrix(site).to(streams.dtype) @ streams).to(streams.dtype)
        first, rest = streams.split([1, 2], dim=-2)
        return Three(torch.cat([first + y.unsqueeze(-2), rest], dim=-2))

    def _unpack(self, tensors: tuple[Tensor, ...], site: Site, tokens: Tokens) -> Three:
        return Three(*tensors)

    def flops(self) -> int:
        return 18 * len(self.rows) * self.layout.width


def _first(mix: Tensor, generator: torch.Generator | None) -> None:
    mix.copy_(torch.tensor([[1.0, 0.0], [1.0, 0.0]]).expand_as(mix))


class Two(NamedTuple):
    first: Tensor
    second: Tensor


class Pair(Gain):
    """Two streams mixed by a matrix per sub-layer; the first is read and written to, the second remembers."""

    name = "pair"

    def __init__(self, config: Any, layout: Layout) -> None:
        super().__init__(config, layout)
        self.drop("gain")
        self.parameter("mix", len(self.rows), 2, 2, start=_first, neutral=_first)

    def definition(self, x: Tensor, apply: Apply) -> Tensor:
        first, second = x, x
        for site in self.sites:
            (a, b), (c, d) = self.mix[site.index]
            y = apply(site, Seen(first)).y
            first, second = a * first + b * second + y, c * first + d * second
        return first

    def matrix(self, site: Site) -> Tensor:
        return self.mix[self.rows[site.index]]

    def _open(self, x: Tensor, tokens: Tokens) -> Two:
        return Two(x, x)

    def _read(self, value: Two, site: Site) -> Seen:
        return Seen(value.first)

    def _write(self, value: Two, site: Site, y: Tensor, seen: Seen, c: Seen) -> Two:
        if not self.uses(site):
            return Two(value.first + y, value.first)
        first, second = weighted_sum(value, static=self.matrix(site))
        return Two(first + y, second)

    def _unpack(self, tensors: tuple[Tensor, ...], site: Site, tokens: Tokens) -> Two:
        return Two(*tensors)

    def flops(self) -> int:
        return 8 * self.layout.width * len(self.rows)


class Past(NamedTuple):
    x: Tensor
    states: tuple[Tensor, ...]


class History(Gain):
    """The newest state plus a weighted sum of all of them, the weights starting at zero."""

    name = "history"

    def __init__(self, config: Any, layout: Layout) -> None:
        super().__init__(config, layout)
        self.drop("gain")
        self.rows = {site.index: row for row, site in enumerate(layout.used())}
        self.theta = nn.ParameterList(torch.empty(site.index + 1) for site in layout.used())

    def definition(self, x: Tensor, apply: Apply) -> Tensor:
        states = [x]
        for site in self.sites:
            read = states[-1] + torch.tensordot(self.theta[site.index], torch.stack(states), 1)
            states.append(states[-1] + apply(site, Seen(read)).y)
        return states[-1] + torch.tensordot(self.theta[len(self.sites)], torch.stack(states), 1)

    def reset_parameters(self, generator: torch.Generator | None = None, std: float = 0.02) -> None:
        with torch.no_grad():
            for theta in self.theta:
                theta.zero_()

    def neutral_(self) -> None:
        self.reset_parameters()

    def _open(self, x: Tensor, tokens: Tokens) -> Past:
        return Past(x, (x,))

    def mixed(self, value: Past, theta: Tensor) -> Tensor:
        return weighted_sum(value.states, static=theta[None])[0]

    def _read(self, value: Past, site: Site) -> Seen:
        if not self.uses(site):
            return Seen(value.x)
        return Seen(value.x + self.mixed(value, self.theta[self.rows[site.index]]))

    def _write(self, value: Past, site: Site, y: Tensor, seen: Seen, c: Seen) -> Past:
        x = value.x + y
        return Past(x, (*value.states, x))

    def _pack(self, value: Past, site: Site) -> tuple[Tensor, ...]:
        return value.states

    def _unpack(self, tensors: tuple[Tensor, ...], site: Site, tokens: Tokens) -> Past:
        return Past(tensors[-1], tensors)

    def flops(self) -> int:
        return (2 * sum(theta.numel() for theta in self.theta) + len(self.theta)) * self.layout.width


class Bank(NamedTuple):
    runs: tuple[Tensor, ...]
    part: Tensor | None
    total: Tensor


class Runs(Stream):
    """Softmax reads, times the number of sources, over the embedding, sums of two sub-layers and the sum begun."""

    name = "runs"
    Config = NoOptions

    def __init__(self, config: Any, layout: Layout) -> None:
        super().__init__(config, layout)
        self.logits = nn.ParameterDict(
            {str(s.index): nn.Parameter(torch.empty(len(self.sources(s)))) for s in layout.used()}
        )

    def sources(self, site: Site) -> tuple[str, ...]:
        if not self.uses(site):
            return ()
        names = ("embedding", *(f"run {i}" for i in range(site.index // 2)))
        return (*names, "partial") if site.index % 2 else names

    def reset_parameters(self, generator: torch.Generator | None = None, std: float = 0.02) -> None:
        with torch.no_grad():
            for theta in self.logits.values():
                theta.zero_()

    def neutral_(self) -> None:
        self.reset_parameters()

    @property
    def neutral(self) -> Neutral:
        return "rounding"

    def dead(self) -> dict[str, str]:
        return {f"logits.{i}": "a softmax of one logit is one" for i, t in self.logits.items() if len(t) == 1}

    def _open(self, x: Tensor, tokens: Tokens) -> Bank:
        return Bank((x,), None, x)

    def found(self, value: Bank, theta: Tensor) -> tuple[list[Tensor], Tensor]:
        """The sources and their logits."""
        return [*value.runs, *([] if value.part is None else [value.part])], theta

    def _read(self, value: Bank, site: Site) -> Seen:
        if not self.uses(site):
            return Seen(value.total)
        theta = self.logits[str(site.index)]
        sources, logits = self.found(value, theta)
        return Seen(weighted_sum(sources, static=logits.softmax(-1)[None] * len(theta))[0])

    def _write(self, value: Bank, site: Site, y: Tensor, seen: Seen, c: Seen) -> Bank:
        total, part = value.total + y, y if value.part is None else value.part + y
        if site.index % 2:
            return Bank((*value.runs, part), None, total)
        return Bank(value.runs, part, total)

    def _pack(self, value: Bank, site: Site) -> tuple[Tensor, ...]:
        return (value.total, *value.runs, *(() if value.part is None else (value.part,)))

    def _unpack(self, tensors: tuple[Tensor, ...], site: Site, tokens: Tokens) -> Bank:
        total, *rest = tensors
        return Bank(tuple(rest[:-1]), rest[-1], total) if site.index % 2 else Bank(tuple(rest), None, total)

    def _weights(self, value: Bank, site: Site) -> Tensor | None:
        if not self.uses(site):
            return None
        theta = self.logits[str(site.index)]
        weights = self.found(value, theta)[1].softmax(-1) * len(theta)
        return weights.expand(*value.total.shape[:-1], 1, len(weights))
