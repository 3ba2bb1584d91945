"""The figure of a probe: gains with their intervals against parameters, and what each group of sites is good for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twoaxis.comparison.plots import BASELINE, COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from twoaxis.comparison.probe_report import Row, Summary


def draw(summary: Summary) -> Figure:
    """Both panels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = [row for row in summary.rows if row.gain.mean is not None]
    _draw_gains(left, rows)
    _draw_sites(right, rows, summary.plan["groups"])
    for panel in (left, right):
        panel.axhline(0, color=BASELINE, linewidth=1, linestyle="--")
        panel.grid(True, axis="y", alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    seeds = len(summary.plan["seeds"])
    figure.suptitle(f"frozen {summary.plan['source']['name'].rpartition('/')[2]}, {seeds} data seeds")
    return figure


def _colour(rows: list[Row], row: Row) -> str:
    return BASELINE if row.rung.control else COLOURS[rows.index(row) % len(COLOURS)]


def _draw_gains(panel: Axes, rows: list[Row]) -> None:
    from matplotlib.ticker import FuncFormatter

    from twoaxis.comparison.tables import count

    for row in rows:
        gain, shade = row.gain, _colour(rows, row)
        place, mean = row.costs["parameters"], gain.mean or 0.0
        if gain.low is not None and gain.high is not None:
            panel.plot([place, place], [gain.low, gain.high], color=shade, linewidth=2, solid_capstyle="butt")
        solid: Any = shade if gain.verdict != "not resolved" else "white"
        panel.plot([place], [mean], "s" if row.rung.control else "o", color=shade, markerfacecolor=solid)
        top = (place, mean if gain.high is None else gain.high)
        slanted: dict[str, Any] = {
            "rotation": 60,
            "rotation_mode": "anchor",
        }  # rungs often have about as many parameters
        panel.annotate(row.rung.name, top, (2, 7), textcoords="offset points", fontsize=9, color=shade, **slanted)
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count(value)))
    panel.margins(x=0.15, y=0.15)
    panel.set_xlabel("parameters that learn")
    panel.set_ylabel("gain over the frozen source (nats per token)")
    panel.set_title("95% intervals for all rungs at once; filled: resolved", fontsize=10)


def _draw_sites(panel: Axes, rows: list[Row], groups: list[str]) -> None:
    rows = [row for row in rows if any(sites.rise is not None for sites in row.sites.values())]
    wide = 0.8 / max(1, len(groups))
    for number, group in enumerate(groups):
        places, heights, errors = [], [], []
        for place, row in enumerate(rows):
            rise = row.sites[group].rise
            if rise is not None:
                mean, low, high = rise
                places.append(place + (number - (len(groups) - 1) / 2) * wide)
                heights.append(mean)
                errors.append(0.0 if low is None or high is None else (high - low) / 2)
        panel.bar(places, heights, wide, yerr=errors, label=group, color=COLOURS[number], error_kw={"linewidth": 1})
    panel.set_xticks(range(len(rows)), [row.rung.name for row in rows], rotation=30, ha="right")
    panel.set_ylabel("rise of the loss (nats per token)")
    panel.set_title("with the sites of a third of the blocks switched off, 95% intervals", fontsize=10)
    if rows:
        panel.legend(frameon=False)
