"""A run that is killed, stopped, damaged or refused a file, and then resumed: the same weights and the same log."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.training.runs import Broken, Fork, numbers, small
from twoaxis.base.files import LEASE, FileError, JsonLines
from twoaxis.base.interrupt import SIGNALS, Interrupted
from twoaxis.training import checkpoint as saving
from twoaxis.training.config import TrainConfig
from twoaxis.training.folder import RunFolder
from twoaxis.training.result import Result, load_result
from twoaxis.training.train import train

RUN: dict[str, Any] = {
    "steps": 36,
    "eval_every": 9,
    "save_every": 2,
    "stream": "deep_delta:value_channels=2",
    "mixer": "short_conv",
}
Whole = tuple[Result, list[dict[str, Any]]]


def undisturbed(folder: Path, **changes: Any) -> Whole:
    """The run that nobody interrupts."""
    return train(small(**RUN | changes), folder), numbers(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return undisturbed(tmp_path_factory.mktemp("whole"))


def same(folder: Path, whole: Whole) -> None:
    """Everything that does not depend on the clock is that of the undisturbed run."""
    result, log = whole
    found: Any = load_result(folder)
    clock = {name: getattr(result, name) for name in ("seconds", "tokens_per_second")}
    assert dataclasses.replace(found, **clock) == result
    assert numbers(folder) == log
    assert not list(folder.rglob("*partial*"))


def steps_of(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in saving.checkpoints(folder / "checkpoints")]


def place(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}"


# killed


@pytest.mark.parametrize(("kills", "steps"), [(5, 36), pytest.param(50, 240, marks=pytest.mark.slow)])
def test_killed_again_and_again(kills: int, steps: int, tmp_path: Path) -> None:
    whole = undisturbed(tmp_path / "whole", steps=steps)
    folder, chance, done = tmp_path / "run", random.Random(kills), 0
    while True:
        run = Fork(small(**RUN | {"steps": steps}), folder)
        if done < kills:
            before = max(steps_of(folder), default=0)
            # a few steps on, so that it comes to its end, then at any moment: in a step, a save, an evaluation
            while run.poll() is None and max(steps_of(folder), default=0) <= before:
                time.sleep(0.002)
            run.wait(chance.uniform(0.0, 0.1))
            run.kill()
        if run.wait() == 0:
            break
        assert run.code == -signal.SIGKILL, run.text
        done += 1
    assert done >= kills - 2
    same(folder, whole)


WRITES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.truncate")


def die_before(number: int, folder: Path) -> Callable[[], None]:
    """End a process, as a kill does, before it changes something in `folder` for the `number`-th time."""
    left = number

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        opened = event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)
        wrote = event in WRITES or opened
        if wrote and str(arguments[0]).startswith(str(folder)):
            left -= 1
            if left == 0:
                os._exit(9)

    return lambda: sys.addaudithook(watch)


@pytest.mark.parametrize("stride", [17, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_before_each_file_operation(stride: int, tmp_path: Path) -> None:
    """Of the start, of each save, of the log, the final model and the result."""
    changes = {"steps": 6, "save_every": 3, "keep": 1, "log_every": 2, "save_model": True}
    whole, config = undisturbed(tmp_path / "whole", **changes), small(**RUN | changes)
    files = {path.name for path in (tmp_path / "whole" / "model").iterdir()}
    number, killed = 1 - stride, True
    while killed:
        number += stride
        folder = tmp_path / str(number)
        run = Fork(config, folder, before=die_before(number, folder))
        killed = run.wait() == 9
        assert killed or run.code == 0, run.text
        train(config, folder)
        same(folder, whole)
        assert {path.name for path in (folder / "model").iterdir()} == files
    assert number > 50


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


@pytest.fixture
def half(stopped: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(stopped, tmp_path / "run"))


# damaged


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def edit(old: str, new: str) -> Callable[[Path], None]:
    """Change the first occurrence in state.json."""

    def change(checkpoint: Path) -> None:
        text = (checkpoint / saving.STATE).read_text()
        assert old in text
        (checkpoint / saving.STATE).write_text(text.replace(old, new, 1))

    return change


def cut(name: str, count: int) -> Callable[[Path], None]:
    return lambda checkpoint: os.truncate(checkpoint / name, (checkpoint / name).stat().st_size - count)


def clear(checkpoint: Path) -> None:
    for path in checkpoint.iterdir():
        path.unlink()


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "weights cut": cut(saving.WEIGHTS, 7),
    "moment changed in one bit": lambda at: flip(at / saving.OPTIMIZER, 99_999),
    "generators lost": lambda at: (at / saving.RANDOM).unlink(),
    "state cut": cut(saving.STATE, 40),
    "another step": edit('"step": 1', '"step": 0'),
    "another number of steps": edit('"steps": 36', '"steps": 14'),
    "another sum of losses": edit('"logged_loss": ', '"logged_loss": 1'),
    "log holed": lambda at: (at / saving.LOG).write_bytes(b"\n".join((at / saving.LOG).read_bytes().split(b"\n")[1:])),
    "sums emptied": lambda at: (at / saving.SUMS).write_text(""),
    "sums lost": lambda at: (at / saving.SUMS).unlink(),
    "everything lost": clear,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoint_is_passed_over(damage: str, half: Path) -> None:
    newest, before = steps_of(half)[:2]
    DAMAGE[damage](place(half, newest))
    said: list[str] = []
    assert saving.newest_checkpoint(half / "checkpoints", small(**RUN).key, said.append).step == before
    (line,) = said
    assert line.startswith(f"step-{newest:08d} is damaged and passed over")


def test_no_bit_of_a_checkpoint_changes_unnoticed(half: Path) -> None:
    checkpoint, chance = place(half, steps_of(half)[0]), random.Random(0)
    key = small(**RUN).key
    assert saving.read_checkpoint(checkpoint, key).step == steps_of(half)[0]
    for path in sorted(checkpoint.iterdir()):
        for _ in range(60):
            bit = chance.randrange(8 * path.stat().st_size)
            flip(path, bit)
            with pytest.raises(ValueError, match="the files are not those"):
                saving.read_checkpoint(checkpoint, key)
            flip(path, bit)
    with pytest.raises(ValueError, match="of another run"):
        saving.read_checkpoint(checkpoint, small(**RUN | {"seed": 1}).key)
    saving.read_checkpoint(checkpoint, key)


@pytest.mark.parametrize(
    ("name", "tensor", "change"),
    [
        (saving.OPTIMIZER, "embed_tokens.weight/exp_avg", lambda tensor: tensor[:1]),
        (saving.OPTIMIZER, "embed_tokens.weight/step", lambda tensor: tensor.expand(2).clone()),
        (saving.WEIGHTS, "embed_tokens.weight", lambda tensor: tensor[:1]),
    ],
    ids=["moment", "count", "weight"],
)
def test_a_checkpoint_of_another_model_is_refused_by_name(name: str, tensor: str, change: Any, half: Path) -> None:
    """Its sums fit, so it is not damaged; torch would take such a moment and fail in the first step, or expand it."""
    newest = place(half, steps_of(half)[0])
    tensors = load_file(newest / name)
    tensors[tensor] = change(tensors[tensor])
    save_file(tensors, newest / name)
    (newest / saving.SUMS).write_text(saving._sums(newest))
    with pytest.raises(ValueError, match=f"{newest} does not fit the model: {tensor} has the shape"):
        train(small(**RUN), half)


def test_without_a_sound_checkpoint_it_starts_from_the_beginning(
    half: Path, whole: Whole, capfd: pytest.CaptureFixture[str]
) -> None:
    for step in steps_of(half):
        with contextlib.suppress(FileNotFoundError):  # the kill may have come while the oldest one was removed
            DAMAGE["weights cut"](place(half, step))
    seen: list[int] = []
    train(small(**RUN), half, on_step=lambda step, loss: seen.append(step))
    assert seen == list(range(37))
    assert "no checkpoint is left to go on from: the run starts from the beginning" in capfd.readouterr().err
    same(half, whole)


def test_a_damaged_checkpoint_does_not_displace_a_sound_one(
    half: Path, whole: Whole, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run goes on from the one before, and keeps that until there is a newer one."""
    newest, before = steps_of(half)[:2]
    DAMAGE["moment changed in one bit"](place(half, newest))
    seen: list[tuple[int, list[int]]] = []
    config = small(**RUN | {"save_every": 1, "keep": 1})
    train(config, half, on_step=lambda step, loss: seen.append((step, steps_of(half))))
    assert f"step-{newest:08d} is damaged and passed over" in capfd.readouterr().err
    step, kept = seen[0]
    assert (step, before in kept, newest in kept, seen[2][1][0]) == (before, True, False, before + 1)
    same(half, whole)


