"""A whole model counted: the stream over its full depth, with stand-ins where the sub-layers are.

    embedding ─► open ─► read ─► norm ─► stand-in ─► write ─► read ─► ... ─► close ─► final norm ─► head
                 └──── counted here ───┘  `pieces`   └── counted here ...

A stand-in keeps what the sub-layer would keep and returns a tensor of the right shape, so that the stream runs as it
does in the model and every storage is counted once: a source that ten sites read is kept once.

Streams whose state has one form at every block boundary do the same work in every block: two and three of their blocks
are counted, then the read-out, and continued to the full depth, exactly. All others are counted over all their blocks.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.base.meter import extent
from twoaxis.costs.pieces import Piece, Step, infer_piece, make_info, pass_piece, train_piece, ways_of
from twoaxis.costs.recorder import Recorder, Work, meta, total
from twoaxis.costs.states import at_the_end, boundaries, closing, first, forms, packed
from twoaxis.depth.site import OUT, Site
from twoaxis.depth.stream import Seen, State
from twoaxis.kernels.dispatch import target
from twoaxis.model.config import DecoderConfig
from twoaxis.model.decoder import Trunk

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class SiteTraffic(NamedTuple):
    """Bytes a stream moves per token between two sub-layers: the write of one and the read of the next.

    Attributes:
        block: of the reading site.
        kind: of the reading site.
        naive: every operation for itself.
        fused: in one kernel, or with a wide product or an attention in one before it, that, and one after it.
    """

    block: int
    kind: str
    naive: float
    fused: float


class StreamTrace(NamedTuple):
    """The stream and the pre-norms.

    Attributes:
        forward: work of a training pass.
        backward: and of its gradients.
        saved: bytes kept for the backward pass by the block they were made in; the last entry is the read-out.
        entering: bytes of the state at each block boundary that were not in the state at the one before.
        closing: those entering the read-out that it keeps for its own backward pass.
        extra: bytes the backward pass needs beyond what the forward pass left, sub-layers included.
    """

    forward: Work
    backward: Work
    saved: tuple[int, ...]
    entering: tuple[int, ...]
    closing: int
    extra: int


class TrainTrace(NamedTuple):
    """A training pass of one micro-batch.

    Attributes:
        stream: the stream and the norms.
        pieces: of the sub-layers of each block.
        head: logits and loss.
        embedding: the lookup.
    """

    stream: StreamTrace
    pieces: tuple[tuple[Piece, ...], ...]
    head: Piece
    embedding: Piece

    @property
    def sublayers(self) -> Work:
        """Forward and backward of all sub-layers."""
        return total(_repeat([(p.forward, p.backward) for block in self.pieces for p in block]))

    @property
    def sublayers_forward(self) -> Work:
        """Forward of all sub-layers, as when they are recomputed."""
        return total(_repeat([(p.forward,) for block in self.pieces for p in block]))

    @property
    def saved(self) -> int:
        """Bytes kept for the backward pass at the end of the forward pass."""
        inside = sum(piece.saved for block in self.pieces for piece in block)
        return sum(self.stream.saved) + inside + self.head.saved


class InferTrace(NamedTuple):
    """A forward pass that remembers.

    Attributes:
        stream: work of the stream and the norms.
        sublayers: of the sub-layers.
        head: of the logits of the last position.
        attention: bytes remembered that grow with the sequence.
        local: bytes remembered by windows and convolutions.
        kept: bytes remembered by the stream.
    """

    stream: Work
    sublayers: Work
    head: Work
    attention: int
    local: int
    kept: int


class _StandIn(torch.autograd.Function):
    """Keeps and returns what a sub-layer would."""

    @staticmethod
    def forward(ctx: Any, piece: Piece, recorder: Recorder, *ways: Tensor) -> Tensor:
        recorder.cut()
        ctx.piece, ctx.recorder = piece, recorder
        ctx.shapes = [(t.shape, t.dtype) for t in ways]
        ctx.save_for_backward(*(t for t, kept in zip(ways, piece.keeps, strict=True) if kept))
        block, recorder.label = recorder.label, "inside"
        ctx.held = torch.empty(piece.saved, dtype=torch.uint8, device="meta")
        recorder.label = block
        y = torch.empty(ways[0].shape, dtype=ways[0].dtype, device="meta")
        recorder.cut()  # made by the sub-layer, so that the stream reads it from outside
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.recorder.cut()
        made = tuple(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in ctx.shapes)
        spare = max(0, ctx.piece.extra - sum(map(extent, made)))
        torch.empty(spare, dtype=torch.uint8, device="meta")
        del ctx.held
        ctx.recorder.cut()
        return None, None, *made


class Model:
    """A model without numbers, ready to be counted.

    Args:
        config: the shape and the methods.
        dtype: of weights and activations.
        device: whose kernels are counted where a method has several: `cpu`, or None for those of accelerators.
    """

    def __init__(self, config: DecoderConfig, dtype: str, device: str | None = None) -> None:
        self.config, self.dtype, self.device = config, DTYPES[dtype], device
        with torch.device("meta"):
            self.trunk = Trunk(config).to(self.dtype)
        self.stream = self.trunk.stream
        self._pieces: dict[Any, Any] = {}

    # Training.

    def train(self, batch: int, tokens: int) -> TrainTrace:
        """A training pass over `batch` sequences of `tokens` tokens."""
        with torch.enable_grad(), target(self.device):
            return self._train(batch, tokens)

    def _train(self, batch: int, tokens: int) -> TrainTrace:
        pieces = tuple(
            tuple(self._train_piece(site, batch, tokens) for site in self.stream.sites_of(block))
            for block in range(self.config.blocks)
        )
        width, vocabulary = self.config.width, self.config.vocabulary
        head = torch.nn.Linear(width, vocabulary, bias=False, device="meta", dtype=self.dtype)
        target = meta(batch * tokens, dtype=torch.long)
        loss = train_piece(
            lambda c: F.cross_entropy(head(c.x).flatten(0, 1), target),
            head,
            lambda: ways_of(("x",), batch, tokens, width, self.dtype),
            scalar=True,
        )
        table = torch.nn.Embedding(vocabulary, width, device="meta", dtype=self.dtype)
        given = meta(batch, tokens, dtype=torch.long)
        embedding = train_piece(lambda c: table(given), table, lambda: Seen(meta(1, dtype=self.dtype)))
        return TrainTrace(self._train_stream(pieces, batch, tokens), pieces, loss, embedding)

    def _train_piece(self, site: Site, batch: int, tokens: int) -> Piece:
        key = ("train", self._kind(site), batch, tokens)
        if key not in self._pieces:
            sublayer, info = self.trunk.sublayer(site), self._info(tokens, 0)
            self._pieces[key] = train_piece(
                lambda c: sublayer(c, None, info)[0],
                sublayer,
                lambda: ways_of(self.stream.ways(site), batch, tokens, self.config.width, self.dtype),
            )
        return self._pieces[key]

    def _train_stream(self, pieces: tuple[tuple[Piece, ...], ...], batch: int, tokens: int) -> StreamTrace:
        blocks, closes = self.config.blocks, closing(self.trunk)
        if blocks <= 4 or not self.uniform:
            return _run_stream(self.trunk, pieces, batch, tokens, blocks, closes)
        short, long = (_run_stream(self.trunk, pieces, batch, tokens, n, closes) for n in (2, 3))
        return _continue(short, long, blocks)

    @cached_property
    def uniform(self) -> bool:
        """Whether every block does the same: equal sub-layers, no placement, and a state of one form everywhere."""
        config = self.config
        kinds = {tuple(self._kind(s) for s in self.stream.sites_of(b)) for b in range(config.blocks)}
        if len(kinds) > 1 or config.placement is not None:
            return False
        if len(forms(packed(self.trunk, min(2, config.blocks)))) > 1:  # most that grow do so at once
            return False
        return len(forms(boundaries(self.trunk))) == 1

    # Inference.

    def infer(self, batch: int, seen: int, tokens: int) -> InferTrace:
        """The next `tokens` tokens of `batch` sequences that have `seen` already."""
        with torch.no_grad(), target(self.device):
            return self._infer(batch, seen, tokens)

    def _infer(self, batch: int, seen: int, tokens: int) -> InferTrace:
        steps = [self._infer_piece(site, batch, seen, tokens) for site in self.stream.sites]
        stream, kept = self._infer_stream(batch, min(seen, self._longest), tokens)
        head = torch.nn.Linear(self.config.width, self.config.vocabulary, bias=False, device="meta", dtype=self.dtype)
        last = ways_of(("x",), batch, 1, self.config.width, self.dtype)
        return InferTrace(
            stream,
            total(step.work for step in steps),
            pass_piece(lambda c: head(c.x), last),
            sum(step.attention for step in steps),
            sum(step.local for step in steps),
            kept,
        )

    @property
    def _longest(self) -> int:
        """Tokens after which the stream's memory no longer grows."""
        return max(self.stream.memory_windows(), default=0)

    def _infer_piece(self, site: Site, batch: int, seen: int, tokens: int) -> Step:
        key = ("infer", self._kind(site), batch, seen, tokens)
        if key not in self._pieces:
            ways, width = self.stream.ways(site), self.config.width
            infos = (self._info(max(seen, 1), 0), self._info(tokens, seen))
            before = ways_of(ways, batch, seen, width, self.dtype) if seen else None
            c = ways_of(ways, batch, tokens, width, self.dtype)
            self._pieces[key] = infer_piece(self.trunk.sublayer(site), c, before, infos)
        return self._pieces[key]

    def _infer_stream(self, batch: int, seen: int, tokens: int) -> tuple[Work, int]:
        blocks = self.config.blocks
        if blocks > 4 and self.uniform:
            short, long = (self._pass_stream(batch, seen, tokens, n) for n in (2, 3))
            work = Work(*_line(tuple(short[0]), tuple(long[0]), blocks))
            return work, _line(short[1], long[1], blocks)
        return self._pass_stream(batch, seen, tokens, blocks)

    def _pass_stream(self, batch: int, seen: int, tokens: int, blocks: int) -> tuple[Work, int]:
        """The first `blocks` blocks and the read-out after `seen` tokens, and the bytes remembered."""
        past: tuple[Any, ...] = ()
        if seen and self._longest:
            given = meta(batch, seen, self.config.width, dtype=self.dtype)
            with Recorder(splits=False):
                past = self._rings(_pass(self.trunk, given, True, blocks))
        x = meta(batch, tokens, self.config.width, dtype=self.dtype)
        with Recorder(splits=False) as recorder:
            state = _pass(self.trunk, x, bool(self._longest), blocks, past, recorder)
            self.trunk.final_norm(self.stream.close(state))
            work = recorder.take()
            rings = self._rings(state) if self._longest else ()
        return work, sum(ring.nbytes() for ring in rings if ring is not None)

    def _rings(self, state: State) -> tuple[Any, ...]:
        """What is remembered, an entry for every ring: of blocks that were left out none."""
        rings = self.stream.memory(state)
        return (*rings, *[None] * (len(self.stream.memory_windows()) - len(rings)))

    # What one token moves at each site.

    def traffic(self, batch: int = 1, tokens: int = 4096) -> tuple[SiteTraffic, ...]:
        """Bytes per token that the stream moves to reach each site, the pre-norms left out.

        Parameters of the stream are read once for all tokens of a pass.
        """
        with torch.no_grad(), target(self.device):
            if self.config.blocks <= 4 or not self.uniform:
                return site_traffic(self.trunk, batch, tokens, self.dtype, self.config.blocks)
            *sites, out = site_traffic(self.trunk, batch, tokens, self.dtype, 2)
        one, two = ([site for site in sites if site.block == block] for block in (0, 1))
        more = [site._replace(block=block) for block in range(1, self.config.blocks) for site in two]
        return (*one, *more, out)

    def _info(self, tokens: int, seen: int) -> Any:
        return make_info(tokens, seen, self.config.head_size, self.config.rope_theta, self.dtype)

    def _kind(self, site: Site) -> tuple[Any, ...]:
        """What makes two sub-layers the same."""
        config, block = self.config, site.block
        window = None if config.windows is None else config.windows[block]
        ways = self.stream.ways(site)
        placed = (config.has_mixer(block), block in config.nope_blocks)
        return site.kind, config.hidden_width(block), window, ways, placed


