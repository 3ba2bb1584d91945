"""Claims about costs: what a method says it costs, against what is counted while it runs; and memory against depth.

Counts are second differences, in tokens and in width, so that work on weights and width-independent work, which `Cost`
leaves out, cancel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from twoaxis.base.meter import Meter, storage_bytes
from twoaxis.depth.compose import compose
from twoaxis.depth.site import Site
from twoaxis.depth.stream import Applied, Seen, Stream
from twoaxis.depth.walk import visit
from twoaxis.verify.claim import Measured, claim, faults, worst
from twoaxis.verify.subject import CHANNELS, StreamSubject, Subject, tensors_of
from twoaxis.verify.time import in_steps

NARROW, WIDE = 64, 128
DEPTHS = (6, 12, 24)


def cost_of(method: Any) -> Any:
    """What a stream or an operator says that it costs."""
    return method.cost()


@claim("costs", "parameter groups", ["depth"])
def groups(subject: StreamSubject) -> Measured:
    """Every parameter is in exactly one group of `parameter_groups`, and a group names nothing else."""
    found = []
    for run in subject.runs():
        names = [name for name, _ in run.stream.named_parameters()]
        grouped = [name for group in run.stream.parameter_groups() for name in group.names]
        found += [f"{run.where}: {n} is in {grouped.count(n)} groups" for n in names if grouped.count(n) != 1]
        found += [f"{run.where}: a group names {n}, which is no parameter" for n in set(grouped) - set(names)]
    return faults(found)


@claim("costs", "cost: parameters")
def parameters(subject: Subject) -> Measured:
    """The counted parameters are the numbers the module learns."""
    found = []
    for run in subject.runs():
        said, there = cost_of(run.method).parameters, sum(p.numel() for p in run.method.parameters())
        found += [f"{run.where}: {said} are counted, the module has {there}"] if said != there else []
    return faults(found)


def _slope(measure: Callable[[int, int], float]) -> float:
    """How `measure(tokens, width)` grows per token, between two widths."""
    wide, narrow = ((measure(16, width) - measure(8, width)) / 8 for width in (WIDE, NARROW))
    return wide - narrow


@claim("costs", "cost: flops", ["depth"])
@torch.no_grad()
def flops(subject: StreamSubject) -> Measured:
    """The stated operations and the plain additions, against those counted inside open, read, write and close.

    Conventions differ by an operation here and there (does the first term of a sum count as an addition?), hence a
    bound of a quarter.
    """
    errors = {}
    for layout in ("sequential", "parallel"):
        narrow, wide = methods = [subject.stream(layout, width=width) for width in (NARROW, WIDE)]
        said = cost_of(wide).flops - cost_of(narrow).flops + (WIDE - NARROW) * len(wide.sites)
        counted = _slope(lambda tokens, width, pair=methods: _operations(pair[width == WIDE], tokens))
        errors[layout] = abs(counted / said - 1)
    return worst(errors, 0.25)


def _operations(method: Stream, tokens: int) -> int:
    """Operations of the stream itself on `tokens` tokens."""
    x, count = torch.ones(1, tokens, method.layout.width, dtype=torch.float64), Meter(record=False)
    with count:
        method.close(
            visit(method, method.open(x), method.sites, lambda site, seen: Applied(seen._replace(aux=None), x))
        )
    return count.flops


@claim("costs", "cost: live", ["depth"])
@torch.no_grad()
def live(subject: StreamSubject) -> Measured:
    """The live numbers against those the state holds at its most, distinct storage counted once.

    Derived state, which pack leaves out and unpack rebuilds, does not count. So live is at least what pack gives at
    any boundary and at most what the state holds anywhere; where between blocks the state holds no more than pack
    gives, nothing is derived and it is exactly that most.
    """
    found = []
    for layout in ("sequential", "mixers", "parallel"):
        methods = {width: subject.stream(layout, width=width) for width in (NARROW, WIDE)}
        sizes = {(w, tokens): _holdings(method, tokens) for w, method in methods.items() for tokens in (8, 16)}

        def slope(site: int, which: int, sizes: Any = sizes) -> float:
            return _slope(lambda count, size: sizes[size, count][site][which])

        sites = methods[WIDE].layout.sites
        held = max(slope(site.index, 0) for site in sites)
        packs = {site.index: slope(site.index, 1) for site in sites if site.first}
        packed, derived = max(packs.values()), any(size != slope(index, 0) for index, size in packs.items())
        said = cost_of(methods[WIDE]).live - cost_of(methods[NARROW]).live
        if not packed <= said <= held or (not derived and said != held):
            low, high, says = (n / (WIDE - NARROW) for n in (packed if derived else held, held, said))
            found.append(f"{layout}: {says:g} vectors are counted, the state holds {low:g} to {high:g}")
    return faults(found)


def _holdings(method: Stream, tokens: int) -> list[tuple[int, int]]:
    """Numbers in the state before each site and, between blocks, in what pack gives."""
    rows: list[tuple[int, int]] = []
    draws = torch.Generator().manual_seed(0)

    def look(site: Site, state: Any, seen: Seen | None) -> None:
        packed = method.pack(state) if site.first else ()
        rows.append((storage_bytes(tensors_of(state.value)) // 8, storage_bytes(packed) // 8))

    def act(site: Site, seen: Seen) -> Applied:
        return Applied(seen._replace(aux=None), torch.randn(seen.x.shape, generator=draws, dtype=seen.x.dtype))

    x = torch.randn(1, tokens, method.layout.width, generator=draws, dtype=torch.float64)
    look(method.layout.out, visit(method, method.open(x), method.sites, act, look), None)
    return rows


@claim("costs", "cost: kept")
@torch.no_grad()
def kept(subject: Subject) -> Measured:
    """The counted memory is what is remembered between tokens, in a storage that is not much larger."""
    found = []
    for where, stepper in subject.steppers():
        if where not in CHANNELS and subject.axis == "sequence":
            continue  # the memory of a decoder is more than the mixer's
        _, past = in_steps(stepper, x := stepper.inputs(subject.seed), (3, 1, x.shape[1] - 4))
        said, held = cost_of(getattr(stepper.module, "stream", stepper.module)).kept, stepper.kept(past)
        stored = storage_bytes(t for ring in stepper.rings(past) for piece in ring.pieces for t in piece) // 16
        found += [f"{where}: {said} are counted, {held} are kept"] if said != held else []
        found += [f"{where}: {held} numbers are kept in a storage of {stored}"] if stored > 3 * max(held, 16) else []
    return faults(found)


@claim("costs", "memory grows linearly with depth", ["depth"])
def memory_growth(subject: StreamSubject) -> Measured:
    """What the backward pass remembers grows linearly in depth: the exponent over 6, 12 and 24 blocks.

    Distinct storages count once, and only what grows with tokens and width: weights are remembered anyway, and the
    small numbers a read keeps per source are no vectors.
    """
    sizes = [_slope(lambda tokens, width, n=n: _remembered(subject, n, tokens, width)) for n in DEPTHS]
    xs, ys = [math.log(n) for n in DEPTHS], [math.log(max(size, 1e-9)) for size in sizes]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    exponent = covariance / sum((x - mean_x) ** 2 for x in xs)
    vectors = ", ".join(f"{size / (WIDE - NARROW):.4g}" for size in sizes)
    return Measured(exponent, 1.15, f"vectors remembered per token at {DEPTHS} blocks: {vectors}")


def _remembered(subject: StreamSubject, blocks: int, tokens: int, width: int) -> int:
    """Numbers in the distinct storages saved for the backward pass of the stream and cheap sub-layers."""
    method = subject.stream((("attention", "mlp"),) * blocks, width=width, dtype=torch.float32)
    run = compose(method, [(site.kind, None, _cheap) for site in method.sites])
    held: list[Tensor] = []  # held on to, so that no address is used twice

    def keep(tensor: Tensor) -> Tensor:
        held.append(tensor)
        return tensor

    generator = torch.Generator().manual_seed(subject.seed)
    x = torch.randn(1, tokens, width, generator=generator).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run(x)
    return storage_bytes(held) // 4


def _cheap(*ways: Tensor) -> Tensor:
    return torch.tanh(sum(ways[1:], ways[0]))
