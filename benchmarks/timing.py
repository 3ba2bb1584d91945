"""Interleaved timing, peak bytes, and the exponent of a growth.

One thread and the process's own CPU time unless more threads are asked for: a busy machine then slows the clock's owner
but not the clock. Contenders take turns, round by round, and each is compared with the first one's time of the same
round, so that a slow moment hits both; every other round runs backwards, so that a drift hits both alike.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from twoaxis.training.measure import LiveBytes

Run = Callable[[], Any]


class Timing(NamedTuple):
    """Rounds of one contender.

    Attributes:
        ratio: median over the rounds of its time through the first contender's.
        spread: half the distance between the quartiles of those ratios.
        milliseconds: its median time.
    """

    ratio: float
    spread: float
    milliseconds: float


def seconds(run: Run) -> float:
    """One run's time: the process's CPU time on one thread, the wall clock on several."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    run()
    return clock() - start


def interleave(contenders: Mapping[str, Run], rounds: int, warm: int = 1) -> dict[str, Timing]:
    """Time every contender once per round; the first `warm` rounds do not count."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + warm):
        order = list(contenders.items())
        gc.collect()
        gc.disable()  # no collection while the clock runs
        try:
            for name, run in order if number % 2 == 0 else reversed(order):
                took = seconds(run)
                if number >= warm:
                    times[name].append(took)
        finally:
            gc.enable()
    base = next(iter(times.values()))
    return {name: _timing(found, base) for name, found in times.items()}


def _timing(times: Sequence[float], base: Sequence[float]) -> Timing:
    ratios = [t / b for t, b in zip(times, base, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    return Timing(statistics.median(ratios), (high - low) / 2, 1e3 * statistics.median(times))


def peak_bytes(run: Run) -> int:
    """The most bytes alive at once in tensors that `run` makes."""
    gc.collect()
    with LiveBytes() as live:
        run()
    return live.peak


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The slope of log(values) over log(sizes), by least squares: 1 is linear, 2 is quadratic."""
    x, y = [math.log(s) for s in sizes], [math.log(v) for v in values]
    return statistics.linear_regression(x, y).slope
