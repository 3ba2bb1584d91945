"""The report as one page of HTML that needs nothing else: no network, no other file.

Tables sort by a click on a heading, curves show what is under the pointer and leave out contenders on demand; without
scripts the tables, the forest plots and the words are still there. All text of the user's is escaped.
"""

from __future__ import annotations

import html
import json
from typing import Any

from twoaxis.comparison.curves import Band, difference_band, loss_band
from twoaxis.comparison.page_parts import SCRIPT, STYLE
from twoaxis.comparison.plots import NAMES, colour
from twoaxis.comparison.summary import AXES, Summary, Table
from twoaxis.comparison.tables import Cell, Grid, grids, signed, tone
from twoaxis.comparison.words import closing, facts, headline


def render_page(summary: Summary) -> str:
    """The page."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(summary.name)}: comparison</title>",
        f"<style>{STYLE}</style></head><body><main>",
        f"<header><h1>Comparison {_text(summary.name)}</h1>",
        '<button class="plain" id="shade" type="button">dark / light</button></header>',
        f'<p class="soft">{_text(headline(summary))}</p>',
        '<div class="panel"><h3 style="margin-top:0">What this says</h3>',
        *(f"<p>{_text(paragraph)}</p>" for paragraph in closing(summary)),
        "</div>",
    ]
    for table in summary.tables:
        parts += _section(summary, table)
    parts += ["<h2>How it was made</h2>", '<div class="facts">']
    parts += [f"<p>{_text(name)}: <code>{_text(value)}</code></p>" for name, value in facts(summary)]
    parts += ["</div></main>", _data(summary), f"<script>{SCRIPT}</script>", "</body></html>"]
    return "\n".join(parts) + "\n"


def _section(summary: Summary, table: Table) -> list[str]:
    """A data set at a size."""
    first, *others = grids(summary, table)
    parts = [f"<h2>{_text(table.data)}, {_text(table.size)}</h2>", *_table(first, table)]
    if any(entry.curves for entry in table.entries):
        parts += _curves(summary, table)
    if table.contenders:
        parts += _forest(summary, table)
    for grid in others:
        parts += _table(grid, table)
    return parts


def _table(grid: Grid, table: Table) -> list[str]:
    """A sortable table."""
    base = table.entries.index(table.baseline) if len(grid.rows) == len(table.entries) else -1
    parts = [f"<h3>{_text(grid.title)}</h3>", '<div class="scroll"><table><thead><tr>']
    parts += [f'<th scope="col"><button type="button">{_text(head)}</button></th>' for head in grid.heads]
    parts.append("</tr></thead><tbody>")
    for place, row in enumerate(grid.rows):
        kind = ' class="base"' if place == base else ""
        name, *others = row
        first = _cell(name).replace(":", ":<wbr>").replace(",", ",<wbr>")  # where a long name may be broken
        parts.append(f"<tr{kind}>{first}" + "".join(_cell(cell) for cell in others) + "</tr>")
    parts.append("</tbody></table></div>")
    parts += [f'<p class="note">{_text(note)}</p>' for note in grid.notes]
    return parts


def _cell(cell: Cell) -> str:
    kind = f' class="{cell.tone}"' if cell.tone else ""
    order = "" if cell.order is None else repr(float(cell.order))
    return f'<td{kind} data-order="{order}">{_text(cell.text)}</td>'


def _curves(summary: Summary, table: Table) -> list[str]:
    """The frame the script draws curves into."""
    axes = "".join(
        f'<option value="{axis}"{" selected" if axis == summary.match else ""}>{NAMES[axis]}</option>' for axis in AXES
    )
    parts = [
        "<h3>Held-out loss</h3>",
        '<div class="panel curves"><div class="bar">',
        '<label>show <select name="kind"><option value="loss">loss</option>'
        f'<option value="difference">loss minus {_text(table.baseline.label)}\'s</option></select></label>',
        f'<label>against <select name="axis">{axes}</select></label></div>',
        '<div class="chart"><svg viewBox="0 0 1100 400" role="img" aria-label="held-out loss"></svg>',
        '<div class="tip"></div></div><div class="bar">',
    ]
    for entry in table.entries:
        shade = "var(--base)" if entry.baseline else colour(table, entry)
        parts.append(
            f'<label><input type="checkbox" checked><span class="swatch" style="background:{shade}"></span>'
            f"{_text(entry.label)}</label>"
        )
    parts.append('</div><p class="note">Mean over seeds; the band is one standard deviation. Time is tokens over the ')
    parts.append("throughput in the table.</p></div>")
    return parts


def _data(summary: Summary) -> str:
    """What the script draws; `<` is written so that no text can end the element."""
    document = []
    for table in summary.tables:
        if not any(entry.curves for entry in table.entries):
            continue
        document.append(
            [
                {
                    "label": entry.label,
                    "colour": colour(table, entry),
                    "baseline": entry.baseline,
                    "loss": {axis: _band(loss_band(entry, axis)) for axis in AXES},
                    "difference": {
                        axis: None if entry.baseline else _band(difference_band(entry, table.baseline, axis))
                        for axis in AXES
                    },
                }
                for entry in table.entries
            ]
        )
    text = json.dumps(document, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="curves">{text}</script>'


def _band(band: Band | None) -> dict[str, Any] | None:
    if band is None:
        return None
    return {name: [float(f"{value:.7g}") for value in values] for name, values in band._asdict().items()}


def _forest(summary: Summary, table: Table) -> list[str]:
    """Differences with their intervals at equal tokens, operations and time, as three panels of one drawing."""
    wide, left, top, step = 1100, 250, 34, 34
    panel, gap = 262, 24
    rows = table.contenders
    high = top + step * len(rows) + 30
    parts = [
        f"<h3>Difference to {_text(table.baseline.label)}, 95% intervals</h3>",
        '<div class="panel"><div class="scroll">',
        f'<svg viewBox="0 0 {wide} {high}" role="img" aria-label="differences with intervals">',
    ]
    for place, entry in enumerate(rows):
        label = entry.label if len(entry.label) <= 36 else entry.label[:35] + "…"
        height = top + step * (place + 0.5) + 4
        parts.append(f'<text class="name" x="{left - 12}" y="{height}" text-anchor="end">{_text(label)}</text>')
    for number, axis in enumerate(AXES):
        start = left + number * (panel + gap)
        matched = " (matched)" if axis == summary.match else ""
        name = NAMES[axis].removesuffix(" (s)").removeprefix("training ")
        parts.append(f'<text x="{start + panel / 2}" y="16" text-anchor="middle">at equal {name}{matched}</text>')
        parts += _forest_panel(table, axis, start, panel, top, step)
    parts.append("</svg></div>")
    if any(equal.indicative for entry in rows for equal in entry.equal.values()):
        parts.append('<p class="note">Open circles: a schedule had not ended; indicative only.</p>')
    parts.append("</div>")
    return parts


def _forest_panel(table: Table, axis: str, start: float, wide: float, top: float, step: float) -> list[str]:
    """One panel of the forest plot."""
    found = [(place, entry.equal[axis]) for place, entry in enumerate(table.contenders) if axis in entry.equal]
    found = [(place, equal) for place, equal in found if equal.difference.mean is not None]
    if not found:
        return []
    ends = [0.0]
    for _, equal in found:
        values = (equal.difference.low, equal.difference.mean, equal.difference.high)
        ends += [value for value in values if value is not None]
    room = 0.1 * (max(ends) - min(ends) or 1.0)
    low, high = min(ends) - room, max(ends) + room
    bottom = top + step * len(table.contenders)

    def x(value: float) -> float:
        return round(start + wide * (value - low) / (high - low), 2)

    parts = [f'<line class="grid" x1="{start}" x2="{start + wide}" y1="{bottom}" y2="{bottom}"/>']
    parts.append(f'<line class="zero" x1="{x(0)}" x2="{x(0)}" y1="{top}" y2="{bottom}"/>')
    for value, anchor in ((low + room, "start"), (high - room, "end")):
        if abs(x(value) - x(0)) > 40:
            parts.append(f'<text x="{x(value)}" y="{bottom + 18}" text-anchor="{anchor}">{signed(value)}</text>')
    parts.append(f'<text x="{x(0)}" y="{bottom + 18}" text-anchor="middle">0</text>')
    for place, equal in found:
        it = equal.difference
        height = top + step * (place + 0.5)
        kind = tone(it.verdict)
        if it.low is not None and it.high is not None:
            parts.append(f'<line class="ci {kind}" x1="{x(it.low)}" x2="{x(it.high)}" y1="{height}" y2="{height}"/>')
        empty = " open" if equal.indicative else ""
        said = f"{signed(it.mean)}, {it.verdict}"
        if it.low is not None:
            said += f", {signed(it.low)} to {signed(it.high)}"
        parts.append(
            f'<circle class="dot {kind}{empty}" cx="{x(it.mean or 0.0)}" cy="{height}" r="5">'
            f"<title>{_text(said)}</title></circle>"
        )
    return parts


def _text(text: str) -> str:
    return html.escape(text, quote=True)
