"""Memory mix: each attention reads a learned convex mixture of the residual states that earlier attentions met.

    x_{l+1} = x_l + f_l( input_l )                            the plain residual goes on as ever
    m_1, m_2, ... = x_l on arrival at the attention sites     the memories, the newest one being x_l itself
    input_l = Σ_i softmax_i( θ_l ) m_i                        at attention sites
    input_l = x_l                                             everywhere else

    x ──┬──attn──(+)──mlp──(+)──┬──attn──(+)──mlp──(+)── out
        │ m_1                   │ m_2 ▲
        └───────────────────────┴──θ──┘

One scalar per attention site and memory. The mixture feeds the attention only; what the attention's output is added
to is the plain residual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from twoaxis.depth.site import Site
from twoaxis.depth.stream import Apply, Cost, Layout, Seen, Stream, Tokens
from twoaxis.kernels.precision import routing_dtype
from twoaxis.kernels.weighted_sum import weighted_sum


@dataclass(frozen=True, kw_only=True)
class MemoryMixConfig:
    """Options of the memory mix."""

    start: float = 4.0
    """Initial logit of the newest memory; the others start at zero."""

    def __post_init__(self) -> None:
        if self.start < 0:
            raise ValueError(f"start must not be negative, got {self.start}")


class Memories(NamedTuple):
    """The running residual and the memories, oldest first; none are kept once nobody will read them."""

    x: Tensor
    kept: tuple[Tensor, ...]


class MemoryMix(Stream):
    """Attention over a static mixture of earlier residual states."""

    name = "memory_mix"
    Config = MemoryMixConfig
    config: MemoryMixConfig
    variants = ({}, {"start": 0.0})

    def __init__(self, config: MemoryMixConfig, layout: Layout) -> None:
        super().__init__(config, layout)
        mixing = [s for s in layout.sublayers if s.kind in ("attention", "parallel") and self.uses(s)]
        self.count = {site.index: n for n, site in enumerate(mixing, start=1)}
        """For each site that mixes: how many memories it reads, its own included."""
        self.last = max(self.count, default=-1)
        self.theta = nn.ParameterDict({str(i): nn.Parameter(torch.empty(n)) for i, n in self.count.items()})

    def reset_parameters(self, generator: torch.Generator | None = None, std: float = 0.02) -> None:
        """Zero, and `start` for the newest memory."""
        with torch.no_grad():
            for theta in self.theta.values():
                theta.zero_()[-1] = self.config.start

    def definition(self, x: Tensor, apply: Apply) -> Tensor:
        """The equation, on a list of memories."""
        memories: list[Tensor] = []
        for site in self.sites:
            read = x
            if site.kind in ("attention", "parallel"):
                memories.append(x)
                read = torch.tensordot(self.theta[str(site.index)].softmax(0), torch.stack(memories), 1)
            x = x + apply(site, Seen(read)).y
        return x

    def _arrive(self, x: Tensor, kept: tuple[Tensor, ...], index: int) -> Memories:
        """The state on arrival at site `index`."""
        if index > self.last:
            return Memories(x, ())
        return Memories(x, (*kept, x) if index in self.count else kept)

    def _open(self, x: Tensor, tokens: Tokens) -> Memories:
        return self._arrive(x, (), 0)

    def _read(self, value: Memories, site: Site) -> Seen:
        if site.index not in self.count:
            return Seen(value.x)
        return Seen(weighted_sum(value.kept, static=self._alpha(value, site)[None])[0])

    def _write(self, value: Memories, site: Site, y: Tensor, seen: Seen, c: Seen) -> Memories:
        return self._arrive(value.x + y, value.kept, site.index + 1)

    def _alpha(self, value: Memories, site: Site) -> Tensor:
        """The weights (S,), in float32 at least."""
        return self.theta[str(site.index)].to(routing_dtype(value.x.dtype)).softmax(-1)

    def _pack(self, value: Memories, site: Site) -> tuple[Tensor, ...]:
        # a memory made on arrival here is x itself
        return (value.x, *(value.kept[:-1] if site.index in self.count else value.kept))

    def _unpack(self, tensors: tuple[Tensor, ...], site: Site, tokens: Tokens) -> Memories:
        x, *kept = tensors
        return self._arrive(x, tuple(kept), site.index)

    def dead(self) -> dict[str, str]:
        """The first mixture has one memory: its softmax is constant."""
        return {f"theta.{index}": "a softmax of one logit is one" for index, n in self.count.items() if n == 1}

    def cost(self) -> Cost:
        """One multiply-add per channel and memory read."""
        reads = sum(self.count.values())
        # x and the memories that are not x: on arrival at a site, those of the sites before it
        held = max(1 + sum(i < site.index <= self.last for i in self.count) for site in self.layout.sites)
        width = self.layout.width
        return Cost(parameters=reads, flops=2 * reads * width, reads=reads, live=held * width)

    def sources(self, site: Site) -> tuple[str, ...]:
        """The memories `site` mixes, oldest first."""
        mixes = site.index in self.count
        return tuple(f"state before site {i}" for i in self.count if i <= site.index) if mixes else ()

    def _weights(self, value: Memories, site: Site) -> Tensor | None:
        if site.index not in self.count:
            return None
        alpha = self._alpha(value, site)
        return alpha.expand(*value.x.shape[:-1], 1, len(alpha))
