"""Exact counts of what a stream adds to the plain residual, for one layout and width.

Only the floating-point operations may be written by the method (`Stream.flops`); everything else is read off a pass
over meta tensors, which takes milliseconds at any size: parameters from the module, live vectors from the states
between sites, and what is kept between tokens from the memory after the pass.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from twoaxis.base.meter import Meter, storage_bytes
from twoaxis.depth.site import Site
from twoaxis.depth.stream import Apply, Cost, Seen, State, Stream
from twoaxis.depth.walk import apply_nothing, visit

TOKENS = 1031
"""Tokens of a counting pass: prime, and many enough for the kernels of training and prefill."""


def count(stream: Stream) -> Cost:
    """The counts of a stream as it is built."""
    parameters = sum(p.numel() for p in stream.parameters())
    reads = sum(len(stream.sources(site)) for site in stream.layout.sites)
    blank = on_meta(stream)
    return Cost(parameters, stream.flops(), reads, count_live(blank), count_kept(blank))


def on_meta(stream: Stream) -> Stream:
    """A copy of a stream whose parameters and buffers are meta tensors."""
    memo: dict[int, Tensor] = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in stream.parameters()}
    memo |= {id(b): b.to("meta") for b in stream.buffers()}
    return copy.deepcopy(stream, memo)


@torch.no_grad()
def count_flops(stream: Stream) -> int:
    """Operations inside open, read, write and close per token, less the plain residual's additions."""
    totals = []
    for tokens in (TOKENS, 2 * TOKENS):
        meter = Meter(record=False)
        with meter:
            state = stream.open(_embedding(stream, tokens))
            stream.close(visit(stream, state, stream.sites, _act(stream)))
        totals.append(meter.flops)
    return (totals[1] - totals[0]) // TOKENS - stream.layout.width * len(stream.sites)


@torch.no_grad()
def count_live(stream: Stream) -> int:
    """The most numbers per token in vectors of a state between two sites, each storage once.

    Copies of parameters and whatever else does not grow with the tokens is left out.
    """
    rows = []
    for tokens in (TOKENS, 2 * TOKENS):
        row: list[int] = []

        def look(site: Site, state: State, seen: Seen, row: list[int] = row) -> None:
            row.append(_numbers(stream, state))

        with Meter(record=False):  # which remembers results on meta tensors: a pass takes a quarter of the time
            state = visit(stream, stream.open(_embedding(stream, tokens)), stream.sites, _act(stream), look)
        rows.append([*row, _numbers(stream, state)])
    return max((many - few) // TOKENS for few, many in zip(*rows, strict=True))


@torch.no_grad()
def count_kept(stream: Stream) -> int:
    """Numbers kept between tokens, by the memory after a pass."""
    windows = stream.memory_windows()
    if not windows:
        return 0
    with Meter(record=False):
        state = visit(stream, stream.open(_embedding(stream, max(windows) + 1), keep=True), stream.sites, _act(stream))
    return sum(t.numel() for ring in stream.memory(state) for t in ring.kept)


def _act(stream: Stream) -> Apply:
    return lambda site, seen: apply_nothing(stream, seen, torch.empty_like(seen.x))


def _embedding(stream: Stream, tokens: int) -> Tensor:
    return torch.empty(1, tokens, stream.layout.width, device="meta")


def _numbers(stream: Stream, state: State) -> int:
    """Numbers in what a state holds, in float32."""
    return storage_bytes(stream.held(state.value)) // 4
