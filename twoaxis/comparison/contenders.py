"""Contenders of a comparison: made from their spellings, checked, matched in parameters, and given their controls.

A control tells a method's idea apart from what comes along with it. Streams name their own (`Stream.controls`), and a
contender with clearly more parameters than the baseline is given a baseline with as many.

`wider` makes the MLPs of a contender wider, `deeper` adds blocks to it, until it has as nearly as possible as many
parameters as another contender. What that comes to depends on the size and the vocabulary, so it is found for each row
of a comparison and stored there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from twoaxis.base.registry import did_you_mean
from twoaxis.base.spec import spell
from twoaxis.model.variant import COMMON, Contender, make_contender

if TYPE_CHECKING:
    from twoaxis.model.config import ModelConfig
    from twoaxis.training.config import TrainConfig

MATCHED = {"wider": "intermediate_size", "deeper": "num_hidden_layers"}
"""Options that match parameters, and the field of the model each of them changes."""
PER_CONTENDER = (
    *("batch", "accumulate", "lr", "schedule", "warmup", "decay", "final_lr", "beta1", "beta2", "epsilon"),
    *("weight_decay", "clip", "init_seed", "dtype", "compile", "recompute", "budget"),
)
"""Fields of a run that one contender may have for itself; data and evaluation are the same for all."""
BUDGET = "budget"
"""One that is no field of a run: how many times the others' tokens, operations or time a contender gets."""
TIMED = ("batch", "accumulate", "dtype")
"""Those that it may not when throughput is measured, which is done with one batch for all."""
WORTH = 0.01
"""Part of the baseline's parameters that a method must add before `controls` gives the baseline as many."""
PLUS = " + "

Configure = Callable[[Contender, dict[str, Any]], "ModelConfig"]
"""The model of a contender with some fields replaced."""


def make_contenders(streams: Iterable[str], mixers: Iterable[str], *, grid: bool = False) -> tuple[Contender, ...]:
    """Contenders from their spellings.

    Args:
        streams: each on its own.
        mixers: each on the plain residual.
        grid: every stream (the plain residual if none is named) without a mixer and with each.
    """
    streams, mixers = list(streams), list(mixers)
    if grid:
        return tuple(make_contender(s, m) for s in streams or ["standard"] for m in (None, *mixers))
    return tuple(make_contender(s) for s in streams) + tuple(make_contender(None, m) for m in mixers)


def check_contenders(contenders: Sequence[Contender]) -> None:
    """Refuse contenders that are the same, that look the same, or that change what must be the same for all."""
    by_key: dict[str, Contender] = {}
    by_label: dict[str, Contender] = {}
    for contender in contenders:
        if contender.key in by_key:
            raise ValueError(
                f"the contenders {by_key[contender.key].label!r} and {contender.label!r} are the same; leave one out"
            )
        if contender.label in by_label:
            raise ValueError(
                f"two contenders are called {contender.label!r}; tell them apart with label=NAME in their options"
            )
        by_key[contender.key] = by_label[contender.label] = contender
        budget = contender.train.get(BUDGET, 1)
        if not isinstance(budget, int | float) or isinstance(budget, bool) or not 0 < budget < math.inf:
            raise ValueError(f"{contender.label!r}: train.{BUDGET} must be a positive number, got {budget!r}")
        for name in contender.train:
            if name not in PER_CONTENDER:
                raise ValueError(
                    f"{contender.label!r} changes train.{name}{did_you_mean(name, PER_CONTENDER)}; one contender may "
                    f"change {', '.join(PER_CONTENDER)}, the rest is the same for all"
                )


def without_matching(contender: Contender) -> Contender:
    """The contender without `wider` and `deeper`."""
    options = {name: value for name, value in contender.stream_options.items() if name not in MATCHED}
    return dataclasses.replace(contender, stream_options=options)


def target(contender: Contender) -> tuple[str, str] | None:
    """`wider` or `deeper` and whose parameters it shall have, if it has one of them."""
    given = [(name, contender.stream_options[name]) for name in MATCHED if name in contender.stream_options]
    if not given:
        return None
    if len(given) > 1:
        raise ValueError(f"{contender.label!r} is to be both wider and deeper; choose one")
    name, whose = given[0]
    if not isinstance(whose, str):
        raise ValueError(f"{contender.label!r}: {name} takes the label or the spelling of a contender, got {whose!r}")
    return name, whose


def spelled_out(contender: Contender) -> str:
    """A contender's model as `STREAM` or `STREAM + MIXER`; the inverse is `parse_spelled`."""
    model = {name if name in COMMON else f"model.{name}": value for name, value in contender.model.items()}
    stream = spell(contender.stream, contender.stream_options | model)
    return stream if contender.mixer is None else stream + PLUS + spell(contender.mixer, contender.mixer_options)


def parse_spelled(text: str) -> Contender:
    """A contender from `STREAM` or `STREAM + MIXER`."""
    stream, _, mixer = text.partition(PLUS)
    return make_contender(stream, mixer or None)


