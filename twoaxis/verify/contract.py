"""Claims of the contract: what is declared, purity, packing, misuse, recomputation and compilation.

The state is a value and nothing is kept on the module, so passes may interleave, be recomputed by activation
checkpointing, deep-copied, cut at a block boundary and compiled.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from twoaxis.base.registry import did_you_mean
from twoaxis.depth.site import Site
from twoaxis.depth.stream import Applied, Seen, State, Stream
from twoaxis.depth.walk import visit
from twoaxis.sequence.mixer import POINTS, LocalOperator
from twoaxis.sequence.registry import mixer
from twoaxis.verify.claim import between, claim, deviation, disagreement, gradients, raised, random_tensors
from twoaxis.verify.depth import PLACEMENTS, ways_of
from twoaxis.verify.subject import WIDTH, MixerSubject, Run, StreamSubject, Subject, runs, tensors_of

HOOKS = {
    Stream: ("_open", "_read", "_write", "_pack", "_unpack"),
    LocalOperator: ("points", "step"),
}
"""What a method has to fill in."""


@claim("contract", "declarations", first=True)
def declarations(subject: Subject) -> list[str]:
    """Name, options and hooks are what the contract asks for, and one pass runs everywhere."""
    cls = subject.cls
    if found := missing_hooks(cls):
        return found
    if not isinstance(getattr(cls, "name", None), str):
        found.append("the class has no `name`")
    config = getattr(cls, "Config", None)
    if not dataclasses.is_dataclass(config) or not config.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        found.append("`Config` is not a frozen dataclass")
    if isinstance(subject, MixerSubject):
        made = mixer(subject.name, **subject.options)
        if not made.points or not set(made.points) <= set(POINTS):
            return [f"it acts at {made.points}, the points are {', '.join(POINTS)}"]
        for point in set(POINTS) - set(made.points):
            found += _accepted(f"an operator at {point!r}, where the mixer does not act,", made.build, point, WIDTH)
    try:
        for run in subject.runs():
            found += [f"{run.where}: {fault}" for fault in _wrong_in(run)]
    except Exception as error:
        return [raised(error)]
    return found


def missing_hooks(cls: type[Any]) -> list[str]:
    """Hooks of the contract that a class leaves out, each with a name of the class that may be meant for it."""
    root = LocalOperator if issubclass(cls, LocalOperator) else Stream
    own = {name for base in cls.__mro__[: cls.__mro__.index(root)] for name in vars(base) if not hasattr(root, name)}
    found = []
    for hook in HOOKS[root]:
        if inspect.getattr_static(cls, hook) is inspect.getattr_static(root, hook):
            near = did_you_mean(hook, own).replace("did you mean", "is it meant by")
            found.append(f"{cls.__name__} does not define {hook}{near}")
    return found


def _wrong_in(run: Run) -> list[str]:
    """What is wrong with the declarations of one run, after one pass."""
    found: list[str] = []
    x = run.input()
    if run(x).shape != x.shape:
        found.append(f"the output has shape {tuple(run(x).shape)}, the input {tuple(x.shape)}")
    if isinstance(run.method, LocalOperator):
        return found + _accepted("an input of another width", run, x[..., :-1])
    method = run.stream
    state = method.unpack(method.pack(method.open(x)), method.layout.sites[0])
    run.end(state)
    if method.neutral not in ("bitwise", "rounding", "scale", "none"):
        found.append(f"the neutral class is {method.neutral!r}")
    for site in method.layout.sites:
        ways = method.ways(site)
        allowed = ("x", "q", "k", "v") if site.kind in ("attention", "parallel") else ("x",)
        if not ways or not set(ways) <= set(allowed) or len(set(ways)) != len(ways):
            found.append(f"a site of kind {site.kind} has the ways {ways}")
    return found


def _accepted(what: str, call: Callable[..., Any], *arguments: Any) -> list[str]:
    """What is wrong if a call does not refuse its arguments with a ValueError."""
    try:
        call(*arguments)
    except ValueError:
        return []
    return [f"{what} raises no ValueError"]


# Purity.


@claim("contract", "purity: a state reads the same twice", ["depth"], over=runs())
@torch.no_grad()
def reads_repeat(run: Run) -> float:
    """The same state read twice gives the same numbers."""
    reads = [(ways_of(run.stream.read(s.before, s.site)), ways_of(s.seen)) for s in run.steps(run.input())[0]]
    return max(
        deviation(again[way], seen[way]) if way in again else float("inf") for again, seen in reads for way in seen
    )


@claim("contract", "purity: passes interleave", ["depth"], over=runs())
@torch.no_grad()
def passes_interleave(run: Run) -> float:
    """Two passes with different inputs, site by site in turn, equal two passes one after the other."""
    inputs = [run.input(), run.input(offset=1)]
    alone, states = [run(x) for x in inputs], [run.stream.open(x) for x in inputs]
    for site in run.stream.sites:
        states = [run.go(state, site.index + 1) for state in states]
    return max(deviation(run.end(state), out) for state, out in zip(states, alone, strict=True))


@claim("contract", "purity: nothing is kept on the module", over=runs())
def module_unchanged(run: Run) -> list[str]:
    """A pass leaves the module's parameters, buffers and attributes, and its class's, as they were."""
    before = _snapshot(run.method)
    run(run.input(grad=True)).sum().backward()
    for parameter in run.parameters():
        parameter.grad = None
    with torch.no_grad():
        run.composed.run(run.input(), keep=True) if isinstance(run.method, Stream) else run(run.input(offset=1))
    after = _snapshot(run.method)
    same = {
        key
        for key, (held, *rest) in before.items()
        if key in after and [held is after[key][0], *rest] == [True, *after[key][1:]]
    }
    return sorted(f"{key} changed" for key in (after.keys() | before.keys()) - same)


def _snapshot(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Everything an attribute could hide a number in, by path: the objects themselves, and what they contain."""
    found: dict[str, tuple[Any, ...]] = {}
    for name, part in module.named_modules():
        _describe(vars(part), name or type(module).__name__, found, 0)
    for cls in type(module).__mro__:
        if issubclass(cls, Stream | LocalOperator) and cls not in (Stream, LocalOperator):
            _describe(dict(vars(cls)), f"class {cls.__name__}", found, 0)
    return found


