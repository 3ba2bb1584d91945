"""Whether a folder's run is finished, the same or another one, and what `train` refuses before it begins."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.foreign import byte_llama
from tests.training.runs import SHAPE, Broken, Uneven, small, stop_at
from twoaxis.base.options import field_types
from twoaxis.model.load import load_model
from twoaxis.model.save import save_decoder
from twoaxis.pretrained.retrofit import retrofit
from twoaxis.training.checkpoint import weights
from twoaxis.training.folder import About
from twoaxis.training.setup import make_optimizer
from twoaxis.training.train import train

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**20) | st.floats() | st.sampled_from(["", "x", "nano", "a=b"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
)


def test_a_finished_run_is_not_done_again(tmp_path: Path) -> None:
    first = train(small(), tmp_path)
    (tmp_path / "checkpoints").mkdir()  # as a process leaves it that is killed at the very end
    assert train(small(keep=5, log_every=1), tmp_path, on_step=stop_at(0)) == first
    assert not (tmp_path / "checkpoints").exists()
    with pytest.raises(ValueError, match=r"another run: batch is 4 there and 8 here; lr is 0.004 there and 0.1 here"):
        train(small(lr=0.1, batch=8, log_every=1), tmp_path)


def change(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    document = json.loads(path.read_text())
    path.write_text(json.dumps(edit(document)))


@pytest.mark.parametrize(
    ("file", "edit", "message"),
    [
        ("run.json", lambda d: d | {"format": 1}, r"run\.json is not of format 2, .*; choose another folder"),
        ("run.json", lambda d: [], r"run\.json is not of format 2"),
        ("run.json", lambda d: {k: d[k] for k in d if k != "data"}, r"run\.json is damaged at data: it is missing"),
        ("result.json", lambda d: d | {"more": 1}, r"result\.json is damaged: .*Remove it, and the run is made again"),
        ("result.json", lambda d: [], r"result\.json is damaged"),
    ],
)
def test_damaged_documents_are_refused_in_a_line(file: str, edit: Any, message: str, tmp_path: Path) -> None:
    train(small(steps=2), tmp_path)
    change(tmp_path / file, edit)
    with pytest.raises(ValueError, match=message) as caught:
        train(small(steps=2), tmp_path)
    assert len(str(caught.value).splitlines()) == 1


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_run_of_any_shape_is_read_or_refused_by_file_and_field(begun: Path, data: st.DataObject) -> None:
    path = begun / "run.json"
    whole = json.loads(path.read_text())
    name = data.draw(st.sampled_from([*field_types(About), *(f"config.{field}" for field in whole["config"])]))
    damaged, value = json.loads(path.read_text()), data.draw(VALUES)
    *table, field = name.split(".")
    (damaged[table[0]] if table else damaged)[field] = value
    path.write_text(json.dumps(damaged))
    try:
        train(small(steps=2), begun)
    except ValueError as error:
        told = str(error)
        assert "has changed" in told or "holds another run" in told or (str(path) in told and field in told)
    finally:
        path.write_text(json.dumps(whole))


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("begun")
    train(small(steps=2), folder)
    return folder


def test_changed_data_is_refused(tmp_path: Path) -> None:
    class Other(Uneven):
        fingerprint = "changed"

    with pytest.raises(Broken):
        train(small(context=16), tmp_path, data=Uneven(), on_step=stop_at(3))
    with pytest.raises(ValueError, match=f"data uneven has changed since the run in {tmp_path} began"):
        train(small(context=16), tmp_path, data=Other())


def test_changed_source_is_refused(tmp_path: Path) -> None:
    train(small(save_model=True), tmp_path / "first")
    run = small(model={}, source=str(tmp_path / "first" / "model"), steps=4)
    with pytest.raises(Broken):
        train(run, tmp_path / "second", on_step=stop_at(2))
    changed = load_model(tmp_path / "first" / "model")
    with torch.no_grad():
        changed.get_parameter("norm.weight").add_(1e-3)
    save_decoder(tmp_path / "first" / "model", changed)
    with pytest.raises(ValueError, match=r"the model that the run in .*second started from has changed"):
        train(run, tmp_path / "second")


def test_other_versions_are_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Broken):
        train(small(), tmp_path, on_step=stop_at(2))
    change(tmp_path / "run.json", lambda d: d | {"versions": d["versions"] | {"torch": "1.0"}})
    train(small(), tmp_path)
    assert "twoaxis: torch was 1.0 and is" in capfd.readouterr().err


def test_going_on_from_a_saved_model(tmp_path: Path) -> None:
    train(small(stream="deep_delta", save_model=True), tmp_path / "first")
    source = str(tmp_path / "first" / "model")
    run = small(model={}, source=source, train="stream.*,lm_head", steps=4, save_model=True)
    with pytest.raises(ValueError, match="no parameter is called 'lm_head'"):  # it is tied to the embedding
        train(run, tmp_path / "no")
    run = dataclasses.replace(run, train="stream.*,norm")
    result = train(run, tmp_path / "second")
    before, after = weights(load_model(source)), weights(load_model(tmp_path / "second" / "model"))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {n for n in before if n.startswith("stream.") or n == "norm.weight"}
    assert result.parameters == sum(before[name].numel() for name in moved)
    for changes, message in (
        ({"stream": "denseformer", "model": SHAPE}, "stream, model cannot be chosen with a model to go on from"),
        ({"data": ("stdlib",)}, "has no tokenizer; name the one its model was trained with, such as bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            train(dataclasses.replace(run, **changes), tmp_path / "third")


def test_going_on_from_a_retrofit(tmp_path: Path) -> None:
    source = tmp_path / "retrofit"
    new = set(retrofit(byte_llama(), stream="denseformer", mixer="short_conv", out=source, tokens=8).record.new)
    run = small(model={}, source=str(source), steps=3, train="new", save_model=True)
    train(run, tmp_path / "new")
    before, after = weights(load_model(source)), weights(load_model(tmp_path / "new" / "model"))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved <= new
    assert any(name.startswith("stream.") for name in moved)
    model = load_model(tmp_path / "new" / "model").requires_grad_(True)  # it stays a retrofit
    peaks = {name: group["peak_lr"] for group in make_optimizer(run, model).param_groups for name in group["names"]}
    assert {name for name, peak in peaks.items() if peak == 0.1 * run.lr} == set(before) - new
    assert {name for name, peak in peaks.items() if peak == run.lr} == new
