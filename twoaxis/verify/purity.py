"""Purity: the state is a value and nothing is kept on the module.

So passes may interleave, be recomputed by activation checkpointing, deep-copied, cut at a block boundary and compiled.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from twoaxis.depth.compose import Composed
from twoaxis.depth.site import OUT, Site
from twoaxis.depth.stream import State, Stream
from twoaxis.verify.case import LAYOUTS, Case, resume, step, tensors_in, walk, ways_of
from twoaxis.verify.certificate import deviation
from twoaxis.verify.report import Outcome


@torch.no_grad()
def reads_repeat(case: Case) -> Outcome:
    """The same state read twice gives the same numbers."""
    worst = 0.0
    for layout in LAYOUTS:
        run = case.run(case.stream(layout))
        for taken in walk(run, case.embedding()):
            worst = max(worst, _seen_difference(run.stream.read(taken.before, taken.site), taken.seen))
    return Outcome(worst)


def _seen_difference(first: Any, second: Any) -> float:
    ours, theirs = ways_of(first), ways_of(second)
    if ours.keys() != theirs.keys():
        return float("inf")
    return max(deviation(ours[name], theirs[name]) for name in ours)


@torch.no_grad()
def passes_interleave(case: Case) -> Outcome:
    """Two passes with different inputs, site by site in turn, equal two passes one after the other."""
    worst = 0.0
    for layout in LAYOUTS:
        run = case.run(case.stream(layout))
        inputs = [case.embedding(), case.embedding(offset=1)]
        alone = [run(x) for x in inputs]
        states = [run.stream.open(x) for x in inputs]
        for site in run.stream.sites:
            states = [step(run, state, site).after for state in states]
        together = [run.stream.close(state) for state in states]
        worst = max(worst, *(deviation(a, b) for a, b in zip(together, alone, strict=True)))
    return Outcome(worst)


def module_unchanged(case: Case) -> Outcome:
    """A pass leaves the module's parameters, buffers and attributes, and its class's, as they were."""
    changes: list[str] = []
    for layout in LAYOUTS:
        made = case.stream(layout)
        run = case.run(made)
        before, weights = _snapshot(made), {n: t.clone() for n, t in made.state_dict().items()}
        run(case.embedding(grad=True)).sum().backward()
        for parameter in run.parameters():
            parameter.grad = None
        with torch.no_grad():
            run.run(case.embedding(), keep=True)
        after = _snapshot(made)
        changes += [f"{key} appeared" for key in after.keys() - before.keys()]
        changes += [f"{key} vanished" for key in before.keys() - after.keys()]
        changes += [f"{key} changed" for key in before.keys() & after.keys() if before[key] != after[key]]
        changes += [n for n, t in made.state_dict().items() if n not in weights or not torch.equal(t, weights[n])]
    return Outcome(len(changes), detail=", ".join(sorted(set(changes))[:4]))


def _snapshot(module: nn.Module) -> dict[str, Any]:
    """Everything an attribute could hide a number in: by path, the leaves with their identity and version."""
    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        _describe(vars(part), f"{name or type(module).__name__}", found, 0)
    for cls in type(module).__mro__:
        if issubclass(cls, Stream) and cls is not Stream:
            _describe(dict(vars(cls)), f"class {cls.__name__}", found, 0)
    return found


def _describe(value: Any, path: str, found: dict[str, Any], depth: int) -> None:
    if isinstance(value, Tensor):
        found[path] = (id(value), value._version)
    elif isinstance(value, nn.Module) or inspect.isroutine(value) or isinstance(value, type | property):
        found[path] = id(value)
    elif isinstance(value, Mapping):
        found[path] = len(value)
        for key, inside in value.items():
            _describe(inside, f"{path}.{key}", found, depth + 1)
    elif isinstance(value, list | tuple):
        found[path] = len(value)
        for i, inside in enumerate(value):
            _describe(inside, f"{path}[{i}]", found, depth + 1)
    elif isinstance(value, set | frozenset):
        found[path] = frozenset(map(repr, value))
    elif depth < 4 and hasattr(value, "__dict__"):
        _describe(vars(value), path, found, depth + 1)
    else:
        found[path] = value if isinstance(value, str | int | float | bool | None) else id(value)


@torch.no_grad()
def inputs_unchanged(case: Case) -> Outcome:
    """A pass changes neither the embedding, nor an increment, nor a read, nor any earlier state."""
    changed: list[str] = []
    for layout in LAYOUTS:
        run = case.run(case.stream(layout))
        made, x = run.stream, case.embedding()
        held = [("the embedding", x, x.clone())]

        def hold(what: str, value: Any, held: list[tuple[str, Tensor, Tensor]] = held) -> None:
            held += [(what, t, t.clone()) for t in tensors_in(value)]

        state = made.open(x)
        for taken in walk(run, case.embedding()):
            site, where = taken.site, f"site {taken.site.index}"
            hold(f"the state before {where}", state.value)
            seen = made.read(state, site)
            c, y = taken.c, taken.y.clone()
            hold(f"the read of {where}", seen)
            hold(f"the normalised read of {where}", c)
            hold(f"the increment of {where}", y)
            state = made.write(state, site, y, seen, c)
        hold("the last state", state.value)
        made.close(state)
        run(case.embedding(offset=1))
        changed += [what for what, tensor, copied in held if not torch.equal(tensor, copied)]
    return Outcome(len(changed), detail=", ".join(changed[:3]))


@torch.no_grad()
def deep_copies(case: Case) -> Outcome:
    """A copy of the module continues from a copy of the state, mid-pass, to the same output."""
    worst = 0.0
    for layout in case.layouts:
        run = case.run(case.stream(layout))
        whole = run(case.embedding())
        for taken in walk(run, case.embedding()):
            other, state = copy.deepcopy(run.stream), copy.deepcopy(taken.after)
            worst = max(worst, deviation(resume(run, state, other), whole))
    return Outcome(worst)


def checkpointing(case: Case) -> Outcome:
    """Blocks recomputed in the backward pass give the output and the gradients of blocks that are not."""
    worst = 0.0
    for layout in case.layouts:
        run = case.run(case.stream(layout))

        def block(state: State, number: int, run: Composed = run) -> State:
            for site in run.stream.sites:
                if site.block == number:
                    state = step(run, state, site).after
            return state

        def recomputed(x: Tensor, run: Composed = run, block: Callable[..., State] = block) -> Tensor:
            state = run.stream.open(x)
            for number in range(run.stream.layout.blocks):
                state = checkpoint(block, state, number, use_reentrant=False)
            return run.stream.close(state)

        worst = max(worst, compare(run, case, run, recomputed))
    return Outcome(worst, 1e-12)


def gradients(run: nn.Module, case: Case, call: Callable[[Tensor], Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The output, and the gradients of the embedding and of every parameter for one random cotangent."""
    x = case.embedding(grad=True)
    leaves = [x, *run.parameters()]
    out = call(x)
    probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(case.seed), dtype=out.dtype)
    if not out.requires_grad:
        return out, [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(out, leaves, probe, allow_unused=True)
    return out, [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]


def compare(run: nn.Module, case: Case, first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]) -> float:
    """Largest deviation between two ways to compute one output, gradients relative to the largest of all."""
    (out, ours), (other, theirs) = gradients(run, case, first), gradients(run, case, second)
    scale = max(g.abs().max().item() for g in ours if g.numel())
    differences = [(a - b).abs().max().item() / scale for a, b in zip(ours, theirs, strict=True) if a.numel()]
    return max(deviation(other, out), *differences)


