"""The report of a comparison: what it found, as a document of tables, sentences and charts.

Where to add something:

    a column of a table     RESULT, SPEED, COST, or the function that makes the columns (`equal_columns`, ...)
    a table                 TABLES
    a note under a table    the function of that table (`result_notes`, ...)
    a sentence              twoaxis.comparison.sentences: WARNINGS, CONDITIONS
    a chart, or a panel     twoaxis.comparison.charts: CHARTS, or the function of that chart
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from twoaxis.comparison.charts import CHARTS, NAMES, flagged, on_rows, tone
from twoaxis.comparison.results import Comparison
from twoaxis.comparison.scaling import Interval
from twoaxis.comparison.sections import Entry, Section
from twoaxis.comparison.sentences import CLOCK, closing, facts, headline, unsigned
from twoaxis.comparison.statistics import EQUIVALENT, POWER, Difference
from twoaxis.show.document import Block, Cell, Column, Document, Facts, Heading, Items, Prose, Table
from twoaxis.show.numbers import NOTHING, count, loss, percent, si, whole
from twoaxis.show.numbers import difference as signed
from twoaxis.training.folder import MODEL


def document(found: Comparison) -> Document:
    """The whole report."""
    blocks: list[Block] = [Prose(headline(found)), *map(Prose, closing(found))]
    if found.failed:
        blocks += [Heading("Runs that failed"), Items(found.failed)]
    for number, section in enumerate(found.sections, start=1):
        blocks.append(Heading(f"{section.data}, {section.size}"))
        made = [(Heading(spec.title, 3), table) for spec in TABLES if (table := spec.make(section, found.home))]
        plain = re.sub(r"[^a-z0-9_-]+", "-", f"{section.data}-{section.size}".lower())[:60].strip("-")
        ending = f"-{number}-{plain}" if len(found.sections) > 1 else ""  # tells the charts of sections apart
        charts = [chart for make in CHARTS if (chart := make(section, ending)) is not None]
        (heading, result), *others = made
        blocks += [heading, result, *charts, *(block for pair in others for block in pair)]
    return Document(f"Comparison {found.name}", (*blocks, Heading("How it was made"), Facts(facts(found))))


def rows(found: Comparison) -> list[dict[str, Any]]:
    """A row for every contender of every section, by the heads of the tables of all contenders."""
    made: dict[Entry, dict[str, Any]] = {}
    for section in found.sections:
        for spec in TABLES:
            if (table := spec.make(section)) is None:
                continue
            for entry, cells in zip(spec.entries(section), table.rows, strict=True):
                row = made.setdefault(entry, {"data": section.data, "size": section.size})
                for column, cell in zip(table.columns, cells, strict=True):
                    row[column.head] = cell.value if column.number and cell.value is not None else cell.text
    return list(made.values())


class Col(NamedTuple):
    """A column of a table of entries."""

    head: str  # its title
    cell: Callable[[Entry], Cell]
    when: Callable[[Section], Any] = lambda section: True  # whether a section's table has it
    words: bool = False  # set to the left, and taken as text by `rows`


class TableOf(NamedTuple):
    """A table of the entries of a section."""

    title: str
    columns: Sequence[Col] | Callable[[Section], list[Col]]  # behind the contender's name
    notes: Callable[[Section], list[str]] = lambda section: []  # sentences under it
    entries: Callable[[Section], tuple[Entry, ...]] = lambda section: (section.baseline, *section.contenders)
    when: Callable[[Section], bool] = lambda section: True

    def make(self, section: Section, home: str | None = None) -> Table | None:
        """The table of a section, None where it has none; `home` is how links reach the comparison's folder."""
        entries = self.entries(section)
        if not entries or not self.when(section):
            return None
        columns = self.columns(section) if callable(self.columns) else self.columns
        shown = [column for column in (NAME, *columns) if column.when(section)]
        heads = tuple(Column(column.head, number=not column.words) for column in shown)
        cells = tuple(tuple(_linked(column.cell(entry), home) for column in shown) for entry in entries)
        baseline = next((place for place, entry in enumerate(entries) if entry.baseline), None)
        return Table(heads, cells, tuple(self.notes(section)), baseline=baseline)


def _linked(cell: Cell, home: str | None) -> Cell:
    return cell._replace(href=f"{home}/{cell.href}" if home is not None and cell.href else "")


# Cells.


def number(value: float | None, text: Callable[[float], str]) -> Cell:
    """A number, or nothing."""
    return Cell(NOTHING) if value is None else Cell(text(value), value)


