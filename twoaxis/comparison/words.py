"""What a comparison says, in sentences."""

from __future__ import annotations

from twoaxis.comparison.statistics import BETTER, WORSE
from twoaxis.comparison.summary import Entry, Summary, Table
from twoaxis.comparison.tables import unsigned


def headline(summary: Summary) -> str:
    """Seeds, what was matched, how intervals were made."""
    tables = summary.tables
    rivals = max((len(table.contenders) for table in tables), default=0)
    text = f"{_count(len(summary.seeds), 'seed')} ({', '.join(map(str, summary.seeds))}), matched by {summary.match}. "
    if rivals > 1:
        return text + (
            f"Intervals are 95% for the {rivals} contenders of a table together (Student's t on paired differences, "
            f"Bonferroni); resolved means that the interval leaves zero out."
        )
    return text + "Intervals are 95% (Student's t on paired differences); resolved means that it leaves zero out."


def facts(summary: Summary) -> list[tuple[str, str]]:
    """What every form of the report carries: hardware, versions, command."""
    versions = ", ".join(f"{name} {version}" for name, version in summary.versions.items())
    return [
        ("hardware", summary.hardware or "not recorded"),
        ("versions", versions or "not recorded"),
        *(("command", command) for command in summary.commands),
    ]


def closing(summary: Summary) -> list[str]:
    """Paragraphs in plain language: what is resolved, what is not, under which conditions."""
    said = [_verdicts(table, several=len(summary.tables) > 1) for table in summary.tables]
    return [*said, " ".join(_conditions(summary))]


def _verdicts(table: Table, *, several: bool) -> str:
    """What one table settles."""
    where = f"On {table.data} at {table.size}: " if several else ""
    base = table.baseline.label
    parts = []
    for verdict, word in ((BETTER, "better"), (WORSE, "worse")):
        named = [entry for entry in table.contenders if entry.verdict == verdict]
        if named:
            parts.append(f"resolved as {word} than {base}: {', '.join(_by(entry) for entry in named)}")
    still = [entry for entry in table.contenders if entry.verdict not in (BETTER, WORSE)]
    if still:
        parts.append(f"not resolved at this scale and with these seeds: {', '.join(_open(entry) for entry in still)}")
    if not parts:
        return f"{where}there is nothing but {base} to compare."
    for axis, name in (("tokens", "tokens"), ("flops", "FLOPs"), ("time", "time")):
        better = [entry for entry in table.contenders if entry.verdict == BETTER and axis in entry.equal]
        worse = [entry.label for entry in better if entry.equal[axis].difference.verdict == WORSE]
        still = [entry.label for entry in better if entry.equal[axis].difference.verdict not in (BETTER, WORSE)]
        if worse:
            parts.append(f"at equal {name} the opposite is resolved for {', '.join(worse)}")
        if still:
            parts.append(f"at equal {name} being better is not resolved for {', '.join(still)}: --match {axis} tells")
    text = ". ".join(part[0].upper() + part[1:] for part in parts)
    return f"{where}{text}."


def _by(entry: Entry) -> str:
    found = entry.difference
    assert found is not None
    assert found.mean is not None
    assert found.low is not None
    assert found.high is not None
    low, high = sorted((abs(found.low), abs(found.high)))
    return f"{entry.label} by {unsigned(found.mean)} nats per token ({unsigned(low)} to {unsigned(high)})"


def _open(entry: Entry) -> str:
    found = entry.difference
    assert found is not None
    reasons = []
    if found.diverged:
        reasons.append(f"{_count(len(found.diverged), 'run')} diverged")
    if found.mean is None:
        reasons.append("no pair of runs has finished")
    elif found.low is None:
        reasons.append("one seed tells nothing of chance")
    elif entry.seeds_needed is not None and not found.diverged:
        reasons.append(f"about {entry.seeds_needed} seeds would settle a difference of {unsigned(found.mean)}")
    return f"{entry.label} ({'; '.join(reasons)})" if reasons else entry.label


def _conditions(summary: Summary) -> list[str]:
    """Rates, initial weights, budgets, speed-up and what is missing."""
    said = []
    if len(summary.rates) > 1:
        rates = ", ".join(f"{rate:g}" for rate in summary.rates)
        said.append(f"Each contender had the best of the learning rates {rates}, chosen on separate seeds.")
        every = {entry.label for table in summary.tables for entry in table.entries}
        edge = {entry.label for table in summary.tables for entry in table.entries if entry.lr_edge}
        if edge:
            whom = "every contender" if edge == every and len(edge) > 2 else ", ".join(sorted(edge))
            said.append(f"The best rate lies at the edge of those tried for {whom}: widen --lr.")
    elif summary.shared_rate:
        rate = next((e.lr for table in summary.tables for e in table.entries if e.lr is not None), None)
        said.append(
            f"All contenders had one shared learning rate{'' if rate is None else f' ({rate:g})'}, which favours the "
            "one it was tuned for, most often the baseline; --lr a,b,c chooses one for each."
        )
    else:
        said.append("Contenders had learning rates of their own, as they were given.")
    inits = {
        "paper": "Initial weights are rescaled as each paper prescribes (init=paper)",
        "paired": "All contenders of a seed start from the same weights in what they have in common (init=paired)",
    }
    said.append(
        " and ".join(f"init={init}" if len(summary.inits) > 1 else inits.get(init, init) for init in summary.inits)
    )
    said[-1] += " were both used; see the tables." if len(summary.inits) > 1 else "."
    matched = {
        "tokens": "Contenders were matched by training tokens; what they cost besides is in the tables.",
        "flops": "Contenders were matched by training operations, within the rounding to whole steps.",
        "time": "Contenders were matched by wall-clock time, by a throughput measured once before the runs.",
    }
    said.append(matched[summary.match])
    if all(fit.law is None for fit in summary.laws.values()):
        said.append("The effective speed-up needs --sizes (three or more), or a law given by --l-inf and --alpha.")
    diverged = sum(len(entry.diverged) for table in summary.tables for entry in table.entries)
    if diverged:
        said.append(f"{_count(diverged, 'run')} diverged.")
    if summary.missing:
        said.append(f"{_count(summary.missing, 'run')} had not finished when this was made: verdicts may change.")
    return said


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
