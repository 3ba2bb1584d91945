"""The inspection as figures for papers and slides: PNG and SVG through matplotlib.

sources     the heat map of sites and sources
depth       lengths, cosine, effective sources and every scalar probe along depth
window      what mixers see at which distance
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twoaxis.inspection.tables import capital, probe_of, scalar_names, spelling

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")


def figures(document: dict[str, Any]) -> dict[str, Figure]:
    """The figures of a document from `inspect_prompt`, by name; those it has numbers for."""
    made = {"sources": _sources(document), "depth": _depth(document), "window": _window(document)}
    found = {name: figure for name, figure in made.items() if figure is not None}
    for figure in found.values():
        # lay out once, not again for every format: with many labels it takes longer than drawing
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
    return found


def _title(document: dict[str, Any]) -> str:
    method = spelling(document["stream"], document["stream_options"])
    title = f"{document['model']}: {method}" if document["model"] else method
    return title.replace("$", r"\$")  # a dollar begins a formula


def _sources(document: dict[str, Any]) -> Figure | None:
    import numpy as np
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import FuncNorm
    from matplotlib.figure import Figure

    rows, columns = [site for site in document["sites"] if site["weights"]], document["columns"]
    if not rows:
        return None
    values = np.full((len(rows), len(columns)), np.nan)
    for r, site in enumerate(rows):
        values[r, site["sources"]] = np.mean(np.array(site["weights"]["mean"], dtype=float), axis=0)
    size = (2.2 + 0.17 * max(len(columns), 12), 1.9 + 0.17 * max(len(rows), 10))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    signed = bool((values < 0).any())
    most = (float(np.nanmax(np.abs(values))) if np.isfinite(values).any() else 0.0) or 1.0
    # colours follow a root, as on the page: a read spread over sixty sources is seen beside one that is not
    norm = FuncNorm((_root, _square), vmin=-most if signed else 0.0, vmax=most)
    scale = ScalarMappable(norm, "RdBu" if signed else "Blues")
    # as colours, so that the norm is computed once per entry and not once per pixel
    axes.imshow(scale.to_rgba(np.ma.masked_invalid(values)), aspect="auto", interpolation="nearest")
    axes.set_xticks(range(len(columns)), columns, rotation=90, fontsize=7)
    axes.set_yticks(range(len(rows)), [site["label"] for site in rows], fontsize=7)
    axes.set_xlabel("source")
    axes.set_ylabel("site")
    axes.set_title(f"{_title(document)}\nwhat each site reads from which source, mean over tokens", fontsize=9)
    figure.colorbar(scale, ax=axes, label="weight", fraction=0.04)
    return figure


def _root(value: Any) -> Any:
    return abs(value) ** 0.5 * ((value > 0) * 1.0 - (value < 0) * 1.0)


def _square(value: Any) -> Any:
    return abs(value) * value


def _depth(document: dict[str, Any]) -> Figure:
    from matplotlib.figure import Figure

    sites = document["sites"]
    panels: dict[str, list[tuple[str, list[tuple[int, float]]]]] = {
        "length": [("read", _line(sites, "norm")), ("increment", _line(sites, "increment"))],
        "cosine of read and increment": [("", _line(sites, "cosine"))],
        "effective sources": [("", _line(sites, "effective"))],
    }
    for name in scalar_names(sites):
        quantity, _, part = name.partition(", ")
        found = [(s["index"], p["mean"]) for s in sites if (p := probe_of(s, name)) and p["mean"] is not None]
        panels.setdefault(quantity, []).append((part, found))
    panels = {name: lines for name, lines in panels.items() if any(points for _, points in lines)}
    figure = Figure(figsize=(max(6.0, 1.5 + 0.14 * len(sites)), 0.5 + 1.9 * len(panels)), layout="constrained")
    drawn = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, lines) in zip(drawn, panels.items(), strict=True):
        for part, points in lines:
            axes.plot([i for i, _ in points], [v for _, v in points], marker=".", linewidth=1.2, label=part or None)
        low = min((v for _, points in lines for _, v in points), default=0.0)
        high = max((v for _, points in lines for _, v in points), default=0.0)
        if name != "effective sources" and low > 0 and high / low > 40:
            axes.set_yscale("log")
        if any(part for part, _ in lines):
            axes.legend(fontsize=7, frameon=False)
        axes.set_title(capital(name), fontsize=9, loc="left")
        axes.grid(alpha=0.25)
        axes.tick_params(labelsize=7)
    firsts = [site for i, site in enumerate(sites) if i == 0 or sites[i - 1]["block"] != site["block"]]
    every = -(-len(firsts) // 30)
    ticks = [site for site in firsts if site["kind"] == "out" or site["block"] % every == 0]
    names = ["out" if site["kind"] == "out" else str(site["block"]) for site in ticks]
    drawn[-1].set_xticks([site["index"] for site in ticks], names)
    drawn[-1].set_xlabel("block")
    figure.suptitle(f"{_title(document)}, mean over tokens", fontsize=9)
    return figure


def _line(sites: list[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    return [(s["index"], s[key]["mean"]) for s in sites if s[key] is not None and s[key]["mean"] is not None]


def _window(document: dict[str, Any]) -> Figure | None:
    import numpy as np
    from matplotlib.figure import Figure

    found: dict[str, list[tuple[str, Any]]] = {}
    for site in document["sites"]:
        for inner in site["inner"]:
            for probe in inner["probes"]:
                if probe["axes"][-1:] == ["distance"]:
                    value = np.array(probe["mean"], dtype=float)
                    row = value if value.ndim == 1 else value.mean(0)
                    found.setdefault(f"{inner['name']}: {probe['name']}", []).append((site["label"], row))
    if not found:
        return None
    heights = [0.9 + 0.17 * max(len(rows), 6) for rows in found.values()]
    figure = Figure(figsize=(6.4, sum(heights) + 0.4), layout="constrained")
    drawn = figure.subplots(len(found), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, rows) in zip(drawn, found.items(), strict=True):
        values = np.full((len(rows), max(len(row) for _, row in rows)), np.nan)
        for number, (_, row) in enumerate(rows):
            values[number, : len(row)] = row
        image = axes.imshow(values, aspect="auto", cmap="Blues", vmin=0.0)
        axes.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=7)
        axes.tick_params(axis="x", labelsize=7)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_title(f"{name} by distance", fontsize=9, loc="left")
        figure.colorbar(image, ax=axes, fraction=0.04)
    drawn[-1].set_xlabel("distance in tokens")
    figure.suptitle(f"{_title(document)}, mean over tokens", fontsize=9)
    return figure
