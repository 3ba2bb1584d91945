"""Times of operations on a measured machine, read out of a profile.

An operation's time is interpolated between the sizes it was measured at, in logarithms, and grows with the bytes beyond
the largest. An operation the profile has never seen takes what copying its bytes takes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import cache
from typing import Any

from twoaxis.base.meter import ATTENTION
from twoaxis.costs.fuse import Kernel
from twoaxis.costs.hardware import Profile

Points = tuple[tuple[float, float], ...]

NEAREST = 4
"""Measured products whose rates are averaged."""


class Table:
    """A profile's measured times.

    Args:
        ops: the profile's `ops`: seconds per call and view, and of operations by their bytes or dimensions.
    """

    def __init__(self, ops: dict[str, Any]) -> None:
        self.call: float = ops["call"]
        self.view: float = ops["view"] + ops["call"]
        self.points: dict[str, Points] = {name: tuple(map(tuple, p)) for name, p in ops["points"].items()}
        self.products: dict[str, list[tuple[tuple[int, ...], float]]] = {}
        for name, dims, seconds in ops["products"]:
            self.products.setdefault(name, []).append((tuple(dims), seconds))

    @staticmethod
    def of(profile: Profile) -> Table:
        """The table of a profile."""
        return _table(id(profile.ops), _Box(profile.ops))


class _Box:
    """Lets a dictionary be an argument of a cached function."""

    def __init__(self, value: dict[str, Any]) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Box) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@cache
def _table(_: int, box: _Box) -> Table:
    return Table(box.value)


def kernel_seconds(table: Table, kernel: Kernel) -> float:
    """One call, its overhead included."""
    if kernel.flops and kernel.dims:
        return table.call + product_seconds(table, kernel.op, kernel.dims, kernel.flops)
    for key in (f"{kernel.op}/{kernel.form}", kernel.op, "copy_"):
        if key in table.points:
            return table.call + interpolate(table.points[key], kernel.bytes)
    raise ValueError("the profile has no copy bandwidth; make a new one with twoaxis cost --calibrate")


def interpolate(points: Points, size: float) -> float:
    """Seconds at a size between or beyond measured ones."""
    if size <= points[0][0]:
        return points[0][1]
    if size >= points[-1][0]:
        return points[-1][1] * size / points[-1][0]
    place = bisect_left([p[0] for p in points], size)
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    share = math.log(size / x0) / math.log(x1 / x0)
    return y0 * (y1 / y0) ** share


def product_seconds(table: Table, name: str, dims: tuple[int, ...], flops: int) -> float:
    """A matrix product: the least that one takes, and its operations at the rate of measured ones of similar shape."""
    same = table.products.get(name) or table.products["mm"]
    least = min(seconds for _, seconds in same) * 0.9
    near = sorted(
        (sum(math.log(a / b) ** 2 for a, b in zip(dims, d, strict=True)), product_flops(name, d) / (seconds - least))
        for d, seconds in same
    )[:NEAREST]
    weights = [1 / (distance + 1e-9) for distance, _ in near]
    rate = math.exp(sum(w * math.log(r) for w, (_, r) in zip(weights, near, strict=True)) / sum(weights))
    return least + flops / rate


def product_flops(name: str, dims: tuple[int, ...]) -> int:
    """Operations of a measured product."""
    factor = 8 if name.endswith("_backward") else 4 if name == ATTENTION else 2
    return factor * math.prod(dims)
