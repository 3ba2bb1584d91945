"""Streams with moved parameters, and toy sub-layers for their sites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import twoaxis
from tests.support.numbers import randn
from twoaxis.depth.stream import Stream

Function = Callable[..., Tensor]


def moved(stream: Any, by: float = 0.3, seed: int = 1, *, start: bool = True) -> Any:
    """Move every parameter away from its start; without `start`, leave nothing of where it was."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in stream.parameters():
            p.mul_(float(start)).add_(by * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return stream


def built(name: str, kinds: Any = ("attention", "mlp"), *, blocks: int = 4, by: float = 1.0, **options: Any) -> Any:
    """A stream of width 8 in float64 whose parameters are N(0, by); `by=0` leaves them at their start."""
    stream = twoaxis.stream(name, blocks=blocks, width=8, kinds=kinds, **options).double()
    return moved(stream, by, start=False) if by else stream


def embedding() -> Tensor:
    """What a stream of width 8 opens with; it wants a gradient."""
    return randn(2, 3, 8, seed=9, grad=True)


def norm(x: Tensor) -> Tensor:
    """An RMS norm without a scale."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def maps(count: int, width: int, dtype: torch.dtype = torch.float64) -> list[Function]:
    """A tanh of a random linear map for each of `count` sites."""
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(count, width, width, generator=generator, dtype=torch.float64) / width**0.5
    return [lambda x, w=w: torch.tanh(x @ w) for w in weights.to(dtype)]


def toy(kind: str, index: int, width: int, dtype: torch.dtype = torch.float64) -> Function:
    """A sub-layer of its kind: an attention that tells q, k and v apart, an MLP, or both."""
    generator = torch.Generator().manual_seed(100 + index)
    a, b, c, m = (torch.randn(4, width, width, generator=generator, dtype=torch.float64) / 4).to(dtype)

    def run(q: Tensor, *rest: Tensor) -> Tensor:
        k, v, x = (q, q, q) if not rest else (*rest, q)[:3]
        attention, mlp = torch.tanh(q @ a + k @ b + v @ c), torch.tanh(x @ m)
        return {"attention": attention, "parallel": attention + mlp}.get(kind, mlp)

    return run


def toys(stream: Stream, dtype: torch.dtype = torch.float64) -> list[Function]:
    """A toy for each site."""
    return [toy(site.kind, site.index, stream.layout.width, dtype) for site in stream.sites]


def composed(stream: Stream, functions: list[Function] | None = None, dtype: torch.dtype = torch.float64) -> Function:
    """The stream around functions, or else toys, behind pre-norms."""
    functions = toys(stream, dtype) if functions is None else functions
    return twoaxis.compose(stream, [(s.kind, norm, f) for s, f in zip(stream.sites, functions, strict=True)])


def run(stream: Stream, x: Tensor, functions: list[Function] | None = None) -> Tensor:
    """The output of `composed`."""
    return composed(stream, functions, x.dtype)(x)
