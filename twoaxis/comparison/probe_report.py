"""What a probe found: gains over the frozen source and over the control, with intervals, by rung and by group of sites.

A gain is the loss of the one minus the loss of the other, on the same held-out text, within a data seed: positive is
better. Intervals and verdicts are those of `twoaxis.comparison.statistics`: 95% for all rungs at once, over the seeds.

Everything here is made from the files of the folder, so that a report can be made of a probe that is not finished.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from twoaxis.base.files import read_json, write_bytes, write_json, write_text
from twoaxis.comparison.statistics import Difference, compare, mean_interval
from twoaxis.comparison.tables import Cell, Grid, count, number, signed, tone

if TYPE_CHECKING:
    from twoaxis.comparison.ladder import Rung

FILES = ("report.json", "report.md")
LOWER_BOUND = (
    "Only the few new parameters learned, on frozen weights that have adapted to the plain residual, for a few steps: "
    "a gain here is a lower bound of what the method can give this model, and no gain is no proof that there is none."
)


class Gain(NamedTuple):
    """How much lower a loss is, over the seeds.

    Attributes:
        mean: in nats per token; None without a pair.
        low, high: the interval; None with fewer than two seeds.
        verdict: of `twoaxis.comparison.statistics`.
        note: what is missing or diverged.
    """

    mean: float | None
    low: float | None
    high: float | None
    verdict: str
    note: str

    @staticmethod
    def of(found: Difference) -> Gain:
        """A gain from a difference of losses: the other way round."""
        mean, low, high = (None if v is None else -v for v in (found.mean, found.high, found.low))
        return Gain(mean, low, high, found.verdict, found.note)

    @property
    def text(self) -> str:
        """As `+0.0123 [+0.0100, +0.0146]`."""
        if self.low is None or self.high is None:
            return signed(self.mean)
        return f"{signed(self.mean)} [{signed(self.low)}, {signed(self.high)}]"


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
    gain: Gain
    beyond: Gain | None
    sites: dict[str, Sites]
    seconds: float | None


class Summary(NamedTuple):
    """A probe's numbers.

    Attributes:
        plan: as it stands in the folder.
        loss: of the frozen source, mean over the seeds.
        rows: the control first.
        missing: runs that have not finished.
    """

    plan: dict[str, Any]
    loss: float | None
    rows: tuple[Row, ...]
    missing: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        rows = []
        for row in self.rows:
            entry = row._asdict() | {"rung": row.rung.to_dict(), "gain": row.gain._asdict()}
            entry["beyond"] = None if row.beyond is None else row.beyond._asdict()
            entry["sites"] = {name: sites._asdict() for name, sites in row.sites.items()}
            rows.append(entry)
        return {"plan": self.plan, "loss": self.loss, "rows": rows, "missing": self.missing, "note": LOWER_BOUND}


def summarise(out: str | Path) -> Summary:
    """The numbers of a folder."""
    from twoaxis.comparison.probe import PLAN, result_path, rungs_of

    out = Path(out)
    if not (out / PLAN).is_file():
        raise ValueError(f"{out} holds no probe: there is no {PLAN} in it")
    plan = read_json(out / PLAN)
    seeds, rungs = tuple(plan["seeds"]), rungs_of(plan)
    if not rungs:
        raise ValueError(f"the probe in {out} has not chosen its learning rates yet; start it again")

    def results(rung: Rung | None) -> dict[int, dict[str, Any]]:
        paths = {seed: result_path(out, rung, seed) for seed in seeds}
        return {seed: read_json(path) for seed, path in paths.items() if path.is_file()}

    frozen = results(None)
    found = {rung.key: results(rung) for rung in rungs}
    losses = {key: {seed: r["loss"] for seed, r in of_rung.items()} for key, of_rung in found.items()}
    source = {seed: r["loss"] for seed, r in frozen.items()}
    control = next(rung.key for rung in rungs if rung.control)
    gains = compare(source, losses, seeds=seeds)
    beyond = compare(losses[control], {k: v for k, v in losses.items() if k != control}, seeds=seeds)
    rows = [
        Row(
            rung=rung,
            costs=plan["costs"][rung.key],
            steps=plan["steps"][rung.key],
            loss=_mean(losses[rung.key].values()),
            gain=Gain.of(gains[rung.key]),
            beyond=Gain.of(beyond[rung.key]) if rung.key in beyond else None,
            sites={name: _sites(found[rung.key], name) for name in plan["groups"]},
            seconds=_mean([r["cpu_seconds"] for r in found[rung.key].values()]),
        )
        for rung in rungs
    ]
    done = len(frozen) + sum(map(len, found.values()))
    return Summary(plan, _mean(source.values()), tuple(rows), len(seeds) * (1 + len(rungs)) - done)


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _sites(results: dict[int, dict[str, Any]], name: str) -> Sites:
    rises = [r["off"][name] for r in results.values() if r["off"].get(name) is not None]
    interval = mean_interval(rises)
    size = _mean([r["size"].get(name) for r in results.values()])
    if interval is None:
        return Sites(None, size)
    mean, low, high = interval
    return Sites((mean, low, high) if len(rises) > 1 else (mean, None, None), size)


# Tables


def grids(summary: Summary) -> tuple[Grid, ...]:
    """The tables: gains, sites, costs."""
    return tuple(grid for grid in (_gains(summary), _by_site(summary), _costs(summary)) if grid.rows)


def _gains(summary: Summary) -> Grid:
    rows = []
    for row in summary.rows:
        beyond = row.beyond
        rows.append(
            (
                Cell(row.rung.name),
                Cell(row.rung.method),
                Cell(count(row.costs["parameters"]), row.costs["parameters"]),
                Cell(number(row.loss), row.loss),
                Cell(row.gain.text, row.gain.mean),
                _verdict(row.gain),
                Cell("" if beyond is None else beyond.text, None if beyond is None else beyond.mean),
                Cell("") if beyond is None else _verdict(beyond),
            )
        )
    heads = ("rung", "what learns", "parameters", "loss", "gain over the source", "", "gain over the control", "")
    seeds = summary.plan["seeds"]
    note = (
        f"Nats per token on held-out text; the frozen source has {number(summary.loss)}. Intervals: 95% for all rungs "
        f"at once, over {len(seeds)} data seeds."
    )
    return Grid("Gains", heads, tuple(rows), (note,))


def _verdict(gain: Gain) -> Cell:
    text = gain.verdict if not gain.note else f"{gain.verdict} ({gain.note})"
    return Cell(text, tone=tone(gain.verdict))


def _by_site(summary: Summary) -> Grid:
    groups, rows = summary.plan["groups"], []
    for row in summary.rows:
        if all(sites.rise is None for sites in row.sites.values()):
            continue
        rises = [Cell(_rise(row.sites[name]), (row.sites[name].rise or (None,))[0]) for name in groups]
        sizes = [Cell(_size(row.sites[name].size), row.sites[name].size) for name in groups]
        rows.append((Cell(row.rung.name), *rises, *sizes))
    heads = ("rung", *(f"{name} off" for name in groups), *(f"{name} size" for name in groups))
    notes = (
        "Off: how much the loss rises when the sites of that part of the blocks are switched off in the trained model "
        "(95% intervals, each for itself). The parts do not add up to the whole.",
        "Size: how far a stream's reads there are from the plain residual, relative to it; for a mixer and the control "
        "how far their parameters moved (root mean square).",
    )
    return Grid("Sites", heads, tuple(rows), notes)


def _rise(sites: Sites) -> str:
    if sites.rise is None:
        return ""
    mean, low, high = sites.rise
    return signed(mean) if low is None or high is None else f"{signed(mean)} ± {signed((high - low) / 2)[1:]}"


def _size(size: float | None) -> str:
    return "" if size is None else f"{size:.2g}"


def _costs(summary: Summary) -> Grid:
    rows = []
    for row in summary.rows:
        costs = row.costs
        added = 0 if row.rung.control else costs["parameters"]
        rows.append(
            (
                Cell(row.rung.name),
                Cell(row.rung.what),
                Cell(count(added), added),
                Cell(f"{count(costs['flops'])} ({costs['flops_share']:+.2%})", costs["flops"]),
                Cell(f"{costs['live']:.3g}", costs["live"]),
                Cell(count(costs["kept"]), costs["kept"]),
                Cell(str(row.steps), row.steps),
                Cell(f"{row.rung.rate:.2g}", row.rung.rate),
                Cell("" if row.seconds is None else f"{row.seconds:.0f}", row.seconds),
            )
        )
    heads = ("rung", "a read may choose", "added parameters", "FLOPs per token", "live", "kept", "steps", "rate")
    heads += ("CPU seconds",)
    note = (
        "By the formulas, beyond the source: operations of a forward pass; live: numbers per token alive across sites, "
        "in widths (the plain residual has 1); kept: numbers per sequence kept between tokens. The learning rate "
        "was chosen on training text. CPU seconds of a run are measured."
    )
    return Grid("Costs", heads, tuple(rows), (note,))


# Words


def headline(summary: Summary) -> str:
    """The answer in a sentence or two."""
    left = f"{summary.missing} runs have not finished. " if summary.missing else ""
    sure = [row for row in summary.rows if row.beyond is not None and row.beyond.verdict == "resolved (better)"]
    some = [row for row in summary.rows if row.beyond is not None and row.gain.verdict == "resolved (better)"]
    if sure:
        best = max(sure, key=lambda row: (row.beyond and row.beyond.mean) or 0.0)
        assert best.beyond is not None
        listed = ", ".join(row.rung.name for row in sure)
        return (
            f"{left}Resolved beyond the control: {listed}. The most: {best.rung.name} ({best.rung.method}), "
            f"{signed(best.beyond.mean)} nats per token more than the norms' scales."
        )
    if some:
        listed = ", ".join(row.rung.name for row in some)
        return (
            f"{left}Resolved over the frozen source, but not beyond what the norms' scales gain on the same text: "
            f"{listed}."
        )
    return f"{left}No rung has a resolved gain over the frozen source."


def facts(summary: Summary) -> list[tuple[str, str]]:
    """What the numbers were made of and with."""
    plan = summary.plan
    fixed, text = plan["fixed"], plan["text"]
    found = [
        ("source", f"{plan['source']['name']} ({plan['source']['family']}), {plan['blocks']} blocks, frozen"),
        ("text", f"{text['name']}: {text['train']['documents']:,} documents to train on, "
         f"{text['held_out']['documents']:,} held out"),
        ("each run", f"{fixed['batch']} x {fixed['context']} tokens per step; measured on {fixed['held_out']} windows "
         f"of {fixed['context']} tokens, by site on {fixed['site_windows']}"),
        ("data seeds", ", ".join(map(str, plan["seeds"]))),
        ("hardware", plan["hardware"]),
        ("versions", ", ".join(f"{name} {value}" for name, value in plan["versions"].items() if value)),
    ]  # fmt: skip
    if plan["command"]:
        found.append(("command", plan["command"]))
    if plan["shared_documents"]:
        found.append(("note", f"{plan['shared_documents']} held-out documents serve more than once: seeds overlap"))
    if text["note"]:
        found.append(("note", text["note"]))
    return found


# Files


def write_report(out: str | Path) -> Summary:
    """Write the report of a folder: JSON, Markdown and, where matplotlib is there, figures."""
    out = Path(out)
    summary = summarise(out)
    write_json(out / "report.json", summary.to_dict())
    try:
        from twoaxis.comparison.probe_plot import draw

        figure = draw(summary)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        figure = None
    if figure is not None:
        from twoaxis.comparison.plots import render

        for kind in ("png", "svg"):
            write_bytes(out / f"probe.{kind}", render(figure, kind))
    write_text(out / "report.md", render_markdown(summary, figure is not None))
    return summary


def render_markdown(summary: Summary, figure: bool = False) -> str:
    """The report as Markdown."""
    from twoaxis.comparison.report import _escape, _markdown_table

    lines = ["# Probe", "", _escape(headline(summary)), ""]
    for grid in grids(summary):
        lines += [
            f"## {grid.title}",
            "",
            *_markdown_table(grid),
            "",
            *(f"{_escape(note)}  " for note in grid.notes),
            "",
        ]
    lines += ["![gains and sites](probe.png)", ""] if figure else []
    lines += [LOWER_BOUND, "", *(f"- {name}: `{value}`" for name, value in facts(summary))]
    return "\n".join(lines) + "\n"


def render_terminal(summary: Summary, *, width: int | None = None, colour: bool = False) -> str:
    """The report as text.

    Args:
        summary: what to show.
        width: columns; None is the terminal's, and 120 where there is none.
        colour: with colours.
    """
    import shutil
    import textwrap

    from twoaxis.comparison.report import text_table

    width = width or shutil.get_terminal_size((120, 24)).columns
    parts = [textwrap.fill(headline(summary), width), ""]
    for grid in grids(summary):
        parts += [grid.title, text_table(grid, width, colour=colour)]
        parts += [*(textwrap.fill(note, width) for note in grid.notes), ""]
    parts += [textwrap.fill(LOWER_BOUND, width), ""]
    parts += [textwrap.fill(f"{name}: {value}", width, break_long_words=False) for name, value in facts(summary)]
    return "\n".join(parts) + "\n"
