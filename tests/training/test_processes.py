"""Several processes: the same batch as one, the same bits after an interruption, and one folder for all."""

from __future__ import annotations

import datetime
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.processes import alive, children, environment, wait_for
from tests.training.runs import SHAPE, Uneven, free_port, numbers, processes, small
from twoaxis.base.files import claim
from twoaxis.training.checkpoint import checkpoints
from twoaxis.training.engines import processes as launching
from twoaxis.training.engines.engine import Engine
from twoaxis.training.engines.processes import Place
from twoaxis.training.folder import load_log
from twoaxis.training.result import load_result
from twoaxis.training.setup import make_model
from twoaxis.training.train import _check_same, train

RUN: dict[str, Any] = {"batch": 12, "accumulate": 2, "log_every": 1, "device": "cpu", "stream": "deep_delta"}


def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    """Up to the order of summation; the six held-out examples do not divide evenly."""
    train(small(**RUN), tmp_path / "one")
    for fork in processes(small(**RUN), [tmp_path / "two"] * 2):
        assert fork.wait() == 0, fork.text
    one, two = numbers(tmp_path / "one"), numbers(tmp_path / "two")
    for ours, theirs in zip(one, two, strict=True):
        assert ours == {name: pytest.approx(value, rel=1e-4) for name, value in theirs.items()}
    refused = processes(small(**RUN | {"batch": 6}), [tmp_path / "refused"] * 2)
    assert [fork.wait() for fork in refused] == [2, 2]
    assert "accumulate (2) times the 2 processes must divide it" in refused[1].text
    apart = processes(small(**RUN), [tmp_path / "apart"] * 2, lr=0.5)  # other machines have commands of their own
    assert [fork.wait() for fork in apart] == [2, 2]
    assert "process 1 was started otherwise than process 0: lr is 0.5 there and 0.004 here;" in apart[0].text
    with pytest.raises(ValueError, match="parallel is 'fsdp=2' there and None here"):
        _check_same([small(**RUN), small(**RUN, parallel="fsdp=2", threads=3)])


def test_three_processes_repeat_the_same_bits(tmp_path: Path) -> None:
    """From three on, the order in which gradients are added up decides last bits. A signal reaches one process only."""
    config = small(**RUN, steps=30)
    for fork in processes(config, [tmp_path / "whole"] * 3):
        assert fork.wait() == 0, fork.text
    folder = tmp_path / "run"
    forks = processes(config, [folder] * 3)
    forks[0].wait_for(lambda: (folder / "log.jsonl").exists() and len(load_log(folder)) >= 5)
    forks[2].kill(signal.SIGINT)
    assert [fork.wait() for fork in forks] == [130] * 3, forks[0].text
    assert len(checkpoints(folder / "checkpoints")) == 1
    for fork in processes(config, [folder] * 3):
        assert fork.wait() == 0, fork.text
    assert numbers(folder) == numbers(tmp_path / "whole")
    results = [load_result(path) for path in (folder, tmp_path / "whole")]
    assert len({result.weights for result in results if result is not None}) == 1


@pytest.mark.parametrize("resumed", [False, True])
def test_processes_need_one_folder(resumed: bool, tmp_path: Path) -> None:
    config = small(**RUN, steps=2000, save_every=1)
    if resumed:
        forks = processes(config, [tmp_path / "a"] * 2)
        forks[0].wait_for(lambda: bool(checkpoints(tmp_path / "a" / "checkpoints")))
        forks[0].kill(signal.SIGTERM)
        assert [fork.wait() for fork in forks] == [130] * 2
    first, second = processes(config, [tmp_path / "a", tmp_path / "b"])
    assert second.wait() == 2
    assert ("process 1 sees other files in" if resumed else "which process 0 has written: share") in second.text
    first.kill()
    first.wait()
    assert not (tmp_path / "b").exists()


class Counting(Engine):
    """An engine that does not wait for others and counts its passes."""

    passes = 0

    def build(self, make: Any) -> Any:
        model = super().build(make)
        model.register_forward_pre_hook(self.count)
        return model

    def count(self, *_: Any) -> None:
        self.passes += 1

    def _sum(self, values: Tensor) -> Tensor:
        return values


