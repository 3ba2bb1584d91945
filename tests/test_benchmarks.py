"""The benchmarks run at small sizes; their arithmetic, their tables and their page are right."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.operators import fused_read, naive_read
from benchmarks.page import BEGIN, END, write
from benchmarks.recipe import LONGEST, Settings, search, train_gpt
from benchmarks.scale import CONTENDERS, QUICK, activation_peak, config
from benchmarks.tables import Table, figure
from benchmarks.targets import DECODING, EAGER_READ, TARGETS, reasons, verdicts
from benchmarks.timing import exponent, interleave, peak_bytes
from benchmarks.twins import sample, speed_twins
from benchmarks.variants import VARIANTS, loss
from tests.support.commands import Done, run_child, run_line, run_module
from tests.support.processes import ROOT
from twoaxis import Decoder, mixer_names, stream_names
from twoaxis.data.load import load_data
from twoaxis.training.config import TrainConfig


def run(*words: str) -> Done:
    return run_module("benchmarks", *words, folder=ROOT)


def test_what_is_measured() -> None:
    def work(times: int) -> None:
        for _ in range(times):
            torch.ones(300_000).sum()

    found = interleave({"one": lambda: work(30), "three": lambda: work(90)}, rounds=5)
    assert (found["one"].ratio, found["one"].spread) == (1.0, 0.0)
    assert 2.0 < found["three"].ratio < 4.5
    assert abs(exponent([1, 2, 4], [3, 12, 48]) - 2) < 1e-12
    assert peak_bytes(lambda: torch.zeros(1000) + torch.zeros(1000)) == 3 * 4000


def test_activation_peak_leaves_gradients_out() -> None:
    model = Decoder(config("standard", QUICK))
    short, long = (activation_peak(model, length) for length in (64, 128))
    assert 1.8 < long / short < 2.2, "gradients do not grow with the sequence; activations do"
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("shape", [(6,), (5, 6)])
def test_the_forms_that_are_compared_agree(shape: tuple[int, ...]) -> None:
    sources = [torch.randn(5, 6, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    query, grad = torch.randn(shape, dtype=torch.float64, requires_grad=True), torch.randn(5, 6, dtype=torch.float64)
    ours, naive = (
        torch.autograd.grad(read(sources, query), [*sources, query], grad) for read in (fused_read, naive_read)
    )
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(ours, naive, strict=True))


def test_verdicts_say_yes_and_no() -> None:
    eager, ours = (f"16 sources, one query: {how}" for how in ("stack + einsum", "twoaxis"))
    step = Table("step", "", {"MUDDFormer": {"time": 1.07}, "DCA k=2": {"time": 1.2}})
    reads = Table("read", "", {eager: {"forward": 6.0}, ours: {"forward": 1.5}})
    lines = verdicts({"steps": step, "depth_reads": reads})
    assert len(lines) == 2 + 3 + 4
    assert "| MUDDFormer, time | ≤ 1.080 | 1.070 | yes |" in lines
    assert "| DCA k=2, time | ≤ 1.100 | 1.200 | **no** |" in lines
    assert f"| {ours}, forward | ≤ 1.250 | 1.500 | **no** |" in lines
    faster = "| **read, times faster than stack + einsum** | | | |"
    assert lines[-2:] == [faster, f"| {ours}, forward | ≥ 3.000 | 4.000 | yes |"]
    assert reasons({"steps": step, "depth_reads": reads}) == [f"- {EAGER_READ}"]
    slow, fast = (Table("decoding", "", {"DDL d_v=1": {"time": time}}) for time in (1.05, 1.03))
    assert (reasons({"decoding": slow}), reasons({"decoding": fast})) == ([f"- {DECODING}"], [])
    # every method is a contender, and every target is of a row that can exist
    assert {options.get("stream", "standard") for options in CONTENDERS.values()} == {*stream_names()}
    assert {options["mixer"] for options in CONTENDERS.values() if "mixer" in options} == {*mixer_names()}
    named = {
        target.row for target in TARGETS if target.table in ("steps", "deep_memory", "memory_by_depth", "decoding")
    }
    assert named <= set(CONTENDERS)


def test_tables_and_page(tmp_path: Path) -> None:
    table = Table("A title", "A note.", {"a": {"time": 1.25, "± time": 0.01}, "b": {"memory": 250.0}})
    rows = ["| a | 1.250 ± 0.010 | - |", "| b | - | 250 |"]
    assert table.lines() == ["| | time | memory |", "|---|---:|---:|", *rows]
    assert [figure(v) for v in (0.1234, 19.99, 20.0, 123.4)] == ["0.123", "19.990", "20.0", "123"]
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    stored = {"command": "the command", "machine": "a machine", "tables": {"t": table._asdict()}}
    write(page, stored)
    text = page.read_text()
    assert re.fullmatch(r"before\n.*\nafter\n", text, flags=re.DOTALL)
    assert "old" not in text
    assert "Measured with `the command` on a machine." in text
    assert rows[0] in text
    page.write_text("no marks")
    with pytest.raises(ValueError, match="lacks the marks"):
        write(page, stored)


def test_the_command_keeps_earlier_parts(tmp_path: Path) -> None:
    """The first part in a process that starts itself again, as a person's does; the second one here."""
    out = tmp_path / "figures.json"
    done = run_child("--quick", "--only", "windows", "--out", str(out), program=("-m", "benchmarks"))
    assert done.code == 0, done.err
    assert run("--quick", "--only", "convolutions", "--out", str(out)).code == 0
    stored = json.loads(out.read_text())
    assert list(stored["tables"]) == ["windows", "convolutions"]
    assert 0 < stored["tables"]["windows"]["rows"]["w=16"]["times faster than full"] < 100
    assert stored["command"] == "python -m benchmarks --quick"
    wrong = run("--quick", "--only", "stepz")
    assert (wrong.code, "unknown part 'stepz'; there are steps, " in wrong.err) == (1, True)
    assert run("--quick", "--write-docs").code == 2


