"""What ELC-BERT and Vertical Attention share: blocks that read a softmax of static scalars over block outputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from twoaxis.base.method import OneAt
from twoaxis.depth.history import History, HistoryStream, View, Weights
from twoaxis.depth.plan import Plan, Read
from twoaxis.depth.site import Site
from twoaxis.depth.stream import Layout, Seen
from twoaxis.kernels.precision import routing_dtype


class Inside(NamedTuple):
    """What lives inside a block: its input, while a later sub-layer reads it, and what mixers gave ahead of it."""

    given: Tensor | None = None
    lead: Tensor | None = None


class SlotMix(HistoryStream):
    """Blocks that read a softmax of static scalars over the slots.

    Args:
        config: the method's options.
        layout: the shape it is built for.
        skip: whether what a block stores contains its input.
        rejoin: without the skip: whether sub-layers after the first see the input too.
        read_out: whether the head reads a mixture of its own.
        start: initial logit of the newest slot; the others start at zero.
    """

    def __init__(self, config: Any, layout: Layout, *, skip: bool, rejoin: bool, read_out: bool, start: float) -> None:
        super().__init__(config, layout)
        self.drops: set[int] = set()
        """Sites that replace their block's input instead of adding to it."""
        self.bare: set[int] = set()
        """Blocks with such a site: what they store does not contain their input."""
        self.pends: set[int] = set()
        """Leading mixers with a mixture still ahead in their block."""
        self.rejoins: set[int] = set()
        """Sites that see their block's input beside the running value."""
        self.gives: set[int] = set()
        """Sites with one of these still ahead in their block."""
        mixing = [site for b in range(layout.blocks) if (site := self._plan(b, skip, rejoin)) is not None]
        mixing += [layout.out] if read_out and self.uses(layout.out) else []
        plan = Plan.blocks(layout, lambda first: None)
        self.follow(Plan(layout, plan.born, {s.index: Read(range(s.block + 1)) for s in mixing}, plan.names))
        for site in mixing:
            self.parameter(f"logits.{site.block}", site.block + 1, start=OneAt(value=start))
        # no finite logits make a mixture of several slots the newest one
        self.neutral = "none" if mixing else "bitwise"

    def _plan(self, block: int, skip: bool, rejoin: bool) -> Site | None:
        """What each site of a block does; the one that reads a mixture is returned."""
        sites = self.sites_of(block)
        first = next((i for i, s in enumerate(sites) if s.kind != "mixer"), 0)  # of the sub-layers the block stores
        mixing = next((s for s in sites[: first + 1] if self.uses(s)), None)
        if mixing is None:
            return None
        self.pends.update(s.index for s in sites if s.index < mixing.index)
        if skip or not self.uses(sites[first]):
            return mixing
        self.drops.add(sites[first].index)
        self.bare.add(block)
        if rejoin:
            again = [s.index for s in sites[first + 1 :] if self.uses(s)]
            self.rejoins.update(again)
            self.gives.update(s.index for s in sites[first:] if again and s.index < again[-1])
        return mixing

    def finish(self, x: Tensor) -> Tensor:
        """What a block without skip stores, from the sum of its increments."""
        return x

    # The family's hooks.

    def route(self, view: View, site: Site) -> Weights:
        """A softmax of scalars; where sources are normalised, times one over their norms: no source is copied."""
        alpha = self._alpha(site, view.kept[0].x.dtype)
        if view.kept[0].derived is None:
            return Weights(static=alpha.unsqueeze(0))
        inverses = torch.stack([source.derived for source in view.kept], dim=-1)
        return Weights(token=(alpha * inverses).unsqueeze(-2))

    def _alpha(self, site: Site, dtype: torch.dtype) -> Tensor:
        """The weights (S,) of the mixture that `site` reads."""
        return self.logits[str(site.block)].to(routing_dtype(dtype)).softmax(-1)

    def enter(self, way: str, read: Tensor, view: View, site: Site) -> Tensor:
        """What mixers gave before the mixture is added to it."""
        inside = view.state.inside
        return read if inside is None or inside.lead is None else read + inside.lead

    def inner(self, h: History, site: Site) -> Tensor:
        """The running value, with the block's input where the form of the block has it."""
        assert h.x is not None
        return h.inside.given + h.x if site.index in self.rejoins else h.x

    def onward(self, h: History, site: Site, y: Tensor, seen: Seen) -> tuple[Tensor, Inside | None]:
        """The block's running value: begun anew without its input where the skip is dropped."""
        i, (given, lead) = site.index, h.inside or Inside()
        if i in self.drops:
            # a sub-layer may answer in a narrower dtype than the stream's, in which it goes on
            x, given = y.to(torch.promote_types(y.dtype, seen.x.dtype)), seen.x
        else:
            before = seen.x if i in self.plan.reads else h.x
            assert before is not None
            x = before + y
        if site.last and site.block in self.bare:
            x = self.finish(x)
        given = given if i in self.gives else None
        lead = None if i not in self.pends else y if lead is None else lead + y
        return x, None if given is None and lead is None else Inside(given, lead)

    # What it declares.

    def _weights(self, value: History, site: Site) -> Tensor | None:
        if site.index not in self.plan.reads:
            return None
        x = value.kept[0].x
        alpha = self._alpha(site, x.dtype)
        return alpha.expand(*x.shape[:-1], 1, len(alpha))

    def dead(self) -> dict[str, str]:
        """The first block has one slot: its logit gets a gradient of exactly zero."""
        first = any(site.index in self.plan.reads for site in self.sites_of(0))
        return {"logits.0": "the block has one slot, its softmax is constant"} if first else {}

    def flops(self) -> int:
        """One multiply-add per channel and slot read, and the additions that the form of the block adds or saves."""
        read = sum(read.total for read in self.plan.reads.values())
        # each pending mixer's increment is added once to the others or to the mixture; a dropped skip saves an addition
        return self.layout.width * (2 * read + len(self.pends) + len(self.rejoins) - len(self.drops))