LOGS: dict[str, Callable[[Path], Any]] = {
    "a line lost": lambda log: log.write_bytes(b"\n".join(log.read_bytes().split(b"\n")[1:])),
    "a bit changed": lambda log: flip(log, 100),
    "cut": lambda log: os.truncate(log, 20),
    "lost": lambda log: log.unlink(),
}


@pytest.mark.parametrize("damage", LOGS)
def test_a_holed_log_is_made_whole(damage: str, half: Path, whole: Whole, capfd: pytest.CaptureFixture[str]) -> None:
    LOGS[damage](half / "log.jsonl")
    folder = RunFolder(half)
    folder.restore_log(saving.newest_checkpoint(folder.checkpoints, small(**RUN).key, pytest.fail))
    assert "log.jsonl has lost or changed lines; they are restored" in capfd.readouterr().err
    assert numbers(half) == [record for record in whole[1] if record["step"] <= steps_of(half)[0]]


def test_half_written_files_are_removed(half: Path, whole: Whole, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(place(half, steps_of(half)[0]), half / "checkpoints" / ".step-00000035.partial-abc")
    with open(half / "log.jsonl", "a") as log:
        log.write('{"step": 35, "tokens": 1, "lo')  # a line that a kill cut short
    train(small(**RUN), half)
    assert capfd.readouterr().err == ""
    same(half, whole)


# stopped


@pytest.mark.parametrize("number", [signal.SIGINT, *(pytest.param(n, marks=pytest.mark.slow) for n in SIGNALS[1:])])
def test_signals_save_and_stop(number: int, tmp_path: Path, whole: Whole) -> None:
    folder = tmp_path / "run"
    config = small(**RUN | {"save_every": None})
    run = Fork(config, folder)
    run.wait_for(lambda: len(JsonLines(folder / "log.jsonl").read()) >= 3)
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
        train(config, tmp_path, on_step=stop)
    result: Any = load_result(tmp_path)
    assert (result.status, result.steps) == ("finished", 3)
    assert train(config, tmp_path) == result


# refused


@pytest.mark.parametrize("changes", [{}, {"save_every": None, "save_model": True}], ids=["checkpoint", "model"])
def test_no_space(changes: dict[str, Any], tmp_path: Path, whole: Whole) -> None:
    """A limit on the size of files stands for a full disk."""
    folder, config = tmp_path / "run", small(**RUN | changes)
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    run = Fork(config, folder, before=limit)
    assert run.wait() == 2
    assert run.text.startswith(f"FileError: {folder}/")
    assert run.text.endswith("model.safetensors cannot be written: File too large\n")
    assert load_result(folder) is None
    train(config, folder)
    same(folder, whole)
    assert (folder / "model" / "model.safetensors").exists() == config.save_model


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=f"^{tmp_path / 'file' / 'run'}.* a part of the path is a file"):
        train(small(), tmp_path / "file" / "run")
    if os.getuid() != 0:  # root may write anywhere
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(FileError, match="no permission"):
            train(small(), tmp_path / "closed" / "run")


