"""Our decoder in torchtitan's trainer, on gloo processes; `make test-torchtitan` runs it where torchtitan is installed.

What is run: `Trainer` from its configuration to its last step, with the model's spec, FSDP2, 1F1B and interleaved
pipelines, gradient accumulation, activation checkpointing, clipping, bfloat16, AdamW, and saving in the
layout of transformers. What is not: GPUs and with them NCCL, CUDA graphs and compiled kernels.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan")

from tests.support.processes import environment
from tests.torchtitan.cases import CASES, SHAPE, STEPS


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("torchtitan")
    found: dict[str, Any] = {"folder": folder}
    for count in sorted({case.processes for case in CASES}):
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        command = [sys.executable, *launch, "-m", "tests.torchtitan.steps", str(folder)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=900)
        records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
        assert done.returncode == 0, f"after {[record['case'] for record in records]}: {done.stderr[-6000:]}"
        for record in records:
            print(f"ran {record['case']}: {count} gloo processes, {STEPS} steps of torchtitan's trainer", flush=True)
            found[record["case"]] = record
    return found


@pytest.mark.parametrize("case", CASES[1:], ids=lambda case: case.name)
def test_every_degree_trains_as_one_process(case: Any, runs: dict[str, Any]) -> None:
    mine, alone = runs[case.name], runs["one"]
    narrow = case.dtype != "float32"
    assert [loss for loss, _ in mine["log"]] == [
        pytest.approx(loss, rel=1e-2 if narrow else 2e-6) for loss, _ in alone["log"]
    ]
    assert mine["sums"] == {
        name: pytest.approx(total, rel=0.2 if narrow else 1e-4) for name, total in alone["sums"].items()
    }
    if not narrow and "pipeline_parallel_degree" not in case.parallel:  # which counts what stages share once for each
        assert [norm for _, norm in mine["log"]] == [pytest.approx(norm, rel=1e-5) for _, norm in alone["log"]]


def test_the_saved_folder_is_the_model(runs: dict[str, Any]) -> None:
    """Names and sums of the weights, in the folder that transformers opens."""
    from twoaxis.model.config import ModelConfig
    from twoaxis.model.save import load_decoder, read_config

    (place,) = [path.parent for path in Path(runs["folder"]).glob("fsdp/checkpoint/*/config.json")]
    assert read_config(place / "config.json") == ModelConfig(**SHAPE)
    (file,) = place.glob("*.safetensors")  # the shards it was put together from lie in a folder below
    file.rename(place / "model.safetensors")
    sums = {name: float(p.detach().double().abs().sum()) for name, p in load_decoder(place).named_parameters()}
    assert sums == {name: pytest.approx(total, rel=1e-6) for name, total in runs["fsdp"]["sums"].items()}


def test_what_is_not_offered_is_refused_by_name(tmp_path: Path) -> None:
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.config import ParallelismConfig

    from tests.torchtitan.steps import config

    for change, said in (
        ({"parallelism": ParallelismConfig()}, "spmd_backend spmd_types; give partial_dtensor"),
        ({"loss": ChunkedLossWrapper.Config}, "ChunkedLossWrapper"),
        ({"parallelism": ParallelismConfig(spmd_backend="partial_dtensor", context_parallel_degree=2)}, "context_par"),
        ({"parallelism": ParallelismConfig(spmd_backend="partial_dtensor", tensor_parallel_degree=2)}, "tensor_par"),
    ):
        asked = config(tmp_path, CASES[0])
        for name, value in change.items():
            made = value(loss_fn=asked.loss) if name == "loss" else value
            setattr(asked, name, made)
        with pytest.raises(ValueError, match=said):
            asked.model_spec.model.update_from_config(config=asked)
