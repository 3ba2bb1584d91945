"""The tables of a report as text, the same for the terminal, Markdown and the page.

Each data set and size has four: the result, the loss at equal tokens, operations and time, the cost, and the learning
rates where several were tried.
"""

from __future__ import annotations

from typing import NamedTuple

from twoaxis.comparison.summary import Entry, Equal, Summary, Table, ratio

NOTHING = "-"
"""Where there is no number."""


class Cell(NamedTuple):
    """A place in a table."""

    text: str
    order: float | None = None
    """What sorting goes by; None sorts last, or by the text in the first column."""
    tone: str = ""
    """better, worse, warn or nothing, for colours."""


class Grid(NamedTuple):
    """A table of text."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    """The first cell of each is the contender."""
    notes: tuple[str, ...] = ()


def grids(summary: Summary, table: Table) -> tuple[Grid, ...]:
    """The tables of one data set and size."""
    made = [_result(summary, table), _equal(summary, table), _cost(table)]
    if len(summary.rates) > 1:
        made.append(_rates(summary, table))
    return tuple(made)


def _result(summary: Summary, table: Table) -> Grid:
    """Loss, difference, verdict and speed-up; accuracy for tasks, bits per byte for text."""
    task = table.chance is not None
    text = any(entry.bits_per_byte is not None for entry in table.entries)
    heads = ["contender", "seeds", "loss", "difference", "95% interval", "verdict"]
    heads += ["accuracy", "difference"] if task else []
    heads += ["bits/byte"] if text else []
    law = summary.laws[table.data]
    heads += ["speed-up"] if law.law is not None else []
    rows = []
    for entry in table.entries:
        cells = [_name(entry), _seeds(entry, summary), Cell(number(entry.loss), entry.loss), *_difference(entry)]
        if task:
            cells += [_percent(entry.accuracy), _accuracy_difference(entry)]
        if text:
            cells.append(Cell(number(entry.bits_per_byte), entry.bits_per_byte))
        rows.append((*cells, _speed_up(entry)) if law.law is not None else tuple(cells))
    notes = []
    if task:
        notes.append(f"Guessing scores {table.chance:.1%}. The verdict is about the loss.")
    for entry in table.entries:
        said = [entry.difference.note] if entry.difference is not None and entry.difference.note else []
        if entry.baseline and (entry.diverged or entry.missing):
            said.append(f"{len(entry.diverged)} runs diverged, {len(entry.missing)} not finished")
        if law.law is not None and entry.speed_up_note:
            said.append(f"speed-up: {entry.speed_up_note}")
        if said:
            notes.append(f"{entry.label}: {'; '.join(said)}.")
    if law.law is not None:
        exponent = f"{law.law.alpha:.4g}"
        if law.exponent is not None and law.exponent.low is not None and law.exponent.high is not None:
            exponent += f" ({law.exponent.low:.3g} to {law.exponent.high:.3g})"
        notes.append(f"Speed-up by the law L = {law.law.l_inf:.4g} + A C^-alpha, alpha {exponent}; {law.note}.")
    else:
        notes.append(f"Effective speed-up: {law.note}.")
    return Grid("Result", tuple(heads), tuple(rows), tuple(notes))


def _name(entry: Entry) -> Cell:
    """The label, with a flag where runs diverged."""
    return Cell(f"{entry.label} ({len(entry.diverged)} diverged)" if entry.diverged else entry.label)


def _seeds(entry: Entry, summary: Summary) -> Cell:
    done, planned = len(entry.finished), len(summary.seeds)
    return Cell(f"{done}" if done == planned else f"{done} of {planned}", done, "" if done == planned else "warn")


def _difference(entry: Entry) -> list[Cell]:
    found = entry.difference
    if found is None:
        return [Cell(NOTHING), Cell(NOTHING), Cell("baseline")]
    interval = Cell(NOTHING)
    if found.low is not None and found.high is not None:
        interval = Cell(f"{signed(found.low)} to {signed(found.high)}", found.low)
    return [Cell(signed(found.mean), found.mean), interval, Cell(found.verdict, found.corrected_p, tone(found.verdict))]


def _accuracy_difference(entry: Entry) -> Cell:
    found = entry.accuracy_difference
    if found is None or found.mean is None:
        return Cell(NOTHING)
    text = f"{100 * found.mean:+.1f}"
    if found.low is not None and found.high is not None:
        text += f" ({100 * found.low:+.1f} to {100 * found.high:+.1f})"
    return Cell(text, found.mean, tone(found.verdict))


def _speed_up(entry: Entry) -> Cell:
    if entry.speed_up is None:
        return Cell(NOTHING)
    if entry.baseline:
        return Cell("1", 1.0)
    found = entry.speed_up
    text = f"{found.value:.3g}"
    if found.low is not None and found.high is not None:
        text += f" ({found.low:.3g} to {found.high:.3g})"
    return Cell(text, found.value)


def _equal(summary: Summary, table: Table) -> Grid:
    """Differences at equal tokens, operations and time."""
    names = {"tokens": "at equal tokens", "flops": "at equal FLOPs", "time": "at equal time"}
    heads = [f"{name} (matched)" if axis == summary.match else name for axis, name in names.items()]
    rows = [(Cell(entry.label), *(_equal_cell(entry.equal.get(axis)) for axis in names)) for entry in table.contenders]
    notes = []
    if any(equal.indicative for entry in table.contenders for equal in entry.equal.values()):
        notes.append(
            "~ The longer run is read where the shorter one ends, before its learning rate had come down, and looks "
            "worse than a run of that length would: indicative only, and resolved only against that."
        )
    return Grid("Loss minus the baseline's at equal budgets", ("contender", *heads), tuple(rows), tuple(notes))


def _equal_cell(equal: Equal | None) -> Cell:
    if equal is None or equal.difference.mean is None:
        return Cell(NOTHING)
    found = equal.difference
    mark = "~" if equal.indicative else ""
    return Cell(f"{signed(found.mean)}{mark} {found.verdict}", found.mean, tone(found.verdict))


def _cost(table: Table) -> Grid:
    """What a contender takes, and how much more than the baseline."""
    base = table.baseline
    rows = [
        (
            Cell(entry.label),
            _more(entry.parameters, base.parameters, count(entry.parameters)),
            _more(entry.flops_per_token, base.flops_per_token, count(entry.flops_per_token)),
            _more(entry.tokens, base.tokens, count(entry.tokens)),
            _times(entry.tokens_per_second, base.tokens_per_second, count(entry.tokens_per_second)),
            _times(entry.peak_memory, base.peak_memory, size(entry.peak_memory)),
            _rate(entry),
        )
        for entry in table.entries
    ]
    heads = ("contender", "parameters", "FLOPs/token", "tokens", "tokens/s", "peak memory", "lr")
    how = "in turns before the runs" if table.interleaved else "in the runs themselves, in the same comparison"
    notes = [f"Throughput was measured {how}."]
    if any(entry.lr_edge for entry in table.entries):
        notes.append("(edge): the best rate is the smallest or largest that was tried; a better one may lie beyond.")
    return Grid("Cost", heads, tuple(rows), tuple(notes))


def _rate(entry: Entry) -> Cell:
    if entry.lr is None:
        return Cell("not chosen", None, "warn")
    return Cell(f"{entry.lr:g} (edge)" if entry.lr_edge else f"{entry.lr:g}", entry.lr, "warn" if entry.lr_edge else "")


def _rates(summary: Summary, table: Table) -> Grid:
    """Mean loss by learning rate, on seeds of their own."""
    heads = ("contender", *(f"{rate:g}" for rate in summary.rates))
    rows = []
    for entry in table.entries:
        cells = [Cell(entry.label)]
        for rate in summary.rates:
            known = {float(name): loss for name, loss in entry.lr_losses.items()}
            loss = known.get(rate)
            text = NOTHING if rate not in known else "diverged" if loss is None else number(loss)
            cells.append(Cell(text + (" *" if rate == entry.lr else ""), loss))
        rows.append(tuple(cells))
    seeds = ", ".join(map(str, summary.rate_seeds))
    note = f"* chosen, by the mean held-out loss of seeds {seeds}, which the comparison does not use."
    return Grid("Loss by learning rate", heads, tuple(rows), (note,))


def _percent(value: float | None) -> Cell:
    return Cell(NOTHING if value is None else f"{value:.1%}", value)


def _more(value: float | None, base: float | None, text: str) -> Cell:
    """A count and by how many percent it exceeds the baseline's."""
    part = ratio(value, base)
    if part is None or part == 1:
        return Cell(text, value)
    return Cell(f"{text} {100 * (part - 1):+.1f}%", value)


