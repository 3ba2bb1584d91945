"""Check a mixer: everything the library's own local mixers must pass, on anybody's.

Each operator is checked at every point of a block where the mixer acts, alone and inside small decoders.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from twoaxis.ring import Ring
from twoaxis.sequence.mixer import POINTS, LocalOperator
from twoaxis.sequence.registry import MIXERS, mixer
from twoaxis.verify.case import BATCH, CHANNELS, LONG_TIME, WIDTH, MixerCase, registered
from twoaxis.verify.certificate import deviation
from twoaxis.verify.definition import mixer_equals_definition, mixer_finite_differences
from twoaxis.verify.gradients import dead_rows, row_faults, row_gradients
from twoaxis.verify.properties import causality_deviation, chunking_deviation, label, random_split
from twoaxis.verify.report import Outcome, Report
from twoaxis.verify.stream import chosen, run_check
from twoaxis.verify.values import DTYPE_BOUND
from twoaxis.window import document_reach, padding_reach

TIME = LONG_TIME
BOUND = 1e-12


def declarations(case: MixerCase) -> Outcome:
    """Name, options and points are what the contract asks for; a point where the mixer does not act is refused."""
    cls, faults = MIXERS.find(case.name), []
    if not isinstance(getattr(cls, "name", None), str):
        faults.append("the class has no `name`")
    config = getattr(cls, "Config", None)
    if not dataclasses.is_dataclass(config) or not config.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        faults.append("`Config` is not a frozen dataclass")
    made = mixer(case.name, **case.options)
    if not made.points or not set(made.points) <= set(POINTS):
        faults.append(f"it acts at {made.points}, the points are {', '.join(POINTS)}")
    for point in set(POINTS) - set(made.points):
        try:
            made.build(point, WIDTH, CHANNELS[point])
            faults.append(f"it does not act at {point!r} but builds an operator for it")
        except ValueError:
            pass
    for point, operator in case.operators():
        try:
            operator(case.tensor(point)[..., :-1])
            faults.append(f"{point}: an input of another width raises no ValueError")
        except ValueError:
            pass
    return Outcome(len(faults), detail="; ".join(faults[:3]))


@torch.no_grad()
def shapes(case: MixerCase) -> Outcome:
    """The output has the shape of the input, and `forward` is a step from the start."""
    worst = 0.0
    for point, operator in case.operators():
        x = case.tensor(point)
        worst = max(worst, deviation(operator(x), operator.step(x, operator.start())[0]))
        worst = worst if operator(x).shape == x.shape else float("inf")
    return Outcome(worst, BOUND)


@torch.no_grad()
def causal(case: MixerCase) -> Outcome:
    """A changed token changes nothing before it, and does change its own output."""
    worst = 0.0
    for point, operator in case.operators():
        x = case.tensor(point)
        before = operator(x)
        for position in (1, 7, TIME - 1):
            changed = x.clone()
            changed[:, position] += 1.0
            after = operator(changed)
            worst = max(worst, deviation(after[:, :position], before[:, :position]))
            if torch.equal(after[:, position], before[:, position]):
                return Outcome(float("inf"), 1e-13, f"{point}: the output does not depend on its own token")
    worst = max(worst, *(causality_deviation(config, case.seed) for config in case.decoders()))
    return Outcome(worst, 1e-13)


def _in_chunks(operator: LocalOperator, x: Tensor, cuts: Sequence[int], spare: int = 0) -> tuple[Tensor, Ring]:
    ring, rows = operator.start(spare), []
    for chunk in x.split(list(cuts), dim=1):
        y, ring = operator.step(chunk, ring)
        rows.append(y)
    return torch.cat(rows, dim=1), ring


@torch.no_grad()
def chunks(case: MixerCase) -> Outcome:
    """A sequence in chunks of any size equals one pass, alone and in decoders."""
    worst = 0.0
    for point, operator in case.operators():
        x = case.tensor(point)
        whole = operator(x)
        for cuts in ((1,) * TIME, (2, 1, 5, TIME - 8), (TIME - 3, 1, 2), random_split(case.seed, TIME)):
            worst = max(worst, deviation(_in_chunks(operator, x, cuts)[0], whole))
    configs = case.decoders() if case.first else case.decoders()[:1]
    return Outcome(max(worst, *(chunking_deviation(config, case.seed) for config in configs)), BOUND)


@torch.no_grad()
def documents(case: MixerCase) -> Outcome:
    """Packed documents equal separate ones, in one pass and in chunks."""
    worst, lengths = 0.0, [9, 1, 8, 6]
    marks = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).expand(BATCH, -1)
    reach = document_reach(marks)
    for point, operator in case.operators():
        x = case.tensor(point)
        apart = torch.cat([operator(part) for part in x.split(lengths, dim=1)], dim=1)
        worst = max(worst, deviation(operator(x, reach=reach), apart))
        ring, rows = operator.start(), []
        for part, limit in zip(x.split(5, dim=1), reach.split(5, dim=1), strict=True):
            y, ring = operator.step(part, ring, reach=limit)
            rows.append(y)
        worst = max(worst, deviation(torch.cat(rows, dim=1), apart))
    return Outcome(worst, BOUND)


@torch.no_grad()
def padding(case: MixerCase) -> Outcome:
    """Left padding changes nothing of the tokens behind it."""
    worst = 0.0
    for point, operator in case.operators():
        x, mask = case.tensor(point), torch.ones(BATCH, TIME, dtype=torch.long)
        mask[0, :5] = 0
        padded = operator(x, reach=padding_reach(mask))
        worst = max(worst, deviation(padded[0, 5:], operator(x[:1, 5:])[0]), deviation(padded[1], operator(x[1:])[0]))
    return Outcome(worst, BOUND)


@torch.no_grad()
def trims(case: MixerCase) -> Outcome:
    """Up to `spare` tokens can be taken back: what follows is as if they had never been there."""
    worst, faults = 0.0, []
    for point, operator in case.operators():
        x, other = case.tensor(point), case.tensor(point, offset=1)
        for drafts in (1, 3):
            _, ring = _in_chunks(operator, torch.cat([x[:, :15], other[:, :drafts]], dim=1), (10, 5, drafts), spare=3)
            y, _ = operator.step(x[:, 15:], ring.trim(drafts))
            worst = max(worst, deviation(y, operator(x)[:, 15:]))
        _, ring = _in_chunks(operator, x, (10, TIME - 10))
        if ring.window is not None and 1 < ring.window <= TIME:
            try:
                ring.trim(1)
                faults.append(f"{point}: a ring without spare positions lets itself be trimmed")
            except ValueError:
                pass
    return Outcome(float("inf") if faults else worst, BOUND, "; ".join(faults))


@torch.no_grad()
def batches(case: MixerCase) -> Outcome:
    """Rows of the memory in another order, selected or repeated, continue as those rows would."""
    worst = 0.0
    for point, operator in case.operators():
        x = case.tensor(point, batch=3)
        _, ring = operator.step(x[:, :10], operator.start())
        for order in (torch.tensor([2, 0, 1]), torch.tensor([1]), torch.tensor([0, 0, 2])):
            y, _ = operator.step(x[order, 10:], ring.reorder(order))
            worst = max(worst, deviation(y, operator(x[order])[:, 10:]))
        y, _ = operator.step(x[:, 10:].repeat_interleave(2, 0), ring.repeat(2))
        worst = max(worst, deviation(y, operator(x)[:, 10:].repeat_interleave(2, 0)))
    return Outcome(worst, BOUND)


@torch.no_grad()
def purity(case: MixerCase) -> Outcome:
    """A step leaves its input and the ring as they were, and from one ring it gives the same numbers twice."""
    worst = 0.0
    for point, operator in case.operators():
        x = case.tensor(point)
        copied, weights = x.clone(), [p.clone() for p in operator.parameters()]
        _, ring = operator.step(x[:, :10], operator.start(2))
        held = [(t, t.clone()) for piece in ring.pieces for t in piece]
        first, _ = operator.step(x[:, 10:], ring)
        operator.step(case.tensor(point, offset=1), operator.start())
        again, _ = operator.step(x[:, 10:], ring)
        pairs = [(x, copied), (again, first), *held, *zip(operator.parameters(), weights, strict=True)]
        worst = max(worst, *(deviation(a, b) for a, b in pairs))
    return Outcome(worst)


def learning(case: MixerCase) -> Outcome:
    """Every row of every parameter gets a gradient, or is named by a `dead` of the operator, and the input does."""
    faults = []
    for point, operator in case.operators():
        x = case.tensor(point).requires_grad_()
        rows = row_gradients(operator, lambda x=x, operator=operator: operator(x))
        faults += [f"{point}: {fault}" for fault in row_faults(rows, dead_rows(operator))]
        (grad,) = torch.autograd.grad(operator(x).square().sum(), x)
        if not torch.isfinite(grad).all() or not bool((grad.abs().amax((0, 2)) > 0).all()):
            faults.append(f"{point}: some input gets no gradient")
    return Outcome(len(faults), detail="; ".join(faults[:3]))


@torch.no_grad()
def starts(case: MixerCase) -> Outcome:
    """reset_parameters sets every parameter, and to the same numbers for one generator."""
    faults = []
    for point, operator in case.operators():
        values = []
        for _ in range(2):
            for parameter in operator.parameters():
                parameter.fill_(float("nan"))
            operator.reset_parameters(generator=torch.Generator().manual_seed(case.seed))
            values.append({name: p.clone() for name, p in operator.named_parameters()})
        faults += [f"{point}: {n} is not set" for n, v in values[0].items() if not torch.isfinite(v).all()]
        faults += [f"{point}: {n} ignores the generator" for n, v in values[0].items() if not v.equal(values[1][n])]
    return Outcome(len(faults), detail="; ".join(faults[:3]))


@torch.no_grad()
def dtypes(case: MixerCase) -> Outcome:
    """The output keeps the dtype of the input in float64, float32 and bfloat16, and stays near float64's numbers."""
    worst = 0.0
    for point, operator in case.operators():
        x = case.tensor(point)
        exact = operator(x)
        for dtype, bound in DTYPE_BOUND.items():
            y = operator.to(dtype)(x.to(dtype))
            if y.dtype != dtype:
                return Outcome(float("inf"), 1.0, f"{point}: the output is {y.dtype} of {dtype}")
            worst = max(worst, deviation(y.double(), exact) / bound)
    return Outcome(worst, 1.0, "in parts of the bound")


