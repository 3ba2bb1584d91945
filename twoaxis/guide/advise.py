"""Advice: which methods to try first at a shape, by what is published and what they would cost there.

    records ─► trusted speed-up  T     compute of the plain model that buys the same loss (`evidence`)
    shape   ─► predicted cost    R     times as long as the plain residual (`cost`)

    net = T / R                        ranked by this; above one, the gain pays for the time

R is the ratio of a training pass, or train^(1-s) decode^s where a share s of the compute serves. Methods over the
limits that were given, on overhead and on memory, are left out and listed with the number that did it. Nothing else
enters the ranking. What the paper behind this library advises is said beside it, with whether the numbers agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from twoaxis.base.options import NotNegative, Options, Share
from twoaxis.costs.costs import Costs, cost
from twoaxis.costs.hardware import find_profile
from twoaxis.guide.candidates import PAPER, Candidate, Goal, Place, Start, for_goal
from twoaxis.guide.evidence import SEEDS, Evidence, Record, Trust, read_evidence
from twoaxis.model.config import ModelConfig
from twoaxis.model.deployment import Deployment
from twoaxis.model.flops import count_parameters
from twoaxis.model.presets import find_shape
from twoaxis.model.variant import Contender

FAR = 10.0
"""Times larger than the largest model of its records from which a plan is warned."""
QUALITY = ("loss", "bits per byte", "perplexity", "loss difference", "speed-up", "wall-clock speed-up", "accuracy")
"""Metrics in which a gain is a better model."""
PAYS = 1.0
"""Net speed-up of the plain residual."""


@dataclass(frozen=True, kw_only=True)
class Question(Options):
    """What a choice depends on."""

    goal: Goal = "any"
    """A better shortcut, local mixing, retrieval across depth, or any of them."""
    start: Start = "scratch"
    """From scratch, or onto a trained model."""
    shape: str = "llama-3-8b"
    """A name or a configuration file; see `find_shape`."""
    deployment: Deployment = field(default_factory=Deployment)
    """Devices, context, batch."""
    max_overhead: NotNegative | None = None
    """Percent of time that a method may add; None is any."""
    headroom: NotNegative | None = None
    """Bytes that a method may add on the fullest training device; None is any."""
    serving: Share = 0.0
    """Share of all compute that goes into decoding."""
    kernels: Literal["fused", "written"] = "fused"
    """One kernel between two sub-layers, or every operation as this library writes it."""


class Choice(NamedTuple):
    """A candidate with everything that is known about it.

    Attributes:
        candidate: what it is.
        method: spelled for the shape.
        costs: predicted.
        records: published about this form of it.
        trust: what they come to.
        ratio: R, times as long as the plain residual.
        added: bytes on the fullest training device.
        net: trusted speed-up over R.
        neutral: how it starts on a trained model; None from scratch.
        risks: a sentence each.
        left_out: why it is not ranked, if it is not.
    """

    candidate: Candidate
    method: str
    costs: Costs
    records: tuple[Record, ...]
    trust: Trust
    ratio: float
    added: float
    net: float
    neutral: str | None
    risks: tuple[str, ...]
    left_out: str | None


class Advice(NamedTuple):
    """The answer.

    Attributes:
        question: what was asked.
        evidence: the records.
        parameters: of the plain model.
        plain: its costs.
        ranked: best first.
        left_out: the others.
    """

    question: Question
    evidence: Evidence
    parameters: int
    plain: Costs
    ranked: tuple[Choice, ...]
    left_out: tuple[Choice, ...]

    @property
    def paying(self) -> tuple[Choice, ...]:
        """Those whose published gain is worth more than their cost."""
        return tuple(choice for choice in self.ranked if choice.net > PAYS)


def advise(
    question: Question, evidence: Evidence | None = None, *, tick: Callable[[str], None] = lambda label: None
) -> Advice:
    """Rank the candidates for a question.

    Args:
        question: what the choice depends on.
        evidence: the records; None is the file that comes along.
        tick: told the label of every candidate whose cost is known.
    """
    evidence = evidence or read_evidence()
    shape = find_shape(question.shape)
    plain = cost(shape, None, question.deployment)
    parameters = count_parameters(plain.shape).total
    place = Place(shape, question.start, find_profile(question.deployment.hardware).kind == "gpu")
    choices = []
    for candidate in for_goal(question.goal):
        choices.append(_choose(candidate, place, question, evidence, plain, parameters))
        tick(candidate.title)
    choices.sort(key=lambda choice: (-choice.net, choice.method))
    ranked = tuple(choice for choice in choices if choice.left_out is None)
    return Advice(question, evidence, parameters, plain, ranked, tuple(c for c in choices if c.left_out is not None))


def _choose(
    candidate: Candidate, place: Place, question: Question, evidence: Evidence, plain: Costs, parameters: int
) -> Choice:
    contender = candidate.contender(place)
    neutral = None
    if question.start == "retrofit":
        neutral = _neutral(place.shape, contender) if candidate.axis == "stream" else "bitwise"
        if neutral not in ("bitwise", "rounding"):
            from dataclasses import replace

            contender = replace(contender, model={**contender.model, "blend": True})
            neutral = "blend"
    costs = cost(place.shape, contender, question.deployment)
    records = evidence.of(candidate.name, candidate.form)
    trust = evidence.trust(records, parameters, question.start)
    ratio = time_ratio(costs, question)
    added = costs.memory.total - plain.memory.total
    return Choice(
        candidate=candidate,
        method=candidate.spell(place),
        costs=costs,
        records=records,
        trust=trust,
        ratio=ratio,
        added=added,
        net=trust.speed_up / ratio,
        neutral=neutral,
        risks=risks(records, trust, parameters, question.start, neutral),
        left_out=_limit(question, ratio, added),
    )


def _neutral(shape: ModelConfig, contender: Contender) -> str:
    """The neutral class of a stream on a shape."""
    import torch

    from twoaxis.model.variant import with_method

    with torch.device("meta"):
        return with_method(shape, contender).make_stream().neutral


def time_ratio(costs: Costs, question: Question) -> float:
    """R: how many times as long as the plain residual."""
    fused = question.kernels == "fused"
    train, decode = (pair.fused if fused else pair.naive for pair in (costs.train, costs.decode))
    return train ** (1 - question.serving) * decode**question.serving


def _limit(question: Question, ratio: float, added: float) -> str | None:
    """Which limit it breaks."""
    overhead = 100 * (ratio - 1)
    if question.max_overhead is not None and overhead > question.max_overhead:
        return f"takes {overhead:.3g}% more time, over the {question.max_overhead:g}% allowed"
    if question.headroom is not None and added > question.headroom:
        return f"needs {added / 1e9:.3g} GB more on a device, over the {question.headroom / 1e9:.3g} GB allowed"
    return None


def risks(
    records: tuple[Record, ...], trust: Trust, parameters: int, start: Start, neutral: str | None
) -> tuple[str, ...]:
    """What should make one careful, a sentence each."""
    found = []
    published = [r for r in records if r.kind != "none" and r.counted]
    if not published:
        found.append("no published result for this form")
    elif not trust.studies:
        found.append("accuracies only: no published loss, so nothing of it enters the ranking")
    positive = [study for study in trust.studies if study.gain > 0]
    if len(positive) == 1:
        found.append(f"one study found a gain ({positive[0].source})")
    gained = [r for r in published if r.metric in QUALITY and (r.gain or 0) > 0]
    if gained and not any(r.kind == "third party" for r in gained):
        found.append("nobody but its authors reports a gain")
    if published and not any((r.seeds or 0) >= SEEDS for r in published):
        told = {r.seeds for r in published}
        found.append("one run each" if told == {1} else "single runs, or the number of seeds is not said")
    failed = [r for r in records if r.kind == "failed replication"]
    if sources := sorted({r.source for r in failed if r.counted}):
        found.append(f"a replication found no gain ({', '.join(sources)})")
    found += [f"{r.note.rstrip('.')} ({r.source})" for r in failed if not r.counted]
    largest = max((r.parameters for r in published if r.parameters), default=0)
    if largest and parameters > FAR * largest:
        found.append(f"your model has {parameters / largest:.0f} times the parameters of the largest in its records")
    if start == "retrofit" and not any(r.setting == "retrofit" for r in published):
        found.append("no published result on a trained model")
    if neutral == "blend":
        found.append("it has no exact neutral start, so it is faded in over the plain stream, which is kept beside it")
    return tuple(found)


def paper_says(advice: Advice) -> list[str]:
    """What the paper advises for the goal, and whether the numbers agree; a sentence or two for each."""
    said = []
    for goal, name in PAPER.items():
        if advice.question.goal not in ("any", goal):
            continue
        rivals = [c for c in (*advice.ranked, *advice.left_out) if c.candidate.goal == goal]
        own = max((c for c in rivals if c.candidate.name == name), key=lambda c: c.net)
        best = max((c for c in rivals if c.left_out is None), key=lambda c: c.net, default=None)
        words = {"shortcut": "a better shortcut", "mixing": "local mixing"}[goal]
        text = f"For {words} the paper (arXiv 2603.16039) advises {name}. "
        if best is not None and best.candidate.name == name and best.net > PAYS:
            text += "The numbers agree."
        elif not own.trust.studies:
            text += (
                "No number supports that yet: no controlled result was published, and it costs "
                f"{100 * (own.ratio - 1):.3g}% more time here."
            )
        else:
            text += (
                f"The numbers do not put it first: at your shape its best form is trusted with "
                f"{own.trust.speed_up:.3f}x and takes {own.ratio:.3f}x the time, net {own.net:.3f}"
            )
            text += "." if best is None else f", while {best.candidate.title} comes to {best.net:.3f}."
        said.append(text)
    return said
