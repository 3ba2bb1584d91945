"""What a reader sees: terminal, Markdown, page, plots and the command."""

from __future__ import annotations

import html.parser
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.comparison.fake_comparison import FAKES, L_INF, STANDARD, Fake, make_fake
from twoaxis import cli
from twoaxis.comparison import report as reporting
from twoaxis.comparison.page import render_page
from twoaxis.comparison.report import Report, make_report, render_markdown, render_terminal, text_table
from twoaxis.comparison.summary import summarise
from twoaxis.comparison.tables import Cell, Grid, count, grids, signed, size
from twoaxis.comparison.words import closing, headline


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_fake(tmp_path_factory.mktemp("comparison") / "out")


@pytest.fixture(scope="module")
def made(folder: Path) -> Report:
    pytest.importorskip("matplotlib")
    return make_report(folder)


def test_numbers_as_text() -> None:
    assert [count(v) for v in (None, 0.5, 999, 1000, 1.1e6, 2.5e13)] == ["-", "0.5", "999", "1k", "1.1M", "25T"]
    assert [size(v) for v in (None, 12, 1500, 3e8)] == ["-", "12 B", "1.5 kB", "300 MB"]
    assert [signed(v) for v in (None, 0.0, 0.06, -0.0631, 1e-5)] == ["-", "+0.0000", "+0.0600", "-0.0631", "+1.0e-05"]


@pytest.mark.parametrize("width", [100, 120])
def test_the_terminal_table_fits_and_says_everything(folder: Path, width: int) -> None:
    summary = summarise(folder)
    text = render_terminal(summary, width=width, colour=False)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "\x1b" not in text
    for word in ("resolved (better)", "resolved (worse)", "not resolved", "needs --sizes", "Fake CPU", "torch 2.13.0"):
        assert word in text, word
    assert "twoaxis compare --stream attention_residuals" in text
    row = next(line for line in text.splitlines() if line.startswith("muddformer"))
    assert row.split()[1:4] == ["3", "of", "4"]
    painted = render_terminal(summary, width=width, colour=True)
    assert re.sub(r"\x1b\[\d+m", "", painted) == text
    assert "\x1b[32mresolved (better)\x1b[0m" in painted


def test_long_names_are_folded_and_kept_whole() -> None:
    label = "deep_delta:value_channels=4,expand=conv + short_swa:window=4,heads=2"
    grid = Grid("t", ("contender", "loss"), ((Cell(label), Cell("4.1")), (Cell("x" * 30), Cell("-"))))
    lines = text_table(grid, 40).splitlines()
    assert max(map(len, lines)) <= 40
    shown = "".join(line.partition("  ")[0] for line in lines[2:] if "xxx" not in line)
    assert shown.replace(" ", "") == label.replace(" ", "")
    assert "x" * 30 in "\n".join(lines)


def test_the_words(folder: Path, tmp_path: Path) -> None:
    summary = summarise(folder)
    first, second = closing(summary)
    assert first.startswith("Resolved as better than standard: attention_residuals:block_size=4 by 0.06")
    assert "Resolved as worse than standard: write only <b> by 0.04" in first
    assert "Not resolved at this scale and with these seeds: hyper_connections:streams=4" in first
    assert "At equal time being better is not resolved for muddformer, standard + short_swa:window=4: --match" in first
    for part in ("one shared learning rate (0.002)", "init=paper", "matched by training tokens", "1 run diverged"):
        assert part in second, part
    assert "95% for the 5 contenders of a table together" in headline(summary)
    paired = (STANDARD, Fake("hyper_connections:init=paired", 0.5))
    other = summarise(make_fake(tmp_path / "x", paired, seeds=(0,), match="flops", rates=(1e-3, 2e-3)))
    first, second = closing(other)
    assert "one seed tells nothing of chance" in first
    assert "matched by training operations" in second
    assert "best of the learning rates 0.001, 0.002, chosen on separate seeds" in second
    assert "edge of those tried for" in second
    assert "init=paper and init=paired were both used" in second


