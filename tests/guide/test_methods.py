"""The map of methods: complete cards, exact numbers, and forms for a terminal, a pipe, a page and a program."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

import twoaxis
from docs._make.reference import MEANINGS, OVERVIEW
from tests.support.commands import run
from tests.support.measured import measured_once  # noqa: F401
from tests.support.processes import ROOT
from twoaxis.base.method import Card
from twoaxis.base.options import field_docs
from twoaxis.depth.counts import count
from twoaxis.depth.registry import METHODS, STREAMS, stream
from twoaxis.guide import map as methods_map
from twoaxis.guide import pages
from twoaxis.guide.evidence import read_evidence, sentences
from twoaxis.sequence.registry import MIXERS
from twoaxis.show import document, markdown, terminal

PAGE = ROOT / "docs" / "reference" / "methods.md"
SHAPE = methods_map.make_shape(blocks=3, width=64, heads=4, kv_heads=2, hidden=96)
AS_SHAPE = ("--blocks", "3", "--width", "64", "--heads", "4", "--kv-heads", "2", "--hidden", "96")
NAMES = [*STREAMS.names(), *MIXERS.names()]


@pytest.mark.parametrize("name", NAMES)
def test_a_method_says_everything_about_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Card, docstring with equation and drawing, options with docstrings, records; and its page shows them."""
    row = methods_map.entry(name, SHAPE)
    card = row.card
    for field in dataclasses.fields(Card):
        value = getattr(card, field.name)
        assert not isinstance(value, str) or (value and value.strip() == value), f"{row.name}: {field.name}"
    must = ("title", "purpose", "source", "value", "normaliser", "adaptivity", "window", "injection", "paper")
    assert [name for name in must if getattr(card, name) == "-"] == []
    assert card.axis == ("depth" if row.axis == "stream" else "sequence")
    assert 2015 <= card.year <= 2030
    said = pages.notes(row.method)
    drawn = "\n".join(block.text for block in said.body if isinstance(block, document.Code))
    assert said.summary.endswith(".")
    assert "=" in drawn
    assert "─" in drawn
    options = pages.options(row.method.Config)
    defaults = {f.name: f.default for f in dataclasses.fields(row.method.Config)}  # type: ignore[arg-type]
    assert {o.name: o.default for o in options} == {name: repr(value) for name, value in defaults.items()}
    assert [o.name for o in options if not o.meaning or "typing" in o.type] == []
    result = pages.MethodPage(row)
    result.show()
    shown = capsys.readouterr().out
    joined = " ".join(shown.replace("`", "").split())
    published = sentences(read_evidence().of(row.name))
    assert published
    for part in (card.paper, card.purpose, *published, *row.default.dead):
        assert " ".join(part.replace("`", "").split()) in joined
    assert all(line.strip() in shown for line in drawn.splitlines())
    assert [m["name"] for m in result.to_dict()["methods"]] == [row.name]


