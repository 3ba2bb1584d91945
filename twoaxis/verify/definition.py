"""A method equals its definition: the fast form against the paper written with plain lists of tensors.

    ours   = module(x)              reads, writes, kernels and their backward passes
    theirs = module.definition(x)   the equations, differentiated by autograd

Values are compared, and the gradients of a random cotangent in the input and in every parameter. Parameters are moved
far off their initial values first, because a gate of zero hides whatever stands behind it. A method without a
definition is still held to finite differences, which need none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from twoaxis.depth.registry import STREAMS, stream_names
from twoaxis.depth.stream import Stream
from twoaxis.sequence.mixer import LocalOperator
from twoaxis.sequence.registry import MIXERS, mixer_names
from twoaxis.verify.case import LAYOUTS, Case, MixerCase
from twoaxis.verify.certificate import Certificate, deviation, gradient_deviation, gradients, random_tensors
from twoaxis.verify.report import Outcome

WIDTH, TIME = 8, 5
PERTURB = 0.3
BOUND = 1e-10
DIFFERENCES_BOUND = 1e-6
NONE_GIVEN = "none given"
"""What the row of a method without a definition says."""


def given(subject: type[Stream] | LocalOperator) -> bool:
    """Whether a stream's class or an operator has a definition."""
    if isinstance(subject, LocalOperator):
        return type(subject).definition is not LocalOperator.definition
    return subject.definition is not Stream.definition


def disagreement(ours: Tensor, theirs: Tensor, leaves: list[Tensor], seed: int) -> float:
    """Largest deviation of values and of the gradients in every leaf, for one random cotangent."""
    (probe,) = random_tensors(3000 + seed, tuple(ours.shape))
    return max(deviation(ours, theirs), gradient_deviation(ours, theirs, leaves, probe, floor=1e-4))


def stream_disagreement(case: Case, layout: str | Sequence[Sequence[str]]) -> float:
    """How far a stream with toy sub-layers is from its definition with the same ones."""
    run = case.run(case.stream(layout, width=WIDTH, perturb=PERTURB))
    x = case.embedding(width=WIDTH, time=TIME, grad=True)
    return disagreement(run(x), run.stream.definition(x, run.sublayer), [x, *run.parameters()], case.seed)


def stream_equals_definition(case: Case) -> Outcome | str:
    """The stream equals its definition in every layout: values, and the gradients of input and parameters."""
    if not given(STREAMS.find(case.name)):
        return NONE_GIVEN
    layout, worst = _worst({layout: stream_disagreement(case, layout) for layout in LAYOUTS})
    return Outcome(worst, BOUND, f"worst with {layout} sub-layers")


def mixer_equals_definition(case: MixerCase) -> Outcome | str:
    """Every operator of the mixer equals its definition: values, and the gradients of input and parameters."""
    operators = dict(case.operators(perturb=PERTURB))
    if not all(given(operator) for operator in operators.values()):
        return NONE_GIVEN
    found = {}
    for point, operator in operators.items():
        x = case.tensor(point).requires_grad_()
        found[point] = disagreement(operator(x), operator.definition(x), [x, *operator.parameters()], case.seed)
    point, worst = _worst(found)
    return Outcome(worst, BOUND, f"worst at the point {point}")


def _worst(found: dict[str, float]) -> tuple[str, float]:
    return max(found.items(), key=lambda pair: pair[1])


def finite_differences(call: Callable[[], Tensor], leaves: list[Tensor], seed: int, step: float = 1e-6) -> float:
    """Largest deviation of <gradient, d> from a central difference along d, for two draws of unit directions d.

    It is relative to what <gradient, d> is on average over directions.
    """
    worst, starts = 0.0, [leaf.detach().clone() for leaf in leaves]
    for draw in range(2):
        out = call()
        shapes = [tuple(tensor.shape) for tensor in (out, *leaves)]
        probe, *directions = random_tensors(4000 + 10 * seed + draw, *shapes)
        directions = [direction / direction.norm() for direction in directions]
        grads, ends = gradients(out, leaves, probe), {}
        with torch.no_grad():
            for sign in (1, -1, 0):  # the last one puts every leaf back
                for leaf, start, direction in zip(leaves, starts, directions, strict=True):
                    leaf.copy_(start + sign * step * direction)
                ends[sign] = (call() * probe).sum().item() if sign else 0.0
        expected = (ends[1] - ends[-1]) / (2 * step)
        measured = sum((grad * direction).sum().item() for grad, direction in zip(grads, directions, strict=True))
        size = sum(grad.square().mean().item() for grad in grads) ** 0.5
        worst = max(worst, abs(measured - expected) / size if size else abs(expected))
    return worst


def stream_finite_differences(case: Case) -> Outcome:
    """Gradients of input and parameters are the slopes of the output, whatever the backward pass is written by."""
    run = case.run(case.stream("uneven", width=WIDTH, perturb=PERTURB))
    x = case.embedding(width=WIDTH, time=TIME, grad=True)
    leaves = [x, *(p for p in run.parameters() if p.numel())]
    return Outcome(finite_differences(lambda: run(x), leaves, case.seed), DIFFERENCES_BOUND)


def mixer_finite_differences(case: MixerCase) -> Outcome:
    """Gradients of input and parameters are the slopes of the output of every operator."""
    worst = 0.0
    for point, operator in case.operators(perturb=PERTURB):
        x = case.tensor(point).requires_grad_()
        leaves = [x, *operator.parameters()]
        worst = max(worst, finite_differences(lambda op=operator, x=x: op(x), leaves, case.seed))
    return Outcome(worst, DIFFERENCES_BOUND)


def definitions(seed: int) -> Iterator[Certificate]:
    """One certificate per stream and mixer that gives a definition, over its variants and layouts or points."""
    statement = "{} = its definition (values, every gradient)"
    for name in stream_names():
        cls = STREAMS.find(name)
        cases = [Case(name, options, seed, number) for number, options in enumerate(cls.variants)]
        if given(cls):
            worst = [stream_disagreement(case, layout) for case in cases for layout in LAYOUTS]
            yield Certificate("definition", statement.format(name), max(worst), BOUND, len(worst))
    for name in mixer_names():
        cases = [MixerCase(name, options, seed) for options in MIXERS.find(name).variants]
        outcomes = [mixer_equals_definition(case) for case in cases]
        worst = [outcome.measured for outcome in outcomes if isinstance(outcome, Outcome)]
        if worst:
            yield Certificate("definition", statement.format(name), max(worst), BOUND, len(worst))
