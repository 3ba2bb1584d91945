"""A document as one page of HTML that needs nothing else: style, script and drawings stand inside it.

Every text of a document is escaped by the template. The content security policy allows the page's own script, by its
digest, and nothing from anywhere. Without scripts, words, tables and charts are all there; the script adds sorting,
selectors, switches for lines, the cells of grids and the choice of light or dark.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from twoaxis.show.charts import PALETTE, Chart, Grid, Line, legend
from twoaxis.show.document import Document, Heading, address, slug, spans

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup


def render(document: Document, *, whole: bool = True) -> str:
    """The page, or an element of it for a notebook, without scripts."""
    from markupsafe import Markup

    blocks, used, note = [], set[str](), ""
    for block in document.blocks:
        made: dict[str, Any] = {"kind": type(block).__name__.lower(), "block": block}
        if isinstance(block, Heading):
            made["anchor"] = anchor = _unused(slug(block.text), used)
            used.add(anchor)
        if isinstance(block, Grid) and not whole:
            block = block.chart()  # cells need the script
            made |= {"kind": "chart", "block": block}
        if isinstance(block, Chart):
            drawings, missing = _draw(block)
            if missing and note:
                continue  # said once
            note = note or missing
            lines = [mark for panel in block.panels for mark in panel.marks if isinstance(mark, Line)]
            dashed = {line.label for line in lines if line.dashed}
            series = [(label, colour, label in dashed) for label, colour in legend(block).items()]
            made |= {"panels": drawings, "missing": missing, "series": series}
        blocks.append(made)
    script = _part("page.js")
    digest = base64.b64encode(hashlib.sha256(f"\n{script}".encode()).digest()).decode()
    colours = " ".join(f"--{name}: light-dark({light}, {dark});" for name, (light, dark) in PALETTE.items())
    style = _part("page.css").replace("/* colours */", colours)
    parts = {"style": Markup(style), "script": Markup(script), "digest": digest, "whole": whole}
    return _template().render(document=document, blocks=blocks, **parts)


def _draw(chart: Chart) -> tuple[list[tuple[Any, Markup]], str]:
    """The panels with their drawings, or why there are none."""
    from markupsafe import Markup

    from twoaxis.show import figures

    try:
        return list(zip(chart.panels, map(Markup, figures.panel_svgs(chart)), strict=True)), ""
    except figures.NoFiguresError as error:
        return [], str(error)


def _unused(name: str, used: set[str]) -> str:
    """A name that no other element of the page has."""
    number, made = 1, name or "part"
    while made in used:
        number += 1
        made = f"{name}-{number}"
    return made


def _words(text: str) -> Markup:
    """Words with bold and code as elements, everything else escaped."""
    from markupsafe import Markup

    forms = {"": "{}", "bold": "<strong>{}</strong>", "code": "<code>{}</code>"}
    return Markup("").join(Markup(forms[style]).format(piece) for piece, style in spans(text))


def _breaks(text: str) -> Markup:
    """A name that may be broken after : and ,."""
    from markupsafe import Markup, escape

    return Markup(str(escape(text)).replace(":", ":<wbr>").replace(",", ",<wbr>"))


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"words": _words, "breaks": _breaks, "slug": slug, "address": address}
    return environment.from_string(_part("page.html"))


def _part(name: str) -> str:
    return resources.files("twoaxis.show").joinpath("web", name).read_text(encoding="utf-8")
