"""What a run has done so far, in numbers that survive an interruption.

Kept as plain floats, which JSON returns to the last bit: a run that is taken up in the middle of a log interval writes
the record that an uninterrupted one would have written.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True)
class Account:
    """Steps, seconds and losses of a run."""

    steps: int
    """Of the whole run."""
    tokens_per_step: int
    """Training tokens of a step."""
    flops_per_token: float
    """Training operations of a token."""
    step: int = 0
    """Steps done."""
    seconds: float = 0.0
    """Spent in them, data included, evaluation and saving left out."""
    logged_step: int = 0
    """Where the last training record ends."""
    logged_seconds: float = 0.0
    """Seconds at that time."""
    logged_loss: float = 0.0
    """Sum of the losses since then."""
    half_step: int = 0
    """Last step of the first half, once it is done."""
    half_seconds: float = 0.0
    """Seconds at that time."""
    tail_loss: float = 0.0
    """Sum of the losses in the last tenth of the steps."""
    tail_steps: int = 0
    """How many these are."""

    def add(self, loss: float, seconds: float) -> None:
        """A step is done."""
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
        """What every record of the log begins with."""
        tokens = self.step * self.tokens_per_step
        return {"step": self.step, "tokens": tokens, "flops": self.flops_per_token * tokens, "seconds": self.seconds}

    def record(self, lr: float, grad_norm: float) -> dict[str, Any]:
        """A training record over the steps since the last one, which it closes."""
        steps, seconds = self.step - self.logged_step, self.seconds - self.logged_seconds
        made = {
            **self.position,
            "loss": self.logged_loss / steps,
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens_per_second": steps * self.tokens_per_step / seconds if seconds > 0 else 0.0,
        }
        self.logged_step, self.logged_seconds, self.logged_loss = self.step, self.seconds, 0.0
        return made

    @property
    def tokens_per_second(self) -> float:
        """Over the last half of the steps."""
        seconds = self.seconds - self.half_seconds
        return (self.step - self.half_step) * self.tokens_per_step / seconds if seconds > 0 else 0.0

    @property
    def train_loss(self) -> float | None:
        """Mean over the last tenth of the steps."""
        return self.tail_loss / self.tail_steps if self.tail_steps else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)
