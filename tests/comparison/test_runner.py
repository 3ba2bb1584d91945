"""The runner: what a coordinator reads from files, how runs crash, and that none outlives whoever started it."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.comparison.comparing import FRAGILE, make_options
from tests.support.processes import alive, children, environment, wait_for
from twoaxis.base.files import claim
from twoaxis.base.progress import Progress as Bar
from twoaxis.comparison.plan import Plan
from twoaxis.comparison.run import WORK, Runs, prepare
from twoaxis.comparison.runner.launchers import LocalLauncher
from twoaxis.comparison.runner.watch import Watch, read_progress
from twoaxis.comparison.runner.worker import FAILED, OUTPUT, PROGRESS, Progress, explain, in_children, read_failure
from twoaxis.training.result import load_result
from twoaxis.training.train import train

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runner")
    (path / "fragile.py").write_text(FRAGILE)
    return path


def plan_in(out: Path, place: Path, **changes: Any) -> Plan:
    """A planned comparison of which nothing is done."""
    plan = prepare(make_options(place, **{"stream": ["denseformer"], "seeds": 1} | changes), out)
    plan.save(out)
    return plan


def launched(out: Path, jobs: int = 2, use: tuple[str, ...] = ()) -> LocalLauncher:
    launcher = LocalLauncher()
    launcher.start(WORK, out, jobs, use)
    return launcher


@pytest.mark.usefixtures("started_anew")
def test_a_worker_does_what_train_does_and_says_how_others_end(place: Path) -> None:
    """A good run, two that crash in their own way, one whose folder another process has, all by one worker."""
    out, own = place / "mixed", str(place / "fragile.py")
    crashes = {
        "raise": "RuntimeError: fragile streams break",
        "segmentation fault": "crashed with SIGSEGV\n    Fatal Python error: Segmentation fault",
        "exit": "ended with code 7",
    }
    streams = [f"fragile:how={how},label={how}" for how in crashes]
    plan = plan_in(out, place, stream=[*streams, "denseformer"], use=[own])
    units = {unit.name.split(",")[0]: unit for unit in Runs(out).units()}
    launcher = LocalLauncher()
    try:
        with claim(units["denseformer"].folder):
            launcher.start(WORK, out, 2, [own])
            wait_for(lambda: all(read_failure(units[how].folder).tries == 2 for how in crashes))
            time.sleep(1)  # leased folders come last: it has tried this one by now
            assert launcher.ended() is None  # it waits for the folder
            assert load_result(units["denseformer"].folder) is None
        assert wait_for(lambda: launcher.ended() is not None)
        assert launcher.ended() == 0, launcher.said
    finally:
        launcher.close()
    for how, message in crashes.items():
        assert read_failure(units[how].folder).message.startswith(message)
        assert load_result(units[how].folder) is None
    assert "Traceback" in (units["raise"].folder / OUTPUT).read_text()
    assert load_result(units["denseformer"].folder) is not None  # waited for and then done
    assert not (units["denseformer"].folder / FAILED).exists()
    there: Any = load_result(units["standard"].folder)
    assert there.weights == train(plan.config(plan.runs()[0]), place / "here").weights


def test_a_run_that_is_killed_is_taken_up_and_a_stopped_one_saves(place: Path) -> None:
    out = place / "killed"
    plan_in(out, place, steps=100_000, save_every=None, seeds=1)
    first, second = Runs(out).units()
    launcher = launched(out, jobs=2)
    try:
        worker = launcher.jobs[0].process.pid
        wait_for(lambda: all((read_progress(unit.folder)[1] or 0) > 0 for unit in (first, second)))
        runs = children(worker)
        assert len(runs) == 2
        assert Path(f"/proc/{worker}/status").read_text().split("Threads:")[1].split()[0] == "1"
        os.kill(runs[0], signal.SIGKILL)
        found = wait_for(lambda: [it for unit in (first, second) if (it := read_failure(unit.folder)).tries])[0]
        assert "when memory runs out" in found.message
        assert found.tries == 1
        wait_for(lambda: len(children(worker)) == 2)
        wait_for(lambda: all((read_progress(unit.folder)[1] or 0) > 0 for unit in (first, second)))
        time.sleep(1)
        launcher.stop()
        assert launcher.ended() == 0
        saved = [len(list((unit.folder / "checkpoints").glob("step-*"))) for unit in (first, second)]
        assert max(saved) == 1
    finally:
        launcher.close()


@pytest.mark.parametrize("victim", ["coordinator", "worker"])
def test_no_process_outlives_a_killed_one(place: Path, victim: str) -> None:
    out = place / f"orphans-{victim}"
    plan_in(out, place, steps=100_000)
    script = (
        "import sys, time; from pathlib import Path; from twoaxis.comparison.runner.launchers import LocalLauncher\n"
        f"made = LocalLauncher(); made.start({WORK!r}, Path(sys.argv[1]), 2); time.sleep(600)"
    )
    family: list[int] = []
    with subprocess.Popen([sys.executable, "-c", script, str(out)], env=environment()) as parent:
        try:
            units = Runs(out).units()
            wait_for(lambda: all(read_progress(unit.folder)[1] is not None for unit in units))
            family = children(parent.pid)
            assert len(family) == 3
            os.kill(parent.pid if victim == "coordinator" else family[0], signal.SIGKILL)
            wait_for(lambda: not any(alive(pid) for pid in family), seconds=20)
        finally:
            parent.kill()
            for pid in filter(alive, family):
                os.kill(pid, signal.SIGKILL)


def test_a_refused_file_ends_everything(place: Path) -> None:
    out = place / "refused"
    plan_in(out, place, seeds=3)
    units = Runs(out).units()
    (units[0].folder / "run.json").mkdir(parents=True)
    launcher = launched(out, jobs=1)
    try:
        wait_for(lambda: launcher.ended() is not None)
        assert launcher.ended() == 74, launcher.said
        assert "run.json cannot be read: Is a directory" in launcher.said
    finally:
        launcher.close()
    assert read_failure(units[0].folder).tries == 2  # it is not tried again
    assert not any(unit.folder.exists() for unit in units[1:])


def test_the_bar_counts_work_and_names_losses(place: Path) -> None:
    """Progress, failures and results, from nothing but files."""
    out, said = place / "shown", io.StringIO()
    plan_in(out, place, seeds=2, steps=40)
    watch = Watch(Runs(out), console=Console(file=said, width=400))
    bar = Bar("compare", round(sum(unit.size for unit in watch.units)), "MFLOP", console=watch.console)
    first, second, *_ = watch.units
    for unit in watch.units:
        unit.folder.mkdir(parents=True)
    tell = Progress(first.folder)
    tell(0.5, "")  # resumed in the middle
    watch._look(bar)
    assert bar.done == bar.initial == pytest.approx(first.size / 2, abs=1)
    tell.told = 0.0
    tell(0.75, "loss 2.500")
    watch._look(bar)
    assert bar.done - bar.initial == pytest.approx(first.size / 4, abs=1)
    assert bar.note == f"0 of 4 runs  {first.name}: loss 2.500"
    for tries in (1, 2):
        (first.folder / FAILED).write_text(json.dumps({"message": "no reason", "tries": tries}))
        if tries == 1:
            watch._look(bar)
            assert bar.done == 0
            assert not (first.folder / PROGRESS).exists()
    plan = Runs(out).plan()
    train(plan.config(plan.runs()[1]), second.folder)
    watch._look(bar)
    assert bar.done == round(second.size)
    lines = said.getvalue().splitlines()
    assert lines[:2] == [f"{first.name}: no reason", "  it is tried once more"]
    assert f"{first.name} failed: no reason" in lines
    assert any(line.startswith(f"1/4  {second.name}: loss ") for line in lines)


def test_ends_are_explained(tmp_path: Path) -> None:
    output, none, many = tmp_path / "out.txt", tmp_path / "none", [*map(str, range(40))]
    output.write_text("\n".join(many))
    last = [f"    {number}" for number in range(25, 40)]
    assert explain(-signal.SIGABRT, output).splitlines() == ["crashed with SIGABRT", *last]
    output.write_text("\n".join(["before", "Fatal Python error: Aborted", *many]))
    assert explain(-signal.SIGABRT, output).splitlines()[1:4] == ["    Fatal Python error: Aborted", "    0", "    1"]
    assert explain(3, none) == "ended with code 3"
    assert explain(-signal.SIGKILL, none).startswith("killed by the system, which does this when memory")


@pytest.mark.parametrize("jobs", [1, 3])
def test_what_children_return_and_what_becomes_of_their_crashes(jobs: int) -> None:
    made = in_children(
        [
            lambda: time.sleep(0.2) or {"a": (1, 2.5)},
            lambda: 1 / 0,
            lambda: os._exit(3),
            lambda: os.kill(os.getpid(), signal.SIGSEGV),
            lambda: 7,
        ],
        jobs,
    )
    assert made == [{"a": (1, 2.5)}, None, None, None, 7]


def test_children_run_at_once() -> None:
    meet = multiprocessing.get_context("fork").Barrier(2)
    assert sorted(in_children([lambda: meet.wait(60)] * 2, 2)) == [0, 1]
