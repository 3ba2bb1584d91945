"""MUDDFormer: ways, generator, norms, start, counts, placement. The golden files are in tests/test_goldens.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import twoaxis
from tests.golden_formats.base import trace
from tests.support.numbers import close, randn
from tests.support.streams import moved, run, toy, toys
from twoaxis.depth import counts
from twoaxis.depth.muddformer import MuddFormer
from twoaxis.depth.stream import State, Stream

WIDTH, BLOCKS = 8, 4
PLAIN_BLOCK, MIXED_BLOCK = ("attention", "mlp"), ("mixer", "attention", "mlp")


def make(
    kinds: Sequence[str] | Sequence[Sequence[str]] = PLAIN_BLOCK,
    blocks: int = BLOCKS,
    random: bool = True,
    **options: Any,
) -> MuddFormer:
    """A stream, with parameters far from their start unless told."""
    stream = twoaxis.stream("muddformer", blocks=blocks, width=WIDTH, kinds=kinds, **options).double()
    assert isinstance(stream, MuddFormer)
    return moved(stream, 0.5, start=False) if random else stream


def embedding() -> Tensor:
    return randn(2, 3, WIDTH, seed=9, grad=True)


@pytest.mark.parametrize("both", [False, True])
def test_the_start(both: bool) -> None:
    stream = twoaxis.stream("muddformer", blocks=3, width=256, prenorm=both, postnorm=both)
    assert isinstance(stream, MuddFormer)
    for block in range(1, 4):
        key = str(block)
        hot = torch.zeros(1 if block == 3 else 4, block + 1)
        hot[:, -1] = 0.0 if both else 1.0
        assert torch.equal(stream.static[key].detach(), hot)
        assert not stream.generator_out[key].any()
        assert stream.generator_in[key].std().item() == pytest.approx(256**-0.5, rel=0.1)
        if both:
            assert torch.equal(stream.generator_scale[key].detach(), torch.ones(256))
            assert torch.equal(stream.post_scale[key].detach(), torch.full((256,), 0.001))
    assert len(stream.pre_scale) == (4 if both else 0)
    assert all(torch.equal(p.detach(), torch.ones(256)) for p in stream.pre_scale.values())


def test_the_generator_wakes_in_the_second_step() -> None:
    stream = make(random=False)
    assert stream.dead() == {}
    optimiser = torch.optim.SGD(stream.parameters(), lr=0.1)
    for step in range(2):
        optimiser.zero_grad()
        run(stream, embedding()).square().sum().backward()
        for weight in stream.generator_in.values():
            assert weight.grad is not None
            assert bool(weight.grad.any()) == (step == 1)
        for weight in (*stream.generator_out.values(), *stream.static.values()):
            assert weight.grad is not None
            assert weight.grad.any()
        optimiser.step()


def test_the_post_norm_does_not_starve_the_residual_way() -> None:
    """At a = 0 its slope is 0.001 / sqrt(1e-6) = 1: the residual way moves with a weight as q, k and v do."""
    stream = make(random=False, prenorm=True, postnorm=True, dynamic=False)
    state = stream.open(embedding().detach())
    for site in stream.sites[:2]:
        seen = stream.read(state, site)
        state = stream.write(state, site, toy(site.kind, site.index, WIDTH)(seen.x), seen, seen)
    moved = state.value.kept[0].x
    static = stream.static["1"]
    for way, row in (("q", 0), ("x", 3)):

        def read(a: Tensor, way: str = way) -> Tensor:
            seen = torch.func.functional_call(_Read(stream, state), {"stream.static.1": a}, (way,))
            assert isinstance(seen, Tensor)
            return seen

        step = torch.zeros_like(static)
        step[row, 0] = 1e-9
        close((read(static + step) - read(static.detach())) / 1e-9, moved, 1e-5)


class _Read(torch.nn.Module):
    """One way that the first site of block 1 reads, as a function of the parameters."""

    def __init__(self, stream: Stream, state: State) -> None:
        super().__init__()
        self.stream, self.state = stream, state

    def forward(self, way: str) -> Tensor:
        return getattr(self.stream.read(self.state, self.stream.sites[2]), way)


def published(blocks: int, width: int, ways: int, expand_last: bool, round64: bool) -> int:
    total = 0
    for i in range(blocks):
        n, c = i + 2, ways if i < blocks - 1 else 1
        hidden = 4 * n if expand_last and i == blocks - 1 else c * n
        hidden = (hidden // 64 + 1) * 64 if round64 else hidden
        total += width * hidden + hidden * c * n + c * n
    return total


@pytest.mark.parametrize(
    ("blocks", "width", "released", "millions"),
    [
        (24, 1024, False, 1.33),
        (24, 1024, True, 2.36),
        (24, 2048, False, 2.58),
        (24, 2048, True, 4.58),
        (32, 2560, False, 5.67),
        (32, 2560, True, 8.78),
    ],
)
def test_parameters_of_the_published_sizes(blocks: int, width: int, released: bool, millions: float) -> None:
    with torch.device("meta"):
        stream = twoaxis.stream("muddformer", blocks=blocks, width=width, expand_last=released, round64=released)
    count = counts.count(stream).parameters
    assert count == published(blocks, width, 4, released, released) == sum(p.numel() for p in stream.parameters())
    assert round(count / 1e6, 2) == millions


def test_round64_always_adds() -> None:
    """Sixteen slots in four ways are 64 already and become 128; the head's 17 slots in one way become 64."""
    stream = make(blocks=16, round64=True)
    hidden = {block: weight.shape[1] for block, weight in stream.generator_in.items()}
    assert hidden["14"] == 64
    assert hidden["15"] == 128
    assert hidden["16"] == 64
    assert make(blocks=16, expand_last=True).generator_in["16"].shape == (WIDTH, 4 * 17)


