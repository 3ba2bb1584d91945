"""The real model on meta tensors under a meter: a training pass, and the next tokens of sequences.

    embedding ─► stream ─► norm ─► sub-layer ─► stream ─► ... ─► norm ─► head          backward: the parts' own nodes

Nothing is computed, so that any size takes seconds, and nothing is stood in for: these are the modules that train and
decode, in the order in which they run, with the kernels of the device that is asked for. Forward hooks tell the meter
which part runs; in the backward pass autograd's node numbers do, see `twoaxis.base.meter`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from twoaxis.base.meter import Event, Meter, tensors_in
from twoaxis.costs.fuse import STREAM, VIEW, Part, Work, highest, total, work_by
from twoaxis.depth.site import Site
from twoaxis.kernels.dispatch import target
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder, Past
from twoaxis.ring import Ring

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Recompute = Literal["none", "block"]


class Saved(NamedTuple):
    """Bytes that a block leaves for its backward pass.

    Attributes:
        stream: of the stream and the pre-norms.
        inside: of the sub-layers.
    """

    stream: int
    inside: int


class TrainTrace(NamedTuple):
    """A training pass.

    Attributes:
        forward: work by kind of part, pre-norms with the stream.
        backward: and of the gradients, recomputed blocks and the views of both passes included.
        sites: how many sub-layers there are.
        alive: bytes at the end of the forward pass by the part that allocated them.
        extra: bytes above those at the highest moment of the backward pass while the `head` and while `blocks` run,
            gradients of parameters left out.
        peak: bytes at the highest moment of both passes, gradients of parameters included.
    """

    forward: dict[Any, Work]
    backward: dict[Any, Work]
    sites: int
    alive: Counter[Part]
    extra: dict[str, float]
    peak: int

    @property
    def saved(self) -> int:
        """Bytes kept for the backward pass."""
        return sum(self.alive.values())

    def saved_by(self, block: int) -> Saved:
        """Bytes that one block keeps; -1 is the state before the first, the number of blocks the read-out."""
        found = Counter({"stream": 0, "inside": 0})
        for part, size in self.alive.items():
            if part.block == block and part.kind not in ("embedding", "head"):
                found["stream" if part.kind in STREAM else "inside"] += size
        return Saved(found["stream"], found["inside"])

    def saved_by_kind(self, kind: str) -> int:
        """Bytes that the head or the embedding keeps."""
        return sum(size for part, size in self.alive.items() if part.kind == kind)

    def work(self, kind: str) -> Work:
        """Both passes of the `stream`, the `head`, the `embedding`, of the `sublayers` together, or of `all`."""
        return total([*_of(self.forward, kind), *_of(self.backward, kind)])


class SiteTraffic(NamedTuple):
    """Bytes a stream moves per token between two sub-layers: the write of one and the read of the next.

    Attributes:
        block: of the reading site.
        kind: of the reading site.
        eager: every operation for itself.
        fused: in one kernel, or with a wide product or an attention in one before it, that, and one after it.
    """

    block: int
    kind: str
    eager: float
    fused: float


class Kept(NamedTuple):
    """Bytes that all sequences of a pass together keep between tokens, over all devices.

    Attributes:
        attention: keys and values, which grow with the context.
        local: rings of windows and convolutions.
        stream: the stream's own rings, such as Deep Delta's TC and EC.
    """

    attention: int
    local: int
    stream: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


class StepTrace(NamedTuple):
    """A forward pass that remembers.

    Attributes:
        parts: work by kind of part, pre-norms with the stream.
        sites: what the stream moves per token to each site, out last; pre-norms left out.
        past: what is remembered after the pass.
    """

    parts: dict[Any, Work]
    sites: tuple[SiteTraffic, ...]
    past: Past

    def work(self, kind: str) -> Work:
        """Of the `stream`, the `head`, the `embedding`, or of all `sublayers`."""
        return total(_of(self.parts, kind))

    @property
    def kept(self) -> Kept:
        """Bytes of what is remembered."""
        return Kept(**self.past.nbytes_by_part())


def _of(parts: dict[Any, Work], kind: str) -> list[Work]:
    own = {"all": (), "sublayers": ("stream", "head", "embedding")}
    return [work for name, work in parts.items() if (name not in own[kind] if kind in own else name == kind)]


def meta_model(config: ModelConfig, dtype: str) -> Decoder:
    """A decoder of meta tensors."""
    with torch.device("meta"):
        return Decoder(config).to(DTYPES[dtype])


def trace_training(
    model: Decoder, batch: int, tokens: int, device: str | None = None, recompute: Recompute = "none"
) -> TrainTrace:
    """One forward and backward pass.

    Args:
        model: of meta tensors.
        batch: sequences.
        tokens: of each.
        device: whose kernels are counted where a method has several: `cpu`, or None for those of accelerators.
        recompute: whether blocks are made anew in the backward pass.
    """
    again = functools.partial(checkpoint, use_reentrant=False) if recompute == "block" else None
    ids = torch.empty(batch, tokens + 1, dtype=torch.long, device="meta")
    model.zero_grad(set_to_none=True)
    with torch.enable_grad(), metering(model, device) as meter:
        given = ids[:, :-1]
        info = model.info(given, 0, None)
        out, _ = model.run(model.embed(given), None, info, recompute=again)
        meter.part = Part("head", model.config.num_hidden_layers)
        loss = F.cross_entropy(model.logits(out).flatten(0, 1), ids[:, 1:].flatten())
        del out, info
        forward, alive = meter.take(), cast(Counter[Part], Counter(meter.alive()))
        loss.backward()
        backward = meter.take()
        gradients = {meter.allocation(p.grad) for p in model.parameters() if p.grad is not None}
        peak = meter.peak
    model.zero_grad(set_to_none=True)
    before, after = (work_by(events, lambda part: part.work) for events in (forward, backward))
    add_views(after, meter)
    return TrainTrace(before, after, len(model.stream.sites), alive, highest(backward, gradients), peak)


@torch.no_grad()
def trace_step(
    model: Decoder, batch: int, tokens: int, device: str | None = None, past: Past | None = None
) -> StepTrace:
    """The next tokens, remembered; logits of the last one.

    Args:
        model: of meta tensors.
        batch: sequences.
        tokens: of each.
        device: see `trace_training`.
        past: what earlier tokens left; None is the beginning of the sequences. See `lengthened`.
    """
    past = model.start() if past is None else past
    ids = torch.empty(batch, tokens, dtype=torch.long, device="meta")
    with metering(model, device) as meter:
        info = model.info(ids, past.seen, None)
        out, after = model.run(model.embed(ids), past, info)
        meter.part = Part("head", model.config.num_hidden_layers)
        model.logits(out[:, -1:])
        events = meter.take()
    assert after is not None
    sites = _sites(events, model.stream.layout.sites, batch * tokens)
    parts = work_by(events, lambda part: part.work)
    add_views(parts, meter)
    return StepTrace(parts, sites, after)


def add_views(parts: dict[Any, Work], meter: Meter) -> None:
    """Add the calls that move nothing to the work of the parts that made them."""
    for part, count in meter.views.items():
        if isinstance(part, Part) and part.work in parts:
            parts[part.work].eager[VIEW] += count


def lengthened(past: Past, seen: int) -> Past:
    """The memory of a pass as `seen` tokens would have left it."""

    def lengthen(ring: Ring) -> Ring:
        length = seen if ring.window is None else min(seen, ring.window - 1)
        if not ring.pieces or not length:
            return ring._replace(seen=seen, pieces=())
        shapes = ([*t.shape[: ring.axis], length, *t.shape[ring.axis + 1 :]] for t in ring.pieces[0])
        piece = tuple(t.new_empty(shape) for t, shape in zip(ring.pieces[0], shapes, strict=True))
        return ring._replace(seen=seen, pieces=(piece,))

    return past.map(lengthen)._replace(seen=seen)


def _sites(events: list[Event], sites: tuple[Site, ...], tokens: int) -> tuple[SiteTraffic, ...]:
    found = work_by(events, lambda part: (part.kind, part.site))
    works = [found.get(("stream", site.index), Work(Counter(), Counter())) for site in sites]
    return tuple(
        SiteTraffic(site.block, site.kind, work.eager_bytes / tokens, work.fused_bytes / tokens)
        for site, work in zip(sites, works, strict=True)
    )


@contextlib.contextmanager
def metering(model: Decoder, device: str | None) -> Iterator[Meter]:
    """A meter that knows the parts of a model; what is garbage waits, so that its collection changes no number."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        with target(device), Meter() as meter, following(model, meter):
            yield meter
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def following(model: Decoder, meter: Meter) -> Iterator[None]:
    """Tell a meter which part of a model runs."""
    hooks: list[Any] = []

    def around(module: nn.Module, inside: Part, after: Part) -> None:
        """`inside` while a module runs; what it returns, and what runs next, is part of `after`."""

        def leave(module: nn.Module, given: Any, result: Any) -> None:
            meter.hand_over(tensors_in((result[0],) if isinstance(result, tuple) else (result,)), after)
            meter.part = after

        hooks.append(module.register_forward_pre_hook(lambda *_: setattr(meter, "part", inside)))
        hooks.append(module.register_forward_hook(leave))

    out = model.stream.layout.out
    around(model.embed_tokens, Part("embedding"), Part("stream"))
    for block in map(model.block, range(model.config.num_hidden_layers)):
        first = Part("stream", block.number, block.sites[0].index)
        hooks.append(block.register_forward_pre_hook(lambda *_, first=first: setattr(meter, "part", first)))
        for site in block.sites:
            here = Part("stream", site.block, site.index)
            if (norm := block.norm(site)) is not None:
                around(norm, here._replace(kind="norm"), here)
            around(block.sublayer(site), here._replace(kind=site.kind), here._replace(site=site.index + 1))
    last = Part("stream", out.block, out.index)
    final = model.block(model.config.num_hidden_layers - 1)
    hooks.append(final.register_forward_hook(lambda *_: setattr(meter, "part", last)))
    around(model.norm, last._replace(kind="norm"), last)
    meter.part = Part("embedding")
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
