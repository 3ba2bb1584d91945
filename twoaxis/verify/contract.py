"""Claims of the contract: what is declared, purity, packing, misuse, recomputation and compilation.

The state is a value and nothing is kept on the module, so passes may interleave, be recomputed by activation
checkpointing, deep-copied, cut at a block boundary and compiled.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from twoaxis.base.registry import did_you_mean
from twoaxis.depth.compose import Composed
from twoaxis.depth.site import Site
from twoaxis.depth.stream import Applied, Seen, State, Stream
from twoaxis.depth.walk import visit
from twoaxis.sequence.mixer import POINTS, LocalOperator
from twoaxis.sequence.registry import mixer
from twoaxis.verify.claim import accepted, claim, deviation, disagreement, raised
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
            found += accepted(f"an operator at {point!r}, where the mixer does not act,", made.build, point, WIDTH)
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
    method = run.method
    if isinstance(method, LocalOperator):
        return found + accepted("an input of another width", run, x[..., :-1])
    run.end(method.unpack(method.pack(method.open(x)), method.layout.sites[0]))
    if method.neutral not in ("bitwise", "rounding", "scale", "none"):
        found.append(f"the neutral class is {method.neutral!r}")
    for site in method.layout.sites:
        ways = method.ways(site)
        allowed = ("x", "q", "k", "v") if site.kind in ("attention", "parallel") else ("x",)
        if not ways or not set(ways) <= set(allowed) or len(set(ways)) != len(ways):
            found.append(f"a site of kind {site.kind} has the ways {ways}")
    return found


# Purity.


@claim("contract", "purity: passes interleave", ["depth"], over=runs())
@torch.no_grad()
def passes_interleave(run: Run) -> dict[str, float]:
    """Two passes site by site in turn, every state read twice, equal two passes one after the other; a deep copy of
    the module continues from a copy of any of their states to the same output.
    """
    method, inputs = run.method, [run.input(), run.input(offset=1)]
    alone, states, errors = [run(x) for x in inputs], [method.open(x) for x in inputs], {}
    for site in method.layout.sites:
        first, again = (ways_of(method.read(states[0], site)) for _ in range(2))
        errors[f"site {site.index} read again"] = max(deviation(again[way], first[way]) for way in first)
        copied = run.end(copy.deepcopy(states[0]), copy.deepcopy(method))
        errors[f"copied before site {site.index}"] = deviation(copied, alone[0])
        states = [run.go(state, site.index + 1) for state in states]
    return errors | {f"pass {i}": deviation(run.end(state), alone[i]) for i, state in enumerate(states)}


@claim("contract", "purity: nothing is kept on the module", over=runs())
def module_unchanged(run: Run) -> list[str]:
    """A pass leaves the module's parameters, buffers and attributes, and its class's, as they were."""
    before = _snapshot(run.method)
    run(run.input(grad=True)).sum().backward()
    run.zero_grad()
    with torch.no_grad():
        run(run.input(offset=1))
        if isinstance(run.run, Composed):
            run.run.run(run.input(), keep=True)
    after = _snapshot(run.method)
    return sorted(f"{key} changed" for key in after.keys() | before.keys() if after.get(key) != before.get(key))


def _snapshot(module: nn.Module) -> dict[str, Any]:
    """What the attributes of a module and its parts, and of its classes, are and contain."""
    holders = [(name or type(module).__name__, part) for name, part in module.named_modules()]
    classes = [c for c in type(module).__mro__ if issubclass(c, Stream | LocalOperator)]
    holders += [(f"class {c.__name__}", c) for c in classes if c not in (Stream, LocalOperator)]
    return {f"{path}.{key}": _contents(value) for path, held in holders for key, value in vars(held).items()}


class _Itself:
    """An object that is equal to itself alone; held, so that no later object is at its address and taken for it."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.held is other.held


def _contents(value: Any, depth: int = 0) -> Any:
    """What an object is and, but for modules and functions, what is in it, in a form that can be compared later."""
    if isinstance(value, Tensor):
        return _Itself(value), value._version, value.detach().double().sum().item()
    if isinstance(value, nn.Module | type | property) or inspect.isroutine(value):
        return _Itself(value)
    if isinstance(value, Mapping):
        return {key: _contents(inside, depth + 1) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_contents(inside, depth + 1) for inside in value]
    if isinstance(value, set | frozenset):
        return frozenset(map(repr, value))
    if depth < 4 and hasattr(value, "__dict__"):
        return _contents(vars(value), depth + 1)
    return value if isinstance(value, str | int | float | bool | None) else _Itself(value)


