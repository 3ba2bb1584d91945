"""The figures and the tables of docs/two_axes.md, from the numbers of `two_axes`.

In the page every number stands between a pair of comments, and only what stands there is written:

    <!-- numbers: window -->
    ...
    <!-- end -->
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from twoaxis.guide.line_svg import Line, Panel, draw
from twoaxis.show import markdown
from twoaxis.show.document import Block, Column, Document, Items, Prose, table
from twoaxis.show.numbers import si

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
MARK = re.compile(r"(<!-- numbers: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def write_page(path: Path, document: dict[str, Any]) -> None:
    """Write the numbers of a page anew."""
    from twoaxis.base.files import write_text

    write_text(path, filled(path.read_text(encoding="utf-8"), document))


def filled(page: str, document: dict[str, Any]) -> str:
    """The page with all its numbers from `document`."""
    made = {name: markdown.render(Document("", tuple(make(document)))) for name, make in PARTS.items()}
    wanted = {match[1] for match in MARK.findall(page)}
    if wanted != set(made):
        raise ValueError(f"the page has numbers for {sorted(wanted)}, there are numbers for {sorted(made)}")
    return MARK.sub(lambda match: f"{match[1]}\n{made[match[2]]}\n{match[3]}", page)


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
    headers = (
        "window",
        "moved, sequence",
        "moved, depth",
        "state, sequence",
        "state, depth",
        "ring, sequence",
        "depth",
    )
    rows = tuple(
        (
            str(row["window"]),
            *(si(row[m]["moved"]) for m in ("sequence", "depth")),
            *(si(row[m]["live"]) for m in ("sequence", "depth")),
            *(si(row[m]["kept"]) for m in ("sequence", "depth")),
        )
        for row in d["by_window"]
    )
    first, last = d["by_window"][0], d["by_window"][-1]
    return [
        table(map(Column, headers), rows),
        Prose(
            f"From a window of {first['window']} to one of {last['window']} the sequence read moves the same bytes, "
            f"and the depth read {last['depth']['moved'] / first['depth']['moved']:.0f} times as many: "
            f"{last['depth']['moved'] / last['sequence']['moved']:.1f} times the sequence read's at the end."
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
            f"Real training steps as ratios to the plain decoder, measured in turns: width {model['width']}, "
            f"{model['heads']} heads; where they do not grow, {measured['steps'][0]['blocks']} blocks (8 for the "
            f"context), 256 tokens, window {d['window']}. {measured['hardware']}, seed {measured['seed']}."
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
    rows = tuple((str(row["blocks"]), *(si(row[name]) for name in names)) for row in d["by_depth"])
    return [table(map(Column, ("blocks", *names)), rows)]


def _context(d: dict[str, Any]) -> list[Block]:
    headers = ("context", "keys and values", "ring, sequence", "ring, depth", "prompt at once, sequence", "depth")
    headers = (*headers, "depth, all states", f"in chunks of {d['chunk']:,}, sequence", "depth", "depth, all states")
    names = ("sequence", "depth", "depth, all states")
    rows = tuple(
        (
            f"{row['context']:,}",
            si(row["keys and values"]),
            si(row["ring"]),
            "0 B",
            *(si(row["prefill"][name]) for name in names),
            *(si(row["chunked"][name]) for name in names),
        )
        for row in d["by_context"]
    )
    last = d["by_context"][-1]
    share = last["ring"] / last["keys and values"]
    return [
        table(map(Column, headers), rows),
        Prose(
            f"At {last['context']:,} tokens the sequence read's ring is {share:.2%} of the keys and values. The depth "
            f"read keeps nothing between tokens, but while a prompt of that length is read at once its states take "
            f"{si(last['prefill']['depth'])}, {last['prefill']['depth'] / last['prefill']['sequence']:.0f} times "
            f"the plain stream's."
        ),
    ]


def _stages(d: dict[str, Any]) -> list[Block]:
    names = [name for name in d["by_stages"][0] if name != "stages"]
    rows = tuple((str(row["stages"]), *(si(row[name]["naive"]) for name in names)) for row in d["by_stages"])
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
        table(map(Column, ("stages", *names)), rows),
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


def write_figures(folder: Path, document: dict[str, Any]) -> list[str]:
    """Draw everything; returns the names of the files."""
    from twoaxis.base.files import write_text

    made = figures(document)
    for name, text in made.items():
        write_text(folder / name, text)
    return list(made)


def figures(document: dict[str, Any]) -> dict[str, str]:
    """The figures as SVG, by file name."""
    return {
        "two_axes_window.svg": _window_figure(document),
        "two_axes_depth.svg": _depth_figure(document),
        "two_axes_context.svg": _context_figure(document),
        "two_axes_stages.svg": _stages_figure(document),
        "two_axes_steps.svg": _steps_figure(document),
    }


def _line(name: str, points: list[tuple[float, float]], label: str | None = None, dashed: bool = False) -> Line:
    return Line(label or LABELS.get(name, name), tuple(points), COLOURS[name], dashed)


def _bytes(size: float) -> str:
    return si(size).replace(".0 ", " ")


def _window_figure(d: dict[str, Any]) -> str:
    moved = [_line(m, [(row["window"], row[m]["moved"]) for row in d["by_window"]]) for m in ("sequence", "depth")]
    timed = [
        _line(m, [(row["window"], row[m]) for row in d["measured"]["reads"]])
        for m in ("sequence", "depth", "depth, all layers at once")
    ]
    panels = (
        Panel("bytes a read must move, per token and block", "window", tuple(moved), False, _bytes),
        Panel("measured: ns per token and layer", "window", tuple(timed), False, lambda y: f"{y:,.0f}"),
    )
    return draw(panels, "Bytes and time of one read against the window, along the sequence and along depth")


def _depth_figure(d: dict[str, Any]) -> str:
    names = ("plain", "depth", "attention residuals, full", "attention residuals, blocks")
    labels = {"plain": BOTH, "attention residuals, blocks": "attention residuals, eight blocks or a window of eight"}
    lines = [_line(n, [(row["blocks"], row[n]) for row in d["by_depth"]], labels.get(n)) for n in names]
    steps = [row for row in d["measured"]["steps"] if row["grows"] == "blocks"]
    memory = [_line(m, [(row["size"], row[m]["memory"]) for row in steps]) for m in ("sequence", "depth")]
    panels = (
        Panel("state alive per token", "blocks", tuple(lines), True, _bytes),
        Panel("measured: activations, ratio to plain", "blocks", tuple(memory), False, lambda y: f"{y:g}x"),
    )
    return draw(panels, "State per token and measured activations against depth")


def _context_figure(d: dict[str, Any]) -> str:
    rows = d["by_context"]
    kept = (
        Line("keys and values of the attention", tuple((r["context"], r["keys and values"]) for r in rows), 0),
        _line("sequence", [(r["context"], r["ring"]) for r in rows]),
    )
    live = [_line(n, [(r["context"], r["prefill"][n]) for r in rows]) for n in ("sequence", "depth")]
    live += [
        _line(n, [(r["context"], r["chunked"][n]) for r in rows], f"{LABELS[n]}, in chunks", dashed=True)
        for n in ("sequence", "depth")
    ]
    panels = (
        Panel("kept between tokens (depth: nothing)", "context", kept, True, _bytes),
        Panel("state alive while a prompt is read", "context", tuple(live), True, _bytes),
    )
    return draw(panels, "Caches and live state against the context")


def _stages_figure(d: dict[str, Any]) -> str:
    names = ("plain", "depth", "attention residuals, full", "attention residuals, blocks")
    labels = {"plain": BOTH}
    rows = d["by_stages"]
    whole = [_line(n, [(r["stages"], r[n]["naive"]) for r in rows], labels.get(n)) for n in names]
    cut = [r for r in rows if "cached" in r["plain"]]
    virtual = [_line(n, [(r["stages"], r[n]["virtual"]) for r in cut], labels.get(n)) for n in names]
    virtual += [
        _line(n, [(r["stages"], r[n]["cached"]) for r in cut], f"{n}, cached", dashed=True)
        for n in ("attention residuals, full", "attention residuals, blocks")
    ]
    panels = (
        Panel("bytes per token over all boundaries", "pipeline stages", tuple(whole), True, _bytes),
        Panel("the same with two virtual stages each", "pipeline stages", tuple(virtual), True, _bytes),
    )
    return draw(panels, "Pipeline traffic against the number of stages")


def _steps_figure(d: dict[str, Any]) -> str:
    panels = []
    for grows in ("window", "blocks", "context"):
        rows = [row for row in d["measured"]["steps"] if row["grows"] == grows]
        lines = tuple(_line(m, [(row["size"], row[m]["time"]) for row in rows]) for m in ("sequence", "depth"))
        panels.append(Panel("training step, ratio to plain", grows, lines, False, lambda y: f"{y:g}x"))
    return draw(panels, "Measured time of a training step against window, depth and context")
