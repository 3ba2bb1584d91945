"""A run that is killed, stopped or refused a file, and taken up again: the same weights and the same log."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

from tests.training.train_helpers import Fork, numbers, small
from twoaxis.base.files import FileError
from twoaxis.training import checkpoint as saving
from twoaxis.training.config import TrainConfig
from twoaxis.training.results import Result, load_log, load_result
from twoaxis.training.train import Interrupted, train

RUN: dict[str, Any] = {
    "steps": 36,
    "eval_every": 9,
    "save_every": 2,
    "stream": "deep_delta:value_channels=2",
    "mixer": "short_conv",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, list[dict[str, Any]]]:
    """The run nobody interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    result = train(small(**RUN), folder)
    return result, numbers(folder)


def same(folder: Path, whole: tuple[Result, list[dict[str, Any]]]) -> None:
    result, log = whole
    found = load_result(folder)
    assert found is not None
    assert found.weights == result.weights
    assert (found.loss, found.accuracy, found.train_loss) == (result.loss, result.accuracy, result.train_loss)
    assert (found.steps, found.tokens, found.flops) == (result.steps, result.tokens, result.flops)
    assert numbers(folder) == log


def steps_of(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in saving.checkpoints(folder / "checkpoints")]


def kill_at_random(folder: Path, kills: int, seed: int) -> int:
    """How often a run was killed before it came to its end; after `kills` times it is left alone."""
    chance, done = random.Random(seed), 0
    while True:
        run = Fork(small(**RUN), folder)
        if done < kills:
            before = max(steps_of(folder), default=0)
            # a few steps on, so that it comes to its end, then at any moment: in a step, a save, an evaluation
            while run.poll() is None and max(steps_of(folder), default=0) <= before and before < 28:
                time.sleep(0.002)
            run.wait(chance.uniform(0.0, 0.15))
            run.kill()
        code = run.wait()
        if code == 0:
            return done
        assert code == -signal.SIGKILL, run.text
        done += 1


def test_killed_again_and_again(tmp_path: Path, whole: Any) -> None:
    assert kill_at_random(tmp_path / "run", 4, seed=1) >= 3
    same(tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 8))
def test_killed_many_times(tmp_path: Path, whole: Any, seed: int) -> None:
    assert kill_at_random(tmp_path / "run", 12, seed) >= 3
    same(tmp_path / "run", whole)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run killed on its way, with two checkpoints."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    run = Fork(small(**RUN), folder)
    run.wait_for(lambda: max(steps_of(folder), default=0) >= 12)
    run.kill()
    assert run.wait() == -signal.SIGKILL
    assert len(steps_of(folder)) >= 2
    return folder


def truncate(checkpoint: Path) -> None:
    path = checkpoint / saving.WEIGHTS
    os.truncate(path, path.stat().st_size - 7)


def flip(checkpoint: Path) -> None:
    """One bit of one moment: a file that any reader would accept."""
    tensors = load_file(checkpoint / saving.OPTIMIZER)
    name = next(name for name in tensors if name.endswith("exp_avg"))
    tensors[name].view(torch.int32).view(-1)[0] ^= 1
    save_file(tensors, checkpoint / saving.OPTIMIZER)


def cut_state(checkpoint: Path) -> None:
    path = checkpoint / saving.STATE
    path.write_bytes(path.read_bytes()[:-40])


def lose(checkpoint: Path) -> None:
    (checkpoint / saving.RANDOM).unlink()


def empty(checkpoint: Path) -> None:
    for path in checkpoint.iterdir():
        path.unlink()


