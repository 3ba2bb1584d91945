"""Advice as a page for people and as one JSON document for programs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from twoaxis.costs.document import deployment_line, times
from twoaxis.guide.advise import GOALS, PAYS, Advice, Choice, papers_say
from twoaxis.guide.evidence import Evidence, Record, sentence
from twoaxis.guide.next_steps import next_steps
from twoaxis.show.document import Block, Code, Column, Document, Heading, Items, Prose, Table, table
from twoaxis.show.numbers import NOTHING, si
from twoaxis.show.numbers import times as ratio

SHOWN = 4
"""Records printed of a method; `--records` has all."""
BEGINNINGS = {
    "bitwise": "the retrofitted model gives the same logits as the trained one, bit for bit",
    "rounding": "the retrofitted model gives the same logits as the trained one up to rounding",
    "blend": "the method has no exact neutral start; a gate fades it in from zero over the plain stream",
}
"""How a method begins on a trained model, by its neutral class."""
STARTS = {"scratch": "from scratch", "retrofit": "onto a trained model"}


def document(advice: Advice) -> Document:
    """The answer: what to try, why, at what cost and risk, and the commands that follow."""
    said = papers_say(advice)
    blocks: list[Block] = [
        Prose(_asked(advice)),
        Prose(verdict(advice)),
        Items(tuple(said)) if said else Prose(_elsewhere(advice)),
        Heading("Ranking"),
        ranking(advice),
        Prose(_rule(advice)),
    ]
    for number, choice in enumerate(advice.ranked[: advice.top], start=1):
        blocks += [Heading(f"{number}. {choice.method}", 3), Items(tuple(_about(advice, choice)))]
    if steps := next_steps(advice):
        blocks.append(Heading("Next"))
        blocks.append(Code("\n\n".join(map(str, steps))))
    if advice.excluded or advice.refused:
        rows = [(c.method, f"{c.trust.speed_up:.3f}x", c.excluded or "") for c in advice.excluded]
        rows += [(title, NOTHING, f"has no place there: {why}") for title, why in advice.refused]
        blocks += [Heading("Excluded"), table(("method", "trusted", Column("because it", number=False)), rows)]
    return Document(f"Advice for {advice.question.shape}", tuple(blocks))


def _elsewhere(advice: Advice) -> str:
    """What is advised where the goal is none that somebody gives advice for."""
    said = [f"{each.method} for {GOALS[each.goal]} ({each.source})" for each in advice.evidence.advice]
    return f"No paper advises a method for {GOALS[advice.question.goal]}; advised are {' and '.join(said)}."


def _asked(advice: Advice) -> str:
    question, profile = advice.question, advice.plain.profile
    parts = [f"Wanted: {GOALS[question.goal]}, {STARTS[question.start]}, {advice.parameters:,} parameters"]
    if question.serving:
        parts.append(f"{question.serving:.0%} of the compute decodes")
    if question.max_overhead is not None:
        parts.append(f"at most {question.max_overhead:g}% more time")
    if question.headroom is not None:
        parts.append(f"at most {question.headroom:g} GB more on a device")
    text = f"{'; '.join(parts)}. {deployment_line(question.deployment, profile)}"
    if not advice.plain.fits:
        text += (
            f" The plain model itself takes {si(advice.plain.memory.total)} of a device's "
            f"{si(profile.memory)} in training: give the real deployment to compare memory."
        )
    return text


def verdict(advice: Advice) -> str:
    """The answer in a sentence or two."""
    if not advice.ranked:
        return "**Stay with the plain residual**: no method keeps the limits."
    best = advice.ranked[0]
    if best.net <= PAYS:
        return (
            "**Stay with the plain residual** unless a comparison of your own says otherwise: no published gain, "
            f"trusted as far as its evidence goes, pays for its cost here. The nearest is {best.method}, "
            f"net {best.net:.3f}."
        )
    others = ", ".join(choice.method for choice in advice.paying[1:4])
    return (
        f"**Try {best.method} first**: its published gains, discounted for how they were found, are worth "
        f"{best.trust.speed_up:.3f} times the compute, and it takes {best.ratio:.3f} times as long."
        + (f" Then {others}." if others else " Nothing else is expected to pay.")
    )


def ranking(advice: Advice) -> Table:
    """All ranked methods."""
    bare = advice.plain.pipeline.cached
    columns: dict[str, Callable[[Choice], str]] = {
        "method": lambda c: c.method,
        "trusted": lambda c: f"{c.trust.speed_up:.3f}x",
        "time": lambda c: f"{c.ratio:.3f}x",
        "ideal": lambda c: f"{c.ideal:.3f}x",
        "net": lambda c: f"{c.net:.3f}",
        "parameters": lambda c: f"+{si(c.costs.parameters_added, '')}".strip().replace("G", "B"),
        "memory": lambda c: f"{'+' if c.added >= 0 else '-'}{si(abs(c.added))}",
        "pipeline traffic": lambda c: f"{c.costs.pipeline.cached / bare:.3g}x",
        "studies": lambda c: str(len(c.trust.studies)),
    }
    if advice.question.deployment.pipeline_stages == 1:
        del columns["pipeline traffic"]
    return table(tuple(columns), [tuple(cell(choice) for cell in columns.values()) for choice in advice.ranked])


def _rule(advice: Advice) -> str:
    law = advice.evidence.law
    ours = f"kernels that this library has on {advice.plain.profile.title}"
    return (
        "Trusted: times the plain model's compute that buys the same loss, a mean over studies that leans to 1 where "
        "they are few, single-seed or far from your scale (loss falls as compute to the power "
        f"-{law.exponent:g}: {law.source}). Time: predicted, with "
        f"{ours if advice.question.kernels == 'ours' else 'ideal kernels'}; ideal: with one kernel between two "
        "sub-layers, which nobody may have written yet. Net: trusted over time, by which the list is ranked. The rule "
        "stands in docs/howto/choose.md."
    )


def _about(advice: Advice, choice: Choice) -> list[str]:
    """Reason, cost, evidence and risk of one method."""
    costs = choice.costs
    lines = [f"**What it does**: {choice.candidate.why}."]
    cost_line = (
        f"**Cost here**: training {ratio(costs.train.eager)} with our kernels ({costs.kernels}), "
        f"{ratio(costs.train.fused)} with ideal ones; {costs.parameters_added:,} more parameters, {si(choice.added)} "
        "more on the fullest device"
    )
    if advice.question.serving:
        cost_line += f"; decoding {times(costs.decode)}"
    if costs.deployment.pipeline_stages > 1:
        whole = costs.pipeline.whole / advice.plain.pipeline.whole
        cached = costs.pipeline.cached / advice.plain.pipeline.cached
        cost_line += f"; pipeline traffic {cached:.3g}x cached, {whole:.3g}x forwarded whole"
    lines.append(f"{cost_line}.")
    shown = nearest(choice, advice)
    rest = len([r for r in choice.records if r.kind != "none"]) - len(shown)
    lines += [f"**Published**: {sentence(record)}." for record in shown]
    if rest > 0:
        lines.append(f"{rest} more in `twoaxis advise --records {choice.candidate.name}`.")
    if choice.neutral is not None:
        lines.append(f"**Start**: {BEGINNINGS[choice.neutral]}.")
    lines.append(f"**Risk**: {'; '.join(choice.risks) or 'none that the records show'}.")
    return lines


def nearest(choice: Choice, advice: Advice) -> list[Record]:
    """The records to show: of every source the weightiest, then the rest by weight."""
    start = advice.question.start
    law = advice.evidence.law
    found = [r for r in choice.records if r.kind != "none"]
    found.sort(key=lambda r: (r.log_speed_up(law) is None, -r.weight(advice.parameters, start)))
    first: dict[str, Record] = {}
    for record in found:
        first.setdefault(record.source, record)
    chosen = list(first.values())
    chosen += [record for record in found if record not in chosen]
    return chosen[:SHOWN]


def records_table(evidence: Evidence, name: str | None) -> list[Block]:
    """Every record, or those of one method."""
    methods = [name] if name else list(dict.fromkeys(record.name for record in evidence.records))
    blocks: list[Block] = []
    for method in methods:
        found = evidence.of(method)
        if not found:
            known = ", ".join(sorted({record.name for record in evidence.records}))
            raise ValueError(f"there is no record of {method!r}; there are records of {known}")
        rows = []
        for r in found:
            gain = r.log_speed_up(evidence.law)
            rows.append((r.method, r.form, NOTHING if gain is None else f"{math.exp(gain):.3f}x", sentence(r)))
        form, record = Column("form", number=False), Column("record", number=False)
        blocks += [Heading(method, 3), table(("method", form, "compute at equal loss", record), rows)]
    return blocks


def to_json(advice: Advice) -> dict[str, Any]:
    """Everything, as plain values."""
    import twoaxis

    return {
        "twoaxis": twoaxis.__version__,
        "question": dataclasses.asdict(advice.question),
        "parameters": advice.parameters,
        "law": advice.evidence.law.to_dict(),
        "verdict": verdict(advice).replace("**", ""),
        "papers": papers_say(advice),
        "ranked": [_choice(advice, choice) for choice in advice.ranked],
        "excluded": [_choice(advice, choice) for choice in advice.excluded],
        "refused": dict(advice.refused),
        "next": [step._asdict() for step in next_steps(advice)],
    }


def _choice(advice: Advice, choice: Choice) -> dict[str, Any]:
    costs = choice.costs
    serving = {"decode": costs.decode._asdict()} if advice.question.serving else {}
    return {
        "method": choice.method,
        "axis": choice.candidate.axis,
        "form": choice.candidate.form,
        "goal": choice.candidate.card.goal,
        "why": choice.candidate.why,
        "trusted_speed_up": choice.trust.speed_up,
        "time_ratio": choice.ratio,
        "ideal_ratio": choice.ideal,
        "net": choice.net,
        "kernels": costs.kernels._asdict(),
        "cost": {
            "train": costs.train._asdict(),
            **serving,
            "parameters_added": costs.parameters_added,
            "memory_added": choice.added,
            "pipeline": {"whole": costs.pipeline.whole, "cached": costs.pipeline.cached},
        },
        "studies": [study._asdict() for study in choice.trust.studies],
        "records": [record.to_dict() for record in choice.records],
        "neutral": choice.neutral,
        "risks": list(choice.risks),
        "excluded": choice.excluded,
    }
