"""What a comparison would do: its runs, what is finished of them, and about how long and how large the rest is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twoaxis.comparison.budget import Measure
from twoaxis.comparison.plan import Plan, Row, run_config
from twoaxis.training.results import load_result

START = 2.0
"""Seconds a run takes to start and to end."""
RECORD = 220
"""Bytes of a record in a log."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A row and what is left to do of it."""

    label: str
    """Of the contender."""
    row: Row
    """What it is."""
    rates: int
    """Runs that choose its learning rate."""
    runs: int
    """Runs that are compared."""
    finished: int
    """Of both."""
    tokens_per_second: float
    """Measured just now, or when the comparison began."""
    seconds: float
    """Of what is left, one run after the other."""
    bytes: int
    """That its runs will have written in the end."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A comparison before it runs."""

    lines: tuple[Line, ...]
    """One for each row."""
    jobs: int
    """Runs at once."""
    seconds: float
    """About, for all that is left."""
    bytes: int
    """In the end."""
    scratch: int
    """Bytes of checkpoints while it runs."""

    @property
    def runs(self) -> int:
        """All runs."""
        return sum(line.runs + line.rates for line in self.lines)

    @property
    def finished(self) -> int:
        """Of them."""
        return sum(line.finished for line in self.lines)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        rows = [
            {"label": line.label, "flops": float(line.row.tokens) * line.row.flops_per_token}
            | dataclasses.asdict(line.row)
            | {
                name: getattr(line, name)
                for name in ("rates", "runs", "finished", "tokens_per_second", "seconds", "bytes")
            }
            for line in self.lines
        ]
        whole = ("runs", "finished", "jobs", "seconds", "bytes", "scratch")
        return {"rows": rows} | {name: getattr(self, name) for name in whole}


def forecast(plan: Plan, out: str | Path, jobs: int, measure: Measure) -> Forecast:
    """What is to be done, by a short timing of every contender's step on this machine.

    Args:
        plan: with its rows.
        out: its folder, which need not be there.
        jobs: runs at once.
        measure: throughput.
    """
    lines: list[Line] = []
    for sources in dict.fromkeys((row.data, row.size) for row in plan.rows):
        rows = [row for row in plan.rows if (row.data, row.size) == sources]
        configs = {row.contender: run_config(plan, row, plan.lrs[0], plan.seeds[0]) for row in rows}
        speeds = {row.contender: row.tokens_per_second for row in rows}  # known where they decided the budget
        if not all(speeds.values()):
            speeds = measure(configs, plan.about["data"][sources[0]]["vocab_size"])
        lines += [_line(plan, Path(out), row, speeds[row.contender] or 1.0) for row in rows]
    left = [line.seconds / max(1, line.runs + line.rates - line.finished) for line in lines]
    total = sum(line.seconds for line in lines)
    return Forecast(
        lines=tuple(lines),
        jobs=jobs,
        seconds=max([total / jobs, *left]),
        bytes=sum(line.bytes for line in lines),
        scratch=jobs * max((plan.base.keep + 1) * 12 * line.row.parameters for line in lines),
    )


def _line(plan: Plan, out: Path, row: Row, speed: float) -> Line:
    own = dataclasses.replace(plan, rows=(row,))
    choosing = own.choosing_runs()
    compared = [row.folder / f"lr-{row.lr!r}" / f"seed-{seed}" for seed in plan.seeds]
    places = [*[run.folder for run in choosing], *(compared if row.lr is not None else [])]
    finished = sum(load_result(out / place) is not None for place in places)
    runs = len(choosing) + len(plan.seeds)
    base = plan.base
    evaluations = -(-row.steps // (base.eval_every or max(1, row.steps // 10)))
    evaluated = evaluations * base.eval_examples * base.context / 3  # a third of the work: forward alone
    once = START + (row.tokens + evaluated) / speed
    size = RECORD * (row.steps // base.log_every + evaluations) + 4096
    size += 4 * row.parameters if base.save_model else 0
    return Line(
        label=plan.contender(row.contender).label,
        row=row,
        rates=len(choosing),
        runs=len(plan.seeds),
        finished=finished,
        tokens_per_second=speed,
        seconds=(runs - finished) * once,
        bytes=runs * size,
    )


def render(found: Forecast, out: str | Path) -> str:
    """For people.

    Args:
        found: what to show.
        out: the folder that is left as it is.
    """
    head = ("contender", "data", "size", "runs", "done", "steps", "tokens", "parameters", "FLOPs", "tokens/s", "left")
    body = [
        (
            line.label,
            line.row.data,
            line.row.size,
            f"{line.runs + line.rates}",
            f"{line.finished}",
            f"{line.row.steps:,}",
            f"{line.row.tokens:,}",
            f"{line.row.parameters:,}",
            f"{float(line.row.tokens) * line.row.flops_per_token:.3g}",
            f"{line.tokens_per_second:,.0f}",
            duration(line.seconds),
        )
        for line in found.lines
    ]
    resolved = [
        f"{line.label} at {line.row.size} on {line.row.data}: "
        + ", ".join(f"{name} = {value}" for name, value in line.row.model.items())
        for line in found.lines
        if line.row.model
    ]
    left = found.runs - found.finished
    closing = [
        f"{found.runs:,} runs, {found.finished:,} of them finished, {left:,} to do, {found.jobs} at once: "
        f"about {duration(found.seconds)}, {room(found.bytes)} on disk and up to {room(found.scratch)} of checkpoints "
        "while it runs",
        f"nothing was written to {out}",
    ]
    return "\n".join([*table(head, body), *resolved, *closing])


def table(head: Sequence[str], body: Sequence[Sequence[str]], *, text: int = 3) -> list[str]:
    """Aligned lines, the first `text` columns to the left and the others to the right."""
    widths = [max(len(line[n]) for line in (head, *body)) for n in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if n < text else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (head, *body)
    ]


def duration(seconds: float) -> str:
    """As 45 s, 3 min or 2.1 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def room(count: float) -> str:
    """Bytes as 3.1 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
