"""What a probe found: gains over the frozen source and over the control, with intervals, by rung and by group of sites.

A gain is the loss of the one minus the loss of the other, on the same held-out text, within a data seed: positive is
better. Intervals and verdicts are those of `twoaxis.comparison.statistics`: 95% for all rungs at once, over the seeds.

Everything here is made from the files of the folder, so that a report can be made of a probe that is not finished.
A column is added to GAINS, COSTS or `_site_columns`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from twoaxis.comparison.probe import Probes
from twoaxis.comparison.probe_plan import Costs, ProbePlan, ProbeResult, Rung
from twoaxis.comparison.report import Col, make_table, tone
from twoaxis.comparison.statistics import BETTER, Difference, Sample, judge, mean_interval
from twoaxis.show.charts import Axis, Chart, Mark, Panel
from twoaxis.show.document import Block, Cell, Document, Facts, Heading, Prose, Saved, Showable
from twoaxis.show.numbers import count, difference, loss

LOWER_BOUND = (
    "Only the few new parameters learned, on frozen weights that have adapted to the plain residual, for a few steps: "
    "a gain here is a lower bound of what the method can give this model, and no gain is no proof that there is none."
)


class Sites(NamedTuple):
    """What a group of sites is good for.

    Attributes:
        rise: of the loss when the group is switched off, with the ends of its own 95% interval; None if not measured.
        size: how much the trained parameters do there; see `ladder.sizes`.
    """

    rise: tuple[float, float | None, float | None] | None
    size: float | None


class Row(NamedTuple):
    """One rung.

    Attributes:
        rung: what was put on the source, with the rate that was chosen, its steps and costs.
        loss: mean over the seeds; None if none has finished.
        gain: over the frozen source.
        beyond: over the control; None for the control itself.
        sites: by group.
        seconds: mean CPU time of a run; None if none has finished.
    """

    rung: Rung
    loss: float | None
    gain: Difference
    beyond: Difference | None
    sites: dict[str, Sites]
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class Probed(Showable):
    """What a probe found: what `twoaxis.probe` returns."""

    folder: Path
    """Of the probe."""
    plan: ProbePlan
    """What was asked for."""
    loss: float | None
    """Of the frozen source, mean over the seeds."""
    rows: tuple[Row, ...]
    """The control first."""
    missing: int
    """Number of runs that have not finished."""
    failed: tuple[str, ...] = ()
    """Runs that could not be made, and why."""

    @staticmethod
    def load(folder: str | Path) -> Probed:
        """Read a probe, finished or not."""
        probes = Probes(Path(folder))
        plan, seeds = probes.plan, probes.plan.config.seeds
        rungs = [rung for each in plan.rungs if (rung := probes.chosen(each)) is not None]
        if not rungs or not rungs[0].control:
            raise ValueError(f"the probe in {folder} has not chosen its learning rates yet; start it again")

        def results(rung: Rung | None) -> dict[int, ProbeResult]:
            found = {seed: probes.result(rung, seed) for seed in seeds}
            return {seed: result for seed, result in found.items() if result is not None}

        frozen, found = results(None), {rung.key: results(rung) for rung in rungs}
        samples = {key: _sample(of_rung) for key, of_rung in found.items()}
        gains = judge(_sample(frozen), samples, seeds=seeds, lower_is_better=False)
        control, *others = samples
        beyond = judge(samples[control], {key: samples[key] for key in others}, seeds=seeds, lower_is_better=False)
        rows = tuple(
            Row(
                rung=rung,
                loss=_mean(result.loss for result in found[rung.key].values()),
                gain=gains[rung.key],
                beyond=beyond.get(rung.key),
                sites={name: _sites(found[rung.key].values(), name) for name in plan.groups},
                seconds=_mean(result.cpu_seconds for result in found[rung.key].values()),
            )
            for rung in rungs
        )
        missing = len(seeds) * (1 + len(plan.rungs)) - len(frozen) - sum(map(len, found.values()))
        source = _mean(result.loss for result in frozen.values())
        return Probed(folder=Path(folder), plan=plan, loss=source, rows=rows, missing=missing)

    @property
    def exit_code(self) -> int:
        """1 if a run could not be made."""
        return 1 if self.failed else 0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        rows = [
            row._asdict()
            | {"rung": row.rung.to_dict(), "gain": row.gain.to_dict(), "beyond": row.beyond and row.beyond.to_dict()}
            | {"sites": {name: sites._asdict() for name, sites in row.sites.items()}}
            for row in self.rows
        ]
        plan = self.plan.to_dict()
        return {"plan": plan, "loss": self.loss, "rows": rows, "missing": self.missing, "note": LOWER_BOUND}

    def save(self, folder: str | Path | None = None, stem: str = "report") -> Saved:
        """Write the report; None is the probe's own folder."""
        return super().save(self.folder if folder is None else folder, stem)

    def document(self) -> Document:
        """The report."""
        by_site = [row for row in self.rows if any(sites.rise is not None for sites in row.sites.values())]
        note = (
            f"Nats per token on held-out text; the frozen source has {loss(self.loss)}. Intervals: 95% for all rungs "
            f"at once, over {len(self.plan.config.seeds)} data seeds."
        )
        blocks: list[Block] = [Prose(headline(self)), Heading("Gains"), make_table(GAINS, self.rows, self, [note])]
        if any(row.gain.mean is not None for row in self.rows):
            blocks.append(_gain_chart(self))
        if by_site:
            blocks += [Heading("Sites"), make_table(_site_columns(self.plan.groups), by_site, self, SITE_NOTES)]
            blocks.append(_site_chart(self, by_site))
        blocks += [Heading("Costs"), make_table(COSTS, self.rows, self, COST_NOTES), Prose(LOWER_BOUND)]
        return Document("Probe", (*blocks, Facts(facts(self))))


