"""Certificates hold, and fail where they should. The command that measures all of them runs here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import twoaxis
from tests.support.commands import Done, run_line
from twoaxis.base.meter import Meter
from twoaxis.depth.registry import METHODS
from twoaxis.depth.site import Site
from twoaxis.depth.standard import Plain, Standard
from twoaxis.depth.stream import Seen
from twoaxis.verify import properties
from twoaxis.verify.certificate import Certificate, deviation, gradient_deviation
from twoaxis.verify.properties import blends, neutral_classes, sequence_side
from twoaxis.verify.run import FAMILIES, certificates


@pytest.fixture(scope="module")
def printed() -> Done:
    """All certificates, by the command of the README."""
    return run_line("twoaxis verify", env={"COLUMNS": "200"})


def test_every_certificate_holds_and_is_printed(printed: Done) -> None:
    assert printed.code == 0
    verdicts = [words[-1] for line in printed.out.splitlines() if (words := line.split())]
    assert "FAILS" not in verdicts
    count = verdicts.count("holds")
    assert f"{count} of {count} certificates hold (seed 0, float64, torch {torch.__version__})." in printed.out


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_measured(printed: Done, family: str) -> None:
    _, below = printed.out.split(f"\n{family.upper()}\n")
    rows = below.strip().split("\n\n")[0].splitlines()
    assert sum(row.split()[-1] == "holds" for row in rows) >= 3


@pytest.mark.parametrize(
    "words",
    [
        *("ring = window_attention", "uniform causal depth read", "Householder", "two-phase", "residue class"),
        *("O(T w d)", "O(T K L d)", "O(T L² d)", "muddformer, one way", "spectral norm"),
    ],
)
def test_what_the_paper_claims_is_measured(printed: Done, words: str) -> None:
    assert words in printed.out


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", [1, 7])
def test_every_family_holds_on_other_seeds(family: str, seed: int) -> None:
    found = list(certificates(seed, (family,)))
    assert [c.statement for c in found if not c.holds] == []
    assert all(c.instances >= 1 for c in found)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Standard]]:
    """A faulty stream, the only method that the certificates are measured on."""

    class Faulty(Standard):
        fault = ""

        def _write(self, value: Plain, site: Site, y: Tensor, seen: Seen, c: Seen) -> Plain:
            if self.fault == "neutral":
                y = 1.001 * y
            if self.fault == "future":
                y = y + 0.01 * y.flip(1)
            if self.fault == "blend" and torch.equal(seen.x, value.x):
                y = y + torch.nan
            return Plain(value.x + y)

    twoaxis.register("faulty")(Faulty)
    monkeypatch.setattr(properties, "stream_names", lambda: ("faulty",))
    monkeypatch.setattr(properties, "mixer_names", tuple)
    yield Faulty
    del METHODS["faulty"]


def test_a_false_neutral_class_fails(planted: type[Standard]) -> None:
    assert all(c.holds for c in neutral_classes(0))
    planted.fault = "neutral"  # type: ignore[attr-defined]
    assert [c.holds for c in neutral_classes(0)] == [False]


def test_a_leak_from_the_future_fails(planted: type[Standard]) -> None:
    planted.fault = "future"  # type: ignore[attr-defined]
    assert [c.holds for c in sequence_side(0)] == [False, False]


def test_a_broken_method_fails_in_a_blend(planted: type[Standard]) -> None:
    planted.fault = "blend"  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="faulty read a non-finite x"):
        list(blends(0))


def test_missing_numbers_are_not_small() -> None:
    assert deviation(torch.tensor([float("nan")]), torch.tensor([1.0])) == float("inf")
    assert deviation(torch.zeros(2), torch.zeros(3)) == float("inf")
    assert deviation(torch.tensor([3.0]), torch.tensor([2.0])) == 0.5
    assert not Certificate("x", "y", float("nan"), 1.0).holds


def test_every_leaf_is_compared() -> None:
    a, b, c = leaves = [torch.ones(2, requires_grad=True) for _ in range(3)]
    assert gradient_deviation(a + 2 * b, a + 3 * b, leaves, torch.ones(2)) == pytest.approx(1 / 3)
    assert gradient_deviation(1.1 * a + 4 * b, a + b, leaves, torch.ones(2)) == pytest.approx(3.0)
    assert gradient_deviation(a * b, a * b + c - c, leaves, torch.ones(2)) == 0.0


def test_flops_are_counted() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    with Meter() as count:
        (a @ b + 1.0).sum()
    assert count.flops == 2 * 3 * 4 * 5 + 15 + 15
