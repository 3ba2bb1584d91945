"""Choosing each contender's learning rate.

One shared rate favours the method it was tuned for. So each row tries every rate on seeds of their own, takes the one
with the smallest mean held-out loss, and only then runs on the seeds it is judged by. A rate is a function of results:
whoever reads a folder comes to the same one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from twoaxis.comparison.plan import Plan, Run
from twoaxis.comparison.statistics import mean_of_all
from twoaxis.training.results import Result


class Choice(NamedTuple):
    """A chosen rate.

    Attributes:
        lr: the rate.
        losses: mean held-out loss by rate; None where a run diverged.
        edge: whether it is the smallest or the largest, so that a better one may lie beyond.
    """

    lr: float
    losses: dict[float, float | None]
    edge: bool


def choose(losses: dict[float, list[float | None]]) -> Choice:
    """The rate with the smallest mean loss; of equal ones, and where all diverged, the smallest.

    Args:
        losses: of each rate's runs; None is a run that diverged.
    """
    means = {rate: mean_of_all(found) for rate, found in losses.items()}
    best = min(means, key=lambda rate: (means[rate] is None, means[rate] or 0.0, rate))
    return Choice(best, means, len(means) > 1 and best in (min(means), max(means)))


def choose_rates(plan: Plan, result: Callable[[Run], Result | None]) -> Plan:
    """The plan with the rate of every row whose choosing runs are all there.

    Args:
        plan: rows without a rate are looked at.
        result: of a run; None where it is not finished.
    """
    found: dict[Path, list[tuple[float, Result | None]]] = {}
    for run in plan.choosing_runs():
        if run.row.lr is None:
            found.setdefault(run.row.folder, []).append((run.lr, result(run)))
    rows = []
    for row in plan.rows:
        mine = found.get(row.folder, [])
        ended = [(rate, each.loss) for rate, each in mine if each is not None]
        if row.lr is None and len(ended) == len(mine):
            choice = choose({rate: [loss for other, loss in ended if other == rate] for rate in plan.lrs})
            by_name = {repr(rate): loss for rate, loss in choice.losses.items()}
            row = dataclasses.replace(row, lr=choice.lr, lr_losses=by_name, lr_edge=choice.edge)
        rows.append(row)
    return plan if tuple(rows) == plan.rows else dataclasses.replace(plan, rows=tuple(rows))
