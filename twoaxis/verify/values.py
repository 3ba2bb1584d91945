"""The numbers: what depends on what along time and depth, gradients, dtypes, neutral class, Blend and placement."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from twoaxis.depth.site import OUT
from twoaxis.depth.stream import Stream
from twoaxis.model.config import DecoderConfig
from twoaxis.verify.case import BATCH, LAYOUTS, TIME, Case, toys, walk, ways_of
from twoaxis.verify.certificate import deviation
from twoaxis.verify.gradients import dead_rows, row_faults, row_gradients
from twoaxis.verify.properties import (
    NEUTRAL_BOUND,
    SMALL,
    blend_deviations,
    build,
    causality_deviation,
    chunking_deviation,
    neutral_deviation,
    sample_tokens,
)
from twoaxis.verify.report import Outcome
from twoaxis.window import document_reach, padding_reach

PLACEMENTS = ("attention", "0", "1-2/mlp+out", "0,2/attention+mlp", "1", "mlp+parallel", "out", "mixer+parallel")
"""Some sites on, some off, for three blocks and more: alone, at both ends, in the middle, the head's read alone."""


def decoders(case: Case) -> list[DecoderConfig]:
    """Small decoders around the stream: sequential, parallel, and with a mixer at a site of its own."""
    base = dataclasses.replace(SMALL, stream=case.name, stream_options=dict(case.options))
    mixer: dict[str, Any] = {"mixer": "short_swa", "mixer_options": {"window": 3, "heads": 2, "start": "normal"}}
    return [base, dataclasses.replace(base, block="parallel"), dataclasses.replace(base, **mixer)]


@torch.no_grad()
def causal_in_time(case: Case) -> Outcome:
    """A changed token changes no logit before it."""
    return Outcome(max(causality_deviation(config, case.seed) for config in decoders(case)), 1e-13)


@torch.no_grad()
def chunks(case: Case) -> Outcome:
    """A prompt in chunks of any size, with the memory carried along, equals one pass."""
    configs = decoders(case) if case.first else decoders(case)[:1]
    return Outcome(max(chunking_deviation(config, case.seed) for config in configs), 1e-12)


@torch.no_grad()
def documents(case: Case) -> Outcome:
    """Packed documents equal separate ones, and left padding changes nothing of the tokens behind it."""
    worst = 0.0
    for config in decoders(case)[:1]:
        model, tokens = build(config, case.seed, perturb=0.1), sample_tokens(case.seed)
        marks = torch.tensor([0] * 5 + [1] * 3 + [2] * 4).expand(2, -1)
        packed = model(tokens, reach=document_reach(marks))
        apart = torch.cat([model(part) for part in tokens.split([5, 3, 4], dim=1)], dim=1)
        mask = torch.ones_like(tokens)
        mask[0, :4] = 0
        padded = model(tokens, reach=padding_reach(mask))
        worst = max(worst, deviation(packed, apart), deviation(padded[0, 4:], model(tokens[:1, 4:])[0]))
        worst = max(worst, deviation(padded[1], model(tokens[1:])[0]))
    return Outcome(worst, 1e-12)


def neutral_class(case: Case) -> Outcome:
    """At its neutral parameters the method is as plain as its class says; a class of none has no such parameters."""
    measured = []
    for config in decoders(case):
        kind = config.make_stream().neutral
        if kind == "none":
            try:
                config.make_stream().neutral_()
            except ValueError:
                continue
            return Outcome(1.0, detail="the neutral class is none but neutral_() raises no ValueError")
        with torch.no_grad():
            measured.append(Outcome(neutral_deviation(config, case.seed), NEUTRAL_BOUND[kind], f"declared {kind}"))
    return max(measured, key=lambda o: (not o.holds, o.measured), default=Outcome(0.0, detail="declared none"))


@torch.no_grad()
def blend(case: Case) -> Outcome:
    """To the last bit the decoder is the plain one behind closed gates, and the method's behind open ones."""
    pairs = [blend_deviations(config, case.seed) for config in decoders(case)]
    closed, opened = (max(column) for column in zip(*pairs, strict=True))
    return Outcome(max(closed, opened), detail=f"gate 0 differs by {closed:.2g}, gate 1 by {opened:.2g}")


@torch.no_grad()
def placed_nowhere(case: Case) -> Outcome:
    """placement="none" equals the `standard` stream and has no parameters."""
    worst = 0.0
    for layout in LAYOUTS:
        made = case.stream(layout, placement="none")
        left = sum(p.numel() for p in made.parameters())
        if left:
            return Outcome(float(left), 1e-12, f"{left} parameters are left where every site is switched off")
        plain = Case("standard", {}, case.seed).stream(layout)
        x = case.embedding()
        worst = max(worst, deviation(toys(made, case.seed)(x), toys(plain, case.seed)(x)))
    return Outcome(worst, 1e-12)