def test_every_process_makes_as_many_held_out_passes() -> None:
    run, scores, passes = small(batch=6, context=16), [], []
    for rank, count in ((0, 1), (0, 3), (1, 3), (2, 3)):
        engine = Counting(run, Place(rank, count, torch.device("cpu")))
        engine.build(lambda: make_model(run, Uneven.vocab_size))
        scores.append(engine.score(Uneven().held_out(7)))  # two each: 2 2 2, then 1 and nothing and nothing
        passes.append(engine.passes)
    whole, *scores = scores
    assert passes[1:] == [2, 2, 2]
    assert [sum(column) for column in list(zip(*scores, strict=True))[:3]] == pytest.approx(whole[:3])
    shares = [[row for row in rows if row is not None] for *_, rows in scores]
    assert [len(share) for share in shares] == [3, 2, 2]  # each process has its own examples, and all have each once
    assert [shares[0][:2], shares[1], shares[2], shares[0][2:]] == [
        pytest.approx(list(whole.rows[start:stop])) for start, stop in ((0, 2), (2, 4), (4, 6), (6, 7))
    ]


def torchrun(out: Path, *words: str) -> subprocess.Popen[Any]:
    """A small run on two processes that torchrun starts."""
    options = {"batch": "4", "context": "24", "eval-examples": "4", "save-every": "4", "device": "cpu", "compile": "no"}
    model = ",".join(f"{name}={value}" for name, value in SHAPE.items())
    line = ["-m", "twoaxis", "train", "--no-measure-memory", "--data", "task:recall:pairs=3", "--model", model]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *line, "--out", str(out), *words]
    launch += [word for name, value in options.items() for word in (f"--{name}", value)]
    with open(f"{out}.txt", "ab") as said:
        streams: dict[str, Any] = {"stdout": said, "stderr": subprocess.DEVNULL}
        return subprocess.Popen(launch, env=environment(), start_new_session=True, **streams)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["dp=2", "fsdp=2"])
def test_nobody_trains_on_without_the_launcher(parallel: str, tmp_path: Path) -> None:
    """Torchrun's own processes save and end when it is killed; nothing is left behind, and nothing hangs."""
    run = torchrun(tmp_path / "run", "--steps", "100000", "--parallel", parallel)
    wait_for(lambda: checkpoints(tmp_path / "run" / "checkpoints"), seconds=300)
    workers = [pid for pid in children(run.pid) if alive(pid)]
    assert len(workers) >= 2
    run.kill()
    run.wait()
    wait_for(lambda: not any(map(alive, workers)), seconds=120)
    assert checkpoints(tmp_path / "run" / "checkpoints")
    assert load_result(tmp_path / "run") is None


def test_processes_whose_launcher_is_gone_do_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Killed before its processes opened their group, torchrun would have been waited for, with the folder claimed."""
    there = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    for name, value in {**there, "TORCHELASTIC_RUN_ID": "gone", "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launching, "FIND", datetime.timedelta(seconds=1))
    monkeypatch.setattr(launching, "_end_with_launcher", lambda number: None)  # it would be that of the tests
    with pytest.raises(ValueError, match="start it again: it goes on from its last checkpoint"):
        train(small(**RUN), tmp_path / "run")
    with claim(tmp_path / "run"):
        capfd.readouterr()  # what torch says of its retries


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["parent", "worker", "group"])
def test_killed_under_torchrun(victim: str, tmp_path: Path) -> None:
    """Whoever is killed, and whatever goes on for a while without it, the same command ends in the same bits."""
    assert torchrun(tmp_path / "whole", "--steps", "480").wait(600) == 0
    assert (tmp_path / "whole.txt").read_text().count("held-out loss") == 1  # of several processes one speaks
    folder, chance, kills = tmp_path / "run", random.Random(victim), 0
    deadline = time.monotonic() + 1200
    while load_result(folder) is None and time.monotonic() < deadline:
        run, seen = torchrun(folder, "--steps", "480"), len(checkpoints(folder / "checkpoints"))
        while kills < 5 and run.poll() is None and len(checkpoints(folder / "checkpoints")) <= min(seen, 1):
            time.sleep(0.02)
        if kills < 5 and run.poll() is None:
            time.sleep(chance.uniform(0.0, 2.0))
            workers = children(run.pid)
            if victim == "group":
                os.killpg(run.pid, signal.SIGKILL)
            else:
                os.kill(run.pid if victim == "parent" or not workers else chance.choice(workers), signal.SIGKILL)
            kills += 1
        run.wait(600)
        time.sleep(1.0)
    assert kills >= 3
    assert numbers(folder) == numbers(tmp_path / "whole")
    results = [load_result(path) for path in (folder, tmp_path / "whole")]
    assert len({result.weights for result in results if result is not None}) == 1