def test_every_column_is_in_exactly_one_group() -> None:
    columns = methods_map.COLUMNS
    assert sorted(columns) == sorted(MEANINGS) == sorted(methods_map.entry("standard", SHAPE).row())
    assert not {*methods_map.GROUPS} & {*columns}  # a word of --columns means one thing
    assert all(set(keys) <= set(methods_map.GROUPS[name]) for name, keys in methods_map.SHORT.items())
    assert all(meaning.endswith(".") for meaning in MEANINGS.values())
    choose = methods_map.choose
    assert [keys for _, keys in choose(["year,window", "year"])] == [("year", "window")]
    assert [keys for _, keys in choose(["cost", "year"])] == [("year",), methods_map.GROUPS["cost"]]
    assert [keys for _, keys in choose(["all"])] == list(methods_map.GROUPS.values())


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_what_a_method_adds_to_the_decoder(name: str) -> None:
    found = methods_map.entry(name, SHAPE).default
    axis = "stream" if name in STREAMS.names() else "mixer"
    plain, made = twoaxis.Decoder(SHAPE), twoaxis.Decoder(dataclasses.replace(SHAPE, **{axis: name}))
    added = [sum(p.numel() for p in model.parameters()) for model in (plain, made)]
    assert found.parameters == added[1] - added[0]
    # what decoding keeps beyond the attention's own keys and values, after more tokens than any window has
    tokens = torch.zeros(1, 40, dtype=torch.long)
    with torch.no_grad():
        held = [model.step(tokens, model.start())[1].nbytes() // 4 for model in (plain, made)]
    assert found.kept == held[1] - held[0]
    assert found.live == count(made.stream).live
    if axis == "stream":
        assert (found.neutral, found.dead) == (made.stream.neutral, made.stream.dead())
    matrices = sum(p.numel() for key, p in plain.layers.named_parameters() if "norm." not in key)
    assert methods_map.block_parameters(SHAPE) == matrices


def test_a_shape_that_does_not_suit_a_method_is_reported() -> None:
    shape = methods_map.make_shape(blocks=2, width=30)
    found = methods_map.entry("depth_attention", shape)
    assert "heads (4) must divide the width (30)" in found.default.problem
    shown = terminal.render(pages.MethodMap(shape, ("cost",)).document(), 120)
    assert "`depth_attention` cannot be built for this shape" in shown
    assert json.loads(json.dumps(pages.MethodPage(found).to_dict()))["methods"][0]["parameters"] is None
    heads = {width: methods_map.make_shape(width=width).num_attention_heads for width in (768, 64, 30, 200, 4096)}
    assert heads == {768: 12, 64: 1, 30: 1, 200: 2, 4096: 64}


def test_docstrings_of_inherited_and_bare_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(kw_only=True)
    class Base:
        first: int = 1
        """Of the base,
        on two lines."""
        bare: int = 2

    @dataclasses.dataclass(kw_only=True)
    class Derived(Base):
        second: list[str] = dataclasses.field(default_factory=list)
        """Its own."""
        third: str

    assert field_docs(Derived) == {"first": "Of the base, on two lines.", "second": "Its own."}
    told = {o.name: (o.type, o.default, o.meaning) for o in pages.options(Derived)}
    more = {"second": ("list[str]", "[]", "Its own."), "third": ("str", "required", "")}
    assert told.items() >= ({"bare": ("int", "2", "")} | more).items()
    bare = type("Bare", (STREAMS.find("standard"),), {"__module__": "nowhere", "card": None})
    monkeypatch.setitem(METHODS, "bare", bare)
    found = methods_map.entry("bare", SHAPE)  # without card and file
    assert (found.card.title, found.card.axis, found.card.source) == ("bare", "depth", "-")
    assert "bare" in terminal.render(pages.MethodPage(found).document(), 80)


@pytest.mark.parametrize("width", [60, 120])
def test_tables_have_every_method_and_fit(width: int) -> None:
    for asked in ((), ("all",)):
        shown = terminal.render(pages.MethodMap(SHAPE, asked).document(), width)
        for name in NAMES:
            assert any(line.startswith(name) for line in shown.splitlines())
        assert max(map(len, shown.splitlines())) <= width


def test_options_that_go_on_in_another_row_are_no_variant() -> None:
    """A row of costs without numbers begins with three dots."""
    found = pages.page(methods_map.entry("manifold_hyper_connections", SHAPE), level=1)
    rows = next(block.rows for block in found if isinstance(block, document.Table))
    first, *others = ([cell.text for cell in row] for row in rows)
    assert first[0] == "defaults"
    assert [row[0].startswith("… ") for row in others] == [not any(row[1:]) for row in others]
    assert any(row[0].startswith("… ") for row in others)


def test_the_docs_have_every_method_and_column_and_links_that_lead_somewhere() -> None:
    shown, size = PAGE.read_text(encoding="utf-8"), 0
    for name in NAMES:
        assert f"\n## {name}\n" in shown
        assert shown.count(f"| [{name}](#{name}) |") == len(OVERVIEW)
    for key, meaning in MEANINGS.items():
        assert f"- **{methods_map.header(key)}**: {meaning}" in shown
    for line in (shown + markdown.render(pages.MethodMap(SHAPE).document())).splitlines():  # tables are rectangular
        cells = line.replace("\\|", "").count("|") if line.startswith("|") else 0
        assert not (size and cells) or cells == size, line
        size = cells


def test_json_is_everything_and_exact() -> None:
    assert len(set(NAMES)) == len(NAMES) >= 14
    done = run("methods", "--json", *AS_SHAPE)
    found = json.loads(done.out)
    assert found["twoaxis"] == twoaxis.__version__
    assert (found["shape"]["blocks"], found["shape"]["head_width"]) == (3, 16)
    by_name = {m["name"]: m for m in found["methods"]}
    assert list(by_name) == NAMES
    for name, method in by_name.items():
        assert {*methods_map.COLUMNS, "published", "options", "variants", "dead"} <= {*method}
        assert method["variants"][0]["parameters"] == method["parameters"]
        if name in STREAMS.names():
            made = count(stream(name, blocks=3, width=64))
            assert method["live"] == made.live
            assert method["flops"] >= made.flops
            assert method["parameters_share"] == method["parameters"] / found["shape"]["block_parameters"]


def test_a_closed_pipe_is_not_an_error_message() -> None:
    command = f"'{sys.executable}' -m twoaxis methods standard --json | true"  # which has ended before it is written
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""
