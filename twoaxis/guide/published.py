"""Published figures beside ours, each with the reason where they differ.

Counts must agree; where they do not, the papers count something else, and the reason says what. Speeds were
measured on other hardware with other kernels: ours are estimates, and a published one should lie near or between them.
The figures stand in evidence.json; here is what each of their metrics is of the costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from twoaxis.base.registry import did_you_mean
from twoaxis.costs.costs import Costs, cost
from twoaxis.costs.memory import SIZES
from twoaxis.guide.evidence import Evidence, Figure, read_evidence
from twoaxis.model.config import ModelConfig
from twoaxis.model.deployment import Deployment
from twoaxis.show.document import Document, Items, Prose, Showable, table
from twoaxis.show.numbers import si

SAME = "equal"


class Metric(NamedTuple):
    """What a figure is of the costs of its method."""

    ours: Callable[[Costs], float | tuple[float, float]]  # the number, or a lower and an upper one
    text: Callable[[float], str]  # how one is written


def _vectors(costs: Costs) -> int:
    """Bytes of one vector of the stream."""
    return SIZES[costs.deployment.dtype] * costs.shape.hidden_size


def _moved(costs: Costs) -> float:
    """Vectors per token and sub-layer in fused kernels; the first site and the read-out are left out."""
    sites = costs.prefilled.sites[1:-1]
    return sum(site.fused for site in sites) / len(sites) / _vectors(costs)


METRICS: dict[str, Metric] = {
    "parameters": Metric(lambda c: c.parameters.stream, "{:,.0f}".format),
    "parameters per site": Metric(lambda c: c.parameters.stream / len(c.prefilled.sites[1:]), "{:,.0f}".format),
    "parameters to 12 L D²": Metric(
        lambda c: c.parameters.stream / (12 * c.shape.num_hidden_layers * c.shape.hidden_size**2), "{:.2%}".format
    ),
    "operations added": Metric(lambda c: c.forward.stream / (c.forward.total - c.forward.stream), "{:+.3%}".format),
    "operations to the blocks'": Metric(
        lambda c: c.forward.stream / (c.forward.projections + c.forward.scores + c.forward.mlp), "{:.2%}".format
    ),
    "vectors moved": Metric(_moved, "{:.3g}".format),
    "vectors sent whole": Metric(lambda c: c.pipeline.whole / _vectors(c), "{:.0f}".format),
    "vectors sent cached": Metric(lambda c: c.pipeline.cached / _vectors(c), "{:.0f}".format),
    "state of a prefill": Metric(lambda c: c.live.prefill, si),
    "activations added": Metric(lambda c: c.activations / c.plain.activations - 1, "{:+.1%}".format),
    "training speed": Metric(lambda c: (1 / c.train.eager, 1 / c.train.fused), "{:.3f}".format),
    "training time added": Metric(lambda c: c.train.fused - 1, "{:+.1%}".format),
    "inference speed": Metric(lambda c: (1 / c.prefill.eager, 1 / c.prefill.fused), "{:.3f}".format),
}
"""Every metric of a figure."""


class Row(NamedTuple):
    """A published figure and ours, in words."""

    source: str  # the paper and the place in it
    what: str  # is counted or measured
    published: str  # as they give it
    ours: str  # as counted here
    why: str  # they differ, or that they do not


@dataclass(frozen=True)
class Published(Showable):
    """Every figure of the evidence beside ours."""

    figures: tuple[Row, ...]

    @staticmethod
    def of(evidence: Evidence | None = None) -> Published:
        """Those of a file of evidence; None is the one that comes along."""
        return Published(tuple(map(compare, (evidence or read_evidence()).figures)))

    def document(self) -> Document:
        """Figures that are equal as a table, by source; each of the others with the reason."""
        same = [row for row in self.figures if row.why == SAME]
        sections = {i: row.source for i, row in enumerate(same) if i == 0 or row.source != same[i - 1].source}
        equal = table(("figure", "published and ours"), [(row.what, row.ours) for row in same], sections=sections)
        other = (
            f"{row.source}, **{row.what}**: published {row.published}, ours {row.ours}; {row.why}."
            for row in self.figures
            if row.why != SAME
        )
        return Document("", (Prose("Equal:"), equal, Prose("Different:"), Items(tuple(other))))

    def to_dict(self) -> Any:
        """A list of rows."""
        return [row._asdict() for row in self.figures]


def compare(figure: Figure) -> Row:
    """A figure and ours."""
    if figure.metric not in METRICS:
        hint = did_you_mean(figure.metric, METRICS)
        raise ValueError(f"{figure.source}: unknown metric {figure.metric!r}{hint}; there are {', '.join(METRICS)}")
    metric = METRICS[figure.metric]
    shape = figure.shape if isinstance(figure.shape, str) else ModelConfig.from_dict(figure.shape)
    found = metric.ours(cost(shape, figure.method, Deployment.from_dict(figure.deployment)))
    theirs = (figure.value,) if figure.upper is None else (figure.value, figure.upper)
    ours = found if isinstance(found, tuple) else (found,)
    published, counted = (" to ".join(map(metric.text, numbers)) for numbers in (theirs, ours))
    return Row(figure.source, figure.what, published, counted, figure.why)