# Gradients.


def _row_gradients(case: Case, made: Stream, draws: int) -> dict[str, float]:
    """Gradients of every row over some random inputs and sub-layers."""
    runs = [(toys(made, case.seed + draw), case.embedding(offset=10 + draw)) for draw in range(draws)]
    return row_gradients(made, *(lambda run=run, x=x: run(x) for run, x in runs))


def learning(case: Case) -> Outcome:
    """Every row of every parameter gets a gradient or is named by `dead`, and what `dead` names gets none."""
    faults = []
    for layout in LAYOUTS:
        for perturb in (0.0, 0.1):
            made = case.stream(layout, perturb=perturb)
            rows = _row_gradients(case, made, 1 if perturb == 0 else 2)
            faults += [f"{layout}: {fault}" for fault in row_faults(rows, dead_rows(made), start=perturb == 0)]
    return Outcome(len(faults), detail="; ".join(faults[:3]))


def placed_anywhere(case: Case) -> Outcome:
    """Any placement runs to finite numbers; a switched-off site has no parameters: all there are learn or are dead."""
    faults = []
    for i, placement in enumerate(PLACEMENTS):
        for layout in list(LAYOUTS)[i % 2 :: 2]:
            made = case.stream(layout, placement=placement, perturb=0.1)
            rows = _row_gradients(case, made, 1)
            faults += [f"{layout}, {placement!r}: {fault}" for fault in row_faults(rows, dead_rows(made))]
            if not torch.isfinite(case.run(made)(case.embedding())).all():
                faults.append(f"{layout}, {placement!r}: the output is not finite")
            if made.cost().parameters != sum(p.numel() for p in made.parameters()):
                faults.append(f"{layout}, {placement!r}: cost() counts {made.cost().parameters} parameters")
    return Outcome(len(faults), detail="; ".join(faults[:3]))


@torch.no_grad()
def starts(case: Case) -> Outcome:
    """reset_parameters sets every parameter, and to the same numbers for one generator."""
    faults = []
    for layout in LAYOUTS:
        made, values = case.stream(layout), []
        for _ in range(2):
            for parameter in made.parameters():
                parameter.fill_(float("nan"))
            made.reset_parameters(torch.Generator().manual_seed(case.seed))
            values.append({name: p.clone() for name, p in made.named_parameters()})
        for name, value in values[0].items():
            if not torch.isfinite(value).all():
                faults.append(f"{layout}: {name} is not set")
            elif not torch.equal(value, values[1][name]):
                faults.append(f"{layout}: {name} is drawn from another generator than the one given")
    return Outcome(len(faults), detail="; ".join(faults[:3]))


# Depth.


def depth_dependence(case: Case) -> Outcome:
    """What must reach what along depth, by gradients, with increments that are free of the reads.

    The first read depends on the embedding, the out read on the last increment, and each increment is seen by some
    later read. A method with neutral parameters passes the embedding on to the out read, because the plain residual
    does. A site that names the embedding among its sources depends on it. Nothing depends on later increments.
    """
    faults = []
    for layout in LAYOUTS:
        made = case.stream(layout, perturb=0.1)
        x = case.embedding(grad=True)
        free = [case.embedding(offset=20 + s.index, grad=True) for s in made.sites]
        reads = _free_reads(made, x, free)
        touched = [_touched(read, [x, *free]) for read in reads]
        out = made.layout.out.index
        if not touched[0][0]:
            faults.append(f"{layout}: the first read does not depend on the embedding")
        if made.neutral != "none" and not touched[out][0]:
            faults.append(f"{layout}: the out read does not depend on the embedding, the plain residual does")
        if not touched[out][out]:
            faults.append(f"{layout}: the out read does not depend on the last increment")
        for i, site in enumerate(made.layout.sites):
            if "embedding" in made.sources(site) and not touched[i][0]:
                faults.append(f"{layout}: site {i} names the embedding as a source and does not depend on it")
            if site.kind != OUT and not any(row[i + 1] for row in touched[i + 1 :]):
                faults.append(f"{layout}: no later read depends on the increment of site {i}")
        changed = [t if s.index < 2 else t + 1.0 for s, t in zip(made.sites, free, strict=True)]
        for index, (before, after) in enumerate(zip(reads[:3], _free_reads(made, x, changed)[:3], strict=True)):
            if deviation(after, before) > 0:
                faults.append(f"{layout}: the read of site {index} depends on later increments")
    return Outcome(len(faults), detail="; ".join(faults[:3]))