def test_what_a_checkpoint_holds(stopped: Path) -> None:
    """No pickle, and the configuration."""
    files = {path.name for path in stopped.rglob("*") if path.is_file() and path.name != LEASE}
    tensors = {saving.WEIGHTS, saving.OPTIMIZER, saving.RANDOM}
    assert files == tensors | {"run.json", saving.LOG, saving.STATE, saving.SUMS}
    newest = steps_of(stopped)[0]
    state = json.loads((place(stopped, newest) / saving.STATE).read_text())
    assert TrainConfig.from_dict(state["config"]) == small(**RUN)
    moments = load_file(place(stopped, newest) / saving.OPTIMIZER)
    assert {name.rpartition("/")[2] for name in moments} == {"exp_avg", "exp_avg_sq", "step"}
    assert {float(t) for name, t in moments.items() if name.endswith("/step")} == {float(newest)}


def test_keep(tmp_path: Path) -> None:
    folder, seen = tmp_path / "run", []
    train(small(steps=9, save_every=1, keep=3), folder, on_step=lambda step, loss: seen.append(steps_of(folder)))
    assert max(map(len, seen)) == 3
    assert seen[-1] == [8, 7, 6]  # the newest, before the last step is saved
    assert not (folder / "checkpoints").exists()


def test_the_clock_starts_anew_after_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves on by a second in each step."""
    now, seen = [0.0], []

    def on_step(step: int, loss: float | None) -> None:
        now[0] += loss is not None
        seen.append(max(steps_of(tmp_path), default=0))

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    train(small(steps=12, save_seconds=2.5), tmp_path, on_step=on_step)
    assert seen == [0, *[0] * 4, *[4] * 4, *[8] * 4]


def test_random_numbers_go_on(tmp_path: Path) -> None:
    """What a run draws after a checkpoint does not depend on whether it was interrupted there."""
    drawn: dict[str, dict[int, float]] = {"whole": {}, "run": {}}

    def draw(name: str, stop: int | None = None) -> Callable[[int, float | None], None]:
        def on_step(step: int, loss: float | None) -> None:
            if step == stop:
                raise Broken
            if loss is not None:
                drawn[name][step] = torch.rand(()).item()

        return on_step

    config = small(steps=6, save_every=2)
    train(config, tmp_path / "whole", on_step=draw("whole"))
    with pytest.raises(Broken):
        train(config, tmp_path / "run", on_step=draw("run", stop=5))
    train(config, tmp_path / "run", on_step=draw("run"))
    assert drawn["run"] == drawn["whole"]


def test_one_process_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = Fork(small(steps=400), folder)
    run.wait_for(lambda: (folder / "log.jsonl").exists())
    with pytest.raises(ValueError, match=f"in use by .*process {run.pid}"):
        train(small(steps=400), folder)
    run.kill()
    assert run.wait() == -signal.SIGKILL
