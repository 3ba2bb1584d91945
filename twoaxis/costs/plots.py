"""Charts of costs against depth, context, window and stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twoaxis.costs.costs import Costs
from twoaxis.costs.memory import SIZES
from twoaxis.costs.trace import Kept, meta_model, trace_decoding, trace_step
from twoaxis.depth.counts import count_live
from twoaxis.depth.registry import STREAMS
from twoaxis.model.config import ModelConfig
from twoaxis.model.stages import plan
from twoaxis.sequence.registry import MIXERS
from twoaxis.show.charts import Axis, Chart, Line, Panel

CONTEXTS = (1024, 4096, 16_384, 65_536, 131_072)
WINDOWS = (1, 2, 4, 8, 16, 32, 64, 128)
DEPTHS = (4, 8, 16, 32, 64)

Points = list[tuple[float, float]]
Size = Callable[[Any, str], float]
"""Bytes of a shape in a dtype."""


def charts(rows: Sequence[Costs]) -> tuple[Chart, ...]:
    """Every chart that the methods have."""
    dtype, virtual = rows[0].deployment.dtype, rows[0].deployment.virtual_stages
    configs = {row.label: row.shape for row in rows}
    depth = [
        _panel("blocks", title, {label: _by_depth(config, dtype, size) for label, config in configs.items()})
        for title, size in (("stream, bytes per token, fused", _fused), ("live state, bytes per token", _live))
    ]
    kept = {label: [(n, _kept(config, dtype, n)) for n in CONTEXTS] for label, config in configs.items()}
    growing = {label: [(n, k.attention) for n, k in points] for label, points in kept.items()}
    local = {label: [(n, k.local + k.stream) for n, k in points] for label, points in kept.items()}
    windowed = {
        "what streams move, bytes per token, fused": {n: _by_window(c, dtype, "stream") for n, c in configs.items()},
        "what mixers keep, bytes per sequence": {n: _by_window(c, dtype, "mixer") for n, c in configs.items()},
    }
    sent: dict[str, Points] = {}
    for row in rows:
        blocks = row.shape.num_hidden_layers
        for stages in (n for n in range(2, blocks + 1) if blocks % (n * virtual) == 0):
            found = plan(row.model, stages, virtual)
            sent.setdefault(row.label, []).append((stages, found.whole))
            if found.cached != found.whole:
                sent.setdefault(f"{row.label}, cached", []).append((stages, found.cached))
    made = {
        ("depth", "Bytes per token against depth"): depth,
        ("context", "Bytes kept between tokens against the context"): [
            _panel("context", "keys and values, bytes per sequence", growing),
            _panel("context", "rings and the stream's memory", local),
        ],
        ("window", "Bytes against the window"): [_panel("window", *pair) for pair in windowed.items()],
        ("stages", "Bytes per token over all stage boundaries"): [_panel("pipeline stages", "", sent)],
    }
    drawn = {about: tuple(panel for panel in panels if panel.marks) for about, panels in made.items()}
    return tuple(Chart(*about, (panels,)) for about, panels in drawn.items() if panels)


def _panel(x: str, title: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> Panel:
    """Lines over a logarithmic axis; a height of nothing has no place on one, and few heights need none."""
    shown = {label: [point for point in points if point[1]] for label, points in lines.items()}
    heights = [y for points in shown.values() for _, y in points]
    spread = max(heights, default=1) / min(heights, default=1)
    y = Axis("", "bytes", "log") if spread >= 30 else Axis("", "bytes", low=0)
    marks = tuple(
        Line(label, tuple(x for x, _ in points), tuple(y for _, y in points), dashed=label.endswith(", cached"))
        for label, points in shown.items()
        if points
    )
    return Panel("lines", title, Axis(x, "whole", "log2"), y, marks)


def _by_depth(config: Any, dtype: str, size: Size) -> Points:
    """At other depths, where the layers are ours to add."""
    if not isinstance(config, ModelConfig):
        return []
    plain: dict[str, Any] = dict.fromkeys(("attention_windows", "mixer_blocks", "placement"))
    plain |= {"no_rope_blocks": (), "hidden_ramp": False}
    return [(n, size(dataclasses.replace(config, num_hidden_layers=n, **plain), dtype)) for n in DEPTHS]


def _by_window(config: Any, dtype: str, axis: str) -> Points:
    """What a stream moves or a mixer keeps, where it has a window."""
    name, options = getattr(config, axis), f"{axis}_options"
    registry = STREAMS if axis == "stream" else MIXERS
    if name is None or "window" not in {field.name for field in dataclasses.fields(registry.find(name).Config)}:  # type: ignore[arg-type]
        return []
    size: Size = _fused if axis == "stream" else lambda config, dtype: _kept(config, dtype, 256).local
    changed = (dataclasses.replace(config, **{options: {**getattr(config, options), "window": n}}) for n in WINDOWS)
    return [(n, size(each, dtype)) for n, each in zip(WINDOWS, changed, strict=True)]


def _fused(config: Any, dtype: str) -> float:
    return sum(site.fused for site in trace_step(meta_model(config, dtype), 1, 4096).sites)


def _live(config: Any, dtype: str) -> float:
    return count_live(meta_model(config, dtype).stream) * SIZES[dtype]


def _kept(config: Any, dtype: str, context: int) -> Kept:
    return trace_decoding(meta_model(config, dtype), 1, context).kept
