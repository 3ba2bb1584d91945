"""Timing several functions in turns, so that their ratios come from the same stretch of time.

    round 1   a  b  c
    round 2   b  c  a          each round begins with the next one
    round 3   c  a  b

The clock is the CPU time of this process where the work runs on the CPU in one thread: other processes on the machine
slow the work down and not the clock. With several threads, whose CPU times add up, and on an accelerator, which goes on
after a call returns, it is the wall clock around finished work. A machine that is slow for a while then slows every
contender, and medians pass over it.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

Run = Callable[[], Any]
Name = TypeVar("Name", bound=Hashable)


class Rounds(NamedTuple):
    """One number of every round, in order: seconds, ratios of seconds, or a rate."""

    values: tuple[float, ...]  # of the rounds

    @property
    def median(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles; 0 for a single round."""
        if len(self.values) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.values, n=4)
        return (high - low) / 2

    def over(self, base: Rounds) -> Rounds:
        """Ratios to another contender, round by round: a slow moment hits both."""
        return Rounds(tuple(mine / its for mine, its in zip(self.values, base.values, strict=True)))


class Throughput(NamedTuple):
    """How fast a model trains."""

    rate: Rounds  # tokens per second, round by round
    # part of a step that a step of two tokens takes too: calls of operations, and the optimiser. What a method costs
    # there says little about a larger model or a faster device. None where it was not measured.
    fixed: float | None


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Recent garbage is collected before and not inside, where its timing would change what is measured."""
    collects = gc.isenabled()
    gc.collect(1)  # what has survived long has little garbage in it, and looking through it may take seconds
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def seconds(run: Run, device: Any = "cpu") -> float:
    """Seconds that one call takes, whose work runs on `device`."""
    import torch

    on_cpu = torch.device(device).type == "cpu"
    clock = time.process_time if on_cpu and torch.get_num_threads() == 1 else time.perf_counter

    def wait() -> None:
        if not on_cpu:
            torch.accelerator.synchronize(device)

    wait()
    begin = clock()
    run()
    wait()
    return clock() - begin


def take_turns(
    runs: Mapping[Name, Run],
    rounds: int,
    *,
    warmup: int = 1,
    device: Any = "cpu",
    within: float = 0.0,
    report: Callable[[int], None] | None = None,
) -> dict[Name, Rounds]:
    """Seconds of several functions, each called once a round, after rounds of `warmup` that do not count.

    Args:
        runs: the functions, by name.
        rounds: how many are timed at least.
        warmup: rounds before them.
        device: on which the functions work.
        within: up to four times as many rounds are timed as long as they fit into so many seconds for each function:
            what is short scatters most, and costs least to repeat.
        report: called with the number of timed rounds that are done.
    """
    if not runs or rounds < 1:
        raise ValueError(f"at least one function must be timed for one round, got {len(runs)} and rounds={rounds}")
    names = list(runs)
    times: dict[Name, list[float]] = {name: [] for name in names}
    for number in range(-warmup, 4 * rounds):
        if number >= rounds and sum(map(sum, times.values())) * (1 + 1 / number) > within * len(names):
            break
        first = max(number, 0) % len(names)
        with no_collection():
            for name in names[first:] + names[:first]:
                took = seconds(runs[name], device)
                if number >= 0:
                    times[name].append(took)
        if report is not None and number >= 0:
            report(number + 1)
    return {name: Rounds(tuple(values)) for name, values in times.items()}
