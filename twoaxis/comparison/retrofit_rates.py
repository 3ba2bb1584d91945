"""How fast what a retrofit adds may learn: found on training text, once for each contender of a source.

Methods differ a thousandfold in the rate they bear: a number that every site shares acts in thirty sums at once, a
number of one channel in one. Two questions decide, both asked of training text that no compared run begins with.

1. Adam's first step moves every number by its rate, whatever the gradient. The largest rate of a grid of half decades
   at which one such step, along the gradient of one batch, does not raise the loss of another by more than 0.02 nats a
   token is where the search begins.
2. What one step bears, many may not. So the run is tried for a few steps, with its own schedule, at this rate and then
   at smaller ones for as long as they leave other text with a loss that is clearly lower, by more than a standard error
   over its examples: chance alone shall not slow a method down.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from twoaxis.base.machine import reproducible
from twoaxis.comparison.plan import Plan, Run
from twoaxis.comparison.runner.launchers import default_jobs
from twoaxis.comparison.runner.worker import in_children

if TYPE_CHECKING:
    import torch

    from twoaxis.data.load import Data
    from twoaxis.training.config import TrainConfig

HARM = 0.02
"""Nats per token by which one step may raise the loss of text that it has not seen."""
GRID = tuple(10 ** (power / 2) for power in range(-10, -1))
"""Rates that are tried, the smallest first: 1e-5 to 0.1."""
STEPS, ROWS = 8, 12
"""How many steps a rate is tried for, and the examples of other text that it is judged by."""
SEED = 999_983
"""Of the training text that they are tried on."""

Loss = Callable[[int, int], "torch.Tensor"]
"""The loss of so many training examples from a number on."""


def with_new_rates(plan: Plan, jobs: int | None = None) -> Plan:
    """The plan of a comparison of retrofits with the rate of every contender that adds parameters and has none.

    Args:
        plan: the comparison.
        jobs: contenders that are looked at at once, each in a process of its own; None is as many as run at once here.
    """
    from twoaxis.pretrained.model_for_training import hold, release

    if plan.base.source is None:
        return plan
    places, devices = default_jobs(plan.base.device)
    runs: dict[Path, TrainConfig] = {}
    for row in plan.rows:
        contender = plan.contender(row.contender)
        if row.new_rate is None and row.steps and "new_rate" not in contender.train:
            rate = contender.train.get("lr", min(plan.lrs))
            config = plan.config(Run(row, contender.label, rate, SEED, False))
            runs[row.folder] = dataclasses.replace(config, device=devices[len(runs) % len(devices)])
    try:
        with reproducible(plan.base.threads or 1):
            hold(plan.base.source)  # its weights are read once for all of them
            searches = {folder: partial(_search, run) for folder, run in runs.items()}
            answers = in_children(searches.values(), min(jobs or places, places))
            # What fails in a child is done here once more, where the error shows.
            found = {folder: (answer or searches[folder]())[0] for folder, answer in zip(runs, answers, strict=True)}
    finally:
        release()
    return dataclasses.replace(
        plan,
        rows=tuple(
            row
            if (rate := found.get(row.folder)) is None
            else dataclasses.replace(row, new_rate=rate / runs[row.folder].lr)
            for row in plan.rows
        ),
    )


def _search(run: TrainConfig) -> tuple[float | None]:
    """The rate of a run, in brackets: None is what a process says that has failed."""
    from twoaxis.data.load import load_data
    from twoaxis.training.setup import resolve

    return (find_rate(run, load_data(resolve(run))),)


def find_rate(run: TrainConfig, data: Data) -> float | None:
    """The rate for what the model of a run has beyond its source; None where that is nothing that learns.

    Args:
        run: begins from a source.
        data: its training text.
    """

    from twoaxis.base.machine import pick_device
    from twoaxis.model.loss import labelled, logits_of, summed_loss
    from twoaxis.pretrained.record import new_parameters
    from twoaxis.training.engines.engine import autocast, load_batch
    from twoaxis.training.setup import make_model

    device = pick_device(run.device)
    model: Any = make_model(run, data.vocab_size)
    new = [name for name in new_parameters(model) if model.get_parameter(name).requires_grad]
    if not new:
        return None
    model.to(device)
    examples = data.train(SEED, (STEPS + 1) * run.batch + ROWS)

    def loss(first: int, count: int) -> torch.Tensor:
        batch = load_batch(examples, range(first, first + count), device)
        with autocast(run, device):
            inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
            logits = logits_of(model(**inputs, use_cache=False))
        return summed_loss(logits, batch["labels"]) / labelled(batch["labels"])

    most = _largest_harmless(run, model, new, loss)
    return _best_below(run, model, most, loss)


def _largest_harmless(run: TrainConfig, model: Any, new: list[str], loss: Loss) -> float:
    """The largest rate at which one step of what is new does little harm; the model is as before."""
    import torch

    from twoaxis.model.groups import param_groups

    loss(0, run.batch).backward()
    groups = [(p, group["lr"]) for group in param_groups(model, lr=1.0) for p in group["params"]]
    ours = {id(model.get_parameter(name)) for name in new}
    steps = [(p, p.detach().clone(), lr * p.grad.sign()) for p, lr in groups if p.grad is not None and id(p) in ours]
    best = GRID[0]
    with torch.no_grad():
        allowed = loss(run.batch, run.batch) + HARM
        for rate in GRID:
            for parameter, start, step in steps:
                parameter.copy_(start - rate * step)
            if not loss(run.batch, run.batch) <= allowed:  # not a number among it
                break
            best = rate
        for parameter, start, _ in steps:
            parameter.copy_(start)
    model.zero_grad(set_to_none=True)
    return best


def _best_below(run: TrainConfig, model: Any, most: float, loss: Loss) -> float:
    """Of a rate and smaller ones, as long as each is clearly better than the last, the one that ends it."""
    import torch

    from twoaxis.training.setup import make_optimizer

    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    starts = [parameter.detach().clone() for parameter in learning]
    short = dataclasses.replace(run, steps=STEPS, tokens=None)

    def tried(rate: float) -> np.ndarray:
        """Losses of other examples after a short run at this rate."""
        with torch.no_grad():
            for parameter, start in zip(learning, starts, strict=True):
                parameter.copy_(start)
        optimizer = make_optimizer(dataclasses.replace(short, new_rate=rate / run.lr), model)
        for step in range(1, STEPS + 1):
            loss((step - 1) * run.batch, run.batch).backward()
            if run.clip:
                torch.nn.utils.clip_grad_norm_(learning, run.clip)
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * short.rate(step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            return np.array([loss((STEPS + 1) * run.batch + row, 1).item() for row in range(ROWS)])

    best, losses = most, tried(most)
    for rate in reversed(GRID[: GRID.index(most)]):
        gain = losses - (now := tried(rate))
        if not np.isnan(gain).any() and gain.mean() <= gain.std(ddof=1) / math.sqrt(ROWS):
            break
        best, losses = rate, now
    return best
