"""Drawings of all four kinds: the same bytes for the same numbers, no colour that does not follow the theme."""

from __future__ import annotations

import re
import struct
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.show.samples import CONTENDERS, Sample, bars, curves, everything, heat, intervals
from twoaxis.base.machine import needs
from twoaxis.show import figures
from twoaxis.show.charts import COLOURS, PALETTE, Axis, Chart, Line, Mark, Panel, Row, legend

KINDS = tuple((chart.panels[0],) for chart in (curves(), intervals(), bars(), heat()))
CHART = Chart("kinds", "a panel of each kind", KINDS)


def test_the_same_bytes_whatever_the_reader_has_set() -> None:
    import matplotlib

    chart = CHART
    before = dict(matplotlib.rcParams)
    first = figures.svg(chart), figures.png(chart)
    assert dict(matplotlib.rcParams) == before
    with matplotlib.rc_context({"font.size": 20, "axes.grid": True, "svg.fonttype": "path"}):
        assert (figures.svg(chart), figures.png(chart)) == first
    width, height = struct.unpack(">II", first[1][16:24])
    assert height > width > 700  # four panels one under the other


def test_svg_has_every_word_and_follows_the_theme() -> None:
    chart, file = CHART, figures.svg(CHART)
    for text, whole in ((file, True), *((text, False) for text in figures.panel_svgs(chart))):
        root = ElementTree.fromstring(text)
        style = root.find("{http://www.w3.org/2000/svg}style")
        assert (style is not None) == whole
        drawn = re.sub(r"<style>.*?</style>", "", text)
        assert not re.findall(r"#[0-9a-fA-F]{6}\b|rgb\(|: (?:black|white)\b", drawn)
        assert {*re.findall(r"var\(--(\w+)\)", drawn)} <= {*PALETTE}
        if style is not None:
            said = style.text or ""
            light, dark = said.split("@media (prefers-color-scheme:dark)")
            assert all(f"--{key}:{pair[0]}" in light and f"--{key}:{pair[1]}" in dark for key, pair in PALETTE.items())
    shown = "".join(ElementTree.fromstring(file).itertext())
    folded = "".join(shown.split())
    for panel in chart.panels:
        assert panel.title in shown
        assert panel.x.title in shown
        for mark in panel.marks:
            assert mark.label.replace(" ", "") in folded


def test_heights_of_lines_are_those_of_the_data() -> None:
    line = Line("a", (1.0, 2.0, 3.0, 4.0), (0.0, 1.0, None, 0.5))
    panel = Panel("lines", "t", Axis("x", low=1, high=4), Axis("y", low=0, high=1), (line,))
    (text,) = figures.panel_svgs(Chart("c", "c", ((panel,),)))
    group = text.split('data-series="0"')[1]
    points = [(float(x), float(y)) for x, y in re.findall(r'<use href="#\w+" x="([\d.]+)" y="([\d.]+)"', group)]
    assert len(points) == 3  # the gap has no marker
    (x0, y0), (x1, y1), (x3, y3) = points
    assert y1 < y3 < y0  # svg counts from the top
    assert (x3 - x0) == pytest.approx(3 * (x1 - x0), abs=1e-3)
    assert (y0 - y3) == pytest.approx((y0 - y1) / 2, abs=1e-3)


def test_whole_numbers_have_whole_ticks() -> None:
    line = Line("a", tuple(range(13)), tuple(range(13)))
    panel = Panel("lines", "", Axis("site", "whole"), Axis(), (line,))
    found = re.findall(r"<text[^>]*>\s*([\d.]+)\s*</text>", figures.svg(Chart("ticks", "", ((panel,),))))
    assert found[:7] == ["0", "2", "4", "6", "8", "10", "12"]


@pytest.mark.parametrize(("last", "first_labels"), [(420_500, ["419,000", "419,500"]), (900_000, ["400k", "500k"])])
def test_ticks_of_counts_differ(last: int, first_labels: list[str]) -> None:
    panel = Panel("lines", "", Axis("", "count"), Axis(""), (Line("one", (419_000, last), (1.0, 2.0)),))
    found = re.findall(r"<text[^>]*>\s*([\d.,]+k?)\s*</text>", figures.svg(Chart("ticks", "", ((panel,),))))
    assert len({*found}) == len(found)
    assert [label for label in found if label.endswith("k") or "," in label][:2] == first_labels


