"""Every stream and mixer equals its definition, and a definition uses nothing of what it is compared with."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest

from tests.verify.streams import Gain
from twoaxis.base.options import field_types
from twoaxis.depth.registry import STREAMS, stream_names
from twoaxis.depth.stream import Stream
from twoaxis.sequence.registry import MIXERS, mixer_names
from twoaxis.show import terminal
from twoaxis.verify import check
from twoaxis.verify.claim import disagreement
from twoaxis.verify.definition import BOUND, PERTURB, from_definition, given, watching
from twoaxis.verify.subject import LAYOUTS, MixerSubject, StreamSubject, Subject

MIXERS_ANYWHERE = (("mixer", "mixer", "attention", "mlp"), ("attention", "mixer", "mlp"), ("mixer",) * 3)
"""Beside the layouts of the kit: several mixers ahead, one inside a block, a block of nothing else."""

NUMBERS = (None, True, False, 0, 1, 2, 3, 4, 20, 0.05, 0.3, 1.7)


def choices(hint: Any) -> list[Any]:
    """What the literals in an annotation allow."""
    return [c for part in get_args(hint) for c in ([part] if get_origin(hint) is Literal else choices(part))]


def accepts(config: type[Any], options: dict[str, Any]) -> bool:
    """Whether options are of the right types and go together."""
    try:
        config(**options)
    except ValueError:
        return False
    return True


def drawn(config: type[Any], draw: random.Random) -> dict[str, Any]:
    """About half of a method's options, each with another value than its default."""
    found: dict[str, Any] = {}
    for name, hint in field_types(config).items():
        others = [value for value in (*NUMBERS, *choices(hint)) if value != getattr(config, name)]
        fitting = [value for value in others if accepts(config, found | {name: value})]
        if fitting and draw.random() < 0.5:
            found[name] = draw.choice(fitting)
    return found


def at_random(subject: type[Subject], name: str, count: int) -> Iterator[tuple[Subject, random.Random]]:
    """A method with random options that go together."""
    draw = random.Random(name)
    while count:
        one = subject(name, drawn(subject.registry.find(name).Config, draw), draw.randrange(1000))
        with contextlib.suppress(ValueError):  # refused, mostly for what does not divide the width
            next(one.runs(width=8))
            yield one, draw
            count -= 1


@pytest.mark.parametrize("count", [20, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", stream_names())
def test_a_stream_equals_its_definition(name: str, count: int) -> None:
    """With any options in any layout; the variants in the usual ones are measured with the claims."""
    for subject, draw in at_random(StreamSubject, name, count):
        assert isinstance(subject, StreamSubject)
        run = subject.run(draw.choice([*LAYOUTS.values(), MIXERS_ANYWHERE]), perturb=PERTURB, width=8)
        assert from_definition(run) <= BOUND, (subject, run.where)


@pytest.mark.parametrize("count", [20, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", mixer_names())
def test_an_operator_equals_its_definition(name: str, count: int) -> None:
    for subject, _ in at_random(MixerSubject, name, count):
        for run in subject.runs(perturb=PERTURB):
            for time in (1, 2, 24, 60):  # a short window over many tokens is computed in a band
                x = run.input(time=time, grad=True)
                error = disagreement(run(x), run.definition(x), run.leaves(x), 1)
                assert error <= BOUND, (subject, run.where, time)


@pytest.mark.parametrize("name", stream_names())
def test_the_fast_form_does_not_run_with_the_definition_s_means(name: str) -> None:
    run = next(StreamSubject(name, STREAMS.find(name).variants[0]).runs())
    with watching(STREAMS.find(name)) as used:
        run(run.input())
    assert {"_open", "_read", "_write"} <= used.keys()


def test_every_method_of_the_library_gives_a_definition() -> None:
    classes = [STREAMS.find(name) for name in stream_names()] + [MIXERS.find(name) for name in mixer_names()]
    assert [cls.name for cls in classes if not given(cls)] == []


class Undefined(Gain):
    definition = Stream.definition


def test_a_method_without_a_definition_is_said_to_have_none() -> None:
    report = check(Undefined, only=["definition", "gradients: finite differences"])
    assert report.ok
    assert [result.instances for result in report.results] == [0, 0, 2]
    assert "none given" in terminal.render(report.document())
    run = StreamSubject("standard").run()
    with pytest.raises(NotImplementedError, match="Undefined does not give its definition"):
        Undefined(Undefined.Config(), run.method.layout).definition(run.input(), run.act)