def autocast(case: MixerCase) -> Outcome:
    """Under bfloat16 autocast output and gradients are finite, and the output near float32's."""
    worst, bound = 0.0, DTYPE_BOUND[torch.bfloat16]
    for point, operator in case.operators(torch.float32):
        x = case.tensor(point).float().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = operator(x)
        worst = max(worst, deviation(y.float(), operator(x)))
        found = torch.autograd.grad(y.float().square().sum(), [x, *operator.parameters()], allow_unused=True)
        if not all(torch.isfinite(g).all() for g in found if g is not None):
            return Outcome(float("inf"), bound, f"{point}: a gradient is not finite")
    return Outcome(worst, bound)


def parameters(case: MixerCase) -> Outcome:
    """`cost().parameters` is the number of numbers the operator learns."""
    faults = []
    for point, operator in case.operators():
        said, there = operator.cost().parameters, sum(p.numel() for p in operator.parameters())
        faults += [f"{point}: cost() says {said}, the operator has {there}"] if said != there else []
    return Outcome(len(faults), detail="; ".join(faults))


@torch.no_grad()
def kept(case: MixerCase) -> Outcome:
    """`cost().kept` is what the ring holds per sequence, and it does not grow with the sequence."""
    faults = []
    for point, operator in case.operators():
        for time in (TIME, 3 * TIME):
            _, ring = _in_chunks(operator, case.tensor(point, time=time), (time - 5, 1, 4))
            tensors = [t for piece in ring.pieces for t in piece]
            held = sum(t.untyped_storage().nbytes() // t.element_size() for t in tensors) // BATCH
            numbers = sum(t.numel() for t in tensors) // BATCH
            if numbers != operator.cost().kept:
                faults.append(f"{point}: cost() says {operator.cost().kept}, {numbers} are kept after {time} tokens")
            if held > 3 * max(numbers, WIDTH):
                faults.append(f"{point}: {numbers} numbers are kept after {time} tokens in a storage of {held}")
    return Outcome(len(faults), detail="; ".join(faults[:3]))


def compiles(case: MixerCase) -> Outcome:
    """torch.compile(fullgraph=True), forward and backward: traced for every variant, built for the first."""
    worst = 0.0
    for point, operator in case.operators():
        for backend in ("aot_eager", "inductor") if case.first else ("aot_eager",):
            torch.compiler.reset()
            pairs = []
            for call in (operator, torch.compile(operator, fullgraph=True, backend=backend)):
                x = case.tensor(point).requires_grad_()
                y = call(x)
                leaves = [x, *operator.parameters()]
                pairs.append([y, *torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)])
            worst = max(worst, *(deviation(b, a) for a, b in zip(*pairs, strict=True) if a is not None))
    torch.compiler.reset()
    return Outcome(worst, 1e-9)


