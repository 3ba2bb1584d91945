"""The state that a stream packs at block boundaries, on tensors without numbers."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from twoaxis.costs.pieces import Fresh
from twoaxis.costs.recorder import Recorder, meta
from twoaxis.depth.site import Site
from twoaxis.depth.stream import State
from twoaxis.model.decoder import Trunk


def first(trunk: Trunk, blocks: int) -> list[Site]:
    """Sites of the first blocks."""
    return [site for site in trunk.stream.sites if site.block < blocks]


def at_the_end(trunk: Trunk, state: State) -> State:
    """The state as the read-out takes it, also where blocks of the same form are left out."""
    return state._replace(index=trunk.stream.layout.out.index)


_BOUNDARIES: weakref.WeakKeyDictionary[Trunk, list[tuple[Tensor, ...]]] = weakref.WeakKeyDictionary()


def boundaries(trunk: Trunk) -> list[tuple[Tensor, ...]]:
    """The packed state before each block and before the out site, one token of one sequence; all held at once."""
    if trunk not in _BOUNDARIES:
        _BOUNDARIES[trunk] = packed(trunk, trunk.config.blocks)
    return _BOUNDARIES[trunk]


def forms(states: list[tuple[Tensor, ...]]) -> set[tuple[Any, ...]]:
    """The different forms of some packed states."""
    return {tuple(tuple(t.shape) for t in tensors) for tensors in states}


@torch.no_grad()
def packed(trunk: Trunk, blocks: int) -> list[tuple[Tensor, ...]]:
    """The packed state before each of the first blocks and after them."""
    stream = trunk.stream
    dtype = next(trunk.parameters()).dtype
    x = meta(1, 1, trunk.config.width, dtype=dtype)
    found = []
    with Recorder(splits=False):
        state = stream.open(x)
        for site in first(trunk, blocks):
            if site.first:
                found.append(stream.pack(state))
            seen = stream.read(state, site)
            state = stream.write(state, site, torch.empty_like(x), seen, trunk.norm(site)(seen))
        return [*found, stream.pack(state)]


def closing(trunk: Trunk) -> tuple[bool, ...]:
    """For each tensor of the last packed state, whether the read-out keeps it for its backward pass."""
    stream, last = trunk.stream, boundaries(trunk)[-1]
    with torch.enable_grad(), Recorder(splits=False):
        made = [Fresh.apply(meta(1, dtype=t.dtype).requires_grad_(), tuple(t.shape)) for t in last]
        refs = [weakref.ref(t.untyped_storage()) for t in made]
        out = trunk.final_norm(stream.close(stream.unpack(made, stream.layout.out)))
        del made
        keeps = tuple(ref() is not None for ref in refs)
        del out
    return keeps
