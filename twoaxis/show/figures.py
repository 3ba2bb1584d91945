"""Charts drawn by matplotlib, as png and as svg: the same bytes for the same numbers.

A drawing is made once, in the colours of light paper. In an svg every colour then becomes a variable: a file brings
both themes along, and in a page the variables are the page's, so that a drawing follows its theme.
matplotlib comes with the extra `lab` and is imported when something is drawn; no window system is needed.
"""

from __future__ import annotations

import contextlib
import html
import io
import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from twoaxis.base.machine import needs
from twoaxis.show.charts import PALETTE, Axis, Chart, Line, Mark, Panel, Row, legend
from twoaxis.show.numbers import UNITS
from twoaxis.show.numbers import whole as whole_number
from twoaxis.show.terminal import fold

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LIGHT = {name: light for name, (light, _) in PALETTE.items()}
WIDTH, HEIGHT = 5.4, 3.2
"""Inches of a panel of lines."""
NAME = 26
"""Characters of a row's name before it is folded."""
MARKERS = "oosD^vPX*"
"""Of lines, by colour: for eyes and printers that see fewer colours."""
MANY = 60
"""Points above which a line has no markers."""

_STYLE: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.facecolor": "none",
    "svg.fonttype": "none",
    **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 0),
    **dict.fromkeys(("text.parse_math", "axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("text.color", "axes.titlecolor", "legend.labelcolor"), LIGHT["ink"]),
    **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), LIGHT["soft"]),
    **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), LIGHT["line"]),
    **dict.fromkeys(("figure.facecolor", "savefig.facecolor"), LIGHT["paper"]),
    "axes.axisbelow": True,
}
"""matplotlib's settings; text stays text, and a dollar begins no formula."""


class NoFiguresError(ValueError):
    """matplotlib is not installed."""

    def __init__(self) -> None:
        super().__init__(needs("a figure", "matplotlib"))


def png(chart: Chart) -> bytes:
    """The chart with all its panels, on light paper."""
    with _settings(chart.name):
        return _save(_grid(chart), "png")


def svg(chart: Chart) -> str:
    """The chart with all its panels as a file, for light and dark readers."""
    with _settings(chart.name):
        raw = _save(_grid(chart), "svg")
    light, dark = (";".join(f"--{name}:{pair[side]}" for name, pair in PALETTE.items()) for side in (0, 1))
    style = f"<style>svg{{{light}}}@media (prefers-color-scheme:dark){{svg{{{dark}}}}}</style>"
    made = _themed(raw.decode(), chart.title, list(legend(chart)))
    return made.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1).replace(">", f">{style}", 1)


def panel_svgs(chart: Chart) -> list[str]:
    """Each panel as an svg element for a page that has the colours as variables; title and legend are the page's."""
    colours, made = legend(chart), []
    for number, panel in enumerate(chart.panels):
        with _settings(f"{chart.name}-{number}"):
            from matplotlib.figure import Figure

            figure = Figure(figsize=(WIDTH, _height(panel)), layout="constrained", facecolor="none")
            _draw(figure.subplots(), panel._replace(title=""), colours)
            raw = _save(figure, "svg", transparent=True)
        made.append(_themed(raw.decode(), panel.title or chart.title, list(colours)))
    return made


@contextlib.contextmanager
def _settings(salt: str) -> Iterator[None]:
    """matplotlib as it comes, whatever the reader has set, with our style; `salt` keeps the ids of a page apart."""
    try:
        import matplotlib
    except ImportError as error:
        raise NoFiguresError from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        matplotlib.rcParams["svg.hashsalt"] = salt
        yield


def _save(figure: Figure, kind: str, **options: Any) -> bytes:
    # without these a file has the time and the version it was made with
    metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    file = io.BytesIO()
    figure.savefig(file, format=kind, dpi=144 if kind == "png" else "figure", metadata=metadata, **options)
    return file.getvalue()


def _themed(raw: str, about: str, series: Sequence[str]) -> str:
    """What matplotlib wrote, with colours as variables and without what would clash in a page."""
    text = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", "", raw, flags=re.DOTALL)
    text = text[text.index("<svg") :].replace("xlink:href", "href")
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
    assert box is not None
    root = (
        f'<svg viewBox="0 0 {box[1]} {box[2]}" width="{float(box[1]) * 4 / 3:.0f}" role="img" '
        f'aria-label="{html.escape(about)}" font-family="system-ui, sans-serif" stroke-linejoin="round">'
    )
    text = re.sub(r"<svg .*?>", lambda _: root, text, count=1, flags=re.DOTALL)
    text = text.replace("font-family: 'DejaVu Sans'; ", "")
    names = [f"<title>{html.escape(name)}</title>" for name in series]
    text = re.sub(r' id="series-(\d+)">', lambda found: f' data-series="{found[1]}">{names[int(found[1])]}', text)
    text = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", text)  # names of parts, the same in every drawing
    for name, colour in LIGHT.items():
        text = text.replace(colour, f"var(--{name})")
    return text


# Drawing.


