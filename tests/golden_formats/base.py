"""What every format of golden file needs: the arrays, the comparison, toy sub-layers run through a stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twoaxis.depth.compose import normalise
from twoaxis.depth.stream import Seen, State, Stream

FORWARD, GRADIENT = 1e-10, 1e-9


class Golden:
    """The arrays of one file, and a count of those that were compared."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as arrays:
            self.arrays: Mapping[str, np.ndarray] = dict(arrays)
        self.name = path.name
        self.compared = 0

    def __contains__(self, key: str) -> bool:
        return key in self.arrays

    def tensor(self, key: str, *, grad: bool = False) -> Tensor:
        t = torch.from_numpy(np.array(self.arrays[key], dtype=np.float64))
        return t.requires_grad_(grad)

    def number(self, key: str) -> Any:
        return self.arrays[key].item()

    def equal(self, key: str, ours: Tensor | None, bound: float = FORWARD) -> None:
        want = self.tensor(key)
        got = torch.zeros_like(want) if ours is None else ours.detach()
        assert got.shape == want.shape, f"{self.name}: {key} has shape {tuple(got.shape)}, not {tuple(want.shape)}"
        error = (got - want).abs().max().item() / max(want.abs().max().item(), 1e-300)
        if want.abs().max() == 0:
            error = got.abs().max().item()
        assert error <= bound, f"{self.name}: {key} is off by {error:.2e} (bound {bound:.0e})"
        self.compared += 1

    def gradients(self, ours: Mapping[str, Tensor | None]) -> None:
        for key, tensor in ours.items():
            self.equal(key, tensor, GRADIENT)


def trace(
    stream: Stream,
    x: Tensor,
    sublayers: Sequence[Callable[..., Tensor]],
    norms: Sequence[Callable[[Tensor], Tensor]] | None = None,
) -> tuple[Tensor, list[dict[str, Any]], State]:
    """Run toy sub-layers and record what happens at each site."""
    state = stream.open(x)
    steps: list[dict[str, Any]] = []
    for i, (site, fn) in enumerate(zip(stream.sites, sublayers, strict=True)):
        ways = stream.ways(site)
        seen = stream.read(state, site)
        norm = (lambda t: t) if norms is None else norms[i]
        c: Seen = normalise(seen, ways, [norm] * len(ways))
        y = fn(*(getattr(c, way) for way in ways))
        before, state = state, stream.write(state, site, y, seen, c)
        steps.append({"seen": seen, "c": c, "y": y, "before": before, "state": state, "site": site})
    return stream.close(state), steps, state


def put(parameter: Tensor | None, value: Tensor) -> None:
    assert parameter is not None
    with torch.no_grad():
        parameter.copy_(value)


def rms_norm(weight: Tensor, eps: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def tanh_of(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.tanh(x @ weight)


def stacked(steps: list[dict[str, Any]], pick: Callable[[dict[str, Any]], Tensor]) -> Tensor:
    return torch.stack([pick(step) for step in steps])


def finish(g: Golden, out: Tensor, leaves: Mapping[str, Tensor], key: str = "out") -> None:
    """Compare the output, the loss and the gradients of `leaves`."""
    g.equal(key, out)
    loss = (out * g.tensor("G")).sum()
    g.equal("loss", loss) if "loss" in g else None
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    g.gradients(dict(zip(leaves, grads, strict=True)))
