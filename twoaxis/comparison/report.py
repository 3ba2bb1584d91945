"""The report of a comparison: what it found, as a document of tables, sentences and charts.

Where to add something:

    a column of a table     RESULT, COST, or a function that makes columns (`equal_columns`, ...)
    a table                 TABLES
    a sentence              SENTENCES, for conditions; `_verdicts` says what is settled
    a chart                 CHARTS; a panel of it in the function that makes it
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from twoaxis.comparison.results import AXES, Comparison, Entry, Equal, Section, ratio
from twoaxis.comparison.scaling import Interval
from twoaxis.comparison.statistics import BETTER, WORSE, Difference
from twoaxis.show.charts import Axis, Chart, Line, Mark, Panel, Tone
from twoaxis.show.document import Block, Cell, Column, Document, Facts, Heading, Items, Prose, Table
from twoaxis.show.numbers import NOTHING, count, loss, percent, si
from twoaxis.show.numbers import difference as signed
from twoaxis.training.results import MODEL

NAMES = {"tokens": "tokens", "flops": "FLOPs", "time": "time"}
TITLES = {"tokens": "training tokens", "flops": "training FLOPs", "time": "training time"}
UNITS = {"tokens": "count", "flops": "count", "time": "seconds"}


def document(found: Comparison) -> Document:
    """The whole report."""
    blocks: list[Block] = [Prose(headline(found)), *map(Prose, closing(found))]
    if found.failed:
        blocks += [Heading("Runs that failed"), Items(found.failed)]
    for number, section in enumerate(found.sections, start=1):
        blocks.append(Heading(f"{section.data}, {section.size}"))
        section = dataclasses.replace(section, home=found.home)
        made = {table.title: table.make(section) for table in TABLES}
        tables = [block for title, table in made.items() if table is not None for block in (Heading(title, 3), table)]
        charts = [chart for make in CHARTS if (chart := make(section, _ending(found, number, section))) is not None]
        blocks += [*tables[:2], *charts, *tables[2:]]  # the result, then what it looks like
    return Document(f"Comparison {found.name}", (*blocks, Heading("How it was made"), Facts(facts(found))))


def rows(found: Comparison) -> list[dict[str, Any]]:
    """A row for every contender of every section, by the heads of the tables of all contenders."""
    made: dict[Entry, dict[str, Any]] = {}
    for section in found.sections:
        for spec in TABLES:
            table = spec.make(section)
            if table is None:
                continue
            for entry, cells in zip(spec.entries(section), table.rows, strict=True):
                row = made.setdefault(entry, {"data": section.data, "size": section.size})
                for column, cell in zip(table.columns, cells, strict=True):
                    row[column.head] = cell.value if column.number and cell.value is not None else cell.text
    return list(made.values())


# Tables.


class Col(NamedTuple):
    """A column of a table about things of one kind, such as the entries of a section.

    Attributes:
        head: its title.
        cell: what a thing of a whole has in it.
        when: the wholes whose tables have it.
        words: set to the left, and taken as text by `rows`.
    """

    head: str
    cell: Callable[[Any, Any], Cell]
    when: Callable[[Any], bool] = lambda whole: True
    words: bool = False


def make_table(
    columns: Sequence[Col], things: Sequence[Any], whole: Any, notes: Sequence[str] = (), **more: Any
) -> Table:
    """A table with a row for each thing of a whole."""
    shown = [column for column in columns if column.when(whole)]
    heads = tuple(Column(column.head, number=not column.words) for column in shown)
    rows = tuple(tuple(column.cell(thing, whole) for column in shown) for thing in things)
    return Table(heads, rows, tuple(notes), **more)


class TableOf(NamedTuple):
    """A table of the entries of a section.

    Attributes:
        title: above it.
        columns: behind the contender's name; fixed, or made for a section.
        notes: sentences under it.
        when: sections that have it.
        entries: its rows.
    """

    title: str
    columns: tuple[Col, ...] | Callable[[Section], list[Col]]
    notes: Callable[[Section], list[str]] = lambda section: []
    when: Callable[[Section], bool] = lambda section: True
    entries: Callable[[Section], tuple[Entry, ...]] = lambda section: section.entries

    def make(self, section: Section) -> Table | None:
        """The table of a section; None where it has none."""
        entries = self.entries(section)
        if not entries or not self.when(section):
            return None
        columns = self.columns if isinstance(self.columns, tuple) else self.columns(section)
        baseline = next((place for place, entry in enumerate(entries) if entry.baseline), None)
        return make_table((NAME, *columns), entries, section, self.notes(section), baseline=baseline)


def flagged(entry: Entry) -> str:
    """The label, and how many runs diverged."""
    return f"{entry.label} ({len(entry.diverged)} diverged)" if entry.diverged else entry.label


def _name(entry: Entry, section: Section) -> Cell:
    """The label and the way to the model of the first seed."""
    return Cell(flagged(entry), href=_model(entry, section, min(entry.results, default=None)))


def _model(entry: Entry, section: Section, seed: int | None) -> str:
    """The way to a run's model, or to the run where no model was kept."""
    run = None if seed is None else entry.runs.get(seed)
    if section.home is None or run is None:
        return ""
    return f"{section.home}/{(run.folder / MODEL if run.model else run.folder).as_posix()}"


