"""Claims along depth: what reaches what, weights and sources, and placement."""

from __future__ import annotations

import torch
from torch import Tensor

from twoaxis.depth.site import OUT, Site
from twoaxis.depth.stream import Applied, Seen, Stream
from twoaxis.depth.walk import apply_nothing, visit
from twoaxis.verify.claim import claim, deviation
from twoaxis.verify.gradients import rows_at_fault
from twoaxis.verify.subject import LAYOUTS, Run, StreamSubject, runs

PLACEMENTS = ("attention", "0", "1-2/mlp+out", "0,2/attention+mlp", "1", "mlp+parallel", "out", "mixer+parallel")
"""Some sites on, some off, for three blocks and more: alone, at both ends, in the middle, the head's read alone."""


def ways_of(seen: Seen) -> dict[str, Tensor]:
    """The ways of a read that are there."""
    return {name: way for name in ("x", "q", "k", "v") if (way := getattr(seen, name)) is not None}


@claim("depth", "depth: every increment and the embedding arrive", ["depth"], over=runs())
def arrivals(run: Run) -> list[str]:
    """What must reach what along depth, by gradients, with increments that are free of the reads.

    The first read depends on the embedding, the out read on the last increment, and each increment is seen by some
    later read. A method with neutral parameters passes the embedding on to the out read, because the plain residual
    does. A site that names the embedding among its sources depends on it. Nothing depends on later increments.
    """
    found, method, x = [], run.method, run.input(grad=True)
    free = [run.input(offset=20 + site.index, grad=True) for site in method.sites]
    reads = _free_reads(method, x, free)
    touched = [depends(read, [x, *free]) for read in reads]
    out = method.layout.out.index
    if not touched[0][0]:
        found.append("the first read does not depend on the embedding")
    if method.neutral != "none" and not touched[out][0]:
        found.append("the out read does not depend on the embedding, the plain residual does")
    if not touched[out][out]:
        found.append("the out read does not depend on the last increment")
    for i, site in enumerate(method.layout.sites):
        if "embedding" in method.sources(site) and not touched[i][0]:
            found.append(f"site {i} names the embedding as a source and does not depend on it")
        if site.kind != OUT and not any(row[i + 1] for row in touched[i + 1 :]):
            found.append(f"no later read depends on the increment of site {i}")
    changed = [t if s.index < 2 else t + 1.0 for s, t in zip(method.sites, free, strict=True)]
    pairs = zip(reads[:3], _free_reads(method, x, changed)[:3], strict=True)
    later = [i for i, (before, after) in enumerate(pairs) if deviation(after, before) > 0]
    return found + [f"the read of site {i} depends on later increments" for i in later]


def _free_reads(method: Stream, x: Tensor, increments: list[Tensor]) -> list[Tensor]:
    """All ways of every read, side by side, where increments do not depend on reads."""
    reads: list[Tensor] = []

    def act(site: Site, seen: Seen) -> Applied:
        reads.append(torch.cat(list(ways_of(seen).values()), dim=-1))
        return apply_nothing(method, seen, increments[site.index])

    out = method.close(visit(method, method.open(x), method.sites, act))
    return [*reads, out]


def depends(read: Tensor, leaves: list[Tensor]) -> list[bool]:
    """Whether a read depends on each leaf, by gradients."""
    probe = torch.randn(read.shape, generator=torch.Generator().manual_seed(0), dtype=read.dtype)
    found = torch.autograd.grad(read, leaves, probe, allow_unused=True, retain_graph=True)
    return [grad is not None and bool(grad.abs().max() > 0) for grad in found]


@claim("depth", "weights match sources", ["depth"], over=runs())
@torch.no_grad()
def weights(run: Run) -> list[str]:
    """Where `weights` says what a site reads, it is (B, T, W, S): finite, one column per name of `sources`."""
    found, method, x = [], run.method, run.input()
    steps, last = run.steps(x)
    for site, state in [*((step.site, step.before) for step in steps), (method.layout.out, last)]:
        said, names = method.weights(state, site), method.sources(site)
        if said is None:
            continue
        if said.dim() != 4 or said.shape[:2] != x.shape[:2] or said.shape[-1] != len(names):
            found.append(f"site {site.index} has weights {tuple(said.shape)} for {len(names)} sources")
        elif not torch.isfinite(said).all():
            found.append(f"site {site.index} has weights that are not finite")
    return found


@claim("depth", "placement: none = standard", ["depth"], over=runs(placement="none"), bound=1e-12)
@torch.no_grad()
def placed_nowhere(run: Run) -> float | list[str]:
    """placement="none" equals the `standard` stream and has no parameters."""
    if left := sum(1 for _ in run.method.parameters()):
        return [f"{left} parameters are left where every site is switched off"]
    plain = StreamSubject("standard", {}, run.seed).run(run.where)
    return deviation(run(run.input()), plain(run.input()))


@claim("depth", "placement: anywhere", ["depth"])
def placed_anywhere(subject: StreamSubject) -> list[str]:
    """Any placement runs to finite numbers; a switched-off site has no parameters: all there are learn or are dead."""
    found = []
    for i, placement in enumerate(PLACEMENTS):
        for layout in list(LAYOUTS)[i % 2 :: 2]:
            run = subject.run(layout, placement=placement)
            wrong = rows_at_fault(run.method, [run(run.input(offset=10))])
            found += [f"{layout}, {placement!r}: {fault}" for fault in wrong]
            if not torch.isfinite(run(run.input())).all():
                found.append(f"{layout}, {placement!r}: the output is not finite")
    return found
