"""An inspection as a document: what was run, numbers per site under a choice of token, and drawings along depth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from twoaxis.base.registry import spell
from twoaxis.inspection.inspection import Inspection
from twoaxis.show.charts import Axis, Cells, Chart, Grid, Line, Panel
from twoaxis.show.document import WIDE, Block, Column, Document, Heading, Prose, slug, table
from twoaxis.show.numbers import digits, percent

TOP = 3
"""Sources named per site."""
ALONG = {"norm": "read", "increment": "increment", "cosine": "cosine", "effective": "effective sources"}
"""What every site has, and the name of its column."""
WORDS = (
    "A site is where a sub-layer reads the residual stream and adds to it, by its block and its kind; out is what the "
    "head reads. Read is the length of the residual way a site reads, increment that of what its sub-layer gives, "
    "cosine that of the angle between the two. Effective sources are those a read is spread over: the exponential of "
    "the entropy of its weights' sizes."
)
SOURCES = (
    "The weight that each source has in what a site reads. Sources are the embedding and what sub-layers, blocks or "
    "runs of them have given, or parallel streams."
)

Site = dict[str, Any]


def make_document(found: Inspection) -> Document:
    """The document; of several models the drawings are shared, and tables follow one another."""
    names = _called(found.models)
    blocks: list[Block] = [Prose(f"The prompt: `{_visible(found.prompt)}`")]
    alone = len(names) == 1
    for name, model in zip(names, found.models, strict=True):
        blocks.append(Prose(("" if alone else f"**{name}**: ") + _summary(name, model)))
    blocks.append(_depth(names, found.models))
    same = all(model["tokens"] == found.models[0]["tokens"] for model in found.models)
    for number, (name, model) in enumerate(zip(names, found.models, strict=True), 1):
        blocks += [] if alone else [Heading(name)]
        blocks += _model(model, "" if alone else f"{number}-", "token" if same else f"token of {name}")
    return Document(" and ".join(names), tuple(blocks))


def _called(models: Sequence[dict[str, Any]]) -> list[str]:
    """By their names; folders beside one another by their methods, where these differ, since paths are long."""
    names = [model["model"] or "model" for model in models]
    methods = [_method(model) for model in models]
    if len({*methods}) == len(models) > 1 and all(Path(name).name != name for name in names):
        return methods
    return names if len({*names}) == len(names) else [f"{name} ({number})" for number, name in enumerate(names, 1)]


def _method(model: dict[str, Any]) -> str:
    mixer = f" + {spell(model['mixer'], model['mixer_options'])}" if model["mixer"] else ""
    return spell(model["stream"], model["stream_options"]) + mixer


def _visible(text: str, most: int = 400) -> str:
    shown = text if len(text) <= most else f"{text[:most]}..."
    return shown.replace("`", "'").replace("\n", "\u21b5")


def _summary(name: str, model: dict[str, Any]) -> str:
    """One sentence on what was run: the method, or where it lies if it is called by the method."""
    method = _method(model)
    parts = [(f"`{model['model']}`" if name == method else method) + (" behind blend gates" if model["blend"] else "")]
    parts.append(f"{model['blocks']} blocks of width {model['width']}")
    parts.append(f"{model['parameters']:,} parameters, {model['stream_parameters']:,} of them the stream's")
    parts.append(f"a prompt of {len(model['tokens']):,} tokens")
    return "; ".join(parts) + "."


def _model(model: dict[str, Any], prefix: str, token: str) -> Iterator[Block]:
    sites, columns = model["sites"], model["columns"]
    tokens = [model["tokens"][place] for place in model["shown"]]
    named = [f"{place} {_visible(t['text']) or t['id']}" for place, t in zip(model["shown"], tokens, strict=True)]
    choices = {token: (f"mean over {len(model['tokens']):,}", *named)}
    scalars = _names(sites, 0)
    heads = {key: head for key, head in ALONG.items() if any(site[key] for site in sites)}
    rows = []
    for site in sites:
        series = [site[key] for key in heads] + [_quantity(site, name) for name in scalars]
        rows.append(Cells(site["label"], [[_at(one, t) for one in series] for t in range(len(tokens) + 1)]))
    words = " ".join([WORDS, *_meanings(sites, scalars)])
    yield Grid(f"{prefix}sites", "Sites", (*heads.values(), *scalars), tuple(rows), choices, "column", "site", words)
    weighted = [site for site in sites if site["weights"]]
    if weighted:
        ways = max(len(site["weights"]["mean"]) for site in weighted)
        picks = choices | ({"way": ("mean", *map(str, range(ways)))} if ways > 1 else {})
        rows = [Cells(s["label"], _ways(s["weights"], ways > 1), tuple(s["sources"])) for s in weighted]
        title = "What each site read from which source"
        yield Grid(f"{prefix}sources", title, tuple(columns), tuple(rows), picks, corner="site", note=SOURCES)
        if len(columns) > WIDE:  # a terminal has no map of so many
            most = [(site["label"], _top(site, columns)) for site in weighted]
            yield Heading("Most read sources", 3)
            yield table(("site", Column("sources and weights", number=False)), most)
    for name in dict.fromkeys(q["name"] for site in sites for q in site["quantities"] if "regimes" in q):
        having = [(site["label"], q["regimes"]) for site in sites if (q := _quantity(site, name))]
        yield Heading(f"Regimes of the {name}, share of tokens", 3)
        ranges = [f"{regime['name']} {regime['range']}" for regime in having[0][1]]
        yield table(("site", *ranges), [(label, *(percent(r["share"]) for r in all_)) for label, all_ in having])
    for name in _names(sites, 1) + _names(sites, 2):
        having = [(s["label"], q) for s in sites if (q := _quantity(s, name))]
        yield _entries(name, having, prefix, choices, " ".join(_meanings(sites, [name])))


def _meanings(sites: list[Site], names: list[str]) -> list[str]:
    """A sentence for each quantity that says what it means; parts of one quantity have one."""
    told = {q["name"]: q["meaning"] for site in sites for q in site["quantities"] if q["meaning"]}
    named = {name.partition(", ")[0]: told[name] for name in names if name in told}
    return [f"{_title(name)}: {meaning}." for name, meaning in named.items()]


def _entries(
    name: str, having: list[tuple[str, dict[str, Any]]], prefix: str, choices: dict[str, Any], note: str
) -> Grid:
    """A vector or matrix per site; a matrix with too many entries for columns is chosen by its first axis."""
    axes = having[0][1]["axes"]
    sizes = [_shape(q["mean"]) for _, q in having]
    wide = max(size[-1] for size in sizes)
    first = max(size[0] for size in sizes)
    flat = len(axes) == 2 and first * wide <= WIDE
    picks = dict(choices)
    if len(axes) == 2 and not flat:
        picks[axes[0]] = ("mean", *map(str, range(first)))
    names = [f"{i},{j}" for i in range(first) for j in range(wide)] if flat else [str(j) for j in range(wide)]
    rows = []
    for (label, q), (*_, width) in zip(having, sizes, strict=True):
        levels = [q["mean"], *(q["tokens"] or [])]
        if flat:
            values = [[entry for row in value for entry in row] for value in levels]
            places = [i * wide + j for i in range(len(levels[0])) for j in range(width)]
        else:
            values = levels if len(axes) == 1 else [[_mean(value), *value] for value in levels]
            places = list(range(width))
        rows.append(Cells(label, values, tuple(places)))
    title = f"{_title(name)} by {' and '.join(axes)}"
    return Grid(prefix + slug(name), title, tuple(names), tuple(rows), picks, corner="site", note=note)


def _depth(names: list[str], models: tuple[dict[str, Any], ...]) -> Chart:
    """Every number that a site has one of, along depth, as the mean over the tokens.

    Lines of one model have different colours; of several models each has a colour, and the second part of a quantity is
    dashed.
    """
    panels: dict[str, list[Line]] = {}
    for number, (name, model) in enumerate(zip(names, models, strict=True), 1):
        drawn: set[str] = set()
        for key in [*ALONG, *_names(model["sites"], 0)]:
            points = [(s["index"], one["mean"]) for s in model["sites"] if (one := s.get(key) or _quantity(s, key))]
            if points:
                quantity, _, part = ("length", "", ALONG[key]) if key in ("norm", "increment") else key.partition(", ")
                label = ", ".join(word for word in (name if len(names) > 1 else "", part) if word)
                x, y = zip(*points, strict=True)
                colour = number if len(names) > 1 else None if label else 1
                dashed = len(names) > 1 and quantity in drawn
                panels.setdefault(ALONG.get(quantity, quantity), []).append(
                    Line(label, x, y, colour=colour, dashed=dashed)
                )
                drawn.add(quantity)
    made = [
        Panel("lines", _title(title), Axis("site", "whole"), Axis(scale=_scale(lines)), tuple(lines))
        for title, lines in panels.items()
    ]
    return Chart("depth", "Along depth, mean over tokens", tuple((panel,) for panel in made))


def _title(name: str) -> str:
    return name[:1].upper() + name[1:]


def _scale(lines: list[Line]) -> Any:
    known = [y for line in lines for y in line.y if y is not None]
    return "log" if known and min(known) > 0 and max(known) / min(known) > 40 else "linear"


def _names(sites: list[Site], axes: int) -> list[str]:
    """Names of the quantities with so many axes, in the order they appear."""
    return list(dict.fromkeys(q["name"] for site in sites for q in site["quantities"] if len(q["axes"]) == axes))


def _quantity(site: Site, name: str) -> dict[str, Any] | None:
    return next((q for q in site["quantities"] if q["name"] == name), None)


def _at(series: dict[str, Any] | None, choice: int) -> float | None:
    """The mean, or the number of a token."""
    if series is None:
        return None
    return series["mean"] if choice == 0 or series["tokens"] is None else series["tokens"][choice - 1]


def _ways(series: dict[str, Any], several: bool) -> list[Any]:
    """Weights by token and way, the mean over the ways first; by token alone where no site has several."""
    levels = [series["mean"], *series["tokens"]]
    if not several:
        return [ways[0] for ways in levels]
    return [[_mean(ways), *ways] if len(ways) > 1 else ways for ways in levels]


def _mean(rows: list[list[float | None]]) -> list[float | None]:
    """The mean of rows, column by column; what is no number in one of them is none in the mean."""
    columns = zip(*rows, strict=True)
    return [None if None in column else sum(filter(None, column)) / len(rows) for column in columns]


def _top(site: Site, columns: list[str]) -> str:
    """The sources with the largest weights, as the mean over the ways."""
    mean = _mean(site["weights"]["mean"])
    ranked = sorted(range(len(mean)), key=lambda s: -abs(mean[s] or 0.0))[:TOP]
    return ", ".join(f"{columns[site['sources'][s]]} {digits(mean[s])}" for s in ranked)


def _shape(value: list[Any]) -> tuple[int, ...]:
    return (len(value), len(value[0])) if isinstance(value[0], list) else (len(value),)
