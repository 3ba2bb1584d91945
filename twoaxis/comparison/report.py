"""The report of a comparison: what it found, as a document of tables, sentences and charts.

Where to add something:

    a column of a table     RESULT, COST, or a function that makes columns (`equal_columns`, ...)
    a table                 TABLES
    a sentence              SENTENCES, for conditions; `_verdicts` says what is settled
    a chart                 twoaxis.comparison.charts
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from twoaxis.comparison.charts import CHARTS, NAMES, flagged, tone
from twoaxis.comparison.entries import Entry, ratio
from twoaxis.comparison.results import Comparison
from twoaxis.comparison.scaling import Interval
from twoaxis.comparison.sections import Section
from twoaxis.comparison.statistics import BETTER, EQUIVALENT, POWER, WORSE, Difference
from twoaxis.show.document import Block, Cell, Column, Document, Facts, Heading, Items, Prose, Table
from twoaxis.show.numbers import NOTHING, count, loss, percent, seconds, si, whole
from twoaxis.show.numbers import difference as signed
from twoaxis.training.results import MODEL


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
    entries: Callable[[Section], tuple[Entry, ...]] = lambda section: (section.baseline, *section.contenders)

    def make(self, section: Section) -> Table | None:
        """The table of a section; None where it has none."""
        entries = self.entries(section)
        if not entries or not self.when(section):
            return None
        columns = self.columns if isinstance(self.columns, tuple) else self.columns(section)
        baseline = next((place for place, entry in enumerate(entries) if entry.baseline), None)
        return make_table((NAME, *columns), entries, section, self.notes(section), baseline=baseline)


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
    text = f"{EQUIVALENT} within {section.plan.margin:g}" if entry.verdict == EQUIVALENT else entry.verdict
    return Cell(text, entry.difference and entry.difference.corrected_p, tone(entry.verdict))


def _p(entry: Entry, section: Section) -> Cell:
    """Corrected for the contenders and looks of the table."""
    p = entry.difference and entry.difference.corrected_p
    return Cell(NOTHING if p is None else "<.001" if p < 0.001 else f"{p:.3f}".lstrip("0"), p)


def _resolvable(entry: Entry, section: Section) -> Cell:
    least = entry.difference and entry.difference.detectable
    return Cell(NOTHING if least is None else unsigned(least), least)


def _accuracy_difference(entry: Entry, section: Section) -> Cell:
    found = entry.accuracy_difference
    if found is None or found.mean is None:
        return Cell(NOTHING)
    return Cell(with_ends(found.mean, found, lambda value: f"{100 * value:+.1f}"), found.mean, tone(found.verdict))


def _worth(which: str, entry: Entry, section: Section) -> Cell:
    """The speed-up in tokens or net."""
    found: Interval | None = entry.worth and getattr(entry.worth, which)
    return Cell(NOTHING) if found is None else Cell(with_ends(found.value, found, "{:.3g}".format), found.value)


def _throughput(entry: Entry, section: Section) -> Cell:
    part = ratio(entry.tokens_per_second, section.baseline.tokens_per_second)
    return Cell(NOTHING if part is None else f"×{part:.2f}", part)


def _to_target(what: str, entry: Entry, section: Section) -> Cell:
    """Steps or tokens to the baseline's loss at its end."""
    goal = section.baseline.mean("loss")
    tokens = None if goal is None else entry.row.tokens if entry.baseline else entry.tokens_to(goal)
    if tokens is None:
        return Cell("never" if entry.losses else NOTHING)
    value = tokens * entry.row.steps / entry.row.tokens if what == "steps" else tokens
    return Cell(whole(value) if what == "steps" else count(value), value)


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


NAME = Col("contender", _name, words=True)
MAIN = (
    Col("seeds", _seeds),
    Col("loss", partial(_mean, "loss", loss)),
    Col("sd", lambda entry, section: Cell(NOTHING if entry.spread is None else unsigned(entry.spread), entry.spread)),
    Col("difference", _difference),
    Col("95% interval", _interval, words=True),
    Col("p", _p),
    Col("verdict", _verdict, words=True),
    Col("resolvable", _resolvable),
    Col("accuracy", partial(_mean, "accuracy", percent), is_task),
    Col("accuracy difference", _accuracy_difference, is_task),
    Col("bits/byte", partial(_mean, "bits_per_byte", loss), lambda s: any(e.mean("bits_per_byte") for e in s.entries)),
)
SPEED = (
    Col("late mean", lambda entry, section: Cell(loss(entry.late), entry.late)),
    Col("steps to it", partial(_to_target, "steps")),
    Col("tokens to it", partial(_to_target, "tokens")),
    Col("step-wise", partial(_worth, "tokens"), lambda s: any(e.worth for e in s.entries)),
    Col("throughput", _throughput),
    Col("net", partial(_worth, "net"), lambda s: any(e.worth for e in s.entries)),
)
CHECKS = (MAIN[1], MAIN[2], MAIN[3], MAIN[4])
COST = (
    Col("parameters", partial(_cost, "parameters", count)),
    Col("FLOPs/token", partial(_cost, "flops_per_token", count)),
    Col("tokens", partial(_cost, "tokens", count)),
    Col("tokens/s", partial(_cost, "tokens_per_second", count)),
    Col("peak memory", partial(_cost, "peak_memory", si)),
    Col("spikes", lambda e, s: Cell(str(e.spikes), e.spikes), lambda s: any(e.spikes for e in s.entries)),
    Col("lr", _rate),
)


