"""How long each contender trains: the rows of a comparison.

    match     the same for all contenders of a table        steps of a contender
    tokens    training tokens                               tokens / its tokens per step, rounded up
    flops     training operations, within 1%                budget / its operations per step, rounded
    time      seconds on this machine                       the baseline's tokens x its relative throughput, where that
                                                            is off one by more than it varied

The budget is what the baseline takes for the tokens or steps that were asked for, or the FLOPs that were given.
Throughput is measured once, contenders in turns, whatever is matched; it is stored in the row with what follows from
it, so that a comparison that is resumed goes on exactly as it began. Every contender's learning-rate schedule
spans its own steps.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from twoaxis.base.files import short_hash
from twoaxis.base.timer import Throughput
from twoaxis.comparison.contenders import BUDGET, TIMED, resolve, target
from twoaxis.comparison.options import Size
from twoaxis.comparison.plan import Plan, Row, contender_config, data_label
from twoaxis.model.variant import Contender
from twoaxis.training.config import TrainConfig

TOLERANCE = 0.01
"""Part of the budget by which whole steps may miss it."""

TOGETHER = 2e9
"""Bytes of models and optimisers that are put into memory together to measure throughput where it decides nothing."""

Measure = Callable[[Mapping[str, TrainConfig], int], Mapping[str, Throughput]]
"""Tokens per second of training for configurations by name and a vocabulary, measured in turns."""


class Counted(NamedTuple):
    """A contender at a size and on a data set, as far as it can be counted."""

    config: TrainConfig  # its runs', with the base's budget
    share: float  # of the others' budget
    row: Row  # without a budget

    @property
    def step_flops(self) -> int:
        """Training operations of an optimiser step."""
        return self.row.flops_per_token * self.config.tokens_per_step


def make_rows(
    plan: Plan, vocabularies: Mapping[str, int], old: Sequence[Row] = (), *, measure: Measure | None = None
) -> tuple[Row, ...]:
    """The rows of a plan.

    Args:
        plan: the comparison.
        vocabularies: tokens of each data set, by its label.
        old: rows that were decided before, which stay as they are.
        measure: throughput; None does without, where it decides nothing.
    """
    rows: list[Row] = []
    baseline = next(contender for contender in plan.contenders if contender.label == plan.baseline)
    for sources, size in itertools.product(plan.data, plan.sizes):
        data = data_label(sources)
        known = {row.contender: row for row in old if (row.data, row.size) == (data, size.label)}
        if missing := [contender for contender in plan.contenders if contender.key not in known]:
            words = vocabularies[data]
            counted = {c.key: count_contender(plan, c, size, sources, words) for c in (baseline, *missing)}
            speeds = _speeds(plan, words, counted, known.get(baseline.key), measure)
            for key, steps in _steps(plan, size, counted, speeds).items():
                config, _, row = counted[key]
                tokens = steps * config.tokens_per_step
                known.setdefault(key, dataclasses.replace(row, steps=steps, tokens=tokens, **speeds.get(key, {})))
        rows += [with_rate(plan, known[contender.key]) for contender in plan.contenders]
    return tuple(rows)


def with_rate(plan: Plan, row: Row) -> Row:
    """The row with its learning rate where none has to be chosen, or none where another choice has come up."""
    own = plan.contender(row.contender).train.get("lr")
    if own is not None or len(plan.lrs) == 1 or not row.steps:
        return dataclasses.replace(row, lr=plan.lrs[0] if own is None else float(own))
    if set(row.lr_losses) == {repr(rate) for rate in plan.lrs}:
        return row
    return dataclasses.replace(row, lr=None, lr_losses={}, lr_edge=False)


def count_contender(plan: Plan, contender: Contender, size: Size, sources: Sequence[str], vocabulary: int) -> Counted:
    """Parameters and FLOPs of a contender; a method or option that does not exist is an error that names it."""
    from twoaxis.training.setup import model_config

    def config(other: Contender, resolved: dict[str, Any]) -> TrainConfig:
        return contender_config(plan.base, other, size, sources, resolved)

    if plan.base.source is not None and target(contender) is not None:
        raise ValueError(f"{contender.label}: wider and deeper are for models from scratch; model.lora=RANK adds here")
    try:
        resolved = resolve(contender, lambda other, fields: model_config(config(other, fields), vocabulary))
        made = config(contender, resolved)
        parameters, flops, uncounted = _count(made, vocabulary)
        place = {"data": data_label(sources), "size": size.label, "contender": contender.key, "model": resolved}
        counts = {"parameters": parameters, "flops_per_token": flops, "uncounted": uncounted}
        return Counted(made, contender.train.get(BUDGET, 1), Row(steps=0, tokens=0, **place, **counts))
    except ValueError as error:
        raise ValueError(f"{contender.label} at size {size.label}: {error}") from error


_COUNTS: dict[str, tuple[int, int, tuple[str, ...]]] = {}
"""What `count` gives, by what decides them: contenders that differ in their training have one model."""


def _decides(config: TrainConfig, vocabulary: int) -> str:
    """Stands for the model of a run."""
    names = ("preset", "family", "stream", "mixer", "model", "source", "train", "context", "recompute", "compile")
    return short_hash([*(getattr(config, name) for name in names), vocabulary])


def _count(config: TrainConfig, vocabulary: int) -> tuple[int, int, tuple[str, ...]]:
    from twoaxis.model.flops import count
    from twoaxis.training.setup import make_model, model_config

    key = _decides(config, vocabulary)
    if key not in _COUNTS and config.source is not None:
        model: Any = make_model(config, vocabulary)
        learned = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        _COUNTS[key] = (learned, *count(model, config.context, recompute=config.recompute)[1:])
    if key not in _COUNTS:
        _COUNTS[key] = count(model_config(config, vocabulary), config.context, recompute=config.recompute)
    return _COUNTS[key]


def measure_speeds(
    configs: Mapping[str, TrainConfig], vocabulary: int, *, rounds: int = 15, steps: int = 1, within: float = 5.0
) -> dict[str, Throughput]:
    """Tokens per second of training steps as the runs make them, by name, in so many rounds of all in turns.

    There are up to four times as many rounds within so many seconds of each. The configurations have one batch,
    context and precision.
    """
    import torch

    from twoaxis.base.machine import pick_device, reproducible
    from twoaxis.model.loss import next_token_loss
    from twoaxis.training.engines.engine import autocast
    from twoaxis.training.measure import throughputs
    from twoaxis.training.setup import make_model, make_optimizer

    first = next(iter(configs.values()))
    device = pick_device(first.device)

    def build(config: TrainConfig) -> Any:
        model: Any = make_model(config, vocabulary)
        model.to(device)
        if config.compiles:
            model.compile()
        return model

    def loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        with autocast(first, device):
            return next_token_loss(model, tokens)

    with reproducible(first.threads or 1):
        return throughputs(
            {name: lambda config=config: build(config) for name, config in configs.items()},
            first.batch,
            first.context,
            rounds=rounds,
            steps=steps,
            within=within,
            accumulate=first.accumulate,
            loss=loss,
            optimizer=lambda model: make_optimizer(first, model),  # its rates and decay take no time
            fixed=not first.compiles,  # another shape would be compiled anew
        )


def _speeds(
    plan: Plan, vocabulary: int, counted: Mapping[str, Counted], before: Row | None, measure: Measure | None
) -> dict[str, dict[str, Any]]:
    """What a row says of the throughput of each contender, in units of the baseline's the first time; none where it is
    not measured. Contenders that differ in their training alone are measured once, and all with one batch."""
    large = plan.base.source or 16 * sum(found.row.parameters for found in counted.values()) > TOGETHER
    if measure is None or (large and plan.match != "time"):
        return {}
    same = {name: getattr(plan.base, name) for name in TIMED}
    models = {key: _decides(found.config, vocabulary) for key, found in counted.items()}
    first = {model: key for key, model in reversed(models.items())}
    configs = {key: dataclasses.replace(counted[key].config, **same) for key in models if key in first.values()}
    # In this process, where an error shows, what could not be measured elsewhere and decides a budget.
    rounds = measure(configs, vocabulary) or (measure_speeds(configs, vocabulary) if plan.match == "time" else {})
    if not rounds:
        return {}
    base = rounds[first[models[plan.baseline_key]]].rate
    unit = 1.0 if before is None or before.tokens_per_second is None else before.tokens_per_second / base.median
    speeds = {}
    for key, model in models.items():
        found = rounds[first[model]]
        ratio = found.rate.over(base)
        speeds[key] = {
            "tokens_per_second": unit * base.median * ratio.median,
            "speed_spread": ratio.spread / ratio.median,  # as a part of the ratio
            "fixed_share": found.fixed,
        }
    return speeds


def _steps(
    plan: Plan, size: Size, counted: Mapping[str, Counted], speeds: Mapping[str, Mapping[str, Any]]
) -> dict[str, int]:
    """Steps of each contender for the tokens that were asked for at a size, in whole steps of the base."""
    asked, whole = plan.base, math.ceil
    if size.steps is not None or size.tokens is not None:
        asked = dataclasses.replace(asked, steps=size.steps, tokens=size.tokens)
    tokens = asked.total_steps * asked.tokens_per_step
    steps = {key: found.share * tokens / found.config.tokens_per_step for key, found in counted.items()}
    if plan.match == "time":
        whole, base = round, speeds[plan.baseline_key]["tokens_per_second"]
        for key, speed in speeds.items():
            ratio = speed["tokens_per_second"] / base
            steps[key] *= 1.0 if abs(ratio - 1) < speed["speed_spread"] else ratio  # chance is to decide no budget
    if plan.match == "flops":
        whole, base = round, counted[plan.baseline_key]
        budget = plan.flops or -(-tokens // base.config.tokens_per_step) * base.step_flops
        steps = {key: found.share * budget / found.step_flops for key, found in counted.items()}
        _check_flops(plan, size, budget, counted)
    return {key: max(int(counted[key].share > 0), whole(count)) for key, count in steps.items()}


def _check_flops(plan: Plan, size: Size, budget: float, counted: Mapping[str, Counted]) -> None:
    """Refuse a budget that whole steps of a contender miss by more than 1%, with the smallest one that works."""
    base = counted[plan.baseline_key]
    costs = {key: found.step_flops / found.share for key, found in counted.items() if found.share}
    for key, found in counted.items():
        name = f"{plan.contender(key).label} at size {size.label}"
        if found.row.uncounted:
            raise ValueError(
                f"{name}: there is no rule for the operations of {', '.join(found.row.uncounted)}, so budgets cannot "
                "be matched by FLOPs; give --match tokens or time"
            )
        if key in costs and not fits(costs[key], budget):
            least = smallest(base.step_flops, list(costs.values()))
            remedy = f"--tokens {least * base.config.tokens_per_step:,} ({least:,} steps of the baseline)"
            if plan.flops is not None:
                remedy = f"--flops {float(least * base.step_flops):.6g}"
            steps = max(1, round(budget / costs[key]))
            raise ValueError(
                f"{name} cannot match the budget of {budget:.4g} FLOPs: its steps take {costs[key]:.4g}, and {steps:,} "
                f"of them are {abs(steps * costs[key] / budget - 1):.1%} off, more than {TOLERANCE:.0%}; the smallest "
                f"budget that works for all is {remedy}"
            )


def fits(cost: float, budget: float) -> bool:
    """Whether whole steps of a cost come near enough to a budget."""
    return abs(max(1, round(budget / cost)) * cost - budget) <= TOLERANCE * budget


def smallest(base: int, costs: Sequence[float]) -> int:
    """The fewest steps of the baseline, of `base` FLOPs each, that all contenders can match; theirs cost `costs`."""
    return next(n for n in itertools.count(1) if all(fits(cost, n * base) for cost in costs))