def packing(case: Case) -> Outcome:
    """Packed at any block boundary and unpacked in a copy of the stream, a pass ends in the same numbers and gradients.

    The packed tensors are cut off and the backward passes joined by hand, as between two pipeline stages.
    """
    worst = 0.0
    for layout in case.layouts:
        made = case.stream(layout)
        run = case.run(made)
        out, whole = gradients(run, case, run)
        scale = max(g.abs().max().item() for g in whole if g.numel())
        for boundary in (s for s in made.layout.sites if s.first):
            end, sums = _in_two_stages(run, case, boundary)
            differences = [(a - b).abs().max().item() / scale for a, b in zip(sums, whole, strict=True) if a.numel()]
            worst = max(worst, deviation(end, out), *differences)
    return Outcome(worst, 1e-12)


def _in_two_stages(run: Composed, case: Case, boundary: Site) -> tuple[Tensor, list[Tensor]]:
    """The output and the gradients of `gradients`, with the state sent as tensors before `boundary`."""
    made, x = run.stream, case.embedding(grad=True)
    later, state = copy.deepcopy(made), made.open(x)
    for site in made.sites[: boundary.index]:
        state = step(run, state, site).after
    sent = made.pack(state)
    received = [t.detach().requires_grad_() for t in sent]
    end = resume(run, later.unpack(received, boundary), later)
    probe = torch.randn(end.shape, generator=torch.Generator().manual_seed(case.seed), dtype=end.dtype)
    leaves = [x, *run.parameters()]
    place = {id(leaf): i for i, leaf in enumerate(leaves)}
    twins = [place[id(p)] for p in made.parameters()]  # the copy's parameters stand for the original's
    back = torch.autograd.grad(end, [*received, *leaves[1:], *later.parameters()], probe, allow_unused=True)
    pairs = [(t, g) for t, g in zip(sent, back, strict=False) if g is not None and t.requires_grad]
    ends, cotangents = [t for t, _ in pairs], [g for _, g in pairs]
    front = torch.autograd.grad(ends, leaves, cotangents, allow_unused=True) if pairs else ()
    sums = [torch.zeros_like(leaf) for leaf in leaves]
    _add(sums, [*range(1, len(leaves)), *twins], back[len(received) :])
    _add(sums, list(range(len(leaves))) if pairs else [], front)
    return end, sums