@pytest.mark.parametrize("damage", [truncate, flip, cut_state, lose, empty])
def test_damaged_checkpoint_is_passed_over(
    damage: Any, stopped: Path, tmp_path: Path, whole: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    newest, before = steps_of(folder)[:2]
    damage(folder / "checkpoints" / f"step-{newest:08d}")
    seen: list[int] = []
    train(small(**RUN), folder, watch=lambda step, loss: seen.append(step))
    assert seen[0] == before
    assert f"step-{newest:08d} is damaged and passed over" in capfd.readouterr().err
    same(folder, whole)


def test_all_checkpoints_damaged_starts_anew(stopped: Path, tmp_path: Path, whole: Any) -> None:
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    for step in steps_of(folder):
        truncate(folder / "checkpoints" / f"step-{step:08d}")
    seen: list[int] = []
    train(small(**RUN), folder, watch=lambda step, loss: seen.append(step))
    assert seen == list(range(37))
    same(folder, whole)


def test_half_written_folder_is_swept(stopped: Path, tmp_path: Path, whole: Any) -> None:
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    newest = folder / "checkpoints" / f"step-{steps_of(folder)[0]:08d}"
    left = folder / "checkpoints" / ".step-00000035.partial-abc"
    shutil.copytree(newest, left)
    with open(folder / "log.jsonl", "a") as log:
        log.write('{"step": 35, "tokens": 1, "lo')  # a line that a kill cut short
    train(small(**RUN), folder)
    assert not left.exists()
    same(folder, whole)


def test_seconds_add_up(stopped: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    before = saving.newest(folder / "checkpoints", print)
    assert before is not None
    result = train(small(**RUN), folder)
    assert result.seconds > before[1]["account"]["seconds"] > 0
    seconds = [record["seconds"] for record in load_log(folder)]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_save_and_stop(number: int, tmp_path: Path, whole: Any) -> None:
    folder = tmp_path / "run"
    config = small(**RUN | {"save_every": None})
    run = Fork(config, folder)
    run.wait_for(lambda: len(load_log(folder)) >= 3 if (folder / "log.jsonl").exists() else False)
    run.kill(number)
    assert run.wait() == 130
    (step,) = steps_of(folder)
    assert 10 <= step < 36
    assert run.text == f"stopped after step {step} of 36; the same command goes on from there\n"
    train(config, folder)
    same(folder, whole)


def test_a_signal_in_the_last_step_is_not_swallowed(tmp_path: Path) -> None:
    config = small(steps=3)

    def stop(step: int, loss: float | None) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="stopped; this run was at its end and its result is saved"):
        train(config, tmp_path, watch=stop)
    result = load_result(tmp_path)
    assert result is not None
    assert (result.status, result.steps) == ("finished", 3)
    assert train(config, tmp_path) == result


def limit() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


def test_no_room_for_a_checkpoint(tmp_path: Path, whole: Any) -> None:
    """A limit on the size of files stands for a full disk."""
    folder = tmp_path / "run"
    run = Fork(small(**RUN), folder, before=limit)
    assert run.wait() == 2
    assert run.text.startswith("FileError: ")
    assert f"{folder / 'checkpoints'}/" in run.text
    assert run.text.endswith("model.safetensors cannot be written: File too large\n")
    assert not list(folder.rglob("*partial*"))
    train(small(**RUN), folder)
    same(folder, whole)


def test_no_room_for_the_model(tmp_path: Path, whole: Any) -> None:
    folder = tmp_path / "run"
    config = small(**RUN | {"save_every": None, "save_model": True})
    run = Fork(config, folder, before=limit)
    assert run.wait() == 2
    assert run.text.startswith(f"FileError: {folder}/")
    assert run.text.endswith("model.safetensors cannot be written: File too large\n")
    assert load_result(folder) is None
    train(config, folder)
    same(folder, whole)
    assert (folder / "model" / "model.safetensors").exists()


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        FileError, match=f"^{tmp_path / 'file' / 'run'} cannot be written: a part of the path is a file"
    ):
        train(small(), tmp_path / "file" / "run")
    if os.getuid() != 0:  # root may write anywhere
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(FileError, match="no permission"):
            train(small(), tmp_path / "closed" / "run")


def test_checkpoints_hold_no_pickle_and_the_configuration(stopped: Path) -> None:
    files = {path.name for path in stopped.rglob("*") if path.is_file()}
    assert files == {
        *("run.json", "log.jsonl", "model.safetensors", "optimizer.safetensors", "random.safetensors"),
        *("state.json", "trainer_state.json"),
    }
    found = saving.newest(stopped / "checkpoints", print)
    assert found is not None
    assert TrainConfig.from_dict(found[1]["config"]) == small(**RUN)
    assert json.loads((found[0] / "trainer_state.json").read_text())["global_step"] == steps_of(stopped)[0]
    tensors = load_file(found[0] / saving.OPTIMIZER)
    assert {name.rpartition("/")[2] for name in tensors} == {"exp_avg", "exp_avg_sq", "step"}
    assert {float(t) for name, t in tensors.items() if name.endswith("/step")} == {float(steps_of(stopped)[0])}


def test_keep(tmp_path: Path) -> None:
    folder, seen = tmp_path / "run", []
    config = small(steps=9, save_every=1, keep=3)
    train(config, folder, watch=lambda step, loss: seen.append(steps_of(folder)))
    assert max(map(len, seen)) == 3
    assert seen[-1] == [8, 7, 6]  # the newest, before the last step is saved
    assert not (folder / "checkpoints").exists()


def test_saved_by_the_clock(tmp_path: Path) -> None:
    folder, seen = tmp_path / "run", []
    train(
        small(steps=6, save_seconds=1e-6),
        folder,
        watch=lambda step, loss: seen.append(max(steps_of(folder), default=0)),
    )
    assert seen == [0, 0, 1, 2, 3, 4, 5]  # a step's checkpoint comes after it was told of
    train(small(steps=6, save_seconds=1e6), tmp_path / "never", watch=lambda step, loss: seen.append(step))
    assert not (tmp_path / "never" / "checkpoints").exists()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = Fork(small(steps=400), folder)
    run.wait_for(lambda: (folder / "log.jsonl").exists())
    with pytest.raises(ValueError, match=f"is in use by another process \\(process {run.pid}\\)"):
        train(small(steps=400), folder)
    run.kill()
    assert run.wait() == -signal.SIGKILL