def _pass(
    trunk: Trunk,
    x: Tensor,
    keep: bool,
    blocks: int,
    past: tuple[Any, ...] = (),
    recorder: Recorder | None = None,
) -> State:
    """The stream and the norms over the first blocks, without gradients; the state before the out site."""
    stream = trunk.stream
    state = stream.open(x, past, keep=keep)
    for site in first(trunk, blocks):
        seen = stream.read(state, site)
        c, y = trunk.norm(site)(seen), torch.empty_like(x)
        if recorder is not None:
            recorder.cut()
        state = stream.write(state, site, y, seen, c)
    return at_the_end(trunk, state)


def _run_stream(
    trunk: Trunk, pieces: tuple[tuple[Piece, ...], ...], batch: int, tokens: int, blocks: int, closes: tuple[bool, ...]
) -> StreamTrace:
    """Forward and backward of the first `blocks` blocks and the read-out, on parameters of the full depth."""
    stream = trunk.stream
    for parameter in trunk.parameters():
        parameter.grad = None
    held: dict[int, int] = {}
    entering = []
    with Recorder(splits=False) as recorder:
        recorder.label = 0
        dtype = next(trunk.parameters()).dtype
        x = torch.empty(batch, tokens, trunk.config.width, dtype=dtype, device="meta").requires_grad_()
        recorder.cut()
        state = stream.open(x)
        del x
        for site in first(trunk, blocks):
            if site.first:
                recorder.label = site.block
                entering.append(sum(_new(recorder, stream.pack(state), held)))
            number = site.index - stream.sites_of(site.block)[0].index
            state = _site(trunk, state, site, pieces[site.block][number], recorder)
        recorder.label, state = blocks, at_the_end(trunk, state)
        last = _new(recorder, stream.pack(state), held)
        out = trunk.final_norm(stream.close(state))
        del state
        forward, living = recorder.take(), recorder.living()
        saved = tuple(living.get(block, 0) for block in range(blocks + 1))
        before = recorder.now
        recorder.reset()
        gradient = torch.empty_like(out)
        recorder.cut()
        out.backward(gradient)
        weights = sum(extent(p.grad) for p in trunk.parameters() if p.grad is not None)
        backward = recorder.take()
        extra = max(0, recorder.peak - before - weights)
    for parameter in trunk.parameters():
        parameter.grad = None
    kept = sum(size for size, keeps in zip(last, closes, strict=True) if keeps)
    return StreamTrace(forward, backward, saved, (*entering, sum(last)), kept, extra)


