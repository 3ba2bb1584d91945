"""The map of methods: complete cards, exact numbers, and forms for a terminal, a pipe, a page and a program."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import twoaxis
from tests.support.commands import run, run_line
from twoaxis.base.method import Card
from twoaxis.base.options import field_docs
from twoaxis.commands.methods import methods
from twoaxis.depth.counts import count
from twoaxis.depth.registry import METHODS, STREAMS, stream
from twoaxis.depth.stream import Stream
from twoaxis.guide import columns, entries, pages, source
from twoaxis.guide.evidence import read_evidence, sentences
from twoaxis.sequence.registry import MIXERS, mixer
from twoaxis.show import document, markdown, terminal

DOCS = Path(__file__).parents[2] / "docs" / "methods.md"
SHAPE = entries.make_shape()
ROWS = entries.entries(SHAPE)
NAMES = [row.name for row in ROWS]


# The cards.


def test_the_map_has_every_registered_method_once() -> None:
    assert [*STREAMS.names(), *MIXERS.names()] == NAMES
    assert len(set(NAMES)) == len(NAMES) >= 14


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_card_is_complete(row: entries.Entry) -> None:
    card = row.card
    for field in dataclasses.fields(Card):
        value = getattr(card, field.name)
        if isinstance(value, str):
            assert value.strip() == value
            assert value, f"{row.name}: {field.name} is empty"
    assert card.axis == ("depth" if issubclass(row.method, Stream) else "sequence")
    assert 2015 <= card.year <= 2030
    assert read_evidence().of(row.name)
    for must in ("title", "source", "value", "normaliser", "adaptivity", "window", "injection", "depth_state", "paper"):
        assert getattr(card, must) != "-", f"{row.name}: {must} applies to every method"


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_docstring_has_a_summary_an_equation_and_a_drawing(row: entries.Entry) -> None:
    said = source.notes(row.method)
    drawn = "".join(block.text for block in said.body if isinstance(block, document.Code))
    assert said.summary.endswith(".")
    assert "=" in drawn
    assert "─" in drawn
    assert not any(block.text.startswith("    ") for block in said.body if isinstance(block, document.Prose))


# The columns.


def test_every_column_is_in_exactly_one_group() -> None:
    grouped = [key for keys in columns.GROUPS.values() for key in keys]
    assert sorted(grouped) == sorted(columns.COLUMNS)
    told = {f.name for f in dataclasses.fields(Card)}
    assert told <= {*grouped}
    assert {"parameters", "flops", "reads", "live", "kept", "neutral"} <= {*grouped}
    assert not {*columns.GROUPS} & {*columns.COLUMNS}  # a word of --columns means one thing
    assert all(column.meaning.endswith(".") for column in columns.COLUMNS.values())


def test_columns_by_name_and_by_group() -> None:
    assert [keys for _, keys in columns.choose(["year,window", "year"])] == [("year", "window")]
    assert [keys for _, keys in columns.choose(["cost", "year"])] == [("year",), columns.GROUPS["cost"]]
    assert [keys for _, keys in columns.choose(["all"])] == list(columns.GROUPS.values())
    with pytest.raises(ValueError, match=r"unknown column 'windw' \(did you mean 'window'\?\)"):
        columns.choose(["windw"])


# The numbers.


@pytest.mark.parametrize("name", STREAMS.names())
def test_costs_of_a_stream_are_those_of_the_built_module(name: str) -> None:
    shape = entries.make_shape(blocks=5, width=64)
    made = stream(name, blocks=5, width=64)
    found = entries.entry(name, shape).default
    assert found.cost == count(made)
    assert found.cost is not None
    assert found.cost.parameters == sum(p.numel() for p in made.parameters())
    assert found.neutral == made.neutral
    assert found.dead == made.dead()


@pytest.mark.parametrize("name", MIXERS.names())
def test_costs_of_a_mixer_are_what_it_adds_to_the_decoder(name: str) -> None:
    shape = entries.make_shape(blocks=3, width=64, heads=4, kv_heads=2, hidden=96)
    options: dict[str, Any] = {
        "vocab_size": 11,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
    }
    plain = twoaxis.Decoder(twoaxis.ModelConfig(**options))
    mixed = twoaxis.Decoder(twoaxis.ModelConfig(**options, mixer=name))
    added = sum(p.numel() for p in mixed.parameters()) - sum(p.numel() for p in plain.parameters())
    norms = 3 * 64 if "site" in mixer(name).points else 0
    cost = entries.entry(name, shape).default.cost
    assert cost is not None
    assert cost.parameters == added - norms
    # what decoding keeps beyond the attention's own keys and values, after more tokens than any window has
    held = [0, 0]
    tokens = torch.arange(40)[None] % 11
    for i, model in enumerate((plain, mixed)):
        with torch.no_grad():
            held[i] = model.step(tokens, model.start())[1].nbytes() // 4
    assert cost.kept == held[1] - held[0]


def test_block_parameters_are_those_of_the_decoder() -> None:
    config = entries.make_shape(blocks=2, width=64, heads=4, kv_heads=2, hidden=96)
    model = twoaxis.Decoder(config)
    matrices = sum(p.numel() for name, p in model.layers.named_parameters() if "norm." not in name)
    assert entries.block_parameters(config) == matrices


def test_neutral_class_of_mixers_is_measured() -> None:
    def neutral(name: str, **options: Any) -> str | None:
        return entries.measure(name, SHAPE, options).neutral

    before = torch.get_rng_state()
    assert neutral("short_swa") == "bitwise"
    assert neutral("short_swa", where="branch", start="normal") == "bitwise"
    assert neutral("canon") == "bitwise"
    assert neutral("canon", residual=False) == "none"
    assert neutral("short_conv", where="qkv") == "none"
    assert neutral("short_conv", where="qkv", activation="none", start="identity") == "bitwise"
    assert torch.equal(before, torch.get_rng_state())


def test_a_shape_that_does_not_suit_a_method_is_reported() -> None:
    shape = entries.make_shape(width=30)
    found = entries.entry("depth_attention", shape)
    assert found.default.cost is None
    assert "heads (4) must divide the width (30)" in found.default.problem
    shown = terminal.render(pages.MethodMap(shape, ("cost",)).document(), 120)
    assert "`depth_attention` cannot be built for this shape" in shown
    assert json.loads(json.dumps(pages.MethodPage(found).to_dict()))["methods"][0]["parameters"] is None


@pytest.mark.parametrize(("width", "heads"), [(768, 12), (64, 1), (30, 1), (200, 2), (4096, 64)])
def test_heads_left_open_divide_the_width(width: int, heads: int) -> None:
    assert entries.make_shape(width=width).num_attention_heads == heads


# Options.


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_options_have_every_field_with_its_docstring(row: entries.Entry) -> None:
    found = source.options(row.method.Config)
    config: Any = row.method.Config
    assert [o.name for o in found] == [f.name for f in dataclasses.fields(config)]
    defaults = {f.name: f.default for f in dataclasses.fields(config)}
    shown = terminal.render(pages.MethodPage(row).document(), 2000)
    for option in found:
        assert option.meaning, f"{row.name}: {option.name} has no docstring"
        assert option.default == repr(defaults[option.name])
        assert "typing" not in option.type
        line = next(line for line in shown.splitlines() if line.split()[:1] == [option.name] and option.meaning in line)
        assert option.type in line


def test_docstrings_of_inherited_and_bare_fields() -> None:
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
    told = {o.name: (o.type, o.default, o.meaning) for o in source.options(Derived)}
    assert told["bare"] == ("int", "2", "")
    assert told["second"] == ("list[str]", "[]", "Its own.")
    assert told["third"] == ("str", "required", "")


def test_a_method_without_card_and_file_still_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = type("Bare", (STREAMS.find("standard"),), {"__module__": "nowhere", "card": None})
    monkeypatch.setitem(METHODS, "bare", bare)
    found = entries.entry("bare", SHAPE)
    assert (found.card.title, found.card.axis, found.card.source) == ("bare", "depth", "-")
    assert "bare" in terminal.render(pages.MethodPage(found).document(), 80)


# The forms.


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_plain_text_has_every_method_and_fits(width: int) -> None:
    for asked in ((), ("all",)):
        shown = terminal.render(pages.MethodMap(SHAPE, asked).document(), width)
        for name in NAMES:
            assert any(line.startswith(name) for line in shown.splitlines())
        assert max(map(len, shown.splitlines())) <= width


def test_markdown_tables_are_rectangular() -> None:
    shown = markdown.render(pages.MethodMap(SHAPE, ("all",)).document())
    shown += "\n".join(markdown.render(pages.MethodPage(row).document()) for row in ROWS)
    size = 0
    for line in shown.splitlines():
        cells = line.replace("\\|", "").count("|") if line.startswith("|") else 0
        assert not (size and cells) or cells == size, line
        size = cells


# The documentation.


def test_the_docs_are_current() -> None:
    expected = pages.docs()
    found = DOCS.read_text(encoding="utf-8")
    different = [
        n for n, (a, b) in enumerate(zip(expected.splitlines(), found.splitlines(), strict=False), 1) if a != b
    ]
    assert found == expected, f"docs/methods.md differs from line {different[:1]} on; write it again: {pages.COMMAND}"


def test_the_docs_command_writes_the_docs() -> None:
    assert pages.COMMAND.startswith("python -m twoaxis.guide ")
    assert run_line("python -m twoaxis.guide").out == pages.docs()


def test_the_docs_have_every_method_and_column_and_links_that_lead_somewhere() -> None:
    shown = pages.docs()
    for name in NAMES:
        assert f"\n## {name}\n" in shown
        assert shown.count(f"| [{name}](#{name}) |") == len(columns.GROUPS)
    for column in columns.COLUMNS.values():
        assert f"- **{column.header}**: {column.meaning}" in shown


# The command.


def test_map_through_a_pipe() -> None:
    done = run("methods", env={"COLUMNS": "100"})
    assert done.code == 0, done.err
    assert "\x1b" not in done.out
    for name in NAMES:
        assert any(line.startswith(name) for line in done.out.splitlines())
    assert "12 blocks of width 768 with 12 heads of width 64" in " ".join(done.out.split())
    assert max(map(len, done.out.splitlines())) <= 100


def test_json_is_everything_and_exact() -> None:
    done = run("methods", "--json", "--blocks", "4", "--width", "64", "--heads", "4")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["twoaxis"] == twoaxis.__version__
    assert found["shape"]["blocks"] == 4
    assert found["shape"]["head_width"] == 16
    methods = {m["name"]: m for m in found["methods"]}
    assert list(methods) == NAMES
    for name, method in methods.items():
        assert {*columns.COLUMNS, "published", "options", "variants", "dead"} <= {*method}
        assert method["variants"][0]["parameters"] == method["parameters"]
        if name in STREAMS.names():
            made = stream(name, blocks=4, width=64)
            assert method["parameters"] == sum(p.numel() for p in made.parameters())
            assert method["flops"] == count(made).flops
            assert method["live"] == count(made).live
            assert method["parameters_share"] == method["parameters"] / found["shape"]["block_parameters"]
        assert len(method["options"]) == len(dataclasses.fields(entries.find(name).Config))  # type: ignore[arg-type]


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_page_of_one_method(row: entries.Entry, capsys: pytest.CaptureFixture[str]) -> None:
    result = methods(row.name)
    assert result.exit_code == 0
    result.show()
    shown = capsys.readouterr().out
    joined = " ".join(shown.replace("`", "").split())
    for part in (row.card.paper, *sentences(read_evidence().of(row.name)), *row.default.dead):
        assert " ".join(part.replace("`", "").split()) in joined
    for block in source.notes(row.method).body:
        if isinstance(block, document.Code):
            assert all(line.strip() in shown for line in block.text.splitlines())
    assert [m["name"] for m in result.to_dict()["methods"]] == [row.name]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("short_sw",), "unknown method 'short_sw' (did you mean 'short_swa'?)"),
        (("--columns", "windw"), "unknown column 'windw' (did you mean 'window'?)"),
        (("--json", "--columns", "year"), "--columns belongs to the map"),
        (("--json", "--markdown"), "two forms of one result"),
        (("--width", "100", "--heads", "3"), "num_attention_heads (3) must divide hidden_size (100)"),
        (("--blocks", "0"), "num_hidden_layers must be at least 1, got 0"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], message: str) -> None:
    done = run("methods", *arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("twoaxis: ")
    assert message in done.err


def test_a_closed_pipe_is_not_an_error_message() -> None:
    command = f"'{sys.executable}' -m twoaxis methods --json | head -n 1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout == "{\n"
    assert done.stderr == ""