def test_what_is_written(folder: Path, made: Report) -> None:
    assert made.folder == folder / "report"
    assert sorted(made.files) == sorted(path.name for path in made.folder.iterdir())
    assert {"report.md", "report.html", "table.json", "curves.png", "curves.svg", "differences.png"} <= set(made.files)
    assert not list(folder.glob(".*partial*"))
    assert (made.folder / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert b"<svg" in (made.folder / "differences.svg").read_bytes()
    document = json.loads((made.folder / "table.json").read_bytes())
    assert document["tables"][0]["contenders"][1]["verdict"] == "resolved (better)"


def test_the_report_is_made_anew(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    mine = tmp_path / "x"
    shutil.copytree(folder, mine)
    first = make_report(mine)
    before = {name: (first.folder / name).read_bytes() for name in first.files}
    (first.folder / "stale.txt").write_text("of before")
    second = make_report(mine)
    assert {path.name for path in second.folder.iterdir()} == set(before)
    assert {name: (second.folder / name).read_bytes() for name in second.files} == before  # the same to the last byte


def test_markdown(folder: Path, made: Report) -> None:
    text = (made.folder / "report.md").read_text()
    table = [line for line in text.splitlines() if line.startswith("| ")]
    assert any(line.startswith("| attention\\_residuals:block\\_size=4 | 4 | 5.6") for line in table)
    assert "write only \\<b\\>" in text
    assert "![curves](curves.png)" in text
    for line in table:
        assert line.count(" | ") >= 3
    assert "## What this says" in text
    assert "hardware: `2 cores of a Fake CPU <2.1 GHz>" in text
    assert "curves.png" not in render_markdown(summarise(folder))


class Reader(html.parser.HTMLParser):
    """Checks that elements close, and collects what a page refers to."""

    EMPTY = ("meta", "input", "wbr", "line")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.rows = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        self.rows += tag == "tr"
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.EMPTY:
            assert self.open.pop() == tag, tag


def test_the_page_stands_alone_and_escapes(folder: Path) -> None:
    page = render_page(summarise(folder))
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    assert reader.references == []
    assert not re.search(r"url\(\s*['\"]?\s*(https?:|//)|@import", page)
    assert "write only <b>" not in page
    assert "write only &lt;b&gt;" in page
    assert reader.rows == 3 + 6 + 5 + 6  # headings and rows of three tables


def test_a_hostile_label_stays_text(tmp_path: Path) -> None:
    label = "</script><script>alert(1)</script>"
    fakes = (STANDARD, Fake(f'attention_residuals:label="{label}"', 0.1))
    page = render_page(summarise(make_fake(tmp_path / "x", fakes)))
    assert "<script>alert" not in page
    assert "</script><script>alert" not in page
    assert page.count("</script>") == 2


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_the_page_in_a_browser(folder: Path, tmp_path: Path) -> None:
    """The script runs: curves are drawn, a click sorts, an unticked contender vanishes, a pointer shows numbers."""
    probe = """
      const out = [], box = document.querySelector(".curves"), svg = box.querySelector("svg");
      const lines = () => svg.querySelectorAll("polyline").length;
      out.push("lines " + lines());
      box.querySelectorAll("input")[1].click(); out.push("left " + lines());
      const kind = box.querySelector("[name=kind]");
      kind.value = "difference"; kind.dispatchEvent(new Event("change", { bubbles: true }));
      out.push("differences " + lines());
      const frame = svg.getBoundingClientRect();
      const place = { clientX: frame.left + frame.width * 0.7, clientY: frame.top + 50 };
      svg.dispatchEvent(new PointerEvent("pointermove", place));
      out.push("tip " + box.querySelectorAll(".tip div").length + " " + box.querySelector(".tip").style.display);
      const head = document.querySelectorAll("th")[2];
      const losses = () => [...document.querySelector("table").tBodies[0].rows].map(r => +r.cells[2].textContent);
      head.querySelector("button").click(); const up = losses();
      head.querySelector("button").click(); const down = losses();
      out.push("sorted " + up.every((v, i) => !i || up[i - 1] <= v) + " " +
        down.every((v, i) => !i || down[i - 1] >= v));
      const was = document.body.classList.contains("dark"); document.getElementById("shade").click();
      out.push("shade " + (was !== document.body.classList.contains("dark")));
      const made = document.createElement("pre");
      made.id = "probe"; made.textContent = out.join("|"); document.body.append(made);
    """
    page = tmp_path / "page.html"
    page.write_text(render_page(summarise(folder)).replace("</body>", f"<script>{probe}</script></body>"))
    command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,900", "--dump-dom"]
    environment = os.environ | {"HOME": str(tmp_path)}
    done = subprocess.run(
        [*command, f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout)
    assert found, done.stdout[-500:] + done.stderr[-500:]
    assert found[1].split("|") == [
        "lines 6",
        "left 5",
        "differences 4",
        "tip 4 block",
        "sorted true true",
        "shade true",
    ]


def test_several_tables_and_a_law(tmp_path: Path) -> None:
    fakes = (STANDARD, FAKES[1])
    data = (("stdlib",), ("task:recall",))
    summary = summarise(make_fake(tmp_path / "x", fakes, sizes=("a", "b", "c"), data=data), l_inf=L_INF)
    assert [(table.data, table.size) for table in summary.tables] == [
        (name, each) for name in ("stdlib", "task:recall") for each in ("a", "b", "c")
    ]
    result = grids(summary, summary.tables[0])[0]
    assert result.heads[-1] == "speed-up"
    assert re.fullmatch(r"1\.\d+ \(\d\.\d+ to \d\.\d+\)", result.rows[1][-1].text)
    assert any("Speed-up by the law L = 1.8" in note for note in result.notes)
    task = grids(summary, summary.tables[3])[0]
    assert task.heads[6:8] == ("accuracy", "difference")
    assert "Guessing scores 10.0%" in task.notes[0]
    endings = [reporting.figure_ending(summary, table) for table in summary.tables]
    assert endings[4] == "-5-task-recall-b"
    assert len(set(endings)) == 6
    reader = Reader()
    reader.feed(render_page(summary))
    assert reader.open == []


def test_an_empty_comparison_has_a_report(tmp_path: Path) -> None:
    folder = make_fake(tmp_path / "x", FAKES[:3])
    shutil.rmtree(folder / "runs")
    made = make_report(folder)
    assert set(made.files) == {"report.md", "report.html", "table.json"}
    assert "no pair of runs has finished" in (folder / "report" / "report.md").read_text()
    text = render_terminal(made.summary, width=100)
    assert "12 runs had not finished" in text


def test_without_matplotlib_the_rest_is_written(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "x"
    shutil.copytree(folder, mine, ignore=shutil.ignore_patterns("report"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    made = make_report(mine)
    assert set(made.files) == {"report.md", "report.html", "table.json"}
    assert 'pip install "twoaxis[report]"' in made.note


def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["twoaxis", *arguments])
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    shown = capsys.readouterr()
    return stopped.value.code, shown.out, shown.err


def test_the_command(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    code, out, err = run_here(monkeypatch, capsys, "report", str(folder))
    assert code == 0
    assert "resolved (better)" in out
    assert max(map(len, out.splitlines())) <= 110
    assert "written to" in err
    code, out, _ = run_here(monkeypatch, capsys, "report", str(folder), "--json", "--l-inf", "1.8", "--alpha", "0.12")
    assert code == 0
    document = json.loads(out)
    assert document["tables"][0]["contenders"][1]["speed_up"]["value"] > 1
    assert document == json.loads((folder / "report" / "table.json").read_bytes())
    code, out, err = run_here(monkeypatch, capsys, "report", str(tmp_path / "nowhere"))
    assert (code, out) == (2, "")
    assert err.startswith("twoaxis: ")
    assert "is not a folder; give the --out of twoaxis compare" in err
    code, _, err = run_here(monkeypatch, capsys, "report", str(folder), "--alpha", "0.1")
    assert code == 2
    assert "needs --l-inf too" in err
