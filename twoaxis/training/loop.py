"""The training loop: everything that happens in a step, top to bottom.

    examples ─► micro-batches ─► gradients ─► clip ─► agree ─► optimizer.step ─► count ─► log, evaluate, save

A step depends on the weights, the optimiser's moments and its own number. Examples and learning rate are functions of
that number, so a run that is resumed from a checkpoint repeats the same bits. How many processes there are is the
engine's business; the loss is in `twoaxis.model.loss`.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from twoaxis.base.interrupt import StopSignal
from twoaxis.training.checkpoint import save_checkpoint, wait_for_checkpoint
from twoaxis.training.config import TrainConfig
from twoaxis.training.engines.engine import Engine
from twoaxis.training.folder import Logger, RunFolder

OnStep = Callable[[int, "float | None"], None]
"""Called with the step and its loss after every step, and once before the first with the step and None."""


class Diverged(Exception):
    """The loss or its gradient stopped being a number."""


GIVEN = {"given": True}
"""Marks a field that follows from the run's configuration and is not saved."""


@dataclass(kw_only=True)
class Counters:
    """Steps, seconds and losses of a run.

    They are plain numbers, which JSON returns to the last bit: a run that is resumed in the middle of a log interval
    writes the record that an uninterrupted one would have written.
    """

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


@dataclass(kw_only=True)
class Job:
    """A run, ready to train."""

    run: TrainConfig  # its configuration
    folder: RunFolder  # its files
    engine: Engine  # the model on its devices
    optimizer: torch.optim.Optimizer  # AdamW; each group has its `peak_lr`
    examples: Any  # training examples by number, in the order they are used
    held_out: Any  # examples of an evaluation
    final: Any  # examples of the last one
    answers: bool  # whether the accuracy of an evaluation means something
    counters: Counters  # steps, seconds and losses so far; saved with every checkpoint
    stop: StopSignal  # set by a signal
    loggers: Sequence[Logger] = ()  # where records go; none in processes other than the first
    on_step: OnStep = lambda step, loss: None  # called after every step
    evaluated: dict[str, Any] | None = None  # record of the last evaluation
    row_losses: tuple[float | None, ...] = ()  # loss of each held-out example at the last evaluation
    saving: Future[Any] | None = None  # the checkpoint that a thread is writing


def fit(job: Job) -> bool:
    """Train from where the run stands to its end; False if it was asked to stop before. Raises `Diverged`."""
    run, engine, counters, optimizer = job.run, job.engine, job.counters, job.optimizer
    eval_every = run.eval_every or max(1, run.total_steps // 10)
    engine.start(job.examples)
    saved = time.perf_counter()
    (stop,) = engine.mean(job.stop.requested)
    job.on_step(counters.step, None)
    while counters.step < run.total_steps and not stop:
        step, started = counters.step + 1, time.perf_counter()
        last = step == run.total_steps

        # Gradients of the mean loss over all labelled tokens of the step.
        batches = engine.micro_batches(job.examples, step)
        losses = engine.gradients(batches, engine.labelled(batches))
        norm = engine.clip(run.clip)

        # One exchange for all that the processes must agree on, before the weights change: a save or a stop that only
        # one of them knows of would leave the others waiting for it.
        late = time.perf_counter() - saved >= run.save_seconds
        own = 0.0 if losses.auxiliary is None else losses.auxiliary
        loss, own, norm, late, stop = engine.mean(losses.tokens, own, norm, late, job.stop.requested)
        _check_finite(loss, f"the loss of step {step}")
        _check_finite(norm, f"the gradient's norm of step {step}")

        factor = run.rate(step)  # a function of the step: there is no scheduler whose state must be restored
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        counters.add_step(loss, time.perf_counter() - started)
        job.on_step(step, loss)

        if last or step % run.log_every == 0:
            record = counters.training_record(run.lr * factor, norm)
            _log(job, record if losses.auxiliary is None else record | {"auxiliary_loss": own})
        if last or step % eval_every == 0:
            job.evaluated = counters.position | evaluate(job, job.final if last else job.held_out)
            _log(job, job.evaluated)
        regular = run.save_every is not None and step % run.save_every == 0
        if regular or ((late or stop) and not last):
            save_checkpoint(job)
            saved = time.perf_counter()
    wait_for_checkpoint(job)
    return counters.step == run.total_steps


def evaluate(job: Job, examples: Any) -> dict[str, float]:
    """Held-out nats per labelled token, and accuracy where there are answers; the training does not notice."""
    nats, right, tokens, job.row_losses = job.engine.score(examples)
    if not tokens:
        raise ValueError("no token of the held-out examples is labelled; there is nothing to evaluate")
    _check_finite(nats / tokens, f"the held-out loss after step {job.counters.step}")
    return {"held_out_loss": nats / tokens} | ({"accuracy": right / tokens} if job.answers else {})


def _log(job: Job, record: dict[str, Any]) -> None:
    for logger in job.loggers:
        logger.log(record)


def _check_finite(number: float, what: str) -> None:
    if not math.isfinite(number):
        raise Diverged(f"{what} is {number}")
