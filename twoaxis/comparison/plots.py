"""The figures of a report: held-out curves and differences with their intervals, as PNG and SVG.

matplotlib comes with the extra `report` and is imported when a figure is drawn; no window system is needed.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from twoaxis.comparison.curves import difference_band, loss_band
from twoaxis.comparison.statistics import BETTER, WORSE
from twoaxis.comparison.summary import AXES, Entry, Summary, Table
from twoaxis.comparison.tables import count, signed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#7f7f00", "#7b4fa3", "#00a0a0")
"""Of contenders, in turn; told apart with colour blindness as far as ten can be."""
BASELINE = "#444444"
NAMES = {"tokens": "training tokens", "flops": "training FLOPs", "time": "training time (s)"}
TONES = {BETTER: "#00803f", WORSE: "#c0392b"}


def colour(table: Table, entry: Entry) -> str:
    """The colour of a contender in every figure of a table."""
    return BASELINE if entry.baseline else COLOURS[table.contenders.index(entry) % len(COLOURS)]


def draw_curves(summary: Summary, table: Table) -> Figure:
    """Loss, and loss minus the baseline's, against tokens, operations and time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7.4), layout="constrained")
    axes = figure.subplots(2, 3, sharex="col", sharey="row")
    for column, axis in enumerate(AXES):
        upper, lower = axes[0][column], axes[1][column]
        for entry in table.entries:
            _line(upper, loss_band(entry, axis), table, entry)
            if not entry.baseline:
                _line(lower, difference_band(entry, table.baseline, axis), table, entry)
        lower.axhline(0, color=BASELINE, linewidth=1, linestyle="--")
        matched = " (matched)" if axis == summary.match else ""
        upper.set_title(f"against {NAMES[axis]}{matched}", fontsize=10)
        lower.set_xlabel(NAMES[axis])
        for panel in (upper, lower):
            _decades(panel)
            panel.grid(True, which="major", alpha=0.25)
            panel.spines[["top", "right"]].set_visible(False)
    _frame(axes[0], table)
    axes[0][0].set_ylabel("held-out loss (nats per token)")
    axes[1][0].set_ylabel(f"loss minus {_short(table.baseline.label)}'s")
    handles, labels = axes[0][0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(labels)), frameon=False)
    counts = f"{len(summary.seeds)} seeds" if len(summary.seeds) > 1 else "one seed"
    figure.suptitle(f"{_short(table.data)}, {table.size}: mean and standard deviation over {counts}")
    return figure


def _line(panel: Axes, band: Any, table: Table, entry: Entry) -> None:
    """A mean with its band."""
    if band is None:
        return
    shade = colour(table, entry)
    label = _short(entry.label) + (f" ({len(entry.diverged)} diverged)" if entry.diverged else "")
    style, above = ("--", 3) if entry.baseline else ("-", 2)
    panel.plot(
        band.x, band.mean, style, color=shade, label=label, linewidth=1.6, marker="o", markersize=2.5, zorder=above
    )
    low = [mean - spread for mean, spread in zip(band.mean, band.spread, strict=True)]
    high = [mean + spread for mean, spread in zip(band.mean, band.spread, strict=True)]
    panel.fill_between(band.x, low, high, color=shade, alpha=0.15, linewidth=0)


def _decades(panel: Axes) -> None:
    """A logarithmic axis with ticks such as 500k, 1M, 2M."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    panel.set_xscale("log")
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count(value)))


def _frame(panels: Any, table: Table) -> None:
    """Leave out the first fifth of the runs, whose fall would flatten the rest."""
    for panel, axis in zip(panels, AXES, strict=True):
        bands = [band for entry in table.entries if (band := loss_band(entry, axis)) is not None]
        early = [len(band.x) // 5 for band in bands]
        if not bands:
            continue
        ends = min(min(band.mean) for band in bands)
        begin = max(band.mean[place] for band, place in zip(bands, early, strict=True))
        room = 0.06 * (begin - ends)
        if room > 0:
            panel.set_ylim(ends - room, begin + room)
        left = min(band.x[place] for band, place in zip(bands, early, strict=True))
        right = max(band.x[-1] for band in bands)
        if right > left:
            panel.set_xlim(left / 1.03, right * 1.03)


def draw_differences(summary: Summary, table: Table) -> Figure:
    """The difference of each contender to the baseline with its interval, at equal tokens, operations and time."""
    from matplotlib.figure import Figure

    rows = table.contenders
    figure = Figure(figsize=(13, 1.9 + 0.42 * max(1, len(rows))), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for panel, axis in zip(panels, AXES, strict=True):
        early = False
        for place, entry in enumerate(rows):
            equal = entry.equal.get(axis)
            if equal is None or equal.difference.mean is None:
                continue
            found = equal.difference
            early = early or equal.indicative
            shade = TONES.get(found.verdict, "#777777")
            if found.low is not None and found.high is not None:
                panel.plot([found.low, found.high], [place, place], color=shade, linewidth=2, solid_capstyle="butt")
            face = "white" if equal.indicative else shade
            panel.plot([found.mean], [place], "o", color=shade, markerfacecolor=face, markersize=6)
            text = signed(found.mean)
            panel.annotate(
                text, (found.mean or 0.0, place), (0, 6), textcoords="offset points", ha="center", fontsize=8
            )
        panel.axvline(0, color=BASELINE, linewidth=1, linestyle="--")
        matched = " (matched)" if axis == summary.match else ""
        panel.set_title(f"at equal {NAMES[axis].removesuffix(' (s)')}{matched}", fontsize=10)
        panel.set_xlabel("open: a schedule had not ended, indicative" if early else "")
        panel.grid(True, axis="x", alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(x=0.12)
    panels[0].set_yticks(range(len(rows)), [_short(entry.label) for entry in rows])
    panels[0].set_ylim(len(rows) - 0.4, -0.7)
    title = f"{_short(table.data)}, {table.size}: loss minus {_short(table.baseline.label)}'s, 95% intervals"
    figure.suptitle(title + (" (all contenders at once)" if len(rows) > 1 else ""))
    return figure


def render(figure: Figure, kind: str) -> bytes:
    """A figure as png or svg, the same bytes for the same numbers."""
    import matplotlib

    settings: Any = {"svg.hashsalt": "twoaxis", "svg.fonttype": "path", "text.parse_math": False}
    with matplotlib.rc_context(settings), io.BytesIO() as file:
        figure.savefig(file, format=kind, dpi=130, metadata={"Date": None} if kind == "svg" else {"Software": None})
        return file.getvalue()


def _short(text: str, most: int = 44) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
