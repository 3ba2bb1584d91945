"""The command line as a person meets it."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import pytest

import twoaxis
from tests.support.commands import run, run_child, run_line
from twoaxis.commands.models import read_prompt

HELP = """
import sys
from twoaxis import cli

for command in sys.argv[1:]:
    sys.argv = ["twoaxis", command, "--help"]
    try:
        cli.main()
    except SystemExit as ended:
        assert not ended.code, command
    assert "torch" not in sys.modules, command
"""


def test_help_is_complete_and_never_waits_for_torch() -> None:
    """Through the entry point in a process of its own, and then the help of every command in one more."""
    done = run_child("--help")
    assert done.code == 0, done.err
    commands = re.findall(r"^  ([a-z]+) ", done.out, flags=re.MULTILINE)
    assert {"verify", "methods", "check", "generate", "eval", "train", "compare", "cost", "advise"} <= set(commands)
    each = run_child(*commands, program=("-c", HELP))
    assert each.code == 0, each.err
    assert each.out.count("usage: twoaxis ") == len(commands)


def test_verify_json() -> None:
    done = run_line("twoaxis verify --only duality --json")
    document = json.loads(done.out)
    assert document["ok"] is True
    assert document["twoaxis"] == twoaxis.__version__
    for result in document["results"]:
        assert result["error"] <= result["bound"]
        assert set(result) == {"family", "name", "subject", "error", "bound", "detail", "instances", "holds"}


def test_verify_exits_with_one_when_a_claim_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from twoaxis import cli
    from twoaxis.verify import run as verifying
    from twoaxis.verify.claim import Claim, Result

    bad = {
        error: Claim("orders", str(error), lambda seed, error=error: Result(error, 1.0), ())
        for error in (2.0, math.nan)
    }
    monkeypatch.setattr(verifying, "CLAIMS", bad)
    assert cli.run(["verify", "--only", "orders"]) == 1
    out = capsys.readouterr().out
    assert out.count("FAILS") == 2
    assert "0 of 2 hold" in out


MISSPELT = """
from twoaxis.depth.standard import Standard
from twoaxis.depth.stream import Stream

class Plain(Standard):
    pass

class Misspelt(Stream):
    name, Config = "misspelt", Standard.Config
    _open, _raed, _write = Standard._open, Standard._read, Standard._write
    _pack, _unpack = Standard._pack, Standard._unpack
"""


def test_check_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from twoaxis import cli

    path = tmp_path / "mine.py"
    path.write_text(MISSPELT)
    only = ["--only", "neutral class", "parameter groups"]
    assert cli.run(["check", str(path), *only, "--seed", "4"]) == 1
    shown = capsys.readouterr().out
    assert shown.index("Plain") < shown.index("Misspelt")
    assert "Misspelt does not define _read (is it meant by '_raed'?)" in " ".join(shown.split())
    assert shown.count("FAILS") == 1
    assert "2 further checks build on this one and were not run." in shown
    assert "2 of 3 hold (seed 4" in shown
    path.write_text(MISSPELT[: MISSPELT.index("class Misspelt")])
    assert cli.run(["check", str(path), *only, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [(r["subject"], r["name"], r["holds"]) for r in document["results"]] == [
        ("Plain", "neutral class", True),
        ("Plain", "parameter groups", True),
    ]


def test_of_several_processes_the_first_one_speaks() -> None:
    for env, speaks in (
        ({"RANK": "0", "WORLD_SIZE": "2"}, True),
        ({"RANK": "1", "WORLD_SIZE": "2"}, False),
        ({"RANK": "1"}, True),
    ):
        done = run("methods", "standard", env=env)
        assert (done.code, bool(done.out), done.err) == (0, speaks, "")


def test_closed_streams_are_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    from twoaxis import cli

    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert cli.run(["methods", "standard"]) == 0
    assert read_prompt("-") == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError("Unable to allocate 9 TiB"), 2),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes\nmore"), 2),
        (RuntimeError("another fault"), None),
    ],
)
def test_too_little_memory_is_one_line(
    error: Exception, code: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fault of the program is not taken for it, and keeps its traceback."""
    from twoaxis import cli

    def fail(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli, "_run", fail)
    if code is None:
        with pytest.raises(RuntimeError, match="another fault"):
            cli.run(["train"])
        return
    assert cli.run(["train"]) == code
    said = capsys.readouterr().err
    assert said.startswith("twoaxis: not enough memory (")
    assert said.count("\n") == 1
