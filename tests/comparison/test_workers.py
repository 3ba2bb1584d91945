"""Processes that train: what they report, how they crash, and that none outlives whoever started it."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.comparison.comparing import FRAGILE, make_options
from tests.support.processes import alive, children, start, wait_for
from twoaxis.base.machine import physical_cores
from twoaxis.base.plugins import fingerprints, use_files
from twoaxis.comparison.workers import Report, ServerGone, Workers, default_jobs, explain
from twoaxis.training.config import TrainConfig
from twoaxis.training.results import load_result
from twoaxis.training.train import train

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("workers")
    (path / "fragile.py").write_text(FRAGILE)
    return path


@pytest.fixture(scope="module")
def workers(place: Path) -> Iterator[Workers]:
    with Workers(place / "output", use=[str(place / "fragile.py")]) as made:
        made.launch()
        yield made
    assert not (place / "output").exists() or any((place / "output").iterdir())


def config(place: Path, **changes: Any) -> TrainConfig:
    options = make_options(place)
    return TrainConfig.from_dict(options | {"threads": 1} | changes)


def follow(workers: Workers, *jobs: int) -> dict[int, list[Report]]:
    """Everything that is reported of some runs."""
    found: dict[int, list[Report]] = {job: [] for job in jobs}

    def ended() -> bool:
        for report in workers.wait(0.1):
            found[report.job].append(report)
        return all(reports and reports[-1].ended for reports in found.values())

    wait_for(ended)
    return found


def test_a_run_in_a_worker_is_the_run(workers: Workers, place: Path) -> None:
    here = train(config(place), place / "here")
    first, second = (workers.start(config(place, seed=seed), place / f"seed-{seed}") for seed in (0, 1))
    found = follow(workers, first, second)
    for job, seed in ((first, 0), (second, 1)):
        last = found[job][-1]
        assert (last.ended, last.error) == (True, None)
        there = load_result(place / f"seed-{seed}")
        assert there is not None
        assert (there.weights == here.weights) == (seed == 0)
        steps = [report.step for report in found[job] if report.step is not None]
        assert steps == sorted(steps)
        assert steps[0] == 0
    assert list((place / "output").iterdir()) == []


def test_a_crash_ends_one_run_and_says_which_way(workers: Workers, place: Path) -> None:
    crashes = {
        "raise": "RuntimeError: fragile streams break",
        "segmentation fault": "crashed with SIGSEGV\n    Fatal Python error: Segmentation fault",
        "exit": "ended with code 7",
    }
    jobs = {how: workers.start(config(place, stream=f"fragile:how={how}"), place / how) for how in crashes}
    good = workers.start(config(place, seed=5), place / "good")
    wrong = workers.start(config(place, stream="deep_dleta"), place / "wrong")
    found = follow(workers, *jobs.values(), good, wrong)
    for how, message in crashes.items():
        last = found[jobs[how]][-1]
        assert last.ended
        assert last.error is not None
        assert last.error.startswith(message)
        assert not last.trouble
        assert load_result(place / how) is None
    assert found[good][-1].error is None
    assert load_result(place / "good") is not None
    assert "did you mean 'deep_delta'" in (found[wrong][-1].error or "")
    kept = [path.read_text() for path in (place / "output").iterdir()]
    assert len(kept) == 4
    assert any("fragile streams break" in text and "Traceback" in text for text in kept)


def test_a_killed_run_and_a_refused_file_are_told_apart(workers: Workers, place: Path) -> None:
    assert workers.server is not None
    job = workers.start(config(place, steps=100_000), place / "long")
    wait_for(lambda: any(report.step for report in workers.wait(0.1)))
    victim = children(workers.server.pid)
    assert len(victim) == 1
    os.kill(victim[0], signal.SIGKILL)
    last = follow(workers, job)[job][-1]
    assert "when memory runs out" in (last.error or "")
    assert not last.trouble
    (place / "file").write_text("")
    job = workers.start(config(place), place / "file" / "run")
    last = follow(workers, job)[job][-1]
    assert last.trouble
    assert "a part of the path is a file" in (last.error or "")


def test_stopping_saves_a_checkpoint(workers: Workers, place: Path) -> None:
    job = workers.start(config(place, steps=100_000, save_every=None), place / "stopped")
    wait_for(lambda: any(report.step for report in workers.wait(0.1)))
    assert workers.stop() == []
    assert job not in workers.running
    assert len(list((place / "stopped" / "checkpoints").glob("step-*"))) == 1


PARENT = """
    import sys
    from twoaxis.training.config import TrainConfig
    from twoaxis.comparison.workers import Workers
    with Workers(sys.argv[1] + "/output") as workers:
        workers.start(TrainConfig.from_dict(dict({config!r})), sys.argv[1] + "/run")
        while True:
            for report in workers.wait(1.0):
                print(report.step, workers.server.pid, flush=True)
"""


@pytest.mark.slow
def test_no_process_outlives_a_killed_parent(place: Path, tmp_path: Path) -> None:
    script = textwrap.dedent(PARENT).format(config=config(place, steps=100_000).to_dict())
    parent = start(str(tmp_path), program=("-c", script), stderr=None)
    assert parent.stdout is not None
    try:
        server = int(parent.stdout.readline().split()[1])
        family = children(parent.pid)
        assert len(family) == 2
        assert family[0] == server
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: not any(alive(pid) for pid in family), seconds=20)


@pytest.mark.slow
def test_a_killed_server_takes_its_runs_along(place: Path, tmp_path: Path) -> None:
    with Workers(tmp_path / "output") as workers:
        workers.start(config(place, steps=100_000), tmp_path / "run")
        assert workers.server is not None
        wait_for(lambda: any(report.step for report in workers.wait(0.1)))
        run = children(workers.server.pid)
        workers.server.kill()
        with pytest.raises(ServerGone, match="the process that starts the runs has ended"):
            follow(workers, 1)
        wait_for(lambda: not any(alive(pid) for pid in run), seconds=20)


def test_ends_are_explained(tmp_path: Path) -> None:
    output = tmp_path / "out.txt"
    output.write_text("\n".join(map(str, range(40))))
    told = explain(-signal.SIGABRT, output).splitlines()
    assert told[0] == "crashed with SIGABRT"
    assert told[1:] == [f"    {number}" for number in range(25, 40)]
    output.write_text("\n".join(["before", "Fatal Python error: Aborted", *map(str, range(40))]))
    assert explain(-signal.SIGABRT, output).splitlines()[1:4] == ["    Fatal Python error: Aborted", "    0", "    1"]
    assert explain(3, tmp_path / "none") == "ended with code 3"
    assert explain(-signal.SIGKILL, tmp_path / "none").startswith("killed by the system, which does this when memory")


def test_cores_and_devices() -> None:
    assert 1 <= physical_cores() <= len(os.sched_getaffinity(0))
    assert default_jobs("cpu") == (physical_cores(), ["cpu"])


def test_files_with_methods_of_ones_own(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("raise KeyError('no')")
    with pytest.raises(ValueError, match=r"own\.py cannot be imported: KeyError: 'no'"):
        use_files([own])
    with pytest.raises(ValueError, match="there is no file"):
        use_files([tmp_path / "none.py"])
    (tmp_path / "own.txt").write_text("")
    with pytest.raises(ValueError, match=r"its name must end in \.py"):
        use_files([tmp_path / "own.txt"])
    before = fingerprints([own])
    own.write_text("count = 1")
    assert fingerprints([own]) != before
    use_files([own])
    own.write_text("raise KeyError('not run twice')")
    use_files([own])
