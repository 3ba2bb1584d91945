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
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from twoaxis.base.meter import Event, Meter, tensors_in
from twoaxis.costs.fuse import VIEW, Part, Work, highest, total, work_by
from twoaxis.depth.site import Site
from twoaxis.kernels.dispatch import target
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.ring import Ring

if TYPE_CHECKING:
    from twoaxis.model.graft_config import TwoAxisConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Recompute = Literal["none", "block"]


class Saved(NamedTuple):
    """Bytes that blocks leave for their backward pass."""

    stream: int  # of the stream and the pre-norms
    inside: int  # of the sub-layers


class TrainTrace(NamedTuple):
    """A training pass."""

    forward: dict[Any, Work]  # work by kind of part, pre-norms with the stream
    backward: dict[Any, Work]  # and of the gradients, recomputed blocks and the views of both passes included
    sites: int  # how many sub-layers there are
    # bytes at the end of the forward pass, by who allocated them (`stream` with the pre-norms, `inside` of sub-layers,
    # `embedding`, `head`) and in which block: -1 is before the first, their number the read-out
    alive: Counter[tuple[str, int]]
    # bytes at the highest moment of the backward pass while the `head` and while each of the `blocks` runs, above those
    # that this block and all before it keep; gradients of parameters left out
    extra: Counter[tuple[str, int]]
    # bytes at the highest moment of both passes, gradients of parameters included; None where only a few of the
    # blocks were traced, see `deepen`
    peak: int | None

    @property
    def saved(self) -> int:
        """Bytes kept for the backward pass."""
        return sum(self.alive.values())

    def saved_by(self, *blocks: int) -> Saved:
        """Bytes that some blocks keep."""
        return Saved(*(sum(self.alive[kind, block] for block in blocks) for kind in Saved._fields))

    def saved_by_kind(self, kind: str) -> int:
        """Bytes that the head or the embedding keeps."""
        return sum(size for (of, _), size in self.alive.items() if of == kind)

    def work(self, kind: str) -> Work:
        """Both passes of the `stream`, the `head`, the `embedding`, of the `sublayers` together, or of `all`."""
        return total([*_of(self.forward, kind), *_of(self.backward, kind)])


class SiteTraffic(NamedTuple):
    """Bytes a stream moves per token between two sub-layers: the write of one and the read of the next."""

    block: int  # of the reading site
    kind: str  # of the reading site
    eager: float  # every operation for itself
    fused: float  # in one kernel, or with a wide product or an attention in one before it, that, and one after it


class Kept(NamedTuple):
    """Bytes that all sequences of a pass together keep between tokens, over all devices."""

    attention: int  # keys and values, which grow with the context
    local: int  # rings of windows and convolutions
    stream: int  # the stream's own rings, such as Deep Delta's TC and EC

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


class StepTrace(NamedTuple):
    """A forward pass that remembers."""

    parts: dict[Any, Work]  # work by kind of part, pre-norms with the stream
    sites: tuple[SiteTraffic, ...]  # what the stream moves per token to each site, out last; pre-norms left out
    past: Any  # what is remembered after the pass; None where only a few of the blocks were traced
    kept: Kept  # bytes of it

    @property
    def eager(self) -> float:
        """What the stream moves per token, every operation for itself."""
        return sum(site.eager for site in self.sites)

    @property
    def fused(self) -> float:
        """The same with one kernel between two sub-layers."""
        return sum(site.fused for site in self.sites)

    def work(self, kind: str) -> Work:
        """Of the `stream`, the `head`, the `embedding`, or of all `sublayers`."""
        return total(_of(self.parts, kind))


def _of(parts: dict[Any, Work], kind: str) -> list[Work]:
    own = {"all": (), "sublayers": ("stream", "head", "embedding")}
    return [work for name, work in parts.items() if (name not in own[kind] if kind in own else name == kind)]


def meta_model(config: ModelConfig | TwoAxisConfig, dtype: str) -> Any:
    """A model of meta tensors: a decoder, or the graft of a family."""
    if isinstance(config, ModelConfig):
        with torch.device("meta"):
            return Decoder(config).to(DTYPES[dtype])
    from twoaxis.model.graft_from_scratch import on_meta

    return on_meta(config, DTYPES[dtype])


