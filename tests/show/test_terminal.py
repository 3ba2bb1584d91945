"""The layout of text: every line fits, tables split and fold, labels are never taken for markup."""

from __future__ import annotations

import io
import sys

import pytest

from tests.show.samples import CONTENDERS, Sample, everything, grids, result_table, wide_table
from twoaxis.show import markdown, terminal
from twoaxis.show.charts import Row
from twoaxis.show.document import Cell, Code, Column, Document, Facts, Heading, Items, Prose, table


def lines(*blocks: object, width: int = 80) -> list[str]:
    return terminal.render(Document("", tuple(blocks)), width).splitlines()  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [50, 60, 80, 120, 200])
def test_everything_fits_and_says_the_same_words_at_every_width(width: int) -> None:
    document = everything()
    code = next(block for block in document.blocks if isinstance(block, Code))
    shown = terminal.render(document, width)
    inside = [line for line in shown.splitlines() if line.strip() not in code.text]
    assert max(map(len, inside)) <= width
    assert not any(line != line.rstrip() for line in shown.splitlines())
    folded = "".join(shown.split())
    for label in CONTENDERS:
        assert label.partition(":")[0] in folded
    for cell in (cell for row in wide_table().rows for cell in row[:-1]):
        assert cell.text in shown


@pytest.mark.parametrize("width", [1, 10, 20])
def test_a_page_narrower_than_its_names_has_an_end(width: int) -> None:
    assert CONTENDERS[0] in "".join(terminal.render(everything(), width).split())


def test_a_path_can_be_copied_and_other_long_words_fold() -> None:
    path = "runs/" + "a-long-folder/" * 6 + "model"
    facts = Facts((("model", path), ("next", f"twoaxis generate {path} --prompt Hello"), ("key", "x" * 100)))
    assert lines(facts) == [
        f"model  {path}",
        "next   twoaxis generate \\",
        f"       {path} \\",
        "       --prompt Hello",
        "key    " + "x" * 73,
        "       " + "x" * 27,
    ]


def test_text_is_aligned_and_wraps_under_itself() -> None:
    shown = lines(table(("name", "some number", Column("why", number=False)), [("a", "1", "x y"), ("long", "23", "z")]))
    assert shown == ["        some", "name  number  why", "─" * 17, "a          1  x y", "long      23  z"]
    shown = lines(Items(("word " * 12,)), Facts((("data", "x " * 30), ("longer name", "y"))), width=40)
    assert [line[:2] for line in shown[:2]] == ["- ", "  "]
    assert shown[-1] == "longer name  y"
    assert shown[-2].startswith(" " * 13 + "x")


def test_a_wide_table_is_split_with_its_first_column() -> None:
    made = wide_table()
    parts = terminal.fit(made, 80)
    assert len(parts) == 3
    assert all(part.columns[0] == 0 for part in parts)
    assert [i for part in parts for i in part.columns[1:]] == list(range(1, 14))
    assert all(sum(part.widths) + terminal.GAP * (len(part.widths) - 1) <= 80 for part in parts)
    shown = lines(made)
    assert sum(line.startswith("attention_residuals") for line in shown) == 3
    assert shown.count("sequence axis") == 3


def test_names_fold_after_colon_and_comma() -> None:
    for text, width, lines in (
        ("residuals:block_size=4,way=two_phase", 16, ["residuals:", "block_size=4,", "way=two_phase"]),
        ("one two three", 7, ["one two", "three"]),
        ("a veryverylongword b", 6, ["a", "veryve", "rylong", "word b"]),
        ("", 5, [""]),
        ("x 1,234,567", 9, ["x", "1,234,567"]),  # what fits into a line is not broken
    ):
        assert terminal.fold(text, width) == lines


def test_numbers_are_never_folded() -> None:
    heads = ("method", *(f"n{i}" for i in range(8)))
    rows = [("a:b,c", *["1,234,567,890,123"] * 8), ("d", *["not counted"] * 8)]
    shown = lines(table(heads, rows), width=60)
    assert sum(line.count("1,234,567,890,123") for line in shown) == 8


def test_brackets_and_colons_are_text_not_markup() -> None:
    label = "[bold]x[/bold] :smile: [link=a]b[/link] [0]"
    made = table((label, "b"), [(label, "1")], notes=(label,), sections={0: label})
    blocks = (Heading(label, 3), Prose(label), Items((label,)), Code(label), Facts(((label, label),)), made)
    assert terminal.render(Document(label, blocks), 400, colour=True).count(label) == 11


def test_width_is_that_of_the_terminal_or_eighty(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = Sample(Document("", (Prose("word " * 100),)))
    monkeypatch.delenv("COLUMNS", raising=False)
    for columns, width, most in ((None, None, 80), ("44", None, 44), ("44", 30, 30)):
        if columns:
            monkeypatch.setenv("COLUMNS", columns)
        sample.show(width=width)
        assert most - 5 <= max(map(len, capsys.readouterr().out.splitlines())) <= most


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_only_where_somebody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    rows = [(Cell("a"), Cell("1")), (Cell("b"), Cell("2", 2, "better"))]
    document = Document("", (Prose("**Bold** a*b 2**3 `code` **not"), table(("n", "v"), rows, baseline=0)))
    for stream, coloured in ((_Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stdout", stream)
        terminal.show(document)
        shown = stream.getvalue()
        assert ("\x1b[" in shown) is coloured
        assert ("Bold a*b 2**3 `code` **not" in shown) is not coloured
        for style in ("\x1b[1mBold\x1b[0m", "\x1b[36m`code`\x1b[0m", "\x1b[32m", "\x1b[3m"):  # green is better
            assert (style in shown) is coloured


def test_a_narrow_encoding_does_not_break_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    terminal.show(Document("Títle", (result_table(), Code("x ─► y"))))
    stream.flush()
    assert b"denseformer" in raw.getvalue()


def test_grids_are_tables_of_their_first_choice() -> None:
    wide, gates = grids()
    text = terminal.render(Document("", (wide, gates)))
    assert wide.title not in text  # too many columns to be read as numbers
    rows = [line.split() for line in text.splitlines() if line.startswith(("first", "second"))]
    assert rows == [["first", "1", "-100"], ["second", "0.25", "-"]]
    assert "As `read`." in text
    drawn = wide.chart().panels[0]
    assert drawn.marks[0] == Row("site 3", (0.0, 0.05, 0.1, *[None] * 17))
    written = markdown.render(Document("", (wide, gates)), figures="report-")
    assert "(report-reads.svg)" in written
    assert "| first | 1 | -100 |" in written
    assert [chart.name for chart in Document("", (wide, gates)).charts] == ["reads"]
