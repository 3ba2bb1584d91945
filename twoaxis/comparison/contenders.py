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
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from twoaxis.base.registry import did_you_mean, spell
from twoaxis.model.variant import COMMON, Contender, make_contender

if TYPE_CHECKING:
    from twoaxis.training.config import TrainConfig

MATCHED = {"wider": "intermediate_size", "deeper": "num_hidden_layers"}
"""Options that match parameters, and the field of the model each of them changes."""
PER_CONTENDER = (
    *("batch", "accumulate", "lr", "schedule", "warmup", "decay", "final_lr", "beta1", "beta2", "epsilon"),
    *("weight_decay", "clip", "init_seed", "dtype", "compile", "recompute", "budget", "train", "new_rate"),
)
"""Fields of a run that one contender may have for itself; data and evaluation are the same for all."""
BUDGET = "budget"
"""One that is no field of a run: how many times the others' tokens, operations or time a contender gets; 0 is none."""
TIMED = ("batch", "accumulate", "dtype")
"""Those that it may not when throughput is measured, which is done with one batch for all."""
WORTH = 0.01
"""Part of the baseline's parameters that a method must add before `controls` gives the baseline as many."""
PLUS = " + "

Configure = Callable[[Contender, dict[str, Any]], Any]
"""The configuration of a contender's model with some fields replaced."""
Parameters = Callable[[Contender], int]
"""Counts the parameters of a contender."""


def make_contenders(streams: Sequence[str], mixers: Sequence[str], *, grid: bool = False) -> tuple[Contender, ...]:
    """Contenders from their spellings: streams and, on the plain residual, mixers; of a `grid` every stream (the plain
    residual if none is named) without a mixer and with each."""
    if grid:
        return tuple(make_contender(s, m) for s in streams or ["standard"] for m in (None, *mixers))
    return tuple(make_contender(s) for s in streams) + tuple(make_contender(None, m) for m in mixers)


def check_contenders(contenders: Sequence[Contender]) -> None:
    """Refuse contenders that are the same, that look the same, or that change what must be the same for all."""
    keys: dict[str, str] = {}
    for contender in contenders:
        if contender.key in keys:
            raise ValueError(
                f"the contenders {keys[contender.key]!r} and {contender.label!r} are the same; leave one out"
            )
        if contender.label in keys.values():
            raise ValueError(
                f"two contenders are called {contender.label!r}; tell them apart with label=NAME in their options"
            )
        keys[contender.key] = contender.label
        budget = contender.train.get(BUDGET, 1)
        if not isinstance(budget, int | float) or isinstance(budget, bool) or not 0 <= budget < math.inf:
            raise ValueError(f"{contender.label!r}: train.{BUDGET} must be a number from 0 on, got {budget!r}")
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
    """The field that `wider` or `deeper`, its reference frozen, comes to; nothing where a contender has neither."""
    from twoaxis.model.flops import parameters

    found = target(contender)
    if found is None:
        return {}
    name, whose = found
    plain = without_matching(contender)
    try:
        goal, now = parameters(configure(parse_spelled(whose), {})), configure(plain, {})
        field, first = now.hidden_field() if name == "wider" else (MATCHED[name], now.num_hidden_layers)
        number = nearest(lambda n: parameters(configure(plain, {field: n})), goal, first)
    except ValueError as error:
        raise ValueError(f"{contender.label!r}, {name}={whose}: {error}") from error
    return {field: number}


def nearest(count: Callable[[int], int], goal: int, first: int) -> int:
    """The whole number from 1 on, looked for from `first`, at which a growing function comes nearest to `goal`; the
    smaller of two as near."""
    high = max(1, first)
    while (now := count(high)) < goal:
        high *= 2
        if count(high) <= now:
            raise ValueError(f"the number of parameters stays at {now}, and {goal} are wanted")
    low = 1 + bisect_left(range(1, high), goal, key=count)  # the smallest number that reaches the goal, or 1
    below = low - 1
    return below if below >= 1 and goal - count(below) <= count(low) - goal else low


def controls(contenders: Sequence[Contender], first: Contender, parameters: Parameters) -> list[Contender]:
    """The controls that belong to contenders and are not among them; `first` is the baseline, which needs none."""
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


def low_rank_control(contenders: Sequence[Contender], first: Contender, parameters: Parameters) -> list[Contender]:
    """The source with about as many low-rank parameters as the contender that adds the most; none if nothing is."""
    most = max(parameters(c) for c in contenders if "lora" not in c.model) - parameters(first)
    if most <= 0:
        return []
    each = parameters(dataclasses.replace(first, model=first.model | {"lora": 1})) - parameters(first)
    rank = max(1, round(most / each))
    return [dataclasses.replace(first, label=f"{first.label} + LoRA {rank}", model=first.model | {"lora": rank})]


def recipe_checks(baseline: Contender, recipe: TrainConfig, *, rates: bool) -> list[Contender]:
    """The baseline with half and twice the warm-up and, where one rate is given for all, half and twice that."""
    now = {"warmup": (recipe.warmup_steps / recipe.total_steps, "warm-up")} | (
        {"lr": (recipe.lr, "rate")} if rates else {}
    )
    made = []
    for name, (value, what) in now.items():
        for factor, words in ((0.5, "half the"), (2.0, "twice the")):
            changed = min(1.0, factor * value) if name == "warmup" else factor * value
            if changed != value:
                label, train = f"{baseline.label}, {words} {what}", baseline.train | {name: changed}
                made.append(dataclasses.replace(baseline, label=label, train=train))
    return made


def with_budget(contender: Contender, times: float, label: str) -> Contender:
    """The contender with so many times its budget."""
    train = contender.train | {BUDGET: times * contender.train.get(BUDGET, 1)}
    return dataclasses.replace(contender, label=label, train=train)


def _ablations(contender: Contender) -> Iterator[Contender]:
    """The contender with each change that its stream calls a control."""
    from twoaxis.depth.registry import STREAMS

    config = STREAMS.config(contender.stream, contender.stream_options)
    for changes in STREAMS.find(contender.stream).controls(config):
        changed = dataclasses.replace(contender, stream_options=contender.stream_options | changes)
        spelled = ", ".join(f"{name}={value}" for name, value in changes.items())
        plain = contender.label == spelled_out(contender)
        yield dataclasses.replace(changed, label=spelled_out(changed) if plain else f"{contender.label}, {spelled}")
