"""Models on several processes are the model on one: see `tests.parallel.cases`, which torchrun runs once per count."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from torch import nn

from tests.support.processes import environment
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.parallel.parts import find_parts
from twoaxis.parallel.pipeline import check_pipeline

EXACT = 1e-12
"""In float64: what rounding leaves, and far less than any error of an exchange."""
SINGLE = 2e-6
"""In float32."""


def run(count: int, *words: str) -> list[dict[str, Any]]:
    """Records of all cases of `words` on `count` processes."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    command = [sys.executable, *launch, "-m", "tests.parallel.cases", *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def check(records: list[dict[str, Any]], bound: float) -> None:
    wrong = [record for record in records if not record["error"] < bound]
    assert not wrong, wrong
    for record in records:
        assert record.get("payload") == record.get("planned"), record
        assert not record.get("left"), record


def test_two_processes() -> None:
    """Gradients of every parameter, the loss, and the bytes that cross each boundary against the plan."""
    records = run(2, "shard", "tensor", "interleaved", "--double")
    assert len(records) == 15
    check(records, EXACT)
    sent = {record["case"]["stream"]: record["payload"] for record in records if record["what"] == "interleaved"}
    assert sent["attention_residuals"] == [384, 256, 256]  # 3, 2, 2 vectors of 16 doubles: nothing is sent twice


@pytest.mark.slow
def test_everything_on_two_processes() -> None:
    kinds = ("shard", "recompute", "meta", "tensor", "gpipe", "1f1b", "interleaved", "interleaved-whole")
    records = run(2, *kinds, "--double", "--all")
    assert len(records) > 90 * len(kinds)
    check(records, EXACT)


@pytest.mark.slow
def test_everything_on_four_processes() -> None:
    kinds = ("1f1b", "interleaved", "shard-tensor", "shard-pipeline", "shard-interleaved")
    records = run(4, *kinds, "--double", "--all")
    assert len(records) > 90 * len(kinds)
    check(records, EXACT)


@pytest.mark.slow
def test_grafts_on_two_processes() -> None:
    pytest.importorskip("transformers")
    records = run(2, "graft-shard", "graft-tensor")  # experts have no kernel for float64
    assert len(records) == 8
    check(records, SINGLE)


@pytest.mark.slow
def test_single_precision() -> None:
    check(run(2, "shard", "tensor", "1f1b", "interleaved"), SINGLE)


def test_what_cannot_be_cut_is_refused() -> None:
    for schedule, blocks, stages, virtual, pieces, said in (
        ("1f1b", 6, 4, 1, 4, r"6 blocks cannot be cut into 4 stages; \[1, 2, 3, 6\] stages can"),
        ("interleaved", 8, 2, 1, 4, "virtual of at least 2"),
        ("1f1b", 8, 2, 2, 4, "give interleaved"),
        ("1f1b", 8, 4, 1, 2, "as many micro-batches as the 4 stages, not 2"),
        ("interleaved", 8, 4, 2, 6, "multiples of the 4 stages, not 6"),
    ):
        with pytest.raises(ValueError, match=said):
            check_pipeline(schedule, blocks, stages, virtual, pieces)  # type: ignore[arg-type]


def test_parts_are_found_whatever_their_names() -> None:
    model = Decoder(ModelConfig(hidden_size=16, num_hidden_layers=3))
    parts = find_parts(model)
    assert parts.stream is model.stream
    assert parts.blocks is model.layers
    wrapped = nn.ModuleDict({"backbone": nn.ModuleDict({"h": model.layers}), "stream": model.stream})
    assert find_parts(wrapped).name == "h"
    with pytest.raises(ValueError, match="Linear has no residual stream"):
        find_parts(nn.Linear(2, 2))