TASK: dict[str, Any] = {"data": ("task:local",), "context": 24, "save_model": False, "measure_memory": False}


def test_a_gpt_is_trained_on_the_tokens_of_a_run() -> None:
    """It learns with settings that train and does not with a rate of nothing; the seed decides."""
    run = TrainConfig(**TASK, batch=4, steps=30, final_examples=16, eval_examples=16)
    data = load_data(run)
    losses = [train_gpt(run, data, (16, 1, 2), Settings(rate, 0.06, 0.3)) for rate in (1e-9, 1e-2, 1e-2)]
    assert losses[1] < losses[0] - 0.1
    assert losses[1] == losses[2]


def test_a_search_ends_where_half_and_twice_are_worse() -> None:
    best = Settings(0.032, 0.03, LONGEST)
    found = search(lambda tried: sum(math.log(mine / its) ** 2 for mine, its in zip(tried, best, strict=True)))
    assert min(found, key=lambda settings: found[settings]) == best
    assert {best._replace(lr=0.016), best._replace(lr=0.064), best._replace(std=0.06)} <= set(found)
    assert all(settings.warmup <= LONGEST for settings in found)


def test_variants_of_the_recipe_change_what_they_say() -> None:
    """Every one of them has a loss of its own, and nothing of it stays behind."""
    amounts: dict[str, Any] = {"batch": 4, "steps": 6, "lr": 0.03, "warmup": 0.0, "final_examples": 8}
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    base = TrainConfig(**TASK, **amounts, eval_examples=8, model=shape)
    data = load_data(base)
    found = {name: loss(base, variant, data) for name, variant in VARIANTS.items()}
    first, *others, qwen = found.values()
    assert len({first, *others}) == len(VARIANTS) - 1
    # the same weights in a class of transformers; rounding grows at such a rate
    assert qwen == pytest.approx(first, rel=2e-3)
    assert loss(base, VARIANTS["as it is"], data) == first


def test_twins_of_one_seed_are_one_model() -> None:
    fields: dict[str, Any] = {"batch": 2, "steps": 2, "final_examples": 4, "eval_examples": 4}
    fields |= TASK | {"model": {"num_hidden_layers": 1}}
    data = load_data(TrainConfig(**fields))
    plain, same, twin = (sample(fields, data, range(2), first) for first in (None, 0, 7))
    assert plain == same
    assert all(plain.values[seed] != twin.values[seed] for seed in range(2))
    (ratio,) = speed_twins(1, {name: fields[name] for name in ("data", "context", "batch", "model")})
    assert len(ratio.values) == 60  # short steps: four times the fifteen
    assert 0.5 < ratio.median < 2


@pytest.mark.slow
def test_every_part_runs_at_small_sizes() -> None:
    stored = ROOT / "runs" / "bench_quick.json"
    stored.unlink(missing_ok=True)
    done = run_line("python -m benchmarks --quick")
    assert done.code == 0, done.err
    tables = json.loads(stored.read_text())["tables"]
    assert {*tables["steps"]["rows"]} == {*CONTENDERS}
    assert tables["steps"]["rows"]["standard"]["memory"] == 1.0
    assert 0.8 < tables["memory_by_depth"]["rows"]["standard"]["exponent"] < 1.2
    assert len(tables) == 13
