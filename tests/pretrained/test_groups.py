"""Which parameters are new, which are trained, and how fast."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import twoaxis
from tests.pretrained.helpers import byte_llama
from twoaxis.model.hf_model import TwoAxisForCausalLM
from twoaxis.model.load import load_model
from twoaxis.pretrained.groups import RATES, optimizer_groups, parameter_roles, rate_multipliers, select, trainable
from twoaxis.pretrained.record import read_record, record_of, write_record


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "model"
    twoaxis.retrofit(byte_llama(), stream="muddformer", mixer="short_swa:heads=2", out=path, tokens=8)
    return path


@pytest.fixture
def model(folder: Path) -> Any:
    return load_model(folder, "cpu")


def expected(name: str) -> str:
    new = ".stream." in name or ".mixer.local." in name or name.endswith(".mixer.weight")
    return "new" if new else "pretrained"


def test_a_loaded_folder_knows_which_parameters_are_new(model: Any) -> None:
    roles = parameter_roles(model)
    assert set(roles) == {name for name, _ in model.named_parameters()}
    assert roles == {name: expected(name) for name in roles}
    assert sum(role == "pretrained" for role in roles.values()) == 4 * 9 + 3  # 9 tensors a block, embedding, norm, head
    assert roles["model.trunk.norms.0.mixer.weight"] == "new"
    assert roles["model.trunk.norms.1.attention.weight"] == "pretrained"


def test_a_model_that_is_no_retrofit_is_refused(folder: Path, model: Any, tmp_path: Path) -> None:
    config = copy.deepcopy(model.config)
    config.name_or_path = ""
    plain = TwoAxisForCausalLM(config)
    for call in (parameter_roles, rate_multipliers, lambda m: trainable(m, "new")):
        with pytest.raises(ValueError, match="this model is no retrofit"):
            call(plain)
    trainable(plain, "all")
    assert record_of(plain) is None
    record = read_record(folder)
    assert record is not None
    model.save_pretrained(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="no retrofit"):
        parameter_roles(load_model(tmp_path / "elsewhere", "cpu"))
    write_record(record, tmp_path / "elsewhere")
    assert parameter_roles(load_model(tmp_path / "elsewhere", "cpu")) == parameter_roles(model)
    path = tmp_path / "elsewhere" / "retrofit.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "new": ["model.gone"]}))
    with pytest.raises(ValueError, match=r"speaks of another model: model\.gone is none of its"):
        parameter_roles(load_model(tmp_path / "elsewhere", "cpu"))
    path.write_text(json.dumps({**document, "more": 1}))
    with pytest.raises(ValueError, match=r"is not the record of a retrofit: \['more'\]"):
        read_record(tmp_path / "elsewhere")


def test_trainable_sets_what_gets_gradients(model: Any) -> None:
    def on() -> set[str]:
        return {name for name, p in model.named_parameters() if p.requires_grad}

    everything = on()
    trainable(model, "new")
    assert on() == {name for name in everything if expected(name) == "new"}
    trainable(model, "all")
    assert on() == everything
    trainable(model, ["lm_head.weight", "model.trunk.stream"])
    assert on() == {"lm_head.weight"} | {n for n in everything if n.startswith("model.trunk.stream.")}
    trainable(model, ["*.attention.query.*", "model.trunk.norms.0"])
    assert len(on()) == 4 + 3
    trainable(model, ["new", "lm_head.weight"])
    assert "lm_head.weight" in on()
    assert select(model, "all") == [name for name, _ in model.named_parameters()]


def test_unknown_names_are_errors(model: Any) -> None:
    for word, hint in {
        "model.trunk.streem": "did you mean 'model.trunk.stream'?",
        "lm_head.wieght": "did you mean 'lm_head.weight'?",
        "nwe": "did you mean 'new'?",
    }.items():
        with pytest.raises(ValueError, match="no parameter is called") as caught:
            trainable(model, [word])
        assert hint in str(caught.value)
    with pytest.raises(ValueError, match="nothing is to be trained"):
        trainable(model, [])
    plain = twoaxis.retrofit(byte_llama(), tokens=8).model
    with pytest.raises(ValueError, match="new means no parameter: this retrofit added none"):
        trainable(plain, "new")


def test_rates_and_groups(model: Any) -> None:
    rates = rate_multipliers(model)
    assert {rates[name] for name in rates if expected(name) == "pretrained"} == {RATES["pretrained"]} == {0.1}
    stream = model.model.trunk.stream
    for group in stream.parameter_groups():
        assert {rates[f"model.trunk.stream.{name}"] for name in group.names} == {group.rate}
    assert rate_multipliers(model, {"pretrained": 0.5})["lm_head.weight"] == 0.5
    trainable(model, "all")
    groups = optimizer_groups(model, lr=2e-3, weight_decay=0.1)
    given = [id(p) for group in groups for p in group["params"]]
    assert sorted(given) == sorted(id(p) for p in model.parameters())
    by_name = {
        name: next(g for g in groups if any(p is q for q in g["params"])) for name, p in model.named_parameters()
    }
    assert by_name["lm_head.weight"]["lr"] == pytest.approx(2e-4)
    assert by_name["lm_head.weight"]["weight_decay"] == 0.1
    assert by_name["model.trunk.norms.1.attention.weight"]["weight_decay"] == 0.0  # three ways, but scales
    swa = by_name["model.trunk.blocks.0.mixer.local.output.weight"]
    assert (swa["lr"], swa["weight_decay"]) == (2e-3, 0.1)
    undecayed = [n for g in stream.parameter_groups() if not g.decay for n in g.names]
    assert {by_name[f"model.trunk.stream.{n}"]["weight_decay"] for n in undecayed} <= {0.0}
    trainable(model, ["lm_head.weight"])
    (only,) = optimizer_groups(model, lr=1.0)
    assert [tuple(p.shape) for p in only["params"]] == [(300, 32)]
    torch.optim.AdamW([only])
