"""`twoaxis retrofit`, then `twoaxis train --from`: what learns, how fast, and what cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from tests.support.commands import run
from tests.support.foreign import byte_llama, save
from twoaxis.model.load import load_model
from twoaxis.pretrained.record import read_record

STREAM = "stream."


def weights(folder: Path) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in load_model(folder, "cpu").named_parameters()}


def test_what_is_asked_for_learns_and_what_cannot_is_said(tmp_path: Path) -> None:
    source, made = save(byte_llama(num_hidden_layers=2), tmp_path / "source"), tmp_path / "made"
    stream = ["--stream", "deep_delta", "--tokens", "8"]
    converted = run("retrofit", str(source), *stream, "--out", str(made))
    assert converted.code == 0
    assert f"warning: no gradient for {STREAM}gate[0]" in converted.err
    record = read_record(made)
    assert record is not None
    before, new = weights(made), set(record.new)
    small = ["--data", "task:recall:pairs=3", "--context", "24", "--eval-examples", "4", "--batch", "4", "--steps", "4"]
    small += ["--lr", "0.01", "--from", str(made), "--no-measure-memory", "--save-model"]
    moved: dict[str, set[str]] = {}
    for number, words in enumerate(("new", "all", "backbone.model.norm,stream.gate")):
        out = tmp_path / str(number)
        done = run("train", *small, "--train", words, "--out", str(out))
        assert done.code == 0, done.err
        assert f"warning: no gradient for {STREAM}gate[0]" in done.err
        after = weights(out / "model")
        moved[words] = {name for name in before if not torch.equal(before[name], after[name])}
        assert after[f"{STREAM}gate"][0] == 0.0  # as the warning said
    assert f"{STREAM}gate" in moved["new"]
    assert moved["new"] == new - set(record.stuck)
    assert moved["all"] >= moved["new"] | {"backbone.model.embed_tokens.weight"}
    assert moved["backbone.model.norm,stream.gate"] == {"backbone.model.norm.weight", f"{STREAM}gate"}
    done = run("train", *small, "--train", "backbone.model.norm", "--out", str(tmp_path / "norm"))
    assert done.code == 0
    assert "no gradient" not in done.err
    done = run("train", *small, "--train", "neww", "--out", str(tmp_path / "no"))
    assert done.code == 2
    assert "no parameter is called 'neww' (did you mean 'new'?)" in done.err