def _sample(results: Mapping[int, ProbeResult]) -> Sample:
    """Losses turned round, whose differences are gains."""
    values = {seed: None if result.loss is None else -result.loss for seed, result in results.items()}
    rows = {seed: [-loss for loss in result.windows] for seed, result in results.items() if result.windows}
    return Sample(values, rows)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _sites(results: Iterable[ProbeResult], name: str) -> Sites:
    size = _mean(result.size.get(name) for result in results)
    rises = [rise for result in results if (rise := result.off.get(name)) is not None]
    if len(rises) < 2:
        return Sites((rises[0], None, None) if rises else None, size)
    return Sites(mean_interval(rises), size)


# Tables.


def _verdict(gain: Difference | None) -> Cell:
    if gain is None:
        return Cell("")
    return Cell(gain.verdict + (f" ({gain.note})" if gain.note else ""), tone=tone(gain.verdict))


def _gain(gain: Difference | None) -> Cell:
    """As `+0.0123 [+0.0100, +0.0146]`."""
    if gain is None:
        return Cell("")
    interval = "" if gain.low is None else f" [{difference(gain.low)}, {difference(gain.high)}]"
    return Cell(difference(gain.mean) + interval, gain.mean)


def _number(value: float | None, form: str = "") -> Cell:
    return Cell("" if value is None else format(value, form) if form else count(value), value)


def _flops(costs: Costs) -> Cell:
    return Cell(f"{count(costs.flops)} ({costs.flops_share:+.2%})", costs.flops)


NAME = Col("rung", lambda row, found: Cell(row.rung.name), words=True)
GAINS = (
    NAME,
    Col("what learns", lambda row, found: Cell(row.rung.method), words=True),
    Col("parameters", lambda row, found: _number(row.rung.costs.parameters)),
    Col("loss", lambda row, found: Cell(loss(row.loss), row.loss)),
    Col("gain over the source", lambda row, found: _gain(row.gain)),
    Col("verdict", lambda row, found: _verdict(row.gain), words=True),
    Col("gain over the control", lambda row, found: _gain(row.beyond)),
    Col("verdict", lambda row, found: _verdict(row.beyond), words=True),
)
COSTS = (
    NAME,
    Col("a read may choose", lambda row, found: Cell(row.rung.what), words=True),
    # the control trains parameters of the source
    Col("added parameters", lambda row, found: _number(0 if row.rung.control else row.rung.costs.parameters)),
    Col("FLOPs per token", lambda row, found: _flops(row.rung.costs)),
    Col("live", lambda row, found: _number(row.rung.costs.live, ".3g")),
    Col("kept", lambda row, found: _number(row.rung.costs.kept)),
    Col("steps", lambda row, found: _number(row.rung.steps, "d")),
    Col("rate", lambda row, found: _number(row.rung.rate, ".2g")),
    Col("CPU seconds", lambda row, found: _number(row.seconds, ".0f")),
)
SITE_NOTES = (
    "Off: how much the loss rises when the sites of that part of the blocks are switched off in the trained model "
    "(95% intervals, each for itself). The parts do not add up to the whole.",
    "Size: how far a stream's reads there are from the plain residual, relative to it; for a mixer and the control "
    "how far their parameters moved (root mean square).",
)
COST_NOTES = (
    "By the formulas, beyond the source: operations of a forward pass; live: numbers per token alive across sites, "
    "in widths (the plain residual has 1); kept: numbers per sequence kept between tokens. The learning rate "
    "was chosen on training text. CPU seconds of a run are measured.",
)


