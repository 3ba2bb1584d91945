"""The training loop: everything that happens in a step, top to bottom.

    examples ─► micro-batches ─► gradients ─► clip ─► agree ─► optimizer.step ─► count ─► log, evaluate, save

A step depends on the weights, the optimiser's moments and its own number. Examples and learning rate are functions of
that number, so a run that is resumed from a checkpoint repeats the same bits. How many processes there are is the
engine's business; the loss is in `twoaxis.model.loss`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from twoaxis.base.interrupt import StopSignal
from twoaxis.training.checkpoint import save_checkpoint, wait_for_checkpoint
from twoaxis.training.config import TrainConfig
from twoaxis.training.engines.engine import Engine
from twoaxis.training.folder import RunFolder
from twoaxis.training.log import Counters, Logger

OnStep = Callable[[int, "float | None"], None]
"""Called with the step and its loss after every step, and once before the first with the step and None."""


class Diverged(Exception):
    """The loss or its gradient stopped being a number."""


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
