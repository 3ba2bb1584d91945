"""The fields of a training run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from twoaxis.comparison.options import parse
from twoaxis.depth.registry import STREAMS
from twoaxis.guide.map import entry
from twoaxis.model.config import ModelConfig
from twoaxis.model.variant import make_contender
from twoaxis.training.config import RUNNING, TrainConfig
from twoaxis.training.setup import model_config, resolve


def test_to_dict_and_back() -> None:
    config = TrainConfig(data=("a", "b"), model={"hidden_size": 64}, tokens=10_000, batch=4, context=32)
    assert TrainConfig.from_dict(config.to_dict()) == config
    assert config.total_steps == 79  # 10,000 / (4 * 32) = 78.1, rounded up
    assert config.tokens_per_step == 128


def test_key_depends_on_what_changes_weights_only() -> None:
    base = TrainConfig()
    others: dict[str, Any] = {"log_every": 3, "save_seconds": 1.0, "save_every": 5, "keep": 4, "save_model": False}
    others |= {"report_to": ("tensorboard",), "threads": 1, "device": "cpu", "cache": "x", "measure_memory": False}
    others |= {"parallel": "fsdp=2"}
    assert set(others) == set(RUNNING)
    assert dataclasses.replace(base, **others).key == base.key
    for change in ({"lr": 1e-4}, {"seed": 1}, {"stream": "deep_delta"}, {"data": ("x",)}, {"model": {"a": 1}}):
        assert dataclasses.replace(base, **change).key != base.key


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 1, "tokens": 1}, "both given"),
        ({"steps": -1}, "steps must not be negative, got -1"),
        ({"context": 1}, "context must be at least 2"),
        ({"batch": 10, "accumulate": 4}, r"accumulate \(4\) must divide batch \(10\)"),
        ({"warmup": 1.5}, "warmup must lie between 0 and 1, got 1.5"),
        ({"schedule": "wsd", "warmup": 0.6, "decay": 0.6}, "more than the whole run"),
        ({"schedule": "cos"}, "unknown schedule 'cos' .*it is one of cosine, wsd, constant"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"lr": "fast"}, "lr must be a finite number, got 'fast'"),
        ({"data": ()}, "data names nothing"),
        ({"held_out": 1.0}, "held_out must be at least 0 and below 1"),
        ({"clip": -1.0}, "clip must not be negative"),
    ],
)
def test_mistakes(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**change)


ALIASES = {"attnres": "attention_residuals", "mhc": "manifold_hyper_connections", "ddl": "deep_delta"}
ALIASES |= {"HC": "hyper_connections", "dca": "deep_cross_attention", "DenseFormer": "denseformer", "elc": "elc_bert"}
ALIASES |= {"MUDD": "muddformer", "va": "vertical_attention", "Deep-Delta": "deep_delta", "swa": "short_swa"}
ALIASES |= {"conv": "short_conv", "short conv": "short_conv"}


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_names_that_people_use_become_names_here(alias: str, name: str) -> None:
    """In a run's configuration, in a model's and in a row of a comparison."""
    field = "mixer" if name.startswith("short_") else "stream"
    run = resolve(TrainConfig.from_dict({field: f"{alias}:init=paired"}))
    assert getattr(run, field) == f"{name}:init=paired"
    assert getattr(model_config(run, 64), field) == name
    assert getattr(ModelConfig.from_dict({field: alias}), field) == name
    assert getattr(made := make_contender(**{field: alias}), field) == name
    spelled = alias if field == "stream" else f"standard + {alias}"
    assert parse({field: [name, "scaled"], "baseline": spelled})["baseline"] == made.label
    assert entry(alias, ModelConfig()).name == name


def test_a_name_that_stands_for_another_method_cannot_be_taken() -> None:
    for name in ("mHC", "Deep-Delta", "standard"):
        with pytest.raises(ValueError, match=r"there is already a stream named '(manifold_hyper|deep_delta|standard)"):
            STREAMS.add(name, STREAMS.find("standard"))
        assert name == "standard" or name not in STREAMS.names()
