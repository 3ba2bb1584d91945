"""`python -m benchmarks.twins`: real runs whose answer is known, judged as `twoaxis compare` judges.

    twins       the plain residual against itself with other initial weights, in many small comparisons: nothing is
                there to be resolved, and one in twenty may be
    handicaps   the plain residual against itself with half the rate and with half the MLP, in several settings: what
                loses is to be resolved so
    speed       the throughput of a model and of its twin, as a comparison measures it: they are to be equal within 2%,
                and where they are not, "equal time" is to be marked

About half an hour on one core; `--only` takes one of them, and `--write-docs` puts the outcome into the page on
statistics.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import statistics
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.page import replace_between
from twoaxis.base.machine import hardware_line
from twoaxis.base.timer import Rounds
from twoaxis.comparison.budget import measure_speeds
from twoaxis.comparison.statistics import Difference, Sample, judge
from twoaxis.data.load import Data, load_data
from twoaxis.training.config import TrainConfig
from twoaxis.training.train import train

PAGE = Path(__file__).parent.parent / "docs" / "explanation" / "statistics.md"
MARKS = {
    part: (f"<!-- {part}: written by python -m benchmarks.twins --write-docs -->", f"<!-- end of {part} -->")
    for part in ("twins", "handicaps", "speed")
}
COMMON: dict[str, Any] = {"threads": 1, "save_model": False, "measure_memory": False, "eval_every": 10**6}
PICO: dict[str, Any] = COMMON | {"preset": "pico", "tokenizer": "bytes", "lr": 6e-3}
SMALL: dict[str, Any] = PICO | {"tokens": 24_000, "context": 64, "final_examples": 256}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "`make demo`": (
        PICO | {"tokens": 160_000},
        {"half the rate": {"lr": 3e-3}, "half the MLP": {"model": {"intermediate_size": 88}}},
    ),
    "`nano`, 2,048 BPE tokens, its defaults": (
        COMMON | {"preset": "nano", "tokens": 160_000},
        {"half the rate": {"lr": 2e-3}, "half the MLP": {"model": {"intermediate_size": 176}}},
    ),
}
"""Runs that are handicapped, and how."""
FAR = 1_000_000
"""Between the initial seeds of one comparison and the next."""


def sample(fields: Mapping[str, Any], data: Data, seeds: range, first: int | None = None) -> Sample:
    """Losses of runs with some fields.

    Args:
        fields: of the runs.
        data: what they train on.
        seeds: one run each.
        first: seed of the first one's initial weights; None is its own.
    """
    losses: dict[int, float | None] = {}
    rows: dict[int, tuple[float | None, ...]] = {}
    for number, seed in enumerate(seeds):
        own = seed if first is None else first + number
        with tempfile.TemporaryDirectory() as folder:
            result = train(dataclasses.replace(TrainConfig(**fields), seed=seed, init_seed=own), folder, data=data)
        losses[seed], rows[seed] = result.loss, result.row_losses or ()
    return Sample(losses, rows)


def twins(comparisons: int, seeds: int) -> list[Difference]:
    """Verdicts on the plain residual with other initial weights, on other seeds in every comparison."""
    data, found = load_data(TrainConfig(**SMALL)), []
    for number in range(comparisons):
        own = range(number * seeds, (number + 1) * seeds)
        pair = sample(SMALL, data, own), sample(SMALL, data, own, first=FAR * (number + 1))
        found.append(judge(pair[0], {"twin": pair[1]})["twin"])
        print(f"twin {number}: {found[-1].mean or math.nan:+.4f} {found[-1].verdict}", flush=True)
    return found


def handicaps(setting: str, seeds: int) -> dict[str, Difference]:
    """Verdicts on plain residuals that are trained or made worse."""
    fields, worse = SETTINGS[setting]
    data = load_data(TrainConfig(**fields))
    plain = sample(fields, data, range(seeds))
    return judge(plain, {name: sample({**fields, **more}, data, range(seeds)) for name, more in worse.items()})


def twins_text(comparisons: int, seeds: int) -> list[str]:
    """What came of the twins."""
    found = twins(comparisons, seeds)
    words = Counter(each.verdict for each in found)
    return [
        f"**Twins.** {comparisons} comparisons of the plain residual with itself under other initial weights, "
        f"{seeds} seeds each, {SMALL['tokens']:,} tokens of `pico`: "
        + ", ".join(f"{count} {word}" for word, count in words.items())
        + f"; the largest difference of means was {max(abs(each.mean or 0.0) for each in found):.3f} nats."
    ]


def handicaps_text(seeds: int) -> list[str]:
    """What came of the handicaps."""
    lines = [
        f"**Handicaps**, {seeds} seeds each:",
        "",
        "| setting | the plain residual with | difference | 95% interval | verdict |",
        "|---|---|---:|---|---|",
    ]
    for setting in SETTINGS:
        for name, each in handicaps(setting, seeds).items():
            mean, low, high = (math.nan if end is None else end for end in (each.mean, each.low, each.high))
            lines.append(f"| {setting} | {name} | {mean:+.3f} | {low:+.3f} to {high:+.3f} | {each.verdict} |")
            print(lines[-1], flush=True)
    return lines


def speed_twins(times: int, fields: Mapping[str, Any]) -> list[Rounds]:
    """Ratios, round by round, of the throughputs of two equal models, measured so many times."""
    run = TrainConfig(**fields)
    vocabulary = load_data(run).vocab_size
    found = []
    for _ in range(times):
        pair = measure_speeds({"plain": run, "twin": run}, vocabulary)
        found.append(pair["twin"].rate.over(pair["plain"].rate))
        print(f"twin's throughput {found[-1].median:.4f} ± {found[-1].spread:.4f}", flush=True)
    return found


def speed_text(times: int) -> list[str]:
    """What came of the twins' throughputs."""
    found = speed_twins(times, SETTINGS["`make demo`"][0])
    apart = [abs(each.median - 1) for each in found]
    unmarked = sum(off >= each.spread for off, each in zip(apart, found, strict=True))
    least, most = (of(each.spread for each in found) for of in (min, max))
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return [
        f"**Throughput.** The plain residual of `make demo` and its twin, measured {times} times as comparisons do it "
        f"({len(found[0].values)} rounds in turns, CPU time of the process): their ratio was off by {max(apart):.1%} "
        f"at most and by {statistics.median(apart):.1%} in the median, and varied by {least:.1%} to {most:.1%} over "
        f"rounds. The mark that takes the verdict at equal time away was missing in {unmarked} of them. Meanwhile "
        f"{load:.1f} processes wanted each core."
    ]


def main() -> None:
    """Run, print, and write the page if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.twins", description="Comparisons with known answers.")
    parser.add_argument("--only", choices=list(MARKS), default=None)
    parser.add_argument("--comparisons", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=6, help="of each comparison of twins")
    parser.add_argument("--handicap-seeds", type=int, default=8)
    parser.add_argument("--write-docs", action="store_true", help="put the outcome into the page on statistics")
    options = parser.parse_args()
    torch.set_num_threads(1)
    made = {
        "twins": lambda: twins_text(options.comparisons, options.seeds),
        "handicaps": lambda: handicaps_text(options.handicap_seeds),
        "speed": lambda: speed_text(options.comparisons),
    }
    for part in MARKS if options.only is None else (options.only,):
        lines = made[part]()
        lines += ["", f"{hardware_line()}; `python -m benchmarks.twins --only {part}`."]
        print(*lines, sep="\n")
        if options.write_docs:
            replace_between(PAGE, *MARKS[part], "\n".join(lines))


if __name__ == "__main__":
    main()
