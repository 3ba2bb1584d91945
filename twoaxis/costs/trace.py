"""The real model on meta tensors under a meter: a training pass, and the next tokens of sequences.

    embedding ─► stream ─► norm ─► sub-layer ─► stream ─► ... ─► norm ─► head          backward: the parts' own nodes

Nothing is computed, so that any size takes seconds, and nothing is stood in for: these are the modules that train and
decode, in the order in which they run, with the kernels of the device that is asked for. What the stream's methods do
is the stream's, and whatever else runs belongs to the module that began last; in the backward pass autograd's node
numbers tell the part, see `twoaxis.base.meter`.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from twoaxis.base.meter import Event, Meter
from twoaxis.base.timer import no_collection
from twoaxis.costs.fuse import VIEW, Part, Work, highest, total, work_by
from twoaxis.depth.site import Site
from twoaxis.kernels.dispatch import target
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.ring import Ring
from twoaxis.sequence.mixer import LocalOperator

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
    """How a decoder runs, and where its parts are; `GraftRunner` is the same of a graft."""

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

    def places(self) -> Iterator[tuple[nn.Module, Part]]:
        """Modules with the part that begins where they run."""
        model, out = self.model, self.model.stream.layout.out
        yield model.embed_tokens, Part("embedding")
        for block in map(model.block, range(model.config.num_hidden_layers)):
            for site in block.sites:
                norm, sublayer = block.norm(site), block.sublayer(site)
                yield from () if norm is None else [(norm, Part("norm", site.block, site.index))]
                yield sublayer, Part(site.kind, site.block, site.index)
        yield model.norm, Part("norm", out.block, out.index)

    @contextlib.contextmanager
    def following(self, meter: Meter) -> Iterator[None]:
        """Tell a meter which part of the model runs: a module's own from its beginning on, or the stream's methods."""
        stream, undo = self.model.stream, contextlib.ExitStack()

        def replace(owner: Any, name: str, made: Callable[..., Any]) -> None:
            owner.__dict__[name] = made
            undo.callback(owner.__dict__.pop, name, None)

        for module, part in self.places():
            enter = module.register_forward_pre_hook(lambda *_, part=part: setattr(meter, "part", part))
            undo.callback(enter.remove)
            if isinstance(module, LocalOperator):  # with its memory it is called by another name than modules are
                replace(module, "step", _inside(module.step, part, meter))
        for name in ("open", "read", "write", "rescale", "memory", "close"):
            replace(stream, name, _watched(stream, name, meter))
        meter.part = Part("embedding")
        with undo:
            yield


def _watched(stream: Any, name: str, meter: Meter) -> Callable[..., Any]:
    """A method of a stream during which the stream runs; what it is given to keep is its own from then on."""
    method = getattr(stream, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        before, site = meter.part, None if name == "open" else stream.layout.sites[args[0].index]
        meter.part = Part("stream") if site is None else Part("stream", site.block, site.index + (name == "write"))
        meter.hand_over({"open": args[:1], "write": args[2:3]}.get(name, ()), meter.part)
        made = method(*args, **kwargs)
        meter.part = before  # not where making a block anew ends inside: the node that wanted it is the stream's
        return made

    return run


def _inside(method: Callable[..., Any], part: Part, meter: Meter) -> Callable[..., Any]:
    """A method during which a part runs."""

    def run(*args: Any, **kwargs: Any) -> Any:
        meter.part = part
        return method(*args, **kwargs)

    return run


def runner_of(model: Any) -> Runner:
    """How a model runs."""
    if isinstance(model, Decoder):
        return Runner(model)
    from twoaxis.costs.graft import GraftRunner

    return GraftRunner(model)


@no_collection()
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


@no_collection()
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
