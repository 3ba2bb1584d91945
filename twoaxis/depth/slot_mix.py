"""What ELC-BERT and Vertical Attention share: blocks that read a softmax of static scalars over block outputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from twoaxis.base.method import ParameterGroup
from twoaxis.depth.site import Site
from twoaxis.depth.stream import Cost, Layout, Neutral, Seen, Stream, Tokens
from twoaxis.kernels.precision import routing_dtype
from twoaxis.kernels.weighted_sum import share, weighted_sum


class Slot(NamedTuple):
    """A finished block output, as mixtures take it, and one over its norm per token, (...), if a method normalises."""

    x: Tensor
    shared: Tensor
    inverse: Tensor | None = None


class Mixture(NamedTuple):
    """The state of a method that reads mixtures of block outputs.

    Attributes:
        x: the running value; between blocks the newest slot.
        slots: block outputs, oldest first, while somebody ahead reads them.
        given: the block's input, while a later sub-layer of the block reads it.
        lead: what mixers gave before the block's mixture was read.
    """

    x: Tensor
    slots: tuple[Slot, ...]
    given: Tensor | None = None
    lead: Tensor | None = None


class SlotMix(Stream):
    """Blocks that read a softmax of static scalars over the slots; what ELC-BERT and Vertical Attention share.

    Args:
        config: the method's options.
        layout: the shape it is built for.
        skip: whether what a block stores contains its input.
        rejoin: without the skip: whether sub-layers after the first see the input too.
        read_out: whether the head reads a mixture of its own.
    """

    def __init__(self, config: Any, layout: Layout, *, skip: bool, rejoin: bool, read_out: bool) -> None:
        super().__init__(config, layout)
        self.mixes: dict[int, int] = {}
        """For each site that reads a mixture: its block."""
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
        for block in range(layout.blocks):
            self._plan(block, skip, rejoin)
        if read_out and self.uses(layout.out):
            self.mixes[layout.out.index] = layout.blocks
        self.last_mix = max(self.mixes, default=-1)
        """The last site that reads a mixture; slots are forgotten after it."""
        self.logits = nn.ParameterDict({str(b): nn.Parameter(torch.empty(b + 1)) for b in self.mixes.values()})

    def _plan(self, block: int, skip: bool, rejoin: bool) -> None:
        """What each site of a block does."""
        sites = [s for s in self.layout.sublayers if s.block == block]
        first = next((i for i, s in enumerate(sites) if s.kind != "mixer"), 0)  # of the sub-layers the block stores
        mixing = next((s for s in sites[: first + 1] if self.uses(s)), None)
        if mixing is None:
            return
        self.mixes[mixing.index] = block
        self.pends.update(s.index for s in sites if s.index < mixing.index)
        if skip or not self.uses(sites[first]):
            return
        self.drops.add(sites[first].index)
        self.bare.add(block)
        if rejoin:
            again = [s.index for s in sites[first + 1 :] if self.uses(s)]
            self.rejoins.update(again)
            self.gives.update(s.index for s in sites[first:] if again and s.index < again[-1])

    # What a method may add.

    def _slot(self, x: Tensor) -> Slot:
        return Slot(x, share(x))

    def _store(self, x: Tensor) -> Tensor:
        """What a block without skip stores, from the sum of its increments."""
        return x

    # The state machine.

    def _alpha(self, site: Site, dtype: torch.dtype) -> Tensor:
        """The weights (S,) of the mixture that `site` reads."""
        return self.logits[str(site.block)].to(routing_dtype(dtype)).softmax(-1)

    def _mix(self, slots: tuple[Slot, ...], site: Site) -> Tensor:
        sources, inverses = [s.shared for s in slots], [s.inverse for s in slots if s.inverse is not None]
        alpha = self._alpha(site, sources[0].dtype)
        if not inverses:
            return weighted_sum(sources, static=alpha[None])[0]
        # the norms go into the weights, so that no source is copied
        return weighted_sum(sources, token=(alpha * torch.stack(inverses, dim=-1)).unsqueeze(-2))[0]

    def _open(self, x: Tensor, tokens: Tokens) -> Mixture:
        return Mixture(x, (self._slot(x),) if self.last_mix >= 0 else ())

    def _read(self, value: Mixture, site: Site) -> Seen:
        if site.index in self.mixes:
            x = self._mix(value.slots, site)
            return Seen(x if value.lead is None else x + value.lead)
        if site.index in self.rejoins:
            assert value.given is not None
            return Seen(value.given + value.x)
        return Seen(value.x)

    def _write(self, value: Mixture, site: Site, y: Tensor, seen: Seen, c: Seen) -> Mixture:
        index, given = site.index, value.given
        if index in self.drops:
            x, given = y, seen.x
        else:
            x = (seen.x if index in self.mixes else value.x) + y
        lead = None
        if index in self.pends:
            lead = y if value.lead is None else value.lead + y
        slots = value.slots if index < self.last_mix else ()
        if site.last and site.block in self.bare:
            x = self._store(x)
        if site.last and index < self.last_mix:
            slots = (*slots, self._slot(x))
        return Mixture(x, slots, given if index in self.gives else None, lead)

    def _pack(self, value: Mixture, site: Site) -> tuple[Tensor, ...]:
        # the newest slot, where there are slots, is x itself; norms are derived
        return (value.x, *(slot.x for slot in value.slots[:-1]))

    def _unpack(self, tensors: tuple[Tensor, ...], site: Site, tokens: Tokens) -> Mixture:
        reads = site.index <= self.last_mix
        self._packed(tensors, site.block + 1 if reads else 1, site)
        x, *older = tensors
        return Mixture(x, tuple(self._slot(t) for t in (*older, x)) if reads else ())

    def _weights(self, value: Mixture, site: Site) -> Tensor | None:
        if site.index not in self.mixes:
            return None
        alpha = self._alpha(site, value.x.dtype)
        return alpha.expand(*value.x.shape[:-1], 1, len(alpha))

    # What it declares.

    def sources(self, site: Site) -> tuple[str, ...]:
        """The slots `site` mixes, oldest first."""
        if site.index not in self.mixes:
            return ()
        return ("embedding", *(f"block {b}" for b in range(site.block)))

    @property
    def neutral(self) -> Neutral:
        """No finite logits make a mixture of several slots the newest one; without any mixture the stream is plain."""
        return "none" if self.mixes else "bitwise"

    def neutral_(self) -> None:
        """Nothing to set, where nothing is mixed."""
        if self.neutral == "none":
            super().neutral_()

    def _reset(self, newest: float) -> None:
        """Logits zero, on the newest slot `newest`."""
        with torch.no_grad():
            for theta in self.logits.values():
                theta.zero_()[-1] = newest

    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        """As in ELC-BERT's code: the logits are not decayed and learn at the common rate."""
        names = tuple(name for name, _ in self.named_parameters())
        return (ParameterGroup(names),) if names else ()

    def dead(self) -> dict[str, str]:
        """The first block has one slot: its logit gets a gradient of exactly zero."""
        return {"logits.0": "the block has one slot, its softmax is constant"} if "0" in self.logits else {}

    def cost(self) -> Cost:
        """One multiply-add per channel and slot read, and the additions that the form of the block adds or saves."""
        width, reads = self.layout.width, sum(theta.numel() for theta in self.logits.values())
        # each pending mixer's increment is added once to the others or to the mixture; a dropped skip saves an addition
        adds = len(self.pends) + len(self.rejoins) - len(self.drops)
        live = max(self._held(site) for site in self.layout.sites)
        return Cost(parameters=reads, flops=(2 * reads + adds) * width, reads=reads, live=live * width)

    def _held(self, site: Site) -> int:
        """Vectors in the state on arrival at `site`."""
        if site.first:  # the running value is the newest slot
            return site.block + 1 if site.index <= self.last_mix else 1
        slots = site.block + 1 if site.index <= self.last_mix else 0
        return slots + 1 + (site.index - 1 in self.gives) + (site.index - 1 in self.pends)