def of(value: Callable[[Entry], float | None], text: Callable[[float], str]) -> Callable[[Entry], Cell]:
    """Cells of a number that an entry has."""
    return lambda entry: number(value(entry), text)


def mean(name: str, text: Callable[[float], str]) -> Callable[[Entry], Cell]:
    """Cells of the mean of a field of the results."""
    return of(lambda entry: entry.mean(name), text)


def difference(name: str, text: Callable[[float], str]) -> Callable[[Entry], Cell]:
    """Cells of a number of the difference in loss."""
    return of(lambda entry: entry.difference and getattr(entry.difference, name), text)


def judged(found: Difference | None, text: Callable[[Difference], str]) -> Cell:
    """A difference in the colour of its verdict."""
    return Cell(NOTHING) if found is None or found.mean is None else Cell(text(found), found.mean, tone(found.verdict))


def with_ends(value: float | None, found: Interval | Difference | None, text: Callable[[Any], str]) -> str:
    """A number and, in brackets, the ends of its interval where there is one."""
    if found is None or found.low is None or found.high is None:
        return text(value)
    return f"{text(value)} ({text(found.low)} to {text(found.high)})"


def _model(entry: Entry, seed: int | None) -> str:
    """The way to a run's model, or to the run where no model was kept."""
    run = None if seed is None else entry.runs.get(seed)
    return "" if run is None else (run.folder / MODEL if run.model else run.folder).as_posix()


def _seeds(entry: Entry) -> Cell:
    done, planned = len(entry.results), len(entry.seeds)
    return Cell(f"{done}" if done == planned else f"{done} of {planned}", done, "" if done == planned else "warn")


def _interval(entry: Entry) -> Cell:
    found = entry.difference
    if found is None or found.low is None:
        return Cell(NOTHING)
    return Cell(f"{signed(found.low)} to {signed(found.high)}", found.low)


def _verdict(entry: Entry) -> Cell:
    equal = entry.verdict == EQUIVALENT
    text = f"{EQUIVALENT} within {entry.section.plan.margin:g}" if equal else entry.verdict
    return Cell(text, entry.difference and entry.difference.corrected_p, tone(entry.verdict))


def _beyond(entry: Entry) -> Cell:
    """Loss minus that of low-rank additions, for methods on a source."""
    found = entry.section.beyond.get(entry.key)
    return judged(found, lambda it: f"{with_ends(it.mean, it, signed)} {it.verdict}")


def _accuracy_difference(entry: Entry) -> Cell:
    return judged(entry.accuracy_difference, lambda it: with_ends(it.mean, it, lambda part: f"{100 * part:+.1f}"))


def _equal(axis: str, entry: Entry) -> Cell:
    equal = entry.equal.get(axis)
    marks = "" if equal is None else "~" * bool(equal.early) + "≈" * equal.unsure
    return judged(equal and equal.difference, lambda it: f"{signed(it.mean)}{marks} {it.verdict}")


def _worth(which: str, entry: Entry) -> Cell:
    """The speed-up in tokens or net."""
    found: Interval | None = entry.worth and getattr(entry.worth, which)
    return Cell(NOTHING) if found is None else Cell(with_ends(found.value, found, "{:.3g}".format), found.value)


def _to_target(what: str, entry: Entry) -> Cell:
    """Steps or tokens to the loss in which the baseline's curve ends."""
    goal = entry.section.baseline.end
    tokens = None if goal is None else entry.row.tokens if entry.baseline else entry.tokens_to(goal)
    if tokens is None:
        ended = entry.end is not None and goal is not None and entry.end > goal
        return Cell("never" if ended else NOTHING)  # else its first evaluation was below already
    return number(tokens * entry.row.steps / entry.row.tokens, whole) if what == "steps" else number(tokens, count)


def cost(name: str, text: Callable[[float | None], str], entry: Entry) -> Cell:
    """A count and by how many percent it exceeds the baseline's, or a measure and how many times that it is."""
    if name == "flops_per_token" and entry.row.uncounted:
        return Cell("not counted")
    value, part = entry.costs[name], entry.times(name)
    if part is None or part == 1:
        return Cell(text(value), value)
    more = f"×{part:.2f}" if name in ("tokens_per_second", "peak_memory") else f"{100 * (part - 1):+.1f}%"
    return Cell(f"{text(value)} {more}", value)


def _rate(entry: Entry) -> Cell:
    rate, edge = entry.row.lr, entry.row.lr_edge
    if rate is None:
        return Cell("not chosen", None, "warn")
    return Cell(f"{rate:g} (edge)" if edge else f"{rate:g}", rate, "warn" if edge else "")


