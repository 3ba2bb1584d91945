"""Comparisons on a cluster: Ray, Slurm, and a second machine that joins. The files are those of one machine."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.comparison.comparing import arguments, make_options, results, start, weights
from tests.support.processes import alive, children, wait_for
from twoaxis.base.files import LEASE, Claimed, claim
from twoaxis.base.machine import hardware, physical_cores
from twoaxis.base.timer import Rounds, Throughput
from twoaxis.comparison.results import Comparison
from twoaxis.comparison.run import WORK, Runs, compare, prepare
from twoaxis.comparison.runner.clusters import RayLauncher, RayOptions, SlurmLauncher
from twoaxis.comparison.runner.launchers import LocalLauncher, default_jobs, find_launcher
from twoaxis.comparison.runner.watch import read_progress
from twoaxis.comparison.runner.worker import FAILED
from twoaxis.comparison.sentences import facts
from twoaxis.training.checkpoint import checkpoints

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")


def asked(folder: Path, **changes: Any) -> dict[str, Any]:
    return make_options(folder, **{"stream": ["denseformer", "deep_delta"], "seeds": 2} | changes)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("launchers")


@pytest.fixture(scope="module")
def expected(place: Path) -> dict[str, str | None]:
    """The weights of every run, made on one machine."""
    compare(asked(place), place / "one", jobs=2)
    return weights(place / "one")


def test_launchers_are_found_by_name_and_refuse_what_they_lack() -> None:
    assert isinstance(find_launcher(None), LocalLauncher)
    assert default_jobs("cpu") == (physical_cores(), ["cpu"])
    made: Any = find_launcher("ray:address=ray://head:10001,gpus=0.5,retries=-1")
    assert isinstance(made, RayLauncher)
    assert made.options == RayOptions(address="ray://head:10001", gpus=0.5, retries=-1)
    assert isinstance(find_launcher("slurm:partition=gpu,gpus=2"), SlurmLauncher)
    for wrong, said in {
        "rai": "did you mean 'ray'",
        "local:gpus=1": "local has no option 'gpus'",
        "slurm:gpu=1": "did you mean 'gpus'",
        "ray:cpus=-1": "cpus",
    }.items():
        with pytest.raises(ValueError, match=said):
            find_launcher(wrong)
    with pytest.raises(ValueError, match="give --jobs"):
        find_launcher("slurm").places(None)
    with pytest.raises(ValueError, match="no sbatch"):
        find_launcher("slurm").start(WORK, Path("."), 1)
    for ends, end in (
        ([(1, "one"), (0, "two")], (0, "two")),  # one that has come to the end knows that all is done
        ([ValueError("lost"), (74, "disk")], (1, "ValueError: lost")),
    ):
        launcher = find_launcher(None)
        launcher.jobs = [Future() for _ in ends]
        assert launcher.ended() is None
        for job, came in zip(launcher.jobs, ends, strict=True):
            job.set_exception(came) if isinstance(came, Exception) else job.set_result(came)
        assert (launcher.ended(), launcher.said) == end


def test_runs_share_out_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 5)
    assert default_jobs(None) == (5, [f"cuda:{number}" for number in range(5)])
    assert default_jobs("cuda", 2) == (2, ["cuda:0,1", "cuda:2,3"])
    assert default_jobs("cuda") == (1, ["cuda"])
    with pytest.raises(ValueError, match="8 processes needs a GPU for each; 5 here"):
        default_jobs(None, 8)


def test_a_folder_that_somebody_works_on_is_joined(place: Path) -> None:
    out, options = place / "together", asked(place, stream=["denseformer"], seeds=1)
    prepare(options, out).save(out)
    with claim(out):
        outcome = compare(options, out, jobs=2)
        with pytest.raises(Claimed, match="can be added when it is done"):
            compare(options | {"stream": ["hyper_connections"]}, out)
    assert (outcome.failed, outcome.missing) == ((), 0)
    found = Comparison.load(out)
    assert list(found.machines.values()) == [2]
    file = next(out.glob("runs/**/run.json"))
    about = json.loads(file.read_text())
    file.write_text(json.dumps(about | {"hardware": about["hardware"] | {"gpus": ["H100"]}}))
    assert f"1 on {about['hardware']['cpu']}, H100" in dict(facts(found))["hardware"]


@pytest.mark.slow
def test_a_second_machine_joins_by_the_same_command(place: Path, expected: dict[str, str | None]) -> None:
    """Both do a part, nothing is done twice, and the one that joined goes on when the other is killed."""
    out, options = place / "joined", asked(place, steps=400, save_every=None)
    words = ["--out", str(out), *arguments(options), "--jobs", "1"]
    first = start(*words)
    wait_for(lambda: (out / "compare.json").exists() and any(out.glob(f"runs/**/{LEASE}")))
    second = start(*words)
    wait_for(lambda: len(list(out.glob(f"runs/**/{LEASE}"))) == 2 or second.poll() is not None)
    assert second.poll() is None, second.communicate()
    family = [first.pid, *children(first.pid)]
    for pid in family:
        os.kill(pid, signal.SIGKILL)
    first.communicate()
    _, said = second.communicate(timeout=300)
    assert second.returncode == 0, said
    assert "joining the comparison" in said
    assert len(weights(out)) == len(expected)
    assert not list(out.glob(f"runs/**/{FAILED}"))


def test_budgets_of_equal_time_are_for_one_kind_of_machine(place: Path) -> None:
    out, speed = place / "time", Throughput(Rounds((1000.0, 1000.0, 1000.0)), None)
    plan = prepare(asked(place, match="time"), out, measure=lambda configs, _: dict.fromkeys(configs, speed))
    dataclasses.replace(plan, about={**plan.about, "hardware": hardware()}).save(out)
    Runs(out).prepare()
    dataclasses.replace(plan, about={**plan.about, "hardware": hardware() | {"cpu": "another"}}).save(out)
    with pytest.raises(ValueError, match=r"is another one \(cpu another -> "):
        Runs(out).prepare()


@pytest.mark.slow
def test_a_run_of_several_processes(place: Path) -> None:
    """The losses of one process, up to rounding, and one that is killed is taken up again; no process is left."""
    options = asked(place, stream=["denseformer"], seeds=1, batch=4, steps=40, save_every=10)
    with pytest.raises(ValueError, match="measured in one process"):
        compare(options | {"parallel": "fsdp=2", "match": "time", "tokens": 96, "steps": None}, place / "refused")
    process = start("--out", str(place / "ranks"), *arguments(options | {"parallel": "fsdp=2"}), "--jobs", "1")
    lease = wait_for(lambda: [p for p in place.glob(f"ranks/runs/**/{LEASE}") if checkpoints(p.parent / "checkpoints")])
    first = int(lease[0].read_text().split("pid=")[1].split()[0])
    (second,) = children(first)
    os.kill(second, signal.SIGKILL)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "another process of this run has ended" in said
    assert "it is tried once more" in said
    assert not alive(first)
    compare(options, place / "alone", jobs=2)
    ours, theirs = results(place / "ranks"), results(place / "alone")
    assert {name: result.loss for name, result in ours.items()} == {
        name: pytest.approx(result.loss, rel=2e-4) for name, result in theirs.items()
    }


@pytest.mark.slow
def test_slurm_jobs_go_back_into_the_queue(place: Path) -> None:
    """Submitit's own executor on this machine. A job that gets the signal of its time's end saves, and goes on."""
    out = place / "slurm"
    launcher = find_launcher("slurm:cluster=local,minutes=30")
    options = asked(place, stream=["denseformer"], seeds=1, steps=400, save_every=None)
    here = threading.Thread(target=lambda: compare(options, out, jobs=2, launcher=launcher))
    here.start()
    wait_for(lambda: out.exists() and len(list(out.glob(f"runs/**/{LEASE}"))) == 2)
    wait_for(lambda: all((read_progress(unit.folder)[1] or 0) > 0 for unit in Runs(out).units()))
    job: Any = launcher.jobs[0]
    family = children(job._process.pid)
    os.kill(family[0], signal.SIGUSR2)
    here.join(timeout=600)
    assert not here.is_alive()
    assert len(weights(out)) == 2
    assert any("equeued" in path.read_text() for path in (out / ".slurm").glob("*_log.*"))
    assert not any(map(alive, family))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Ray head and two nodes on this machine; runs are on the nodes."""
    from ray.cluster_utils import Cluster

    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 10**8})
    for _ in range(2):
        made.add_node(num_cpus=1, object_store_memory=10**8)
    yield made
    made.shutdown()


