"""Line charts as small SVG files that read well on light and dark pages.

A chart is panels side by side; a panel has lines over a common logarithmic x axis. Text stays text and colours follow
the reader's theme, so a chart is a few kilobytes and sharp at any size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 430, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 34, 46
ROW = 17
"""Height of a line of the legend."""

STYLE = """<style>
svg { font: 12px system-ui, sans-serif; }
text { fill: #24292f; } .soft { fill: #57606a; } .grid { stroke: #d0d7de; stroke-width: 1; }
.c0 { --c: #57606a; } .c1 { --c: #0969da; } .c2 { --c: #cf222e; } .c3 { --c: #8250df; }
.c4 { --c: #1a7f37; } .c5 { --c: #bc4c00; }
.line { stroke: var(--c); fill: none; stroke-width: 2; } .dot { fill: var(--c); }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; } .soft { fill: #9da7b1; } .grid { stroke: #3d444d; }
.c0 { --c: #9da7b1; } .c1 { --c: #58a6ff; } .c2 { --c: #ff7b72; } .c3 { --c: #d2a8ff; }
.c4 { --c: #56d364; } .c5 { --c: #ffa657; }
}
</style>"""
"""Colours of both themes; contrast of lines and text on white and on GitHub's dark page is above 4.5."""


class Line(NamedTuple):
    """One line.

    Attributes:
        label: in the legend.
        points: (x, y), both positive.
        colour: number of a colour, the same for one thing in all charts.
        dashed: a second form of the same thing.
    """

    label: str
    points: tuple[tuple[float, float], ...]
    colour: int
    dashed: bool = False


class Panel(NamedTuple):
    """One pair of axes.

    Attributes:
        title: what is on the y axis.
        x: what is on the x axis.
        lines: at least one.
        logarithmic: the y axis; else it is linear and begins at zero.
        unit: writes a number of the y axis.
    """

    title: str
    x: str
    lines: tuple[Line, ...]
    logarithmic: bool
    unit: Callable[[float], str]


def draw(panels: Sequence[Panel], about: str) -> str:
    """The chart.

    Args:
        panels: from left to right.
        about: what it shows, for those who cannot see it.
    """
    legend = list(dict.fromkeys((line.label, line.colour, line.dashed) for p in panels for line in p.lines))
    width = WIDTH * len(panels)
    columns = max(1, width // 290)
    rows = -(-len(legend) // columns)
    height = HEIGHT + rows * ROW + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(about)}">',
        f"<title>{escape(about)}</title>",
        STYLE,
    ]
    for number, panel in enumerate(panels):
        parts.append(f'<g transform="translate({number * WIDTH} 0)">')
        parts += _panel(panel)
        parts.append("</g>")
    for number, (label, colour, dashed) in enumerate(legend):
        x, y = 16 + number % columns * (width // columns), HEIGHT + 12 + number // columns * ROW
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        parts.append(f'<g class="c{colour}"><path class="line" d="M{x} {y - 4}h24"{dash}/></g>')
        parts.append(f'<text x="{x + 30}" y="{y}">{escape(label)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel) -> list[str]:
    xs = sorted({x for line in panel.lines for x, _ in line.points})
    ys = [y for line in panel.lines for _, y in line.points]
    low, high = (math.log2(xs[0]), math.log2(xs[-1])) if len(xs) > 1 else (math.log2(xs[0]) - 1, math.log2(xs[0]) + 1)
    ticks = log_ticks(min(ys), max(ys)) if panel.logarithmic else linear_ticks(max(ys))
    bottom, top = (math.log10(ticks[0]), math.log10(ticks[-1])) if panel.logarithmic else (ticks[0], ticks[-1])

    def place_x(x: float) -> float:
        return round(LEFT + (math.log2(x) - low) / (high - low) * (WIDTH - LEFT - RIGHT), 1)

    def place_y(y: float) -> float:
        y = math.log10(y) if panel.logarithmic else y
        return round(HEIGHT - BOTTOM - (y - bottom) / (top - bottom) * (HEIGHT - TOP - BOTTOM), 1)

    parts = [f'<text x="{LEFT - 46}" y="18" font-weight="600">{escape(panel.title)}</text>']
    for tick in ticks:
        y = place_y(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>')
        parts.append(
            f'<text class="soft" x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{escape(panel.unit(tick))}</text>'
        )
    for x in xs:
        parts.append(f'<path class="grid" d="M{place_x(x)} {HEIGHT - BOTTOM}v4"/>')
        name = f'<text class="soft" x="{place_x(x)}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{_count(x)}</text>'
        parts.append(name)
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">{escape(panel.x)}</text>')
    for line in panel.lines:
        path = "L".join(f"{place_x(x)} {place_y(y)}" for x, y in line.points)
        dash = ' stroke-dasharray="5 4"' if line.dashed else ""
        parts.append(f'<g class="c{line.colour}"><path class="line" d="M{path}"{dash}/>')
        parts += [f'<circle class="dot" cx="{place_x(x)}" cy="{place_y(y)}" r="3"/>' for x, y in line.points]
        parts.append("</g>")
    return parts


def _count(x: float) -> str:
    return f"{x / 1024:g}k" if x >= 1024 and x % 1024 == 0 else f"{x:g}"


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten around a range, with 2 and 5 between them where it is short."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    last = max(last, first + 1)
    steps = (1, 2, 5) if last - first <= 2 else (1,)
    ticks = [step * 10.0**power for power in range(first, last) for step in steps] + [10.0**last]
    below = [tick for tick in ticks if tick <= low] or ticks[:1]
    above = [tick for tick in ticks if tick >= high] or ticks[-1:]
    return [tick for tick in ticks if below[-1] <= tick <= above[0]]


def linear_ticks(high: float) -> list[float]:
    """From zero to just above a number, in four to seven steps of 1, 2, 2.5 or 5."""
    power = 10.0 ** math.floor(math.log10(high))
    for step in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0):
        count = math.ceil(high / (step * power) - 1e-9)
        if count <= 7:
            return [round(i * step * power, 12) for i in range(count + 1)]
    return [0.0, high]
