"""What every format of golden file needs: the arrays, the comparison, toy sub-layers run through a stream."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twoaxis.depth.compose import normalise
from twoaxis.depth.stream import Seen, State, Stream

FORWARD, GRADIENT = 1e-10, 1e-9
ABOUT = {"source", "commit", "official_commit", "official_file", "seed", "L", "d", "B", "T", "batch", "seq"}
"""What a file may say of itself that its arrays' shapes say too, or where it comes from."""


class Looked(dict[str, Any]):
    """A dictionary that knows what was taken out of it; asking whether something is there does not count."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        super().__init__(entries)
        self.seen: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)


class Golden:
    """The arrays of one file and its settings, and a count of the arrays that were compared."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as arrays:
            self.arrays: Mapping[str, np.ndarray] = Looked(arrays)
        self.name = path.name
        self.compared = 0
        self.meta = Looked(json.loads(str(self.arrays["meta"])) if "meta" in self.arrays else {})

    def finish(self) -> None:
        """Refuse a gradient that nobody has compared; warn of anything else that nobody has looked at."""
        entries = (self.arrays, self.meta)
        left = {key for part in entries if isinstance(part, Looked) for key in set(part) - part.seen - ABOUT}
        assert not (grads := [key for key in left if key.startswith("grad")]), f"{self.name}: nobody compares {grads}"
        if left:
            warnings.warn(f"{self.name}: nobody reads {sorted(left)}", stacklevel=2)

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
    assert parameter.shape == value.shape
    with torch.no_grad():
        parameter.copy_(value)


def fill(g: Golden, stream: Stream, names: Mapping[str, str], spare: Collection[str] = ()) -> dict[str, Tensor]:
    """Put the file's parameters, by the names they have there, into ours; returns ours by the same names.

    Args:
        g: the file.
        stream: every parameter of which has a name, or is among the `spare` ones that stay where they start.
        names: theirs to ours; one that the file does not have is passed over.
        spare: names of ours.
    """
    ours = dict(stream.named_parameters())
    held: dict[str, Tensor] = {theirs: ours[name] for theirs, name in names.items() if theirs in g and name in ours}
    left = set(ours) - {names[theirs] for theirs in held}
    assert left <= set(spare), f"{g.name}: parameters without a golden: {left}"
    for theirs, parameter in held.items():
        put(parameter, g.tensor(theirs))
    return held


def ways_toys(g: Golden) -> tuple[dict[str, Tensor], Callable[..., Tensor], Callable[[int, Tensor], Tensor]]:
    """Toy weights A, B, C, M by block, and the attention and MLP made of them: tanh(q A + k B + v C) and tanh(x M)."""
    toys = {name: g.tensor(f"toy.{name}", grad=True) for name in "ABCM"}

    def attention(block: int, *ways: Tensor) -> Tensor:
        q, k, v = ways * 3 if len(ways) == 1 else ways
        return torch.tanh(q @ toys["A"][block] + k @ toys["B"][block] + v @ toys["C"][block])

    return toys, attention, lambda block, x: torch.tanh(x @ toys["M"][block])


def equal_ways(g: Golden, block: int, seen: Seen) -> None:
    """What the attention of a block read along each way, and the residual."""
    for way in "qkv":
        separate = getattr(seen, way)
        g.equal(f"stream.{way}{block}", seen.x if separate is None else separate)
    g.equal(f"stream.r{block}", seen.x)


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