def _free_reads(made: Stream, x: Tensor, increments: list[Tensor]) -> list[Tensor]:
    """All ways of every read, side by side, where increments do not depend on reads."""
    state, reads = made.open(x), []
    for site in made.layout.sites:
        seen = made.read(state, site)
        reads.append(torch.cat(list(ways_of(seen).values()), dim=-1))
        if site.kind != OUT:
            held = seen._replace(aux=None)
            state = made.write(state, site, increments[site.index], seen, held)
    return reads


def _touched(read: Tensor, leaves: list[Tensor]) -> list[bool]:
    probe = torch.randn(read.shape, generator=torch.Generator().manual_seed(0), dtype=read.dtype)
    found = torch.autograd.grad(read, leaves, probe, allow_unused=True, retain_graph=True)
    return [grad is not None and bool(grad.abs().max() > 0) for grad in found]


@torch.no_grad()
def inspection(case: Case) -> Outcome:
    """Where `weights` says what a site reads, it is (B, T, W, S): finite, one column per name of `sources`."""
    faults = []
    for layout in LAYOUTS:
        run = case.run(case.stream(layout))
        made, steps = run.stream, list(walk(run, case.embedding()))
        for site, state in [(s.site, s.before) for s in steps] + [(made.layout.out, steps[-1].after)]:
            weights, names = made.weights(state, site), made.sources(site)
            if weights is None:
                continue
            if weights.dim() != 4 or weights.shape[:2] != (BATCH, TIME) or weights.shape[-1] != len(names):
                shape = tuple(weights.shape)
                faults.append(f"{layout}: site {site.index} has weights {shape} for {len(names)} sources")
            elif not torch.isfinite(weights).all():
                faults.append(f"{layout}: site {site.index} has weights that are not finite")
    return Outcome(len(faults), detail="; ".join(faults[:3]))


# Dtypes.

DTYPE_BOUND = {torch.float32: 1e-3, torch.bfloat16: 0.15}
"""How far an output may be from float64's, relative to its largest entry."""


@torch.no_grad()
def dtypes(case: Case) -> Outcome:
    """Reads keep the dtype of the embedding in float64, float32 and bfloat16, and stay near float64's numbers.

    In bfloat16 twice: with every parameter in bfloat16, and with those in float32 that `parameter_groups` keeps there.
    """
    faults, worst = [], 0.0
    for layout in case.layouts:
        exact = case.run(case.stream(layout))(case.embedding())
        for dtype, keeping in (
            (torch.float64, False),
            (torch.float32, False),
            (torch.bfloat16, False),
            (torch.bfloat16, True),
        ):
            made = case.stream(layout, dtype=dtype)
            for name in [n for group in made.parameter_groups() if group.float32 and keeping for n in group.names]:
                parameter = made.get_parameter(name)
                parameter.data = parameter.data.float()
            run, x = toys(made, case.seed, dtype), case.embedding().to(dtype)
            for taken in walk(run, x):
                for name, way in ways_of(taken.seen).items():
                    if way.dtype != dtype:
                        faults.append(f"{layout}: site {taken.site.index} reads {name} in {way.dtype} of {dtype}")
            out = run(x)
            if out.dtype != dtype or not torch.isfinite(out).all():
                faults.append(f"{layout}: the output is {out.dtype} of {dtype}, or not finite")
            if dtype in DTYPE_BOUND:
                worst = max(worst, deviation(out.double(), exact) / DTYPE_BOUND[dtype])
    return Outcome(float(1 + len(faults)) if faults else worst, 1.0, "; ".join(faults[:3]) or "in parts of the bound")


def autocast(case: Case) -> Outcome:
    """Under bfloat16 autocast output and gradients are finite, and the output near float32's."""
    worst = 0.0
    for layout in case.layouts:
        run = case.run(case.stream(layout, dtype=torch.float32)).float()
        x = case.embedding().float().requires_grad_()
        with torch.no_grad():
            exact = run(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = run(x)
        worst = max(worst, deviation(out.float(), exact))
        leaves = [x, *run.parameters()]
        found = torch.autograd.grad(out.float().square().sum(), leaves, allow_unused=True)
        if not all(torch.isfinite(g).all() for g in found if g is not None):
            return Outcome(float("inf"), DTYPE_BOUND[torch.bfloat16], f"{layout}: a gradient is not finite")
    return Outcome(worst, DTYPE_BOUND[torch.bfloat16])
