"""How a model is cut into the stages of a pipeline, and what crosses their boundaries: the state it really packs.

    P = 2 stages, V = 2 virtual ones      chunk 0    chunk 1    chunk 2    chunk 3
                                          stage 0 ─► stage 1 ─► stage 0 ─► stage 1

- **whole**: each boundary carries the whole packed state.
- **cached**: a stage keeps what it received or made in its earlier chunks, so a boundary carries only tensors that its
  receiver does not have. Without virtual stages nothing is saved.

Gradients take the same way back, so training moves twice the bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from twoaxis.base.meter import Meter, extent
from twoaxis.depth.site import Site
from twoaxis.depth.stream import Applied, Seen
from twoaxis.depth.walk import apply_nothing, visit
from twoaxis.model.decoder import Decoder


class Boundary(NamedTuple):
    """One transfer between chunks, from the stage `sender` to `receiver`.

    Attributes:
        block: the first one of the receiving chunk.
        tensors: of the packed state, by numbers that stay the same where the tensor does; it may be there twice.
        sent: those the receiver does not have, each once.
        whole: bytes per token of the whole state.
        cached: bytes per token of what the receiver does not have.
    """

    block: int
    sender: int
    receiver: int
    tensors: tuple[int, ...]
    sent: tuple[int, ...]
    whole: int
    cached: int


class Pipeline(NamedTuple):
    """All transfers of one forward pass of P `stages` with V `virtual` ones; `held` are the bytes per token of received
    state that the chunks of each stage keep, each tensor once."""

    stages: int
    virtual: int
    boundaries: tuple[Boundary, ...]
    held: tuple[int, ...]

    @property
    def whole(self) -> int:
        """Bytes per token over all boundaries."""
        return sum(b.whole for b in self.boundaries)

    @property
    def cached(self) -> int:
        """Bytes per token over all boundaries."""
        return sum(b.cached for b in self.boundaries)

    @property
    def worst_whole(self) -> int:
        """Bytes per token over the busiest boundary."""
        return max((b.whole for b in self.boundaries), default=0)

    @property
    def worst_cached(self) -> int:
        """Bytes per token over the busiest boundary."""
        return max((b.cached for b in self.boundaries), default=0)

    def received(self) -> int:
        """Bytes per token that the busiest stage receives in a forward pass, cached."""
        by_stage = [0] * self.stages
        for b in self.boundaries:
            by_stage[b.receiver] += b.cached
        return max(by_stage)


def plan(model: Any, stages: int, virtual: int = 1) -> Pipeline:
    """The transfers of a model cut into `stages` times `virtual` chunks of equally many blocks."""
    if (chunks := stages * virtual) == 1:
        return Pipeline(stages, virtual, (), (0,))
    packed = boundaries(model)
    per = model.stream.layout.blocks // chunks
    numbers: dict[tuple[int, int, tuple[int, ...]], int] = {}
    listed = [_numbers(packed[chunk * per], numbers) for chunk in range(chunks + 1)]
    entering = [dict(zip(own, map(extent, packed[n * per]), strict=True)) for n, own in enumerate(listed)]
    has: list[dict[int, int]] = [{} for _ in range(stages)]
    received: list[dict[int, int]] = [{} for _ in range(stages)]
    found = []
    for chunk in range(chunks):
        stage, state = chunk % stages, entering[chunk]
        if chunk:
            missing = {number: size for number, size in state.items() if number not in has[stage]}
            sizes = (sum(state.values()), sum(missing.values()))
            found.append(Boundary(chunk * per, (chunk - 1) % stages, stage, listed[chunk], tuple(missing), *sizes))
            received[stage] |= missing
        has[stage] |= state | entering[chunk + 1]
    held = tuple(sum(tensors.values()) for tensors in received)
    return Pipeline(stages, virtual, tuple(found), held)


def _numbers(tensors: tuple[Tensor, ...], numbers: dict[tuple[int, int, tuple[int, ...]], int]) -> tuple[int, ...]:
    """The numbers of tensors, which are alive as long as the list they came in."""
    keys = [(t.untyped_storage()._cdata, int(t.storage_offset()), tuple(t.shape)) for t in tensors]
    return tuple(numbers.setdefault(key, len(numbers)) for key in keys)


@torch.no_grad()
def boundaries(model: Any, increments: torch.dtype | None = None) -> list[tuple[Tensor, ...]]:
    """The packed state of one token before each block and before the out site; all alive at once.

    Args:
        model: a decoder or a graft, on the meta device.
        increments: dtype of what sub-layers write, as under autocast; None is that of the embedding.
    """
    stream, found = model.stream, []
    x = torch.empty(1, 1, stream.layout.width, dtype=next(model.parameters()).dtype, device="meta")
    heads = (
        (model.config.kv_heads, model.config.head_size) if isinstance(model, Decoder) else (1, 1)
    )  # which it refuses

    def act(site: Site, seen: Seen) -> Applied:
        return apply_nothing(stream, seen, torch.empty_like(x, dtype=increments), heads)

    with Meter(record=False):
        state = stream.open(x)
        for block in range(stream.layout.blocks):
            found.append(stream.pack(state))
            state = visit(stream, state, stream.sites_of(block), act)
        return [*found, stream.pack(state)]
