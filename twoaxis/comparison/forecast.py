"""What a comparison would do: its runs, what is finished of them, and about how long and how large the rest is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from twoaxis.comparison.budget import Measure
from twoaxis.comparison.contenders import TIMED
from twoaxis.comparison.plan import Plan, Row, Run
from twoaxis.show.document import Column, Document, Items, Prose, Showable, table
from twoaxis.show.numbers import seconds, si, whole
from twoaxis.training.folder import RESULT

START = 2.0
"""Seconds a run takes to start and to end."""
RECORD = 220
"""Bytes of a record in a log."""


class ForecastRow(NamedTuple):
    """A row and what is left to do of it."""

    label: str  # of the contender
    row: Row  # what it is
    rates: int  # runs that choose its learning rate
    runs: int  # runs that are compared
    finished: int  # of both
    tokens_per_second: float  # measured; of a method that is there several times, scaled by FLOPs
    seconds: float  # of what is left, one run after the other
    bytes: int  # that its runs will have written in the end


@dataclass(frozen=True, kw_only=True)
class Forecast(Showable):
    """A comparison before it runs."""

    folder: str  # where it would be; it is left as it is
    lines: tuple[ForecastRow, ...]  # one for each row of the plan
    jobs: int  # runs at once
    most: str = ""  # what stands before a number of runs that may be fewer

    @property
    def runs(self) -> int:
        """All runs."""
        return sum(row.runs + row.rates for row in self.lines)

    @property
    def finished(self) -> int:
        """Of them."""
        return sum(row.finished for row in self.lines)

    @property
    def seconds(self) -> float:
        """About, for all that is left: no shorter than its longest run."""
        each = [row.seconds / max(1, row.runs + row.rates - row.finished) for row in self.lines]
        return max([sum(row.seconds for row in self.lines) / self.jobs, *each])

    @property
    def bytes(self) -> int:
        """In the end."""
        return sum(row.bytes for row in self.lines)

    def document(self) -> Document:
        """A table of the rows, and the sum."""
        text = [Column(name, number=False) for name in ("contender", "data", "size")]
        heads = [*text, "runs", "done", "steps", "tokens", "parameters", "FLOPs", "tokens/s", "left"]
        body = []
        for each in self.lines:
            row = each.row
            counts = (each.runs + each.rates, each.finished, row.steps, row.tokens, row.parameters)
            numbers = [*map(whole, counts), f"{row.flops:.3g}", whole(each.tokens_per_second), seconds(each.seconds)]
            body.append((each.label, row.data, row.size, *numbers))
        resolved = tuple(
            f"{each.label} at {each.row.size} on {each.row.data}: "
            + ", ".join(f"{name} = {value}" for name, value in each.row.model.items())
            for each in self.lines
            if each.row.model
        )
        left = self.runs - self.finished
        closing = (
            f"{self.most}{self.runs:,} runs, {self.finished:,} of them finished, {left:,} to do, {self.jobs} at once: "
            f"about {seconds(self.seconds)}, {si(self.bytes)} on disk. Nothing was written to {self.folder}."
        )
        items = (Items(resolved),) if resolved else ()
        return Document("", (table(heads, body), *items, Prose(closing)))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        rows = [each.row.to_dict() | each._asdict() | {"flops": each.row.flops} for each in self.lines]
        for row in rows:
            del row["row"]
        return {"rows": rows} | {name: getattr(self, name) for name in ("runs", "finished", "jobs", "seconds", "bytes")}


def forecast(plan: Plan, out: str | Path, jobs: int, measure: Measure) -> Forecast:
    """What is to be done for a plan with its rows, by a short timing of each method's step on this machine.

    Of contenders with the same stream and mixer the first is timed, and the others are taken to be as much faster or
    slower as they have fewer or more operations: otherwise hundreds of contenders would take minutes.
    """
    runs: dict[Path, list[Run]] = {row.folder: [] for row in plan.rows}
    for run in (*plan.choosing_runs(), *plan.runs()):
        runs[run.row.folder].append(run)
    found: list[ForecastRow] = []
    for place in dict.fromkeys((row.data, row.size) for row in plan.rows):
        rows = {row.contender: row for row in plan.rows if (row.data, row.size) == place}
        speeds = {key: row.tokens_per_second for key, row in rows.items()}
        if not all(speeds.values()):  # else they are known since the comparison began
            methods = {key: (plan.contender(key).stream, plan.contender(key).mixer) for key in rows}
            first = {methods[key]: key for key in reversed(rows)}
            same = {name: getattr(plan.base, name) for name in TIMED}
            configs = {
                key: dataclasses.replace(plan.config(Run(row, "", plan.lrs[0], plan.seeds[0], False)), **same)
                for key, row in rows.items()
                if first[methods[key]] == key
            }
            rounds = measure(configs, plan.about["data"][place[0]]["vocab_size"])
            for key, row in rows.items():
                like = rows[first[methods[key]]]
                part = like.flops_per_token / row.flops_per_token
                speeds[key] = rounds[like.contender].rate.median * part
        found += [_row(plan, Path(out), row, speeds[row.contender] or 1.0, runs[row.folder]) for row in rows.values()]
    return Forecast(folder=str(out), lines=tuple(found), jobs=jobs, most="At most " if plan.until else "")


def _row(plan: Plan, out: Path, row: Row, speed: float, known: Sequence[Run]) -> ForecastRow:
    finished = sum((out / run.folder / RESULT).exists() for run in known)
    choosing = sum(run.choosing for run in known)
    base, runs = plan.base, choosing + len(plan.seeds)
    evaluations = -(-row.steps // (base.eval_every or max(1, row.steps // 10)))
    examples = max(0, evaluations - 1) * base.eval_examples + base.judged_examples
    evaluated = examples * base.context / 3  # a third of the work: forward alone
    once = START + (row.tokens + evaluated) / speed
    size = RECORD * (row.steps // base.log_every + evaluations) + 4096
    size += 4 * row.parameters if base.save_model else 0
    label, left = plan.contender(row.contender).label, runs - finished
    return ForecastRow(label, row, choosing, len(plan.seeds), finished, speed, left * once, runs * size)
