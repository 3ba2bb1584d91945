"""What a reader sees: tables, sentences, charts, files, and the command."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import twoaxis
from tests.comparison.fake_comparison import FAKES, L_INF, STANDARD, Fake, make_fake
from tests.support.commands import run
from twoaxis.comparison.report import TABLES, closing, headline
from twoaxis.comparison.results import Comparison
from twoaxis.show import markdown, page, terminal
from twoaxis.show.document import Saved, Table

FILES = {"report.md", "report.html", "table.json"}
FIGURES = {f"report-{name}.{kind}" for name in ("curves", "differences", "parameters") for kind in ("svg", "png")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_fake(tmp_path_factory.mktemp("comparison") / "out")


@pytest.fixture(scope="module")
def found(folder: Path) -> Comparison:
    return Comparison.load(folder)


@pytest.fixture(scope="module")
def saved(found: Comparison) -> Saved:
    pytest.importorskip("matplotlib")
    return found.save()


def table_of(found: Comparison, title: str, section: int = 0) -> Table:
    made = next(table for table in TABLES if table.title == title).make(found.sections[section])
    assert made is not None
    return made


def column(table: Table, head: str) -> list[str]:
    place = [column.head for column in table.columns].index(head)
    return [row[place].text for row in table.rows]


def test_the_tables(found: Comparison) -> None:
    result, equal, speed, cost = (table_of(found, table.title) for table in TABLES[:4])
    assert column(result, "seeds") == ["4", "4", "4", "3 of 4", "3 of 4", "4"]
    verdicts = ["baseline", "resolved (better)", "not resolved", "resolved (worse)", *["resolved (better)"] * 2]
    assert column(result, "verdict") == verdicts
    assert [row[7].tone for row in result.rows] == ["", "better", "", "worse", "better", "better"]
    assert result.baseline == 0
    assert "muddformer: 1 of 4 seeds not finished." in result.notes
    assert len(equal.rows) == 5
    assert column(equal, "at equal tokens (matched)")[0] == "-0.0631 resolved (better)"
    assert column(equal, "at equal time")[0] == "-0.0201~ resolved (better)"
    assert column(equal, "at equal FLOPs")[3] == "+0.0061~ not resolved"
    assert column(cost, "parameters")[:3] == ["1.1M", "1.1M +0.1%", "1.11M +1.0%"]
    assert column(cost, "tokens/s")[1] == "11.8k ×0.91"
    assert column(cost, "peak memory")[2] == "570 MB ×1.90"
    assert column(result, "seed 2")[2:4] == ["5.7371", "diverged"]
    assert column(result, "seed 3")[4] == "-"
    assert column(result, "p")[:3] == ["-", "<.001", "1.000"]
    assert column(result, "resolvable")[1] == "0.0161"
    assert column(speed, "throughput")[1] == "×0.91"
    assert column(speed, "steps to it")[0] == "488"
    assert "unigram 7.1000, bigram 5.6000" in result.notes[-1]


def test_columns_that_a_section_may_have(tmp_path: Path) -> None:
    rates = Comparison.load(make_fake(tmp_path / "a", FAKES[:2], rates=(2e-3, 4e-3), held_out=64))
    assert column(table_of(rates, "Loss by learning rate"), "0.002") == ["4.0000 *", "4.0000 *"]
    assert column(table_of(rates, "Cost"), "lr") == ["0.002 (edge)", "0.002 (edge)"]
    assert "Loss by learning rate" in terminal.render(rates.document())
    data = (("stdlib",), ("task:recall",))
    several = Comparison.load(make_fake(tmp_path / "b", FAKES[:2], sizes=("a", "b", "c"), data=data), l_inf=L_INF)
    names = [(section.data, section.size) for section in several.sections]
    assert names == [(name, each) for name in ("stdlib", "task:recall") for each in ("a", "b", "c")]
    speed = table_of(several, "Speed")
    for head in ("step-wise", "net"):
        assert re.fullmatch(r"1\.\d+ \(\d\.\d+ to \d\.\d+\)", column(speed, head)[1])
    assert any("Speed-up by the law L = 1.8" in note for note in speed.notes)
    task = table_of(several, "Result", 3)
    assert [column.head for column in task.columns][9:11] == ["accuracy", "accuracy difference"]
    assert "Guessing scores 10.0%" in task.notes[0]
    names = [chart.name for chart in several.document().charts]
    assert len(set(names)) == 18
    assert names[13] == "differences-5-task-recall-b"


def test_rows_have_the_values_of_the_cells(found: Comparison) -> None:
    rows = found.rows()
    assert len(rows) == 6
    base, mine = rows[:2]
    entry = found.sections[0].entries[1]
    assert entry.difference is not None
    assert (base["contender"], base["verdict"], base["loss"]) == ("standard", "baseline", found.entries[0].mean("loss"))
    assert (mine["data"], mine["size"], mine["difference"]) == ("stdlib", "nano", entry.difference.mean)
    assert mine["95% interval"] == "-0.0756 to -0.0506"
    assert (mine["seed 2"], mine["peak memory"]) == (entry.losses[2], entry.peak_memory)


def test_the_words(found: Comparison, tmp_path: Path) -> None:
    first, second = closing(found)
    assert first.startswith("Resolved as better than standard: attention_residuals:block_size=4 by 0.06")
    assert "Resolved as worse than standard: write only <b> by 0.04" in first
    assert "Not resolved at this scale and with these seeds: hyper_connections:streams=4" in first
    assert "At equal time being better is not resolved for muddformer, standard + short_swa:window=4: --match" in first
    for part in ("one shared learning rate (0.002)", "init=paper", "matched by training tokens", "1 run diverged"):
        assert part in second, part
    assert "95% for the 5 contenders of a table together (moderated t" in headline(found)
    assert "would have been, with a probability of 80%" in first
    assert "less than a table of counts over the same tokens (5.7" in second
    grown = dataclasses.replace(found, plan=dataclasses.replace(found.plan, grown=(2,)))
    assert "Seeds were added after verdicts had been seen (at 2, 4)" in headline(grown)
    paired = (STANDARD, Fake("hyper_connections:init=paired", 0.5))
    other = Comparison.load(make_fake(tmp_path / "x", paired, seeds=(0,), match="flops", rates=(1e-3, 2e-3)))
    first, second = closing(other)
    assert "one seed tells nothing of chance" in first
    assert "matched by training operations" in second
    assert "best of the learning rates 0.001, 0.002, chosen on separate seeds and held-out rows" in second
    assert "edge of those tried for" in second
    assert "init=paper and init=paired were both used" in second
    timed = Comparison.load(make_fake(tmp_path / "y", FAKES[:2], match="time"))
    clock = "in CPU time of the process where a run has one thread of a CPU, else by the clock"
    assert clock in closing(timed)[1]
    assert clock in table_of(timed, "Cost").notes[0]


def test_the_charts(found: Comparison) -> None:
    curves, differences, parameters = found.document().charts
    kinds = ("loss", "loss minus standard's", "loss of every seed")
    assert [panel.choice["show"] for panel in curves.panels] == [kind for kind in kinds for _ in range(3)]
    assert len(curves.panels[6].marks) == 4 + 4 + 4 + 3 + 3 + 4
    assert [line.x[0] for line in parameters.panels[0].marks][:3] == [1_100_000, 1_101_100, 1_111_000]  # type: ignore[union-attr]
    assert curves.panels[0].title == "loss, against training tokens (matched)"
    assert [line.label for line in curves.panels[0].marks][3] == "write only <b> (1 diverged)"
    assert len(curves.panels[3].marks) == 5
    assert curves.panels[3].y.rule == 0
    low, high = curves.panels[0].y.low, curves.panels[0].y.high
    assert low is not None
    assert high is not None
    assert low < 5.64 < 6.3 < high < 7.5  # the first fifth of the curves, which falls from 8, is out of the frame
    marks = {mark.label: mark for mark in differences.panels[2].marks}
    assert differences.panels[0].title == "at equal tokens (matched)"
    assert marks["muddformer"].hollow  # type: ignore[union-attr]
    assert marks["attention_residuals:block_size=4"].tone == "better"  # type: ignore[union-attr]


def test_what_is_written(folder: Path, found: Comparison, saved: Saved) -> None:
    assert {path.parent for path in saved.files} == {folder / "report"}
    assert (
        {path.name for path in saved.files} == FILES | FIGURES == {path.name for path in (folder / "report").iterdir()}
    )
    assert (folder / "report" / "report-curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    document = json.loads((folder / "report" / "table.json").read_bytes())
    assert document == json.loads(json.dumps(found.to_dict()))
    text = (folder / "report" / "report.md").read_text()
    assert "write only \\<b>" in text
    assert "![Held-out loss: stdlib, nano](report-curves.svg)" in text


def test_contenders_lead_to_their_models(folder: Path, found: Comparison, saved: Saved, tmp_path: Path) -> None:
    run_folder = found.entries[1].runs[2].folder
    links = set(re.findall(r'href="(\.\./[^"]+)"', (folder / "report" / "report.html").read_text()))
    assert f"../{run_folder.as_posix()}" in links
    assert all((folder / "report" / link).is_dir() for link in links)
    assert len(links) == 23  # every run that has ended
    mine = tmp_path / "x"
    shutil.copytree(folder, mine)
    (mine / run_folder / "model").mkdir()
    Comparison.load(mine).save(tmp_path / "elsewhere")
    text = (tmp_path / "elsewhere" / "report.md").read_text()
    assert f"](../x/{run_folder.as_posix()}/model)" in text
    assert 'href="..' not in found._repr_html_()  # a notebook stands anywhere


def test_the_report_is_made_anew(folder: Path, saved: Saved, tmp_path: Path) -> None:
    mine = tmp_path / "out"
    shutil.copytree(folder, mine)
    (mine / "report" / "report-curves-1-of-before.svg").write_text("of before")
    again = Comparison.load(mine).save()
    assert {path.name for path in (mine / "report").iterdir()} == FILES | FIGURES
    for path in again.files:
        assert path.read_bytes() == (folder / "report" / path.name).read_bytes()  # the same to the last byte


def test_reports_of_one_folder_at_once(folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "x"
    shutil.copytree(folder, mine, ignore=shutil.ignore_patterns("report"))
    code = (
        "import sys; from twoaxis.comparison.results import Comparison as C; [C.load(sys.argv[1]).save() for _ in '12']"
    )
    started = [subprocess.Popen([sys.executable, "-c", code, mine], stderr=subprocess.PIPE) for _ in range(3)]
    ended = [process.communicate(timeout=240)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], ended
    assert {path.name for path in (mine / "report").iterdir()} >= FILES
    assert not [path for path in (mine / "report").iterdir() if "partial" in path.name]


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_shows_everything(found: Comparison, width: int) -> None:
    text = terminal.render(found.document(), width)
    assert max(len(line) for line in text.splitlines()) <= width
    for word in ("(better)", "(worse)", "not resolved", "needs --sizes", "Fake CPU", "torch 2.13.0"):
        assert word in text, word
    assert "twoaxis compare --stream attention_residuals" in text


def test_a_hostile_label_stays_text(tmp_path: Path) -> None:
    label = "</script><script>alert(1)</script>"
    fakes = (STANDARD, Fake(f'attention_residuals:label="{label}"', 0.1))
    made = page.render(Comparison.load(make_fake(tmp_path / "x", fakes)).document())
    assert "<script>alert" not in made
    assert made.count("</script>") == 1


def test_an_empty_comparison_has_a_report(tmp_path: Path) -> None:
    folder = make_fake(tmp_path / "x", FAKES[:3])
    shutil.rmtree(folder / "runs")
    found = Comparison.load(folder)
    assert {path.name for path in found.save().files} == FILES
    assert "no pair of runs has finished" in (folder / "report" / "report.md").read_text()
    assert "12 runs had not finished" in terminal.render(found.document(), 300)


def test_failed_runs_are_named(found: Comparison) -> None:
    told = dataclasses.replace(found, failed=("muddformer, seed 3: killed",))
    assert "muddformer, seed 3: killed" in markdown.render(told.document())


def test_without_matplotlib_the_rest_is_written(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "x"
    shutil.copytree(folder, mine, ignore=shutil.ignore_patterns("report"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    made = Comparison.load(mine).save()
    assert {path.name for path in made.files} == FILES
    assert "pip install 'twoaxis[lab]'" in made.note


def test_the_command(folder: Path, saved: Saved) -> None:
    code, out, err = run("report", str(folder), "--json")
    assert code == 0
    assert json.loads(out) == json.loads((folder / "report" / "table.json").read_bytes())
    assert "written to" in err
    code, out, _ = run("report", str(folder), "--l-inf", "1.8", "--alpha", "0.12")
    assert code == 0
    assert "Speed-up by the law L = 1.8" in " ".join(out.split())
    code, out, err = run("report", str(folder / "nowhere"))
    assert (code, out) == (2, "")
    assert "is not a folder; give the --out of twoaxis compare" in err
    code, _, err = run("report", str(folder), "--alpha", "0.1")
    assert code == 2
    assert "needs --l-inf too" in err
    assert twoaxis.report(str(folder)).verdicts["muddformer"] == "resolved (better)"
