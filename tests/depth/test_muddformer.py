"""MUDDFormer: ways, generator, norms, start, counts, placement. The golden files are in tests/test_goldens.py."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import twoaxis
from tests.golden_formats.base import trace
from tests.support.numbers import close
from tests.support.streams import built, embedding, run, toys
from twoaxis.depth.muddformer import MuddFormer

WIDTH, BLOCKS = 8, 4
PLAIN_BLOCK, MIXED_BLOCK = ("attention", "mlp"), ("mixer", "attention", "mlp")
make = partial(built, "muddformer", by=0.5)


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
    stream = make(by=0.0)
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


def test_everything_is_decayed_as_in_the_original() -> None:
    stream = make(prenorm=True, postnorm=True)
    (group,) = stream.parameter_groups()
    assert group.decay
    assert set(group.names) == {name for name, _ in stream.named_parameters()}