def test_bars_are_as_long_as_their_values() -> None:
    marks = (Mark("a", 1.0), Mark("b", 3.0), Mark("c", None), Mark("d", -2.0))
    (text,) = figures.panel_svgs(Chart("c", "c", ((Panel("bars", "", Axis(), Axis(), marks),),)))
    bars = [path for path in re.findall(r'<path d="([^"]*)"[^>]*fill: var\(--c1\)', text)]
    widths = [abs(float(b) - float(a)) for a, b in (re.findall(r"[ML] ([\d.]+) ", bar)[:2] for bar in bars)]
    assert len(widths) == 3
    assert widths[1] == pytest.approx(3 * widths[0], rel=1e-3)
    assert widths[2] == pytest.approx(2 * widths[0], rel=1e-3)


def test_heat_is_stronger_for_larger_numbers_and_empty_for_none() -> None:
    panel = Panel("heat", "", Axis(), Axis(), (Row("r", (0.25, 1.0, None, -1.0)),), Axis(scale="root"))
    (text,) = figures.panel_svgs(Chart("c", "c", ((panel,),)))
    cells = re.findall(r'clip-path="[^"]*" style="fill: var\(--(heat|cold)\)(?:; opacity: ([\d.]+))?', text)
    assert [(hue, float(alpha or 1)) for hue, alpha in cells][:3] == [("heat", 0.52), ("heat", 1.0), ("cold", 1.0)]


def test_intervals_have_their_tone_and_hollow_marks_are_open() -> None:
    (text, _) = figures.panel_svgs(intervals())
    assert text.count("stroke: var(--better)") >= 2
    assert "stroke: var(--worse)" in text
    assert re.search(r"fill: var\(--paper\); stroke: var\(--c0\)", text)
    assert ">-0.021<" in text
    assert ">+0.013<" in text


def test_a_label_has_one_colour_in_the_whole_chart() -> None:
    assert legend(curves()) == {label: number for number, label in enumerate(CONTENDERS)}
    lines = tuple(Line(f"l{n}", (1.0,), (1.0,)) for n in range(20))
    many = legend(Chart("c", "", ((Panel("lines", "", Axis(), Axis(), lines),),)))
    assert list(many.values())[:COLOURS] == list(range(1, COLOURS + 1))
    assert {*many.values()} == {*range(1, COLOURS + 1)}


def test_labels_are_text_in_a_drawing() -> None:
    nasty = "<script>alert(1)</script> $x_1$ & [b]"
    line = Line(nasty, (1.0, 10.0), (1.0, 2.0))
    rows = (
        (Panel("lines", nasty, Axis(nasty, scale="log"), Axis(nasty, scale="log2"), (line,)),),
        (Panel("intervals", nasty, Axis(nasty), Axis(nasty), (Mark(nasty, 1.0),)),),
        (Panel("bars", nasty, Axis(nasty), Axis(nasty), (Mark(nasty, 1.0, group=nasty),)),),
        (Panel("heat", nasty, Axis(nasty, names=(nasty,)), Axis(nasty), (Row(nasty, (1.0,)),), Axis(nasty)),),
    )
    chart = Chart("c", nasty, rows)
    for text in (figures.svg(chart), *figures.panel_svgs(chart)):
        assert "<script" not in text
        assert "$x_1$" in "".join(ElementTree.fromstring(text).itertext())


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("side", [0, 1], ids=["light", "dark"])
def test_colours_can_be_read_on_their_paper(side: int) -> None:
    def contrast(first: str, second: str) -> float:
        low, high = sorted((luminance(PALETTE[first][side]), luminance(PALETTE[second][side])))
        return (high + 0.05) / (low + 0.05)

    for words in ("ink", "soft", "accent", "better", "worse", "warn"):
        assert all(contrast(words, ground) >= 4.5 for ground in ("paper", "card", "head")), words
    assert all(contrast(f"c{n}", "paper") >= 3 for n in range(COLOURS + 1))
    assert len({pair[side] for pair in PALETTE.values()}) == len(PALETTE)


def test_without_matplotlib_there_is_one_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"a figure needs the package matplotlib"):
        figures.png(curves())
    saved = Sample(everything()).save(tmp_path)
    assert saved.note == needs("a figure", "matplotlib")
    assert [file.name for file in saved.files] == ["report.md", "report.html", "report.json"]
    page = (tmp_path / "report.html").read_text()
    assert page.count("needs the package matplotlib") == 1
    assert "![" not in (tmp_path / "report.md").read_text()
