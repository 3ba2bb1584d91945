"""Schedule, counters, digests of weights and files of fields, each by itself."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training.runs import SHAPE, small
from twoaxis.training import checkpoint as tensors
from twoaxis.training.config import TrainConfig, merge, parse_model, read_fields
from twoaxis.training.loop import Counters
from twoaxis.training.setup import make_model, make_optimizer


def test_cosine() -> None:
    config = TrainConfig(steps=20, warmup=0.2, final_lr=0.1)
    wanted = [1 / 4, 2 / 4, 3 / 4, 1.0]
    wanted += [0.1 + 0.9 * (1 + math.cos(math.pi * k / 16)) / 2 for k in range(1, 17)]
    assert [config.rate(step) for step in range(1, 21)] == wanted
    assert wanted[-1] == pytest.approx(0.1)
    assert config.rate(21) == config.rate(20)


def test_wsd() -> None:
    config = TrainConfig(steps=20, warmup=0.1, decay=0.25, final_lr=0.2, schedule="wsd")
    found = [config.rate(step) for step in range(1, 21)]
    assert found[:15] == [0.5, *[1.0] * 14]
    assert found[15:] == pytest.approx([0.84, 0.68, 0.52, 0.36, 0.2])


def test_runs_are_compiled_when_asked_or_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(compile: Any) -> list[bool]:
        return [TrainConfig(steps=steps, compile=compile, device="cpu").compiles for steps in (1, 4999, 5000)]

    assert compiled("yes") == [True] * 3
    assert compiled("no") == [False] * 3
    monkeypatch.setenv("CXX", sys.executable)
    assert compiled("auto") == [False, False, True]
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert compiled("auto") == [False] * 3


def test_constant_and_extremes() -> None:
    assert [TrainConfig(steps=n).warmup_steps for n in (1, 2, 20, 118, 600, 2000)] == [0, 1, 10, 30, 30, 100]
    assert TrainConfig(steps=100, schedule="wsd", decay=0.9).warmup_steps == 10  # what the decay leaves
    assert [TrainConfig(steps=4, warmup=0.5, schedule="constant").rate(n) for n in range(1, 5)] == [0.5, 1, 1, 1]
    assert [TrainConfig(steps=4, warmup=1.0).rate(n) for n in range(1, 6)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert TrainConfig(steps=1, warmup=0.0).rate(1) == pytest.approx(0.1)
    assert TrainConfig(steps=3, warmup=0.0, decay=0.0, schedule="wsd").rate(3) == 1.0


@given(
    steps=st.integers(1, 60),
    warmup=st.floats(0, 1),
    decay=st.floats(0, 1),
    final=st.floats(0, 1),
    schedule=st.sampled_from(["cosine", "wsd", "constant"]),
)
def test_rates_rise_then_fall(steps: int, warmup: float, decay: float, final: float, schedule: Any) -> None:
    decay = min(decay, 1 - warmup)
    config = TrainConfig(steps=steps, warmup=warmup, decay=decay, final_lr=final, schedule=schedule)
    found = [config.rate(step) for step in range(1, steps + 1)]
    assert all(0 <= value <= 1 for value in found)
    top = found.index(max(found))
    assert found[: top + 1] == sorted(found[: top + 1])
    assert found[top:] == sorted(found[top:], reverse=True)


def test_counters_survive_an_interruption_anywhere() -> None:
    given: dict[str, Any] = {"steps": 20, "tokens_per_step": 10, "flops_per_token": 3.0}
    counters = Counters(**given)
    for step in range(1, 21):
        counters.add_step(loss=float(step), seconds=2.0 if step <= 10 else 1.0)
        saved = json.loads(json.dumps(counters.to_dict()))
        assert not set(saved) & set(given)  # they follow from the configuration
        counters = Counters(**given)
        counters.restore(saved)
        if step == 8:
            record = counters.training_record(lr=0.5, grad_norm=0.25)
            position = {"step": 8, "tokens": 80, "flops": 240.0, "seconds": 16.0}
            assert record == position | {"loss": 4.5, "lr": 0.5, "grad_norm": 0.25, "tokens_per_second": 5.0}
    assert counters.training_record(0.1, 1.0)["loss"] == sum(range(9, 21)) / 12
    assert (counters.tokens_per_second, counters.train_loss, counters.seconds) == (10.0, 19.5, 30.0)


def test_the_optimiser_is_that_of_the_configuration() -> None:
    run = small(lr=0.5, beta1=0.7, beta2=0.8, epsilon=1e-3, weight_decay=0.25)
    groups = make_optimizer(run, make_model(run, 29)).param_groups
    assert {(group["lr"], *group["betas"], group["eps"]) for group in groups} == {(0.5, 0.7, 0.8, 1e-3)}
    assert [group["weight_decay"] for group in groups] == [0.25, 0.0]


def test_weights_digest() -> None:
    model = make_model(small(), 29)
    found = tensors.weights_digest(tensors.weights(model))
    assert len(found) == 64
    assert "lm_head.weight" not in tensors.weights(model)  # tied: counted once
    assert tensors.weights_digest(tensors.weights(make_model(small(), 29))) == found
    with torch.no_grad():
        model.get_parameter("norm.weight")[3] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    assert tensors.weights_digest(tensors.weights(model)) != found
    untied = make_model(small(model=SHAPE | {"tie_word_embeddings": False}), 29)
    assert "lm_head.weight" in tensors.weights(untied)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.toml", 'steps = 7\nlr = 0.01\nfrom = "there"\ndata = ["a", "b"]\n[model]\nhidden_size = 64\n'),
        ("run.json", '{"steps": 7, "lr": 0.01, "from": "there", "data": ["a", "b"], "model": {"hidden_size": 64}}'),
        ("run.yaml", "steps: 7\nlr: 0.01\nfrom: there\ndata: [a, b]\nmodel:\n  hidden_size: 64\n"),
    ],
)
def test_files_of_fields(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    fields: dict[str, Any] = {"lr": 0.01, "source": "there", "data": ("a", "b"), "model": {"hidden_size": 64}}
    config = merge(read_fields(tmp_path / name), {"lr": 0.002, "model": {"num_hidden_layers": 3}})
    more = {"lr": 0.002, "model": {"hidden_size": 64, "num_hidden_layers": 3}}
    assert config == TrainConfig(**fields | more, steps=7)
    assert merge(read_fields(tmp_path / name), {"tokens": 9}) == TrainConfig(**fields, tokens=9)
    (tmp_path / name).write_text('{"model": 3}' if name != "run.toml" else "model = 3")
    with pytest.raises(ValueError, match=r"model in .* must be a table"):
        read_fields(tmp_path / name)


def test_parse_model() -> None:
    found = parse_model(["hidden_size=32,tie_word_embeddings=false", "attention_windows=[3,null]", "hidden_act=gelu"])
    assert found == dict(hidden_size=32, tie_word_embeddings=False, attention_windows=[3, None], hidden_act="gelu")
    for words, message in ((["hidden_size"], "hidden_size changes nothing"), (["a=1", "a=2"], "gives a twice")):
        with pytest.raises(ValueError, match=f"--model {message}"):
            parse_model(words)
