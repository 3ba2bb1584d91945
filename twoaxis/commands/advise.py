"""The command that advises: advise."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from twoaxis.commands.parsing import File, Shape, plain
from twoaxis.model.deployment import ONE_DEVICE, Deployment

if TYPE_CHECKING:
    from twoaxis.show.document import Showable


@plain
def advise(
    *,
    goal: Literal["any", "shortcut", "mixing", "retrieval"] | None = None,
    start: Literal["scratch", "retrofit"] | None = None,
    shape: Annotated[str | None, Shape] = None,
    deployment: Deployment = ONE_DEVICE,
    serving: float | None = None,
    max_overhead: Annotated[float | None, tyro.conf.arg(metavar="PERCENT")] = None,
    headroom: Annotated[float | None, tyro.conf.arg(metavar="GB")] = None,
    kernels: Literal["ours", "ideal"] | None = None,
    top: int = 3,
    evidence: File = None,
    records: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="METHOD")] = None,
) -> Showable:
    """Rank what to try first: published gains, discounted for how they were found, over the predicted cost.

    On a terminal and without options it asks. The answer has reasons, costs at your shape, published evidence with its
    sources, risks, and the commands to run next.

    Args:
        goal: A better shortcut, local mixing of tokens, retrieval across depth, or any of them. None is any.
        start: From scratch, or a retrofit of a trained model. None is scratch.
        shape: A preset or public model, a config.json, or a folder with one. None is llama-3-8b.
        deployment: Devices, batch sizes and precision.
        serving: Share of all compute that is spent decoding, between 0 and 1. None is nothing.
        max_overhead: Time a method may add, in percent. None is any.
        headroom: Memory a method may add on the fullest training device. None is any.
        kernels: Times with the kernels this library has on the device, or with ideal ones. None is ours.
        top: Methods on the short list.
        evidence: File of records in place of the one that comes along.
        records: Print the published records instead: of the methods named, or of all.
    """
    if top < 1:
        raise ValueError(f"--top must be at least 1, got {top}")
    if records is not None:
        return _records(evidence, records)
    names = ("goal", "start", "shape", "serving", "max_overhead", "headroom", "kernels")
    given = locals()
    said: dict[str, Any] = {name: given[name] for name in names if given[name] is not None}
    from twoaxis.costs.hardware import find_profile

    if deployment.hardware.lower() != "here":
        find_profile(deployment.hardware)  # a wrong name is refused before anything heavy is loaded
    from twoaxis.base.progress import Progress
    from twoaxis.guide.advise import Question
    from twoaxis.guide.advise import advise as answer
    from twoaxis.guide.evidence import read_evidence
    from twoaxis.guide.suggest import candidates

    question, found = Question(**said, deployment=deployment), read_evidence(evidence)
    alone = not said and deployment is ONE_DEVICE  # nothing is said: the rest is asked for if somebody is there
    if alone and all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr)):
        from twoaxis.guide.ask import ask as ask_for

        question = ask_for(question)
    with Progress("advise", len(candidates(question.goal)), "methods") as bar:
        return answer(question, found, top=top, tick=lambda label: bar.advance(1, label))


def _records(evidence: str | None, names: tuple[str, ...]) -> Showable:
    """What is published."""
    from twoaxis.depth.registry import STREAMS
    from twoaxis.guide.answer import records_table
    from twoaxis.guide.evidence import read_evidence
    from twoaxis.sequence.registry import MIXERS
    from twoaxis.show.document import Document, Shown

    names = tuple(MIXERS.canonical(STREAMS.canonical(name)) for name in names)
    found = read_evidence(evidence)
    blocks = [block for name in names or (None,) for block in records_table(found, name)]
    kept = [record.to_dict() for record in found.records if not names or record.name in names]
    return Shown({"law": found.law.to_dict(), "records": kept}, Document("", tuple(blocks)))
