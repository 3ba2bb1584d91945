"""DenseFormer: a learned weighted sum of all earlier block outputs after each block.

Pagliardini, Mohtashami, Fleuret, Jaggi: DenseFormer, arXiv 2402.02622 (2024). Code: epfml/DenseFormer (the package).

    X_0 = embedding        X_j = Block_j(Y_{j-1})                     slot j
    Y_j = Σ_s α_{j,s} X_s  over s ≤ j with s ≡ j (mod dilation)       if period divides j
    Y_j = X_j                                                         otherwise

    X_0 ──► Block_1 ──► X_1 ──► Block_2 ──► X_2 ──► ...
     │                   │  ▲                │  ▲
     └───────────────────┴──┘ α_1            │  │
     └───────────────────┴───────────────────┴──┘ α_2

The slots hold block outputs before the average. Weights are free real scalars: no softmax, no bias, negative allowed.
The average after block j is what the first site of block j+1 reads (for the last block: what the head reads), so the
residual inside a block continues from it. Slots of other residue classes are never touched, and a slot is dropped
after its last reader. At the initial values (one on the newest slot, zero elsewhere) it is the plain residual bit
for bit. The original puts the weights into the weight-decay group, where they decay towards zero, the diagonal
included; `parameter_groups` says so too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from twoaxis.base.method import Card, ParameterGroup, Published
from twoaxis.base.options import Count, Options
from twoaxis.depth.site import Site
from twoaxis.depth.stream import Apply, Cost, Layout, Neutral, Seen, Stream, Tokens
from twoaxis.kernels.weighted_sum import share, weighted_sum


@dataclass(frozen=True, kw_only=True)
class DenseFormerConfig(Options):
    """Options of DenseFormer; the paper recommends dilation 4, period 5 for deep models."""

    dilation: Count = 1
    """Average every `dilation`-th slot, counted back from the newest."""
    period: Count = 1
    """Average after every `period`-th block."""


class Slots(NamedTuple):
    """The running residual inside a block and the block outputs somebody will still read; averages take `shared`."""

    x: Tensor
    slots: tuple[Tensor | None, ...]
    shared: tuple[Tensor | None, ...]


class DenseFormer(Stream):
    """Depth-weighted averages of block outputs."""

    name = "denseformer"
    Config = DenseFormerConfig
    config: DenseFormerConfig
    variants = ({}, {"dilation": 2}, {"dilation": 2, "period": 3}, {"dilation": 5, "period": 2})
    card = Card(
        title="DenseFormer",
        axis="depth",
        source="block output before its average; slot 0 is the embedding",
        query="-",
        key="-",
        value="raw slots",
        literal_qkv=False,
        normaliser="none: free real scalars",
        adaptivity="static scalars",
        window="all earlier blocks of one residue class (dilation), every period-th block reads",
        granularity="per block",
        ways="one",
        injection="replaces the input of the next block",
        sharing="none over depth, shared by all tokens",
        gating="-",
        depth_state="block outputs with a reader ahead",
        token_state="none",
        paper="Pagliardini, Mohtashami, Fleuret, Jaggi, DenseFormer, arXiv 2402.02622",
        year=2024,
        quirks=(
            "The two official implementations disagree about period and dilation; this is the package, which "
            "matches the "
            "paper: experiments(k, p) = package(dilation=k*p, period=p).",
            "Weights are in the weight-decay group of the original and decay towards zero, the diagonal included.",
            "With 48 blocks, dilation 4 and period 5 the last three blocks are not averaged.",
            "For blocks before the first full dilation the average is a single learned gain.",
        ),
        published=(
            Published(
                "OpenWebText2, 48 blocks, perplexity (mean of 3 seeds): Transformer 18.61, 1x1 17.84, "
                "4x1 17.86, 4x5 17.87",
                "arXiv 2402.02622, table 1",
            ),
            Published("Same training time, 48 blocks: 4x5 17.87 against 18.33", "arXiv 2402.02622, table 3"),
            Published(
                "436M MoE ablation, validation loss: baseline 1.766, DenseFormer 1.767", "arXiv 2603.15031, table 4"
            ),
        ),
    )

    def __init__(self, config: DenseFormerConfig, layout: Layout) -> None:
        super().__init__(config, layout)
        first_sites = [s for s in layout.sites if s.first and s.block > 0]
        averaged = [s.block for s in first_sites if s.block % config.period == 0 and self.uses(s)]
        self.read_slots = {j: tuple(range(j % config.dilation, j + 1, config.dilation)) for j in averaged}
        """For each averaged block: the slots its average reads, oldest first."""
        self.last_reader = {s: j for j in averaged for s in self.read_slots[j]}
        """For each slot: the last block whose average reads it."""
        self.alpha = nn.ParameterDict({str(j): nn.Parameter(torch.empty(len(s))) for j, s in self.read_slots.items()})

    def definition(self, x: Tensor, apply: Apply) -> Tensor:
        """Block by block; X_0, X_1, ... are the slots, Y_j is what block j + 1 starts from."""
        slots = [x]
        for j in range(1, self.layout.blocks + 1):
            for site in self.sites_of(j - 1):
                x = x + apply(site, Seen(x)).y
            slots.append(x)
            if j % self.config.period == 0:
                averaged = [
                    slot for s, slot in enumerate(slots) if s % self.config.dilation == j % self.config.dilation
                ]
                x = torch.tensordot(self.alpha[str(j)], torch.stack(averaged), 1)
        return x

    def reset_parameters(self, generator: torch.Generator | None = None, std: float = 0.02) -> None:
        """One on the newest slot, zero on the others: the plain residual."""
        with torch.no_grad():
            for alpha in self.alpha.values():
                alpha.zero_()[-1] = 1.0

    def neutral_(self) -> None:
        """The initial values are neutral."""
        self.reset_parameters()

    @property
    def neutral(self) -> Neutral:
        """Zero times a slot adds nothing to a bit."""
        return "bitwise"

    def _open(self, x: Tensor, tokens: Tokens) -> Slots:
        return self._push(Slots(x, (), ()), 0)

    def _read(self, value: Slots, site: Site) -> Seen:
        if not site.first or site.block not in self.read_slots:
            return Seen(value.x)
        return Seen(weighted_sum(self._gather(value, site), static=self.alpha[str(site.block)][None])[0])

    def _write(self, value: Slots, site: Site, y: Tensor, seen: Seen, c: Seen) -> Slots:
        x, ahead = seen.x + y, site.block + 1
        live = [self.last_reader.get(i, 0) >= ahead for i in range(len(value.slots))]
        slots, shared = (
            tuple(s if kept else None for s, kept in zip(row, live, strict=True)) for row in (value.slots, value.shared)
        )
        after = Slots(x, slots, shared)
        return self._push(after, ahead) if site.last else after

    def _gather(self, value: Slots, site: Site) -> list[Tensor]:
        slots = [value.shared[s] for s in self.read_slots[site.block]]
        return [s for s in slots if s is not None]

    def _push(self, value: Slots, number: int) -> Slots:
        """Make the running residual slot `number`, if anybody will read it."""
        x, read = value.x, number in self.last_reader
        return Slots(x, (*value.slots, x if read else None), (*value.shared, share(x) if read else None))

    def _pack(self, value: Slots, site: Site) -> tuple[Tensor, ...]:
        # the newest slot, where it is live, is x itself
        return (value.x, *(s for s in value.slots[:-1] if s is not None))

    def _unpack(self, tensors: tuple[Tensor, ...], site: Site, tokens: Tokens) -> Slots:
        live = [self.last_reader.get(i, 0) >= site.block for i in range(site.block)]
        self._packed(tensors, 1 + sum(live), site)
        x, *rest = tensors
        older = iter(rest)
        slots = [next(older) if kept else None for kept in live]
        shared = [None if slot is None else share(slot) for slot in slots]
        return self._push(Slots(x, tuple(slots), tuple(shared)), site.block)

    def _weights(self, value: Slots, site: Site) -> Tensor | None:
        if not site.first or site.block not in self.read_slots:
            return None
        alpha = self.alpha[str(site.block)]
        return alpha.expand(*value.x.shape[:-1], 1, len(alpha))

    def sources(self, site: Site) -> tuple[str, ...]:
        """The slots the average before `site` reads."""
        slots = self.read_slots.get(site.block, ()) if site.first else ()
        return tuple("embedding" if s == 0 else f"block {s - 1}" for s in slots)

    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        """As in the original: decayed like any matrix."""
        names = tuple(name for name, _ in self.named_parameters())
        return (ParameterGroup(names, decay=True),) if names else ()

    def cost(self) -> Cost:
        """One multiply-add per channel and slot read; a slot that is read alone is only scaled."""
        reads = sum(len(s) for s in self.read_slots.values())
        alone = sum(len(s) == 1 for s in self.read_slots.values())
        # at a boundary the newest slot is the running residual itself; inside a block it stands beside it
        live = 1 + max(sum(s <= j < last for s, last in self.last_reader.items()) for j in range(self.layout.blocks))
        width = self.layout.width
        return Cost(parameters=reads, flops=(2 * reads - alone) * width, reads=reads, live=live * width)