def freeze_references(contenders: Sequence[Contender]) -> tuple[Contender, ...]:
    """The same contenders, those that refer to another by its label with its spelling instead, which cannot change."""
    by_label = {contender.label: contender for contender in contenders}
    frozen = []
    for contender in contenders:
        found = target(contender)
        if found is not None:
            name, whose = found
            other = by_label.get(whose) or parse_spelled(whose)
            if target(other) is not None:
                raise ValueError(f"{contender.label!r} is matched with {whose!r}, which is itself matched with another")
            options = contender.stream_options | {name: spelled_out(other)}
            contender = dataclasses.replace(contender, stream_options=options)
        frozen.append(contender)
    return tuple(frozen)


def resolve(contender: Contender, configure: Configure) -> dict[str, Any]:
    """The field that `wider` or `deeper` comes to; nothing where a contender has neither.

    Args:
        contender: its reference frozen.
        configure: makes models of the size and vocabulary in question.
    """
    from twoaxis.model.flops import count_parameters

    found = target(contender)
    if found is None:
        return {}
    name, whose = found
    plain, field = without_matching(contender), MATCHED[found[0]]
    try:
        goal = count_parameters(configure(parse_spelled(whose), {})).total
        first = _present(configure(plain, {}), field)
        number = nearest(lambda n: count_parameters(configure(plain, {field: n})).total, goal, first)
    except ValueError as error:
        raise ValueError(f"{contender.label!r}, {name}={whose}: {error}") from error
    return {field: number}


def nearest(count: Callable[[int], int], goal: int, first: int) -> int:
    """The whole number from 1 on at which a growing function comes nearest to `goal`; the smaller of two as near.

    Args:
        count: the function.
        goal: the value it shall have.
        first: where to begin.
    """
    high = max(1, first)
    while count(high) < goal:
        high *= 2
    low = 1
    while low < high:  # the smallest number that reaches the goal, or 1
        middle = (low + high) // 2
        if count(middle) >= goal:
            high = middle
        else:
            low = middle + 1
    below = low - 1
    return below if below >= 1 and goal - count(below) <= count(low) - goal else low


def controls(contenders: Sequence[Contender], baseline: str, parameters: Callable[[Contender], int]) -> list[Contender]:
    """The controls that belong to contenders and are not among them.

    Args:
        contenders: all of them.
        baseline: label of the one that is not to be explained.
        parameters: counts a contender's.
    """
    first = next(contender for contender in contenders if contender.label == baseline)
    plain = parameters(first)
    known = {contender.key for contender in freeze_references(contenders)}
    explained = [contender for contender in contenders if contender is not first and target(contender) is None]
    ablations = {control.key for contender in explained for control in _ablations(contender)}
    made = []
    for contender in explained:
        if contender.key in ablations:
            continue  # a control has none of its own, so that the same command adds nothing the second time
        candidates = list(_ablations(contender))
        if parameters(contender) - plain >= WORTH * plain:
            options = first.stream_options | {"wider": spelled_out(contender)}
            label = f"{first.label}{',' if ':' in first.label else ':'}wider={contender.label}"
            candidates.append(dataclasses.replace(first, label=label, stream_options=options))
        for candidate in candidates:
            if candidate.key not in known:
                known.add(candidate.key)
                made.append(candidate)
    return made


def recipe_checks(baseline: Contender, recipe: TrainConfig, *, rates: bool) -> list[Contender]:
    """The baseline with half and twice the warm-up and, where one rate is given for all, half and twice that.

    Args:
        baseline: whose recipe is in question.
        recipe: what it trains with.
        rates: whether the rate is in question.
    """
    now = {"warmup": recipe.warmup_steps / recipe.total_steps} | ({"lr": recipe.lr} if rates else {})
    made = []
    for name, value in now.items():
        for factor, words in ((0.5, "half the"), (2.0, "twice the")):
            changed = min(1.0, factor * value) if name == "warmup" else factor * value
            if changed != value:
                what = {"warmup": "warm-up", "lr": "rate"}[name]
                label = f"{baseline.label}, {words} {what}"
                made.append(dataclasses.replace(baseline, label=label, train=baseline.train | {name: changed}))
    return made


def exchange_check(baseline: Contender) -> Contender:
    """The baseline with twice the budget: what a lower loss is worth in tokens."""
    train = baseline.train | {BUDGET: 2 * baseline.train.get(BUDGET, 1)}
    return dataclasses.replace(baseline, label=f"{baseline.label}, twice the tokens", train=train)


def _ablations(contender: Contender) -> Iterator[Contender]:
    """The contender with each change that its stream calls a control."""
    from twoaxis.depth.registry import STREAMS

    config = STREAMS.config(contender.stream, contender.stream_options)
    for changes in STREAMS.find(contender.stream).controls(config):
        changed = dataclasses.replace(contender, stream_options=contender.stream_options | changes)
        spelled = ", ".join(f"{name}={value}" for name, value in changes.items())
        plain = contender.label == spelled_out(contender)
        yield dataclasses.replace(changed, label=spelled_out(changed) if plain else f"{contender.label}, {spelled}")


def _present(config: ModelConfig, field: str) -> int:
    if field == "num_hidden_layers":
        return config.num_hidden_layers
    shape = dataclasses.replace(config, hidden_ramp=False)
    return shape.hidden_width(0)