def _seeds(entry: Entry, section: Section) -> Cell:
    done, planned = len(entry.results), len(entry.seeds)
    return Cell(f"{done}" if done == planned else f"{done} of {planned}", done, "" if done == planned else "warn")


def _mean(name: str, text: Callable[[float | None], str], entry: Entry, section: Section) -> Cell:
    """The mean of a field of the results."""
    return Cell(text(entry.mean(name)), entry.mean(name))


def _difference(entry: Entry, section: Section) -> Cell:
    return Cell(NOTHING) if entry.difference is None else Cell(signed(entry.difference.mean), entry.difference.mean)


def _interval(entry: Entry, section: Section) -> Cell:
    found = entry.difference
    if found is None or found.low is None:
        return Cell(NOTHING)
    return Cell(f"{signed(found.low)} to {signed(found.high)}", found.low)


def _verdict(entry: Entry, section: Section) -> Cell:
    return Cell(entry.verdict, entry.difference and entry.difference.corrected_p, tone(entry.verdict))


def _row_error(entry: Entry, section: Section) -> Cell:
    error = entry.difference and entry.difference.row_error
    return Cell(NOTHING if error is None else f"±{unsigned(error)}", error)


def _accuracy_difference(entry: Entry, section: Section) -> Cell:
    found = entry.accuracy_difference
    if found is None or found.mean is None:
        return Cell(NOTHING)
    return Cell(with_ends(found.mean, found, lambda value: f"{100 * value:+.1f}"), found.mean, tone(found.verdict))


def _speed_up(entry: Entry, section: Section) -> Cell:
    found = entry.speed_up
    return Cell(NOTHING) if found is None else Cell(with_ends(found.value, found, "{:.3g}".format), found.value)


def _cost(name: str, text: Callable[[float | None], str], entry: Entry, section: Section) -> Cell:
    """A count and by how many percent it exceeds the baseline's, or a measure and how many times that it is."""
    value, part = entry.costs[name], ratio(entry.costs[name], section.baseline.costs[name])
    if part is None or part == 1:
        return Cell(text(value), value)
    more = f"×{part:.2f}" if name in ("tokens_per_second", "peak_memory") else f"{100 * (part - 1):+.1f}%"
    return Cell(f"{text(value)} {more}", value)


def _rate(entry: Entry, section: Section) -> Cell:
    rate, edge = entry.row.lr, entry.row.lr_edge
    if rate is None:
        return Cell("not chosen", None, "warn")
    return Cell(f"{rate:g} (edge)" if edge else f"{rate:g}", rate, "warn" if edge else "")


def is_task(section: Section) -> bool:
    """Whether answers are right or wrong."""
    return section.chance is not None


def has_row_errors(section: Section) -> bool:
    """Whether losses of held-out rows are known."""
    return any(entry.difference and entry.difference.row_error is not None for entry in section.contenders)


