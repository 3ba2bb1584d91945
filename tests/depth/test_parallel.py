"""What the methods with parallel streams share: their tables, plain sites, weights, precision, and kinds of routes."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import twoaxis
from tests.support.numbers import close, randn
from twoaxis.depth.parallel import ParallelStreams
from twoaxis.depth.stream import State, Stream


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


# Reads and writes.


def make_streams(name: str, width: int = 6, **options: Any) -> ParallelStreams:
    made = twoaxis.stream(name, blocks=2, width=width, **options).double()
    assert isinstance(made, ParallelStreams)
    with torch.no_grad():
        for i, parameter in enumerate(made.parameters()):
            parameter.add_(0.4 * randn(*parameter.shape, seed=i))
    return made


def test_plain_sites_read_the_mean_and_add_to_all() -> None:
    stream = make_streams("hyper_connections", streams=3, placement="none")
    h, y, site = randn(2, 3, 6), randn(2, 6, seed=1), stream.sites[0]
    state = stream.unpack((h,), site)
    seen = stream.read(state, site)
    close(seen.x, h.mean(-2), 1e-14)
    assert torch.equal(stream.write(state, site, y, seen, seen).value.h, h + y[:, None])
    assert torch.equal(stream.rescale(state, 0.5).value.h, h / 2)


@pytest.mark.parametrize(
    ("name", "readout"),
    [(f"{kind}hyper_connections", how) for kind in ("", "manifold_") for how in ("sum", "mean")]
    + [("manifold_hyper_connections", "head")],
)
def test_weights_say_what_is_read(name: str, readout: str) -> None:
    stream = make_streams(name, streams=3, readout=readout)
    state = stream.open(randn(2, 3, 6))
    for site in stream.layout.sites:
        seen, weights = stream.read(state, site), stream.weights(state, site)
        assert weights is not None
        assert weights.shape == (2, 3, 1, 3)
        close((weights.mT * state.value.h).sum(-2), seen.x)
        assert stream.sources(site) == ("stream 0", "stream 1", "stream 2")
        if site is not stream.layout.out:
            state = stream.write(state, site, torch.tanh(seen.x), seen, seen)


@pytest.mark.parametrize("name", ["hyper_connections", "manifold_hyper_connections"])
def test_narrow_states_are_routed_in_float32_and_not_kept_wide(name: str) -> None:
    exact = make_streams(name, width=32)
    stream = copy.deepcopy(exact).bfloat16()
    exact.load_state_dict(stream.state_dict())
    h = torch.randn(2, 32, 4, 32).bfloat16()
    for ours, theirs in zip(stream.routed(h, 0), exact.routed(h.double(), 0), strict=True):
        if ours is not None and theirs is not None:
            assert ours.dtype == torch.float32
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)
    saved: list[Tensor] = []
    x = h[..., 0, :].clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run(stream, stream.open(x))
    assert saved
    assert not [t for t in saved if t.dtype == torch.float32 and t.shape[:2] == (2, 32) and t.numel() >= x.numel()]
