"""The figures and the tables of docs/explanation/two_axes.md, from the numbers of `two_axes`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from twoaxis.base.files import read_json
from twoaxis.show import figures as drawing
from twoaxis.show import markdown
from twoaxis.show.charts import Axis, Chart, Line, Panel
from twoaxis.show.document import Block, Column, Document, Items, Prose, Table, table
from twoaxis.show.numbers import si

DATA = Path(__file__).parents[1] / "results" / "figures" / "two_axes.json"
COLOURS = {
    "plain": 0,
    "sequence": 1,
    "depth": 2,
    "depth, all states": 5,
    "depth, all layers at once": 4,
    "attention residuals, full": 5,
    "attention residuals, window": 3,
    "attention residuals, blocks": 4,
}
LABELS = {"sequence": "sequence (short_swa)", "depth": "depth (depth_attention)", "plain": "plain residual"}
BOTH = "plain residual, and sequence (short_swa)"


def stored() -> dict[str, Any]:
    """The numbers as they were counted and measured last."""
    return read_json(DATA)


def text(part: str, document: dict[str, Any]) -> str:
    """One part of the page."""
    if part not in PARTS:
        raise ValueError(f"there are no numbers for {part!r}; there are numbers for {', '.join(PARTS)}")
    return markdown.render(Document("", tuple(PARTS[part](document))))


# The tables and sentences.


def _equal(d: dict[str, Any]) -> list[Block]:
    operator, models, shape = d["operator"], d["models"], d["shape"]
    side = operator["side"]
    ratio = models["depth"]["flops"] / models["sequence"]["flops"]
    rows = tuple(
        (name, f"{models[name]['parameters']:,}", f"{models[name]['flops']:,}") for name in ("sequence", "depth")
    )
    return [
        Prose(
            f"On a square of {side} tokens and {side} layers, {operator['heads']} heads of {operator['head_width']} "
            f"and a window of {operator['window']}, the operator runs {operator['sequence']:,} matrix-product "
            f"operations along the sequence and {operator['depth']:,} along depth, and its results on the transposed "
            f"tensor differ by {operator['depth, difference on the transposed tensor']:g}. In {shape['name']} "
            f"({shape['blocks']} blocks of width {shape['width']:,}, {shape['heads']} heads, window {d['window']}):"
        ),
        table(("axis", "parameters added", "operations added per token"), rows),
        Prose(
            f"The ratio is {ratio:.4f}; what is left is the mixer's own pre-norm and residual addition, and the first "
            f"{d['window'] - 1} layers, which have fewer states to read."
        ),
    ]


def _window(d: dict[str, Any]) -> list[Block]:
    headers = ("window", "moved, sequence", "moved, depth", "state, sequence", "state, depth", "ring, sequence")
    rows = tuple(
        (
            str(row["window"]),
            *(si(row[m]["moved"]) for m in ("sequence", "depth")),
            *(si(row[m]["live"]) for m in ("sequence", "depth")),
            si(row["sequence"]["kept"]),
        )
        for row in d["by_window"]
    )
    first, last = d["by_window"][0], d["by_window"][-1]
    return [
        table(map(Column, headers), rows),
        Prose(
            f"From a window of {first['window']} to one of {last['window']} the sequence read moves the same bytes, "
            f"and the depth read {last['depth']['moved'] / first['depth']['moved']:.0f} times as many: "
            f"{last['depth']['moved'] / last['sequence']['moved']:.1f} times the sequence read's at the end. The ring "
            f"of the depth read takes {si(last['depth']['kept'])} whatever the window."
        ),
    ]


def _reads(d: dict[str, Any]) -> list[Block]:
    measured = d["measured"]
    read = measured["read"]
    names = ("sequence", "depth", "depth, all layers at once")
    rows = tuple((str(row["window"]), *(f"{row[name]:,.0f} ns" for name in names)) for row in measured["reads"])
    last = measured["reads"][-1]
    return [
        table(map(Column, ("window", *names)), rows),
        Prose(
            f"Forward and backward per token and layer, {read['layers']} layers, {read['tokens']} tokens, "
            f"{read['heads']} heads of {read['head_width']}, float32; medians of {measured['rounds']} rounds. At a "
            f"window of {last['window']} reading layer by layer takes {last['depth'] / last['sequence']:.2f} times as "
            f"long as reading along the sequence, and {last['depth'] / last['depth, all layers at once']:.2f} times as "
            f"long as the same depth reads would take if all layers were known at once. {measured['hardware']}, seed "
            f"{measured['seed']}."
        ),
    ]


def _steps(d: dict[str, Any]) -> list[Block]:
    measured = d["measured"]
    model = measured["model"]
    rows = []
    for row in measured["steps"]:
        cells = (f"{row[m][what]:.2f}x" for what in ("time", "memory") for m in ("sequence", "depth"))
        rows.append((f"{row['grows']} {row['size']:,}", *cells))
    headers = ("decoder", "time, sequence", "time, depth", "activations, sequence", "activations, depth")
    return [
        table(headers, rows),
        Prose(
            f"Real training steps as ratios to the plain decoder, measured in turns: width {model['hidden_size']}, "
            f"{model['num_attention_heads']} heads; where they do not grow, {measured['steps'][0]['blocks']} blocks (8 "
            f"for the context), 256 tokens, window {d['window']}. {measured['hardware']}, seed {measured['seed']}."
        ),
    ]


def _chunks(d: dict[str, Any]) -> list[Block]:
    sizes = list(d["by_chunk"][0]["tiles"])
    headers = ("window", *(f"tiles of {c}" for c in sizes), *(f"logits per needed one, {c}" for c in sizes))
    rows = tuple(
        (
            str(row["window"]),
            *(str(row["tiles"][c]) for c in sizes),
            *(f"{row['waste'][c]:.2f}" for c in sizes),
        )
        for row in d["by_chunk"]
    )
    return [table(map(Column, headers), rows)]


def _depth(d: dict[str, Any]) -> list[Block]:
    names = [name for name in d["by_depth"][0] if name != "blocks"]
    rows = tuple((name, *(si(row[name]) for row in d["by_depth"])) for name in names)
    return [table(("read", *(f"{row['blocks']} blocks" for row in d["by_depth"])), rows)]


def _context(d: dict[str, Any]) -> list[Block]:
    names = ("sequence", "depth", "depth, all states")

    def of(*kept: str, within: str = "") -> Table:
        rows = ((row["context"], row[within] if within else row) for row in d["by_context"])
        cells = ((f"{context:,}", *(si(found[name]) for name in kept)) for context, found in rows)
        return table(map(Column, ("context", *kept)), cells)

    last = d["by_context"][-1]
    share = last["ring"] / last["keys and values"]
    return [
        Prose("Kept between tokens, with the ring of the sequence read; the depth read has none (0 B):"),
        of("keys and values", "ring"),
        Prose("State alive while a prompt is read at once:"),
        of(*names, within="prefill"),
        Prose(f"The same while it is read in chunks of {d['chunk']:,}:"),
        of(*names, within="chunked"),
        Prose(
            f"At {last['context']:,} tokens the sequence read's ring is {share:.2%} of the keys and values. The depth "
            f"read keeps nothing between tokens, but while a prompt of that length is read at once its states take "
            f"{si(last['prefill']['depth'])}, {last['prefill']['depth'] / last['prefill']['sequence']:.0f} times "
            f"the plain stream's."
        ),
    ]


def _stages(d: dict[str, Any]) -> list[Block]:
    names = [name for name in d["by_stages"][0] if name != "stages"]
    rows = tuple((name, *(si(row[name]["whole"]) for row in d["by_stages"])) for name in names)
    row = next(row for row in d["by_stages"] if row["stages"] == 8)
    cells = tuple(
        (
            name,
            si(row[name]["virtual"]),
            si(row[name]["cached"]),
            f"{row[name]['cached'] / row['plain']['cached']:.3g}x",
        )
        for name in names
    )
    return [
        table(("read", *(f"{row['stages']} stages" for row in d["by_stages"])), rows),
        Prose("Eight stages of two virtual ones each, forwarded whole and with what a stage already has left out:"),
        table(("read", "whole", "cached", "cached, to the plain residual"), cells),
    ]


def _pays(d: dict[str, Any]) -> list[Block]:
    found, last = d["published"], d["by_depth"][-1]
    gains = {name: row["baseline"] - row["value"] for name, row in found.items()}
    state = {name: last[f"attention residuals, {name}"] for name in ("full", "window", "blocks")}
    items = []
    for name, words in (
        ("full", "all outputs"),
        ("blocks", "sums of blocks"),
        ("window", "the embedding and 8 outputs"),
    ):
        items.append(
            f"**{words}**: loss {found[name]['baseline']} to {found[name]['value']}, {gains[name] / gains['full']:.0%} "
            f"of the full gain; at {last['blocks']} blocks {si(state[name])} of state per token, "
            f"{state[name] / last['plain']:.0f} times the plain residual's."
        )
    return [Items(tuple(items)), Prose(f"The losses are published ({found['full']['source']}, 436M parameters).")]


PARTS = {
    "equal": _equal,
    "window": _window,
    "chunks": _chunks,
    "reads": _reads,
    "steps": _steps,
    "depth": _depth,
    "context": _context,
    "stages": _stages,
    "pays": _pays,
}
"""What a page must have numbers for."""


# The figures.


def figures(document: dict[str, Any]) -> dict[str, str]:
    """The figures as SVG, by file name."""
    made = (_window_chart, _depth_chart, _context_chart, _stages_chart, _steps_chart)
    return {f"{chart.name}.svg": drawing.svg(chart) for chart in (make(document) for make in made)}


def _line(name: str, points: list[tuple[float, float]], label: str | None = None, dashed: bool = False) -> Line:
    x, y = zip(*points, strict=True)
    return Line(label or LABELS.get(name, name), x, y, colour=COLOURS.get(name), dashed=dashed)


def _panel(title: str, x: str, lines: list[Line], unit: str, scale: Literal["linear", "log"] = "linear") -> Panel:
    y = Axis("", unit, scale, low=None if scale == "log" else 0)
    return Panel("lines", title, Axis(x, "whole", "log2"), y, tuple(lines))


def _window_chart(d: dict[str, Any]) -> Chart:
    moved = [_line(m, [(row["window"], row[m]["moved"]) for row in d["by_window"]]) for m in ("sequence", "depth")]
    names = ("sequence", "depth", "depth, all layers at once")
    timed = [_line(m, [(row["window"], row[m]) for row in d["measured"]["reads"]]) for m in names]
    panels = (
        _panel("bytes a read must move, per token and block", "window", moved, "bytes"),
        _panel("measured: ns per token and layer", "window", timed, "whole"),
    )
    return Chart("two_axes_window", "Bytes and time of one read against the window", (panels,))


def _depth_chart(d: dict[str, Any]) -> Chart:
    names = ("plain", "depth", "attention residuals, full", "attention residuals, blocks")
    labels = {"plain": BOTH, "attention residuals, blocks": "attention residuals, eight blocks or a window of eight"}
    lines = [_line(n, [(row["blocks"], row[n]) for row in d["by_depth"]], labels.get(n)) for n in names]
    steps = [row for row in d["measured"]["steps"] if row["grows"] == "blocks"]
    memory = [_line(m, [(row["size"], row[m]["memory"]) for row in steps]) for m in ("sequence", "depth")]
    panels = (
        _panel("state alive per token", "blocks", lines, "bytes", "log"),
        _panel("measured: activations, ratio to plain", "blocks", memory, "times"),
    )
    return Chart("two_axes_depth", "State per token and measured activations against depth", (panels,))


def _context_chart(d: dict[str, Any]) -> Chart:
    rows = d["by_context"]
    kept = [
        _line("plain", [(r["context"], r["keys and values"]) for r in rows], "keys and values of the attention"),
        _line("sequence", [(r["context"], r["ring"]) for r in rows]),
    ]
    live = [_line(n, [(r["context"], r["prefill"][n]) for r in rows]) for n in ("sequence", "depth")]
    live += [
        _line(n, [(r["context"], r["chunked"][n]) for r in rows], f"{LABELS[n]}, in chunks", dashed=True)
        for n in ("sequence", "depth")
    ]
    panels = (
        _panel("kept between tokens (depth: nothing)", "context", kept, "bytes", "log"),
        _panel("state alive while a prompt is read", "context", live, "bytes", "log"),
    )
    return Chart("two_axes_context", "Caches and live state against the context", (panels,))


def _stages_chart(d: dict[str, Any]) -> Chart:
    names = ("plain", "depth", "attention residuals, full", "attention residuals, blocks")
    rows, labels = d["by_stages"], {"plain": BOTH}
    whole = [_line(n, [(r["stages"], r[n]["whole"]) for r in rows], labels.get(n)) for n in names]
    cut = [r for r in rows if "cached" in r["plain"]]
    virtual = [_line(n, [(r["stages"], r[n]["virtual"]) for r in cut], labels.get(n)) for n in names]
    virtual += [
        _line(n, [(r["stages"], r[n]["cached"]) for r in cut], f"{n}, cached", dashed=True)
        for n in ("attention residuals, full", "attention residuals, blocks")
    ]
    panels = (
        _panel("bytes per token over all boundaries", "pipeline stages", whole, "bytes", "log"),
        _panel("the same with two virtual stages each", "pipeline stages", virtual, "bytes", "log"),
    )
    return Chart("two_axes_stages", "Pipeline traffic against the number of stages", (panels,))


def _steps_chart(d: dict[str, Any]) -> Chart:
    panels = []
    for grows in ("window", "blocks", "context"):
        rows = [row for row in d["measured"]["steps"] if row["grows"] == grows]
        lines = [_line(m, [(row["size"], row[m]["time"]) for row in rows]) for m in ("sequence", "depth")]
        panels.append(_panel("training step, ratio to plain", grows, lines, "times"))
    return Chart("two_axes_steps", "Measured time of a training step", (tuple(panels),))
