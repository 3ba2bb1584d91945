"""Figures of costs against depth, context, window and stages, as SVG.

matplotlib is imported when a figure is drawn; no window system is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twoaxis.costs.memory import SIZES
from twoaxis.costs.trace import Kept, lengthened, meta_model, trace_step
from twoaxis.depth.counts import count_live
from twoaxis.depth.registry import STREAMS
from twoaxis.model.config import ModelConfig
from twoaxis.model.deployment import Deployment
from twoaxis.model.stages import plan
from twoaxis.model.variant import Contender, with_method
from twoaxis.sequence.registry import MIXERS
from twoaxis.show.numbers import si

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#444444", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b")
"""Of methods in turn, the plain residual first."""
CONTEXTS = (1024, 4096, 16_384, 65_536, 131_072)
WINDOWS = (1, 2, 4, 8, 16, 32, 64, 128)
DEPTHS = (4, 8, 16, 32, 64)

Lines = dict[str, list[tuple[float, float]]]
"""Points of each line by its name."""


def draw(folder: str, shape: ModelConfig, methods: Sequence[Contender], deployment: Deployment) -> list[Path]:
    """Draw every figure that the methods have, and return where they are."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError("figures need matplotlib: pip install matplotlib") from error
    models = {method.label: with_method(shape, method) for method in methods}
    panels = {
        "depth": [
            ("blocks", "stream, bytes per token, fused", by_depth(models, deployment.dtype, _fused)),
            ("blocks", "live state, bytes per token", by_depth(models, deployment.dtype, _live)),
        ],
        "context": [("context", title, lines) for title, lines in context_kept(models, deployment.dtype)],
        "window": [("window", title, lines) for title, lines in window_lines(models, deployment)],
        "stages": [("pipeline stages", "bytes per token over all boundaries", stage_bytes(models, deployment))],
    }
    written = []
    for name, found in panels.items():
        found = [panel for panel in found if panel[2]]
        if found:
            written.append(_write(Path(folder) / f"{name}.svg", _figure(found, list(models))))
    return written


def by_depth(models: dict[str, ModelConfig], dtype: str, size: Callable[[ModelConfig, str], float]) -> Lines:
    """Bytes per token against blocks."""
    return {label: [(n, size(deep(config, n), dtype)) for n in DEPTHS] for label, config in models.items()}


def context_kept(models: dict[str, ModelConfig], dtype: str) -> list[tuple[str, Lines]]:
    """Bytes kept between tokens against the context: keys and values, and everything else."""
    growing: Lines = {}
    local: Lines = {}
    for label, config in models.items():
        for context in CONTEXTS:
            kept = _kept(config, dtype, context)
            growing.setdefault(label, []).append((context, kept.attention))
            if kept.local + kept.stream:
                local.setdefault(label, []).append((context, kept.local + kept.stream))
    return [("keys and values, bytes per sequence", growing), ("rings and the stream's memory", local)]


def window_lines(models: dict[str, ModelConfig], deployment: Deployment) -> list[tuple[str, Lines]]:
    """What methods with a window move, and what they keep, against the window."""
    moved: Lines = {}
    kept: Lines = {}
    for label, config in models.items():
        for window in WINDOWS:
            if "window" in _options(STREAMS.find(config.stream).Config):
                changed = dataclasses.replace(config, stream_options={**config.stream_options, "window": window})
                moved.setdefault(label, []).append((window, _fused(changed, deployment.dtype)))
            if config.mixer is not None and "window" in _options(MIXERS.find(config.mixer).Config):
                changed = dataclasses.replace(config, mixer_options={**config.mixer_options, "window": window})
                kept.setdefault(label, []).append((window, _kept(changed, deployment.dtype, 256).local))
    return [("stream, bytes per token, fused", moved), ("rings, bytes per sequence", kept)]


def _options(config: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(config)}


def _fused(config: ModelConfig, dtype: str) -> float:
    return sum(site.fused for site in trace_step(meta_model(config, dtype), 1, 4096).sites)


def _live(config: ModelConfig, dtype: str) -> int:
    return count_live(meta_model(config, dtype).stream) * SIZES[dtype]


def _kept(config: ModelConfig, dtype: str, context: int) -> Kept:
    model = meta_model(config, dtype)
    past = lengthened(trace_step(model, 1, 1).past, context - 1)
    return trace_step(model, 1, 1, past=past).kept


def stage_bytes(models: dict[str, ModelConfig], deployment: Deployment) -> Lines:
    """Transfers against the number of stages, whole and cached."""
    found: Lines = {}
    virtual = deployment.virtual_stages
    for label, config in models.items():
        trunk, blocks = meta_model(config, deployment.dtype), config.num_hidden_layers
        for stages in (n for n in range(2, blocks + 1) if blocks % (n * virtual) == 0):
            transfers = plan(trunk, stages, virtual)
            found.setdefault(label, []).append((stages, transfers.naive))
            if transfers.cached != transfers.naive:
                found.setdefault(f"{label}, cached", []).append((stages, transfers.cached))
    return found


def deep(config: ModelConfig, blocks: int) -> ModelConfig:
    """The same decoder with another number of blocks."""
    anywhere = {"attention_windows": None, "no_rope_blocks": (), "mixer_blocks": None, "placement": None}
    return dataclasses.replace(config, num_hidden_layers=blocks, hidden_ramp=False, **anywhere)


def _figure(panels: list[tuple[str, str, Lines]], names: list[str]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6 * len(panels), 4.2), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for panel, (x, y, lines) in zip(axes, panels, strict=True):
        _panel(panel, x, y, lines, names)
    shown = {label: line for panel in axes for line, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    columns = 2 * len(panels)
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    return figure


def _panel(panel: Axes, x: str, y: str, lines: Lines, names: list[str]) -> None:
    for label, points in lines.items():
        number = names.index(label.removesuffix(", cached"))
        colour = COLOURS[number % len(COLOURS)]
        thick = max(1.2, 4.0 - 0.7 * number)  # equal lines lie on each other, the first the thickest
        style = "--" if label.endswith(", cached") else "-"
        shown = [point for point in points if point[1]]  # a height of nothing has no place on a logarithmic axis
        panel.plot(*zip(*shown, strict=True), style, marker="o", markersize=3, lw=thick, color=colour, label=label)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    heights = [point[1] for points in lines.values() for point in points if point[1]]
    if heights and max(heights) < 30 * min(heights):  # too few decades to read a height from
        panel.set_yscale("linear")
        panel.set_ylim(0)
    panel.yaxis.set_major_formatter(lambda size, _: si(size))
    panel.yaxis.set_minor_formatter(lambda size, _: "")
    ticks = sorted({point[0] for points in lines.values() for point in points})
    panel.set_xticks(ticks, [f"{int(n):,}" for n in ticks])
    panel.set_xlabel(x)
    panel.set_ylabel(y)
    panel.grid(True, alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def _write(path: Path, figure: Figure) -> Path:
    import io

    from twoaxis.base.files import write_bytes

    made = io.BytesIO()
    figure.savefig(made, format="svg", metadata={"Date": None})
    write_bytes(path, made.getvalue())
    return path