def _site_columns(groups: Sequence[str]) -> list[Col]:
    """What a group of sites is good for, and how much it does."""

    off = [Col(f"{name} off", lambda row, found, at=name: _rise(row.sites[at].rise)) for name in groups]
    size = [Col(f"{name} size", lambda row, found, at=name: _number(row.sites[at].size, ".2g")) for name in groups]
    return [NAME, *off, *size]


def _rise(rise: tuple[float, float | None, float | None] | None) -> Cell:
    if rise is None:
        return Cell("")
    mean, low, high = rise
    half = "" if low is None or high is None else f" ± {difference((high - low) / 2)[1:]}"
    return Cell(f"{difference(mean)}{half}", mean)


# Charts.


def _gain_chart(found: Probed) -> Chart:
    """Gains with their intervals, over the source and over the control."""
    panels = []
    for title, gains in (
        ("gain over the frozen source", [(row, row.gain) for row in found.rows]),
        ("gain over the control", [(row, row.beyond) for row in found.rows if row.beyond is not None]),
    ):
        marks = []
        for row, gain in gains:
            shown, label = tone(gain.verdict), f"{row.rung.name} ({count(row.rung.costs.parameters)})"
            marks.append(Mark(label, gain.mean, gain.low, gain.high, shown, not shown))
        if marks:
            axis = Axis("nats per token", "difference", rule=0.0)
            panels.append(Panel("intervals", title, axis, Axis(), tuple(marks)))
    source, seeds = found.plan.source.rpartition("/")[2], len(found.plan.config.seeds)
    note = "95% intervals for all rungs at once; filled: resolved. In brackets the parameters that learn."
    return Chart("gains", f"Gains of frozen {source}, {seeds} data seeds", (tuple(panels),), note)


def _site_chart(found: Probed, rows: list[Row]) -> Chart:
    """Rise of the loss without the sites of a third of the blocks."""
    marks = [
        Mark(row.rung.name, *rise, group=name)
        for row in rows
        for name in found.plan.groups
        if (rise := row.sites[name].rise) is not None
    ]
    axis = Axis("rise of the loss (nats per token)", "difference", rule=0.0)
    title = "Rise of the loss with the sites of a third of the blocks switched off, 95% intervals"
    return Chart("sites", title, ((Panel("bars", "", axis, Axis(), tuple(marks)),),))


# Words.


def headline(found: Probed) -> str:
    """The answer in a sentence or two."""
    left = f"{found.missing} runs have not finished. " if found.missing else ""
    rows = [(row, row.beyond) for row in found.rows if row.beyond is not None]
    sure = [(row, beyond) for row, beyond in rows if beyond.verdict == BETTER]
    some = [row for row, _ in rows if row.gain.verdict == BETTER]
    if sure:
        best, beyond = max(sure, key=lambda pair: pair[1].mean or 0.0)
        return (
            f"{left}Resolved beyond the control: {', '.join(row.rung.name for row, _ in sure)}. "
            f"The most: {best.rung.name} ({best.rung.method}), {difference(beyond.mean)} nats per token more than the "
            "norms' scales."
        )
    if some:
        return (
            f"{left}Resolved over the frozen source, but not beyond what the norms' scales gain on the same text: "
            f"{', '.join(row.rung.name for row in some)}."
        )
    return f"{left}No rung has a resolved gain over the frozen source."


def facts(found: Probed) -> tuple[tuple[str, str], ...]:
    """What the numbers were made of and with."""
    plan, config, text = found.plan, found.plan.config, found.plan.text
    windows = f"measured on {config.held_out} windows of {config.context} tokens, by site on {config.site_windows}"
    told = [
        ("source", f"{plan.source} ({plan.family}), {plan.blocks} blocks, frozen"),
        ("text", f"{text.name}: {text.train:,} documents to train on, {text.held_out:,} held out"),
        ("each run", f"{config.batch} x {config.context} tokens per step; {windows}"),
        ("data seeds", ", ".join(map(str, config.seeds))),
        ("hardware", plan.hardware),
        ("versions", ", ".join(f"{name} {value}" for name, value in plan.versions.items() if value)),
        ("command", plan.command and f"`{plan.command}`"),
        ("note", plan.shared and f"{plan.shared} held-out documents serve more than once: seeds overlap"),
        ("note", text.note),
        *(("failed", reason) for reason in found.failed),
    ]
    return tuple((name, str(value)) for name, value in told if value)
