"""Fading memory: each attention reads the residual states that attentions met, the older the less.

    x_{l+1} = x_l + f_l( input_l )                            the plain residual goes on as ever
    m_0, m_1, ... = x_l on arrival at the attention sites     the memories; at the n-th attention m_n is x_l itself
    input_l = Σ_{i ≤ n} softmax_i( -s_l (n - i) ) m_i         at attention sites: what is older weighs less
    input_l = x_l                                             everywhere else

    x ──┬──attn──(+)──mlp──(+)──┬──attn──(+)──mlp──(+)── out
        │ m_0                   │ m_1 ▲
        └───────────────────────┴──s──┘

One slope per attention site. The mixture feeds the attention only; what the attention's output is added to is the plain
residual. The first attention has one memory, which has the weight one whatever the slope.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import twoaxis
from twoaxis.base.options import NotNegative, Options
from twoaxis.depth.history import HistoryStream, View, Weights
from twoaxis.depth.plan import Plan, Read
from twoaxis.depth.site import Site
from twoaxis.depth.stream import Apply, Layout, Seen
from twoaxis.kernels.precision import widen


@dataclass(frozen=True, kw_only=True)
class FadingMemoryConfig(Options):
    """Options of the fading memory."""

    slope: NotNegative = 4.0
    """Initial slope; zero is a plain average."""


@twoaxis.register("fading_memory")
class FadingMemory(HistoryStream):
    """Attention over earlier residual states, weighted by their age."""

    Config = FadingMemoryConfig
    config: FadingMemoryConfig
    variants = ({}, {"slope": 0.0})
    source, goes_on = "state", "own"

    def __init__(self, config: FadingMemoryConfig, layout: Layout) -> None:
        super().__init__(config, layout)
        mixing = [s.index for s in layout.sublayers if s.kind in ("attention", "parallel") and self.uses(s)]
        born = {index: n for n, index in enumerate(mixing)}
        reads = {index: Read(range(n + 1)) for index, n in born.items()}
        self.follow(Plan(layout, born, reads, [f"state before site {index}" for index in mixing]))
        self.parameter("slope", len(mixing), start=config.slope)

    def route(self, view: View, site: Site) -> Weights:
        """The softmax of what age subtracts, in float32 at least."""
        ages = torch.arange(len(view.sources) - 1, -1, -1, device=self.slope.device)
        slope = widen(self.slope[self.plan.born[site.index]])
        return Weights(static=(-slope * ages).softmax(-1).unsqueeze(0))

    def definition(self, x: Tensor, apply: Apply) -> Tensor:
        """The equation, on a list of memories."""
        memories: list[Tensor] = []
        for site in self.sites:
            read = x
            if site.kind in ("attention", "parallel"):
                memories.append(x)
                slope, newest = self.slope[len(memories) - 1], len(memories) - 1
                logits = torch.stack([-slope * (newest - i) for i in range(len(memories))])
                read = torch.tensordot(logits.softmax(0), torch.stack(memories), 1)
            x = x + apply(site, Seen(read)).y
        return x

    def dead(self) -> dict[str, str]:
        """The first mixture has one memory: its softmax is constant."""
        return {"slope[0]": "a softmax of one logit is one"} if self.slope is not None else {}
