"""Which parameters of a retrofit are new, and how fast they learn."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import twoaxis
from tests.support.foreign import byte_llama
from twoaxis.model.graft import TwoAxisForCausalLM
from twoaxis.model.groups import param_groups, trainable
from twoaxis.model.load import load_model
from twoaxis.pretrained.record import (
    RATES,
    learning_rates,
    new_parameters,
    parameter_origins,
    read_record,
    record_of,
    write_record,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "model"
    twoaxis.retrofit(byte_llama(), stream="muddformer", mixer="short_swa:heads=2", out=path, tokens=8)
    return path


@pytest.fixture
def model(folder: Path) -> Any:
    return load_model(folder, "cpu")


def expected(name: str) -> str:
    new = name.startswith("stream.") or ".twoaxis_mixer." in name
    return "new" if new else "pretrained"


def test_a_loaded_folder_knows_which_parameters_are_new(model: Any) -> None:
    origins = parameter_origins(model)
    assert set(origins) == {name for name, _ in model.named_parameters()}
    assert origins == {name: expected(name) for name in origins}
    assert (
        list(origins.values()).count("pretrained") == 4 * 9 + 3 + 3 * 2
    )  # 9 tensors a block, embedding, norm, head; two ways more from block 1 on
    assert origins["backbone.model.layers.0.twoaxis_mixer.norm.weight"] == "new"
    assert origins["backbone.model.layers.1.input_layernorm.twoaxis_norm_k.weight"] == "pretrained"


def test_a_model_that_is_no_retrofit_is_refused(folder: Path, model: Any, tmp_path: Path) -> None:
    config = copy.deepcopy(model.config)
    config.name_or_path = ""
    plain = TwoAxisForCausalLM(config)
    for call in (parameter_origins, learning_rates, new_parameters):
        with pytest.raises(ValueError, match="this model is no retrofit"):
            call(plain)
    assert record_of(plain) is None
    record = read_record(folder)
    assert record is not None
    model.save_pretrained(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="no retrofit"):
        parameter_origins(load_model(tmp_path / "elsewhere", "cpu"))
    write_record(record, tmp_path / "elsewhere")
    assert parameter_origins(load_model(tmp_path / "elsewhere", "cpu")) == parameter_origins(model)
    path = tmp_path / "elsewhere" / "retrofit.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "new": ["model.gone"]}))
    with pytest.raises(ValueError, match=r"speaks of another model: model\.gone is none of its"):
        parameter_origins(load_model(tmp_path / "elsewhere", "cpu"))
    for wrong in ({"new": 3}, {"seed": "0"}, {"stuck": None}, {"versions": []}):
        path.write_text(json.dumps({**document, **wrong}))
        with pytest.raises(ValueError, match=rf"retrofit\.json is damaged at {next(iter(wrong))}"):
            read_record(tmp_path / "elsewhere")


def test_rates_and_groups(model: Any) -> None:
    rates = learning_rates(model)
    assert {name: RATES["new" if expected(name) == "new" else "pretrained"] for name in rates} == rates
    assert learning_rates(model, {"pretrained": 0.5})["backbone.lm_head.weight"] == 0.5
    groups = param_groups(model, lr=2e-3, weight_decay=0.1, rates=rates)
    of = {name: (group["lr"], group["weight_decay"]) for group in groups for name in group["names"]}
    assert of["backbone.lm_head.weight"] == (pytest.approx(2e-4), 0.1)
    assert of["backbone.model.layers.1.input_layernorm.twoaxis_norm_k.weight"] == (pytest.approx(2e-4), 0.0)
    assert of["backbone.model.layers.0.twoaxis_mixer.local.output.weight"] == (2e-3, 0.1)
    for group in model.stream.parameter_groups():
        assert {of[f"stream.{n}"] for n in group.names} == {(2e-3 * group.rate, 0.1 * group.decay)}
    trainable(model, "new", new=new_parameters(model))
    assert {name for g in param_groups(model, lr=1.0) for name in g["names"]} == set(new_parameters(model))
