"""Stacked parameters taken apart once per pass: the right rows in every case, gradients put together once."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import twoaxis
from twoaxis.depth.stream import State, Stream

METHODS = [
    ("hyper_connections", {}),
    ("manifold_hyper_connections", {"start": "lite"}),
    ("deep_delta", {}),
    ("deep_delta", {"value_channels": 3, "gate": "two_layer", "gate_hidden": 4}),
]


def make(name: str, options: dict[str, Any], blocks: int = 2) -> Stream:
    torch.manual_seed(0)
    made = twoaxis.stream(name, blocks=blocks, width=6, **options).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def run(stream: Stream, state: State) -> Tensor:
    for site in stream.sites:
        seen = stream.read(state, site)
        state = stream.write(state, site, torch.tanh(seen.x), seen, seen)
    return stream.close(state)


@pytest.mark.parametrize(("name", "options"), METHODS, ids=str)
def test_a_copy_uses_its_own_parameters(name: str, options: dict[str, Any]) -> None:
    stream, x = make(name, options), torch.randn(1, 3, 6, dtype=torch.float64)
    state, other = stream.open(x), copy.deepcopy(stream)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.7)
    assert torch.equal(run(other, state), run(other, other.open(x)))
    assert not torch.allclose(run(other, state), run(stream, state))


@pytest.mark.parametrize(("name", "options"), METHODS, ids=str)
def test_gradients_switched_on_after_opening(name: str, options: dict[str, Any]) -> None:
    stream, x = make(name, options), torch.randn(1, 3, 6, dtype=torch.float64)
    run(stream, stream.open(x)).square().sum().backward()
    want = [p.grad for p in stream.parameters()]
    stream.zero_grad()
    with torch.no_grad():
        state = stream.open(x)
    run(stream, state).square().sum().backward()
    for parameter, grad in zip(stream.parameters(), want, strict=True):
        assert parameter.grad is not None
        assert grad is not None
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "options"), METHODS, ids=str)
def test_what_is_written_into_parameters_is_seen(name: str, options: dict[str, Any]) -> None:
    stream, x = make(name, options), torch.randn(1, 3, 6, dtype=torch.float64)
    with torch.no_grad():
        state = stream.open(x)
        for parameter in stream.parameters():
            parameter.mul_(1.7)
        assert torch.equal(run(stream, state), run(stream, stream.open(x)))


class _Largest(TorchDispatchMode):
    """How many tensors of each size operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.made[out.numel()] += 1
        return out


def test_a_stack_s_gradient_is_made_once() -> None:
    """Not at every site: the work of a backward pass is linear in depth."""
    stream = make("manifold_hyper_connections", {"streams": 2}, blocks=5)
    out = run(stream, stream.open(torch.randn(1, 3, 6, dtype=torch.float64)))
    fn: Any = stream.fn
    assert fn.numel() == 10 * 8 * 12
    with _Largest() as counter:
        out.sum().backward()
    assert 1 <= counter.made[fn.numel()] <= 3
