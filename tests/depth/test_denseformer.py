"""DenseFormer: counts, slots and lifetimes as published."""

from __future__ import annotations

import pytest
import torch

import twoaxis
from twoaxis.depth import counts
from twoaxis.depth.denseformer import DenseFormer


def make(blocks: int, dilation: int, period: int, width: int = 4) -> DenseFormer:
    made = twoaxis.stream("denseformer", blocks=blocks, width=width, dilation=dilation, period=period)
    assert isinstance(made, DenseFormer)
    return made


@pytest.mark.parametrize(
    ("blocks", "dilation", "period", "count"),
    [
        (48, 1, 1, 1224),
        (48, 4, 1, 324),
        (48, 4, 5, 62),
        (72, 1, 1, 2700),
        (72, 4, 1, 702),
        (72, 4, 5, 140),
        (4, 2, 7, 0),
    ],
)
def test_published_counts(blocks: int, dilation: int, period: int, count: int) -> None:
    stream = make(blocks, dilation, period)
    assert counts.count(stream).parameters == sum(p.numel() for p in stream.parameters()) == count


@pytest.mark.parametrize(
    ("setting", "slots"),
    [
        ((6, 2, 1), {1: (1,), 2: (0, 2), 3: (1, 3), 4: (0, 2, 4), 5: (1, 3, 5), 6: (0, 2, 4, 6)}),
        ((6, 2, 3), {3: (1, 3), 6: (0, 2, 4, 6)}),
        ((8, 4, 5), {5: (1, 5)}),
        ((8, 4, 4), {4: (0, 4), 8: (0, 4, 8)}),
        ((12, 4, 5), {5: (1, 5), 10: (2, 6, 10)}),
        ((3, 5, 1), {1: (1,), 2: (2,), 3: (3,)}),
    ],
)
def test_worked_examples(setting: tuple[int, int, int], slots: dict[int, tuple[int, ...]]) -> None:
    reads = make(*setting).plan.reads
    assert {i // 2: tuple(read.numbers) for i, read in enumerate(reads) if read is not None} == slots


def test_slots_are_dropped_after_their_last_reader() -> None:
    stream = make(8, 4, 5)
    x = torch.randn(1, 2, 4)
    state, live = stream.open(x), []
    for site in stream.sites:
        seen = stream.read(state, site)
        state = stream.write(state, site, x, seen, seen)
        live.append(len(state.value.kept))
    assert live == [0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 0, 0, 0, 0, 0, 0]


def test_weights_and_their_sources() -> None:
    stream = make(3, 2, 1)
    state = stream.open(torch.randn(2, 5, 4))
    assert stream.weights(state, stream.sites[0]) is None
    assert stream.sources(stream.layout.out) == ("block 0", "block 2")
    assert stream.sources(stream.sites[1]) == ()
