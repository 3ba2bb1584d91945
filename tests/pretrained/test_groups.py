"""Which parameters of a retrofit are new, and how fast they learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import twoaxis
from tests.support.foreign import byte_llama
from twoaxis.model.load import load_model
from twoaxis.pretrained.record import (
    parameter_origins,
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
    new = ".stream." in name or ".mixer.local." in name or name.endswith(".mixer.weight")
    return "new" if new else "pretrained"


def test_a_loaded_folder_knows_which_parameters_are_new(model: Any) -> None:
    origins = parameter_origins(model)
    assert set(origins) == {name for name, _ in model.named_parameters()}
    assert origins == {name: expected(name) for name in origins}
    assert list(origins.values()).count("pretrained") == 4 * 9 + 3  # 9 tensors a block, embedding, norm, head