def _site(trunk: Trunk, state: State, site: Site, piece: Piece, recorder: Recorder) -> State:
    seen = trunk.stream.read(state, site)
    c = trunk.norm(site)(seen)
    normed = trunk.stream.ways(site)
    y = _StandIn.apply(piece, recorder, *(getattr(c, way) for way in ("x", "q", "k", "v") if way in normed))
    return trunk.stream.write(state, site, y, seen, c)


def _new(recorder: Recorder, tensors: tuple[Tensor, ...], held: dict[int, int]) -> list[int]:
    """Bytes of each tensor, none where its storage was met at the boundary before."""
    births = [recorder.birth(t) for t in tensors]
    sizes = [0 if birth in held else extent(t) for birth, t in zip(births, tensors, strict=True)]
    held.clear()
    held.update(dict.fromkeys(births, 1))
    return sizes


def _continue(short: StreamTrace, long: StreamTrace, blocks: int) -> StreamTrace:
    """From two and three blocks to `blocks`: the ends stay, the middle repeats."""
    assert (len(short.saved), len(long.saved)) == (3, 4)

    def stretch(found: tuple[int, ...]) -> tuple[int, ...]:
        return (found[0], *[found[1]] * (blocks - 2), *found[-2:])

    forward, backward = (
        Work(*_line(tuple(a), tuple(b), blocks))
        for a, b in ((short.forward, long.forward), (short.backward, long.backward))
    )
    return StreamTrace(forward, backward, stretch(long.saved), stretch(long.entering), long.closing, long.extra)


