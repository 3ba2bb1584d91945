"""The command that predicts what methods cost: cost."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from twoaxis.commands.parsing import File, Names, Shape, plain
from twoaxis.model.deployment import ONE_DEVICE, Deployment

if TYPE_CHECKING:
    from twoaxis.show.document import Showable


@plain
def cost(
    *,
    shape: Annotated[str, Shape] = "llama-3-8b",
    stream: Names = (),
    mixer: Names = (),
    grid: bool = False,
    deployment: Deployment = ONE_DEVICE,
    sites: bool = False,
    plot: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None,
    html: File = None,
    save: File = None,
    published: bool = False,
) -> Showable:
    """Predict what streams and mixers cost on a model and a deployment: memory, bytes, operations, transfers, time.

    Everything but the times is counted by running the model's own code on meta tensors, so it needs neither the
    hardware nor the memory. Each method stands beside the plain residual of the same shape.

    Args:
        shape: A preset or public model (llama-3-8b, qwen3-32b, kimi-k3, ...), a config.json, or a folder with one.
        stream: A residual stream, as attention_residuals:block_size=8. Given again, another row.
        mixer: A local mixer on the plain residual, as short_swa:window=32. Given again, another row.
        grid: Every stream without a mixer and with each one.
        deployment: Devices, batch sizes and precision.
        sites: Print the bytes of every site too.
        plot: Folder for charts against depth, context, window and stages (SVG).
        html: File for everything as one page with charts.
        save: File for the times measured with --hardware here, for --hardware FILE elsewhere.
        published: Print published figures beside ours instead.
    """
    stream, mixer = ([each] if isinstance(each, str) else each for each in (stream, mixer))
    if published:
        from twoaxis.guide.published import Published

        told = {"--stream": stream, "--mixer": mixer, "--grid": grid, "--sites": sites, "--plot": plot, "--html": html}
        if given := [name for name, value in told.items() if value]:
            raise ValueError(f"--published runs on methods of its own; leave out {', '.join(given)}")
        return Published.of()
    if grid and not (stream and mixer):
        raise ValueError("--grid pairs streams with mixers; give at least one --stream and one --mixer")
    if save is not None and deployment.hardware.lower() != "here":
        raise ValueError(f"--save keeps times of this machine: give --hardware here, got {deployment.hardware!r}")
    pairs: list[tuple[str | None, str | None]]
    pairs = [(None, None), *((s, None) for s in stream), *((None, m) for m in mixer)]
    pairs += [(s, m) for s in stream for m in mixer] if grid else []
    pairs = list(dict.fromkeys(pairs))
    from twoaxis.costs.hardware import find_profile, save_profile

    if deployment.hardware.lower() != "here":
        find_profile(deployment.hardware)  # a wrong name is refused before anything heavy is loaded
    from twoaxis.base.files import write_text
    from twoaxis.base.progress import Progress
    from twoaxis.costs.costs import CostModel
    from twoaxis.costs.document import CostTable

    model, rows, written = CostModel(shape, deployment), [], []
    with Progress("cost", len(pairs), "methods") as bar:
        for pair in pairs:
            rows.append(model.plain if pair == (None, None) else model.of(*pair))
            if not rows[-1].plain.unmetered:
                _ = rows[-1].memory, rows[-1].decode_time  # the passes are traced here, where the bar sees it
            bar.advance(1, rows[-1].label)
    found = CostTable(shape, rows, sites)
    if plot is not None:
        from twoaxis.costs.plots import charts
        from twoaxis.show import figures

        found = CostTable(shape, rows, sites, charts(rows))
        for chart in found.charts:
            write_text(path := Path(plot) / f"{chart.name}.svg", figures.svg(chart))
            written.append(path)
    if html is not None:
        from twoaxis.show import page

        write_text(html, page.render(found.page()))
        written.append(Path(html))
    if save is not None:
        found.to_dict()  # every pass of the rows has then been timed
        save_profile(save, model.profile)
        written.append(Path(save))
    if written:
        print(f"wrote {', '.join(map(str, written))}", file=sys.stderr)
    return found
