"""Counters of a run: steps, seconds and losses so far.

They are plain floats, which JSON returns to the last bit: a run that is resumed in the middle of a log interval writes
the record that an uninterrupted one would have written.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

GIVEN = {"given": True}
"""Marks a field that follows from the run's configuration and is not saved."""


@dataclass(kw_only=True)
class Counters:
    """Steps, seconds and losses of a run."""

    steps: int = field(metadata=GIVEN)  # steps of the whole run
    tokens_per_step: int = field(metadata=GIVEN)  # training tokens of a step
    flops_per_token: float = field(metadata=GIVEN)  # training operations of a token
    step: int = 0  # steps done
    seconds: float = 0.0  # seconds spent in them, data included, evaluation and saving left out
    logged_step: int = 0  # last step of the last training record
    logged_seconds: float = 0.0  # seconds at that step
    logged_loss: float = 0.0  # sum of the losses since that step
    half_step: int = 0  # last step of the first half, once it is done
    half_seconds: float = 0.0  # seconds at that step
    tail_loss: float = 0.0  # sum of the losses in the last tenth of the steps
    tail_steps: int = 0  # number of steps in that sum

    def add_step(self, loss: float, seconds: float) -> None:
        """Count a step."""
        self.step += 1
        self.seconds += seconds
        self.logged_loss += loss
        if self.step <= self.steps // 2:
            self.half_step, self.half_seconds = self.step, self.seconds
        if self.step > self.steps - max(1, self.steps // 10):
            self.tail_loss += loss
            self.tail_steps += 1

    @property
    def position(self) -> dict[str, Any]:
        """The fields that every record of the log begins with."""
        tokens = self.step * self.tokens_per_step
        return {"step": self.step, "tokens": tokens, "flops": self.flops_per_token * tokens, "seconds": self.seconds}

    def training_record(self, lr: float, grad_norm: float) -> dict[str, Any]:
        """A record over the steps since the last one; the next record begins after it."""
        steps, seconds = self.step - self.logged_step, self.seconds - self.logged_seconds
        record = self.position | {
            "loss": self.logged_loss / steps,
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens_per_second": steps * self.tokens_per_step / seconds if seconds > 0 else 0.0,
        }
        self.logged_step, self.logged_seconds, self.logged_loss = self.step, self.seconds, 0.0
        return record

    @property
    def tokens_per_second(self) -> float:
        """Speed over the last half of the steps."""
        seconds = self.seconds - self.half_seconds
        return (self.step - self.half_step) * self.tokens_per_step / seconds if seconds > 0 else 0.0

    @property
    def train_loss(self) -> float | None:
        """Mean over the last tenth of the steps; None before they begin."""
        return self.tail_loss / self.tail_steps if self.tail_steps else None

    def to_dict(self) -> dict[str, Any]:
        """What was counted, for JSON."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if not f.metadata}

    def restore(self, counted: dict[str, Any]) -> None:
        """Go back to what `to_dict` gave."""
        for name, value in counted.items():
            setattr(self, name, value)