def _line(short: Any, long: Any, blocks: int) -> Any:
    """What grows by the same for every block, from two and three blocks to `blocks`."""
    if isinstance(short, tuple):
        return tuple(_line(a, b, blocks) for a, b in zip(short, long, strict=True))
    if isinstance(short, Counter):
        return Counter({op: _line(short[op], long[op], blocks) for op in {*short, *long}})
    return long + (long - short) * (blocks - 3)


def site_traffic(trunk: Trunk, batch: int, tokens: int, dtype: torch.dtype, blocks: int) -> tuple[SiteTraffic, ...]:
    """Bytes per token between sub-layers, over the sites of the first `blocks` blocks and the out site."""
    stream, count = trunk.stream, batch * tokens
    x = meta(batch, tokens, trunk.config.width, dtype=dtype)
    found, pending = [], None
    with Recorder(splits=False) as recorder:
        state = stream.open(x)
        for site in (*first(trunk, blocks), stream.layout.out):
            if pending is not None:
                state = stream.write(state, *pending)
            state = at_the_end(trunk, state) if site.kind == OUT else state
            seen = stream.read(state, site)
            work = recorder.take()
            fused = work.fused_bytes + sum(op.bytes * n for op, n in work.heavy.items())
            found.append(SiteTraffic(site.block, site.kind, work.naive_bytes / count, fused / count))
            if site.index < len(stream.sites):
                pending = (site, torch.empty_like(x), seen, trunk.norm(site)(seen))
            recorder.take()
    return tuple(found)


def _repeat(pairs: list[tuple[Work, ...]]) -> list[Work]:
    """Equal works once, multiplied."""
    counts: dict[int, list[Any]] = {}
    for pair in pairs:
        for work in pair:
            counts.setdefault(id(work), [work, 0])[1] += 1
    return [work.times(n) for work, n in counts.values()]
