"""Runs that begin from other people's models: what is shared, what is kept, and that they go on to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file

from tests.pretrained.helpers import tokens
from tests.support.commands import run
from tests.support.foreign import byte_llama, save
from twoaxis.model.load import load_model
from twoaxis.pretrained import model_for_training
from twoaxis.pretrained.low_rank import NAME, merge_low_rank
from twoaxis.pretrained.record import learning_rates, read_record
from twoaxis.training.checkpoint import checkpoints
from twoaxis.training.config import TrainConfig
from twoaxis.training.setup import make_model
from twoaxis.training.train import train


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save(byte_llama(num_hidden_layers=2), tmp_path_factory.mktemp("begin") / "source"))


def config(source: str, **changes: Any) -> TrainConfig:
    small: dict[str, Any] = {"data": ("task:recall:pairs=3",), "context": 24, "batch": 4, "steps": 6, "threads": 1}
    small |= {"eval_examples": 4, "final_examples": 4, "measure_memory": False, "train": "new+norms"}
    return TrainConfig(source=source, **small | changes)


@pytest.mark.parametrize("fields", [{}, {"stream": "muddformer"}, {"mixer": "short_conv"}, {"model": {"lora": 3}}])
def test_every_start_computes_what_the_source_does(source: str, fields: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    theirs: Any = AutoModelForCausalLM.from_pretrained(source)
    ids = tokens(vocabulary=256)
    model: Any = make_model(config(source, **fields), 256)
    torch.testing.assert_close(model(ids).logits, theirs(ids).logits, rtol=1e-5, atol=1e-5)


def test_what_learns_is_what_is_said(source: str) -> None:
    def learning(train: str, **fields: Any) -> set[str]:
        model: Any = make_model(config(source, train=train, **fields), 256)
        return {name for name, parameter in model.named_parameters() if parameter.requires_grad}

    norms = learning("norms")
    assert norms == {name for name in learning("all") if "norm" in name}
    new = learning("new", stream="denseformer")
    assert new
    assert all(name.startswith("stream.") for name in new)
    assert learning("new+norms", stream="denseformer") == learning("norms, new", stream="denseformer") == new | norms
    assert learning("new+norms") == norms  # the baseline, trained in the same way
    with pytest.raises(ValueError, match="new means no parameter"):
        learning("new")


def test_scales_learn_at_the_whole_rate_where_no_matrix_learns(source: str) -> None:
    for words, rate in (("new+norms", 1.0), ("all", 0.1)):
        model: Any = make_model(config(source, train=words, stream="denseformer"), 256)
        rates = learning_rates(model, {"new": 5.0})
        assert {rates[name] for name in model.begun.new} == {5.0}
        assert rates["backbone.model.norm.weight"] == rate


def test_forked_runs_share_what_is_frozen(source: str) -> None:
    model_for_training.hold(source)
    try:
        one, two = (make_model(config(source, stream=name), 256) for name in ("denseformer", "standard"))
        for name, parameter in two.named_parameters():
            other = one.get_parameter(name)
            assert torch.equal(parameter, other)
            assert (parameter.data_ptr() == other.data_ptr()) == (not parameter.requires_grad), name
        with torch.no_grad():
            one.get_parameter("backbone.model.norm.weight").zero_()
        three = make_model(config(source), 256)
        assert three.get_parameter("backbone.model.norm.weight").all()
    finally:
        model_for_training.release()


class Stopped(Exception):
    """Stands for a kill."""


@pytest.mark.parametrize("fields", [{"stream": "deep_delta"}, {"model": {"lora": 2}}])
def test_checkpoints_hold_what_learns_and_runs_go_on_to_the_same_bits(
    source: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    asked = config(source, save_every=2, **fields)
    whole = train(asked, tmp_path / "whole")

    def stop(step: int, loss: float | None) -> None:
        if step == 5:
            raise Stopped

    with pytest.raises(Stopped):
        train(asked, tmp_path / "parts", on_step=stop)
    (newest, *_) = checkpoints(tmp_path / "parts" / "checkpoints")
    model: Any = make_model(asked, 256)
    learns = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert set(load_file(newest / "model.safetensors")) == learns < set(dict(model.named_parameters()))
    again = train(asked, tmp_path / "parts")
    assert (again.weights, again.loss, again.row_losses) == (whole.weights, whole.loss, whole.row_losses)
    run, inside = (
        model_for_training.source_digest(str(place)) for place in (tmp_path / "whole", tmp_path / "whole/model")
    )
    assert run == inside
    saved = load_model(tmp_path / "whole" / "model", "cpu")
    assert sum(NAME in name for name, _ in saved.named_parameters()) == 0
    record = read_record(tmp_path / "whole" / "model")
    assert (record is None) == ("model" in fields)  # low-rank additions are merged: nothing is new
    if record is not None:
        assert record.new == model.begun.new
        assert record.source["name"] == source


def test_merged_additions_compute_the_same(source: str) -> None:
    model: Any = make_model(config(source, model={"lora": 3}), 256)
    with torch.no_grad():
        for name in model.begun.new:
            model.get_parameter(name).normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    ids = tokens(vocabulary=256)
    before = model(ids).logits
    plain: Any = make_model(config(source), 256)
    assert (before - plain(ids).logits).abs().max() > 0.01
    merge_low_rank(model)
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-4)
    assert set(dict(model.named_parameters())) == set(dict(plain.named_parameters()))


def test_from_the_command_line(source: str, tmp_path: Path) -> None:
    words = ["--data", "task:recall:pairs=3", "--context", "24", "--batch", "4", "--steps", "2", "--eval-examples", "4"]
    words += ["--final-examples", "4", "--no-measure-memory", "--from", source, "--train", "new+norms"]
    done = run("train", *words, "--stream", "denseformer", "--out", str(tmp_path / "one"))
    assert done.code == 0, done.err
    done = run("train", *words, "--preset", "tiny", "--out", str(tmp_path / "two"))
    assert done.code == 2
    assert "preset cannot be chosen with a model to begin from" in done.err
    byte_llama(num_hidden_layers=1, max_position_embeddings=512).save_pretrained(tmp_path / "bare")
    for place, said in ((str(tmp_path / "bare"), "has no tokenizer; name"), (source, "context is 256, the model in")):
        done = run("train", "--from", place, "--context", "256", "--out", str(tmp_path / "three"))
        assert done.code == 2
        assert said in done.err
        assert "tokenise" not in done.err  # before it takes long
