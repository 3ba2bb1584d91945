"""Comparison folders with synthetic curves: everything a report reads, without training."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from twoaxis.base.files import JsonLines, write_json
from twoaxis.comparison.options import Size
from twoaxis.comparison.plan import Plan, Row, data_label
from twoaxis.model.variant import Contender, make_contender
from twoaxis.training.config import TrainConfig
from twoaxis.training.folder import LOG, RESULT, RUN
from twoaxis.training.result import Result

TOKENS = 2_000_000
ALPHA, L_INF, SCALE = 0.12, 1.8, 150.0
"""The law of the fake losses."""


class Fake(NamedTuple):
    """A contender and what is planted in it."""

    spelling: str
    gain: float = 0.0
    """Subtracted from its loss."""
    noise: float = 0.004
    """Of its own, beside what it shares with the baseline at a seed."""
    parameters: float = 1.0
    flops: float = 1.0
    speed: float = 1.0
    memory: float = 1.0
    diverged: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    mixer: str | None = None


STANDARD = Fake("standard")
FAKES = (
    STANDARD,
    Fake("attention_residuals:block_size=4", 0.060, parameters=1.001, flops=1.02, speed=0.91, memory=1.12),
    Fake("hyper_connections:streams=4", 0.005, noise=0.02, parameters=1.01, flops=1.05, speed=0.62, memory=1.9),
    Fake("deep_delta:value_channels=4,label=write only <b>", -0.05, flops=1.1, speed=0.7, memory=1.4, diverged=(2,)),
    Fake("muddformer", 0.031, parameters=1.08, flops=1.09, speed=0.55, memory=1.7, missing=(3,)),
    Fake("standard", 0.045, parameters=1.02, flops=1.03, speed=0.85, memory=1.05, mixer="short_swa:window=4"),
)


def law(compute: float) -> float:
    return L_INF + SCALE * compute**-ALPHA


def make_fake(
    folder: Path,
    fakes: tuple[Fake, ...] = FAKES,
    *,
    seeds: tuple[int, ...] = (0, 1, 2, 3),
    data: tuple[tuple[str, ...], ...] = (("stdlib",),),
    sizes: tuple[str, ...] = ("nano",),
    match: Any = "tokens",
    rates: tuple[float, ...] = (2e-3,),
    spread: float = 0.03,
    seed: int = 0,
    held_out: int = 0,
    until: Any = None,
    checks: tuple[str, ...] = (),
) -> Path:
    """Write a comparison folder.

    The final loss is the law's at the baseline's compute, less what is planted, plus noise of the seed (shared by all
    contenders, `spread` wide) and of the run; each of `held_out` rows has noise of its own besides. Tasks end with an
    accuracy that falls with the loss. Each size has four times the operations per token of the one before.
    """
    generator = np.random.default_rng(seed)
    base = TrainConfig(context=256, batch=16, tokens=TOKENS, eval_examples=64)
    contenders = tuple(make_contender(fake.spelling, fake.mixer) for fake in fakes)
    plan = Plan(
        base=base,
        contenders=contenders,
        baseline=contenders[0].label,
        data=data,
        sizes=tuple(Size(label=name, preset="nano") for name in sizes),
        seeds=seeds,
        match=match,
        lrs=rates,
        until=until,
        checks=checks,
    )
    rows = []
    for sources in data:
        for number, size in enumerate(sizes):
            shared = dict(zip(seeds, generator.normal(size=len(seeds)) * spread, strict=True))
            for fake, contender in zip(fakes, contenders, strict=True):
                row = _row(fake, contender, sources, size, number, match, rates)
                rows.append(row)
                for one in seeds:
                    if one not in fake.missing:
                        place = folder / row.folder / f"lr-{row.lr!r}" / f"seed-{one}"
                        task = sources[0].startswith("task:")
                        _run(place, row, fake, number, one, shared[one], generator, task, held_out)
    about = {
        "data": {data_label(d): {"tokens": 3_550_000} for d in data},
        "versions": {"twoaxis": "0.1.0", "python": "3.11.2", "torch": "2.13.0", "transformers": "5.22.2"},
        "hardware": {"cpu": "Fake CPU"},
        "hardware_line": "2 cores of a Fake CPU <2.1 GHz>, 24 GB, no GPU",
        "ngrams": {data_label(d): {s: {"unigram": 7.1, "bigram": 5.6, "tokens": 2e6} for s in sizes} for d in data},
        "commands": ["twoaxis compare --stream attention_residuals --seeds 4 --out fake"],
    }
    dataclasses.replace(plan, rows=tuple(rows), about=about).save(folder)
    return folder


def _row(
    fake: Fake, contender: Contender, sources: tuple[str, ...], size: str, number: int, match: str, rates: Any
) -> Row:
    share = {"tokens": 1.0, "flops": 1 / fake.flops, "time": fake.speed}[match] * contender.train.get("budget", 1)
    steps = round(TOKENS * share / 4096)
    losses: dict[str, float | None] = {}
    if len(rates) > 1:
        losses = {repr(rate): 4.0 + 0.01 * abs(math.log(rate / rates[0])) for rate in rates}
    return Row(
        data=data_label(sources),
        size=size,
        contender=contender.key,
        steps=steps,
        tokens=steps * 4096,
        parameters=round(1_100_000 * 3**number * fake.parameters),
        flops_per_token=round(8_000_000 * 4**number * fake.flops),
        tokens_per_second=13_000 / 4**number * fake.speed if match == "time" else None,
        lr=rates[0],
        lr_losses=losses,
        lr_edge=len(rates) > 1,
    )


def _run(
    place: Path, row: Row, fake: Fake, number: int, seed: int, shared: float, generator: Any, task: bool, held_out: int
) -> None:
    end = law(TOKENS * 8_000_000 * 4**number) - fake.gain + shared + generator.normal() * fake.noise
    rate = 13_000 / 4**number * fake.speed * (1 + 0.02 * generator.normal())
    place.mkdir(parents=True)
    write_json(place / RUN, {"config": {"seed": seed}, "data": {"name": row.data}})
    log = JsonLines(place / LOG)
    diverged = seed in fake.diverged
    for part in range(1, 11 if not diverged else 4):
        tokens = row.tokens * part / 10
        loss = end + 1.1 * (part / 10) ** -0.4 - 1.1
        common = {"step": round(row.steps * part / 10), "tokens": tokens, "flops": tokens * row.flops_per_token}
        log.append(common | {"seconds": tokens / rate, "loss": loss + 0.1, "lr": row.lr})
        log.append(common | {"seconds": tokens / rate, "held_out_loss": loss})
    # An answer right by chance in a tenth of the cases, and in all of them when the loss is small.
    accuracy = round((0.1 + 0.9 / (1 + math.exp(8 * (end - 2.6)))) * 64) / 64
    result = Result(
        status="diverged" if diverged else "finished",
        steps=row.steps,
        tokens=row.tokens,
        flops=float(row.tokens) * row.flops_per_token,
        seconds=row.tokens / rate,
        tokens_per_second=rate,
        parameters=row.parameters,
        peak_memory=round(300e6 * 2**number * fake.memory),
        loss=None if diverged else end,
        row_losses=None
        if diverged or not held_out
        else tuple(end + 0.04 / math.sqrt(2) * generator.normal(size=held_out)),
        bits_per_byte=None if diverged or task else end / math.log(2) / 3.1,
        accuracy=None if diverged or not task else accuracy,
        chance=0.1 if task else None,
        train_loss=None if diverged else end - 0.1,
        weights=None,
        message="the loss is not a number at step 120" if diverged else "",
    )
    write_json(place / RESULT, result.to_dict())
