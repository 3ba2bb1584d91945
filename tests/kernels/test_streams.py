"""Operations on a state of several streams: against their readable forms, with all gradients, also twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from twoaxis.kernels import streams
from twoaxis.kernels.streams import (
    mix_streams,
    mix_streams_reference,
    read_streams,
    read_streams_reference,
    spread,
    stream_logits,
    stream_logits_reference,
    stream_mean,
    stream_sum,
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("write", [False, True])
def test_mix_streams_equals_its_reference(shared: bool, write: bool) -> None:
    lead = () if shared else (2, 3)
    shapes = [(2, 3, 4, 5), (*lead, 3, 4)] + ([(2, 3, 5), (*lead, 3)] if write else [])
    tensors = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    ours, theirs = mix_streams(*tensors), mix_streams_reference(*tensors)
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)
    assert ours.shape == (2, 3, 3, 5)
    g = torch.randn_like(ours)
    pairs = zip(torch.autograd.grad(ours, tensors, g), torch.autograd.grad(theirs, tensors, g), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_mix_streams_dtypes_follow_addition() -> None:
    h, w, gain = torch.randn(4, 2, 8), torch.randn(2, 2), torch.randn(2)
    assert mix_streams(h.bfloat16(), w).dtype == torch.bfloat16
    assert mix_streams(h.bfloat16(), w, torch.randn(4, 8), gain).dtype == torch.float32
    assert mix_streams(h, w, torch.randn(4, 8).bfloat16(), gain).dtype == torch.float32


def test_mix_streams_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="weights for 3 streams, the state has 2"):
        mix_streams(torch.zeros(2, 4), torch.zeros(3, 3))
    with pytest.raises(ValueError, match="y and gain together"):
        mix_streams(torch.zeros(2, 4), torch.zeros(2, 2), torch.zeros(4))


def logit_inputs(norm: str, lead: tuple[int, ...] = (2, 3)) -> list[Any]:
    """State, rows, and the norm's parameters where it has them."""
    scale, shift = norm != "none", norm == "layer"
    shapes = [(*lead, 5), (4, 5), (5,) if scale else None, (5,) if shift else None]
    return [None if s is None else torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in shapes]


