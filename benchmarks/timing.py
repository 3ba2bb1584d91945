"""Interleaved timing, peak bytes, and the exponent of a growth.

Times are those of `twoaxis.base.timer`: the process's own CPU time on one thread, the wall clock on several. Contenders
take turns, and each is compared with the first one's time of the same round.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch.utils._python_dispatch import TorchDispatchMode

from twoaxis.base.meter import Meter
from twoaxis.base.timer import Rounds, Run, take_turns


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


def interleave(contenders: Mapping[str, Run], rounds: int, warm: int = 1) -> dict[str, Timing]:
    """Time every contender once per round; the first `warm` rounds do not count."""
    times = take_turns(contenders, rounds, warmup=warm)
    base = next(iter(times.values()))
    return {name: _timing(mine, mine.over(base)) for name, mine in times.items()}


def _timing(times: Rounds, ratios: Rounds) -> Timing:
    return Timing(ratios.median, ratios.spread, 1e3 * times.median)


def peak_bytes(run: Run) -> int:
    """The most bytes alive at once in tensors that `run` makes."""
    gc.collect()
    with Meter(record=False) as meter:
        run()
    return meter.peak


class _Calls(TorchDispatchMode):
    """Counts the operations that make new numbers; views are none."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def calls(run: Run) -> int:
    """How many operations of PyTorch `run` makes, backward passes included."""
    with _Calls() as found:
        run()
    return found.count


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The slope of log(values) over log(sizes), by least squares: 1 is linear, 2 is quadratic."""
    x, y = [math.log(s) for s in sizes], [math.log(v) for v in values]
    return statistics.linear_regression(x, y).slope
