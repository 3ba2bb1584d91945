"""Claims about costs: what a method says it costs, against what is counted while it runs; and memory against depth.

Counts are second differences, in tokens and in width, so that work on weights and width-independent work, which `Cost`
leaves out, cancel.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from twoaxis.base.meter import storage_bytes
from twoaxis.depth.compose import compose
from twoaxis.depth.counts import count_flops, count_kept, count_live, on_meta
from twoaxis.verify.claim import Result, claim, random_tensors
from twoaxis.verify.subject import CHANNELS, Run, StreamSubject, Subject, runs, tensors_of

NARROW, WIDE = 64, 128
DEPTHS = (8, 16)


@claim("costs", "parameter groups", ["depth"], over=runs())
def groups(run: Run) -> list[str]:
    """Every parameter is in exactly one group of `parameter_groups`, and a group names nothing else."""
    names = [name for name, _ in run.method.named_parameters()]
    grouped = [name for group in run.method.parameter_groups() for name in group.names]
    found = [f"{name} is in {grouped.count(name)} groups" for name in names if grouped.count(name) != 1]
    return found + [f"a group names {name}, which is no parameter" for name in set(grouped) - set(names)]


@claim("costs", "cost: flops", ["depth"], bound=0.25)
@torch.no_grad()
def flops(subject: StreamSubject) -> dict[str, float]:
    """The stated operations and the plain additions, against those counted inside open, read, write and close.

    Conventions differ by an operation here and there (does the first term of a sum count as an addition?), hence a
    bound of a quarter.
    """
    errors = {}
    for layout in ("sequential", "parallel"):
        narrow, wide = (on_meta(subject.stream(layout, width=width)) for width in (NARROW, WIDE))
        counts = (lambda stream: stream.flops()), count_flops
        said, counted = (of(wide) - of(narrow) + (WIDE - NARROW) * len(wide.sites) for of in counts)
        errors[layout] = abs(counted / said - 1)
    return errors


@claim("costs", "cost: live", ["depth"])
@torch.no_grad()
def live(subject: StreamSubject) -> list[str]:
    """The live numbers per token against those that the states of a pass hold, distinct storage counted once.

    Derived state, which pack leaves out and unpack rebuilds, does not count. So live is at least what pack gives at
    any boundary and at most what a state holds anywhere; where between blocks the state holds no more than pack
    gives, nothing is derived and it is exactly that most.
    """
    narrow, wide = (subject.run("uneven", width=width) for width in (NARROW, WIDE))
    sizes = [_holdings(run, tokens) for run in (wide, narrow) for tokens in (16, 8)]
    slopes = (sizes[0] - sizes[1] - sizes[2] + sizes[3]) // 8
    held, packed = slopes.amax(0).tolist()
    exact = bool(((slopes[:, 1] == 0) | (slopes[:, 1] == slopes[:, 0])).all())
    said = count_live(on_meta(wide.method)) - count_live(on_meta(narrow.method))
    if said == held if exact else packed <= said <= held:
        return []
    vectors = [n / (WIDE - NARROW) for n in (said, held if exact else packed, held)]
    return ["{:g} vectors are counted, the state holds {:g} to {:g}".format(*vectors)]


def _holdings(run: Run, tokens: int) -> Tensor:
    """(sites, 2) numbers in the state before each site and, between blocks, in what pack gives."""
    steps, last = run.steps(run.input(batch=1, time=tokens))
    rows = []
    for state in (*(step.before for step in steps), last):
        packs = run.method.pack(state) if run.method.layout.sites[state.index].first else ()
        rows.append([storage_bytes(tensors_of(held)) // 8 for held in (state.value, packs)])
    return torch.tensor(rows)


@claim("costs", "cost: kept")
@torch.no_grad()
def kept(subject: Subject) -> list[str]:
    """The counted memory is what is remembered between tokens, in a storage that is not much larger."""
    found = []
    for where, stepper in subject.steppers():
        if where not in CHANNELS and subject.axis == "sequence":
            continue  # the memory of a decoder is more than the mixer's
        _, past = stepper.in_steps(x := stepper.inputs(), (3, 1, x.shape[1] - 4))
        model, held = stepper.module, stepper.kept(past)
        said = count_kept(on_meta(model.stream)) if subject.axis == "depth" else model.cost().kept
        stored = storage_bytes(tensors_of(past if subject.axis == "sequence" else past.stream)) // 16
        found += [f"{where}: {said} are counted, {held} are kept"] if said != held else []
        found += [f"{where}: {held} numbers are kept in a storage of {stored}"] if stored > 3 * max(held, 16) else []
    return found


@claim("costs", "memory grows linearly with depth", ["depth"])
def memory_growth(subject: StreamSubject) -> Result:
    """What the backward pass remembers grows linearly in depth: the exponent from 8 to 16 blocks.

    Distinct storages count once, and only what grows with tokens and width: weights are remembered anyway, and the
    small numbers a read keeps per source are no vectors.
    """
    corners = [[_remembered(subject, n, *size) for size in itertools.product((16, 8), (WIDE, NARROW))] for n in DEPTHS]
    sizes = [(a - b - c + d) / 8 for a, b, c, d in corners]
    exponent = math.log2(max(sizes[1], 1e-9) / max(sizes[0], 1e-9))
    vectors = ", ".join(f"{size / (WIDE - NARROW):.4g}" for size in sizes)
    return Result(exponent, 1.15, f"vectors remembered per token at {DEPTHS} blocks: {vectors}")


def _remembered(subject: StreamSubject, blocks: int, tokens: int, width: int) -> int:
    """Numbers in the distinct storages saved for the backward pass of the stream and cheap sub-layers."""
    method = subject.stream((("attention", "mlp"),) * blocks, width=width, dtype=torch.float32)
    cheap = functools.partial(_cheap, method.kv_heads or 1)
    run = compose(method, [(site.kind, None, cheap) for site in method.sites])
    held: list[Tensor] = []  # held on to, so that no address is used twice
    x = random_tensors(subject.seed, (1, tokens, width))[0].float().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda tensor: tensor):
        run(x)
    return storage_bytes(held) // 4


def _cheap(heads: int, *ways: Tensor, kv: Callable[..., Any] | None = None) -> Tensor:
    y = torch.tanh(sum(ways[1:], ways[0]))
    if kv is None:
        return y
    by_heads = [y.flip(-1).unflatten(-1, (heads, -1)) for _ in range(3)]
    return torch.tanh(kv(*by_heads)[1].flatten(-2))
