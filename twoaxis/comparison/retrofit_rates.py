"""How fast what a retrofit adds may learn: found on training text, once for each contender of a source.

Methods differ a thousandfold in the rate they bear: a number that every site shares acts in thirty sums at once, a
number of one channel in one. Adam's first step moves every number by its rate, whatever the gradient. So the rate is
the largest of a grid of half decades at which one such step, along the gradient of one batch, does not raise the loss
of another by more than 0.02 nats per token. Both batches are of training text that no compared run begins with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from twoaxis.base.machine import reproducible
from twoaxis.comparison.plan import Plan, Run

if TYPE_CHECKING:
    from twoaxis.data.load import Data
    from twoaxis.training.config import TrainConfig

HARM = 0.02
"""Nats per token by which one step may raise the loss of text that it has not seen."""
GRID = tuple(10 ** (power / 2) for power in range(-10, -1))
"""Rates that are tried, the smallest first: 1e-5 to 0.1."""
SEED = 999_983
"""Of the training text that they are tried on."""


def with_new_rates(plan: Plan, data: Mapping[str, Data]) -> Plan:
    """The plan of a comparison of retrofits with the rate of every contender that adds parameters and has none."""
    if plan.base.source is None:
        return plan
    rows = []
    for row in plan.rows:
        contender = plan.contender(row.contender)
        if row.new_rate is None and row.steps and "new_rate" not in contender.train:
            rate = contender.train.get("lr", min(plan.lrs))
            config = plan.config(Run(row, contender.label, rate, SEED, False))
            with reproducible(config.threads or 1):
                found = find_rate(config, data[row.data])
            row = row if found is None else dataclasses.replace(row, new_rate=found / rate)
        rows.append(row)
    return dataclasses.replace(plan, rows=tuple(rows))


def find_rate(run: TrainConfig, data: Data) -> float | None:
    """The rate for what the model of a run has beyond its source; None where that is nothing that learns.

    Args:
        run: begins from a source.
        data: its training text.
    """
    import torch

    from twoaxis.base.machine import pick_device
    from twoaxis.model.groups import param_groups
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
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in new)
    examples = data.train(SEED, 2 * run.batch)
    first, second = (load_batch(examples, range(n * run.batch, (n + 1) * run.batch), device) for n in range(2))

    def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with autocast(run, device):
            inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
            logits = logits_of(model(**inputs, use_cache=False))
        return summed_loss(logits, batch["labels"]) / labelled(batch["labels"])

    loss(first).backward()
    groups = [(p, group["lr"]) for group in param_groups(model, lr=1.0) for p in group["params"]]
    steps = [(p, p.detach().clone(), lr * p.grad.sign()) for p, lr in groups if p.grad is not None]
    best = GRID[0]
    with torch.no_grad():
        allowed = loss(second) + HARM
        for rate in GRID:
            for parameter, start, step in steps:
                parameter.copy_(start - rate * step)
            if not loss(second) <= allowed:  # not a number among it
                break
            best = rate
    return best
