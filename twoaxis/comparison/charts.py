"""The charts of a comparison's report: curves, differences, parameters. A chart more: a function, and CHARTS."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from twoaxis.comparison.run_folders import Curve, together
from twoaxis.comparison.sections import AXES, Entry, Equal, Section
from twoaxis.comparison.statistics import BETTER, WORSE
from twoaxis.show.charts import Axis, Chart, Line, Mark, Panel, Tone

NAMES = {"tokens": "tokens", "flops": "FLOPs", "time": "time"}
TITLES = {"tokens": "training tokens", "flops": "training FLOPs", "time": "training time"}
UNITS = {"tokens": "count", "flops": "count", "time": "seconds"}


def flagged(entry: Entry) -> str:
    """The label, and how many runs diverged."""
    return f"{entry.label} ({len(entry.diverged)} diverged)" if entry.diverged else entry.label


def whose(entry: Entry) -> str:
    """The label as a genitive."""
    return f"{entry.label}'" if entry.label.endswith("s") else f"{entry.label}'s"


def tone(verdict: str) -> Tone:
    """Colour of a verdict."""
    return "better" if verdict == BETTER else "worse" if verdict == WORSE else ""


def on_rows(section: Section) -> str:
    """A sentence on the rows of curves, where the last evaluation has more of them; nothing otherwise."""
    base = section.plan.base
    if base.judged_examples == base.eval_examples:
        return ""
    return f" Curves are of {base.eval_examples:,} held-out rows, losses at the end of {base.judged_examples:,}."


def loss_line(entry: Entry, axis: str, runs: Iterable[Curve]) -> Line | None:
    """The mean loss of a contender's runs; None without a finished run or where the axis was not measured."""
    scale, losses = entry.scale(axis), together(runs)
    return None if scale is None else _line(entry, [place * scale for place in losses], list(losses.values()))


def difference_line(entry: Entry, baseline: Entry, axis: str) -> Line | None:
    """The mean of the paired differences to the baseline, at the contender's evaluations until the shorter run ends."""
    mine, theirs, curves = entry.scale(axis), baseline.scale(axis), baseline.curves
    seeds = [seed for seed in entry.curves if seed in curves and curves[seed].tokens]
    if mine is None or theirs is None or not seeds:
        return None
    x, rows = [], []
    places = set.intersection(*(set(entry.curves[seed].tokens) for seed in seeds))
    reach = min(curves[seed].tokens[-1] for seed in seeds) * theirs / mine
    for place in sorted({min(place, reach) for place in places}):
        pairs = [(entry.curves[s].at(place), curves[s].at(place * mine / theirs)) for s in seeds]
        row = [ours - other for ours, other in pairs if ours is not None and other is not None]
        if len(row) == len(seeds):
            x.append(place * mine)
            rows.append(row)
    return _line(entry, x, rows)


def _line(entry: Entry, x: list[float], rows: list[list[float]]) -> Line | None:
    """Means over the seeds of each row, in a band of one standard deviation."""
    if not x:
        return None
    values = np.array(rows)
    mean, colour = values.mean(1), 0 if entry.baseline else None
    if values.shape[1] == 1:
        return Line(flagged(entry), tuple(x), tuple(mean.tolist()), colour=colour)
    spread = values.std(1, ddof=1)
    y, low, high = (tuple(line.tolist()) for line in (mean, mean - spread, mean + spread))
    return Line(flagged(entry), tuple(x), y, low, high, colour)


