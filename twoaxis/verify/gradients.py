"""Claims about gradients: they are the slopes of the output, however the pass was begun and whoever asks for them."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from twoaxis.depth.stream import Stream
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
def begun_without(run: Run) -> dict[str, float]:
    """A pass begun under no_grad and continued with gradients has those of its rest, nothing more and nothing less."""
    return _continued(run, run.stream)


@claim("gradients", "gradients: continued on a deep copy", ["depth"], over=FEW, bound=1e-12)
def on_a_copy(run: Run) -> dict[str, float]:
    """A state continued on a deep copy of the stream has the copy's gradients, not the original's."""
    return _continued(run, copy.deepcopy(run.stream))


def _continued(run: Run, method: Stream) -> dict[str, float]:
    """The rest of a pass that began under no_grad, from its state and from what pack makes of it."""
    errors, x, leaves = {}, run.input(), [*method.parameters(), *run.parameters()]
    for site in (site for site in run.stream.sites if site.first):
        with torch.no_grad():
            state = run.go(run.stream.open(x), site.index)
        again = method.unpack(run.stream.pack(state), site)
        ends = run.end(state, method), run.end(again, method)
        errors[f"before site {site.index}"] = disagreement(*ends, leaves, run.seed)
    return errors


# Which parameters learn.


@claim("gradients", "gradients: each parameter learns or is dead")
def learning(subject: Subject) -> list[str]:
    """Every row of every parameter gets a gradient or is named by `dead`; what `dead` names gets none."""
    found = []
    for perturb in (0.0, 0.1):
        for run in subject.runs(perturb=perturb):
            calls = [(run, run.input(offset=10))]
            if perturb:
                calls.append((other := run.redrawn(1), other.input(offset=10)))
            wrong = rows_at_fault(run.method, calls, start=not perturb)
            if perturb and not isinstance(run.method, Stream) and not _every_input_counts(run):
                wrong.append("some input gets no gradient")
            found += [f"{run.where}: {fault}" for fault in wrong]
    return found


def _every_input_counts(run: Run) -> bool:
    x = run.input(grad=True)
    (grad,) = torch.autograd.grad(run(x).square().sum(), x)
    return bool(torch.isfinite(grad).all() and (grad.abs().amax((0, 2)) > 0).all())


def rows_at_fault(method: nn.Module, calls: Sequence[tuple[Run, Tensor]], *, start: bool = False) -> list[str]:
    """What is wrong with the gradients of the rows of a method's parameters.

    Args:
        method: whose parameters.
        calls: runs of it and their inputs.
        start: the parameters are initial ones, where a live row may well have no gradient yet.
    """
    rows, dead = row_gradients(method, [run(x) for run, x in calls]), dead_rows(method)
    floor = NOISE * max((g for g in rows.values() if g < float("inf")), default=0.0)
    found = [f"{row} gets a gradient that is not finite" for row, g in rows.items() if not g < float("inf")]
    alive = [row for row in sorted(dead) if rows[row] > floor]
    found += [f"{row} gets a gradient of {rows[row]:.1e} but dead() names it" for row in alive]
    if not start:
        found += [f"{row} never gets a gradient" for row, g in rows.items() if row not in dead and g <= floor]
    return found


def row_gradients(module: nn.Module, outputs: Sequence[Tensor]) -> dict[str, float]:
    """The largest gradient of each row of each parameter over some outputs, by `name[row]`.

    A row is an index of the first dimension; a parameter without dimensions is one row.
    """
    parameters = dict(module.named_parameters())
    largest = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for draw, out in enumerate(outputs):
        (probe,) = random_tensors(draw, out.shape)
        found = gradients(out, list(parameters.values()), probe)
        largest = {name: torch.maximum(largest[name], g.abs()) for name, g in zip(parameters, found, strict=True)}
    return {
        f"{name}[{row}]": entries.max().item() if entries.numel() else 0.0
        for name, grad in largest.items()
        for row, entries in enumerate(grad.unsqueeze(0) if grad.dim() == 0 else grad)
    }


def dead_rows(module: nn.Module) -> set[str]:
    """The rows `module.dead()` names; a name without a row is all rows of that parameter."""
    dead = getattr(module, "dead", dict)()
    shapes, rows = {name: p.shape for name, p in module.named_parameters()}, set()
    for name in dead:
        found = re.fullmatch(r"(.+)\[(\d+)\]", name)
        parameter = found.group(1) if found else name
        if parameter not in shapes:
            raise ValueError(f"dead() names {name!r}, the parameters are {', '.join(shapes) or 'none'}")
        count = shapes[parameter][0] if shapes[parameter] else 1
        if found and int(found.group(2)) >= count:
            raise ValueError(f"dead() names {name!r}, {parameter} has {count} rows")
        rows |= {name} if found else {f"{parameter}[{row}]" for row in range(count)}
    return rows
