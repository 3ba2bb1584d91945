"""Interleaved timing and peak-memory measurement."""

from __future__ import annotations

import gc
import platform
import statistics
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Timing(NamedTuple):
    """Median and spread (half the interquartile range) of one contender's rounds, relative to the first one's."""

    ratio: float
    spread: float
    milliseconds: float


def interleave(contenders: dict[str, Callable[[], Any]], rounds: int = 9, warm: int = 2) -> dict[str, Timing]:
    """Time every contender once per round, so that a noisy moment hits all of them; ratios are paired by round."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + warm):
        for name, run in contenders.items():
            gc.collect()
            start = time.perf_counter()
            run()
            if number >= warm:
                seconds[name].append(time.perf_counter() - start)
    base = seconds[next(iter(contenders))]
    result = {}
    for name, times in seconds.items():
        ratios = sorted(t / b for t, b in zip(times, base, strict=True))
        quartiles = statistics.quantiles(ratios, n=4)
        median = statistics.median(ratios)
        result[name] = Timing(median, (quartiles[2] - quartiles[0]) / 2, 1e3 * statistics.median(times))
    return result


class PeakBytes(TorchDispatchMode):
    """Largest number of bytes alive at once in tensors made while active, by distinct storage."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, Any] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self.alive:
                    self.now += size
                    self.peak = max(self.peak, self.now)
                    self.alive[key] = weakref.finalize(storage, self._free, key, size)
        return out

    def _free(self, key: int, size: int) -> None:
        if self.alive.pop(key, None) is not None:
            self.now -= size


def machine() -> str:
    """One line that says what the figures were measured on."""
    processor = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            processor = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return (
        f"{processor}, {torch.get_num_threads()} threads, torch {torch.__version__}, Python {platform.python_version()}"
    )
