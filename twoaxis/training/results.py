"""What a run leaves behind, as files that can be reloaded.

RUN/run.json        resolved configuration, versions, hardware, data, parameters, FLOPs per token
RUN/log.jsonl       a record per logged step and per evaluation
RUN/checkpoints/    while it trains
RUN/model/          the final model, as save_pretrained writes it
RUN/result.json     written last: a run with one is finished and never done again
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from twoaxis.base.files import JsonLines, read_json, write_json

RUN, LOG, RESULT, CHECKPOINTS, MODEL = "run.json", "log.jsonl", "result.json", "checkpoints", "model"


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of a finished run."""

    status: Literal["finished", "diverged"]
    """Whether it came to its end, or its loss stopped being a number."""
    steps: int
    """Optimiser steps made."""
    tokens: int
    """Training tokens seen."""
    flops: float
    """Training operations, by the convention of `twoaxis.model.flops`."""
    seconds: float
    """Spent in training steps, evaluation and saving left out, summed over interruptions."""
    tokens_per_second: float
    """Over the last half of the steps."""
    parameters: int
    """Numbers learned."""
    peak_memory: int | None
    """Bytes at the peak of a training step, where it was measured."""
    loss: float | None
    """Held-out nats per token at the end; None if it diverged."""
    bits_per_byte: float | None
    """The same per byte of text, where tokens stand for text."""
    accuracy: float | None
    """Part of the held-out answers that are right, for diagnostic tasks."""
    chance: float | None
    """What guessing would score."""
    train_loss: float | None
    """Mean training loss over the last tenth of the steps."""
    weights: str | None
    """SHA-256 of the final weights."""
    message: str = ""
    """What went wrong, if something did."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Result:
        """The inverse of `to_dict`."""
        return Result(**values)


def save_result(folder: str | Path, result: Result) -> None:
    """Mark a run as finished."""
    write_json(Path(folder) / RESULT, result.to_dict())


def load_result(folder: str | Path) -> Result | None:
    """The outcome of a run, or None where it is not finished."""
    path = Path(folder) / RESULT
    return Result.from_dict(read_json(path)) if path.exists() else None


def load_log(folder: str | Path) -> list[dict[str, Any]]:
    """The log of a run.

    Training records have step, tokens, flops, seconds, loss, lr, grad_norm, tokens_per_second; records of an evaluation
    have step, tokens, flops, seconds, held_out_loss and, for diagnostic tasks, accuracy.
    """
    return JsonLines(Path(folder) / LOG).read()