def _describe(value: Any, path: str, found: dict[str, tuple[Any, ...]], depth: int) -> None:
    """Add a value and, but for modules and functions, what is in it: an object, and numbers that are equal again."""
    if isinstance(value, Tensor):
        found[path] = value, value._version, value.detach().double().sum().item()
    elif isinstance(value, nn.Module | type | property) or inspect.isroutine(value):
        found[path] = (value,)
    elif isinstance(value, Mapping | list | tuple):
        found[path] = None, len(value)
        for key, inside in value.items() if isinstance(value, Mapping) else enumerate(value):
            _describe(inside, f"{path}.{key}", found, depth + 1)
    elif isinstance(value, set | frozenset):
        found[path] = None, frozenset(map(repr, value))
    elif depth < 4 and hasattr(value, "__dict__"):
        _describe(vars(value), path, found, depth + 1)
    else:
        found[path] = (None, value) if isinstance(value, str | int | float | bool | None) else (value,)


@claim("contract", "purity: inputs and old states are untouched", ["depth"], over=runs())
@torch.no_grad()
def inputs_unchanged(run: Run) -> list[str]:
    """A pass changes neither the embedding, nor an increment, nor a read, nor any earlier state."""
    method, x = run.stream, run.input()
    held = [("the embedding", x, x.clone())]

    def hold(what: str, value: Any) -> None:
        held.extend((what, t, t.clone()) for t in tensors_of(value))

    def watch(site: Site, state: State, seen: Seen) -> None:
        hold(f"the state before site {site.index}", state.value)
        hold(f"the read of site {site.index}", seen)

    def act(site: Site, seen: Seen) -> Applied:
        applied = run.act(site, seen)
        hold(f"the normalised read of site {site.index}", applied.c)
        hold(f"the increment of site {site.index}", applied.y)
        return applied

    last = visit(method, method.open(x), method.sites, act, watch)
    hold("the last state", last.value)
    method.close(last)
    run(run.input(offset=1))
    return [what for what, tensor, copied in held if not torch.equal(tensor, copied)]


@claim("contract", "purity: inputs and rings are untouched", ["sequence"], over=runs())
@torch.no_grad()
def rings_unchanged(run: Run) -> float:
    """A step leaves its input and the ring as they were, and from one ring it gives the same numbers twice."""
    operator, x = run.method, run.input()
    assert isinstance(operator, LocalOperator)
    _, ring = operator.step(x[:, :10], operator.start(2))
    held = [(t, t.clone()) for t in (x, *ring.kept)]
    first, _ = operator.step(x[:, 10:], ring)
    operator.step(run.input(offset=1), operator.start())
    again, _ = operator.step(x[:, 10:], ring)
    return max(deviation(a, b) for a, b in [(again, first), *held])


@claim("contract", "purity: deep copies continue", ["depth"], over=runs(layouts="few"))
@torch.no_grad()
def deep_copies(run: Run) -> float:
    """A copy of the module continues from a copy of the state, mid-pass, to the same output."""
    whole, (steps, last) = run(run.input()), run.steps(run.input())
    states = [*(step.before for step in steps), last]
    return max(deviation(run.end(copy.deepcopy(s), copy.deepcopy(run.stream)), whole) for s in states)


# Packing and recomputation.