NAME = Col("contender", _name, words=True)
RESULT = (
    Col("seeds", _seeds),
    Col("loss", partial(_mean, "loss", loss)),
    Col("difference", _difference),
    Col("95% interval", _interval, words=True),
    Col("verdict", _verdict, words=True),
    Col("held-out error", _row_error, has_row_errors),
    Col("accuracy", partial(_mean, "accuracy", percent), is_task),
    Col("accuracy difference", _accuracy_difference, is_task),
    Col("bits/byte", partial(_mean, "bits_per_byte", loss), lambda s: any(e.mean("bits_per_byte") for e in s.entries)),
    Col("speed-up", _speed_up, lambda s: s.scaling.law is not None),
)
COST = (
    Col("parameters", partial(_cost, "parameters", count)),
    Col("FLOPs/token", partial(_cost, "flops_per_token", count)),
    Col("tokens", partial(_cost, "tokens", count)),
    Col("tokens/s", partial(_cost, "tokens_per_second", count)),
    Col("peak memory", partial(_cost, "peak_memory", si)),
    Col("lr", _rate),
)


def result_notes(section: Section) -> list[str]:
    """What is missing, and where the speed-up comes from."""
    law, notes = section.scaling.law, []
    if section.chance is not None:
        notes.append(f"Guessing scores {section.chance:.1%}. The verdict is about the loss.")
    for entry in section.entries:
        said = [entry.difference.note] if entry.difference is not None and entry.difference.note else []
        if entry.baseline and (entry.diverged or entry.missing):
            said.append(f"{len(entry.diverged)} runs diverged, {len(entry.missing)} not finished")
        if law is not None and entry.speed_up_note:
            said.append(f"speed-up: {entry.speed_up_note}")
        if said:
            notes.append(f"{entry.label}: {'; '.join(said)}.")
    if has_row_errors(section):
        notes.append("Held-out error: how far the difference would move with other held-out text, one standard error.")
    if law is None:
        return [*notes, f"Effective speed-up: {section.scaling.note}."]
    exponent = with_ends(law.alpha, section.scaling.exponent, "{:.4g}".format)
    return [*notes, f"Speed-up by the law L = {law.l_inf:.4g} + A C^-alpha, alpha {exponent}; {section.scaling.note}."]


def equal_columns(section: Section) -> list[Col]:
    """Differences at equal tokens, operations and time."""
    match = section.plan.match
    return [
        Col(f"at equal {name}{' (matched)' * (axis == match)}", partial(_equal, axis)) for axis, name in NAMES.items()
    ]


def _equal(axis: str, entry: Entry, section: Section) -> Cell:
    equal = entry.equal.get(axis)
    if equal is None or equal.difference.mean is None:
        return Cell(NOTHING)
    found = equal.difference
    text = f"{signed(found.mean)}{'~' if equal.indicative else ''} {found.verdict}"
    return Cell(text, found.mean, tone(found.verdict))


def equal_notes(section: Section) -> list[str]:
    """What the mark means, where there is one."""
    if not any(equal.indicative for entry in section.contenders for equal in entry.equal.values()):
        return []
    return [
        "~ The longer run is read where the shorter one ends, before its learning rate had come down, and looks "
        "worse than a run of that length would: indicative only, and resolved only against that."
    ]


def cost_notes(section: Section) -> list[str]:
    """How throughput was measured, and what the edge is."""
    how = (
        f"in turns before the runs, {CLOCK}"
        if section.interleaved
        else "in the runs themselves, in the same comparison"
    )
    notes = [f"Throughput was measured {how}."]
    if any(entry.row.lr_edge for entry in section.entries):
        notes.append("(edge): the best rate is the smallest or largest that was tried; a better one may lie beyond.")
    return notes


def seed_columns(section: Section) -> list[Col]:
    """Loss of every seed, with the way to its model."""
    return [Col(f"seed {seed}", partial(_seed, seed)) for seed in section.plan.seeds]


def _seed(seed: int, entry: Entry, section: Section) -> Cell:
    value, href = entry.losses.get(seed), _model(entry, section, seed)
    if seed in entry.diverged:
        return Cell("diverged", None, "warn", href)
    return Cell(loss(value), value, href="" if value is None else href)


def rate_columns(section: Section) -> list[Col]:
    """Mean loss by learning rate."""
    return [Col(f"{rate:g}", partial(_rate_loss, rate)) for rate in section.plan.lrs]


