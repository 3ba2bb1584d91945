"""The command that predicts what methods cost: cost."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from twoaxis.costs.deployment import Deployment

Several = tyro.conf.UseAppendAction


def cost(
    *,
    shape: Annotated[str, tyro.conf.arg(metavar="NAME|config.json")] = "llama-3-8b",
    stream: Annotated[tuple[str, ...], Several, tyro.conf.arg(metavar="NAME[:k=v,...]")] = (),
    mixer: Annotated[tuple[str, ...], Several, tyro.conf.arg(metavar="NAME[:k=v,...]")] = (),
    grid: bool = False,
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
    prefill_chunk: int | None = None,
    batch: int = 1,
    sites: bool = False,
    plot: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None,
    calibrate: bool = False,
    out: Annotated[str | None, tyro.conf.arg(metavar="profile.json")] = None,
    published: bool = False,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Predict what streams and mixers cost on a model and a deployment: memory, bytes, operations, transfers, time.

    Everything but the times is counted by running the model's own code on tensors without numbers, so it needs neither
    the hardware nor the memory. Each method stands beside the plain residual of the same shape.

    Args:
        shape: A preset or public model (llama-3-8b, qwen3-32b, kimi-k3, ...), a config.json, or a folder with one.
        stream: A residual stream, as attention_residuals:block_size=8. Given again, another row.
        mixer: A local mixer on the plain residual, as short_swa:window=32. Given again, another row.
        grid: Every stream without a mixer and with each one.
        hardware: a100, h100, h200, b200, or a profile that --calibrate wrote.
        data_parallel: Replicas; the optimiser's state is spread over them.
        tensor_parallel: Devices that share each sub-layer.
        pipeline_stages: Devices that share the depth.
        virtual_stages: Chunks of blocks on each pipeline device.
        sequence_parallel: Spread the stream and the norms along the sequence over the tensor-parallel devices.
        micro_batch: Sequences of a training pass on each replica.
        context: Tokens of a sequence.
        dtype: Of weights and activations.
        recompute: Make activations anew in the backward pass: none, block by block, or a whole pipeline chunk (full).
        prefill_chunk: Tokens of a prefill pass. None is the whole context.
        batch: Sequences that decode together.
        sites: Print the bytes of every site too.
        plot: Folder for figures against depth, context, window and stages (SVG).
        calibrate: Measure this machine instead, and compare predicted with measured times of every method.
        out: Where --calibrate writes its profile, for --hardware.
        published: Print published figures beside ours instead.
        json_output: Print one JSON document instead of tables.
    """
    if out is not None and not calibrate:
        raise ValueError("--out is where --calibrate writes its profile; give both")
    if calibrate or published:
        _alone("--calibrate" if calibrate else "--published", stream, mixer, grid, sites, plot, calibrate and published)
    if grid and not (stream and mixer):
        raise ValueError("--grid pairs streams with mixers; give at least one --stream and one --mixer")
    if calibrate:
        return _calibrate(out, json_output)
    if published:
        return _published(json_output)
    from twoaxis.costs.hardware import find_profile

    find_profile(hardware)  # a wrong name is told before anything heavy is loaded
    from twoaxis.costs.deployment import Deployment

    deployment = Deployment(
        hardware=hardware,
        data_parallel=data_parallel,
        tensor_parallel=tensor_parallel,
        pipeline_stages=pipeline_stages,
        virtual_stages=virtual_stages,
        sequence_parallel=sequence_parallel,
        micro_batch=micro_batch,
        context=context,
        dtype=dtype,
        recompute=recompute,
        prefill_chunk=prefill_chunk,
        batch=batch,
    )
    pairs: list[Pair] = [(None, None), *((s, None) for s in stream), *((None, m) for m in mixer)]
    pairs += [(s, m) for s in stream for m in mixer] if grid else []
    return _predict(shape, list(dict.fromkeys(pairs)), deployment, sites, plot, json_output)


def _alone(mode: str, *others: object) -> None:
    """Refuse what `--calibrate` and `--published`, which choose their own methods, would pass over."""
    names = ("--stream", "--mixer", "--grid", "--sites", "--plot", "--published")
    given = [name for name, value in zip(names, others, strict=True) if value]
    if given:
        raise ValueError(f"{mode} runs on methods of its own; leave out {', '.join(given)}")


Pair = tuple[str | None, str | None]
"""A stream and a mixer."""


def _predict(
    shape: str, pairs: list[Pair], deployment: Deployment, sites: bool, plot: str | None, json_output: bool
) -> int:
    """Costs of every pair."""
    from twoaxis.base.progress import Progress
    from twoaxis.costs.costs import cost as predict
    from twoaxis.costs.document import document, to_json
    from twoaxis.costs.shapes import find_shape
    from twoaxis.model.variant import make_contender
    from twoaxis.show import terminal

    config = find_shape(shape)
    contenders = [make_contender(*pair) for pair in pairs]
    rows = []
    with Progress("cost", len(contenders), "methods") as bar:
        for contender in contenders:
            rows.append(predict(config, contender, deployment))
            bar.advance(1, contender.label)
    if json_output:
        print(json.dumps(to_json(shape, rows), indent=1))
    else:
        terminal.show(document(shape, rows, sites=sites))
    if plot is not None:
        from twoaxis.costs.plots import draw

        written = draw(plot, config, contenders, deployment)
        print(f"wrote {', '.join(map(str, written))}", file=sys.stderr)
    return 0


def _calibrate(out: str | None, json_output: bool) -> int:
    """Measure this machine."""
    from twoaxis.base.files import write_json
    from twoaxis.costs.calibrate import calibrate, calibration_document
    from twoaxis.show import terminal

    found = calibrate(say=lambda text: print(text, file=sys.stderr))
    if out is not None:
        write_json(out, found["profile"])
        print(f"wrote {out}; use it with --hardware {out}", file=sys.stderr)
    if json_output:
        print(json.dumps(found, indent=1))
    else:
        terminal.show(calibration_document(found))
    return 0


def _published(json_output: bool) -> int:
    """Published figures beside ours."""
    from twoaxis.guide.published import compared, published_table
    from twoaxis.show import terminal
    from twoaxis.show.document import Document

    rows = compared()
    if json_output:
        print(json.dumps([row._asdict() for row in rows], indent=1))
    else:
        terminal.show(Document("", (published_table(rows),)))
    return 0
