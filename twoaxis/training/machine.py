"""The process a run is in: its threads, determinism, generators and noise, and how many others it works with."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def world() -> int:
    """Processes of the run, as torchrun tells them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Which of them this is; the first one writes."""
    return int(os.environ.get("RANK", "0")) if world() > 1 else 0


def warn(message: str) -> None:
    """A line on stderr, once for all processes."""
    if rank() == 0:
        print(f"twoaxis: {message}", file=sys.stderr, flush=True)


def training_device(name: str | None) -> torch.device:
    """The device a run trains on; None is a GPU where there is one."""
    from twoaxis.base.machine import pick_device

    device = pick_device(name)
    if device.type == "cuda" and name is not None and ":" in name and device.index != 0:
        raise ValueError(f"device is {name}; to train on that GPU set CUDA_VISIBLE_DEVICES={device.index}, device cuda")
    return device


@contextlib.contextmanager
def prepared(threads: int | None) -> Iterator[None]:
    """The process as a run needs it, and afterwards as it was.

    torch may use deterministic algorithms only, where that costs nothing: on a CPU.

    Args:
        threads: of torch; None leaves them.
    """
    import torch
    import torch.utils.deterministic
    from transformers.utils import logging

    from twoaxis.model.load import quiet
    from twoaxis.training.checkpoint import own_random

    count, level, bars = torch.get_num_threads(), logging.get_verbosity(), logging.is_progress_bar_enabled()
    strict, lenient = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    quiet()
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        if not torch.cuda.is_available():
            torch.use_deterministic_algorithms(True)
            memory.fill_uninitialized_memory = False  # filling takes time and helps finding faults only
        with own_random():
            yield
    finally:
        torch.set_num_threads(count)
        torch.use_deterministic_algorithms(strict, warn_only=lenient)
        memory.fill_uninitialized_memory = filled
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
