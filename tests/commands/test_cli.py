"""The command line as a person meets it."""

from __future__ import annotations

import json
import re

import pytest

import twoaxis
from tests.support.commands import run, run_child, run_line

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


def test_verify_in_a_process_of_its_own() -> None:
    done = run_child("verify", "--only", "duality", "--seed", "3")
    assert done.code == 0, done.out + done.err
    counted = re.search(r"(\d+) of (\d+) certificates hold \(seed 3", done.out)
    assert counted is not None, done.out
    assert counted[1] == counted[2]
    assert done.out.count(" holds") == int(counted[1])


def test_verify_json() -> None:
    done = run_line("twoaxis verify --only duality --json")
    document = json.loads(done.out)
    assert document["holds"] is True
    assert document["twoaxis"] == twoaxis.__version__
    for certificate in document["certificates"]:
        assert certificate["error"] <= certificate["bound"]
        assert set(certificate) == {"family", "statement", "error", "bound", "instances", "holds"}


def test_verify_exits_with_one_when_a_certificate_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from twoaxis import cli
    from twoaxis.verify import run as certificates
    from twoaxis.verify.certificate import Certificate

    bad = (Certificate("duality", "wrong", 1.0, 1e-12), Certificate("duality", "no number", float("nan"), 1e9))
    monkeypatch.setitem(certificates.FAMILIES, "duality", lambda seed: iter(bad))
    assert cli.run(["verify", "--only", "duality"]) == 1
    out = capsys.readouterr().out
    assert out.count("FAILS") == 2
    assert "0 of 2 certificates hold" in out


@pytest.mark.parametrize(("measured", "code"), [(0.5, 0), (2.0, 1)])
def test_check_exits_with_one_when_a_check_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], measured: float, code: int
) -> None:
    from twoaxis import cli
    from twoaxis.verify import load
    from twoaxis.verify.report import Check, Report

    given: list[object] = []

    def check_file(path: str, *, compile: bool, seed: int) -> list[Report]:
        given.append((path, compile, seed))
        return [
            Report("First", ("defaults",), (Check("one", True, 0.0, 0.0),)),
            Report("Second", ("defaults",), (Check("two", measured <= 1.0, measured, 1.0, "what is wrong"),)),
        ]

    monkeypatch.setattr(load, "check_file", check_file)
    assert cli.run(["check", "mine.py", "--seed", "4"]) == code
    shown = capsys.readouterr().out
    assert "First\n\n1 checks over 1 variants, all hold" in shown
    assert ("1 FAIL" in shown) is (code == 1)
    assert cli.run(["check", "mine.py", "--no-compile", "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is (code == 0)
    assert [(r["subject"], r["checks"][0]["measured"]) for r in document["reports"]] == [
        ("First", 0.0),
        ("Second", measured),
    ]
    assert given == [("mine.py", True, 4), ("mine.py", False, 0)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("verify", "--only", "dualty"), "unknown family 'dualty' of certificates; the families are duality"),
        (("verify", "--sed", "1"), "Perhaps you meant"),
        (("verfy",), "unknown command 'verfy' (did you mean 'verify'?)"),
        (("methods", "densformer"), "did you mean 'denseformer'"),
        (("check", "no_such_file.py"), "there is no file no_such_file.py"),
    ],
)
def test_mistakes_end_in_a_message_not_a_traceback(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert done.code == 2
    assert message in done.err + done.out


def test_of_several_processes_the_first_one_speaks() -> None:
    assert run("methods", "standard", env={"RANK": "0"}).out
    assert run("methods", "standard", env={"RANK": "1"}) == (0, "", "")
