"""Small correct streams, from which the planted faults are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from twoaxis.depth.site import Site
from twoaxis.depth.stream import Apply, Layout, Seen, Stream, Tokens
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
    neutral = "bitwise"

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
