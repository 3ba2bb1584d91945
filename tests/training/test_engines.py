"""Models in parts on several processes: the same run as in one, resumed on any number of them."""

from __future__ import annotations

import dataclasses
import errno
import signal
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.training.runs import numbers, processes, small
from twoaxis.base.files import FileError
from twoaxis.commands.train_plan import plan_training
from twoaxis.model.load import load_model
from twoaxis.training.checkpoint import checkpoints, wait_for_checkpoint, weights, weights_digest
from twoaxis.training.config import TrainConfig
from twoaxis.training.engines import distributed
from twoaxis.training.engines.processes import Degrees, Place, make_engine
from twoaxis.training.folder import load_log
from twoaxis.training.result import load_result
from twoaxis.training.setup import make_model, model_config
from twoaxis.training.train import train

SHAPE = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
RUN: dict[str, Any] = {"model": {**SHAPE, "intermediate_size": 48}, "batch": 16, "accumulate": 2, "log_every": 1}
RUN |= {"device": "cpu", "stream": "attention_residuals", "save_model": True}
ROUNDING = 2e-5
"""Of losses and norms after a dozen steps."""


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process."""
    folder = tmp_path_factory.mktemp("engines") / "one"
    train(small(**RUN), folder)
    return folder


def same(ours: Path, theirs: Path, rounding: float = ROUNDING) -> None:
    # accuracy counts answers, one of 102 a hundredth: a loss that moves may turn a single one
    answers = 0.011 if rounding > ROUNDING else 0.0
    for mine, other in zip(numbers(ours), numbers(theirs), strict=True):
        bounds = {name: answers if name == "accuracy" else 0.0 for name in other}
        assert mine == {name: pytest.approx(value, rel=rounding, abs=bounds[name]) for name, value in other.items()}


def run_in(count: int, config: TrainConfig, folder: Path) -> None:
    for fork in (forks := processes(config, [folder] * count)):
        assert fork.wait(300) == 0, forks[0].text + fork.text


@pytest.mark.parametrize(
    ("count", "parallel"),
    [
        (2, "fsdp=2"),
        (2, "pp=2,virtual=2,micro_batches=4"),
        pytest.param(2, "tp=2", marks=pytest.mark.slow),
        pytest.param(2, "dp=2", marks=pytest.mark.slow),
        pytest.param(2, "pp=2,schedule=gpipe", marks=pytest.mark.slow),
        pytest.param(4, "dp=2,fsdp=2", marks=pytest.mark.slow),
        pytest.param(4, "fsdp=2,tp=2", marks=pytest.mark.slow),
        pytest.param(4, "dp=2,pp=2", marks=pytest.mark.slow),
        pytest.param(4, "fsdp=2,pp=2,virtual=2,micro_batches=4", marks=pytest.mark.slow),
    ],
)
def test_processes_do_what_one_does(count: int, parallel: str, one: Path, tmp_path: Path) -> None:
    """The log up to rounding, norms of all gradients included; the exported folder holds the weights to the bit."""
    folder = tmp_path / "run"
    run_in(count, small(**RUN, parallel=parallel), folder)
    same(folder, one)
    result: Any = load_result(folder)
    assert weights_digest(weights(load_model(folder / "model", "cpu"))) == result.weights
    assert result.parameters == load_result(one).parameters


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["fsdp=2", "tp=2", "pp=2"])
@pytest.mark.parametrize("changes", [{"dtype": "bfloat16"}, {"recompute": 1}, {"stream": "hyper_connections"}])
def test_precision_and_recomputation(parallel: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config = small(**RUN | changes)
    train(config, tmp_path / "one")
    run_in(2, dataclasses.replace(config, parallel=parallel), tmp_path / "two")
    same(tmp_path / "two", tmp_path / "one", 5e-3 if "dtype" in changes else ROUNDING)


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    """2, then 1, then 4: the losses of one process throughout, and the optimiser goes on."""
    config = small(**RUN, steps=60, eval_every=60)
    train(config, tmp_path / "one")
    folder = tmp_path / "run"
    for count, parallel, until in ((2, "fsdp=2", 10), (1, None, 25), (4, "fsdp=2,pp=2", 40), (2, "tp=2", None)):
        forks = processes(dataclasses.replace(config, parallel=parallel), [folder] * count)
        if until is not None:
            forks[0].wait_for(lambda at=until: (folder / "log.jsonl").exists() and len(load_log(folder)) >= at)
            forks[-1].kill(signal.SIGINT)
        ends = [fork.wait(300) for fork in forks]
        assert ends == [0 if until is None else 130] * count, forks[0].text
        if until is not None:
            (path,) = checkpoints(folder / "checkpoints")[:1]
            assert (path / "shards").is_dir() == (count > 1)
            suffixes = {file.suffix for file in path.rglob("*") if file.is_file()}
            assert suffixes <= {".safetensors", ".json", ".jsonl", ""}
    same(folder, tmp_path / "one", 2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["fsdp=2", "pp=2"])
def test_a_killed_process_ends_the_others_and_the_run_resumes(parallel: str, one: Path, tmp_path: Path) -> None:
    config = small(**RUN, parallel=parallel, save_every=2)
    folder = tmp_path / "run"
    slow = dataclasses.replace(config, steps=2000, eval_every=2000)
    forks = processes(slow, [folder] * 2)
    forks[0].wait_for(lambda: len(checkpoints(folder / "checkpoints")) >= 2)
    forks[1].kill(signal.SIGKILL)
    assert forks[0].wait(120) == 2, forks[0].text
    assert "another process of this run has ended" in forks[0].text
    step = int(checkpoints(folder / "checkpoints")[0].name.removeprefix("step-"))
    forks = processes(slow, [folder] * 2)
    forks[0].wait_for(lambda: len(load_log(folder)) > step + 3)
    forks[0].kill(signal.SIGTERM)
    assert [fork.wait(120) for fork in forks] == [130, 130], forks[0].text


def test_degrees() -> None:
    assert Degrees.read(None, 3) == Degrees(dp=3)
    assert Degrees.read("dp=2,pp=2,virtual=2", 4).pieces == 4
    for wrong, world, said in (
        ("dp=4", 2, "needs 4 processes and there are 2: start it with torchrun --nproc-per-node 4"),
        ("ddp=2", 2, "did you mean 'dp'"),
        ("pp=2,tp=2", 4, "a pipeline goes with dp or fsdp, not with tp"),
        ("fsdp=2,virtual=2", 2, "give pp of at least 2"),
        ("fsdp=0", 1, "at least 1"),
    ):
        with pytest.raises(ValueError, match=said):
            Degrees.read(wrong, world)
    run = small(**RUN)
    for degrees, said in (
        (Degrees(tp=4), r"num_key_value_heads \(2\) cannot be spread over 4 devices; \[1, 2\] can"),
        (Degrees(pp=3), r"4 blocks cannot be cut into 3 stages; \[1, 2, 4\] stages can"),
        (Degrees(pp=2, micro_batches=1), "at least as many micro-batches as the 2 stages"),
        (Degrees(pp=2, virtual=2, micro_batches=6, dp=2), "2 processes times 6 micro-batches must divide it"),
        (Degrees(fsdp=3), "times the 3 processes must divide it"),
    ):
        with pytest.raises(ValueError, match=said):
            degrees.check(run, model_config(run, 40))


def test_a_dry_run_plans_what_each_process_holds() -> None:
    """Parameters are divided by the processes that share them; what does not fit is refused as the run would be."""
    config = small(**RUN)
    alone = plan_training(config, 40)
    halves = plan_training(dataclasses.replace(config, parallel="fsdp=2"), 40)
    assert (alone.processes, alone.held, alone.memory["gathered"]) == (1, alone.parameters, 0)
    assert halves.processes == 2
    assert halves.memory["moments"] == 8 * halves.held
    stages = plan_training(dataclasses.replace(config, parallel="pp=2,virtual=2,micro_batches=4"), 40)
    assert len(stages.boundaries) == 3
    for parallel, options, said in (
        ("pp=3", {}, r"4 blocks cannot be cut into 3 stages; \[1, 2, 4\] stages can"),
        ("tp=2", {"stream": "depth_kv", "model": {**SHAPE, "blend": True}}, "learns how to mix keys and values"),
        ("tp=2", {"model": {**SHAPE, "intermediate_size": 45}}, "45 hidden channels of the MLP cannot be spread over"),
    ):
        with pytest.raises(ValueError, match=said):
            plan_training(dataclasses.replace(config, parallel=parallel, **options), 40)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "parallel",
    ["dp=2", "fsdp=4", "dp=2,fsdp=2", "tp=2", "fsdp=3,tp=2", "pp=4", "fsdp=2,pp=2,virtual=2,micro_batches=4"],
)
def test_the_fullest_process_holds_what_is_planned(parallel: str, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process in turn, in a group that exchanges nothing, builds its part of the model."""
    model = RUN["model"] | {"tie_word_embeddings": tied}
    run = small(**RUN | {"parallel": parallel, "model": model, "batch": 96, "mixer": "canon:set=ABC"})
    for name, none in (("materialise", lambda *_: None), ("count_parameters", lambda _: None)):
        monkeypatch.setattr(distributed, name, none)
    monkeypatch.setattr(dist, "new_group", lambda **_: None)
    planned, held = plan_training(run, 40), []
    for rank in range(planned.processes):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=planned.processes)
        try:
            degrees = Degrees.read(parallel, planned.processes)
            engine = make_engine(run, Place(rank, planned.processes, torch.device("cpu")), degrees)
            local: Any = [
                getattr(p, "_local_tensor", p) for p in engine.build(lambda: make_model(run, 40)).parameters()
            ]
        finally:
            dist.destroy_process_group()
        held.append(sum(part.numel() for part in local))
    assert max(held) == planned.held


def test_a_file_that_one_process_cannot_write_is_named_in_a_line(tmp_path: Path) -> None:
    """torch raises what is no `Exception`, with those of all processes in it."""
    job: Any = SimpleNamespace(folder=SimpleNamespace(checkpoints=tmp_path), saving=Future())
    job.saving.set_exception(CheckpointException("", {1: (OSError(errno.EFBIG, "File too large"), None)}))  # type: ignore[dict-item]
    with pytest.raises(FileError, match=f"{tmp_path} cannot be written: File too large"):
        wait_for_checkpoint(job)
