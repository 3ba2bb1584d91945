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

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
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
    resolved: dict[str, Any]  # what `wider` or `deeper` came to
    share: float  # of the others' budget
    parameters: int  # numbers learned
    flops: int  # training operations per token
    uncounted: tuple[str, ...] = ()  # modules whose operations are counted for their matrices alone

    @property
    def step_flops(self) -> int:
        """Training operations of an optimiser step."""
        return self.flops * self.config.tokens_per_step


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
    places = [(sources, size) for sources in plan.data for size in plan.sizes]
    tables = (_table(plan, *place, vocabularies[data_label(place[0])], old, measure) for place in places)
    return tuple(row for table in tables for row in table)


def _table(
    plan: Plan, sources: Sequence[str], size: Size, vocabulary: int, old: Sequence[Row], measure: Measure | None
) -> list[Row]:
    """The rows of one data set at one size."""
    data = data_label(sources)
    known = {row.contender: row for row in old if (row.data, row.size) == (data, size.label)}
    missing = [c for c in plan.contenders if c.key not in known]
    if missing:
        first = next(c for c in plan.contenders if c.label == plan.baseline)
        counted = {c.key: count_contender(plan, c, size, sources, vocabulary) for c in (first, *missing)}
        speeds = _speeds(plan, vocabulary, counted, known.get(first.key), measure)
        steps = _steps(plan, size, counted, speeds)
        for contender in missing:
            found, made = counted[contender.key], steps[contender.key]
            known[contender.key] = Row(
                data=data,
                size=size.label,
                contender=contender.key,
                steps=made,
                tokens=made * found.config.tokens_per_step,
                parameters=found.parameters,
                flops_per_token=found.flops,
                uncounted=found.uncounted,
                model=found.resolved,
                **speeds.get(contender.key, {}),
            )
    return [with_rate(plan, known[contender.key]) for contender in plan.contenders]


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
        return Counted(made, resolved, contender.train.get(BUDGET, 1), *_count(made, vocabulary))
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


@contextlib.contextmanager
def threads_of(config: TrainConfig) -> Iterator[None]:
    """Context manager in which torch has as many threads as a run of the comparison."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(config.threads or 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_speeds(
    configs: Mapping[str, TrainConfig], vocabulary: int, *, rounds: int = 15, steps: int = 1
) -> dict[str, Throughput]:
    """Tokens per second of training steps as the runs make them, by name, in so many rounds of all in turns.

    The configurations have one batch, context and precision.
    """
    import torch

    from twoaxis.base.machine import pick_device
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

    with threads_of(first):
        return throughputs(
            {name: lambda config=config: build(config) for name, config in configs.items()},
            first.batch,
            first.context,
            rounds=rounds,
            steps=steps,
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
    large = plan.base.source or 16 * sum(found.parameters for found in counted.values()) > TOGETHER
    if measure is None or (large and plan.match != "time"):
        return {}
    same = {name: getattr(plan.base, name) for name in TIMED}
    models = {key: _decides(found.config, vocabulary) for key, found in counted.items()}
    first = {model: key for key, model in reversed(models.items())}
    configs = {key: dataclasses.replace(counted[key].config, **same) for key in models if key in first.values()}
    rounds = measure(configs, vocabulary)
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
    asked = plan.base
    if size.steps is not None or size.tokens is not None:
        asked = dataclasses.replace(asked, steps=size.steps, tokens=size.tokens)
    tokens = asked.total_steps * asked.tokens_per_step
    if plan.match == "flops":
        return flops_steps(plan, size, tokens, counted)
    parts = dict.fromkeys(counted, 1.0)
    if plan.match == "time":
        base = speeds[plan.baseline_key]["tokens_per_second"]
        for key, speed in speeds.items():  # chance is to decide no budget
            ratio = speed["tokens_per_second"] / base
            parts[key] = 1.0 if abs(ratio - 1) < speed["speed_spread"] else ratio
    steps = {key: found.share * parts[key] * tokens / found.config.tokens_per_step for key, found in counted.items()}
    whole = round if plan.match == "time" else math.ceil
    return {key: max(int(counted[key].share > 0), whole(count)) for key, count in steps.items()}


def flops_steps(plan: Plan, size: Size, tokens: int, counted: Mapping[str, Counted]) -> dict[str, int]:
    """Steps with which each contender takes the FLOPs that the baseline takes for so many tokens, within 1%."""
    for key, found in counted.items():
        if found.uncounted:
            raise ValueError(
                f"{plan.contender(key).label} at size {size.label}: there is no rule for the operations of "
                f"{', '.join(found.uncounted)}, so budgets cannot be matched by FLOPs; give --match tokens or time"
            )
    base = counted[plan.baseline_key]
    budget = plan.flops if plan.flops is not None else -(-tokens // base.config.tokens_per_step) * base.step_flops
    steps = {}
    for key, found in counted.items():
        if not found.share:
            steps[key] = 0
            continue
        cost = found.step_flops / found.share
        steps[key] = max(1, round(budget / cost))
        if not fits(steps[key], cost, budget):
            costs = [other.step_flops / other.share for other in counted.values() if other.share]
            least = smallest(base.step_flops, costs)
            remedy = f"--tokens {least * base.config.tokens_per_step:,} ({least:,} steps of the baseline)"
            if plan.flops is not None:
                remedy = f"--flops {float(least * base.step_flops):.6g}"
            raise ValueError(
                f"{plan.contender(key).label} at size {size.label} cannot match the budget of {budget:.4g} FLOPs: its "
                f"steps take {cost:.4g}, and {steps[key]:,} of them are "
                f"{abs(steps[key] * cost / budget - 1):.1%} off, more than {TOLERANCE:.0%}; the smallest budget that "
                f"works for all is {remedy}"
            )
    return steps


def fits(steps: int, cost: float, budget: float) -> bool:
    """Whether so many steps come near enough to a budget."""
    return abs(steps * cost - budget) <= TOLERANCE * budget


def smallest(base: int, costs: Sequence[float]) -> int:
    """The fewest steps of the baseline, of `base` FLOPs each, that all contenders can match; theirs cost `costs`."""
    return next(n for n in count(1) if all(fits(max(1, round(n * base / cost)), cost, n * base) for cost in costs))