def _new_rate(entry: Entry) -> Cell:
    """The rate of what is new on a source."""
    multiplier, rate = entry.row.new_rate, entry.row.lr
    return number(None if multiplier is None or rate is None else multiplier * rate, "{:.2g}".format)


def _seed(seed: int, entry: Entry) -> Cell:
    if seed in entry.diverged:
        return Cell("diverged", None, "warn", _model(entry, seed))
    value = entry.losses.get(seed)
    return Cell(loss(value), value, href="" if value is None else _model(entry, seed))


def _rate_loss(rate: float, entry: Entry) -> Cell:
    known = {float(name): value for name, value in entry.row.lr_losses.items()}
    text = NOTHING if rate not in known else "diverged" if known[rate] is None else loss(known[rate])
    return Cell(text + " *" * (rate == entry.row.lr), known.get(rate))


# Columns.


def has(value: Callable[[Entry], Any]) -> Callable[[Section], bool]:
    """Whether an entry of a section has something."""
    return lambda section: any(value(entry) for entry in section.entries)


def is_task(section: Section) -> bool:
    """Whether answers are right or wrong."""
    return section.chance is not None


NAME = Col("contender", lambda e: Cell(flagged(e), href=_model(e, min(e.results, default=None))), words=True)
SPREAD = Col("sd", of(lambda entry: entry.spread, unsigned))
LOSS = (
    Col("loss", mean("loss", loss)),
    SPREAD,
    Col("difference", difference("mean", signed)),
    Col("95% interval", _interval, words=True),
)
RESULT = (
    *(column for column in LOSS if column is not SPREAD),
    Col("verdict", _verdict, words=True),
    Col("seeds", _seeds),
    SPREAD,
    Col("p", difference("corrected_p", lambda p: "<.001" if p < 0.001 else f"{p:.3f}".lstrip("0"))),
    Col("resolvable", difference("detectable", unsigned)),
    Col("minus LoRA's", _beyond, lambda section: section.beyond),
    Col("accuracy", mean("accuracy", percent), is_task),
    Col("accuracy difference", _accuracy_difference, is_task),
    Col("bits/byte", mean("bits_per_byte", loss), has(lambda entry: entry.mean("bits_per_byte"))),
)
SPEED = (
    Col("late mean", of(lambda entry: entry.late, loss)),
    Col("steps to it", partial(_to_target, "steps")),
    Col("tokens to it", partial(_to_target, "tokens")),
    Col("step-wise", partial(_worth, "tokens"), has(lambda entry: entry.worth)),
    Col("throughput", of(lambda entry: entry.times("tokens_per_second"), "×{:.2f}".format)),
    Col("net", partial(_worth, "net"), has(lambda entry: entry.worth)),
)
COST = (
    Col("parameters", partial(cost, "parameters", count)),
    Col("FLOPs/token", partial(cost, "flops_per_token", count)),
    Col("tokens", partial(cost, "tokens", count)),
    Col("tokens/s", partial(cost, "tokens_per_second", count)),
    Col("calls", of(lambda e: e.row.fixed_share, "{:.0%}".format), has(lambda e: e.row.fixed_share is not None)),
    Col("peak memory", partial(cost, "peak_memory", si)),
    Col("spikes", of(lambda entry: entry.spikes, str), has(lambda entry: entry.spikes)),
    Col("lr", _rate),
    Col("new lr", _new_rate, has(lambda entry: entry.row.new_rate)),
)


def equal_columns(section: Section) -> list[Col]:
    """Differences at equal tokens, operations and time."""
    match, known = section.plan.match, {axis for entry in section.contenders for axis in entry.equal}
    names = {axis: f"at equal {name}{' (matched)' * (axis == match)}" for axis, name in NAMES.items() if axis in known}
    return [Col(name, partial(_equal, axis)) for axis, name in names.items()]


def result_columns(section: Section) -> list[Col]:
    """What is settled, and the loss of every seed with the way to its model."""
    return [*RESULT, *(Col(f"seed {seed}", partial(_seed, seed)) for seed in section.baseline.seeds)]


def rate_columns(section: Section) -> list[Col]:
    """Mean loss by learning rate."""
    return [Col(f"{rate:g}", partial(_rate_loss, rate)) for rate in section.plan.lrs]


# Notes under tables.


