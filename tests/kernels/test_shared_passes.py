"""Sources whose readers leave their gradients with them: no backward pass may touch what another one left."""

from __future__ import annotations

import functools
import threading
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import grad
from torch.utils.checkpoint import checkpoint

from tests.support import numbers
from twoaxis.kernels.softmax_read import open_source, softmax_read, softmax_read_reference
from twoaxis.kernels.weighted_sum import rms_logits, rms_logits_reference, share, weighted_sum, weighted_sum_reference

randn = functools.partial(numbers.randn, grad=True)


def reads(fused: bool, x: Tensor, y: Tensor, u: Tensor) -> Any:
    """A function of a column that reads two sources, by fixed queries."""
    if fused:
        opened = [open_source(t, u, 1e-3) for t in (x, y)]
        return lambda i: softmax_read([o for o, _ in opened], [columns[i] for _, columns in opened]).flatten(-2)
    by_heads = [t.unflatten(-1, (1, -1)) for t in (x, y)]
    logits = [rms_logits_reference(t, u, 1e-3) for t in (x, y)]
    return lambda i: softmax_read_reference(by_heads, [t[..., i] for t in logits]).flatten(-2)


def sums(fused: bool, x: Tensor, y: Tensor, u: Tensor) -> Any:
    """The same for plain sums."""
    sources = [share(t) for t in (x, y)] if fused else [x, y]
    add = weighted_sum if fused else weighted_sum_reference
    return lambda i: add(sources, static=u[i : i + 1, 0, :2])[0]


def close(found: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for a, b in zip(found, want, strict=True):
        assert (a - b).abs().max() <= 1e-11 * max(1.0, b.abs().max().item())


def test_a_pass_inside_a_pass_over_one_graph() -> None:
    leaves = [randn(2, 4, seed=1), randn(2, 4, seed=2), randn(3, 1, 4, seed=3)]

    def run(make: Any, fused: bool) -> tuple[Tensor, ...]:
        read = make(fused, leaves[0] * 1.0, leaves[1] * 1.0, leaves[2])
        side, middle, inner = read(2).square().sum(), torch.tanh(read(0)), []
        middle.register_hook(lambda _: inner.extend(torch.autograd.grad(side, leaves, retain_graph=True)))
        outer = torch.autograd.grad((read(1) * middle).sum(), leaves, retain_graph=True)
        return *outer, *inner

    for make in (reads, sums):
        close(run(make, True), run(make, False))


def test_a_recomputed_block_that_holds_a_source() -> None:
    x, y, weights = randn(2, 4, seed=1), randn(2, 4, seed=2), randn(1, 2, seed=3).detach()
    found = []
    for fused in (True, False):
        x.grad = y.grad = None
        give, add = (share, weighted_sum) if fused else (lambda t: t, weighted_sum_reference)
        a, b = give(x), give(y * 1.0)
        h = checkpoint(lambda z: torch.tanh(add([a, z], static=weights)[0]), y * 2.0, use_reentrant=True)  # noqa: B023
        assert isinstance(h, Tensor)
        ((h * add([a, b], static=weights)[0]).sum() + add([a, h], static=weights)[0].sin().sum()).backward()
        assert x.grad is not None
        assert y.grad is not None
        found.append((x.grad, y.grad))
    close(*found)


def test_threads_over_one_graph() -> None:
    x = randn(300, 64)

    def deep(fused: bool) -> Tensor:
        give, add = (share, weighted_sum) if fused else (lambda t: t, weighted_sum_reference)
        sources = [give(x * 1.0)]
        for i in range(1, 12):
            sources.append(give(torch.tanh(add(sources, static=randn(1, i, seed=i).detach())[0])))
        return add(sources, static=randn(1, 12, seed=20).detach())[0].square().sum()

    loss, found = deep(True), []
    ask = lambda: found.append(torch.autograd.grad(loss, [x], retain_graph=True))  # noqa: E731
    for _ in range(5):
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    want = torch.autograd.grad(deep(False), [x])
    assert len(found) == 15
    for each in found:
        close(each, want)


def test_nothing_is_kept_for_a_source_that_is_not_asked() -> None:
    weights, source = randn(1, 2, seed=1), share(randn(2, 4) * 1.0)
    loss = weighted_sum([source, source], static=weights)[0].sum()
    torch.autograd.grad(loss, [weights], retain_graph=True)
    assert not source.grad_fn.parcels.terms  # type: ignore[union-attr]


def test_logits_are_no_sources() -> None:
    x, u, weights = randn(2, 4, seed=1), randn(2, 1, 4, seed=2), randn(1, 2, seed=3)
    out = weighted_sum(open_source(x, u, 1e-3)[1], static=weights)[0]
    want = weighted_sum_reference(rms_logits_reference(x, u, 1e-3).unbind(-1), static=weights)[0]
    close(*(torch.autograd.grad(t.square().sum(), [x, u, weights]) for t in (out, want)))


def test_function_transforms() -> None:
    x, y, u = (t.detach() for t in (randn(2, 4, seed=1), randn(2, 4, seed=2), randn(3, 1, 4, seed=3)))
    for make in (reads, sums):

        def loss(fast: bool, x: Tensor, y: Tensor, u: Tensor, make: Any = make) -> Tensor:
            return make(fast, x, y, u)(1).square().sum()

        close(*(grad(partial(loss, fast), argnums=(0, 1, 2))(x, y, u) for fast in (True, False)))


def test_a_backward_pass_inside_autocast_is_not_narrowed() -> None:
    x, u = (t.detach().float().requires_grad_() for t in (randn(50, 16, seed=1), randn(3, 1, 16, seed=2)))
    opened, columns = open_source(x, u, 1e-6)
    for out in (rms_logits(x, u, 1e-6), softmax_read([opened, opened], columns[:2])):
        outside = torch.autograd.grad(out.square().sum(), [x, u], retain_graph=True)
        with torch.autocast("cpu", torch.bfloat16):
            inside = torch.autograd.grad(out.square().sum(), [x, u], retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


def test_no_tokens() -> None:
    x, u = randn(0, 3, 4), randn(2, 2, 2)
    out = rms_logits(x, u, 1e-6)
    assert out.shape == (0, 3, 2, 2)
    assert torch.autograd.grad(out.sum(), x)[0].shape == (0, 3, 4)
