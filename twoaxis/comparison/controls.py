"""Controls: contenders that tell a method's idea apart from what comes along with it.

    contender                         control                        what it leaves
    deep_delta                        update=write                   the same state and gates, nothing is erased
    deep_delta, value_channels > 1    update=add                     the expanded state without the delta rule
    hyper_connections                 frozen=both                    several streams whose mixing does not learn
    anything with more parameters     standard:wider=CONTENDER       the parameters without the method

`wider` makes the MLPs of a contender wider, `deeper` adds blocks to it, until it has as nearly as possible as many
parameters as another contender. What that comes to depends on the size and the vocabulary, so it is found for each row
of a comparison and stored there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from twoaxis.base.spec import spell
from twoaxis.model.variant import COMMON, Contender, make_contender

if TYPE_CHECKING:
    from twoaxis.model.hf_config import TwoAxisConfig

MATCHED = {"wider": "intermediate_size", "deeper": "num_hidden_layers"}
"""Options that match parameters, and the field of the model each of them changes."""
WORTH = 0.01
"""Part of the baseline's parameters that a method must add before `controls` gives the baseline as many."""
PLUS = " + "

Configure = Callable[[Contender, dict[str, Any]], "TwoAxisConfig"]
"""The model of a contender with some fields replaced."""


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


def pin(contenders: Sequence[Contender]) -> tuple[Contender, ...]:
    """The same contenders, those that refer to another by its label with its spelling instead, which cannot change."""
    by_label = {contender.label: contender for contender in contenders}
    pinned = []
    for contender in contenders:
        found = target(contender)
        if found is not None:
            name, whose = found
            other = by_label.get(whose) or parse_spelled(whose)
            if target(other) is not None:
                raise ValueError(f"{contender.label!r} is matched with {whose!r}, which is itself matched with another")
            options = contender.stream_options | {name: spelled_out(other)}
            contender = dataclasses.replace(contender, stream_options=options)
        pinned.append(contender)
    return tuple(pinned)


def resolve(contender: Contender, configure: Configure) -> dict[str, Any]:
    """The field that `wider` or `deeper` comes to; nothing where a contender has neither.

    Args:
        contender: pinned.
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
    known = {contender.key for contender in pin(contenders)}
    made = []
    for contender in contenders:
        if contender is first or target(contender) is not None:
            continue
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


def _ablations(contender: Contender) -> Iterator[Contender]:
    options = contender.stream_options
    if contender.stream == "deep_delta" and options.get("update", "delta") == "delta":
        yield _changed(contender, "update", "write")
        if options.get("value_channels", 1) > 1:
            yield _changed(contender, "update", "add")
    if contender.stream == "hyper_connections" and options.get("frozen", "none") == "none":
        yield _changed(contender, "frozen", "both")


def _changed(contender: Contender, name: str, value: str) -> Contender:
    changed = dataclasses.replace(contender, stream_options=contender.stream_options | {name: value})
    plain = contender.label == spelled_out(contender)
    return dataclasses.replace(changed, label=spelled_out(changed) if plain else f"{contender.label}, {name}={value}")


def _present(config: TwoAxisConfig, field: str) -> int:
    if field == "num_hidden_layers":
        return config.num_hidden_layers
    shape = dataclasses.replace(config.decoder_config(), hidden_ramp=False)
    return shape.hidden_width(0)
