"""The inspection in the terminal: tables of numbers per site, as a document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from twoaxis.show.document import Block, Column, Document, Heading, Prose, Table, table
from twoaxis.show.numbers import digits

TOP = 3
"""Sources named per site."""
WIDE = 16
"""Entries of a probe that fit into a row."""


def tables(document: dict[str, Any]) -> Document:
    """What `inspect_prompt` measured, in tables."""
    sites = document["sites"]
    found: list[Block] = [Prose(summary(document))]
    found += [Heading("Sites, mean over tokens"), _sites(document), Prose(_words(document))]
    found += _regimes(sites)
    for name, rows in _entries(sites).items():
        found += [Heading(capital(name)), *_probe_table(rows)]
    return Document(document["model"] or "model", tuple(found))


def summary(document: dict[str, Any]) -> str:
    """One sentence on what was run."""
    parts = [
        spelling(document["stream"], document["stream_options"]) + (" behind blend gates" if document["blend"] else "")
    ]
    if document["mixer"]:
        parts.append(f"mixer {spelling(document['mixer'], document['mixer_options'])}")
    parts.append(f"{document['blocks']} blocks of width {document['width']}")
    parts.append(f"{document['parameters']:,} parameters, {document['stream_parameters']:,} of them the stream's")
    parts.append(f"a prompt of {len(document['tokens']):,} tokens")
    return "; ".join(parts) + "."


def spelling(name: str, options: dict[str, Any]) -> str:
    """`name:option=value,...`, the spelling of the command line."""
    return name + (":" + ",".join(f"{k}={v}" for k, v in options.items()) if options else "")


def capital(text: str) -> str:
    """With a capital first letter."""
    return text[:1].upper() + text[1:]


def scalar_names(sites: list[dict[str, Any]]) -> list[str]:
    """Names of the probes that are one number per token, in the order they appear."""
    return list(dict.fromkeys(p["name"] for site in sites for p in site["probes"] if not p["axes"]))


def probe_of(site: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The stream's probe of that name at a site."""
    return next((p for p in site["probes"] if p["name"] == name), None)


def _words(document: dict[str, Any]) -> str:
    words = (
        "Read is the length of the residual way a site reads, increment that of what its sub-layer gives, cosine that "
        "of the angle between the two."
    )
    if document["columns"]:
        words += (
            " Effective is the number of sources a read is spread over: the exponential of the entropy of its weights' "
            "sizes."
        )
    return words


def _sites(document: dict[str, Any]) -> Table:
    sites, columns = document["sites"], document["columns"]
    names = scalar_names(sites)
    weighted = bool(columns)
    headers = ["site", "read", "increment", "cosine", *names]
    heads = [*headers, "effective", Column("most read sources", number=False)] if weighted else headers
    rows = []
    for site in sites:
        row = [site["label"], *(digits(_mean(site[key])) for key in ("norm", "increment", "cosine"))]
        row += [digits(_mean(probe_of(site, name))) for name in names]
        if weighted:
            row += [digits(_mean(site["effective"])), _top(site, columns)]
        rows.append(tuple(row))
    return table(heads, rows)


def _mean(series: dict[str, Any] | None) -> float | None:
    return None if series is None else series["mean"]


def _top(site: dict[str, Any], columns: list[str]) -> str:
    """The sources with the largest weights, as the mean over the ways."""
    if site["weights"] is None:
        return "-"
    mean = column_means(site["weights"]["mean"])
    ranked = sorted(range(len(mean)), key=lambda s: -abs(mean[s] or 0.0))[:TOP]
    return ", ".join(f"{columns[site['sources'][s]]} {digits(mean[s])}" for s in ranked)


def _regimes(sites: list[dict[str, Any]]) -> Iterator[Block]:
    names = dict.fromkeys(p["name"] for site in sites for p in site["probes"] if "regimes" in p)
    for name in names:
        found = [(site["label"], probe["regimes"]) for site in sites if (probe := probe_of(site, name)) is not None]
        headers = ("site", *(f"{r['name']} {r['range']}" for r in found[0][1]))
        rows = tuple((label, *(f"{r['share']:.1%}" for r in regimes)) for label, regimes in found)
        yield Heading(f"Regimes of the {name}, share of tokens")
        yield table(headers, rows)


def _entries(sites: list[dict[str, Any]]) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Probes that are vectors and matrices, the mixers' too: for each name, the sites that have it."""
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for site in sites:
        named = [(p["name"], p) for p in site["probes"]]
        named += [(f"{inner['name']}: {p['name']}", p) for inner in site["inner"] for p in inner["probes"]]
        for name, probe in named:
            if len(probe["axes"]) in (1, 2):
                found.setdefault(name, []).append((site["label"], probe))
    return found


def _probe_table(rows: list[tuple[str, dict[str, Any]]]) -> Iterator[Block]:
    """One row per site, one column per entry; a matrix that is too wide is averaged over its first axis."""
    axes = rows[0][1]["axes"]
    entries = [_flat(probe["mean"], len(axes)) for _, probe in rows]
    averaged = len(axes) == 2 and max(map(len, entries)) > WIDE
    if averaged:
        entries = [dict(enumerate(column_means(probe["mean"]))) for _, probe in rows]
    headers = list(dict.fromkeys(key for row in entries for key in row))[:WIDE]
    yield Prose(f"Mean over every {axes[0]}, by {axes[1]}." if averaged else f"By {' and '.join(axes)}.")
    cells = [
        (label, *(digits(row.get(key), 3) for key in headers)) for (label, _), row in zip(rows, entries, strict=True)
    ]
    yield table(("site", *map(str, headers)), cells)
    if (more := max(map(len, entries)) - WIDE) > 0:
        yield Prose(f"{more} more are in the files that --out writes.")


def _flat(value: list[Any], axes: int) -> dict[Any, float | None]:
    """The entries of a vector or matrix by their numbers: 0, 1, ... or `0,0`, `0,1`, ..."""
    if axes == 1:
        return dict(enumerate(value))
    return {f"{i},{j}": entry for i, row in enumerate(value) for j, entry in enumerate(row)}


def column_means(rows: list[list[float | None]]) -> list[float | None]:
    """The mean of rows, column by column; what is no number in one of them is none in the mean."""
    return [None if None in column else sum(column) / len(rows) for column in zip(*rows, strict=True)]  # type: ignore[arg-type]
