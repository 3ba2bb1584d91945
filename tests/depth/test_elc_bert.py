"""ELC-BERT: block forms, mixers, parallel sites, placement, parameters, beside its golden files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.numbers import close
from tests.support.streams import Function, built, embedding, maps, norm, run
from twoaxis.depth.stream import Stream

VARIANTS = ("base", "zero", "normalized", "weighted_output")
WIDTH, BLOCKS = 8, 4
make = partial(built, "elc_bert")


def mixture(stream: Stream, block: int, slots: Sequence[Tensor]) -> Tensor:
    alpha = stream.get_parameter(f"logits.{block}").softmax(-1)
    assert len(alpha) == len(slots)
    return torch.einsum("s,sbtd->btd", alpha, torch.stack(list(slots)))


def by_blocks(stream: Stream, x: Tensor, variant: str, block: Callable[[Tensor, Sequence[Function]], Tensor]) -> Tensor:
    """The original's loop over a list of hidden states; `block` maps an input and its sub-layers to what is stored."""
    functions, slots = [lambda t, f=f: f(norm(t)) for f in maps(len(stream.sites), WIDTH)], [x]
    per_block = len(functions) // stream.layout.blocks
    for n in range(stream.layout.blocks):
        stored = block(mixture(stream, n, slots), functions[n * per_block : (n + 1) * per_block])
        slots.append(F.layer_norm(stored, (WIDTH,), eps=1e-7) if variant == "normalized" else stored)
    return mixture(stream, stream.layout.blocks, slots) if variant == "weighted_output" else slots[-1]


def two(variant: str) -> Callable[[Tensor, Sequence[Function]], Tensor]:
    def block(x: Tensor, f: Sequence[Function]) -> Tensor:
        a = f[0](x)
        return a + f[1](a if variant == "base" else x + a)

    return block


def check_gradients(stream: Stream, x: Tensor, want: Callable[[Tensor], Tensor]) -> None:
    x = x.requires_grad_()
    leaves = [x, *stream.parameters()]
    ours, theirs = run(stream, x, maps(len(stream.sites), WIDTH)), want(x)
    close(ours, theirs)
    g = torch.cos(torch.arange(ours.numel(), dtype=ours.dtype)).view_as(ours)
    pairs = zip(torch.autograd.grad(ours, leaves, g), torch.autograd.grad(theirs, leaves, g), strict=True)
    for mine, other in pairs:
        assert (mine - other).abs().max() <= 1e-11 * max(other.abs().max().item(), 1e-3)


def test_blocks_switched_off_store_their_plain_output() -> None:
    stream = make(variant="weighted_output", placement="1,3-4")
    assert [n for n, _ in stream.named_parameters()] == ["logits.1", "logits.3", "logits.4"]
    f = [lambda t, g=g: g(norm(t)) for g in maps(2 * BLOCKS, WIDTH)]

    def plain(x: Tensor, f: Sequence[Function]) -> Tensor:
        x = x + f[0](x)
        return x + f[1](x)

    def want(x: Tensor) -> Tensor:
        slots = [x, plain(x, f[0:2])]
        slots.append(two("zero")(mixture(stream, 1, slots), f[2:4]))
        slots.append(plain(slots[-1], f[4:6]))
        slots.append(two("zero")(mixture(stream, 3, slots), f[6:8]))
        return mixture(stream, 4, slots)

    check_gradients(stream, embedding(), want)


@pytest.mark.parametrize("variant", VARIANTS)
def test_mlps_switched_off_never_see_the_input(variant: str) -> None:
    stream = make(variant=variant, placement="attention+out")
    check_gradients(stream, embedding(), lambda x: by_blocks(stream, x, variant, two("base")))


@pytest.mark.parametrize("variant", VARIANTS)
def test_mixers_switched_off_read_plainly_and_join_the_mixture(variant: str) -> None:
    stream = make(("mixer", "mixer", "attention", "mlp"), variant=variant, placement="attention+mlp+out")
    newest: list[Tensor] = []

    def block(x: Tensor, f: Sequence[Function]) -> Tensor:
        first = f[0](newest[-1])
        second = f[1](newest[-1] + first)
        stored = two(variant)(x + first + second, f[2:])
        newest.append(F.layer_norm(stored, (WIDTH,), eps=1e-7) if variant == "normalized" else stored)
        return stored

    def want(x: Tensor) -> Tensor:
        newest[:] = [x]
        return by_blocks(stream, x, variant, block)

    check_gradients(stream, embedding(), want)


@pytest.mark.parametrize("variant", VARIANTS)
def test_mixers_alone_start_a_plain_residual_from_the_mixture(variant: str) -> None:
    stream = make(("mixer", "attention", "mlp"), variant=variant, placement="mixer")

    def block(x: Tensor, f: Sequence[Function]) -> Tensor:
        for sublayer in f:
            x = x + sublayer(x)
        return x

    check_gradients(stream, embedding(), lambda x: by_blocks(stream, x, "zero", block))