def _rate_loss(rate: float, entry: Entry, section: Section) -> Cell:
    known = {float(name): value for name, value in entry.row.lr_losses.items()}
    text = NOTHING if rate not in known else "diverged" if known[rate] is None else loss(known[rate])
    return Cell(text + " *" * (rate == entry.row.lr), known.get(rate))


def rate_notes(section: Section) -> list[str]:
    """Which rate was chosen, and by what."""
    seeds = ", ".join(map(str, section.plan.lr_seeds))
    return [f"* chosen, by the mean held-out loss of seeds {seeds}, which the comparison does not use."]


TABLES = (
    TableOf("Result", RESULT, result_notes),
    TableOf(
        "Loss minus the baseline's at equal budgets",
        equal_columns,
        equal_notes,
        entries=lambda section: section.contenders,
    ),
    TableOf("Cost", COST, cost_notes),
    TableOf("Loss by seed", seed_columns),
    TableOf("Loss by learning rate", rate_columns, rate_notes, when=lambda section: len(section.plan.lrs) > 1),
)


def with_ends(value: float, found: Interval | Difference | None, text: Callable[[float], str]) -> str:
    """A number and, in brackets, the ends of its interval where there is one."""
    if found is None or found.low is None or found.high is None:
        return text(value)
    return f"{text(value)} ({text(found.low)} to {text(found.high)})"


def unsigned(value: float) -> str:
    """A difference without its sign."""
    return signed(abs(value)).removeprefix("+")


def tone(verdict: str) -> Tone:
    """Colour of a verdict."""
    return "better" if verdict == BETTER else "worse" if verdict == WORSE else ""


# Charts.


def loss_line(entry: Entry, axis: str) -> Line | None:
    """The mean held-out loss of a contender; None without a finished run or where the axis was not measured."""
    scale = entry.scale(axis)
    if scale is None or not entry.curves:
        return None
    curves = [dict(zip(curve.tokens, curve.loss, strict=True)) for curve in entry.curves.values()]
    places = sorted(set.intersection(*map(set, curves)))
    return _line(entry, [place * scale for place in places], [[curve[place] for curve in curves] for place in places])


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
    mean, spread = values.mean(1), values.std(1, ddof=1) if values.shape[1] > 1 else 0.0
    y, low, high = (tuple(line.tolist()) for line in (mean, mean - spread, mean + spread))
    return Line(flagged(entry), tuple(x), y, low, high, 0 if entry.baseline else None)


def curves(section: Section, ending: str) -> Chart | None:
    """Loss, and loss minus the baseline's, against tokens, operations and time: what was matched first."""
    base, match = section.baseline, section.plan.match
    kinds: dict[str, Callable[[Entry, str], Line | None]] = {
        "loss": loss_line,
        f"loss minus {base.label}'s": lambda entry, axis: None if entry is base else difference_line(entry, base, axis),
    }
    grid = []
    for kind, line in kinds.items():
        panels = []
        for axis in sorted(AXES, key=lambda axis: axis != match):
            lines = [made for entry in section.entries if (made := line(entry, axis)) is not None]
            title = f"{kind}, against {TITLES[axis]}{' (matched)' * (axis == match)}"
            choice = {"show": kind, "against": TITLES[axis]}
            if lines:
                x, y = _frame(lines, axis, None if kind == "loss" else 0.0)
                panels.append(Panel("lines", title, x, y, tuple(lines), choice=choice))
        grid.append(tuple(panels))
    note = "Mean over seeds; the band is one standard deviation. Time is tokens over the throughput in the table."
    title, rows = f"Held-out loss: {section.data}, {section.size}", tuple(filter(None, grid))
    return Chart(f"curves{ending}", title, rows, note) if rows else None


