"""The command that advises: advise."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, Literal

import tyro


def advise(
    *,
    goal: Literal["any", "shortcut", "mixing", "retrieval"] = "any",
    start: Literal["scratch", "retrofit"] = "scratch",
    shape: Annotated[str, tyro.conf.arg(metavar="NAME|config.json")] = "llama-3-8b",
    hardware: Annotated[str, tyro.conf.arg(metavar="NAME|profile.json")] = "h100",
    data_parallel: int = 1,
    tensor_parallel: int = 1,
    pipeline_stages: int = 1,
    virtual_stages: int = 1,
    sequence_parallel: bool = False,
    micro_batch: int = 1,
    context: int = 4096,
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    recompute: Literal["none", "block", "full"] = "none",
    batch: int = 1,
    serving: float = 0.0,
    max_overhead: Annotated[float | None, tyro.conf.arg(metavar="PERCENT")] = None,
    headroom: Annotated[float | None, tyro.conf.arg(metavar="GB")] = None,
    kernels: Literal["fused", "written"] = "fused",
    top: int = 3,
    evidence: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None,
    records: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="METHOD")] = None,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Rank what to try first: published gains, discounted for how they were found, over the predicted cost.

    On a terminal and without options it asks. The answer has reasons, costs at your shape, published evidence with its
    sources, risks, and the commands to run next.

    Args:
        goal: A better shortcut, local mixing of tokens, retrieval across depth, or any of them.
        start: From scratch, or a retrofit of a trained model.
        shape: A preset or public model (llama-3-8b, qwen3-32b, kimi-k3, ...), a config.json, or a folder with one.
        hardware: a100, h100, h200, b200, or a profile that twoaxis cost --calibrate wrote.
        data_parallel: Replicas; the optimiser's state is spread over them.
        tensor_parallel: Devices that share each sub-layer.
        pipeline_stages: Devices that share the depth.
        virtual_stages: Chunks of blocks on each pipeline device.
        sequence_parallel: Spread the stream and the norms along the sequence over the tensor-parallel devices.
        micro_batch: Sequences of a training pass on each replica.
        context: Tokens of a sequence.
        dtype: Of weights and activations.
        recompute: Activations made anew in the backward pass.
        batch: Sequences that decode together.
        serving: Share of all compute that is spent decoding, between 0 and 1.
        max_overhead: Time a method may add, in percent. None is any.
        headroom: Memory a method may add on the fullest training device. None is any.
        kernels: Predict times of fused kernels, or of every operation as this library writes it.
        top: Methods on the short list.
        evidence: File of records in place of the one that comes along.
        records: Print the published records instead: of the methods named, or of all.
        json_output: Print one JSON document instead of a page.
    """
    if top < 1:
        raise ValueError(f"--top must be at least 1, got {top}")
    if records is not None:
        return _records(evidence, records, json_output)
    given = {name: value for name, value in locals().items() if name not in ("top", "evidence", "records")}
    given.pop("json_output")
    if len(sys.argv) <= 2 and _terminal():
        from twoaxis.guide.interview import interview

        given |= interview()
    return _advise(given, evidence, top, json_output)


def _terminal() -> bool:
    """Whether somebody can be asked; a stream that was closed is None."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))


def _advise(given: dict[str, Any], evidence: str | None, top: int, json_output: bool) -> int:
    """Answer."""
    from twoaxis.costs.hardware import find_profile

    find_profile(given["hardware"])  # a wrong name is told before anything heavy is loaded
    from twoaxis.base.progress import Progress
    from twoaxis.costs.deployment import Deployment
    from twoaxis.guide.advise import Question, advise
    from twoaxis.guide.answer import document, to_json
    from twoaxis.guide.candidates import for_goal
    from twoaxis.guide.evidence import read_evidence
    from twoaxis.show import terminal

    own = ("goal", "start", "shape", "max_overhead", "headroom", "serving", "kernels")
    asked = {name: given[name] for name in own}
    if asked["headroom"] is not None:
        if asked["headroom"] < 0:  # in the unit it was given in
            raise ValueError(f"headroom must not be negative, got {asked['headroom']:g} GB")
        asked["headroom"] *= 1e9
    deployment = Deployment(**{name: value for name, value in given.items() if name not in own})
    question = Question(**asked, deployment=deployment)
    found = read_evidence(evidence)
    with Progress("advise", len(for_goal(question.goal)), "methods") as bar:
        answer = advise(question, found, tick=lambda label: bar.advance(1, label))
    if json_output:
        print(json.dumps(to_json(answer, top), indent=1))
    else:
        terminal.show(document(answer, top))
    return 0


def _records(evidence: str | None, names: tuple[str, ...], json_output: bool) -> int:
    """Print what is published."""
    from twoaxis.guide.answer import records_table
    from twoaxis.guide.evidence import read_evidence
    from twoaxis.show import terminal
    from twoaxis.show.document import Document

    found = read_evidence(evidence)
    blocks = [block for name in names or (None,) for block in records_table(found, name)]
    if json_output:
        kept = [record.to_dict() for record in found.records if not names or record.name in names]
        print(json.dumps({"law": found.law._asdict(), "records": kept}, indent=1))
    else:
        terminal.show(Document("", tuple(blocks)))
    return 0