def test_first_norms() -> None:
    shared, separate = make(MIXED_BLOCK), make(MIXED_BLOCK, first_norms="separate")
    assert [shared.ways(s) for s in shared.sites[:5]] == [("x",)] * 4 + [("q", "k", "v")]
    assert [separate.ways(s) for s in separate.sites[:3]] == [("x",), ("q", "k", "v"), ("x",)]
    extra = [sum(len(stream.ways(site)) - 1 for site in stream.sites) for stream in (shared, separate)]
    assert extra == [2 * (BLOCKS - 1), 2 * BLOCKS]
    parallel = make(("parallel",), first_norms="separate")
    assert {parallel.ways(site) for site in parallel.sites} == {("q", "k", "v", "x")}
    one = make(ways="one", first_norms="separate")
    assert {one.ways(site) for site in one.sites} == {("x",)}
    off = make(first_norms="separate", placement="none")
    assert {off.ways(site) for site in off.sites} == {("x",)}
    x = embedding()
    assert torch.equal(run(shared, x), run(separate, x))


@pytest.mark.parametrize("dynamic", [False, True])
def test_weights_reproduce_the_reads(dynamic: bool) -> None:
    stream = make(dynamic=dynamic)
    _, steps, _ = trace(stream, embedding(), toys(stream))
    step = steps[4]
    weights = stream.weights(step["before"], step["site"])
    assert weights is not None
    assert weights.shape == (2, 3, 4, 3)
    assert stream.sources(step["site"]) == ("embedding", "block 0", "block 1")
    slots = torch.stack([source.x for source in step["before"].value.kept])
    assert slots.shape[0] == 3
    for row, way in enumerate(("q", "k", "v", "x")):
        close(getattr(step["seen"], way), torch.einsum("bts,sbtd->btd", weights[..., row, :], slots))
    assert stream.weights(steps[5]["before"], steps[5]["site"]) is None
    assert stream.sources(stream.sites[0]) == ()


def test_a_block_without_attention_mixes_one_way() -> None:
    stream = make([PLAIN_BLOCK, ("mlp",), PLAIN_BLOCK], blocks=3)
    assert stream.mixes == {1: ("x",), 2: ("q", "k", "v", "x"), 3: ("x",)}


def test_placement_decides_per_way() -> None:
    stream = make(MIXED_BLOCK, placement="attention", postnorm=True)
    assert set(stream.mixes.values()) == {("q", "k", "v")}
    assert not list(stream.post_scale)
    total = x = embedding()
    out, steps, _ = trace(stream, x, toys(stream))
    for step in steps:
        assert torch.equal(step["seen"].x, total)
        inside = step["site"].kind == "attention" and step["site"].block > 0
        assert (step["seen"].q is not None) == inside
        total = total + step["y"]
    assert torch.equal(out, total)
    assert set(make(MIXED_BLOCK, placement="mixer").mixes.values()) == {("x",)}
    assert set(make(placement="1-2").static) == {"1", "2"}
    assert set(make(placement="1-2", prenorm=True).pre_scale) == {"0", "1", "2"}


def test_cost() -> None:
    # modules of 4 ways over 2, 3, 4 slots and of one way over 5
    cost, pairs = counts.count(make()), 4 * (2 + 3 + 4) + 5
    assert cost.reads == 2 + 3 + 4 + 5
    assert cost.flops == WIDTH * (2 * pairs + 2 * pairs + 3 * BLOCKS)
    assert counts.count(make(dynamic=False)).flops == WIDTH * 2 * pairs
    assert counts.count(make(ways="one", dynamic=False)).flops == WIDTH * 2 * 14
    norms = 4 * (BLOCKS + 1) + BLOCKS + (4 * 3 + 1) + 4 * BLOCKS
    assert counts.count(make(prenorm=True, postnorm=True)).flops == cost.flops + WIDTH * norms
    assert counts.count(make(MIXED_BLOCK)).flops == cost.flops + 3 * WIDTH * (BLOCKS - 1)
    assert cost.live == (BLOCKS + 1) * WIDTH


def test_everything_is_decayed_as_in_the_original() -> None:
    stream = make(prenorm=True, postnorm=True)
    (group,) = stream.parameter_groups()
    assert group.decay
    assert set(group.names) == {name for name, _ in stream.named_parameters()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dynamic": False, "round64": True}, "round64=True sizes the generator of dynamic weights"),
        ({"dynamic": False, "expand_last": True}, "expand_last=True sizes the generator of dynamic weights"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)
