"""Streams whose passes are recomputed, offloaded, cut or partly frozen have the gradients of their references."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support.numbers import randn
from twoaxis.depth.stream import State
from twoaxis.kernels import using
from twoaxis.verify.subject import Run, StreamSubject

STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("attention_residuals", {"block_size": 2, "read": "sum", "evaluation": "two_phase", "heads": 2}),
    ("attention_residuals", {"weighting": "sigmoid", "window": 3, "overflow": "sum"}),
    ("denseformer", {"dilation": 2}),
    ("muddformer", {"prenorm": True, "postnorm": True}),
    ("manifold_hyper_connections", {"streams": 3}),
    ("deep_delta", {"value_channels": 3, "expand": "conv"}),
]
every = pytest.mark.parametrize(("name", "options"), STREAMS)


def gradients(run: Run, out: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    probe = randn(*out.shape, seed=6)
    return torch.autograd.grad((out * probe).sum(), [t for t in leaves if t.requires_grad], allow_unused=True)


def check(found: Sequence[Tensor | None], want: Sequence[Tensor | None]) -> None:
    for number, (a, b) in enumerate(zip(found, want, strict=True)):
        if a is None or b is None:  # unused in one form, of gradient zero in the other
            assert not any(t.any() for t in (a, b) if t is not None), number
        else:
            assert a.isfinite().all(), number
            assert (a - b).abs().max() <= 1e-11 * max(1.0, b.abs().max().item()), number


def block(run: Run, state: State, number: int) -> State:
    return run.go(state, run.method.sites_of(number)[-1].index + 1)


def by_blocks(run: Run, x: Tensor, around: Callable[..., State]) -> Tensor:
    """The pass with each block behind `around`."""
    state = run.method.open(x)
    for number in range(run.method.layout.blocks):
        state = around(partial(block, run), state, number)
    return run.method.close(state)


def by_stages(run: Run, x: Tensor, around: Callable[..., tuple[Tensor, ...]]) -> Tensor:
    """The pass with each block behind `around`, between `unpack` and `pack`."""
    stream = run.method

    def stage(number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return stream.pack(block(run, stream.unpack(tensors, stream.sites_of(number)[0]), number))

    tensors = stream.pack(stream.open(x))
    for number in range(stream.layout.blocks):
        tensors = around(stage, number, *tensors)
    return stream.close(stream.unpack(tensors, stream.layout.out))


@every
def test_recomputed_and_offloaded(name: str, options: dict[str, Any]) -> None:
    run = StreamSubject(name, options).run(perturb=0.3, width=8)
    x = run.input(grad=True)
    leaves = run.leaves(x)
    with using("reference"):
        want = gradients(run, run(x), leaves)
    again = partial(checkpoint, use_reentrant=False)
    check(gradients(run, again(lambda x: by_blocks(run, x, again), x), leaves), want)  # nested
    with torch.autograd.graph.save_on_cpu():
        out = run(x)
    check(gradients(run, out, leaves), want)
    out = by_stages(run, x, partial(checkpoint, use_reentrant=True))  # the kind that `autograd.grad` refuses
    (out * randn(*out.shape, seed=6)).sum().backward()
    check([leaf.grad for leaf in leaves], want)


@every
def test_what_is_frozen_or_cut_off(name: str, options: dict[str, Any]) -> None:
    run = StreamSubject(name, options).run(perturb=0.3, width=8)
    stream, own = run.method, {id(p) for p in run.method.parameters()}

    def cut(go: Callable[..., State], state: State, number: int) -> State:
        if number == 1:
            state = stream.unpack([t.detach() for t in stream.pack(state)], stream.sites_of(1)[0])
        return go(state, number)

    for stream_learns in (True, False):
        for parameter in run.parameters():
            parameter.requires_grad_((id(parameter) in own) == stream_learns)
        for x in (run.input(), run.input(grad=True)):
            for around in (cut, lambda go, *arguments: go(*arguments)):
                with using("reference"):
                    want = gradients(run, by_blocks(run, x, around), run.leaves(x))
                check(gradients(run, by_blocks(run, x, around), run.leaves(x)), want)
