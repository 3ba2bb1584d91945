"""What a stream says it costs, against what is counted while it runs; and memory against depth.

Counts are slopes: twice the tokens and twice the width, so that work on weights and width-independent work, which
`Cost` leaves out, leave no trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from twoaxis.base.meter import Meter
from twoaxis.depth.compose import compose
from twoaxis.depth.site import OUT
from twoaxis.depth.stream import Stream
from twoaxis.model.decoder import Decoder
from twoaxis.verify.case import LAYOUTS, Case, tensors_in
from twoaxis.verify.properties import sample_tokens
from twoaxis.verify.report import Outcome
from twoaxis.verify.values import decoders

NARROW, WIDE = 64, 128
FLOPS_BOUND = 0.25
DEPTHS = (6, 12, 24)
EXPONENT_BOUND = 1.15


def parameters(case: Case) -> Outcome:
    """`cost().parameters` is the number of numbers the module learns."""
    faults = []
    for layout in LAYOUTS:
        made = case.stream(layout)
        said, there = made.cost().parameters, sum(p.numel() for p in made.parameters())
        if said != there:
            faults.append(f"{layout}: cost() says {said}, the module has {there}")
    return Outcome(len(faults), detail="; ".join(faults[:2]))


def groups(case: Case) -> Outcome:
    """Every parameter is in exactly one group of `parameter_groups`, and a group names nothing else."""
    faults = []
    for layout in LAYOUTS:
        made = case.stream(layout)
        names = [name for name, _ in made.named_parameters()]
        grouped = [name for group in made.parameter_groups() for name in group.names]
        faults += [f"{layout}: {n} is in {grouped.count(n)} groups" for n in names if grouped.count(n) != 1]
        faults += [f"{layout}: a group names {n}, which is no parameter" for n in set(grouped) - set(names)]
    return Outcome(len(faults), detail="; ".join(faults[:3]))


def _slope(measure: Callable[[int, int], float]) -> float:
    """How `measure(tokens, width)` grows per token, between two widths."""
    wide, narrow = ((measure(16, width) - measure(8, width)) / 8 for width in (WIDE, NARROW))
    return wide - narrow


@torch.no_grad()
def flops(case: Case) -> Outcome:
    """`cost().flops` and the plain additions, against the operations counted inside open, read, write and close.

    Conventions differ by an operation here and there (does the first term of a sum count as an addition?), hence a
    bound of a quarter.
    """
    worst = 0.0
    for layout in ("sequential", "parallel"):
        counted = _slope(lambda tokens, width, layout=layout: _count(case.stream(layout, width=width), tokens, case))
        narrow, wide = (case.stream(layout, width=width) for width in (NARROW, WIDE))
        said = wide.cost().flops - narrow.cost().flops + (WIDE - NARROW) * len(wide.sites)
        worst = max(worst, abs(counted / said - 1), key=abs)
    return Outcome(worst, FLOPS_BOUND)


def _count(made: Stream, tokens: int, case: Case) -> int:
    """Operations of the stream itself on `tokens` tokens."""
    count, width = Meter(record=False), made.layout.width
    x = case.embedding(batch=1, time=tokens, width=width)
    with count:
        state = made.open(x)
    for site in made.sites:
        with count:
            seen = made.read(state, site)
        y = case.embedding(batch=1, time=tokens, width=width, offset=site.index)
        with count:
            state = made.write(state, site, y, seen, seen._replace(aux=None))
    with count:
        made.close(state)
    return count.flops


@torch.no_grad()
def live(case: Case) -> Outcome:
    """`cost().live` against the numbers the state holds at its most, distinct storage counted once.

    Derived state, which pack leaves out and unpack rebuilds, does not count. So `live` is at least what pack gives at
    any boundary and at most what the state holds anywhere; where between blocks the state holds no more than pack
    gives, nothing is derived and it is exactly that most.
    """
    faults = []
    for layout in ("sequential", "mixers", "parallel"):
        held, packed, derived = 0.0, 0.0, False
        (narrow, small), (wide, large) = (_holdings(case, layout, width) for width in (NARROW, WIDE))
        for (kept_a, sent_a), (kept_b, sent_b) in zip(small, large, strict=True):
            held = max(held, kept_b - kept_a)
            if sent_a is not None and sent_b is not None:
                packed = max(packed, sent_b - sent_a)
                derived |= sent_b - sent_a != kept_b - kept_a
        said = wide - narrow
        if not packed <= said <= held or (not derived and said != held):
            low, high, says = (n / (WIDE - NARROW) for n in (packed if derived else held, held, said))
            faults.append(f"{layout}: cost() says {says:g} vectors, the state holds {low:g} to {high:g}")
    return Outcome(len(faults), detail="; ".join(faults))


def _holdings(case: Case, layout: str, width: int) -> tuple[int, list[tuple[float, float | None]]]:
    """What `cost` says, and at each site the numbers per token in the state and, between blocks, in what pack gives."""
    made = case.stream(layout, width=width)
    rows = []
    for tokens in (8, 16):
        x, row = case.embedding(batch=1, time=tokens, width=width), []
        state = made.open(x)
        for site in made.layout.sites:
            row.append((_numbers(state.value), _numbers(made.pack(state)) if site.first else None))
            if site.kind != OUT:
                seen = made.read(state, site)
                y = case.embedding(batch=1, time=tokens, width=width, offset=site.index)
                state = made.write(state, site, y, seen, seen._replace(aux=None))
                del seen
        rows.append(row)
    slopes = [
        ((k2 - k1) / 8, None if s1 is None or s2 is None else (s2 - s1) / 8)
        for (k1, s1), (k2, s2) in zip(*rows, strict=True)
    ]
    return made.cost().live, slopes


def _numbers(value: Any) -> int:
    """Numbers in the distinct storages behind the tensors of `value`."""
    found = {t.untyped_storage().data_ptr(): t for t in tensors_in(value)}
    return sum(t.untyped_storage().nbytes() // t.element_size() for t in found.values())


@torch.no_grad()
def kept(case: Case) -> Outcome:
    """`cost().kept` is what the stream remembers between tokens, and it does not grow with the sequence."""
    (config, *_) = decoders(case)
    model = Decoder(config, case.seed).double()
    said, found = model.stream.cost().kept, []
    for length in (12, 24):
        past = model.start()
        for chunk in sample_tokens(case.seed, length).split(3, dim=1):
            _, past = model.step(chunk, past)
        found.append(sum(t.numel() for ring in past.stream for piece in ring.pieces for t in piece) // 2)
    detail = f"cost() says {said}, {found[0]} numbers are kept after 12 tokens and {found[1]} after 24"
    return Outcome(max(abs(said - n) for n in found), detail=detail)


def memory_growth(case: Case) -> Outcome:
    """What the backward pass remembers grows linearly in depth: the exponent over 6, 12 and 24 blocks.

    Distinct storages count once, and only what grows with tokens and width: weights are remembered anyway, and the
    small numbers a read keeps per source are no vectors.
    """
    sizes = [_slope(lambda tokens, width, blocks=blocks: _remembered(case, blocks, tokens, width)) for blocks in DEPTHS]
    logs = [math.log(n) for n in DEPTHS], [math.log(max(size, 1e-9)) for size in sizes]
    mean_x, mean_y = (sum(column) / len(column) for column in logs)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(*logs, strict=True))
    exponent = covariance / sum((x - mean_x) ** 2 for x in logs[0])
    vectors = ", ".join(f"{size / (WIDE - NARROW):.4g}" for size in sizes)
    return Outcome(exponent, EXPONENT_BOUND, f"vectors remembered per token at {DEPTHS} blocks: {vectors}")


def _remembered(case: Case, blocks: int, tokens: int, width: int) -> int:
    """Numbers in the distinct storages saved for the backward pass of the stream and cheap sub-layers."""
    made = case.stream((("attention", "mlp"),) * blocks, width=width, dtype=torch.float32)
    run = compose(made, [(s.kind, None, _cheap) for s in made.sites])
    held: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor  # held on to, so that no address is used twice
        return tensor

    x = case.embedding(batch=1, time=tokens, width=width).float().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run(x)
    return sum(t.untyped_storage().nbytes() // t.element_size() for t in held.values())


def _cheap(*ways: Tensor) -> Tensor:
    return torch.tanh(sum(ways[1:], ways[0]))
