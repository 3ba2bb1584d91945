"""From a command's signature to its command line: what is typed is passed, what is not typed is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from twoaxis.commands.parsing import Common, parse
from twoaxis.commands.probe import probe
from twoaxis.commands.train import train
from twoaxis.comparison.options import AMOUNTS
from twoaxis.data.options import DataFields, DataOptions
from twoaxis.training.config import RunFields, TrainConfig, merge


def test_run_fields_are_those_of_a_run() -> None:
    """Names and types for editors are those of the dataclass, lists and tables in the form they may be said."""
    fields, hints = get_type_hints(TrainConfig), get_type_hints(RunFields)
    assert set(get_type_hints(DataFields)) == {each.name for each in dataclasses.fields(DataOptions)}
    assert set(hints) == {each.name for each in dataclasses.fields(TrainConfig)}
    for name, hint in hints.items():
        if get_origin(fields[name]) is tuple:
            assert hint == Sequence[get_args(fields[name])[0]]
        elif name == "model":
            assert hint == Mapping[str, Any] | Sequence[str]
        else:
            assert hint == fields[name], name


def test_only_what_is_typed_is_passed() -> None:
    least = {"out": "x", "config": None, "dry_run": False}
    assert parse(train, "train", ["--out", "x"]) == (least, Common(False, False, ()))
    line = "--out x --steps 2k --tokens None --model a=1,b=2 --model c=3 --no-save-model --from dir --data a b"
    fields, common = parse(train, "train", [*line.split(), "--seed", "0", "--json", "--use", "f.py", "--use", "g.py"])
    assert common == Common(True, False, ("f.py", "g.py"))
    said: dict[str, Any] = {"steps": 2000, "tokens": None, "model": ("a=1,b=2", "c=3"), "save_model": False, "seed": 0}
    assert fields == least | said | {"source": "dir", "data": ("a", "b")}


def test_help_shows_the_defaults_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(probe, "probe", ["--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for option in ("steps INT", "final-examples INT", "warmup FLOAT", "batch INT"):
        name = option.split()[0].replace("-", "_")
        assert f"(default: {AMOUNTS[name]})" in shown.partition(f"--{option}")[2].partition(" --")[0], option


def test_said_counts_more_than_the_file() -> None:
    file = {"steps": 7, "lr": 0.1, "model": {"hidden_size": 64, "head_dim": 8}, "data": ["a", "b"]}
    run = merge(file, {"tokens": 4096, "model": ("hidden_size=96",), "data": "task:recall"})
    assert (run.steps, run.tokens, run.lr, run.data) == (None, 4096, 0.1, ("task:recall",))
    assert run.model == {"hidden_size": 96, "head_dim": 8}
    assert merge(file, {}).data == ("a", "b")
    assert merge({}, {}) == TrainConfig()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--stpes 3", "Unrecognized options: --stpes, 3. Perhaps you meant: --steps INT. For full "),
        ("--preset", "Missing value for argument '--preset'"),
        ("--steps 3q", "expected an integer such as 500, 300k or 2M, got '3q'"),
        ("--lr fast", "--lr"),
        ("--warmup soon", "Error parsing --warmup: 'soon' is no number. For full"),
        ("--schedule cos", "cosine"),
    ],
)
def test_mistyped(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"train --help$") as caught:
        parse(train, "train", ["--out", "x", *line.split()])
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert capsys.readouterr() == ("", "")


def test_help_shows_groups_and_defaults(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(train, "train", ["--help"])
    assert stopped.value.code == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())  # as if it had one line
    for text in ("model options", "data options", "optimisation options", "running options", "(default: bpe:2048)"):
        assert text in shown
    assert "--tokens INT Training tokens" in shown  # None is what is not typed: neither a value nor a default to show
    assert "None}" not in shown
    assert "(default: None)" not in shown
    assert "(default: False)" not in shown