@pytest.mark.slow
def test_ray_runs_the_same_comparison(place: Path, expected: dict[str, str | None], cluster: Any) -> None:
    launcher = find_launcher(f"ray:address={cluster.address}")
    compare(asked(place), place / "ray", launcher=launcher)
    assert weights(place / "ray") == expected


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker", "node"])
def test_ray_takes_up_what_a_dead_worker_or_node_leaves(place: Path, cluster: Any, victim: str) -> None:
    """Both runs are under way when one of them loses its Ray worker, or its whole node; it is taken up elsewhere."""
    out = place / f"ray-{victim}"
    options = asked(place, stream=["denseformer"], steps=600, save_every=50, seeds=1)
    here = threading.Thread(
        target=lambda: compare(options, out, jobs=2, launcher=find_launcher(f"ray:address={cluster.address}"))
    )
    here.start()
    wait_for(lambda: len(list(out.glob(f"runs/**/{LEASE}"))) == 2, seconds=300)
    wait_for(lambda: all((read_progress(unit.folder)[1] or 0) > 0.05 for unit in Runs(out).units()), seconds=300)
    lease = next(out.glob(f"runs/**/{LEASE}"))
    run = int(lease.read_text().split("pid=")[1].split()[0])
    ours = parent(run)
    rays = parent(ours)
    if victim == "worker":
        os.kill(rays, signal.SIGKILL)
    else:
        raylet = parent(rays)
        (node,) = [n for n in cluster.worker_nodes if raylet in {p.process.pid for p in n.all_processes["raylet"]}]
        cluster.remove_node(node, allow_graceful=False)
    wait_for(lambda: not any(map(alive, (run, ours, rays))), seconds=60)
    assert not (lease.parent / "result.json").exists()
    here.join(timeout=400)
    assert not here.is_alive()
    assert len(weights(out)) == 2