@claim("contract", "pack: continues after any block", ["depth"], over=runs(layouts="few"), bound=1e-12)
def packing(run: Run) -> dict[str, float]:
    """A pass that is packed before every block and unpacked in a copy of the stream has the same output and gradients.

    The packed tensors are cut off and the backward passes joined by hand, as between pipeline stages.
    """
    x, method = run.input(grad=True), run.stream
    copied, cuts, leaves = copy.deepcopy(method), [], [x, *run.parameters()]
    out, state = run(x), method.open(x)
    (probe,) = random_tensors(run.seed, out.shape)
    whole = gradients(out, leaves, probe)
    for boundary in (site for site in method.layout.sites if site.first):
        stage = copied if cuts else method
        sent = stage.pack(run.go(state, boundary.index, stage))
        received = [t.detach().requires_grad_() for t in sent]
        state = copied.unpack(received, boundary)
        cuts.append((sent, received))
    end = copied.close(state)
    torch.autograd.backward(end, probe)
    for sent, received in reversed(cuts):
        joined = [(t, r.grad) for t, r in zip(sent, received, strict=True) if t.requires_grad and r.grad is not None]
        if joined:
            tensors, cotangents = zip(*joined, strict=True)
            torch.autograd.backward(tensors, cotangents)
    twins: dict[Tensor, Tensor] = dict(zip(method.parameters(), copied.parameters(), strict=True))
    sums = [torch.zeros_like(leaf) for leaf in leaves]
    for total, leaf in zip(sums, leaves, strict=True):
        for grad in (leaf.grad, None if leaf is x else getattr(twins.get(leaf), "grad", None)):
            total += 0.0 if grad is None else grad
    return {"output": deviation(end, out), "gradients": between(sums, whole, floor=1.0)}


def _placed(subject: StreamSubject) -> Iterator[tuple[str, Run]]:
    for number in (subject.number, subject.number + 3):
        placement = PLACEMENTS[number % len(PLACEMENTS)]
        for layout in ("mixers", "uneven"):
            yield f"{placement!r}, {layout}", subject.run(layout, placement=placement)


@claim("contract", "placement: packs anywhere", ["depth"], over=_placed, bound=1e-12)
def packs_anywhere(run: Run) -> dict[str, float]:
    """Where some sites are switched off, packing still continues to the same output; two placements per variant."""
    return packing(run)


@claim("contract", "pack: structure depends on the site alone", ["depth"], over=runs())
@torch.no_grad()
def packed_structure(run: Run) -> list[str]:
    """How many tensors pack gives, and their shapes, depend on the site alone; inside a block it raises."""
    method, found, shapes = run.stream, [], []
    for batch, time, keep in ((2, 5, False), (3, 3, True)):
        state, rows = method.open(run.input(batch=batch, time=time, offset=batch), keep=keep), {}
        for site in method.layout.sites:
            state = run.go(state, site.index)
            if site.first:
                rows[site.index] = [(batch, time) == t.shape[:2] and tuple(t.shape[2:]) for t in method.pack(state)]
            else:
                found += _accepted(f"pack inside block {site.block}", method.pack, state)
        shapes.append(rows)
    for index, row in shapes[0].items():
        if row != shapes[1][index]:
            found.append(f"before site {index} {row} for one input and {shapes[1][index]} for another")
        if False in row:
            found.append(f"before site {index} a packed tensor does not begin with batch and time")
    return found


@claim("contract", "activation checkpointing", ["depth"], over=runs(layouts="one"), bound=1e-12)
def checkpointing(run: Run) -> float:
    """Blocks recomputed in the backward pass give the output and the gradients of blocks that are not."""
    method, x = run.stream, run.input(grad=True)
    state: Any = method.open(x)
    for number in range(method.layout.blocks):
        state = checkpoint(run.go, state, method.sites_of(number)[-1].index + 1, use_reentrant=False)
    return disagreement(method.close(state), run(x), run.leaves(x), run.seed)


@claim("contract", "misuse is refused", ["depth"])
@torch.no_grad()
def misuse(subject: StreamSubject) -> list[str]:
    """A state of another stream, sites out of order and a wrong width are refused with a ValueError."""
    run, other = subject.run(), subject.stream("mixers")
    method, x = run.stream, run.input()
    step, sites = run.steps(x)[0][0], method.layout.sites
    after = method.write(step.before, sites[0], step.y, step.seen, step.c)
    rest = (step.seen, step.c)
    found = _accepted("the state of another stream", method.read, other.open(x), sites[0])
    found += _accepted("an embedding of another width", method.open, x[..., :-1])
    found += _accepted("an increment of another width", method.write, step.before, sites[0], step.y[..., :-1], *rest)
    found += _accepted("a site read before its turn", method.read, step.before, sites[1])
    found += _accepted("a site read again after its write", method.read, after, sites[0])
    found += _accepted("a site written again", method.write, after, sites[0], step.y, *rest)
    return found + _accepted("closing before the last sub-layer", method.close, after)


COMPILE = "torch.compile(fullgraph=True)"


@claim("contract", COMPILE, bound=1e-9, slow=True)
def compiles(subject: Subject) -> dict[str, float]:
    """A whole pass and its backward, compiled: traced for all variants, built for the first."""
    errors = {}
    for run in [subject.run()] if isinstance(subject, StreamSubject) else subject.runs():
        for backend in ("aot_eager", "inductor") if subject.first else ("aot_eager",):
            torch.compiler.reset()
            x = run.input(grad=True)
            compiled: Any = torch.compile(run, fullgraph=True, backend=backend)
            errors[f"{run.where}, {backend}"] = disagreement(compiled(x), run(x), run.leaves(x), run.seed)
    torch.compiler.reset()
    return errors