def same_gradients(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], tensors: Sequence[Tensor | None]) -> None:
    """Equal outputs and equal gradients of random sums of them, for every subset of outputs that is used."""
    leaves = [t for t in tensors if t is not None]
    grads = [torch.randn_like(t) for t in ours]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
    for used in {(0,), (len(ours) - 1,), tuple(range(len(ours)))}:
        found, want = (
            torch.autograd.grad(
                [out[i] for i in used], leaves, [grads[i] for i in used], retain_graph=True, allow_unused=True
            )
            for out in (ours, theirs)
        )
        for a, b in zip(found, want, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lead", [(2, 3), (4,), ()])
@pytest.mark.parametrize("norm", ["layer", "rms", "none"])
def test_stream_logits_equal_the_reference(norm: str, lead: tuple[int, ...]) -> None:
    tensors = logit_inputs(norm, lead)
    ours = stream_logits(*tensors, norm=norm, eps=1e-3)
    assert ours[0].shape == (*lead, 4)
    assert torch.equal(ours[1], tensors[0])
    same_gradients(ours, stream_logits_reference(*tensors, norm=norm, eps=1e-3), tensors)


@pytest.mark.parametrize("norm", ["layer", "rms", "none"])
def test_stream_logits_twice(norm: str) -> None:
    given_, names = logit_inputs(norm), [0, 1, 2, 3]
    leaves = [given_[i] for i in names if given_[i] is not None]

    def run(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        rest = [None] * (4 - len(leaves))
        t, state = stream_logits(*leaves, *rest, norm=norm, eps=1e-3)  # type: ignore[call-arg]
        return t, state * t.sum()

    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


def test_layer_norm_survives_a_large_mean() -> None:
    """In float32 a mean square less a squared mean would be all rounding here, or negative."""
    rows = torch.randn(3, 256)
    x = torch.randn(8, 256)
    near, far = x, x + 4096.0
    want = stream_logits_reference(far.double(), rows.double(), None, None, "layer", 1e-5)[0]
    far = far.requires_grad_()
    found = stream_logits(far, rows, None, None, norm="layer", eps=1e-5)[0]
    assert (found - want).abs().max() <= 2e-2  # the rows meet numbers of size 4096: 2**12 roundings
    near = near.requires_grad_()
    found = stream_logits(near, rows, None, None, norm="layer", eps=1e-5)[0]
    torch.testing.assert_close(found, stream_logits_reference(near, rows, None, None, "layer", 1e-5)[0])


@pytest.mark.parametrize("shared", [False, True])
def test_read_streams_equals_its_reference(shared: bool) -> None:
    state = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(*(() if shared else (2, 3)), 4, dtype=torch.float64, requires_grad=True)
    ours = read_streams(state, weights)
    assert ours[0].shape == (2, 3, 5)
    assert torch.equal(ours[1], state)
    same_gradients(ours, read_streams_reference(state, weights), (state, weights))
    assert torch.autograd.gradgradcheck(
        lambda s, w: read_streams(s, w)[0] * read_streams(s, w)[1].sum(-2), (state, weights)
    )


@pytest.mark.parametrize("write", [False, True])
def test_mix_streams_twice(write: bool) -> None:
    shapes = [(2, 4, 5), (2, 3, 4)] + ([(2, 5), (2, 3)] if write else [])
    tensors = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradgradcheck(mix_streams, tensors)


def test_one_tensor_given_twice_gets_both_gradients() -> None:
    y = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 2, dtype=torch.float64)

    def run(y: Tensor) -> Tensor:
        return mix_streams(torch.stack([y, 2 * y], -2), weights, y, weights[0])

    assert torch.autograd.gradcheck(run, y)
    assert torch.autograd.gradgradcheck(run, y)


@pytest.mark.parametrize("setting", ["tf32", "bf16", "ieee"])
def test_mixing_never_rounds_through_a_narrow_product(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where float32 products may be narrow, the mix is a sum of products; the identity keeps every bit either way."""
    used: list[int] = []
    product = streams.batched_product
    monkeypatch.setattr(streams, "batched_product", lambda a, b: used.append(1) or product(a, b))
    h = torch.randn(2, 3, 4, 1024)
    weights = torch.eye(4)
    products: Any = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before, products.fp32_precision = products.fp32_precision, setting
    try:
        assert torch.equal(mix_streams(h, weights), h)
        assert bool(used) == (setting == "ieee")
        assert torch.equal(mix_streams(h, weights, torch.zeros(2, 3, 1024), torch.ones(4)), h)
    finally:
        products.fp32_precision = before


def test_reads_and_logits_follow_the_rules_of_precision() -> None:
    h, rows = torch.randn(3, 2, 8).bfloat16().requires_grad_(), torch.randn(5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        t, h2 = stream_logits(h, rows, None, None, norm="rms", eps=1e-6)
        x, h3 = read_streams(h2, torch.randn(2))
    assert (t.dtype, x.dtype, h3.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    torch.testing.assert_close(t, stream_logits_reference(h, rows, None, None, "rms", 1e-6)[0])
    (x.float().sum() + t.sum() + h3.float().sum()).backward()
    assert h.grad is not None
    assert h.grad.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="weights for 3 streams, the state has 2"):
        read_streams(torch.zeros(2, 4), torch.zeros(3))


def test_mean_of_equal_streams_is_exact() -> None:
    x = torch.randn(1000)
    for n in range(1, 12):
        h = x.expand(n, 1000)
        assert torch.equal(stream_mean(h), x)
        torch.testing.assert_close(stream_sum(h), n * x)
    assert not torch.equal(x.expand(7, 1000).mean(0), x)
    h = torch.randn(3, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(stream_mean(h), h.mean(-2))


def test_streams_that_are_copies_do_not_run_token_by_token() -> None:
    """Equal streams at the start, and one gradient for all of a sum: the same numbers as laid out in memory."""
    x, y = torch.randn(1, 96, 64), torch.randn(1, 96, 64)
    weights, gain, read = torch.rand(1, 96, 4, 4), torch.rand(1, 96, 4), torch.rand(1, 96, 4)
    grad = torch.randn(1, 96, 1, 64).expand(1, 96, 4, 64)
    copies = x.unsqueeze(-2).expand(1, 96, 4, 64)
    found = []
    for state, g in ((copies, grad), (copies.contiguous(), grad.contiguous())):
        given = [t.clone().requires_grad_() for t in (weights, y, gain, read)]
        leaf = state.detach().requires_grad_()
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            out, passed = read_streams(leaf, given[3])
            mixed = mix_streams(passed, given[0], given[1], given[2])
            torch.autograd.backward((out, mixed), (torch.ones_like(out), g))
        assert sum(e.count for e in seen.key_averages() if e.key in ("aten::bmm", "aten::select", "aten::mm")) < 30
        found.append((out, mixed, leaf.grad, *(t.grad for t in given)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert spread(copies).is_contiguous()
    assert spread(copies[:, :2]).stride(-2) == 0  # a few tokens stay as they are
