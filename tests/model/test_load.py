"""Folders of models: what is read and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from twoaxis.base.machine import pick_device
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.model.decoder_as_graft import graft_document
from twoaxis.model.load import load_model
from twoaxis.model.save import save_decoder

SHAPE: dict[str, Any] = {"vocab_size": 320, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_decoder(folder, Decoder(ModelConfig(**SHAPE, stream="denseformer")).bfloat16())
    return folder


def test_a_model_comes_as_it_was_saved(saved: Path) -> None:
    model = load_model(saved, "cpu")
    assert not model.training
    assert model.embed_tokens.weight.dtype == torch.bfloat16
    assert model.config.stream == "denseformer"


def test_folders_that_are_no_model(saved: Path, tmp_path: Path) -> None:
    def folder(name: str, config: str | None) -> Path:
        made = tmp_path / name
        made.mkdir()
        if config is not None:
            (made / "config.json").write_text(config)
        return made

    (tmp_path / "file").touch()
    good = (saved / "config.json").read_text()
    broken = folder("broken", good)
    (broken / "model.safetensors").write_bytes(b"no weights")
    wider = graft_document(ModelConfig.from_dict(SHAPE | {"hidden_size": 32, "stream": "denseformer"}), torch.bfloat16)
    other = folder("other", json.dumps(wider))
    (other / "model.safetensors").write_bytes((saved / "model.safetensors").read_bytes())
    misspelt = folder("misspelt", json.dumps(json.loads(good) | {"streem": "denseformer"}))
    (misspelt / "model.safetensors").write_bytes((saved / "model.safetensors").read_bytes())
    cases = {
        misspelt: r"config\.json.*streem.*did you mean 'stream'",
        tmp_path / "nowhere": "there is no folder .*nowhere",
        tmp_path / "file": "is a file; give the folder",
        folder("bare", None): r"has no config\.json; give a folder that holds a twoaxis model",
        folder("garbage", "{"): "is not a JSON document",
        folder("list", "[]"): "is not a twoaxis model: model_type in its config.json is None",
        folder("llama", '{"model_type": "llama"}'): "is not a twoaxis model: model_type in its config.json is 'llama'",
        folder("empty", good): "has no weights",
        broken: "the weights in .*broken.* cannot be read",
        other: "does not fit its config.json; of another shape",
    }
    for path, message in cases.items():
        with pytest.raises(ValueError, match=message):
            load_model(path, "cpu")


def test_devices() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device(None).type in ("cpu", "cuda")
    for name in ("quantum", "cuda:99"):
        with pytest.raises(ValueError, match=f"device '{name}'(: torch finds no GPU| cannot be used)"):
            pick_device(name)