def _grid(chart: Chart) -> Figure:
    """All panels in the order of the rows, and one legend."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    colours, columns = legend(chart), max(len(row) for row in chart.rows)
    heights = [max(_height(panel) + 0.25 for panel in row) for row in chart.rows]
    keys = -(-len(colours) // (2 * columns)) * 0.22
    figure = Figure(figsize=(WIDTH * columns, sum(heights) + keys + 0.35), layout="constrained")
    places = figure.subplots(len(chart.rows), columns, squeeze=False, height_ratios=heights)
    for row, axes in zip(chart.rows, places, strict=True):
        for panel, place in zip(row, axes, strict=False):
            _draw(place, panel, colours)
        for place in axes[len(row) :]:
            place.set_axis_off()
    figure.suptitle(chart.title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    if colours:
        dashed = {m.label for p in chart.panels for m in p.marks if isinstance(m, Line) and m.dashed}
        shown = [
            Line2D([], [], color=LIGHT[f"c{number}"], linestyle="--" if name in dashed else "-", linewidth=2)
            for name, number in colours.items()
        ]
        figure.legend(shown, list(colours), loc="outside lower left", ncols=2 * columns, fontsize=8.5)
    return figure


def _height(panel: Panel) -> float:
    """Inches of a panel: rows of marks take as much as they need."""
    if panel.kind == "lines":
        return HEIGHT
    if panel.kind == "heat":
        return 1.3 + 0.22 * max(len(panel.marks), 5) + 0.07 * min(max(map(len, panel.x.names), default=0), NAME)
    bars = len({mark.group for mark in panel.marks if isinstance(mark, Mark)})
    lines = sum(max(len(fold(label, NAME)), 0.6 * bars) for label in _labels(panel.marks))
    return 0.95 + 0.3 * max(lines, 2)


def _labels(marks: Sequence[Line | Mark | Row]) -> list[str]:
    """The rows of a panel from top to bottom."""
    return list(dict.fromkeys(mark.label for mark in marks))


def _draw(axes: Axes, panel: Panel, colours: dict[str, int]) -> None:
    """One panel."""
    titles = {"title": panel.title, "xlabel": panel.x.title, "ylabel": panel.y.title}
    axes.set(**{name: "\n".join(fold(title, 64)) for name, title in titles.items()})
    match panel.kind:
        case "lines":
            _lines(axes, cast("tuple[Line, ...]", panel.marks), colours)
            axes.grid(True)
            _scale(axes, "y", panel.y)
        case "intervals":
            _intervals(axes, cast("tuple[Mark, ...]", panel.marks), panel.x)
        case "bars":
            _bars(axes, cast("tuple[Mark, ...]", panel.marks), panel.x, colours)
        case "heat":
            _heat(axes, cast("tuple[Row, ...]", panel.marks), panel.x, panel.colours)
    if panel.kind != "heat":
        _scale(axes, "x", panel.x)


def _scale(axes: Axes, which: str, axis: Axis) -> None:
    """Ticks, limits and the rule of an axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    ticks = axes.xaxis if which == "x" else axes.yaxis
    if axis.scale in ("log", "log2"):
        axes.set(**{f"{which}scale": "log"})
        low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
        decades = math.log10((axis.high or high) / (axis.low or low))
        # of a short axis 1, 2, 5 would leave one or two ticks
        subs = (1,) if decades > 3 else (1, 2, 5) if decades > 1 else (1, 1.5, 2, 3, 4, 5, 6, 8)
        ticks.set_major_locator(LogLocator(2) if axis.scale == "log2" else LogLocator(subs=subs))
        ticks.set_minor_locator(NullLocator())
    else:
        whole = axis.unit == "whole"
        ticks.set_major_locator(
            MaxNLocator(7 if whole else 6, steps=[1, 2, 5, 10] if whole else [1, 2, 2.5, 5, 10], integer=whole)
        )
    if axis.rule is not None:
        draw = axes.axvline if which == "x" else axes.axhline
        draw(axis.rule, color=LIGHT["c0"], linewidth=1, linestyle=(0, (4, 3)), zorder=1.5)
    if axis.low is not None or axis.high is not None:
        axes.set(**{f"{which}lim": (axis.low, axis.high)})
    labels = [UNITS[axis.unit](value) for value in ticks.get_majorticklocs()]
    # rounded counts of models that differ by little would all read 420k
    write = whole_number if axis.unit == "count" and len({*labels}) < len(labels) else UNITS[axis.unit]
    ticks.set_major_formatter(FuncFormatter(lambda value, _: write(value)))


def _lines(axes: Axes, lines: Sequence[Line], colours: dict[str, int]) -> None:
    for line in lines:
        number = colours.get(line.label, line.colour or 0)
        group = f"series-{list(colours).index(line.label)}" if line.label else None
        style: dict[str, Any] = {"color": LIGHT[f"c{number}"], "gid": group}
        if line.low:
            axes.fill_between(line.x, line.low, line.high, alpha=0.15, linewidth=0, **style)
        if line.dashed or not number:
            style["linestyle"] = "--"
        if len(line.x) <= MANY:
            style |= {"marker": MARKERS[number], "markersize": 3.2}
        axes.plot(line.x, [math.nan if y is None else y for y in line.y], linewidth=1.6, **style)


