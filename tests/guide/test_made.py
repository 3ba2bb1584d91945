"""What the library writes of the documentation: published figures, the page of the two axes."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from typing import Any

import pytest
import torch

from docs._make import two_axes
from docs._make.fill import DOCS, filled, part, parts
from docs._make.two_axes_page import PARTS, figures, stored
from twoaxis.guide.evidence import Figure, read_evidence
from twoaxis.guide.published import METRICS, SAME, Row, compare
from twoaxis.model.presets import find_shape
from twoaxis.ring import Ring
from twoaxis.sequence.short_swa import ShortSWA

COST = (DOCS / "howto" / "cost.md").read_text(encoding="utf-8")
TWO = (DOCS / "explanation" / "two_axes.md").read_text(encoding="utf-8")


# Published figures.


def rows(*metrics: str) -> list[tuple[Figure, Row]]:
    return [(figure, compare(figure)) for figure in read_evidence().figures if figure.metric in metrics]


COUNTS = [metric for metric in METRICS if metric.startswith(("parameters", "operations", "vectors sent"))]


def test_counts_agree_or_say_why() -> None:
    for figure, row in rows(*COUNTS):
        assert row.why, row
        assert (row.ours == row.published) == (figure.why == SAME), row


@pytest.mark.slow
def test_bytes_and_speeds_agree_or_say_why() -> None:
    for figure, row in rows(*(metric for metric in METRICS if metric not in COUNTS)):
        if figure.why == SAME:
            assert row.ours == row.published, row
        if "speed" in figure.metric:  # between eager and fused, give or take a tenth of it
            low, high = map(float, row.ours.split(" to "))
            assert 0.9 * low <= figure.value <= 1.1 * high, row


def test_an_unknown_metric_is_refused() -> None:
    figure = read_evidence().figures[0]
    with pytest.raises(ValueError, match=r"unknown metric 'vectors moves' \(did you mean 'vectors moved'\?\)"):
        compare(Figure(**{**figure.to_dict(), "metric": "vectors moves"}))


# Pages.


@pytest.mark.slow
@pytest.mark.parametrize("name", list(parts(COST)))
def test_the_page_of_costs_says_what_the_tool_prints(name: str) -> None:
    assert parts(COST)[name] == part(name), "run make docs"


def test_pages_have_their_parts() -> None:
    assert "published" in parts(COST)
    assert sum(name.startswith("twoaxis cost ") for name in parts(COST)) == 1
    assert set(parts(TWO)) == {f"two_axes {name}" for name in PARTS}
    with pytest.raises(ValueError, match="or a twoaxis cost command, got 'rm -r x'"):
        part("rm -r x")


# The two axes.


@pytest.mark.slow
def test_two_axes_counts_are_current() -> None:
    counted: dict[str, Any] = json.loads(json.dumps(two_axes.counted()))
    assert counted == {name: value for name, value in stored().items() if name != "measured"}, "run make docs"


def test_two_axes_page_figures_and_counts_belong_together() -> None:
    assert filled(TWO) == TWO, "run make docs"
    for name, text in figures(stored()).items():
        assert (DOCS / "results" / "figures" / name).read_text(encoding="utf-8") == text, f"{name}: run make docs"
        assert f"figures/{name}" in TWO
        assert ET.fromstring(text).tag.endswith("svg")


def test_two_axes_counts_by_hand() -> None:
    found, base, size, window = stored(), find_shape(two_axes.SHAPE), two_axes.SIZE, two_axes.WINDOW
    width, blocks = base.hidden_size, base.num_hidden_layers
    operator, models = found["operator"], found["models"]
    assert operator["sequence"] == operator["depth"] == 24 * 24 * 24 * 4 * 16 * 4  # dense: every key of the axis
    assert operator["depth, difference on the transposed tensor"] == 0
    projections, band = 8 * width * width * blocks, 4 * window * width * blocks
    missing = 4 * width * sum(window - n for n in range(1, window))
    assert models["depth"]["flops"] == projections + band - missing + width * blocks
    assert models["sequence"]["flops"] == projections + band + 5 * width * blocks
    assert models["depth"]["parameters"] == 4 * width * width * blocks
    assert models["sequence"]["parameters"] == (4 * width * width + width) * blocks
    for row in found["by_window"]:
        with torch.device("meta"):
            mixer = ShortSWA(width, window=row["window"], heads=base.num_attention_heads)
        assert row["sequence"]["kept"] == mixer.cost().kept * blocks * size
        assert row["depth"]["live"] == (1 + 2 * row["window"]) * width * size
    for row in found["by_depth"]:
        assert row["plain"] == row["sequence"] == width * size
        assert row["depth"] == (1 + 2 * window) * width * size
        assert row["depth, all states"] == row["attention residuals, full"] == (1 + 2 * row["blocks"]) * width * size
        assert row["attention residuals, blocks"] == 9 * width * size
    for row in found["by_stages"]:
        stages = row["stages"]
        assert row["plain"]["whole"] == row["sequence"]["whole"] == (stages - 1) * width * size
        # the residual, and keys and values of the states before it: those of the newest are made of the residual again
        sent = [1 + 2 * (min(window, boundary * blocks // stages + 1) - 1) for boundary in range(1, stages)]
        assert row["depth"]["whole"] == sum(sent) * width * size
    for row in found["by_chunk"]:
        for c in two_axes.TILES:
            queries = range(10 * c, 11 * c)  # a tile far from the beginning
            seen = {key // c for query in queries for key in range(query - row["window"] + 1, query + 1)}
            assert row["tiles"][str(c)] == len(seen)
            assert math.isclose(row["waste"][str(c)], (c + row["window"] - 1) / row["window"])


def test_bytes_and_gradients_of_the_two_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are those of the ring that a read has; what is timed at once and layer by layer is one operator."""
    width, heads = 12, 3
    for window in (1, 2, 5):
        ring = Ring(window, 2)
        for _ in range(8):
            ring = ring.append(*(torch.zeros(1, 1, 1, heads, width // heads) for _ in range(2)))
        needed = sum(t.numel() for t in ring.kept) + 2 * width  # and q and the result
        assert two_axes.moved("depth", width, window) == needed * two_axes.SIZE
        assert two_axes.moved("sequence", width, window) == 4 * width * two_axes.SIZE
    generator, made = torch.Generator().manual_seed(0), two_axes._leaves
    q, k, v, grad = (torch.randn(1, 5, 6, 2, 4, generator=generator) for _ in range(4))
    kept: list[list[Any]] = []
    monkeypatch.setattr(two_axes, "_leaves", lambda *tensors: kept.append(made(*tensors)) or kept[-1])
    two_axes._at_once(q, k, v, grad, 3)
    two_axes._along_depth(q, k, v, grad, 3)
    once, *layers = kept
    for number, whole in enumerate(once):
        assert torch.allclose(torch.cat([layer[number].grad for layer in layers], dim=2), whole.grad, atol=1e-5)
