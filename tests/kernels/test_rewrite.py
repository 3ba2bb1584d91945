"""The rank-one rewrite and the read of value channels: against their readable forms, with all gradients, also twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from twoaxis.kernels.rewrite import (
    delta_rewrite,
    delta_rewrite_reference,
    read_channels,
    read_channels_reference,
    rewritten_vector,
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def inputs(channels: int, lead: tuple[int, ...] = (2, 3), width: int = 5) -> list[Tensor]:
    """State, direction, the gate's logits, values."""
    shapes = [(*lead, channels, width), (*lead, width), lead, (*lead, channels)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("bound", [None, 3.7, 0.0])
@pytest.mark.parametrize("erase", [True, False])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("lead", [(2, 3), ()])
def test_rewrite_equals_its_reference(lead: tuple[int, ...], channels: int, erase: bool, bound: float | None) -> None:
    tensors = inputs(channels, lead)
    ours = delta_rewrite(*tensors, k_eps=0.1, bound=bound, erase=erase)
    theirs = delta_rewrite_reference(*tensors, k_eps=0.1, bound=bound, erase=erase)
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)
    with torch.no_grad():
        assert torch.equal(delta_rewrite(*tensors, k_eps=0.1, bound=bound, erase=erase), ours)
    g = torch.randn_like(ours)
    pairs = zip(torch.autograd.grad(ours, tensors, g), torch.autograd.grad(theirs, tensors, g), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bound", [None, 3.7])
@pytest.mark.parametrize("erase", [True, False])
@pytest.mark.parametrize("channels", [1, 2])
def test_rewrite_twice(channels: int, erase: bool, bound: float | None) -> None:
    tensors = inputs(channels, (2,), 3)

    def run(*tensors: Tensor) -> Tensor:
        return delta_rewrite(*tensors, k_eps=0.1, bound=bound, erase=erase)

    assert torch.autograd.gradcheck(run, tensors)
    assert torch.autograd.gradgradcheck(run, tensors)


def test_only_what_is_asked_for_gets_a_gradient() -> None:
    for wanted in range(4):
        tensors = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(inputs(2))]
        out = delta_rewrite(*tensors, k_eps=1e-5)
        want = delta_rewrite_reference(*tensors, k_eps=1e-5)
        found = torch.autograd.grad(out.square().sum(), tensors[wanted])[0]
        torch.testing.assert_close(found, torch.autograd.grad(want.square().sum(), tensors[wanted])[0])


@pytest.mark.parametrize("channels", [1, 4])
def test_the_rewrite_is_a_delta_rule(channels: int) -> None:
    """Along k the state becomes v at β = 1; at β = 0 every bit stays; no direction, no change."""
    x, h, _, v = (t.detach() for t in inputs(channels))
    k = h / h.norm(dim=-1, keepdim=True)
    after = delta_rewrite(x, h, torch.zeros(2, 3, dtype=torch.float64), v, k_eps=0.0)
    torch.testing.assert_close((after * k.unsqueeze(-2)).sum(-1), v, rtol=1e-12, atol=1e-12)
    gate = torch.full((2, 3), -torch.inf, dtype=torch.float64)
    assert torch.equal(delta_rewrite(x, h, gate, v, k_eps=0.0), x)
    gate = torch.randn(2, 3, dtype=torch.float64)
    assert torch.equal(delta_rewrite(x, torch.zeros_like(h), gate, v, k_eps=1e-5), x)


@pytest.mark.parametrize("lead", [(2, 3), ()])
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_read_channels_equals_its_reference(used: tuple[int, ...], lead: tuple[int, ...]) -> None:
    state = torch.randn(*lead, 3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    ours, theirs = read_channels(state, weight), read_channels_reference(state, weight)
    assert torch.equal(ours[1], state)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-14, atol=1e-14)
    grads = [torch.randn_like(t) for t in ours]
    found, want = (
        torch.autograd.grad([o[i] for i in used], (state, weight), [grads[i] for i in used], allow_unused=True)
        for o in (ours, theirs)
    )
    torch.testing.assert_close(found[0], want[0], rtol=1e-13, atol=1e-13)
    assert (found[1] is None) == (want[1] is None) == (used == (1,))
    if found[1] is not None:
        torch.testing.assert_close(found[1], want[1], rtol=1e-13, atol=1e-13)


def test_read_channels_twice() -> None:
    state = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(
        lambda s, w: read_channels(s, w)[0] * read_channels(s, w)[1].sum(1), (state, weight)
    )


def test_narrow_states_are_rewritten_wide() -> None:
    x, h, beta, v = (t.detach().float() for t in inputs(2))
    narrow = [x.bfloat16().requires_grad_(), h.bfloat16().requires_grad_(), beta, v]
    with torch.autocast("cpu", torch.bfloat16):
        out = delta_rewrite(*narrow, k_eps=1e-5)
        read, state = read_channels(narrow[0], torch.ones(2, 5))
    assert (out.dtype, read.dtype, state.dtype) == (torch.bfloat16,) * 3
    wide = delta_rewrite_reference(narrow[0].float(), narrow[1].float(), beta, v, 1e-5)
    assert torch.equal(out, wide.bfloat16())
    out.float().sum().backward()
    assert narrow[1].grad is not None
    assert narrow[1].grad.dtype == torch.bfloat16


@pytest.mark.parametrize("dtypes", [("float64",) * 2, ("float32",) * 2, ("bfloat16",) * 2, ("bfloat16", "float32")])
@pytest.mark.parametrize(("bound", "erase"), [(4.0, True), (None, True), (4.0, False)])
def test_a_vector_without_gradients_gets_the_same_numbers(
    dtypes: tuple[str, str], bound: float | None, erase: bool
) -> None:
    state_dtype, dtype = (getattr(torch, name) for name in dtypes)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x, h = torch.randn(2, 3, 7).to(state_dtype), torch.randn(2, 3, 7).to(dtype)
    gate, value = torch.randn(2, 3, 1).to(wide), torch.randn(2, 3, 1).to(wide)
    found = rewritten_vector(x, h, gate, value, k_eps=1e-2, bound=bound, erase=erase)
    other = delta_rewrite(x.unsqueeze(-2), h, gate.squeeze(-1), value, k_eps=1e-2, bound=bound, erase=erase)
    assert found.dtype == x.dtype
    eps = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[x.dtype]
    torch.testing.assert_close(found, other.squeeze(-2), rtol=eps, atol=eps)
