"""The command that advises: advise."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from twoaxis.model.deployment import ONE_DEVICE, Deployment

if TYPE_CHECKING:
    from twoaxis.show.document import Shown


def advise(
    *,
    goal: Literal["any", "shortcut", "mixing", "retrieval"] = "any",
    start: Literal["scratch", "retrofit"] = "scratch",
    shape: Annotated[str, tyro.conf.arg(metavar="NAME|config.json")] = "llama-3-8b",
    deployment: Deployment = ONE_DEVICE,
    serving: float = 0.0,
    max_overhead: Annotated[float | None, tyro.conf.arg(metavar="PERCENT")] = None,
    headroom: Annotated[float | None, tyro.conf.arg(metavar="GB")] = None,
    kernels: Literal["fused", "written"] = "fused",
    top: int = 3,
    evidence: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None,
    records: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="METHOD")] = None,
) -> Shown:
    """Rank what to try first: published gains, discounted for how they were found, over the predicted cost.

    On a terminal and without options it asks. The answer has reasons, costs at your shape, published evidence with its
    sources, risks, and the commands to run next.

    Args:
        goal: A better shortcut, local mixing of tokens, retrieval across depth, or any of them.
        start: From scratch, or a retrofit of a trained model.
        shape: A preset or public model (llama-3-8b, qwen3-32b, kimi-k3, ...), a config.json, or a folder with one.
        deployment: Devices, batch sizes and precision.
        serving: Share of all compute that is spent decoding, between 0 and 1.
        max_overhead: Time a method may add, in percent. None is any.
        headroom: Memory a method may add on the fullest training device. None is any.
        kernels: Predict times of fused kernels, or of every operation as this library writes it.
        top: Methods on the short list.
        evidence: File of records in place of the one that comes along.
        records: Print the published records instead: of the methods named, or of all.
    """
    if top < 1:
        raise ValueError(f"--top must be at least 1, got {top}")
    if records is not None:
        return _records(evidence, records)
    given = {name: value for name, value in locals().items() if name not in ("top", "evidence", "records")}
    if len(sys.argv) <= 2 and _terminal():
        from twoaxis.guide.interview import interview

        answers = interview()
        devices = {field.name for field in dataclasses.fields(Deployment)} & set(answers)
        deployment = dataclasses.replace(deployment, **{name: answers.pop(name) for name in devices})
        given |= answers | {"deployment": deployment}
    return _advise(given, evidence, top)


def _terminal() -> bool:
    """Whether somebody can be asked; a stream that was closed is None."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))


def _advise(asked: dict[str, Any], evidence: str | None, top: int) -> Shown:
    """Answer a question, whose headroom is in gigabytes."""
    from twoaxis.costs.hardware import find_profile

    find_profile(asked["deployment"].hardware)  # a wrong name is told before anything heavy is loaded
    from twoaxis.base.progress import Progress
    from twoaxis.guide.advise import Question, advise
    from twoaxis.guide.answer import document, to_json
    from twoaxis.guide.candidates import for_goal
    from twoaxis.guide.evidence import read_evidence
    from twoaxis.show.document import Shown

    if asked["headroom"] is not None:
        if asked["headroom"] < 0:  # in the unit it was given in
            raise ValueError(f"headroom must not be negative, got {asked['headroom']:g} GB")
        asked = asked | {"headroom": asked["headroom"] * 1e9}
    question = Question(**asked)
    found = read_evidence(evidence)
    with Progress("advise", len(for_goal(question.goal)), "methods") as bar:
        answer = advise(question, found, tick=lambda label: bar.advance(1, label))
    return Shown(to_json(answer, top), document(answer, top))


def _records(evidence: str | None, names: tuple[str, ...]) -> Shown:
    """What is published."""
    from twoaxis.guide.answer import records_table
    from twoaxis.guide.evidence import read_evidence
    from twoaxis.show.document import Document, Shown

    found = read_evidence(evidence)
    blocks = [block for name in names or (None,) for block in records_table(found, name)]
    kept = [record.to_dict() for record in found.records if not names or record.name in names]
    return Shown({"law": found.law._asdict(), "records": kept}, Document("", tuple(blocks)))
