"""Advice: which methods to try first at a shape, by what is published and what they would cost there.

    records ─► trusted speed-up  T     compute of the plain model that buys the same loss (`evidence`)
    shape   ─► predicted cost    R     times as long as the plain residual (`cost`)

    net = T / R                        ranked by this; above one, the gain pays for the time

R is the ratio of a training pass, or train^(1-s) decode^s where a share s of the compute serves: with the kernels that
this library has on the device, or with ideal ones. Methods over the limits that were given, on overhead and on memory,
are excluded and listed with the number that did it. Nothing else enters the ranking. What papers advise is said beside
it, with whether the numbers agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from twoaxis.base.options import NotNegative, Options, Share
from twoaxis.costs.costs import CostModel, Costs
from twoaxis.guide.evidence import SEEDS, Evidence, Record, Trust, read_evidence
from twoaxis.guide.suggest import Candidate, Goal, Place, Start, candidates
from twoaxis.model.config import ModelConfig
from twoaxis.model.deployment import Deployment
from twoaxis.show.document import Document, Showable

FAR = 10.0
"""Times larger than the largest model of its records from which a plan is warned."""
QUALITY = ("loss", "bits per byte", "perplexity", "loss difference", "speed-up", "wall-clock speed-up", "accuracy")
"""Metrics in which a gain is a better model."""
GOALS = {
    "any": "anything",
    "shortcut": "a better shortcut",
    "mixing": "local mixing",
    "retrieval": "cross-depth retrieval",
}
"""Goals in words."""
PAYS = 1.0
"""Net speed-up of the plain residual."""
Ways = Literal["ours", "ideal"]


@dataclass(frozen=True, kw_only=True)
class Question(Options):
    """What a choice depends on."""

    goal: Goal = "any"
    """A better shortcut, local mixing, retrieval across depth, or any of them."""
    start: Start = "scratch"
    """From scratch, or onto a trained model."""
    shape: str = "llama-3-8b"
    """A preset, a public model, or a config.json."""
    deployment: Deployment = field(default_factory=Deployment)
    """Devices, context, batch."""
    max_overhead: NotNegative | None = None
    """Percent of time that a method may add; nothing is any."""
    headroom: NotNegative | None = None
    """Gigabytes that a method may add on the fullest training device; nothing is any."""
    serving: Share = 0.0
    """Share of all compute that goes into decoding."""
    kernels: Ways = "ours"
    """Those this library has on the device, or ideal ones: a single kernel between two sub-layers."""


class Choice(NamedTuple):
    """A candidate with everything that is known about it."""

    candidate: Candidate  # what it is
    method: str  # spelled for the shape
    costs: Costs  # predicted
    records: tuple[Record, ...]  # published about this form of it
    trust: Trust  # what they come to
    ratio: float  # R, times as long as the plain residual
    ideal: float  # the same with ideal kernels
    added: float  # bytes on the fullest training device
    net: float  # trusted speed-up over R
    neutral: str | None  # how it starts on a trained model; None from scratch
    risks: tuple[str, ...]  # a sentence each
    excluded: str | None  # why it is not ranked, if it is not


@dataclass(frozen=True)
class Advice(Showable):
    """The answer."""

    question: Question
    evidence: Evidence
    plain: Costs  # of the plain model
    ranked: tuple[Choice, ...]  # best first
    excluded: tuple[Choice, ...]  # the others
    top: int = 3  # methods on the short list
    refused: tuple[tuple[str, str], ...] = ()  # methods that a family's layers have no place for, and why

    @property
    def parameters(self) -> int:
        """Of the plain model."""
        return self.plain.parameters.total

    @property
    def paying(self) -> tuple[Choice, ...]:
        """Those whose published gain is worth more than their cost."""
        return tuple(choice for choice in self.ranked if choice.net > PAYS)

    def document(self) -> Document:
        """What to try, why, at what cost and risk, and the commands that follow."""
        from twoaxis.guide.answer import document

        return document(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain values."""
        from twoaxis.guide.answer import to_json

        return to_json(self)


