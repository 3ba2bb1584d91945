"""Methods of an installed package: known to every command by their names, and missed by name where it is not there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.commands import Done, run
from twoaxis.base.plugins import check_origins, fingerprints, load_entry_points, use, use_options

STRANGE = """
import twoaxis
from twoaxis.depth.standard import Standard

@twoaxis.register("strange")
class Strange(Standard):
    pass
"""
SMALL = "--model hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16 --context 24 --batch 2"
SHORT = "--data task:recall:pairs=3 --steps 1 --eval-examples 2 --final-examples 2 --no-measure-memory"


def test_methods_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "site"
    about = installed / "strangers_kit-0.1.dist-info"
    about.mkdir(parents=True)
    (installed / "strangers.py").write_text(STRANGE)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: strangers-kit\nVersion: 0.1\n")
    (about / "top_level.txt").write_text("strangers\n")
    (about / "entry_points.txt").write_text("[twoaxis.methods]\nstrange = strangers\n")

    def command(line: str) -> Done:
        load_entry_points.cache_clear()  # as in a process of its own
        sys.modules.pop("strangers", None)
        return run(*line.split(), folder=tmp_path)

    monkeypatch.syspath_prepend(installed)
    try:
        for line in (
            f"train --out run --stream strange {SMALL} {SHORT}",
            "methods strange",
            "cost --shape nano --stream strange",
        ):
            assert command(line).code == 0
        kept = json.loads((tmp_path / "run" / "model" / "methods.json").read_text())
        assert kept["methods"] == {"strange": {"package": "strangers-kit"}}
        assert "has no tokenizer" in command("generate run --prompt x").err  # the method is known
        (about / "entry_points.txt").write_text("[twoaxis.methods]\nstrange = nowhere\n")
        broken = (
            "twoaxis: the methods of strangers-kit cannot be loaded (ModuleNotFoundError: No module named 'nowhere')"
        )
        assert command("methods strange").err.startswith(broken)
        monkeypatch.undo()
        missed = "twoaxis: run/model has the method 'strange' of the package strangers-kit: install it\n"
        assert command("generate run --prompt x") == (2, "", missed)
    finally:
        load_entry_points.cache_clear()


@pytest.mark.parametrize(
    "damaged", ["[]", "{}", '{"methods": []}', '{"methods": {"a": 1}}', '{"methods": {"a": {}}}', "["]
)
def test_a_damaged_list_of_origins_is_named(damaged: str, tmp_path: Path) -> None:
    (tmp_path / "methods.json").write_text(damaged)
    for ask in (lambda: use_options(tmp_path), lambda: check_origins(tmp_path, [])):
        with pytest.raises(ValueError, match=r"methods\.json is (damaged|not a JSON document): "):
            ask()


def test_files_with_methods_of_ones_own(tmp_path: Path) -> None:
    own, other = tmp_path / "own.py", tmp_path / "own.txt"
    own.write_text("raise KeyError('no')")
    other.touch()
    for file, message in (
        (own, r"own\.py cannot be imported: KeyError: 'no'"),
        (tmp_path / "none.py", "there is no file"),
        (other, r"its name must end in \.py"),
    ):
        with pytest.raises(ValueError, match=message):
            use(file)
    before = fingerprints([own])
    own.write_text("count = 1")
    assert fingerprints([own]) != before
    use(own)
    own.write_text("raise KeyError('not run twice')")
    use(own)
