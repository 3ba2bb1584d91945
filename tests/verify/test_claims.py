"""Every claim holds for every method of the library, and what runs them says what was measured."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.support.commands import Done, run_line
from twoaxis.show import terminal
from twoaxis.verify import check, verify
from twoaxis.verify.claim import CLAIMS, Claim, Report, Result, choose, deviation, disagreement, measure
from twoaxis.verify.contract import COMPILE
from twoaxis.verify.run import FAMILIES, VERIFIED, claims
from twoaxis.verify.subject import SUBJECTS, StreamSubject, Subject, subjects

EVERY_VARIANT = {"definition", "neutral", "blend"}
"""Families in which the options of a method are told apart."""
CHUNKS = "time: chunks = one pass"
"""The claim along time of every variant: single tokens may be read by a form of their own."""


def met(name: str, claim: str) -> list[Subject]:
    """The variants of a method on which a claim is measured in every run of the tests.

    All of them in some families, one where costs are counted. Along time whatever has a hand in what is remembered of
    tokens, else one: to what the decoder around it remembers a stream is the same whatever its options. Otherwise every
    third, a different third from claim to claim and from method to method; slow tests take the others.
    """
    found, family = subjects(name), CLAIMS[claim].family
    if family in EVERY_VARIANT or claim == CHUNKS:
        return found
    turn = list(CLAIMS).index(claim) + [n for kind in SUBJECTS for n in kind.registry.names()].index(name)
    if family == "time":
        return [each for each in found if remembers(each)] or found[:1]
    return [found[turn % len(found)]] if family == "costs" else found[turn % 3 :: 3] or found[:1]


def remembers(subject: Subject) -> bool:
    if not isinstance(subject, StreamSubject):
        return True
    made = subject.stream()
    return bool(made.memory_windows()) or any(map(made.changes_kv, made.sites))


def pairs(*, slow: bool) -> list[Any]:
    """Every method with every claim about it; a method's own are neighbours, so that its files are imported once."""
    return [
        pytest.param(name, claim.name, id=f"{name}-{claim.name}")
        for kind in SUBJECTS
        for name in kind.registry.names()
        for claim in claims(kind.axis)
        if claim.slow == slow
    ]


@pytest.mark.parametrize(("name", "claim"), pairs(slow=False))
def test_a_method_holds_what_is_claimed(name: str, claim: str) -> None:
    (result,) = measure([CLAIMS[claim]], met(name, claim), name)
    assert result.holds, result


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for kind in SUBJECTS for name in kind.registry.names()])
def test_every_variant_on_another_seed(name: str) -> None:
    check(name, seed=1).raise_if_failed()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "claim"), pairs(slow=True))
def test_a_method_holds_what_is_claimed_compiled(name: str, claim: str) -> None:
    check(name, seed=1, only=[claim]).raise_if_failed()


THEOREMS = [claim for claim in CLAIMS.values() if not claim.axes]


@pytest.mark.parametrize("theorem", THEOREMS, ids=str)
def test_a_theorem_holds(theorem: Claim) -> None:
    (result,) = measure([theorem], [1])
    assert result.holds, result


def test_what_the_paper_claims_is_measured() -> None:
    statements = " ".join(claim.name for claim in THEOREMS)
    words = ["ring = window_attention", "uniform causal depth read", "Householder", "two-phase", "residue class"]
    words += ["O(T w d)", "O(T K L d)", "O(T L² d)", "muddformer:ways=one", "spectral norm"]
    assert [each for each in words if each not in statements] == []


# The commands.


@pytest.fixture(scope="module")
def printed() -> Done:
    """All that `twoaxis verify` measures, by the command of the README."""
    return run_line("twoaxis verify", env={"COLUMNS": "160"})


@pytest.mark.slow
def test_verify_prints_a_table_per_family(printed: Done) -> None:
    assert printed.code == 0, printed.out
    verdicts = [words[-1] for line in printed.out.splitlines() if (words := line.split())]
    held, absent = verdicts.count("holds"), printed.out.count("none declared")
    assert "FAILS" not in verdicts
    assert f"{held + absent} of {held + absent} hold (seed 0, float64, torch {torch.__version__})." in printed.out
    for family in VERIFIED:
        _, below = printed.out.split(f"\n{family.upper()}\n")
        assert sum(row.endswith("holds") for row in below.strip().split("\n\n")[0].splitlines()) >= 3


@pytest.mark.slow
def test_a_method_is_a_row_of_every_family_about_methods(printed: Done) -> None:
    for kind in SUBJECTS:
        for name in kind.registry.names():
            assert printed.out.count(f"\n{name}: ") >= 10


def test_every_claim_has_a_family_of_the_list() -> None:
    assert {claim.family for claim in CLAIMS.values()} == set(FAMILIES)
    assert all(claim.measure.__doc__ or not claim.axes for claim in CLAIMS.values())