def advise(
    question: Question,
    evidence: Evidence | None = None,  # None is the file that comes along
    *,
    top: int = 3,  # methods on the short list
    tick: Callable[[str], None] = lambda label: None,  # called with every candidate whose cost is known
) -> Advice:
    """Rank the candidates for a question."""
    evidence = evidence or read_evidence()
    model = CostModel(question.shape, question.deployment)
    place = Place(model.shape, question.start, model.profile.kind == "gpu")
    if why := model.plain.unmetered:
        raise ValueError(
            f"{question.shape} has no pass on meta tensors, so no method can be weighed there; give a shape like it, "
            f"such as llama-3-8b ({why})"
        )
    choices, refused = [], []
    for candidate in candidates(question.goal):
        try:
            choices.append(_choose(candidate, place, question, evidence, model))
        except ValueError as error:
            if isinstance(model.shape, ModelConfig):
                raise
            refused.append((candidate.title, str(error)))  # a family's layers have no place for it
        tick(candidate.title)
    choices.sort(key=lambda choice: (-choice.net, choice.method))
    ranked = tuple(choice for choice in choices if choice.excluded is None)
    excluded = tuple(choice for choice in choices if choice.excluded is not None)
    return Advice(question, evidence, model.plain, ranked, excluded, top, tuple(refused))


def _choose(candidate: Candidate, place: Place, question: Question, evidence: Evidence, model: CostModel) -> Choice:
    method, contender, neutral = candidate.spelled(place)
    costs, parameters = model.of(contender), model.plain.parameters.total
    records = evidence.of(candidate.name, candidate.form)
    trust = evidence.trust(records, parameters, question.start)
    ratio = time_ratio(costs, question.serving, question.kernels)
    added = costs.memory.total - model.plain.memory.total
    return Choice(
        candidate=candidate,
        method=method,
        costs=costs,
        records=records,
        trust=trust,
        ratio=ratio,
        ideal=time_ratio(costs, question.serving, "ideal"),
        added=added,
        net=trust.speed_up / ratio,
        neutral=neutral,
        risks=risks(records, trust, parameters, question.start, neutral),
        excluded=_limit(question, ratio, added),
    )


def time_ratio(costs: Costs, serving: float, kernels: Ways) -> float:
    """R: how many times as long as the plain residual; a pass that does not count is not traced."""
    way = "fused" if kernels == "ideal" else "eager"
    train = getattr(costs.train, way) ** (1 - serving) if serving < 1 else 1.0
    return train * getattr(costs.decode, way) ** serving if serving else train


def _limit(question: Question, ratio: float, added: float) -> str | None:
    """Which limit it breaks."""
    overhead = 100 * (ratio - 1)
    if question.max_overhead is not None and overhead > question.max_overhead:
        return f"takes {overhead:.3g}% more time, over the {question.max_overhead:g}% allowed"
    if question.headroom is not None and added > question.headroom * 1e9:
        return f"needs {added / 1e9:.3g} GB more on a device, over the {question.headroom:.3g} GB allowed"
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
    if gained and all(r.kind == "own" for r in gained):
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


def papers_say(advice: Advice) -> list[str]:
    """What papers advise for the goal, and whether the numbers agree; a sentence or two for each."""
    said = []
    for paper in advice.evidence.advice:
        goal, name = paper.goal, paper.method
        rivals = [c for c in (*advice.ranked, *advice.excluded) if c.candidate.card.goal == goal]
        own = max((c for c in rivals if c.candidate.name == name), key=lambda c: c.net, default=None)
        if own is None:
            continue
        best = max((c for c in rivals if c.excluded is None), key=lambda c: c.net, default=None)
        text = f"For {GOALS[goal]} the paper ({paper.source}) advises {name}. "
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