MIXER_CHECKS: dict[str, Callable[[MixerCase], Outcome | str]] = {
    "declarations": declarations,
    "definition: values and every gradient": mixer_equals_definition,
    "gradients: finite differences": mixer_finite_differences,
    "forward = one step": shapes,
    "the past does not see the future": causal,
    "chunks = one pass": chunks,
    "packed documents = separate documents": documents,
    "left padding": padding,
    "trim within the spare positions": trims,
    "reorder and repeat": batches,
    "purity: inputs and rings are untouched": purity,
    "start: every parameter is set": starts,
    "gradients: each parameter learns or is dead": learning,
    "dtypes": dtypes,
    "bfloat16 autocast": autocast,
    "cost: parameters": parameters,
    "cost: kept, constant in time": kept,
}


def check_mixer(
    subject: type[LocalOperator] | str,
    variants: Sequence[Mapping[str, Any]] | None = None,
    *,
    seed: int = 0,
    compile: bool = False,
    only: Sequence[str] = (),
) -> Report:
    """Run every check on a mixer, over its variants; see `check_stream`."""
    checks = chosen(MIXER_CHECKS, compiles if compile else None, only)
    with registered(MIXERS, subject) as (name, cls):
        options = tuple(cls.variants if variants is None else variants)
        if not options:
            raise ValueError(f"{cls.__name__} has no variants to check it with; {{}} is one with the defaults")
        cases = [MixerCase(name, dict(each), seed, number) for number, each in enumerate(options)]
        measured = tuple(run_check(title, fn, cases) for title, fn in checks.items())
    return Report(cls.__name__, tuple(label(cls.__name__, each) for each in options), measured)
