"""What a probe found: gains over the frozen source and over the control, with intervals, by rung and by group of sites.

A gain is the loss of the one minus the loss of the other, on the same held-out text, within a data seed: positive is
better. Intervals and verdicts are those of `twoaxis.comparison.statistics`: 95% for all rungs at once, over the seeds.

Everything here is made from the files of the folder, so that a report can be made of a probe that is not finished.
A column is added to GAINS, COSTS or `_site_columns`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from twoaxis.base.files import read_json
from twoaxis.base.options import check_type
from twoaxis.comparison.report import Col, make_table, tone
from twoaxis.comparison.statistics import BETTER, Difference, Sample, judge, mean_interval
from twoaxis.show.charts import Axis, Chart, Mark, Panel
from twoaxis.show.document import Block, Cell, Document, Facts, Heading, Prose, Saved, Showable
from twoaxis.show.numbers import count, difference, loss

if TYPE_CHECKING:
    from twoaxis.comparison.ladder import Rung

LOWER_BOUND = (
    "Only the few new parameters learned, on frozen weights that have adapted to the plain residual, for a few steps: "
    "a gain here is a lower bound of what the method can give this model, and no gain is no proof that there is none."
)


RESULT: dict[str, Any] = {"loss": float | None, "cpu_seconds": float, "off": dict[str, Any], "size": dict[str, Any]}
"""What the result of a run has, and of which type."""


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
        rung: what was put on the source.
        costs: see `ladder.Costs`.
        steps: that it was trained for.
        loss: mean over the seeds; None if none has finished.
        gain: over the frozen source.
        beyond: over the control; None for the control itself.
        sites: by group.
        seconds: mean CPU time of a run; None if none has finished.
    """

    rung: Rung
    costs: dict[str, Any]
    steps: int
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
    plan: dict[str, Any]
    """As it stands in the folder."""
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
        from twoaxis.comparison.probe import PLAN, read_plan, result_path, rungs_of

        folder = Path(folder)
        if not (folder / PLAN).is_file():
            raise ValueError(f"{folder} holds no probe: there is no {PLAN} in it")
        plan = read_plan(folder)
        seeds, rungs = tuple(plan["seeds"]), rungs_of(plan)
        if not rungs:
            raise ValueError(f"the probe in {folder} has not chosen its learning rates yet; start it again")

        def results(rung: Rung | None) -> dict[int, dict[str, Any]]:
            paths = {seed: result_path(folder, rung, seed) for seed in seeds}
            return {seed: _read(path) for seed, path in paths.items() if path.is_file()}

        frozen, found = results(None), {rung.key: results(rung) for rung in rungs}
        samples = {key: _sample(of_rung) for key, of_rung in found.items()}
        control = next(rung.key for rung in rungs if rung.control)
        others = {key: sample for key, sample in samples.items() if key != control}
        gains = judge(_sample(frozen), samples, seeds=seeds, lower_is_better=False)
        beyond = judge(samples[control], others, seeds=seeds, lower_is_better=False)
        rows = tuple(
            Row(
                rung=rung,
                costs=plan["costs"][rung.key],
                steps=plan["steps"][rung.key],
                loss=_mean(result["loss"] for result in found[rung.key].values()),
                gain=gains[rung.key],
                beyond=beyond.get(rung.key),
                sites={name: _sites(found[rung.key], name) for name in plan["groups"]},
                seconds=_mean(result["cpu_seconds"] for result in found[rung.key].values()),
            )
            for rung in rungs
        )
        missing = len(seeds) * (1 + len(rungs)) - len(frozen) - sum(map(len, found.values()))
        source = _mean(result["loss"] for result in frozen.values())
        return Probed(folder=folder, plan=plan, loss=source, rows=rows, missing=missing)

    @property
    def exit_code(self) -> int:
        """1 if a run could not be made."""
        return 1 if self.failed else 0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        rows = []
        for row in self.rows:
            entry = row._asdict() | {"rung": row.rung.to_dict(), "gain": row.gain.to_dict()}
            entry["beyond"] = row.beyond and row.beyond.to_dict()
            entry["sites"] = {name: sites._asdict() for name, sites in row.sites.items()}
            rows.append(entry)
        return {"plan": self.plan, "loss": self.loss, "rows": rows, "missing": self.missing, "note": LOWER_BOUND}

    def save(self, folder: str | Path | None = None, stem: str = "report") -> Saved:
        """Write the report; None is the probe's own folder."""
        return super().save(self.folder if folder is None else folder, stem)

    def document(self) -> Document:
        """The report."""
        by_site = [row for row in self.rows if any(sites.rise is not None for sites in row.sites.values())]
        seeds = len(self.plan["seeds"])
        note = (
            f"Nats per token on held-out text; the frozen source has {loss(self.loss)}. Intervals: 95% for all rungs "
            f"at once, over {seeds} data seeds."
        )
        blocks: list[Block] = [Prose(headline(self)), Heading("Gains"), make_table(GAINS, self.rows, self, [note])]
        if any(row.gain.mean is not None for row in self.rows):
            blocks.append(_gain_chart(self))
        if by_site:
            blocks += [Heading("Sites"), make_table(_site_columns(self.plan["groups"]), by_site, self, SITE_NOTES)]
            blocks.append(_site_chart(self, by_site))
        blocks += [Heading("Costs"), make_table(COSTS, self.rows, self, COST_NOTES), Prose(LOWER_BOUND)]
        return Document("Probe", (*blocks, Facts(facts(self))))


