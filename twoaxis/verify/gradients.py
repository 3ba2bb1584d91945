"""Claims about gradients: they are the slopes of the output, however the pass was begun and whoever asks for them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twoaxis.depth.stream import Stream
from twoaxis.sequence.mixer import LocalOperator
from twoaxis.verify.claim import between, claim, disagreement, gradients, random_tensors
from twoaxis.verify.subject import Run, Subject, runs

FEW = runs(layouts="one", width=8, perturb=0.3)
"""A stream where every kind of site is, or an operator at every point; parameters far off their initial values."""
NOISE = 1e-14
"""A gradient below this part of the largest one is rounding, not learning: where terms cancel exactly on paper."""


@claim("gradients", "gradients: finite differences", over=FEW, bound=1e-6)
def finite_differences(run: Run) -> dict[str, float]:
    """Gradients are the slopes of the output: it catches a backward off by a factor and a detached source.

    <gradient, d> against (f(p + h d) - f(p - h d)) / 2h along random unit directions d, relative to what
    <gradient, d> is on average over directions.
    """
    errors, step, x = {}, 1e-6, run.input(grad=True)
    leaves = run.leaves(x)
    starts = [leaf.detach().clone() for leaf in leaves]
    for draw in range(2):
        out = run(x)
        probe, *along = random_tensors(4000 + 10 * run.seed + draw, out.shape, *(leaf.shape for leaf in leaves))
        along = [direction / direction.norm() for direction in along]
        grads, ends = gradients(out, leaves, probe), {}
        with torch.no_grad():
            for sign in (1, -1, 0):  # the last one puts every leaf back
                for leaf, start, direction in zip(leaves, starts, along, strict=True):
                    leaf.copy_(start + sign * step * direction)
                ends[sign] = (run(x) * probe).sum().item() if sign else 0.0
        expected = (ends[1] - ends[-1]) / (2 * step)
        measured = sum((grad * direction).sum().item() for grad, direction in zip(grads, along, strict=True))
        size = sum(grad.square().mean().item() for grad in grads) ** 0.5
        errors[f"draw {draw}"] = abs(measured - expected) / size if size else abs(expected)
    return errors


@claim("gradients", "gradients: torch.func", over=FEW, bound=1e-10)
def functional(run: Run) -> dict[str, float]:
    """`torch.func.vjp` of the method as a function of input and parameters gives autograd's gradients, batched too."""
    x, names = run.input(grad=True), [name for name, p in run.named_parameters() if p.numel()]
    out = run(x)
    probes = random_tensors(run.seed, out.shape, out.shape)
    one_by_one = [gradients(out, run.leaves(x), probe) for probe in probes]

    def call(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(run, dict(zip(names, values, strict=True)), (x,))

    pull = torch.func.vjp(call, *(leaf.detach() for leaf in run.leaves(x)))[1]
    stacked = torch.func.vmap(pull)(torch.stack(probes))
    batched = max(between([g[i] for g in stacked], one_by_one[i]) for i in range(2))
    return {"vjp": between(pull(probes[0]), one_by_one[0]), "vmap of vjp": batched}


@claim("gradients", "gradients: optimiser steps inside backward", over=FEW, bound=1e-12)
def stepping(run: Run) -> float:
    """A parameter that is changed as soon as its gradient is there leaves the other gradients as they are."""
    x = run.input(grad=True)
    leaves, out, found = run.leaves(x), run(x), {}
    (probe,) = random_tensors(run.seed, out.shape)
    expected = gradients(out, leaves, probe)

    def take(leaf: Tensor) -> None:
        assert leaf.grad is not None
        found[id(leaf)] = leaf.grad.clone()
        with torch.no_grad():
            leaf.sub_(leaf.grad)

    for leaf in leaves:
        leaf.register_post_accumulate_grad_hook(take)
    run(x).backward(probe)
    return between([found.get(id(leaf), torch.zeros_like(leaf)) for leaf in leaves], expected)


@claim("gradients", "gradients: begun without, continued with them", ["depth"], over=FEW, bound=1e-12)
def begun_without(run: Run, method: Stream | None = None) -> dict[str, float]:
    """A pass begun under no_grad and continued with gradients has those of its rest, nothing more and nothing less."""
    errors, x, going_on = {}, run.input(), method or run.method
    leaves = [*going_on.parameters(), *run.parameters()]
    for site in (site for site in run.method.layout.sites if site.first):
        with torch.no_grad():
            state = run.go(run.method.open(x), site.index)
        ends = run.end(state, going_on), run.end(going_on.unpack(run.method.pack(state), site), going_on)
        errors[f"before site {site.index}"] = disagreement(*ends, leaves, run.seed)
    return errors


@claim("gradients", "gradients: continued on a deep copy", ["depth"], over=FEW, bound=1e-12)
def on_a_copy(run: Run) -> dict[str, float]:
    """A state continued on a deep copy of the stream has the copy's gradients, not the original's."""
    return begun_without(run, copy.deepcopy(run.method))


# Which parameters learn.


@claim("gradients", "gradients: each parameter learns or is dead")
def learning(subject: Subject) -> list[str]:
    """Every row of every parameter gets a gradient or is named by `dead`; what `dead` names gets none."""
    found = []
    for perturb in (0.0, 0.1):
        for run in subject.runs(perturb=perturb):
            again = (run, run.redrawn(1)) if perturb else (run,)
            wrong = rows_at_fault(run.method, [each(each.input(offset=10)) for each in again], start=not perturb)
            if perturb and isinstance(run.method, LocalOperator):
                out = run(x := run.input(grad=True)).square().sum()
                reached = gradients(out, [x], torch.ones_like(out))[0].abs().amax((0, 2))
                if not ((reached > 0) & reached.isfinite()).all():
                    wrong.append("some input gets no gradient")
            found += [f"{run.where}: {fault}" for fault in wrong]
    return found


def rows_at_fault(method: Any, outputs: Sequence[Tensor], *, start: bool = False) -> list[str]:
    """What is wrong with the gradients of the rows of a method's parameters, taking the largest over some outputs.

    A row is an index of the first dimension; a parameter without dimensions is one row. At the start, where the
    parameters are initial ones, a live row may well have no gradient yet.
    """
    named = {name: p for name, p in method.named_parameters() if p.numel()}
    largest = [torch.zeros_like(p) for p in named.values()]
    for draw, out in enumerate(outputs):
        found = gradients(out, list(named.values()), random_tensors(draw, out.shape)[0])
        largest = [torch.maximum(before, grad.abs()) for before, grad in zip(largest, found, strict=True)]
    rows, dead = {}, set()
    for name, grad in zip(named, largest, strict=True):
        rows |= {f"{name}[{i}]": row.max().item() for i, row in enumerate(torch.atleast_1d(grad))}
    for name in method.dead():
        meant = {row for row in rows if name in (row, row.rpartition("[")[0])}
        if not meant:
            raise ValueError(f"dead() names {name!r}, which is neither a parameter nor a row of one")
        dead |= meant
    floor = NOISE * max((g for g in rows.values() if g < float("inf")), default=0.0)
    wrong = [f"{row} gets a gradient that is not finite" for row, g in rows.items() if not g < float("inf")]
    wrong += [f"{row} gets a gradient of {rows[row]:.1e} but dead() names it" for row in dead if rows[row] > floor]
    live = () if start else rows.keys() - dead
    return sorted(wrong + [f"{row} never gets a gradient" for row in live if rows[row] <= floor])
