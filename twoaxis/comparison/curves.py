"""Mean and spread over seeds of held-out curves, along tokens, operations and time: what the plots draw."""

from __future__ import annotations

import math
from typing import NamedTuple

from twoaxis.comparison.reading import Curve
from twoaxis.comparison.summary import Entry


class Band(NamedTuple):
    """A line with what seeds make of it."""

    x: tuple[float, ...]
    mean: tuple[float, ...]
    spread: tuple[float, ...]
    """Standard deviation over seeds; zero for one seed."""


def loss_band(entry: Entry, axis: str) -> Band | None:
    """The mean held-out loss of a contender; None without a finished run or where the axis was not measured."""
    scale = entry.scale(axis)
    if scale is None or not entry.curves:
        return None
    places = sorted(set.intersection(*(set(curve.tokens) for curve in entry.curves.values())))
    rows = [[_at(curve, place) for curve in entry.curves.values()] for place in places]
    return _band([place * scale for place in places], rows)


def difference_band(entry: Entry, baseline: Entry, axis: str) -> Band | None:
    """The mean of the paired differences to the baseline, at the contender's evaluations until the shorter run ends."""
    mine, theirs = entry.scale(axis), baseline.scale(axis)
    seeds = [seed for seed in entry.curves if seed in baseline.curves and baseline.curves[seed].tokens]
    if mine is None or theirs is None or not seeds:
        return None
    x, rows = [], []
    places = set.intersection(*(set(entry.curves[seed].tokens) for seed in seeds))
    reach = min(baseline.curves[seed].tokens[-1] for seed in seeds) * theirs / mine
    for place in sorted({min(place, reach) for place in places}):
        pairs = [(entry.curves[s].at(place), baseline.curves[s].at(place * mine / theirs)) for s in seeds]
        row = [ours - other for ours, other in pairs if ours is not None and other is not None]
        if len(row) == len(seeds):
            x.append(place * mine)
            rows.append(row)
    return _band(x, rows)


def _at(curve: Curve, place: float) -> float:
    return curve.loss[curve.tokens.index(place)]


def _band(x: list[float], rows: list[list[float]]) -> Band | None:
    if not x:
        return None
    means = [math.fsum(row) / len(row) for row in rows]
    spreads = [
        math.sqrt(math.fsum((value - mean) ** 2 for value in row) / (len(row) - 1)) if len(row) > 1 else 0.0
        for row, mean in zip(rows, means, strict=True)
    ]
    return Band(tuple(x), tuple(means), tuple(spreads))