def _add(sums: list[Tensor], places: list[int], terms: Sequence[Tensor | None]) -> None:
    for place, term in zip(places, terms, strict=True):
        if term is not None:
            sums[place] = sums[place] + term


@torch.no_grad()
def packed_structure(case: Case) -> Outcome:
    """How many tensors pack gives, and their shapes, depend on the site alone; inside a block it raises."""
    faults = []
    for layout in LAYOUTS:
        run = case.run(case.stream(layout))
        made, shapes = run.stream, []
        for batch, time, keep in ((BATCH_A, 5, False), (BATCH_B, 3, True)):
            state = made.open(case.embedding(batch=batch, time=time, offset=batch), keep=keep)
            rows = {}
            for site in made.layout.sites:
                if site.first:
                    rows[site.index] = [(batch, time) == t.shape[:2] and tuple(t.shape[2:]) for t in made.pack(state)]
                else:
                    faults += _accepts(f"{layout}: pack inside block {site.block}", made.pack, state)
                if site.kind != OUT:
                    state = step(run, state, site).after
            shapes.append(rows)
        for index, row in shapes[0].items():
            if row != shapes[1][index]:
                faults.append(f"{layout}: before site {index} {row} for one input and {shapes[1][index]} for another")
            if False in row:
                faults.append(f"{layout}: before site {index} a packed tensor does not begin with batch and time")
    return Outcome(len(faults), detail="; ".join(faults[:2]))


BATCH_A, BATCH_B = 2, 3


def _accepts(what: str, fn: Callable[..., Any], *args: Any) -> list[str]:
    """What is wrong if `fn` does not refuse `args` with a ValueError."""
    try:
        fn(*args)
    except ValueError:
        return []
    return [f"{what} raises no ValueError"]


@torch.no_grad()
def misuse(case: Case) -> Outcome:
    """A state of another stream, sites out of order and a wrong width are refused with a ValueError."""
    run, other = case.run(case.stream()), case.stream("mixers")
    made, x = run.stream, case.embedding()
    taken = next(walk(run, x))
    sites, seen, c, y = made.layout.sites, taken.seen, taken.c, taken.y
    faults = _accepts("the state of another stream", made.read, other.open(x), sites[0])
    faults += _accepts("an embedding of another width", made.open, x[..., :-1])
    faults += _accepts("an increment of another width", made.write, taken.before, sites[0], y[..., :-1], seen, c)
    faults += _accepts("a site read before its turn", made.read, taken.before, sites[1])
    faults += _accepts("a site read again after its write", made.read, taken.after, sites[0])
    faults += _accepts("a site written again", made.write, taken.after, sites[0], y, seen, c)
    faults += _accepts("closing before the last sub-layer", made.close, taken.after)
    return Outcome(len(faults), detail="; ".join(faults))


def compiles(case: Case) -> Outcome:
    """torch.compile(fullgraph=True) of a whole pass and its backward: traced for all variants, built for the first."""
    run = case.run(case.stream())
    worst = 0.0
    for backend in ("aot_eager", "inductor") if case.first else ("aot_eager",):
        torch.compiler.reset()
        worst = max(worst, compare(run, case, run, torch.compile(run, fullgraph=True, backend=backend)))
    torch.compiler.reset()
    return Outcome(worst, 1e-9)