def _read(path: Path) -> dict[str, Any]:
    """The result of a run; one whose values cannot be a run's is an error that names file and field."""
    found = read_json(path)
    try:
        for name, hint in RESULT.items():
            check_type(name, found.get(name) if isinstance(found, dict) else found, hint)
        for name in ("off", "size"):
            for group, value in found[name].items():
                check_type(f"{name} of {group}", value, float | None)
        check_type("windows", tuple(found.get("windows") or ()), tuple[float, ...])
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}. Remove it, and the run is made again") from error
    return found


def _sample(results: Mapping[int, dict[str, Any]]) -> Sample:
    """Losses turned round, whose differences are gains."""
    values = {seed: None if result["loss"] is None else -result["loss"] for seed, result in results.items()}
    rows = {seed: [-loss for loss in result["windows"]] for seed, result in results.items() if result.get("windows")}
    return Sample(values, rows)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _sites(results: dict[int, dict[str, Any]], name: str) -> Sites:
    rises = [r["off"][name] for r in results.values() if r["off"].get(name) is not None]
    interval = mean_interval(rises)
    size = _mean(r["size"].get(name) for r in results.values())
    if interval is None:
        return Sites(None, size)
    mean, low, high = interval
    return Sites((mean, low, high) if len(rises) > 1 else (mean, None, None), size)


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


def _cost(name: str, text: Callable[[Any], str]) -> Callable[[Row, Probed], Cell]:
    return lambda row, found: Cell(text(row.costs[name]), row.costs[name])


def _added(row: Row, found: Probed) -> Cell:
    """The control trains parameters of the source."""
    added = 0 if row.rung.control else row.costs["parameters"]
    return Cell(count(added), added)


NAME = Col("rung", lambda row, found: Cell(row.rung.name), words=True)
GAINS = (
    NAME,
    Col("what learns", lambda row, found: Cell(row.rung.method), words=True),
    Col("parameters", _cost("parameters", count)),
    Col("loss", lambda row, found: Cell(loss(row.loss), row.loss)),
    Col("gain over the source", lambda row, found: _gain(row.gain)),
    Col("verdict", lambda row, found: _verdict(row.gain), words=True),
    Col("gain over the control", lambda row, found: _gain(row.beyond)),
    Col("verdict", lambda row, found: _verdict(row.beyond), words=True),
)
COSTS = (
    NAME,
    Col("a read may choose", lambda row, found: Cell(row.rung.what), words=True),
    Col("added parameters", _added),
    Col(
        "FLOPs per token",
        lambda row, found: Cell(f"{count(row.costs['flops'])} ({row.costs['flops_share']:+.2%})", row.costs["flops"]),
    ),
    Col("live", _cost("live", lambda value: f"{value:.3g}")),
    Col("kept", _cost("kept", count)),
    Col("steps", lambda row, found: Cell(str(row.steps), row.steps)),
    Col("rate", lambda row, found: Cell(f"{row.rung.rate:.2g}", row.rung.rate)),
    Col("CPU seconds", lambda row, found: Cell("" if row.seconds is None else f"{row.seconds:.0f}", row.seconds)),
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


def _site_columns(groups: list[str]) -> list[Col]:
    """What a group of sites is good for, and how much it does."""

    def off(name: str) -> Callable[[Row, Probed], Cell]:
        return lambda row, found: _rise(row.sites[name].rise)

    def size(name: str) -> Callable[[Row, Probed], Cell]:
        return lambda row, found: Cell(
            "" if row.sites[name].size is None else f"{row.sites[name].size:.2g}", row.sites[name].size
        )

    return [
        NAME,
        *(Col(f"{name} off", off(name)) for name in groups),
        *(Col(f"{name} size", size(name)) for name in groups),
    ]


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
        marks = tuple(
            Mark(
                f"{row.rung.name} ({count(row.costs['parameters'])})",
                gain.mean,
                gain.low,
                gain.high,
                tone(gain.verdict),
                not tone(gain.verdict),
            )
            for row, gain in gains
        )
        if marks:
            panels.append(Panel("intervals", title, Axis("nats per token", "difference", rule=0.0), Axis(), marks))
    source = found.plan["source"]["name"].rpartition("/")[2]
    title = f"Gains of frozen {source}, {len(found.plan['seeds'])} data seeds"
    note = "95% intervals for all rungs at once; filled: resolved. In brackets the parameters that learn."
    return Chart("gains", title, (tuple(panels),), note)


def _site_chart(found: Probed, rows: list[Row]) -> Chart:
    """Rise of the loss without the sites of a third of the blocks."""
    marks = [
        Mark(row.rung.name, *rise, group=name)
        for row in rows
        for name in found.plan["groups"]
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
    plan = found.plan
    fixed, text, source = plan["fixed"], plan["text"], plan["source"]
    documents = {side: f"{text[side]['documents']:,} documents" for side in ("train", "held_out")}
    told = [
        ("source", f"{source['name']} ({source['family']}), {plan['blocks']} blocks, frozen"),
        ("text", f"{text['name']}: {documents['train']} to train on, {text['held_out']['documents']:,} held out"),
        (
            "each run",
            f"{fixed['batch']} x {fixed['context']} tokens per step; measured on {fixed['held_out']} windows "
            f"of {fixed['context']} tokens, by site on {fixed['site_windows']}",
        ),
        ("data seeds", ", ".join(map(str, plan["seeds"]))),
        ("hardware", plan["hardware"]),
        ("versions", ", ".join(f"{name} {value}" for name, value in plan["versions"].items() if value)),
        ("command", f"`{plan['command']}`" if plan["command"] else ""),
        (
            "note",
            plan["shared_documents"]
            and f"{plan['shared_documents']} held-out documents serve more than once: seeds overlap",
        ),
        ("note", text["note"]),
        *(("failed", reason) for reason in found.failed),
    ]
    return tuple((name, str(value)) for name, value in told if value)
