"""A document with every kind of block, and with somebody's markup in every place that holds text."""

from __future__ import annotations

import math
from typing import Any

from twoaxis.show import document
from twoaxis.show.charts import Axis, Cells, Chart, Grid, Line, Mark, Panel, Row
from twoaxis.show.document import Cell, Column, Document, Heading, Items, Prose, Showable, Table, table

CONTENDERS = (
    "standard",
    "denseformer",
    "attention_residuals:block_size=4,evaluation=two_phase",
    "deep_delta:value_channels=4,expand=conv",
    "short_swa:window=16",
)


def curves(seeds: int = 3) -> Chart:
    steps = [2**n * 1000.0 for n in range(4, 12)]
    made: dict[str, list[Line]] = {"loss": [], "difference": []}
    for number, label in enumerate(CONTENDERS):
        base = [2.1 + 3.5 * (x / 1000) ** -0.35 for x in steps]
        loss = [y - 0.012 * number * math.log(x / 4000) / math.log(512) for x, y in zip(steps, base, strict=True)]
        for kind, heights in (("loss", loss), ("difference", [a - b for a, b in zip(loss, base, strict=True)])):
            if kind == "difference" and not number:
                continue
            wide = [0.004 * seeds * (1 + 1 / n) for n in range(1, 9)]
            band = [tuple(y + sign * w for y, w in zip(heights, wide, strict=True)) for sign in (-1, 1)]
            colour = None if number else 0
            made[kind].append(Line(label, tuple(steps), tuple(heights), band[0], band[1], colour))
    axes = {"tokens": Axis("training tokens", "count", "log"), "time": Axis("training time", "seconds", "log")}
    y = {"loss": Axis("held-out loss (nats per token)"), "difference": Axis("loss minus standard's", rule=0.0)}
    rows = []
    for kind, lines in made.items():
        row = []
        for name, axis in axes.items():
            moved = lines if name == "tokens" else [m._replace(x=tuple(x / 4100 for x in m.x)) for m in lines]
            row.append(
                Panel("lines", f"{kind} against {name}", axis, y[kind], tuple(moved), choice={"show": kind, "x": name})
            )
        rows.append(tuple(row))
    return Chart("curves", "Held-out loss on text, nano", tuple(rows), "Mean over seeds; the band is one deviation.")


def intervals() -> Chart:
    values = ((-0.021, 0.004, "better"), (-0.006, 0.011, ""), (0.013, 0.005, "worse"), (-0.017, 0.009, "better"))
    marks: list[Mark] = []
    for label, (value, half, tone) in zip(CONTENDERS[1:], values, strict=True):
        marks.append(Mark(label, value, value - half, value + half, tone, hollow=tone == ""))  # type: ignore[arg-type]
    panels = tuple(
        Panel("intervals", f"at equal {name}", Axis("", "difference", rule=0.0), Axis(), tuple(marks))
        for name in ("tokens", "FLOPs")
    )
    return Chart("forest", "Difference to standard, 95% intervals", (panels,))


def bars() -> Chart:
    marks = [
        Mark(label, size := 0.01 * (3 - place) * (number + 1), 0.8 * size, 1.2 * size, group=group)
        for number, group in enumerate(("first third", "middle third", "last third"))
        for place, label in enumerate(CONTENDERS[1:4])
    ]
    single = [Mark(label, 1e6 * 3**n) for n, label in enumerate(CONTENDERS)]
    left = Panel("bars", "rise of the loss", Axis("nats per token"), Axis(), tuple(marks))
    right = Panel("bars", "kept between tokens", Axis("bytes per sequence", "bytes"), Axis(), tuple(single))
    return Chart("bars", "What the sites are good for, and what is kept", ((left, right),))


def heat() -> Chart:
    rows = [
        Row(
            f"{site // 2} {'mlp' if site % 2 else 'attention'}",
            tuple(None if source > site else math.exp(-0.6 * (site - source)) for source in range(13)),
        )
        for site in range(12)
    ]
    signed = [Row(f"head {h}", tuple(math.sin(1.3 * h + 0.7 * d) / (1 + d / 4) for d in range(8))) for h in range(6)]
    sources = Axis("source", names=("embedding", *(f"output {n}" for n in range(12))))
    left = Panel("heat", "what each site reads", sources, Axis("site"), tuple(rows), Axis("weight", scale="root"))
    right = Panel("heat", "by distance", Axis("distance in tokens"), Axis(), tuple(signed), Axis("weight"))
    return Chart("heat", "Reads", ((left, right),))