def _times(value: float | None, base: float | None, text: str) -> Cell:
    """A measure and how many times the baseline's it is."""
    part = ratio(value, base)
    return Cell(text if part is None or value == base else f"{text} ×{part:.2f}", value)


def number(value: float | None) -> str:
    """A loss."""
    return NOTHING if value is None else f"{value:.4f}"


def signed(value: float | None) -> str:
    """A difference, with digits for small ones."""
    if value is None:
        return NOTHING
    return f"{value:+.4f}" if abs(value) >= 0.00095 or value == 0 else f"{value:+.1e}"


def unsigned(value: float) -> str:
    """The same without its sign."""
    return signed(abs(value)).removeprefix("+")


def count(value: float | None) -> str:
    """As 1.10M."""
    if value is None:
        return NOTHING
    for unit, name in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit * 0.9995:
            return f"{value / unit:.3g}{name}"
    return f"{value:.3g}"


def size(value: float | None) -> str:
    """Bytes, as 300 MB."""
    if value is None:
        return NOTHING
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= unit * 0.9995:
            return f"{value / unit:.3g} {name}"
    return f"{value:.0f} B"


def tone(verdict: str) -> str:
    """Colour of a verdict."""
    return "better" if "better" in verdict else "worse" if "worse" in verdict else ""