def result_columns(section: Section) -> list[Col]:
    """What was found, then the loss of every seed with the way to its model."""
    return [*MAIN, *(Col(f"seed {seed}", partial(_seed, seed)) for seed in section.baseline.seeds)]


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
    law, goal = section.scaling.law, section.baseline.mean("loss")
    notes = [
        "Late mean: of the evaluations in the last fifth of a run. It is the baseline's loss at its end"
        f"{'' if goal is None else f', {loss(goal)}'}; before its own end a run had not lowered its rate."
    ]
    if law is not None:
        exponent = with_ends(law.alpha, section.scaling.exponent, "{:.4g}".format)
        notes.append(f"Speed-up by the law L = {law.l_inf:.4g} + A C^-alpha, alpha {exponent}; {section.scaling.note}.")
    elif not any(entry.worth for entry in section.entries):
        return [*notes, f"Speed-up: {section.scaling.note}, or --exchange."]
    said: dict[str, list[str]] = {}
    for entry in section.contenders:
        said.setdefault(entry.worth_note, []).append(entry.label)
    for note, labels in said.items():
        whose = "All" if len(labels) == len(section.contenders) else ", ".join(labels)
        notes += [f"{whose}: {note}."] if note else []
    return [*notes, "Step-wise: times the baseline's tokens for the same loss; net: that at the throughput it has."]


def check_notes(section: Section) -> list[str]:
    """What the checks are for."""
    return ["The baseline alone, with another recipe or more tokens: intervals are for these together."]


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
    text = f"{signed(found.mean)}{'~' * bool(equal.early)}{'≈' * equal.unsure} {found.verdict}"
    return Cell(text, found.mean, tone(found.verdict))


def equal_notes(section: Section) -> list[str]:
    """What the mark means, where there is one."""
    found, notes = [equal for entry in section.contenders for equal in entry.equal.values()], []
    if any(equal.early for equal in found):
        notes.append(
            "~ The longer run is read where the shorter one ends, before its learning rate had come down, and looks "
            "worse than a run of that length would: indicative only, and resolved only against that."
        )
    if any(equal.unsure for equal in found):
        notes.append("≈ Throughputs are closer to each other than they could be measured: no verdict at equal time.")
    return notes


def cost_notes(section: Section) -> list[str]:
    """How throughput was measured, and what the edge is."""
    how = (
        f"in turns before the runs, {CLOCK}"
        if section.interleaved
        else "in the runs themselves, in the same comparison"
    )
    spread = max((entry.row.speed_spread for entry in section.entries), default=0.0)
    known = (
        f"; its ratio to the baseline's varied by up to {percent(spread)} between rounds" if section.interleaved else ""
    )
    notes = [f"Throughput was measured {how}{known}."]
    if any(entry.spikes for entry in section.entries):
        notes.append("Spikes: logged gradient norms of more than four times the run's median.")
    if any(entry.row.lr_edge for entry in section.entries):
        notes.append("(edge): the best rate is the smallest or largest that was tried; a better one may lie beyond.")
    return notes


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
    seeds = len(section.plan.lr_seeds)
    return [
        f"* chosen, on {seeds} seeds and on held-out rows that the comparison does not judge by: the baseline's rate, "
        "unless another one is better by more than a standard error."
    ]


