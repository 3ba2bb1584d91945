"""What a comparison says in sentences: verdicts, warnings, then the conditions they hold under.

A sentence more: a function of the comparison that returns sentences, and WARNINGS or CONDITIONS.
"""

from __future__ import annotations

import math

from twoaxis.base.plugins import use_options
from twoaxis.comparison.charts import NAMES
from twoaxis.comparison.results import REPORT, Comparison
from twoaxis.comparison.sections import Entry, Section
from twoaxis.comparison.statistics import BETTER, EQUIVALENT, OPEN, POWER, WORSE, Difference
from twoaxis.show.numbers import difference as signed
from twoaxis.show.numbers import loss, seconds
from twoaxis.training.folder import MODEL

CLOCK = "in CPU time of the process where a run has one thread of a CPU, else by the clock"
"""How `base.timer` measures."""
WARNING = "**Warning:**"
"""Begins a paragraph of its own."""


def headline(found: Comparison) -> str:
    """The first sentence: seeds, what was matched, how intervals were made."""
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
    """Names and values under "How it was made": hardware, versions, commands."""
    about = found.plan.about
    versions = ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items())
    commands = [("command", f"`{command.replace('`', ' ')}`") for command in about.get("commands", ())]
    hardware = about.get("hardware_line") or "not recorded"
    if len(machines := found.machines) > 1:  # losses compare, times do not
        hardware += "; runs by machine: " + "; ".join(f"{count} on {name}" for name, count in machines.items())
    page = found.folder / REPORT / "report.html"
    # Where the report is read from, it is known; its own text must not change when it is made again.
    report = [("report", f"`{page.as_posix()}`")] if found.home is None and page.exists() else []
    return (("hardware", hardware), ("versions", versions or "not recorded"), *commands, *report, *_next(found))


def _next(found: Comparison) -> list[tuple[str, str]]:
    """Where the models are, and what to do next: look into the best one beside the baseline, or run more seeds."""
    for section in found.sections:
        kept: list[tuple[Entry, str]] = []
        for entry in (section.baseline, *section.contenders):
            models = [entry.runs[seed].folder / MODEL for seed in sorted(entry.results) if entry.runs[seed].model]
            kept += [(entry, (found.folder / model).as_posix()) for model in models[:1]]
        if kept:
            best = min(kept[1:], key=lambda each: each[0].mean("loss") or math.inf, default=kept[0])
            paths = list(dict.fromkeys((best[1], kept[0][1])))
            following = f"twoaxis inspect {' --beside '.join(paths)} --prompt TEXT"
            following += "".join(dict.fromkeys(map(use_options, paths)))
            if section.chance is not None:  # a model of a task reads no text
                following = f"twoaxis compare --out {found.folder.as_posix()} --seeds {2 * len(found.plan.seeds)}"
                following += "".join(f" --use {file}" for file in found.plan.use)
            return [*(("model", f"`{path}`") for path in paths), ("next", f"`{following}`")]
    return []


def closing(found: Comparison) -> list[str]:
    """Paragraphs in plain language: what is resolved, what is not, each warning, and under which conditions."""
    verdicts = [_verdicts(section, several=len(found.sections) > 1) for section in found.sections]
    warnings = [f"**Warning:** {text}" for warn in WARNINGS for text in warn(found)]
    return [*verdicts, *warnings, " ".join(text for condition in CONDITIONS for text in condition(found))]


def _verdicts(section: Section, *, several: bool) -> str:
    """The verdicts of one section as a sentence."""
    where = f"On {section.data} at {section.size}: " if several else ""
    base, parts = section.baseline.label, []
    for verdict, word in ((BETTER, "better"), (WORSE, "worse")):
        if named := [_by(e, e.difference) for e in section.contenders if e.difference and e.verdict == verdict]:
            parts.append(f"resolved as {word} than {base}: {', '.join(named)}")
    if equal := [entry.label for entry in section.contenders if entry.verdict == EQUIVALENT]:
        parts.append(f"equivalent within {section.plan.margin:g} nats per token: {', '.join(equal)}")
    still_open = [(e, e.difference) for e in section.contenders if e.difference and e.verdict == OPEN]
    if rest := [_open(entry, difference) for entry, difference in still_open]:
        known = any(difference.detectable and not difference.diverged for _, difference in still_open)
        goal = "half of it" if section.plan.margin is None else "the margin"
        found = f"in brackets: the difference that is resolved with a probability of {POWER:.0%}, and what {goal} takes"
        brackets = f" ({found})" if known else ""
        parts.append(f"not resolved at this scale and with these seeds{brackets}: {', '.join(rest)}")
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
        reasons.append(unsigned(found.detectable))
        if entry.power is not None:
            _, needed, took = entry.power
            if needed is None:
                reasons.append("more held-out rows")
            elif needed > len(found.seeds):
                reasons.append(f"{needed} seeds{'' if took is None else f', about {seconds(took)}'}")
    return f"{entry.label} ({'; '.join(reasons)})" if reasons else entry.label


# Warnings.


def learned_less_than_counts(found: Comparison) -> list[str]:
    """The baseline has learned less than a table of counts."""
    short = []
    for section in found.sections:
        mean, table = section.baseline.mean("loss"), section.ngrams.get("bigram")
        if mean is not None and table is not None and mean > table:
            short.append(f"{loss(mean)} on {section.data}, {section.size}, where a bigram table has {loss(table)}")
    return short and [
        f"the baseline has learned less than a table of counts over the same tokens ({'; '.join(short)}): "
        "differences say how fast contenders begin to learn; train longer to see what they come to."
    ]


