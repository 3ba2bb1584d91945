"""Small runs, in this process or in a fork of it that can be killed."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from twoaxis.base.interrupt import Interrupted
from twoaxis.data.load import Data
from twoaxis.training.config import TrainConfig
from twoaxis.training.folder import load_log
from twoaxis.training.train import train

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
TIMES = ("seconds", "tokens_per_second")


def small(**changes: Any) -> TrainConfig:
    """A run of a second or less."""
    fields: dict[str, Any] = {
        "data": ("task:recall:pairs=3",),
        "model": SHAPE,
        "context": 24,
        "batch": 4,
        "steps": 12,
        "log_every": 5,
        "eval_every": 6,
        "eval_examples": 6,
        "final_examples": 6,
        "measure_memory": False,
        "save_model": False,
    }
    return TrainConfig(**fields | changes)


def stop_at(step: int) -> Callable[[int, float | None], None]:
    """An `on_step` that ends the run after a step, without a checkpoint."""

    def on_step(done: int, loss: float | None) -> None:
        if done == step:
            raise Broken

    return on_step


class Broken(Exception):
    """Ends a run from within."""


def numbers(folder: Path) -> list[dict[str, Any]]:
    """The log without what a clock says."""
    return [{k: v for k, v in record.items() if k not in TIMES} for record in load_log(folder)]


class Uneven(Data):
    """Random tokens of which each example labels another number."""

    name, fingerprint, vocab_size, context = "uneven", "uneven", 29, 16

    def train(self, seed: int, count: int) -> Dataset[dict[str, Tensor]]:
        return _Examples(seed, count)

    def held_out(self, count: int) -> Dataset[dict[str, Tensor]]:
        return _Examples(-1, count)


class _Examples(Dataset[dict[str, Tensor]]):
    def __init__(self, seed: int, count: int) -> None:
        self.seed, self.count = seed, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed((self.seed + 1) * 1_000_003 + index)
        tokens = torch.randint(0, Uneven.vocab_size, (Uneven.context,), generator=generator)
        labels = tokens.clone()
        labels[: 1 + (index * 5) % (Uneven.context - 2)] = -100
        return {"input_ids": tokens, "labels": labels}


class Fork:
    """A run in a process of its own, forked from this one, which has imported everything.

    Args:
        config: the run.
        folder: its place.
        before: called in the process first.
    """

    def __init__(self, config: TrainConfig, folder: Path, before: Callable[[], None] | None = None) -> None:
        self.output = folder.parent / f"{folder.name}.out"
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            with contextlib.suppress(BaseException), open(self.output, "ab") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                sys.stdout = sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), line_buffering=True)
                code = _child(config, folder, before)
            os._exit(code)

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def poll(self) -> int | None:
        """The exit code, the negative number of a signal, or None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def wait(self, seconds: float = 600.0) -> int | None:
        """The same after at most so many seconds."""
        end = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < end:
            time.sleep(0.002)
        return self.code

    def wait_for(self, condition: Callable[[], bool], seconds: float = 600.0) -> None:
        """Until something has happened, while it runs."""
        end = time.monotonic() + seconds
        while not condition():
            assert self.poll() is None, f"ended with {self.code}: {self.output.read_text()}"
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.002)

    @property
    def text(self) -> str:
        return self.output.read_text()


def free_port() -> str:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def processes(config: TrainConfig, folders: Sequence[Path], **last: Any) -> list[Fork]:
    """A run in as many processes as there are folders, as torchrun starts them; all folders are one, or should be.

    So are their configurations, of which the last one may have other fields.
    """
    common = {"WORLD_SIZE": len(folders), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}

    def environment(rank: int) -> Callable[[], None]:
        own = {name: str(value) for name, value in (common | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        return lambda: os.environ.update(own)

    configs = [config] * (len(folders) - 1) + [dataclasses.replace(config, **last)]
    return [Fork(configs[rank], folder, before=environment(rank)) for rank, folder in enumerate(folders)]


def _child(config: TrainConfig, folder: Path, before: Callable[[], None] | None) -> int:
    try:
        if before is not None:
            before()
        train(config, folder)
        return 0
    except Interrupted as stopped:
        print(stopped, file=sys.stderr)
        return 130
    except ValueError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
