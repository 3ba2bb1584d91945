"""Markdown in which every sign of somebody's text means itself."""

from __future__ import annotations

import pytest

from tests.show.samples import everything
from twoaxis.show import markdown
from twoaxis.show.document import Cell, Code, Column, Document, Facts, Heading, Items, Prose, slug, spans, table


def render(*blocks: object) -> str:
    return markdown.render(Document("", tuple(blocks)))  # type: ignore[arg-type]


def test_every_block() -> None:
    rows = [("a", "1"), (Cell("b"), Cell("2", 2, "better"))]
    made = table(("name", "n"), rows, notes=("a note",), sections={1: "second"})
    blocks = (Heading("Part", 3), Prose("**Bold** and `a*b`."), Items(("one", "two")), Code("x = y"))
    assert markdown.render(Document("Title", (*blocks, Facts((("data", "stdlib"),)), made))) == (
        "# Title\n\n### Part\n\n**Bold** and `a*b`.\n\n- one\n- two\n\n```text\nx = y\n```\n\n- **data**: stdlib\n\n"
        "| name | n |\n| --- | ---: |\n| a | 1 |\n| **second** |  |\n| b | **2** |\n\na note\n"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("k*p < 1 `a*b <c>`", "k\\*p \\< 1 `a*b <c>`"),
        ("2**3 and 4**5", "2\\*\\*3 and 4\\*\\*5"),
        ("snake_case, H_{n+1} and _x_", "snake_case, H_{n+1} and \\_x_"),
        ("[text](javascript:x)", "[text]\\(javascript:x)"),
        ("<script>", "\\<script>"),
        ("# no heading", "\\# no heading"),
        ("- no item", "\\- no item"),
        ("1. no list", "\\1. no list"),
        ("**<b>**", "**\\<b>**"),
    ],
)
def test_prose_is_escaped(text: str, expected: str) -> None:
    assert render(Prose(text)) == f"{expected}\n"


def test_cells_are_escaped() -> None:
    heads = ("a", Column("b", number=False), Column("c", code=True), Column("d", link=True, number=False))
    shown = render(table(heads, [("x", "k*p | <0.01% `a*b`", "'u' | None", "Some Name"), ("y", "two\nlines", "", "z")]))
    assert shown.splitlines()[2] == "| x | k\\*p \\| \\<0.01% `a*b` | `'u' \\| None` | [Some Name](#some-name) |"
    assert shown.splitlines()[3] == "| y | two lines |  | [z](#z) |"
    sizes = {line.replace("\\|", "").count("|") for line in shown.splitlines() if line}
    assert sizes == {5}


def test_charts_are_links_where_they_are_files() -> None:
    assert "![" not in markdown.render(everything())
    shown = markdown.render(everything(), figures="report-")
    assert "![Difference to standard, 95% intervals](report-forest.svg)" in shown
    assert "Mean over seeds; the band is one deviation." in shown


def test_spans_slugs_and_fences() -> None:
    parts = [("a ", ""), ("b c", "bold"), (" ", ""), ("d**e", "code"), ("f", "")]
    assert [tuple(span) for span in spans("a **b c** `d**e`f")] == parts
    assert slug("What it costs: x_y (2)") == "what-it-costs-x_y-2"
    assert render(Code("```\nx\n```")) == "````text\n```\nx\n```\n````\n"
