"""What a comparison decides by its own results: each contender's learning rate, and how many seeds it takes.

Both are functions of results: whoever reads a folder comes to the same ones, and nothing of it has to be agreed upon.

Rates. One shared rate favours the method it was tuned for. So each row tries every rate on seeds and held-out rows of
their own and only then runs on those it is judged by. It gets the baseline's rate unless another is clearly better for
it, by more than a standard error: otherwise chance alone gives equal contenders different rates, and the worse of two
rates is a true difference that no number of judging seeds explains away.

Seeds. With --until resolved a row gets as many as its looks ask for, see `twoaxis.comparison.statistics`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from twoaxis.comparison.plan import Plan, Run
from twoaxis.comparison.statistics import Sample, judge, mean_of_all
from twoaxis.training.result import Result


class Choice(NamedTuple):
    """A chosen rate."""

    lr: float  # the rate
    losses: dict[float, float | None]  # mean held-out loss by rate; None where a run diverged
    edge: bool  # whether it is the smallest or the largest, so that a better one may lie beyond


def choose(losses: Mapping[float, list[float | None]], like: float | None = None) -> Choice:
    """The rate with the smallest mean loss, or `like`, the baseline's, if that is not clearly better.

    Of equal ones, and where all diverged, it is the smallest. A loss of None is a run that diverged.
    """
    means = {rate: mean_of_all(found) for rate, found in losses.items()}
    best = min(means, key=lambda rate: (means[rate] is None, means[rate] or 0.0, rate))
    whole = [rate for rate in sorted(means) if means[rate] is not None]
    if like in whole:
        values = np.array([losses[rate] for rate in whole], dtype=float)
        best = whole[int(settle(values, np.array(whole.index(like))))]
    return Choice(best, means, len(means) > 1 and best in (min(means), max(means)))


def settle(losses: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Number of the best rate where it is clearly better than number `like`, which it is otherwise.

    Args:
        losses: (..., rates, seeds).
        like: (...) numbers of rates.
    """
    best, rates, seeds = losses.mean(-1).argmin(-1), *losses.shape[-2:]
    like = np.broadcast_to(like, best.shape)
    gain = np.take_along_axis(losses.mean(-1), like[..., None], -1)[..., 0] - losses.mean(-1).min(-1)
    # What neither the rate nor the seed explains is the noise of a run; a mean of differences has twice its variance.
    rest = losses - losses.mean(-1, keepdims=True)
    rest = rest - rest.mean(-2, keepdims=True)
    variance = (rest**2).sum((-1, -2)) / max(1, (rates - 1) * (seeds - 1))
    return np.where(gain > np.sqrt(2 * variance / seeds), best, like)


def choose_rates(plan: Plan, result: Callable[[Run], Result | None]) -> Plan:
    """The plan with the rate of every row that has none, whose choosing runs have all a result, and the baseline's."""
    found: dict[Path, list[tuple[float, Result | None]]] = {}
    for run in plan.choosing_runs():
        if run.row.lr is None:
            found.setdefault(run.row.folder, []).append((run.lr, result(run)))
    rows = {row.folder: row for row in plan.rows}
    for row in sorted(plan.rows, key=lambda row: row.contender != plan.baseline_key):
        mine = found.get(row.folder, [])
        ended = [(rate, each.loss) for rate, each in mine if each is not None]
        like = rows[plan.row(row.data, row.size, plan.baseline_key).folder].lr
        if row.lr is not None or len(ended) < len(mine) or (like is None and row.contender != plan.baseline_key):
            continue
        choice = choose({rate: [loss for other, loss in ended if other == rate] for rate in plan.lrs}, like)
        by_name = {repr(rate): loss for rate, loss in choice.losses.items()}
        rows[row.folder] = dataclasses.replace(row, lr=choice.lr, lr_losses=by_name, lr_edge=choice.edge)
    chosen = tuple(rows.values())
    return plan if chosen == plan.rows else dataclasses.replace(plan, rows=chosen)


def loss_sample(results: Mapping[int, Result]) -> Sample:
    """Final losses by seed, None where a run diverged, and those of its held-out rows."""
    losses = {seed: None if result.status == "diverged" else result.loss for seed, result in results.items()}
    return Sample(losses, {seed: result.row_losses for seed, result in results.items() if result.row_losses})


def seeds_wanted(plan: Plan, result: Callable[[Run], Result | None]) -> dict[Path, int]:
    """How many of the planned seeds each row is to run, by its folder; a run has a result when it has ended."""
    wanted = dict.fromkeys((row.folder for row in plan.rows), plan.looks[0].seeds if plan.until else len(plan.seeds))
    if not plan.until:
        return wanted
    tables: dict[tuple[str, str], dict[str, dict[int, Result]]] = {}
    for run in plan.runs():
        samples = tables.setdefault((run.row.data, run.row.size), {}).setdefault(run.row.contender, {})
        if (found := result(run)) is not None:
            samples[run.seed] = found
    for (data, size), samples in tables.items():
        base = loss_sample(samples.pop(plan.baseline_key, {}))
        others = {row.contender: loss_sample(samples.get(row.contender, {})) for row in plan.judged(data, size)}
        found = judge(base, others, seeds=plan.seeds, looks=plan.looks)
        for row in plan.rows:
            if (row.data, row.size) == (data, size):
                most = max((difference.wanted for difference in found.values()), default=plan.looks[0].seeds)
                wanted[row.folder] = found[row.contender].wanted if row.contender in found else most
    return wanted
