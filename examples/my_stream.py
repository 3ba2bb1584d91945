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

import torch
from torch import Tensor, nn

from twoaxis.base.method import OneAt
from twoaxis.depth.history import HistoryStream, View, Weights
from twoaxis.depth.plan import Plan, Read
from twoaxis.depth.site import Site
from twoaxis.depth.stream import Apply, Layout, Seen
from twoaxis.kernels.precision import widen


@dataclass(frozen=True, kw_only=True)
class MemoryMixConfig:
    """Options of the memory mix."""

    start: float = 4.0
    """Initial logit of the newest memory; the others start at zero."""

    def __post_init__(self) -> None:
        if self.start < 0:
            raise ValueError(f"start must not be negative, got {self.start}")


class MemoryMix(HistoryStream):
    """Attention over a static mixture of earlier residual states."""

    name = "memory_mix"
    Config = MemoryMixConfig
    config: MemoryMixConfig
    variants = ({}, {"start": 0.0})
    source, goes_on = "state", "own"
    theta: nn.ParameterDict

    def __init__(self, config: MemoryMixConfig, layout: Layout) -> None:
        super().__init__(config, layout)
        mixing = [s.index for s in layout.sublayers if s.kind in ("attention", "parallel") and self.uses(s)]
        born = {index: n for n, index in enumerate(mixing)}
        reads = {index: Read(range(n + 1)) for index, n in born.items()}
        self.follow(Plan(layout, born, reads, [f"state before site {index}" for index in mixing]))
        for index, read in reads.items():
            self.parameter(f"theta.{index}", read.total, start=OneAt(value=config.start))

    def route(self, view: View, site: Site) -> Weights:
        """The softmax of the site's scalars, in float32 at least."""
        return Weights(static=widen(self.theta[str(site.index)]).softmax(-1).unsqueeze(0))

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

    def dead(self) -> dict[str, str]:
        """The first mixture has one memory: its softmax is constant."""
        lone = [index for index, read in enumerate(self.plan.reads) if read is not None and read.total == 1]
        return {f"theta.{index}": "a softmax of one logit is one" for index in lone}
