"""The page about the two axes: its counts are true, and page, figures and numbers belong together."""

from __future__ import annotations

import functools
import json
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch

from twoaxis.guide import two_axes
from twoaxis.guide.line_svg import Line, Panel, draw, linear_ticks, log_ticks
from twoaxis.guide.two_axes_page import figures, filled
from twoaxis.model.config import ModelConfig
from twoaxis.model.presets import find_shape
from twoaxis.ring import Ring
from twoaxis.sequence.short_swa import ShortSWA

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "two_axes.md"
FOLDER = ROOT / "docs" / "figures"


@functools.cache
def stored() -> dict[str, Any]:
    return json.loads((FOLDER / "two_axes.json").read_text())


def test_counts_of_the_page_are_those_of_the_code() -> None:
    found = json.loads(json.dumps(two_axes.counted()))
    kept = {name: value for name, value in stored().items() if name != "measured"}
    assert found == kept, (
        "write the page anew: python -m twoaxis.guide.two_axes --out docs/figures --page docs/two_axes.md"
    )


def test_page_and_figures_are_drawn_from_the_numbers() -> None:
    assert filled(PAGE.read_text(encoding="utf-8"), stored()) == PAGE.read_text(encoding="utf-8")
    made = figures(stored())
    for name, text in made.items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, name
        assert f"figures/{name}" in PAGE.read_text(encoding="utf-8")
    assert "torch" in stored()["measured"]["hardware"]
    assert stored()["measured"]["seed"] == two_axes.SEED


