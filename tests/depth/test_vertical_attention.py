"""Vertical Attention: norms, inner residual, start, relation to ELC-BERT, beside its golden files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import twoaxis
from tests.golden_formats.base import trace
from tests.support.numbers import close, randn
from tests.support.streams import maps, moved, run
from twoaxis.depth import counts
from twoaxis.depth.stream import Stream

NORMS = ("l2", "rms", "none")
WIDTH, BLOCKS = 8, 4


def make(
    kinds: Sequence[str] = ("attention", "mlp"), name: str = "vertical_attention", blocks: int = BLOCKS, **options: Any
) -> Stream:
    """A stream with scalars far from their start."""
    stream = twoaxis.stream(name, blocks=blocks, width=WIDTH, kinds=kinds, **options).double()
    return moved(stream, 1.0, start=False)


def embedding() -> Tensor:
    return randn(2, 3, WIDTH, seed=9)


def test_without_norm_and_inner_residual_it_is_elc_bert_zero_to_a_bit() -> None:
    for kinds in (("attention", "mlp"), ("mixer", "attention", "mlp"), ("parallel",)):
        ours = make(kinds, norm="none", inner_residual=False)
        elc = make(kinds, "elc_bert", variant="zero")
        assert [p.tolist() for p in ours.parameters()] == [p.tolist() for p in elc.parameters()]
        assert torch.equal(run(ours, embedding()), run(elc, embedding()))


def test_rms_is_elc_bert_normalized_up_to_the_mean() -> None:
    """With increments of mean zero and a normalised slot 0 every read agrees; only the output is not normalised."""
    centred = [lambda x, f=f: (y := f(x)) - y.mean(-1, keepdim=True) for f in maps(2 * BLOCKS, WIDTH)]
    x0 = embedding()
    x0 = x0 - x0.mean(-1, keepdim=True)
    ours = make(norm="rms", inner_residual=False, eps=1e-7)
    elc = make(name="elc_bert", variant="normalized", eps=1e-7)
    out, steps, _ = trace(ours, x0, centred)
    want, theirs, _ = trace(elc, F.layer_norm(x0, (WIDTH,), eps=1e-7), centred)
    for step, other in zip(steps, theirs, strict=True):
        close(step["seen"].x, other["seen"].x)
    close(F.layer_norm(out, (WIDTH,), eps=1e-7), want)
    assert (out - want).abs().max() > 0.01


def test_mixture_lengths() -> None:
    """With l2 a mixture is no longer than one; with rms no longer than sqrt(width)."""
    for kind, bound in (("l2", 1.0), ("rms", WIDTH**0.5)):
        stream = make(norm=kind, eps=0.0)
        _, steps, _ = trace(stream, 100 * embedding(), maps(2 * BLOCKS, WIDTH))
        lengths = torch.stack([s["seen"].x.norm(dim=-1) for s in steps if s["site"].first])
        assert lengths.max() <= bound + 1e-12
        close(lengths[0], torch.full_like(lengths[0], bound))


def test_sources_are_kept_by_reference() -> None:
    x = embedding()
    _, steps, _ = trace(make(norm="l2"), x, maps(2 * BLOCKS, WIDTH))
    assert steps[0]["before"].value.kept[0].x is x
    after = steps[1]["state"].value
    assert after.kept[1].x is after.x
    assert after.kept[1].derived.shape == x.shape[:-1]


def test_zero_vectors_are_harmless_with_an_epsilon() -> None:
    x = embedding()
    x[0, 0] = 0.0
    for kind in NORMS:
        leaf = x.clone().requires_grad_()
        out = run(make(norm=kind), leaf)
        (grad,) = torch.autograd.grad(out.sum(), leaf)
        assert torch.isfinite(out).all()
        assert torch.isfinite(grad).all()


def test_initial_scalars() -> None:
    for init, newest in (("zeros", 0.0), ("newest", 1.0)):
        stream = twoaxis.stream("vertical_attention", blocks=BLOCKS, width=WIDTH, init=init)
        for n in range(BLOCKS):
            assert stream.get_parameter(f"logits.{n}").tolist() == [0.0] * n + [newest]
    assert twoaxis.stream("vertical_attention", blocks=2, width=WIDTH).get_parameter("logits.1").tolist() == [0, 0]


@pytest.mark.parametrize("kind", NORMS)
def test_counts(kind: str) -> None:
    cost = counts.count(make(blocks=12, norm=kind))
    assert cost.parameters == cost.reads == 12 * 13 // 2
    norms = 0 if kind == "none" else 12  # one per source that is read, the last block's output is not
    assert cost.flops == (2 * 78 + 2 * norms) * WIDTH
    assert cost.live == 12 * WIDTH
    assert make(norm=kind).dead() == {"logits.0": "the block has one slot, its softmax is constant"}


def test_first_block_switched_on_alone() -> None:
    """Block 0 reads its normalised embedding, the others continue plainly."""
    stream = make(norm="l2", eps=0.0, placement="0")
    plain = twoaxis.stream("standard", blocks=BLOCKS, width=WIDTH)
    x = embedding()
    close(run(stream, x), run(plain, x / x.norm(dim=-1, keepdim=True)))


def test_norms_run_in_float32_for_narrow_activations() -> None:
    """Squares of a large bfloat16 state are summed in float32: the read keeps unit length to bfloat16's rounding."""
    stream = make(norm="l2").bfloat16()
    x = (1e15 * embedding()).bfloat16()
    state = stream.open(x)
    assert state.value.kept[0].derived.dtype == torch.float32
    seen = stream.read(state, stream.sites[0]).x
    assert seen.dtype == torch.bfloat16
    assert (seen.double().norm(dim=-1) - 1).abs().max() < 2**-7
