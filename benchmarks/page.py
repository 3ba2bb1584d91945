"""The figures of docs/results/performance.md: what stands between its two marks is written from a stored run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.tables import Table, from_json
from benchmarks.targets import reasons, verdicts

BEGIN, END = "<!-- figures: written by python -m benchmarks --write-docs -->", "<!-- end of figures -->"


def figures(document: Mapping[str, Any]) -> str:
    """The targets and all tables, in Markdown."""
    tables = from_json(document)
    lines = [f"Measured with `{document['command']}` on {document['machine']}.", "", "## Targets", ""]
    lines += verdicts(tables)
    if missed := reasons(tables):
        lines += ["", "Why targets are missed, where a profile tells:", "", *missed]
    for table in tables.values():
        lines += ["", *section(table)]
    return "\n".join(lines)


def section(table: Table) -> list[str]:
    """One table under its title."""
    return [f"## {table.title}", "", table.note, "", *table.lines()]


def write(path: Path, document: Mapping[str, Any]) -> Path:
    """Replace what stands between the marks of `path`."""
    return replace_between(path, BEGIN, END, figures(document))


def replace_between(path: Path, begin: str, end: str, text: str) -> Path:
    """Put `text` between two marks of a page."""
    from twoaxis.base.files import write_text

    page = path.read_text()
    if begin not in page or end not in page:
        raise ValueError(f"{path} lacks the marks {begin!r} and {end!r} that say where the figures go")
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    write_text(path, f"{before}{begin}\n\n{text}\n\n{end}{after}")
    return path