def test_parts_are_named_by_family_or_by_claim() -> None:
    (one,) = verify(only=["canon A, one zero tap = plain decoder"])
    assert (one.family, one.subject, one.holds, one.error) == ("reduction", "", True, 0.0)
    assert [r.name for r in verify(3, ["orders"])] == [c.name for c in THEOREMS if c.family == "orders"]
    results = list(verify(only=["neutral mixer"]))
    assert [r.subject for r in results] == ["short_swa", "short_conv", "canon", "dynamic_conv"]
    with pytest.raises(ValueError, match=r"no check 'dualty' \(did you mean 'duality'\?\); the families are contract,"):
        list(verify(only=["dualty"]))
    with pytest.raises(ValueError, match=r"no check 'netral class' \(did you mean 'neutral class'\?\)"):
        check("standard", only=["netral class"])


# Measuring.


def test_missing_numbers_are_not_small() -> None:
    assert deviation(torch.tensor([float("nan")]), torch.tensor([1.0])) == float("inf")
    assert deviation(torch.zeros(2), torch.zeros(3)) == float("inf")
    assert deviation(torch.tensor([3.0]), torch.tensor([2.0])) == 0.5
    assert not Result(float("nan"), 1.0).holds


def test_every_leaf_is_compared() -> None:
    a, b, c = leaves = [torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert disagreement(a + 2 * b, a + 2 * b + c - c, leaves, 0) == 0.0
    assert disagreement(a + 2 * b - 1, a + b, leaves, 0) == pytest.approx(1.0)  # the values agree
    assert disagreement(1.1 * a + 4 * b - 3.1, a + b, leaves, 0) == pytest.approx(3.0)


def claims_of(*measured: Result | str | Exception) -> list[Claim]:
    """A claim of each: about subjects 0 and 1, of which the first always holds."""

    def one(found: Result | str | Exception) -> Any:
        def run(subject: int) -> Result | str:
            if isinstance(found, str):
                return found
            if not subject:
                return Result(0.0, 1.0)
            if isinstance(found, Exception):
                raise found
            return found

        return run

    return [Claim("f", str(i), one(found), ("depth",), first=i == 1) for i, found in enumerate(measured)]


def test_a_result_is_the_worst_of_the_subjects() -> None:
    low, high = Result(0.5, 1.0, "below"), Result(3.0, 2.0, "above", 4)
    results = list(measure(claims_of(low, Result(0.1, 1.0), high, "nothing", OSError("a\nb")), [0, 1], "who"))
    assert [r.holds for r in results] == [True, True, False, True, False]
    assert results[0] == Result(0.5, 1.0, "below", 2, "f", "0", "who")
    assert results[2] == Result(3.0, 2.0, "1 of 2 variants fail, the worst: 1: above", 5, "f", "2", "who")
    assert results[3] == Result(0.0, 0.0, "nothing", 0, "f", "3", "who")
    assert results[4].error == float("inf")
    assert "the worst: 1: raises OSError: a (test_claims.py, line" in results[4].detail


def test_nothing_is_measured_behind_a_failure_that_the_rest_builds_on() -> None:
    results = list(measure(claims_of(Result(0.0), Result(1.0), Result(0.0)), [1]))
    assert [r.name for r in results] == ["0", "1"]


def test_claims_are_chosen_by_name_or_family() -> None:
    every = claims("depth")
    assert every[0].name == "declarations"
    assert COMPILE not in [each.name for each in choose(every, ())]
    assert [each.name for each in choose(every, [COMPILE, "blend"])] == [
        COMPILE,
        *(c.name for c in every if c.family == "blend"),
    ]


def test_a_report_shows_what_failed() -> None:
    good = Result(0.0, family="time", name="time: a", subject="One")
    bad = Result(float("nan"), 1.0, "why", 1, "time", "time: b", "Two")
    absent = Result(0.0, 0.0, "none given", 0, "time", "time: c", "Two")
    report = Report("file.py", (good, bad, absent), 4, waiting=("later",))
    assert (report.ok, report.exit_code, report.failed) == (False, 1, (bad,))
    shown = terminal.render(report.document(), 100)
    for words in ("One", "time: b: why", "FAILS", "none given", "1 further checks", "2 of 3 hold (seed 4"):
        assert words in shown
    by_family = terminal.render(Report("All", (good, bad), by="family").document(), 100)
    assert "\nTIME\n" in by_family
    assert "Two: b" in by_family
    document = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert (document["ok"], document["seed"], document["waiting"]) == (False, 4, ["later"])
    assert [(r["error"], r["holds"]) for r in document["results"]] == [(0.0, True), (None, False), (0.0, True)]
    with pytest.raises(AssertionError, match=r"1 of 3 checks fail\n  time: b: measured nan, bound 1. why"):
        report.raise_if_failed()
    Report("fine", (good,)).raise_if_failed()