def grids() -> tuple[Grid, Grid]:
    """A map too wide for numbers, and a table whose columns have scales of their own; both by token."""
    choices = {"token": ("mean over 2", "0 a", "1 b"), "way": ("mean", "0", "1")}
    rows = tuple(
        Cells(f"site {s}", [[[t + w + c / 20 for c in range(s)] for w in range(3)] for t in range(3)], tuple(range(s)))
        for s in (3, 20)
    )
    names = tuple(f"source {n}" for n in range(20))
    wide = Grid("reads", "What each site reads, by token", names, rows, choices, corner="site")
    narrow = (Cells("first", [[1.0, -100.0], [0.5, 3.0], [2.0, 7.0]]), Cells("second", [[0.25, None]]))
    gates = Grid(
        "gates", "Gates", ("gate", "length"), narrow, {"token": choices["token"]}, "column", "site", "As `read`."
    )
    return wide, gates


def result_table() -> Table:
    rows = []
    for number, label in enumerate(CONTENDERS):
        loss, more = 2.3061 - 0.01 * number, -0.01 * number
        tone: Any = ("", "better", "", "worse", "warn")[number]
        apart = (Cell(f"{more:+.4f}", more), Cell(f"{more - 0.0139:+.4f} to {more + 0.0161:+.4f}"))
        verdict = "baseline" if not number else "resolved, better" if tone == "better" else "not resolved"
        size = Cell(f"{100 + 7 * number}k", 1000.0 * (100 + 7 * number))
        apart = apart if number else (Cell("-"), Cell("-"))
        rows.append((Cell(label), Cell("3", 3), Cell(f"{loss:.4f}", loss), *apart, Cell(verdict, None, tone), size))
    heads = ("contender", "seeds", "loss", "difference", "95% interval", Column("verdict", number=False), "parameters")
    notes = ("Differences are paired by seed. `lr` was chosen on seeds of its own.",)
    return table(heads, rows, baseline=0, notes=notes)


def wide_table() -> Table:
    heads = ["method", *(f"measured number {n}" for n in range(1, 13)), Column("why they differ", number=False)]
    why = "ours counts a multiply-add as 2"
    rows = [
        (name.partition(":")[0], *(f"{1234.5 * (n + 1) * (r + 1):,.1f}" for n in range(12)), why)
        for r, name in enumerate(CONTENDERS)
    ]
    return table(heads, rows, sections={0: "depth axis", 4: "sequence axis"})


def everything() -> Document:
    summary = (
        "**Two contenders are resolved better** than `standard` at equal tokens, one is worse, and one is not "
        "resolved: its interval reaches over zero. Losses are in nats per token on held-out text, three seeds."
    )
    again = "Run `twoaxis report DIR` to write this again, and " + "more words " * 20
    command = "twoaxis compare --out runs/demo --stream denseformer --stream attention_residuals:block_size=4"
    weights = "sha256 " + "0123456789abcdef" * 4
    facts = (("data", "stdlib, 12.1 MB, `bpe:2048`"), ("hardware", "2 x CPU, 16 GB"), ("weights", weights))
    blocks = (
        *(Prose(summary), Heading("Result"), result_table(), curves(), intervals()),
        *(Heading("What the contenders cost"), wide_table(), bars()),
        *(Heading("What a site reads", 3), Prose("A weight is the mean over tokens."), heat(), *grids()),
        *(Heading("How it was made"), Items(("Every run had the same data in the same order.", again))),
        *(document.Code(f"{command}\n\n    x_{{l+1}} = x_l + f_l(x_l)"), document.Facts(facts)),
    )
    return Document("Comparison of five contenders", blocks)


class Sample(Showable):
    """A result."""

    def __init__(self, document: Document) -> None:
        self.made = document

    def document(self) -> Document:
        return self.made

    def to_dict(self) -> dict[str, Any]:
        return {"title": self.made.title}