def curves(section: Section, ending: str) -> Chart | None:
    """Held-out loss, minus the baseline's, of each seed, and training loss, against tokens, operations and time."""
    base, match = section.baseline, section.plan.match
    shown: dict[str, Callable[[Entry, str], list[Line | None]]] = {
        "loss": lambda entry, axis: [loss_line(entry, axis, entry.curves.values())],
        f"loss minus {whose(base)}": lambda e, axis: [None if e is base else difference_line(e, base, axis)],
        "loss of every seed": lambda e, axis: [loss_line(e, axis, [curve]) for curve in e.curves.values()],
        "training loss": lambda e, axis: [loss_line(e, axis, [e.runs[seed].training for seed in e.results])],
    }
    grid = []
    for kind, made in shown.items():
        panels = []
        for axis in sorted(AXES, key=lambda axis: axis != match):
            found = [line for entry in (base, *section.contenders) for line in made(entry, axis)]
            lines = [line for line in found if line is not None]
            title = f"{kind}, against {TITLES[axis]}{' (matched)' * (axis == match)}"
            choice = {"show": kind, "against": TITLES[axis]}
            if any(len(line.x) > 1 for line in lines):
                x, y = _frame(lines, axis, 0.0 if "minus" in kind else None)
                panels.append(Panel("lines", title, x, y, tuple(lines), choice=choice))
        grid.append(tuple(panels))
    note = "Mean over seeds; the band is one standard deviation. Time is tokens over the throughput in the table."
    note += on_rows(section)
    rows = tuple(filter(None, grid))
    what = "Training" if rows and rows[0][0].choice["show"] == "training loss" else "Held-out"
    return Chart(f"curves{ending}", f"{what} loss: {section.data}, {section.size}", rows, note) if rows else None


def parameters(section: Section, ending: str) -> Chart | None:
    """The final loss of each contender against its parameters."""
    lines = []
    for entry in (section.baseline, *section.contenders):
        if (mean := entry.mean("loss")) is not None:
            band, colour = entry.spread or 0.0, 0 if entry.baseline else None
            x = (float(entry.row.parameters),)
            lines.append(Line(flagged(entry), x, (mean,), (mean - band,), (mean + band,), colour))
    if len({line.x for line in lines}) < 2:
        return None
    panel = Panel("lines", "", Axis("parameters", "count"), Axis("nats per token"), tuple(lines))
    title = f"Held-out loss against parameters: {section.data}, {section.size}"
    return Chart(f"parameters{ending}", title, ((panel,),))


def _frame(lines: list[Line], axis: str, rule: float | None) -> tuple[Axis, Axis]:
    """Axes without the first fifth of the runs, whose fall would flatten the rest."""
    ends = [] if rule is None else [rule]
    for line in lines:
        edges = (line.low, line.high) if line.low else (line.y,)
        ends += [end for edge in edges for end in edge[len(line.x) // 5 :] if end is not None]
    room = 0.06 * (max(ends) - min(ends)) or 0.01
    left, right = min(line.x[len(line.x) // 5] for line in lines), max(line.x[-1] for line in lines)
    y = Axis("nats per token", low=min(ends) - room, high=max(ends) + room, rule=rule)
    return Axis(TITLES[axis], UNITS[axis], "log", left / 1.03, right * 1.03), y


def differences(section: Section, ending: str) -> Chart | None:
    """The difference of each contender to the baseline with its interval, at equal tokens, operations and time."""
    panels, rows = [], section.contenders
    for axis in AXES:
        marks = [_mark(entry, entry.equal.get(axis)) for entry in rows]
        if (
            2 * sum(mark.value is not None for mark in marks) >= len(marks) > 0
        ):  # few could be read where most are empty
            title = f"at equal {NAMES[axis]}{' (matched)' * (axis == section.plan.match)}"
            panels.append(Panel("intervals", title, Axis(unit="difference", rule=0.0), Axis(), tuple(marks)))
    if not panels:
        return None
    several = ", all contenders at once" if len(rows) > 1 else ""
    title = f"Loss minus {whose(section.baseline)}, 95% intervals{several}: {section.data}, {section.size}"
    early = any(equal.indicative for entry in rows for equal in entry.equal.values())
    note = "Open circles: a schedule had not ended; indicative only." if early else ""
    return Chart(f"differences{ending}", title, (tuple(panels),), note)


def _mark(entry: Entry, equal: Equal | None) -> Mark:
    if equal is None:
        return Mark(entry.label, None)
    found = equal.difference
    return Mark(entry.label, found.mean, found.low, found.high, tone(found.verdict), equal.indicative)


CHARTS: tuple[Callable[[Section, str], Chart | None], ...] = (curves, differences, parameters)
