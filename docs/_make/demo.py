"""The figure beside the README's table of the demo: its differences and intervals, drawn from the table itself."""

from __future__ import annotations

import re
from pathlib import Path

from twoaxis.comparison.charts import tone
from twoaxis.show import figures as drawing
from twoaxis.show.charts import Axis, Chart, Mark, Panel

README = Path(__file__).parents[2] / "README.md"
ROW = re.compile(r"^(\S.*?) +\d+ +[\d.]+ +([-+][\d.]+) +([-+][\d.]+) to ([-+][\d.]+) +(\S.*)$", re.MULTILINE)
"""A line of the table: contender, seeds, loss, difference, interval, verdict."""


def figures(readme: str) -> dict[str, str]:
    """The figure as SVG, by file name."""
    marks = []
    for label, *numbers, verdict in ROW.findall(readme):
        value, low, high = map(float, numbers)
        marks.append(Mark(label, value, low, high, tone(verdict)))
    panel = Panel("intervals", "", Axis("nats per byte", "difference", rule=0.0), Axis(), tuple(marks))
    title = "Held-out loss minus the plain residual's, 95% intervals"
    return {"demo.svg": drawing.svg(Chart("demo", title, ((panel,),)))}
