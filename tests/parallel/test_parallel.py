"""Models on several processes are the model on one: see `tests.parallel.cases`, which torchrun runs once per count."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tests.parallel.cases import GRAFTS, SHAPE, SINGLE, backward, batch, cases, grafts, make
from tests.support.forks import Forked
from tests.support.processes import environment
from tests.training.runs import free_port
from twoaxis.depth.registry import stream_names
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.model.stages import boundaries, plan
from twoaxis.parallel.pipeline import Pipeline, check_pipeline
from twoaxis.parallel.shard import find_blocks
from twoaxis.parallel.tensor import spread_plan

EXACT = 1e-12
"""In float64: what rounding leaves, and far less than any error of an exchange."""


def run(count: int, *words: str, module: str = "tests.parallel.cases") -> list[dict[str, Any]]:
    """Records that a module prints on `count` processes.

    A rank died of SIGSEGV once, for a reason that is not known, and it was not seen again: such a run is told, with the
    lines that were being executed, and repeated once.
    """
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)] if count > 1 else []
    command = [sys.executable, *launch, "-m", module, *words]
    start = partial(subprocess.run, command, env=environment(), capture_output=True, text=True, timeout=3600)
    done = start()
    if "Signal 11" in done.stderr:
        warnings.warn(f"a rank died of SIGSEGV after {done.stdout[-300:]!r}:\n{done.stderr[:6000]}", stacklevel=2)
        done = start()
    assert done.returncode == 0, done.stderr[-4000:]
    return read(done.stdout)


def read(printed: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed.splitlines() if line.startswith('{"')]


MIXED = "learns how to mix keys and values, whose heads tp spreads; use fsdp"
HIDDEN = "mlp has no projections of its own for hidden: they are inside experts"


def check(records: list[dict[str, Any]], count: int) -> None:
    """Errors and bytes of all records, of which there are so many; what is refused, and nothing else, is refused.

    Where a float32 gradient of one process is off the exact one, two sides may be off.
    """
    assert len(records) == count
    for record in records:
        wanted = refused(record["what"], **record["case"])
        assert (wanted or "") in record.get("refused", ""), record
        assert (wanted is None) == ("refused" not in record), record
        if wanted is None:
            assert record["error"] < EXACT or record.get("roundings", 2.0) < 2.0, record
            assert record.get("payload") == record.get("planned"), record
            assert not record.get("left"), record


def refused(what: str, **case: Any) -> str | None:
    """Why a case is refused: heads that a stream learns to mix are not spread, and experts have no hidden channels."""
    over, options = case.get("stream_options", {}).get("over"), case.get("mixer_options", {})
    if "tensor" in what and (over == "heads" or (case.get("stream"), case.get("blend")) == ("depth_kv", True)):
        return MIXED
    needs = {"canon": "D" in options.get("set", "ABCD"), "dynamic_conv": options.get("where") == "linear"}
    return HIDDEN if case.get("family") == "mixtral" and needs.get(case.get("mixer", "")) else None


def test_two_processes(tmp_path: Path) -> None:
    """Gradients of every parameter, the loss, and the bytes that cross each boundary against the plan.

    The processes are forked from this one, which has imported everything; torchrun starts those of slow tests.
    """
    command = [sys.executable, "-m", "tests.parallel.cases", "shard", "tensor", "interleaved", "--double"]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    with (tmp_path / "said").open("ab") as said:
        given: Any = {"stdin": subprocess.PIPE, "stdout": said, "stderr": said, "start_new_session": True}
        ranks = [environment(**common, RANK=rank, LOCAL_RANK=rank) for rank in "01"]
        forks = [Forked(command, env=env, **given) for env in ranks]
        ends = [fork.wait(300) for fork in forks]
    printed = (tmp_path / "said").read_text()
    assert ends == [0, 0], printed
    records = read(printed)
    check(records, 15)
    sent = {record["case"]["stream"]: record["payload"] for record in records if record["what"] == "interleaved"}
    assert sent["attention_residuals"] == [384, 256, 256]  # 3, 2, 2 vectors of 16 doubles: nothing is sent twice


KINDS = {
    2: ("shard", "recompute", "meta", "tensor", "gpipe", "1f1b", "interleaved", "interleaved-whole"),
    4: ("1f1b", "interleaved", "interleaved-whole", "shard-tensor", "shard-pipeline", "shard-interleaved"),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [("--double",), ()], ids=["float64", "float32"])
@pytest.mark.parametrize("count", KINDS)
def test_everything(count: int, dtype: tuple[str, ...]) -> None:
    """Every stream, mixer and Blend in every way; a few in float32."""
    check(run(count, *KINDS[count], "--all", *dtype), len(KINDS[count]) * len(list(cases(True))))


@pytest.mark.slow
def test_blocks_are_compiled_each_by_itself() -> None:
    """Whole and all of them, also where they are more than dynamo compiles of one function."""
    records = run(2, "compile", "--double")
    check(records, 5)
    assert not any(record["broken"] for record in records)
    # the first block may be another than the rest, and no block is left uncompiled
    assert all(2 <= record["graphs"] <= SHAPE["num_hidden_layers"] for record in records), records


@pytest.mark.slow
def test_every_graft() -> None:
    """A family and a mixture of experts, whose layers keep their own loop."""
    pytest.importorskip("transformers")
    check(run(2, "graft-shard", "graft-tensor", "--all", "--double"), 2 * len(list(grafts(True))))
    check(run(2, "graft-shard", "graft-tensor"), 8)


@pytest.mark.slow
def test_an_ordinary_trainer(tmp_path: Path) -> None:
    """Trainer with accelerate's FSDP2: a unit per layer, the losses of one process, and a folder that is the model.

    In bfloat16 accelerate has routing in bfloat16 too, unless the callback keeps it out.
    """
    pytest.importorskip("accelerate")
    from twoaxis.model.graft import TwoAxisForCausalLM

    module = "tests.parallel.ordinary"
    (alone,) = run(1, str(tmp_path), module=module)
    (found,) = run(2, str(tmp_path), module=module)
    want = [{name: pytest.approx(value, rel=1e-5) for name, value in entry.items()} for entry in alone["log"]]
    for kind, units, dtype in (("plain", 7, "float32"), ("kept", 8, "float32"), ("bf16", 7, "bfloat16")):
        record = found[kind]
        assert (record["units"], record["layers"], record["dtypes"]) == (units, 4, [f"torch.{dtype}"])
        assert kind == "bf16" or record["log"] == want
    assert found["bf16 kept"]["dtypes"] == ["torch.float32"]
    assert [entry["loss"] for entry in found["bf16 kept"]["log"]] == [
        pytest.approx(entry["loss"], rel=5e-3) for entry in alone["log"]
    ]
    assert found["fsdp"]["units"] == 8
    assert found["tp"]["parts"] >= 4 * 7  # every matrix of four layers
    assert max(found["fsdp"]["error"], found["tp"]["error"]) < SINGLE
    for number in range(2):  # written by both processes at once, ten times
        model = TwoAxisForCausalLM.from_pretrained(tmp_path / f"several-{number}")
        assert model.config.stream == "attention_residuals"


@pytest.mark.slow
def test_what_a_process_holds_and_sends() -> None:
    """The benchmark in small: weights, gradients and moments are halved, and boundaries carry what is planned."""
    (found,) = run(2, "memory", "boundaries", "throughput", "--quick", module="benchmarks.parallel")
    assert found["memory"]["sharded"]["kept"] == pytest.approx(found["memory"]["one"]["kept"] / 2, rel=0.01)
    whole, cached = found["boundaries"]
    assert [whole["measured"], cached["measured"]] == [whole["planned"], cached["planned"]]
    assert sum(cached["measured"]) < sum(whole["measured"])
    assert found["throughput"]["cpu"] > 0


@pytest.mark.parametrize("name", stream_names())
def test_nobody_changes_a_state_in_place(name: str) -> None:
    """FSDP2 warns of views that units return: an operation in place on one would take its hook away."""
    model, seen = make({"stream": name}), []
    for block in model.layers:
        block.register_forward_hook(lambda _, args, out: seen.append((out[0], versions(out[0]))))
    backward(model, batch())
    assert len(seen) == len(model.layers)
    assert all(versions(state) == before for state, before in seen)


def versions(state: Any) -> list[int]:
    """How often each tensor of a state was changed in place."""
    return [leaf._version for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("name", stream_names())
def test_a_boundary_lists_every_tensor_of_the_state(name: str) -> None:
    """A state may have one tensor in two places, as that of `scaled` has at the block whose output it takes out."""
    with torch.device("meta"):
        model = Decoder(ModelConfig(**SHAPE, stream=name))
    packed = boundaries(model)
    for boundary in plan(model, stages=4).boundaries:
        assert len(boundary.tensors) == len(packed[boundary.block])
        assert len(set(boundary.sent)) == len(boundary.sent)


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
    given: Any = {"schedule": "1f1b", "micro_batches": 2, "loss": None, "rows": 1, "context": 4}
    with pytest.raises(ValueError, match=r"TwoAxisForCausalLM cannot be cut .* use fsdp and tp for grafts"):
        Pipeline(make(GRAFTS[0]), **given)


@pytest.mark.parametrize(
    ("name", "methods"), [("lime", {"stream_options": {"over": "heads", "kv_heads": 2}}), ("depth_kv", {"blend": True})]
)
def test_heads_that_a_stream_learns_to_mix_are_not_spread(name: str, methods: dict[str, Any]) -> None:
    shape: Any = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = Decoder(ModelConfig(**shape, stream=name, **methods))
    with pytest.raises(ValueError, match=f"{name} learns how to mix keys and values, whose heads tp spreads; use fsdp"):
        spread_plan(model, 2)


def test_blocks_are_those_of_a_model_with_a_stream() -> None:
    model = Decoder(ModelConfig(hidden_size=16, num_hidden_layers=3))
    assert find_blocks(model) is model.layers
    with pytest.raises(ValueError, match="Linear has no residual stream"):
        find_blocks(nn.Linear(2, 2))
