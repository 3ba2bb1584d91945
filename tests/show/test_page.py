"""The page: everything escaped, nothing from anywhere, the same words as the other forms."""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
from html.parser import HTMLParser
from typing import Any

import pytest

from tests.show.samples import CONTENDERS, Sample, curves, everything
from twoaxis.show import markdown, page
from twoaxis.show.charts import Axis, Chart, Line, Mark, Panel, Row
from twoaxis.show.document import Cell, Code, Column, Document, Facts, Heading, Items, Prose, table


class Elements(HTMLParser):
    """Start tags with their attributes, and what they hold as text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_nothing_from_anywhere_and_only_its_own_script() -> None:
    text = page.render(everything())
    assert not re.search(r"https?:|//\w+\.\w|@import|url\((?!#)", text)
    found = Elements(text)
    policy: Any = next(a["content"] for tag, a in found.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    scripts = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "unsafe-inline" not in policy.split("script-src")[1]
    assert all(not name.startswith("on") for _, attributes in found.tags for name in attributes)
    ids = [a["id"] for _, a in found.tags if "id" in a]
    assert len(ids) == len({*ids})


def test_script_in_every_place_is_text() -> None:
    bad = "<script>alert('x')</script>\"'><img src=x onerror=alert(1)>"
    line, mark = Line(bad, (1.0, 2.0), (1.0, 2.0)), Mark(bad, 1.0, 0.5, 1.5, group=bad)
    axis = Axis(bad, names=(bad,))
    panels = (
        Panel("lines", bad, axis, axis, (line,), choice={bad: bad}),
        Panel("lines", bad, axis, axis, (line,), choice={bad: bad + "2"}),
        Panel("intervals", bad, axis, axis, (mark,)),
        Panel("bars", bad, axis, axis, (mark,)),
        Panel("heat", bad, axis, axis, (Row(bad, (1.0,)),), axis),
    )
    columns = (Column(bad), Column(bad, code=True), Column(bad, link=True), Column(bad))
    cells = (Cell(bad), Cell(bad), Cell(bad), Cell(bad, 1.0, "better"))
    made, chart = table(columns, [cells], notes=(bad,), sections={0: bad}), Chart("c", bad, (panels,), bad)
    blocks = (Heading(bad), Prose(bad + f"**{bad}** `{bad}`"), Items((bad,)), Code(bad), Facts(((bad, bad),)))
    document = Document(bad, (*blocks, made, chart))
    for text, scripts in ((page.render(document), 1), (page.render(document, whole=False), 0)):
        found = Elements(text)
        assert sum(tag == "script" for tag, _ in found.tags) == scripts
        assert not any(tag == "img" for tag, _ in found.tags)
        assert all(not name.startswith("on") for _, attributes in found.tags for name in attributes)
        assert "".join(found.words).count("alert('x')") >= 20


def test_words_tables_and_charts_are_there_without_scripts() -> None:
    text = page.render(everything()).split("<script>")[0]
    words = "".join(Elements(text).words)
    for label in CONTENDERS:
        assert label in words
    assert text.count("<svg") == sum(len(chart.panels) for chart in everything().blocks if isinstance(chart, Chart))
    assert " hidden>" in text  # the button that needs the script, and nothing else
    assert text.count(" hidden") == 1
    assert text.count("<tbody>") == 3  # a section is a body of its own, sorted by itself
    assert '<tr class="baseline"' in text
    assert 'data-value="2.3061"' in text
    assert ">attention_residuals:<wbr>block_size=4,<wbr>evaluation=two_phase<" in text


def test_headings_have_anchors_that_links_find() -> None:
    made = table((Column("a", number=False, link=True),), [("Some Name",), ("x",)])
    text = page.render(Document("T", (made, Heading("Some Name"), Heading("Some Name", 3), Heading("x"))))
    for place in ('href="#some-name"', 'h2 id="some-name"', 'h3 id="some-name-2"', 'href="#x"', 'h2 id="x"'):
        assert place in text


def test_a_notebook_gets_an_element_that_leaves_the_rest_alone() -> None:
    sample = Sample(Document("T", (Prose("word"), curves())))
    text = sample._repr_html_()
    assert repr(sample) == "<Sample: .show() prints it, .rows(), .frame() and .to_dict() have its values>"
    assert text.strip().startswith('<div class="twoaxis">')
    style = re.search(r"<style>(.*?)</style>", text, flags=re.DOTALL)
    outside = re.sub(r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}", "", style[1])
    assert outside.strip() == ".twoaxis"  # every rule stands inside one


def test_showing_needs_nothing_heavy_before_it_is_asked() -> None:
    script = (
        "import sys, time; began = time.perf_counter(); import twoaxis.show.document, twoaxis.show.terminal, "
        "twoaxis.show.markdown, twoaxis.show.figures, twoaxis.show.page, twoaxis.show.numbers; "
        "print(*(name for name in ('matplotlib', 'jinja2', 'rich', 'torch') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize(
    ("href", "link"),
    [
        ("../runs/a b/model", "../runs/a%20b/model"),
        ("javascript:alert(1)", "./javascript%3Aalert%281%29"),
        ("//elsewhere.org/x", ".///elsewhere.org/x"),
        ('../"><script>', "../%22%3E%3Cscript%3E"),
    ],
)
def test_links_of_cells_stay_relative(href: str, link: str) -> None:
    document = Document("", (table(["name", "loss"], [["a", Cell("4.1", 4.1, href=href)]]),))
    links = [attributes["href"] for tag, attributes in Elements(page.render(document)).tags if tag == "a"]
    assert links == [link]
    assert f"[4.1]({link})" in markdown.render(document)