@claim("contract", "purity: inputs and old states are untouched", ["depth"], over=runs())
@torch.no_grad()
def inputs_unchanged(run: Run) -> list[str]:
    """A pass changes neither the embedding, nor an increment, nor a read, nor any earlier state."""
    method, x = run.method, run.input()
    held = [("the embedding", x, x.clone())]

    def hold(what: str, value: Any) -> None:
        held.extend((what, t, t.clone()) for t in tensors_of(value))

    def act(site: Site, seen: Seen) -> Applied:
        applied = run.act(site, seen)
        hold(f"the normalised read or the increment of site {site.index}", applied)
        return applied

    def watch(site: Site, state: State, seen: Seen) -> None:
        hold(f"the read of site {site.index} or the state before it", (state.value, seen))

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
    _, ring = operator.step(x[:, :10], operator.start(2))
    held = [(t, t.clone()) for t in (x, *ring.kept)]
    first, _ = operator.step(x[:, 10:], ring)
    operator.step(run.input(offset=1), operator.start())
    again, _ = operator.step(x[:, 10:], ring)
    return max(deviation(a, b) for a, b in [(again, first), *held])


# Packing and recomputation.


def _placed(subject: StreamSubject) -> Iterator[tuple[str, Run]]:
    yield from runs(layouts="few")(subject)
    for number in (subject.number, subject.number + 3):
        placement = PLACEMENTS[number % len(PLACEMENTS)]
        for layout in ("mixers", "uneven"):
            yield f"{placement!r}, {layout}", subject.run(layout, placement=placement)


@claim("contract", "pack: continues after any block", ["depth"], over=_placed, bound=1e-12)
def packing(run: Run) -> float:
    """A pass that is packed before every block and unpacked in another module has the same output and gradients.

    Everywhere, and with some sites switched off. The other module has the same parameters and none of what a pass may
    have left on the first.
    """
    x, stage = run.input(grad=True), copy.copy(run.method)
    state = run.method.open(x)
    for boundary in (site for site in stage.layout.sites if site.first):
        state = stage.unpack(stage.pack(run.go(state, boundary.index, stage)), boundary)
        stage = copy.copy(stage)
    return disagreement(run.end(state, stage), run(x), run.leaves(x), run.seed)


@claim("contract", "pack: structure depends on the site alone", ["depth"], over=runs())
@torch.no_grad()
def packed_structure(run: Run) -> list[str]:
    """How many tensors pack gives, and their shapes, depend on the site alone; inside a block it raises."""
    method, found, shapes = run.method, [], []
    for batch, time, keep in ((2, 5, False), (3, 3, True)):
        state, rows = method.open(run.input(batch=batch, time=time, offset=batch), keep=keep), {}
        for site in method.layout.sites:
            state = run.go(state, site.index)
            if site.first:
                rows[site.index] = [(batch, time) == t.shape[:2] and tuple(t.shape[2:]) for t in method.pack(state)]
            else:
                found += accepted(f"pack inside block {site.block}", method.pack, state)
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
    method, x = run.method, run.input(grad=True)
    state: Any = method.open(x)
    for number in range(method.layout.blocks):
        state = checkpoint(run.go, state, method.sites_of(number)[-1].index + 1, use_reentrant=False)
    return disagreement(method.close(state), run(x), run.leaves(x), run.seed)


@claim("contract", "misuse is refused", ["depth"])
@torch.no_grad()
def misuse(subject: StreamSubject) -> list[str]:
    """A state of another stream, sites out of order and a wrong width are refused with a ValueError."""
    run, other = subject.run(), subject.stream("mixers")
    method, x = run.method, run.input()
    step, sites = run.steps(x)[0][0], method.layout.sites
    after = method.write(step.before, sites[0], step.y, step.seen, step.c)
    rest = (step.seen, step.c)
    foreign = other.open(x)
    found = accepted("the state of another stream", method.read, foreign, sites[0])
    found += accepted("the state of another stream, packed,", method.pack, foreign)
    found += accepted("an embedding of another width", method.open, x[..., :-1])
    found += accepted("an increment of another width", method.write, step.before, sites[0], step.y[..., :-1], *rest)
    found += accepted("a site read before its turn", method.read, step.before, sites[1])
    found += accepted("a site read again after its write", method.read, after, sites[0])
    found += accepted("a site written again", method.write, after, sites[0], step.y, *rest)
    return found + accepted("closing before the last sub-layer", method.close, after)


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