def result_notes(section: Section) -> list[str]:
    """What is missing, what would have been resolved, what counting alone predicts."""
    notes = []
    if section.chance is not None:
        notes.append(f"Guessing scores {section.chance:.1%}. The verdict is about the loss.")
    for entry in section.entries:
        said = [entry.difference.note] if entry.difference is not None and entry.difference.note else []
        if entry.baseline and (entry.diverged or entry.missing):
            said.append(f"{len(entry.diverged)} runs diverged, {len(entry.missing)} not finished")
        if said:
            notes.append(f"{entry.label}: {'; '.join(said)}.")
    notes.append(
        f"sd: of the losses over seeds. p: for all contenders together. resolvable: the true difference that this "
        f"comparison resolves with a probability of {POWER:.0%}."
    )
    if section.ngrams:
        counted = (f"{name} {loss(section.ngrams[name])}" for name in ("unigram", "bigram"))
        tokens = count(section.ngrams["tokens"])
        notes.append(f"Tables of counts over {tokens} of the same training tokens: {', '.join(counted)}.")
    return notes


def speed_notes(section: Section) -> list[str]:
    """What the loss to reach is, and where a speed-up comes from."""
    law, goal = section.scaling.law, section.baseline.end
    notes = [
        "Late mean: of the evaluations in the last fifth of a run. It is the baseline's loss at its end"
        f"{'' if goal is None else f', {loss(goal)}'}; before its own end a run had not lowered its rate."
        f"{on_rows(section)}"
    ]
    if law is not None:
        exponent = with_ends(law.alpha, section.scaling.exponent, "{:.4g}".format)
        notes.append(f"Speed-up by the law L = {law.l_inf:.4g} + A C^-alpha, alpha {exponent}; {section.scaling.note}.")
    elif not any(entry.worth for entry in section.entries):
        from_scratch = section.plan.base.source is None  # a source has one size
        return [*notes, f"Speed-up: {section.scaling.note}, or --exchange."] if from_scratch else notes
    said: dict[str, list[str]] = {}
    for entry in section.contenders:
        said.setdefault(entry.worth_note, []).append(entry.label)
    for note, labels in said.items():
        whose = "All" if len(labels) == len(section.contenders) else ", ".join(labels)
        notes += [f"{whose}: {note}."] if note else []
    return [*notes, "Step-wise: times the baseline's tokens for the same loss; net: that at the throughput it has."]


def check_notes(section: Section) -> list[str]:
    """What the checks are for."""
    return ["The baseline alone, with another recipe, more tokens or none: intervals are for these together."]


def equal_notes(section: Section) -> list[str]:
    """What the mark means, where there is one."""
    found, notes = [equal for entry in section.contenders for equal in entry.equal.values()], []
    if any(equal.early for equal in found):
        notes.append(
            "~ The longer run is read where the shorter one ends, before its learning rate had come down, and looks "
            f"worse than a run of that length would: indicative only, and resolved only against that.{on_rows(section)}"
        )
    if any(equal.unsure for equal in found):
        notes.append("≈ Throughputs are closer to each other than they could be measured: no verdict at equal time.")
    return notes


def cost_notes(section: Section) -> list[str]:
    """How throughput was measured, and what the edge is."""
    how = "in the runs themselves, in the same comparison"
    if section.interleaved:
        spread = percent(max((entry.row.speed_spread for entry in section.entries), default=0.0))
        how = f"in turns before the runs, {CLOCK}; its ratio to the baseline's varied by up to {spread} between rounds"
    notes = [f"Throughput was measured {how}."]
    if has(lambda entry: entry.row.fixed_share is not None)(section):
        notes.append(
            "Calls: the part of a step's time that a step of two tokens takes too: calls of operations and the "
            "optimiser. The larger it is, the less tokens/s say about a larger model or a GPU."
        )
    if any(entry.spikes for entry in section.entries):
        notes.append("Spikes: logged gradient norms of more than four times the run's median.")
    if any(entry.row.lr_edge for entry in section.entries):
        notes.append("(edge): the best rate is the smallest or largest that was tried; a better one may lie beyond.")
    return notes


def rate_notes(section: Section) -> list[str]:
    """Which rate was chosen, and by what."""
    return [
        f"* chosen, on {len(section.plan.lr_seeds)} seeds and on held-out rows that the comparison does not judge by: "
        "the baseline's rate, unless another one is better by more than a standard error."
    ]


TABLES = (
    TableOf("Result", result_columns, result_notes),
    TableOf(
        "Loss minus the baseline's at equal budgets",
        equal_columns,
        equal_notes,
        lambda section: section.contenders,
        has(lambda entry: entry.equal),
    ),
    TableOf("Speed", SPEED, speed_notes),
    TableOf("Cost", COST, cost_notes),
    TableOf("Checks of the baseline", LOSS, check_notes, lambda section: section.checks),
    TableOf("Loss by learning rate", rate_columns, rate_notes, when=lambda section: len(section.plan.lrs) > 1),
)