TABLES = (
    TableOf("Result", result_columns, result_notes),
    TableOf(
        "Loss minus the baseline's at equal budgets",
        equal_columns,
        equal_notes,
        entries=lambda section: section.contenders,
    ),
    TableOf("Speed", SPEED, speed_notes),
    TableOf("Cost", COST, cost_notes),
    TableOf("Checks of the baseline", CHECKS, check_notes, entries=lambda section: section.checks),
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
    plan = found.plan
    seeds, rivals = plan.seeds, max((len(section.contenders) for section in found.sections), default=0)
    most = "at most " if plan.until else ""
    text = f"{most}{_count(len(seeds), 'seed')} ({', '.join(map(str, seeds))}), matched by {plan.match}. "
    how = "moderated t on paired differences" if rivals > 2 else "Student's t on paired differences"
    together = f" for the {rivals} contenders of a table together" if rivals > 1 else ""
    bonferroni = ", Bonferroni" if rivals > 1 else ""
    text += f"Intervals are 95%{together} ({how}{bonferroni}); resolved means that it leaves zero out. "
    looks = ", ".join(str(look.seeds) for look in plan.looks)
    if plan.until:
        text += f"Verdicts were given at {looks} seeds, as planned; a contender that was resolved got no more of them."
    elif plan.grown:
        text += (
            f"Seeds were added after verdicts had been seen (at {looks}): intervals are wider for that, and something "
            "is resolved wrongly in up to 10% of such comparisons instead of 5%; --until resolved plans it."
        )
    return text[0].upper() + text[1:].rstrip()


def facts(found: Comparison) -> tuple[tuple[str, str], ...]:
    """Hardware, versions, commands."""
    about = found.plan.about
    versions = ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items())
    commands = [("command", f"`{command.replace('`', ' ')}`") for command in about.get("commands", ())]
    hardware = about.get("hardware_line") or "not recorded"
    if len(machines := found.machines) > 1:  # losses compare, times do not
        hardware += "; runs by machine: " + "; ".join(f"{count} on {name}" for name, count in machines.items())
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
    equal = [entry.label for entry in section.contenders if entry.verdict == EQUIVALENT]
    if equal:
        parts.append(f"equivalent within {section.plan.margin:g} nats per token: {', '.join(equal)}")
    rest = [e for e in section.contenders if e.difference and not e.difference.resolved and e.verdict != EQUIVALENT]
    if rest:
        still = (_open(entry, entry.difference) for entry in rest if entry.difference)
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
    elif found.detectable and not found.diverged:
        reasons.append(f"{unsigned(found.detectable)} or more would have been, with a probability of {POWER:.0%}")
        if entry.power is not None:
            effect, needed, took = entry.power
            if needed is None:
                reasons.append(f"for {unsigned(effect)} more held-out rows are needed")
            elif needed > len(found.seeds):
                minutes = "" if took is None else f", about {seconds(took)} of training,"
                reasons.append(f"{needed} seeds{minutes} would do for {unsigned(effect)}")
    return f"{entry.label} ({'; '.join(reasons)})" if reasons else entry.label


def counting_sentence(found: Comparison) -> str:
    """A baseline that has learned less than a table of counts."""
    short = []
    for section in found.sections:
        mean, table = section.baseline.mean("loss"), section.ngrams.get("bigram")
        if mean is not None and table is not None and mean > table:
            short.append(f"{loss(mean)} on {section.data}, {section.size}, where a bigram table has {loss(table)}")
    if not short:
        return ""
    return (
        f"**Warning:** the baseline has learned less than a table of counts over the same tokens ({'; '.join(short)}): "
        "differences say how fast contenders begin to learn; train longer to see what they come to."
    )


def recipe_sentence(found: Comparison) -> str:
    """A baseline that its recipe moves more than a contender does."""
    said = []
    for section in found.sections:
        check = section.unsteadiness
        if check is None or check.difference is None or check.difference.mean is None:
            continue
        moved = abs(check.difference.mean)
        smaller = [
            entry.label
            for entry in section.contenders
            if entry.difference and entry.difference.resolved and abs(entry.difference.mean or 0.0) < moved
        ]
        words = f"{check.label} moves the loss by {signed(check.difference.mean)}"
        if smaller:
            words = f"**Warning:** {words}, more than the difference of {', '.join(smaller)}: the recipe may explain it"
        said.append(words + ".")
    return " ".join(said)


def unmoved_sentence(found: Comparison) -> str:
    """Parameters that have had no gradient in a run, and streams that are copies of each other."""
    said = [
        f"{entry.label} (its streams are still equal)"
        for entry in found.entries
        if any(result.equal_streams for result in entry.results.values())
    ]
    for entry in found.entries:
        names = sorted({name for result in entry.results.values() for name in result.unmoved})
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            said.append(f"{entry.label} (no gradient: {', '.join(names[:3])}{more})")
    return f"**Warning:** methods of which something did not learn: {'; '.join(said)}." if said else ""


def rate_sentence(found: Comparison) -> str:
    """How learning rates were chosen."""
    if len(found.plan.lrs) > 1:
        rates = ", ".join(f"{rate:g}" for rate in found.plan.lrs)
        text = (
            f"Each contender had the best of the learning rates {rates}, chosen on separate seeds and held-out rows; "
            "docs/statistics.md says how much oftener equal contenders are told apart for that."
        )
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
    if any(entry.worth for entry in found.entries):
        return ""
    return "The effective speed-up needs --exchange, --sizes (three or more), or a law given by --l-inf and --alpha."


def gap_sentence(found: Comparison) -> str:
    """Runs that are not there."""
    diverged, said = sum(len(entry.diverged) for entry in found.entries), []
    if diverged:
        said.append(f"{_count(diverged, 'run')} diverged.")
    if found.missing:
        said.append(f"{_count(found.missing, 'run')} had not finished when this was made: verdicts may change.")
    return " ".join(said)


SENTENCES = (
    counting_sentence,
    recipe_sentence,
    unmoved_sentence,
    rate_sentence,
    init_sentence,
    match_sentence,
    law_sentence,
    gap_sentence,
)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
