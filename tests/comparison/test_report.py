"""What a reader sees: tables, sentences, charts, files, and the command."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, cast

import pytest

import twoaxis
from tests.comparison.fake_comparison import FAKES, STANDARD, Fake, make_fake
from tests.support.commands import run
from twoaxis.comparison import report
from twoaxis.comparison.results import Comparison
from twoaxis.comparison.sentences import facts, headline
from twoaxis.show import markdown, terminal
from twoaxis.show.document import Saved

FILES = {"report.md", "report.html", "table.json"}
KEPT = Path(__file__).parent / "reports"
CHECKS = (
    Fake("standard:train.budget=2,label=twice", 0.2),
    Fake("standard:train.warmup=0.5,label=warm", -0.3),
)
PAIRED = (STANDARD, Fake("hyper_connections:init=paired", 0.5), Fake("muddformer", -0.1, speed=0.995))
FIGURES = {f"report-{name}.{kind}" for name in ("differences", "parameters") for kind in ("svg", "png")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_fake(tmp_path_factory.mktemp("comparison") / "out")


@pytest.fixture(scope="module")
def found(folder: Path) -> Comparison:
    return Comparison.load(folder)


@pytest.fixture(scope="module")
def saved(found: Comparison) -> Saved:
    """With the figures that are drawn fast."""
    pytest.importorskip("matplotlib")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "CHARTS", report.CHARTS[1:])
        return found.save()


FROZEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tokens": ({}, {}),
    "checks": ({"fakes": (*FAKES[:3], *CHECKS), "checks": ("twice", "warm")}, {"margin": 0.05}),
    "rates": ({"fakes": PAIRED, "rates": (1e-3, 2e-3), "match": "flops", "held_out": 512}, {}),
    "sizes": ({"fakes": FAKES[:2], "sizes": ("a", "b", "c"), "data": (("stdlib",), ("task:recall",))}, {"l_inf": 1.8}),
    "until": ({"fakes": FAKES[:4], "seeds": tuple(range(8)), "match": "time", "until": "resolved"}, {}),
    "one_seed": ({"fakes": FAKES[:2], "seeds": (0,)}, {}),
}
"""Comparisons whose report is kept: what is planted, and how it is read."""


def report_of(name: str, folder: Path) -> str:
    planted, read = FROZEN[name]
    return markdown.render(Comparison.load(make_fake(folder / name, **planted), **read).document())


@pytest.mark.parametrize("name", FROZEN)
def test_tables_notes_and_sentences_are_those_that_are_kept(name: str, tmp_path: Path) -> None:
    """`python -m tests.comparison.test_report` writes them anew; every changed number or word is seen in the diff."""
    assert report_of(name, tmp_path) == (KEPT / f"{name}.md").read_text()


def test_rows_have_the_values_of_the_cells(found: Comparison) -> None:
    rows = found.rows()
    assert len(rows) == 6
    base, mine = rows[:2]
    entry = found.sections[0].entries[1]
    assert (base["contender"], base["verdict"], base["loss"]) == ("standard", "baseline", found.entries[0].mean("loss"))
    assert (mine["data"], mine["size"], mine["difference"]) == ("stdlib", "nano", entry.difference.mean)
    assert mine["95% interval"] == "-0.0756 to -0.0506"
    assert (mine["seed 2"], mine["peak memory"]) == (entry.losses[2], entry.costs["peak_memory"])


def test_the_charts(found: Comparison) -> None:
    curves, differences, parameters = cast(Any, found.document().charts)
    kinds = ("loss", "loss minus standard's", "loss of every seed", "training loss")
    assert [panel.choice["show"] for panel in curves.panels] == [kind for kind in kinds for _ in range(3)]
    loss, _, _, apart, _, _, each, *_ = curves.panels
    assert len(each.marks) == 4 + 4 + 4 + 3 + 3 + 4
    assert [line.x[0] for line in parameters.panels[0].marks][:3] == [1_100_000, 1_101_100, 1_111_000]
    assert loss.title == "loss, against training tokens (matched)"
    assert loss.marks[3].label == "write only <b> (1 diverged)"
    assert (len(apart.marks), apart.y.rule) == (5, 0)
    lower = [a - b for a, b in zip(loss.marks[0].y, curves.panels[9].marks[0].y, strict=True)]
    assert lower == pytest.approx([-0.1] * len(lower))
    # the first fifth of the curves, which falls from 8, is out of the frame
    assert loss.y.low < 5.64 < 6.3 < loss.y.high < 7.5
    marks = {mark.label: mark for mark in differences.panels[2].marks}
    assert differences.panels[0].title == "at equal tokens (matched)"
    assert marks["muddformer"].hollow
    assert marks["attention_residuals:block_size=4"].tone == "better"


def test_what_is_written(folder: Path, found: Comparison, saved: Saved) -> None:
    assert {path.parent for path in saved.files} == {folder / "report"}
    written = {path.name for path in (folder / "report").iterdir()}
    assert {path.name for path in saved.files} == FILES | FIGURES == written
    assert (folder / "report" / "report-parameters.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    document = json.loads((folder / "report" / "table.json").read_bytes())
    assert document == json.loads(json.dumps(found.to_dict()))
    text = (folder / "report" / "report.md").read_text()
    assert "write only \\<b>" in text
    assert "![Held-out loss against parameters: stdlib, nano](report-parameters.svg)" in text
    place = (folder / "report" / "report.html").as_posix()
    assert ("report", f"`{place}`") in facts(found)  # a terminal names the page, which does not name itself
    assert place not in text


@pytest.mark.usefixtures("saved")
def test_contenders_lead_to_their_models(folder: Path, found: Comparison, tmp_path: Path) -> None:
    ours, base = found.entries[1].runs[2].folder, found.sections[0].baseline.runs[1].folder
    links = set(re.findall(r'href="(\.\./[^"]+)"', (folder / "report" / "report.html").read_text()))
    assert f"../{ours.as_posix()}" in links
    assert all((folder / "report" / link).is_dir() for link in links)
    assert len(links) == 23  # every run that has ended
    assert 'href="..' not in found._repr_html_()  # a notebook stands anywhere
    mine = shutil.copytree(folder, tmp_path / "x")
    (mine / ours / "model").mkdir()
    Comparison.load(mine).save(tmp_path / "elsewhere")
    assert f"](../x/{ours.as_posix()}/model)" in (tmp_path / "elsewhere" / "report.md").read_text()
    told = dict(facts(Comparison.load(mine)))
    assert told["next"] == f"`twoaxis inspect {told['model'][1:-1]} --prompt TEXT`"
    (mine / base / "model").mkdir()
    both = [(mine / run / "model").as_posix() for run in (ours, base)]
    assert ("next", f"`twoaxis inspect {both[0]} --beside {both[1]} --prompt TEXT`") in facts(Comparison.load(mine))


def test_the_report_is_made_anew(folder: Path, tmp_path: Path) -> None:
    mine = shutil.copytree(folder, tmp_path / "out", ignore=shutil.ignore_patterns("report"))
    first = {path.name: path.read_bytes() for path in Comparison.load(mine).save().files}
    assert set(first) == FILES
    (mine / "report" / "report-curves-1-of-before.svg").write_text("of before")
    Comparison.load(mine).save()
    assert {path.name: path.read_bytes() for path in (mine / "report").iterdir()} == first  # the same to the last byte


def save_twice(folder: Path) -> None:
    for _ in range(2):
        Comparison.load(folder).save()


def test_reports_of_one_folder_at_once(tmp_path: Path) -> None:
    mine = make_fake(tmp_path / "x", FAKES[:2])
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=save_twice, args=(mine,)) for _ in range(3)]
    for process in started:
        process.start()
    for process in started:
        process.join(240)
    assert [process.exitcode for process in started] == [0, 0, 0]
    assert {path.name for path in (mine / "report").iterdir()} >= FILES
    assert not [path for path in (mine / "report").iterdir() if "partial" in path.name]


def test_an_empty_comparison_has_a_report(tmp_path: Path) -> None:
    folder = make_fake(tmp_path / "x", FAKES[:3])
    shutil.rmtree(folder / "runs")
    found = Comparison.load(folder)
    assert {path.name for path in found.save().files} == FILES
    assert "no pair of runs has finished" in (folder / "report" / "report.md").read_text()
    assert "12 runs had not finished" in terminal.render(found.document(), 300)
    told = dataclasses.replace(found, failed=("muddformer, seed 3: killed",))
    assert "muddformer, seed 3: killed" in markdown.render(told.document())
    grown = dataclasses.replace(found, plan=dataclasses.replace(found.plan, grown=(2,)))
    assert "Seeds were added after verdicts had been seen (at 2, 4)" in headline(grown)


def test_the_command(folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(folder, tmp_path / "x", ignore=shutil.ignore_patterns("report"))
    code, out, err = run("report", str(folder), "--json")
    assert code == 0
    assert json.loads(out) == json.loads((folder / "report" / "table.json").read_bytes())
    assert "written to" in err
    code, out, _ = run("report", str(folder), "--l-inf", "1.8", "--alpha", "0.12")
    assert code == 0
    assert "Speed-up by the law L = 1.8" in " ".join(out.split())
    assert twoaxis.report(str(folder)).verdicts["muddformer"] == "resolved (better)"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        for each in FROZEN:
            (KEPT / f"{each}.md").write_text(report_of(each, Path(place)))