def test_prose_has_no_measured_numbers() -> None:
    """Outside the comments nothing could contradict another machine."""
    prose = re.sub(r"<!-- numbers: .*?<!-- end -->", "", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert not re.findall(r"\d+(?:\.\d+)?\s?(?:x|ns|ms|%|times|[kMG]B)\b", prose)


def test_a_page_without_its_places_is_refused() -> None:
    with pytest.raises(ValueError, match="the page has numbers for"):
        filled("<!-- numbers: equal -->\n<!-- end -->", stored())


def test_the_operator_costs_the_same_on_both_axes() -> None:
    found = two_axes.equal_operations()
    assert found["sequence"] == found["depth"] == 24 * 24 * 24 * 4 * 16 * 4  # dense: every key of the axis
    assert found["depth, difference on the transposed tensor"] == 0
    models = stored()["models"]
    base = find_shape(two_axes.SHAPE)
    width, blocks, window = base.hidden_size, base.num_hidden_layers, two_axes.WINDOW
    projections, band = 8 * width * width * blocks, 4 * window * width * blocks
    missing = 4 * width * sum(window - n for n in range(1, window))
    assert models["depth"]["flops"] == projections + band - missing + width * blocks
    assert models["sequence"]["flops"] == projections + band + 5 * width * blocks
    assert models["depth"]["parameters"] == 4 * width * width * blocks
    assert models["sequence"]["parameters"] == (4 * width * width + width) * blocks


@pytest.mark.parametrize("window", [1, 2, 5])
def test_bytes_that_a_depth_read_cannot_do_without(window: int) -> None:
    """Counted on the ring that the read really has, at a layer far enough down."""
    width, heads = 12, 3
    ring = Ring(window, 2, merge=False)
    for _ in range(8):
        k, v = (torch.zeros(1, 1, 1, heads, width // heads) for _ in range(2))
        ring = ring.append(k, v)
    numbers = sum(t.numel() for piece in ring.pieces for t in piece) + 2 * width  # and q and the result
    assert two_axes.moved("depth", width, window) == numbers * two_axes.SIZE
    assert two_axes.moved("sequence", width, window) == 4 * width * two_axes.SIZE


def test_what_is_kept_is_what_a_mixer_keeps() -> None:
    base = find_shape(two_axes.SHAPE)
    for row in stored()["by_window"]:
        with torch.device("meta"):
            mixer = ShortSWA(base.hidden_size, window=row["window"], heads=base.num_attention_heads)
        assert row["sequence"]["kept"] == mixer.cost().kept * base.num_hidden_layers * two_axes.SIZE
        assert row["depth"]["live"] == (1 + 2 * row["window"]) * base.hidden_size * two_axes.SIZE
    small = ShortSWA(8, window=4, heads=2)
    _, ring = small.step(torch.zeros(1, 9, 8), small.start())
    assert ring.nbytes() == small.cost().kept * 4


def test_tiles_by_brute_force() -> None:
    for row in two_axes.by_chunk():
        for c in two_axes.TILES:
            first = 10 * c  # a tile of queries far from the beginning
            seen = {
                key // c for query in range(first, first + c) for key in range(query - row["window"] + 1, query + 1)
            }
            assert row["tiles"][str(c)] == len(seen)
            assert row["waste"][str(c)] == pytest.approx((c + row["window"] - 1) / row["window"])


def test_state_by_depth() -> None:
    width, size = find_shape(two_axes.SHAPE).hidden_size, two_axes.SIZE
    for row in stored()["by_depth"]:
        assert row["plain"] == row["sequence"] == width * size
        assert row["depth"] == (1 + 2 * two_axes.WINDOW) * width * size
        assert row["depth, all states"] == (1 + 2 * row["blocks"]) * width * size
        assert row["attention residuals, full"] == (1 + 2 * row["blocks"]) * width * size
        assert row["attention residuals, blocks"] == 9 * width * size


def test_pipelines_send_the_window() -> None:
    width, size = find_shape(two_axes.SHAPE).hidden_size, two_axes.SIZE
    for row in stored()["by_stages"]:
        boundaries = row["stages"] - 1
        assert row["plain"]["naive"] == row["sequence"]["naive"] == boundaries * width * size
        blocks = 32 // row["stages"]
        # the residual, and keys and values of the states before it: those of the newest are made of the residual again
        sent = [1 + 2 * (min(two_axes.WINDOW, boundary * blocks + 1) - 1) for boundary in range(1, row["stages"])]
        assert row["depth"]["naive"] == sum(sent) * width * size


def test_measurements_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_axes, "READ", {"layers": 3, "tokens": 8, "heads": 2, "head_width": 4})
    monkeypatch.setattr(
        two_axes, "MODEL", {"vocab_size": 16, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
    )
    point = ("blocks", 2, {"blocks": 2, "tokens": 8, "window": 2})
    monkeypatch.setattr(two_axes, "POINTS", (point,))
    said: list[str] = []
    found = two_axes.measured(1, said.append)
    assert [row["window"] for row in found["reads"]] == [2, 4, 8, 16]
    assert all(row[name] > 0 for row in found["reads"] for name in ("sequence", "depth", "depth, all layers at once"))
    (row,) = found["steps"]
    assert row["sequence"]["memory"] > 1
    assert row["depth"]["memory"] > 1
    assert len(said) == 5


def test_reads_of_the_measurement_are_one_operator() -> None:
    """What is timed layer by layer and all at once gives the same gradients."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, 5, 6, 2, 4, generator=generator) for _ in range(4))
    kept: list[list[torch.Tensor]] = []
    made = two_axes._leaves

    def remember(*tensors: torch.Tensor) -> list[torch.Tensor]:
        kept.append(made(*tensors))
        return kept[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two_axes, "_leaves", remember)
        two_axes._at_once(q, k, v, grad, 3)
        (once,), kept = kept, []
        patch.setattr(two_axes, "_leaves", lambda *tensors: kept.append(made(*tensors)) or kept[-1])
        two_axes._along_depth(q, k, v, grad, 3)
    for number, whole in enumerate(once):
        grads = [layer[number].grad for layer in kept]
        layers = torch.cat([grad for grad in grads if grad is not None], dim=2)
        assert whole.grad is not None
        assert torch.allclose(layers, whole.grad, atol=1e-5)


def test_the_command_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "two_axes.json").write_text(json.dumps(stored()))
    page = tmp_path / "page.md"
    page.write_text(re.sub(r"(<!-- numbers: \w+ -->\n).*?(<!-- end -->)", r"\1\2", PAGE.read_text(), flags=re.DOTALL))
    assert two_axes.main(["--out", str(tmp_path), "--page", str(page), "--draw-only"]) == 0
    assert page.read_text() == PAGE.read_text()
    assert "two_axes_stages.svg" in capsys.readouterr().out
    for path in tmp_path.glob("*.svg"):
        root = ET.fromstring(path.read_text())
        assert root.tag.endswith("svg")
        assert "prefers-color-scheme: dark" in path.read_text()
        assert path.stat().st_size < 15_000


def test_ticks() -> None:
    assert log_ticks(3, 800) == [1, 10, 100, 1000]
    assert log_ticks(3, 40) == [2, 5, 10, 20, 50]
    assert linear_ticks(1.63) == [0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75]
    assert linear_ticks(540_672)[-1] == 600_000
    assert all(len(linear_ticks(10**power * 1.01)) <= 8 for power in range(6))


def test_points_stand_where_they_should() -> None:
    line = Line("a < b", ((1, 0), (4, 10)), 1)
    text = draw((Panel("y", "x", (line,), False, str),), "a chart")
    root = ET.fromstring(text)
    circles = [c for c in root.iter() if c.tag.endswith("circle")]
    assert [float(c.attrib["cx"]) for c in circles] == [62, 416]
    assert [float(c.attrib["cy"]) for c in circles] == [254, 34]
    assert "a &lt; b" in text


def test_configurations() -> None:
    base = ModelConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=8)
    assert two_axes.configure(base, "attention residuals, blocks").stream_options["block_size"] == 2
    assert two_axes.configure(base, "depth", 3).stream_options["window"] == 3
    assert two_axes.configure(base, "sequence", 3).mixer_options["window"] == 3
    assert math.isclose(two_axes.live(two_axes.configure(base, "plain")), 32)
