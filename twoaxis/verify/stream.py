"""Check a stream: everything the library's own methods must pass, on anybody's.

Whether it is the method of its paper is checked as far as its `definition` says what that is. Where none is given, the
orientation of its mixing, for instance, is not known either, unless a declared neutral class depends on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from twoaxis.depth.registry import STREAMS
from twoaxis.depth.site import OUT
from twoaxis.depth.stream import Stream
from twoaxis.verify import budget, definition, purity, values
from twoaxis.verify.case import LAYOUTS, Case, registered
from twoaxis.verify.properties import label
from twoaxis.verify.report import Check, Outcome, Report, worst_of

C = TypeVar("C")


def declarations(case: Case) -> Outcome:
    """Name, options, neutral class and ways are what the contract asks for."""
    cls, faults = STREAMS.find(case.name), []
    if not isinstance(getattr(cls, "name", None), str):
        faults.append("the class has no `name`")
    config = getattr(cls, "Config", None)
    if not dataclasses.is_dataclass(config) or not config.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        faults.append("`Config` is not a frozen dataclass")
    for layout in LAYOUTS:
        made = case.stream(layout)
        if made.neutral not in ("bitwise", "rounding", "scale", "none"):
            faults.append(f"the neutral class is {made.neutral!r}")
        for site in made.sites:
            ways = made.ways(site)
            allowed = {"attention": ("x", "q", "k", "v"), "parallel": ("x", "q", "k", "v")}.get(site.kind, ("x",))
            if not ways or not set(ways) <= set(allowed) or len(set(ways)) != len(ways):
                faults.append(f"{layout}: a {site.kind} site has the ways {ways}")
        if made.ways(made.layout.out) != ("x",) and made.layout.out.kind == OUT:
            faults.append(f"{layout}: the out site has the ways {made.ways(made.layout.out)}")
    return Outcome(len(faults), detail="; ".join(faults[:3]))


def packs_anywhere(case: Case) -> Outcome:
    """Where some sites are switched off, packing still continues to the same output; two placements per variant."""
    numbers = (case.number, case.number + 3)
    placements = [values.PLACEMENTS[n % len(values.PLACEMENTS)] for n in numbers]
    found = {p: purity.packing(dataclasses.replace(case, number=1, placement=p)) for p in placements}
    placement, outcome = max(found.items(), key=lambda pair: pair[1].measured)
    return outcome._replace(detail=f"{placement!r}: {outcome.detail}")


STREAM_CHECKS: dict[str, Callable[[Case], Outcome | str]] = {
    "declarations": declarations,
    "definition: values and every gradient": definition.stream_equals_definition,
    "gradients: finite differences": definition.stream_finite_differences,
    "purity: a state reads the same twice": purity.reads_repeat,
    "purity: passes interleave": purity.passes_interleave,
    "purity: nothing is kept on the module": purity.module_unchanged,
    "purity: inputs and old states are untouched": purity.inputs_unchanged,
    "purity: deep copies continue": purity.deep_copies,
    "activation checkpointing": purity.checkpointing,
    "pack: continues after any block": purity.packing,
    "pack: structure depends on the site alone": purity.packed_structure,
    "misuse is refused": purity.misuse,
    "time: the past does not see the future": values.causal_in_time,
    "time: chunks = one pass": values.chunks,
    "time: documents and padding stay apart": values.documents,
    "depth: every increment and the embedding arrive": values.depth_dependence,
    "weights match sources": values.inspection,
    "start: every parameter is set": values.starts,
    "gradients: each parameter learns or is dead": values.learning,
    "dtypes": values.dtypes,
    "bfloat16 autocast": values.autocast,
    "neutral class": values.neutral_class,
    "blend: gate 0 = plain, gate 1 = the method": values.blend,
    "placement: none = standard": values.placed_nowhere,
    "placement: anywhere": values.placed_anywhere,
    "placement: packs anywhere": packs_anywhere,
    "parameter groups": budget.groups,
    "cost: parameters": budget.parameters,
    "cost: flops": budget.flops,
    "cost: live": budget.live,
    "cost: kept": budget.kept,
    "memory grows linearly with depth": budget.memory_growth,
}


def check_stream(
    subject: type[Stream] | str,
    variants: Sequence[Mapping[str, Any]] | None = None,
    *,
    seed: int = 0,
    compile: bool = False,
    only: Sequence[str] = (),
) -> Report:
    """Run every check on a stream, over its variants.

    Args:
        subject: a subclass of `Stream`, registered or not, or a registered name.
        variants: options to check it with; None is the class's own `variants`.
        seed: of parameters, inputs and sub-layers.
        compile: also compile it with `fullgraph=True` and compare outputs and gradients; slow.
        only: names of the checks to run, while one works on them; none named is all of them.
    """
    checks = chosen(STREAM_CHECKS, purity.compiles if compile else None, only)
    with registered(STREAMS, subject) as (name, cls):
        options = tuple(cls.variants if variants is None else variants)
        if not options:
            raise ValueError(f"{cls.__name__} has no variants to check it with; {{}} is one with the defaults")
        cases = [Case(name, dict(each), seed, number) for number, each in enumerate(options)]
        measured = tuple(run_check(title, fn, cases) for title, fn in checks.items())
    return Report(cls.__name__, tuple(label(cls.__name__, each) for each in options), measured)


COMPILE = "torch.compile(fullgraph=True)"


def chosen(table: Mapping[str, C], compiled: C | None, only: Sequence[str]) -> dict[str, C]:
    """The checks to run: those of the table, compiling if asked for, or the ones named."""
    checks = dict(table) | ({} if compiled is None else {COMPILE: compiled})
    for name in only:
        if name not in checks:
            raise ValueError(f"there is no check {name!r}; the checks are {', '.join(checks)}")
    return {name: fn for name, fn in checks.items() if not only or name in only}


def run_check(title: str, fn: Callable[[Any], Outcome | str], cases: Sequence[Any]) -> Check:
    """One check over all variants; an exception is a failure that names it, a text says why it does not apply."""
    outcomes, absent = [], ""
    for case in cases:
        with torch.random.fork_rng(devices=()):
            try:
                outcome = fn(case)
            except Exception as error:
                first = str(error).strip().splitlines()[:1] or [""]
                outcome = Outcome(float("inf"), 0.0, f"raises {type(error).__name__}: {first[0]}")
        if isinstance(outcome, str):
            absent = outcome
        else:
            outcomes.append((label("", case.options).lstrip(":") or "defaults", outcome))
    return worst_of(title, outcomes, absent)