def recipe_explains(found: Comparison) -> list[str]:
    """Another recipe moves the baseline more than a contender differs from it."""
    moves = [(moved, labels) for moved, labels in map(_recipe, found.sections) if labels]
    return [f"{it}, more than the difference of {', '.join(names)}: the recipe may explain it." for it, names in moves]


def did_not_learn(found: Comparison) -> list[str]:
    """Parameters had no gradient in a run, or streams stayed copies of each other."""
    equal = [entry.label for entry in found.entries if any(it.equal_streams for it in entry.results.values())]
    said = [f"{label} (its streams are still equal)" for label in equal]
    for entry in found.entries:
        names = sorted({name for result in entry.results.values() for name in result.unmoved})
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            said.append(f"{entry.label} (no gradient: {', '.join(names[:3])}{more})")
    return said and [f"methods of which something did not learn: {'; '.join(said)}."]


def unfinished(found: Comparison) -> list[str]:
    """Runs had not finished."""
    runs = _count(found.missing, "run")
    return [f"{runs} had not finished when this was made: verdicts may change."] if found.missing else []


WARNINGS = (learned_less_than_counts, recipe_explains, did_not_learn, unfinished)


# Conditions.


def source(found: Comparison) -> list[str]:
    """What the contenders are made of, what training on gains without them, and what low-rank additions do."""
    base = found.plan.base
    if base.source is None:
        return []
    said = [f"All contenders are {base.source} with a method on it; what learns is {base.train}."]
    if "all" not in base.train:
        said.append("Gains are lower bounds: what is frozen has adapted to the plain residual.")
    for section in found.sections:
        for check in section.checks:
            gain = check.difference
            if gain is not None and gain.mean is not None and not check.row.steps:
                said.append(f"Training {section.baseline.label} alone moves the loss by {signed(-gain.mean)}.")
        if section.low_rank is not None:
            beyond = [(entry.label, section.beyond.get(entry.key)) for entry in section.contenders]
            more = [f"{name} by {unsigned(it.mean or 0.0)}" for name, it in beyond if it and it.verdict == BETTER]
            said.append(f"Resolved as better than {section.low_rank.label}, too: {', '.join(more) or 'none'}.")
    return said


def recipe(found: Comparison) -> list[str]:
    """How far another recipe moves the baseline, where that explains nothing."""
    return [f"{moved}." for moved, labels in map(_recipe, found.sections) if moved and not labels]


def _recipe(section: Section) -> tuple[str, list[str]]:
    """How far another recipe moves the baseline, and the resolved contenders that differ from it by less."""
    check = section.unsteadiness
    if check is None or check.difference is None or check.difference.mean is None:
        return "", []
    moved, others = check.difference.mean, [(entry.label, entry.difference) for entry in section.contenders]
    smaller = [label for label, it in others if it and it.resolved and abs(it.mean or 0.0) < abs(moved)]
    return f"{check.label} moves the loss by {signed(moved)}", smaller


def rates(found: Comparison) -> list[str]:
    """How learning rates were chosen."""
    if found.plan.base.source is not None and any(entry.row.new_rate for entry in found.entries):
        return [
            "What is new had a rate of its own (new lr), found by a few steps on training text; what the contenders "
            "share had the same rate."
        ]
    if len(found.plan.lrs) > 1:
        tried = ", ".join(f"{rate:g}" for rate in found.plan.lrs)
        text = (
            f"Each contender had the best of the learning rates {tried}, chosen on separate seeds and held-out rows; "
            "docs/explanation/statistics.md says how much oftener equal contenders are called different for that."
        )
        every = {entry.label for entry in found.entries}
        edge = {entry.label for entry in found.entries if entry.row.lr_edge}
        whom = "every contender" if edge == every and len(edge) > 2 else ", ".join(sorted(edge))
        return [text, *([f"The best rate lies at the edge of those tried for {whom}: widen --lr."] if edge else [])]
    if not found.shared_rate:
        return ["Contenders had learning rates of their own, as they were given."]
    rate = next((f" ({entry.row.lr:g})" for entry in found.entries if entry.row.lr is not None), "")
    return [
        f"All contenders had one shared learning rate{rate}, which favours the one it was tuned for, most often the "
        "baseline; --lr a,b,c chooses one for each."
    ]


def initial_weights(found: Comparison) -> list[str]:
    """How initial weights were scaled."""
    if found.plan.base.source is not None:
        return ["Every contender computes what the source does before its first step."]
    if len(found.inits) > 1:
        return [" and ".join(f"init={init}" for init in found.inits) + " were both used; see the tables."]
    inits = {
        "paper": "Initial weights are rescaled as each paper prescribes (init=paper).",
        "paired": "All contenders of a seed start from the same weights in what they have in common (init=paired).",
    }
    return [inits.get(init, f"{init}.") for init in found.inits]


def matched(found: Comparison) -> list[str]:
    """How time was made the same for all contenders."""
    if found.plan.match != "time":
        return []
    return [
        f"Contenders were matched by time, by a throughput measured once before the runs, {CLOCK}; where it "
        "differs from the baseline's by less than it varied, it counts as equal."
    ]


CONDITIONS = (source, recipe, rates, initial_weights, matched)


def unsigned(value: float) -> str:
    """A difference without its sign."""
    return signed(abs(value)).removeprefix("+")


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