def _frame(lines: list[Line], axis: str, rule: float | None) -> tuple[Axis, Axis]:
    """Axes without the first fifth of the runs, whose fall would flatten the rest."""
    ends = [] if rule is None else [rule]
    for line in lines:
        ends += [*line.low[len(line.x) // 5 :], *line.high[len(line.x) // 5 :]]
    room = 0.06 * (max(ends) - min(ends)) or 0.01
    left, right = min(line.x[len(line.x) // 5] for line in lines), max(line.x[-1] for line in lines)
    y = Axis("nats per token", low=min(ends) - room, high=max(ends) + room, rule=rule)
    return Axis(TITLES[axis], UNITS[axis], "log", left / 1.03, right * 1.03), y


def differences(section: Section, ending: str) -> Chart | None:
    """The difference of each contender to the baseline with its interval, at equal tokens, operations and time."""
    panels, rows = [], section.contenders
    for axis in AXES:
        marks = [_mark(entry, entry.equal.get(axis)) for entry in rows]
        if any(mark.value is not None for mark in marks):
            title = f"at equal {NAMES[axis]}{' (matched)' * (axis == section.plan.match)}"
            panels.append(Panel("intervals", title, Axis(unit="difference", rule=0.0), Axis(), tuple(marks)))
    if not panels:
        return None
    several = ", all contenders at once" if len(rows) > 1 else ""
    title = f"Loss minus {section.baseline.label}'s, 95% intervals{several}: {section.data}, {section.size}"
    early = any(equal.indicative for entry in rows for equal in entry.equal.values())
    note = "Open circles: a schedule had not ended; indicative only." if early else ""
    return Chart(f"differences{ending}", title, (tuple(panels),), note)


def _mark(entry: Entry, equal: Equal | None) -> Mark:
    if equal is None:
        return Mark(entry.label, None)
    found = equal.difference
    return Mark(entry.label, found.mean, found.low, found.high, tone(found.verdict), equal.indicative)


CHARTS: tuple[Callable[[Section, str], Chart | None], ...] = (curves, differences)


def _ending(found: Comparison, number: int, section: Section) -> str:
    """What tells the charts of a section apart; nothing where there is one section."""
    if len(found.sections) == 1:
        return ""
    plain = re.sub(r"[^a-z0-9_-]+", "-", f"{section.data}-{section.size}".lower())
    return f"-{number}-{plain[:60].strip('-')}"


# Sentences.

CLOCK = "in CPU time of the process where a run has one thread of a CPU, else by the clock"
"""How `base.timer` measures."""


def headline(found: Comparison) -> str:
    """Seeds, what was matched, how intervals were made."""
    seeds, rivals = found.plan.seeds, max((len(section.contenders) for section in found.sections), default=0)
    text = f"{_count(len(seeds), 'seed')} ({', '.join(map(str, seeds))}), matched by {found.plan.match}. "
    if rivals > 1:
        return text + (
            f"Intervals are 95% for the {rivals} contenders of a table together (Student's t on paired differences, "
            f"Bonferroni); resolved means that the interval leaves zero out."
        )
    return text + "Intervals are 95% (Student's t on paired differences); resolved means that it leaves zero out."


def facts(found: Comparison) -> tuple[tuple[str, str], ...]:
    """Hardware, versions, commands."""
    about = found.plan.about
    versions = ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items())
    commands = [("command", f"`{command.replace('`', ' ')}`") for command in about.get("commands", ())]
    hardware = about.get("hardware_line") or "not recorded"
    return (("hardware", hardware), ("versions", versions or "not recorded"), *commands)


def closing(found: Comparison) -> list[str]:
    """Paragraphs in plain language: what is resolved, what is not, under which conditions."""
    said = [_verdicts(section, several=len(found.sections) > 1) for section in found.sections]
    return [*said, " ".join(filter(None, (sentence(found) for sentence in SENTENCES)))]


def _verdicts(section: Section, *, several: bool) -> str:
    """What one section settles."""
    where = f"On {section.data} at {section.size}: " if several else ""
    base, parts = section.baseline.label, []
    for verdict, word in ((BETTER, "better"), (WORSE, "worse")):
        named = [
            _by(entry, entry.difference)
            for entry in section.contenders
            if entry.difference and entry.verdict == verdict
        ]
        if named:
            parts.append(f"resolved as {word} than {base}: {', '.join(named)}")
    still = [_open(e, e.difference) for e in section.contenders if e.difference and not e.difference.resolved]
    if still:
        parts.append(f"not resolved at this scale and with these seeds: {', '.join(still)}")
    if not parts:
        return f"{where}there is nothing but {base} to compare."
    for axis, name in NAMES.items():
        better = [entry for entry in section.contenders if entry.verdict == BETTER and axis in entry.equal]
        worse = [entry.label for entry in better if entry.equal[axis].difference.verdict == WORSE]
        still = [entry.label for entry in better if not entry.equal[axis].difference.resolved]
        if worse:
            parts.append(f"at equal {name} the opposite is resolved for {', '.join(worse)}")
        if still:
            parts.append(f"at equal {name} being better is not resolved for {', '.join(still)}: --match {axis} tells")
    text = ". ".join(part[0].upper() + part[1:] for part in parts)
    return f"{where}{text}."


def _by(entry: Entry, found: Difference) -> str:
    """By how much a resolved contender is better or worse."""
    mean, *ends = (abs(value) for value in (found.mean, found.low, found.high) if value is not None)
    low, high = map(unsigned, sorted(ends))
    return f"{entry.label} by {unsigned(mean)} nats per token ({low} to {high})"


def _open(entry: Entry, found: Difference) -> str:
    """Why a contender is not resolved."""
    reasons = [f"{_count(len(found.diverged), 'run')} diverged"] if found.diverged else []
    if found.mean is None:
        reasons.append("no pair of runs has finished")
    elif found.low is None:
        reasons.append("one seed tells nothing of chance")
    elif entry.seeds_needed is not None and not found.diverged:
        reasons.append(f"about {entry.seeds_needed} seeds would settle a difference of {unsigned(found.mean)}")
    return f"{entry.label} ({'; '.join(reasons)})" if reasons else entry.label


def rate_sentence(found: Comparison) -> str:
    """How learning rates were chosen."""
    if len(found.plan.lrs) > 1:
        rates = ", ".join(f"{rate:g}" for rate in found.plan.lrs)
        text = f"Each contender had the best of the learning rates {rates}, chosen on separate seeds."
        every = {entry.label for entry in found.entries}
        edge = {entry.label for entry in found.entries if entry.row.lr_edge}
        whom = "every contender" if edge == every and len(edge) > 2 else ", ".join(sorted(edge))
        return f"{text} The best rate lies at the edge of those tried for {whom}: widen --lr." if edge else text
    if not found.shared_rate:
        return "Contenders had learning rates of their own, as they were given."
    rate = next((entry.row.lr for entry in found.entries if entry.row.lr is not None), None)
    return (
        f"All contenders had one shared learning rate{'' if rate is None else f' ({rate:g})'}, which favours the "
        "one it was tuned for, most often the baseline; --lr a,b,c chooses one for each."
    )


def init_sentence(found: Comparison) -> str:
    """How initial weights were scaled."""
    inits = {
        "paper": "Initial weights are rescaled as each paper prescribes (init=paper).",
        "paired": "All contenders of a seed start from the same weights in what they have in common (init=paired).",
    }
    if len(found.inits) > 1:
        return " and ".join(f"init={init}" for init in found.inits) + " were both used; see the tables."
    return "".join(inits.get(init, f"{init}.") for init in found.inits)


def match_sentence(found: Comparison) -> str:
    """What was the same for all contenders."""
    matched = {
        "tokens": "Contenders were matched by training tokens; what they cost besides is in the tables.",
        "flops": "Contenders were matched by training operations, within the rounding to whole steps.",
        "time": f"Contenders were matched by time, by a throughput measured once before the runs, {CLOCK}.",
    }
    return matched[found.plan.match]


def law_sentence(found: Comparison) -> str:
    """What a speed-up needs."""
    if any(scaling.law is not None for scaling in found.laws.values()):
        return ""
    return "The effective speed-up needs --sizes (three or more), or a law given by --l-inf and --alpha."


def gap_sentence(found: Comparison) -> str:
    """Runs that are not there."""
    diverged, said = sum(len(entry.diverged) for entry in found.entries), []
    if diverged:
        said.append(f"{_count(diverged, 'run')} diverged.")
    if found.missing:
        said.append(f"{_count(found.missing, 'run')} had not finished when this was made: verdicts may change.")
    return " ".join(said)


SENTENCES = (rate_sentence, init_sentence, match_sentence, law_sentence, gap_sentence)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
