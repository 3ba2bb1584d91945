"""The command that predicts what methods cost: cost."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import tyro

from twoaxis.model.deployment import ONE_DEVICE, Deployment

if TYPE_CHECKING:
    from twoaxis.show.document import Shown

Several = tyro.conf.UseAppendAction


def cost(
    *,
    shape: Annotated[str, tyro.conf.arg(metavar="NAME|config.json")] = "llama-3-8b",
    stream: Annotated[tuple[str, ...], Several, tyro.conf.arg(metavar="NAME[:k=v,...]")] = (),
    mixer: Annotated[tuple[str, ...], Several, tyro.conf.arg(metavar="NAME[:k=v,...]")] = (),
    grid: bool = False,
    deployment: Deployment = ONE_DEVICE,
    sites: bool = False,
    plot: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None,
    calibrate: bool = False,
    out: Annotated[str | None, tyro.conf.arg(metavar="profile.json")] = None,
    published: bool = False,
) -> Shown:
    """Predict what streams and mixers cost on a model and a deployment: memory, bytes, operations, transfers, time.

    Everything but the times is counted by running the model's own code on tensors without numbers, so it needs neither
    the hardware nor the memory. Each method stands beside the plain residual of the same shape.

    Args:
        shape: A preset or public model (llama-3-8b, qwen3-32b, kimi-k3, ...), a config.json, or a folder with one.
        stream: A residual stream, as attention_residuals:block_size=8. Given again, another row.
        mixer: A local mixer on the plain residual, as short_swa:window=32. Given again, another row.
        grid: Every stream without a mixer and with each one.
        deployment: Devices, batch sizes and precision.
        sites: Print the bytes of every site too.
        plot: Folder for figures against depth, context, window and stages (SVG).
        calibrate: Measure this machine instead, and compare predicted with measured times of every method.
        out: Where --calibrate writes its profile, for --hardware.
        published: Print published figures beside ours instead.
    """
    if out is not None and not calibrate:
        raise ValueError("--out is where --calibrate writes its profile; give both")
    if calibrate or published:
        _alone("--calibrate" if calibrate else "--published", stream, mixer, grid, sites, plot, calibrate and published)
    if grid and not (stream and mixer):
        raise ValueError("--grid pairs streams with mixers; give at least one --stream and one --mixer")
    if calibrate:
        return _calibrate(out)
    if published:
        return _published()
    pairs: list[Pair] = [(None, None), *((s, None) for s in stream), *((None, m) for m in mixer)]
    pairs += [(s, m) for s in stream for m in mixer] if grid else []
    return _predict(shape, list(dict.fromkeys(pairs)), deployment, sites, plot)


def _alone(mode: str, *others: object) -> None:
    """Refuse what `--calibrate` and `--published`, which choose their own methods, would pass over."""
    names = ("--stream", "--mixer", "--grid", "--sites", "--plot", "--published")
    given = [name for name, value in zip(names, others, strict=True) if value]
    if given:
        raise ValueError(f"{mode} runs on methods of its own; leave out {', '.join(given)}")


Pair = tuple[str | None, str | None]
"""A stream and a mixer."""


def _predict(shape: str, pairs: list[Pair], deployment: Deployment, sites: bool, plot: str | None) -> Shown:
    """Costs of every pair."""
    from twoaxis.costs.hardware import find_profile

    find_profile(deployment.hardware)  # a wrong name is told before anything heavy is loaded
    from twoaxis.base.progress import Progress
    from twoaxis.costs.costs import cost as predict
    from twoaxis.costs.document import document, to_json
    from twoaxis.model.presets import find_shape
    from twoaxis.model.variant import make_contender
    from twoaxis.show.document import Shown

    config = find_shape(shape)
    contenders = [make_contender(*pair) for pair in pairs]
    rows = []
    with Progress("cost", len(contenders), "methods") as bar:
        for contender in contenders:
            rows.append(predict(config, contender, deployment))
            bar.advance(1, contender.label)
    if plot is not None:
        from twoaxis.costs.plots import draw

        written = draw(plot, config, contenders, deployment)
        print(f"wrote {', '.join(map(str, written))}", file=sys.stderr)
    return Shown(to_json(shape, rows), document(shape, rows, sites=sites))


def _calibrate(out: str | None) -> Shown:
    """Measure this machine."""
    from twoaxis.base.files import write_json
    from twoaxis.costs.calibrate import calibrate, calibration_document
    from twoaxis.show.document import Shown

    found = calibrate(say=lambda text: print(text, file=sys.stderr))
    if out is not None:
        write_json(out, found["profile"])
        print(f"wrote {out}; use it with --hardware {out}", file=sys.stderr)
    return Shown(found, calibration_document(found))


def _published() -> Shown:
    """Published figures beside ours."""
    from twoaxis.guide.published import compared, published_table
    from twoaxis.show.document import Document, Shown

    rows = compared()
    return Shown([row._asdict() for row in rows], Document("", (published_table(rows),)))
