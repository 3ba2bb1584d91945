"""The command line as a person meets it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time

import pytest

import twoaxis


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "twoaxis", *arguments], capture_output=True, text=True, check=False)


def test_help_is_complete_and_does_not_wait_for_torch() -> None:
    started = time.perf_counter()
    done = run("--help")
    assert done.returncode == 0
    for command in ("verify", "methods", "check", "generate", "eval"):
        assert command in done.stdout
    loaded = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "twoaxis", "--help"], capture_output=True, text=True, check=False
    )
    assert "twoaxis.cli" in loaded.stderr
    assert " torch" not in loaded.stderr
    assert time.perf_counter() - started < 60


def test_verify_prints_every_certificate_and_its_bound() -> None:
    done = run("verify", "--only", "algebra", "--seed", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    counted = re.search(r"(\d+) of (\d+) certificates hold \(seed 3", done.stdout)
    assert counted is not None, done.stdout
    assert counted[1] == counted[2]
    assert done.stdout.count(" holds") == int(counted[1])


def test_verify_json() -> None:
    done = run("verify", "--only", "orders", "--json")
    document = json.loads(done.stdout)
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
    assert done.returncode == 2
    assert message in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