class Runner:
    """How a decoder runs, and which part of it when; `GraftRunner` is the same of a graft."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.head = Part("head", model.stream.layout.blocks)

    def train(self, ids: Tensor, meter: Meter, recompute: Recompute) -> Tensor:
        """Logits of all tokens."""
        again = functools.partial(checkpoint, use_reentrant=False) if recompute == "block" else None
        info = self.model.info(ids)  # before anything runs: the positions belong to no part
        out = self.model.run(self.model.embed(ids), info, recompute=again)
        meter.part = self.head
        return self.model.logits(out)

    def step(self, ids: Tensor, past: Any, meter: Meter) -> Any:
        """The next tokens, remembered; logits of the last one."""
        info = self.model.info(ids, self.model.start() if past is None else past)
        out = self.model.run(self.model.embed(ids), info)
        meter.part = self.head
        self.model.logits(out[:, -1:])
        return info.memory.after(ids.shape[1])

    def kept(self, past: Any) -> Kept:
        """Bytes of what is remembered."""
        return Kept(**past.nbytes_by_part())

    def lengthened(self, past: Any, seen: int) -> Any:
        """The memory of a pass as `seen` tokens would have left it."""
        return past.map(lambda ring: longer(ring, seen))._replace(seen=seen)

    @contextlib.contextmanager
    def following(self, meter: Meter) -> Iterator[None]:
        """Tell a meter which part of the model runs."""
        model, hooks = self.model, contextlib.ExitStack()

        def around(module: nn.Module, inside: Part, after: Part) -> None:
            """`inside` while a module runs; what it returns, and what runs next, is part of `after`."""

            def leave(module: nn.Module, given: Any, result: Any) -> None:
                meter.hand_over(tensors_in((result[0],) if isinstance(result, tuple) else (result,)), after)
                meter.part = after

            hooks.callback(module.register_forward_pre_hook(lambda *_: setattr(meter, "part", inside)).remove)
            hooks.callback(module.register_forward_hook(leave).remove)

        out = model.stream.layout.out
        around(model.embed_tokens, Part("embedding"), Part("stream"))
        for block in map(model.block, range(model.config.num_hidden_layers)):
            first = Part("stream", block.number, block.sites[0].index)
            enter = block.register_forward_pre_hook(lambda *_, first=first: setattr(meter, "part", first))
            hooks.callback(enter.remove)
            for site in block.sites:
                here = Part("stream", site.block, site.index)
                if (norm := block.norm(site)) is not None:
                    around(norm, here._replace(kind="norm"), here)
                around(block.sublayer(site), here._replace(kind=site.kind), here._replace(site=site.index + 1))
        last = Part("stream", out.block, out.index)
        final = model.block(model.config.num_hidden_layers - 1)
        hooks.callback(final.register_forward_hook(lambda *_: setattr(meter, "part", last)).remove)
        around(model.norm, last._replace(kind="norm"), last)
        meter.part = Part("embedding")
        with hooks:
            yield


def runner_of(model: Any) -> Runner:
    """How a model runs."""
    if isinstance(model, Decoder):
        return Runner(model)
    from twoaxis.costs.graft import GraftRunner

    return GraftRunner(model)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """What is garbage waits: its collection would change numbers, and visit long lists of events again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@uncollected()
def trace_training(
    model: Any, batch: int, tokens: int, device: str | None = None, recompute: Recompute = "none"
) -> TrainTrace:
    """One forward and backward pass of a model of meta tensors.

    The kernels are those of `device` where an operator has several: `cpu` or `cuda`; None are those that all have.
    """
    runner, ids = runner_of(model), torch.empty(batch, tokens + 1, dtype=torch.long, device="meta")
    model.zero_grad(set_to_none=True)
    with torch.enable_grad(), metering(runner, device) as meter:
        loss = F.cross_entropy(runner.train(ids[:, :-1], meter, recompute).flatten(0, 1), ids[:, 1:].flatten())
        forward, alive = meter.take(), Counter[tuple[str, int]]()
        for part, size in cast(Counter[Part], meter.alive()).items():
            alive[part.work if part.work in ("stream", "embedding", "head") else "inside", part.block] += size
        loss.backward()
        backward = meter.take()
        gradients = {meter.allocation(p.grad) for p in model.parameters() if p.grad is not None}
        peak = meter.peak
    model.zero_grad(set_to_none=True)
    before, after = (work_by(events, lambda part: part.work) for events in (forward, backward))
    add_views(after, meter)
    extra = Counter(
        {
            (kind, block): more + sum(size for (of, at), size in alive.items() if at > block or of == "head" != kind)
            for (kind, block), more in highest(backward, gradients).items()
        }
    )
    return TrainTrace(before, after, len(model.stream.sites), alive, extra, peak)


@uncollected()
@torch.no_grad()
def trace_step(model: Any, batch: int, tokens: int, device: str | None = None, past: Any = None) -> StepTrace:
    """The next tokens after `past`, or the first of their sequences, remembered; logits of the last one."""
    runner, ids = runner_of(model), torch.empty(batch, tokens, dtype=torch.long, device="meta")
    with metering(runner, device) as meter:
        after = runner.step(ids, past, meter)
        events = meter.take()
    sites = _sites(events, model.stream.layout.sites, batch * tokens)
    parts = work_by(events, lambda part: part.work)
    add_views(parts, meter)
    return StepTrace(parts, sites, after, runner.kept(after))


def trace_decoding(model: Any, batch: int, context: int, device: str | None = None) -> StepTrace:
    """The last token of `context`, after what a first one leaves, made as long as the others would leave it."""
    first = trace_step(model, batch, 1, device)
    return trace_step(model, batch, 1, device, runner_of(model).lengthened(first.past, context - 1))


def add_views(parts: dict[Any, Work], meter: Meter) -> None:
    """Add the calls that move nothing to the work of the parts that made them."""
    for part, count in meter.views.items():
        if isinstance(part, Part) and part.work in parts:
            parts[part.work].eager[VIEW] += count


def longer(ring: Ring, seen: int) -> Ring:
    """A ring as `seen` tokens would have left it."""
    length = seen if ring.window is None else min(seen, ring.window - 1)
    shapes = [[*t.shape[: ring.axis], length, *t.shape[ring.axis + 1 :]] for t in ring.kept] if length else []
    return ring._replace(seen=seen, kept=tuple(t.new_empty(s) for t, s in zip(ring.kept, shapes, strict=False)))


def _sites(events: list[Event], sites: tuple[Site, ...], tokens: int) -> tuple[SiteTraffic, ...]:
    found = work_by(events, lambda part: (part.kind, part.site))
    works = [found.get(("stream", site.index), Work(Counter(), Counter())) for site in sites]
    return tuple(
        SiteTraffic(site.block, site.kind, work.eager_bytes / tokens, work.fused_bytes / tokens)
        for site, work in zip(sites, works, strict=True)
    )


@contextlib.contextmanager
def metering(runner: Runner, device: str | None) -> Iterator[Meter]:
    """A meter that knows the parts of a model."""
    with target(device), Meter() as meter, runner.following(meter):
        yield meter
