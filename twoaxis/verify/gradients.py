"""Claims about gradients: they are the slopes of the output, however the pass was begun and whoever asks for them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from twoaxis.depth.stream import Stream
from twoaxis.verify.claim import Result, between, claim, disagreement, faults, gradients, random_tensors, worst
from twoaxis.verify.subject import Run, StreamSubject, Subject

PERTURB = 0.3
NOISE = 1e-14
"""A gradient below this part of the largest one is rounding, not learning: where terms cancel exactly on paper."""


@claim("gradients", "gradients: finite differences")
def finite_differences(subject: Subject) -> Result:
    """Gradients are the slopes of the output: it catches a backward off by a factor and a detached source.

    <gradient, d> against (f(p + h d) - f(p - h d)) / 2h along random unit directions d, relative to what
    <gradient, d> is on average over directions.
    """
    errors, step = {}, 1e-6
    for run in _few(subject):
        x = run.input(grad=True)
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
            errors[f"{run.where}, draw {draw}"] = abs(measured - expected) / size if size else abs(expected)
    return worst(errors, 1e-6)


def _few(subject: Subject) -> list[Run]:
    """A stream where every kind of site is, or an operator at every point."""
    if isinstance(subject, StreamSubject):
        return [subject.run("uneven", width=8, perturb=PERTURB)]
    return list(subject.runs(perturb=PERTURB))


@claim("gradients", "gradients: torch.func")
def functional(subject: Subject) -> Result:
    """`torch.func.vjp` of the method as a function of input and parameters gives autograd's gradients, batched too."""
    errors = {}
    for run in _few(subject):
        x, names = run.input(grad=True), [name for name, p in run.named_parameters() if p.numel()]
        out = run(x)
        probes = random_tensors(run.seed, out.shape, out.shape)
        one_by_one = [gradients(out, run.leaves(x), probe) for probe in probes]

        def call(x: Tensor, *values: Tensor, run: Run = run, names: Sequence[str] = names) -> Tensor:
            return torch.func.functional_call(run, dict(zip(names, values, strict=True)), (x,))

        pull = torch.func.vjp(call, *(leaf.detach() for leaf in run.leaves(x)))[1]
        stacked = torch.func.vmap(pull)(torch.stack(probes))
        errors[f"{run.where}, vjp"] = between(pull(probes[0]), one_by_one[0])
        errors[f"{run.where}, vmap of vjp"] = max(between([g[i] for g in stacked], one_by_one[i]) for i in range(2))
    return worst(errors, 1e-10)


@claim("gradients", "gradients: optimiser steps inside backward")
def stepping(subject: Subject) -> Result:
    """A parameter that is changed as soon as its gradient is there leaves the other gradients as they are."""
    errors = {}
    for run in _few(subject):
        x = run.input(grad=True)
        leaves, out, found = run.leaves(x), run(x), {}
        (probe,) = random_tensors(run.seed, out.shape)
        expected = gradients(out, leaves, probe)

        def take(leaf: Tensor, found: dict[int, Tensor] = found) -> None:
            assert leaf.grad is not None
            found[id(leaf)] = leaf.grad.clone()
            with torch.no_grad():
                leaf.sub_(leaf.grad)

        for leaf in leaves:
            leaf.register_post_accumulate_grad_hook(take)
        run(x).backward(probe)
        errors[run.where] = between([found.get(id(leaf), torch.zeros_like(leaf)) for leaf in leaves], expected)
    return worst(errors, 1e-12)


@claim("gradients", "gradients: begun without, continued with them", ["depth"])
def begun_without(subject: StreamSubject) -> Result:
    """A pass begun under no_grad and continued with gradients has those of its rest, nothing more and nothing less."""
    return _continued(subject, lambda method: method)


@claim("gradients", "gradients: continued on a deep copy", ["depth"])
def on_a_copy(subject: StreamSubject) -> Result:
    """A state continued on a deep copy of the stream has the copy's gradients, not the original's."""
    return _continued(subject, copy.deepcopy)


def _continued(subject: StreamSubject, later: Callable[[Stream], Stream]) -> Result:
    """The rest of a pass that began under no_grad, from its state and from what pack makes of it."""
    errors, (run,) = {}, _few(subject)
    x = run.input()
    for site in (site for site in run.stream.sites if site.first):
        with torch.no_grad():
            state = run.go(run.stream.open(x), site.index)
        method = later(run.stream)
        again = method.unpack(run.stream.pack(state), site)
        leaves = [*method.parameters(), *run.parameters()]
        errors[f"before site {site.index}"] = disagreement(
            run.end(state, method), run.end(again, method), leaves, run.seed
        )
    return worst(errors, 1e-12)


# Which parameters learn.


@claim("gradients", "gradients: each parameter learns or is dead")
def learning(subject: Subject) -> Result:
    """Every row of every parameter gets a gradient or is named by `dead`; what `dead` names gets none."""
    found = []
    for perturb in (0.0, 0.1):
        for run in subject.runs(perturb=perturb):
            calls = [(run, run.input(offset=10))]
            if perturb:
                calls.append((other := run.redrawn(1), other.input(offset=10)))
            wrong = rows_at_fault(run.method, calls, start=not perturb)
            if perturb and run.composed is None and not _every_input_counts(run):
                wrong.append("some input gets no gradient")
            found += [f"{run.where}: {fault}" for fault in wrong]
    return faults(found)


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