def _name_rows(axes: Axes, labels: Sequence[str], margin: float) -> None:
    """Names of rows from top to bottom, long ones folded as in a table."""
    axes.set_yticks(range(len(labels)), ["\n".join(fold(label, NAME)) for label in labels], color=LIGHT["ink"])
    axes.set_ylim(len(labels) - 1 + margin, -margin)
    axes.spines["left"].set_visible(False)


def _intervals(axes: Axes, marks: Sequence[Mark], axis: Axis) -> None:
    labels = _labels(marks)
    for mark in marks:
        if mark.value is None:
            continue
        place, colour = labels.index(mark.label), LIGHT[mark.tone or "c0"]
        if mark.low is not None and mark.high is not None:
            axes.plot([mark.low, mark.high], [place, place], color=colour, linewidth=2, solid_capstyle="butt")
        face = LIGHT["paper"] if mark.hollow else colour
        axes.plot([mark.value], [place], "o", color=colour, markerfacecolor=face, markersize=6, zorder=3)
        _annotate(axes, mark.value, (mark.value, place), (0, 5), ha="center", unit=axis.unit)
    axes.grid(True, axis="x")
    axes.margins(x=0.1)
    _name_rows(axes, labels, 0.75)


def _bars(axes: Axes, marks: Sequence[Mark], axis: Axis, colours: dict[str, int]) -> None:
    labels, groups = _labels(marks), list(dict.fromkeys(mark.group for mark in marks))
    high = 0.76 / len(groups)
    for mark in marks:
        if mark.value is None:
            continue
        place = labels.index(mark.label) + (groups.index(mark.group) - (len(groups) - 1) / 2) * high
        gid = f"series-{list(colours).index(mark.group)}" if mark.group else None
        axes.barh(place, mark.value, high * 0.92, color=LIGHT[f"c{colours.get(mark.group, 1)}"], linewidth=0, gid=gid)
        ends, right = [mark.value], mark.value >= 0
        if mark.low is not None and mark.high is not None:
            axes.plot([mark.low, mark.high], [place, place], color=LIGHT["ink"], linewidth=1, gid=gid)
            ends += [mark.low, mark.high]
        end, shift, side = (max(ends), 4, "left") if right else (min(ends), -4, "right")
        _annotate(axes, mark.value, (end, place), (shift, 0), ha=side, va="center", unit=axis.unit, gid=gid)
    axes.grid(True, axis="x")
    axes.margins(x=0.14)
    _name_rows(axes, labels, 0.6)


def _annotate(
    axes: Axes, value: float, at: tuple[float, float], by: tuple[float, float], *, unit: str, **to: Any
) -> None:
    """A number beside its mark."""
    axes.annotate(UNITS[unit](value), at, by, textcoords="offset points", fontsize=7.5, **to)


def _heat(axes: Axes, rows: Sequence[Row], x: Axis, scale: Axis) -> None:
    """Cells in one hue over the paper, negative ones in another: the more, the less paper is seen."""
    from matplotlib.patches import Rectangle

    known = [value for row in rows for value in row.values if value is not None]
    most = scale.high or max(map(abs, known), default=0.0) or 1.0
    low = -most if min(known, default=0.0) < 0 else 0.0

    def cell(on: Axes, value: float, left: float, bottom: float, height: float = 1.0) -> None:
        alpha = 0.04 + 0.96 * min(abs(value) / most, 1.0) ** (0.5 if scale.scale == "root" else 1.0)
        colour = LIGHT["cold" if value < 0 else "heat"]
        on.add_patch(Rectangle((left, bottom), 1, height, color=colour, alpha=alpha, linewidth=0))

    for place, row in enumerate(rows):
        for column, value in enumerate(row.values):
            if value is not None:
                cell(axes, value, column - 0.5, place - 0.5)
    wide = max((len(row.values) for row in rows), default=1)
    names = ["\n".join(fold(name, NAME)) for name in x.names or map(str, range(wide))]
    upright, every = max(map(len, names)) * wide <= 60, -(-wide // 30)
    axes.set_xticks(range(0, wide, every), names[::every], rotation=0 if upright else 90)
    axes.set_xlim(-0.5, wide - 0.5)
    _name_rows(axes, [row.label for row in rows], 0.5)
    # beside the cells, a strip that says which colour is which number
    strip, steps = axes.inset_axes((1.03, 0, 0.03, 1)), 24
    for step in range(steps):
        height = (most - low) / steps
        cell(strip, low + (step + 0.5) * height, 0, low + step * height, height)
    ends = (low, (low + most) / 2, most)
    strip.set(xlim=(0, 1), ylim=(low, most), xticks=(), ylabel=scale.title)
    strip.yaxis.tick_right()
    strip.yaxis.set_label_position("right")
    strip.set_yticks(ends, [UNITS[scale.unit](value) for value in ends])
    for spine in (*axes.spines.values(), *strip.spines.values()):
        spine.set_visible(False)
