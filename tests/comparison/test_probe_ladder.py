"""Every rung starts as its source, only its parameters move, and switched-off sites are the source's again."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, cast

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from tests.support.foreign import byte_llama
from twoaxis.comparison.ladder import costs, make_model, sizes, switched
from twoaxis.comparison.probe_plan import CONTROL, LADDER, Amounts, Rung, group_names, group_of
from twoaxis.comparison.probe_run import measure, schedule

RUNGS = pytest.mark.parametrize("rung", [CONTROL, *LADDER], ids=lambda rung: rung.name)
TOKENS = torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def theirs() -> Any:
    return byte_llama(num_hidden_layers=4)


def made(theirs: Any, rung: Rung) -> tuple[Any, dict[str, Tensor]]:
    """The model and where its learning parameters start."""
    model = make_model(theirs, rung, 0)
    return model, {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def shake(model: Any) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


@RUNGS
def test_a_rung_starts_as_the_source_and_counts_what_learns(theirs: Any, rung: Rung) -> None:
    model, start = made(theirs, rung)
    assert (logits(model) - logits(theirs)).abs().max() < 2e-5
    assert sum(p.numel() for p in start.values()) == costs(theirs, rung, 64).parameters > 0
    before = {name: t.clone() for name, t in theirs.state_dict().items()}
    shake(model)
    assert (logits(model) - logits(theirs)).abs().max() > 1e-3
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, before[name]), name  # the source's own tensors never move


@RUNGS
def test_switching_groups_off(theirs: Any, rung: Rung) -> None:
    model, start = made(theirs, rung)
    shake(model)
    whole = logits(model)
    with switched(model, rung, None, start) as stream:
        assert torch.equal(logits(model), whole)  # nothing off is the method to the bit
        departures = {} if stream is None else dict(stream.departures)
    for group in group_names(4):
        with switched(model, rung, group, start):
            assert (logits(model) - whole).abs().max() > 1e-6 or (rung.name in ("scalar", "multiway"))
    assert torch.equal(logits(model), whole)  # and all is put back
    found = sizes(model, rung, start, departures)
    assert set(found) == {"early", "middle", "late"}
    assert max(found.values()) > 0.001
    if rung.stream == "standard":
        assert found["late"] == pytest.approx(0.05, rel=0.25)  # the root mean square of the shake


@RUNGS
def test_all_groups_off_is_the_source(theirs: Any, rung: Rung) -> None:
    model, start = made(theirs, rung)
    shake(model)
    with (
        switched(model, rung, "early", start),
        switched(model, rung, "middle", start),
        switched(model, rung, "late", start),
    ):
        if rung.stream != "standard":
            stream = cast(Any, model.stream)
            while hasattr(stream, "departures"):  # nested: the outer ones are open where the inner ones are closed
                stream.gate.zero_()
                stream = stream.method
        assert (logits(model) - logits(theirs)).abs().max() < 2e-5


def test_groups_are_thirds_and_out_is_late() -> None:
    assert [group_of(block, 7) for block in range(8)] == ["early"] * 3 + ["middle"] * 2 + ["late"] * 3
    assert [group_of(block, 2) for block in range(3)] == ["early", "late", "late"]
    assert group_of(1, 1) == "all"


def test_costs_by_hand(theirs: Any) -> None:
    width, sites = theirs.config.hidden_size, 2 * 4 + 1
    control = costs(theirs, CONTROL, 64)
    assert dataclasses.astuple(control) == (width * sites, 0, 0.0, 1.0, 0)
    conv = costs(theirs, next(rung for rung in LADDER if rung.name == "conv"), 64)
    assert conv.parameters == 4 * (4 * width + width)  # taps and a pre-norm in each block
    assert conv.kept == 4 * 3 * width
    scalar = costs(theirs, LADDER[0], 64)
    assert scalar.parameters == sum(range(2, 6))
    assert scalar.live > 1


def test_the_schedule_rises_and_falls() -> None:
    found = [schedule(step, 20) for step in range(20)]
    assert found[:6] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1.0])
    assert found[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in itertools.pairwise(found[5:]))
    assert [schedule(step, 2) for step in range(2)] == [0.5, 1.0]
    assert schedule(0, 1) == 0.5


def test_measured_losses_are_those_of_transformers(theirs: Any) -> None:
    model = make_model(theirs, LADDER[0], 0)
    found = measure(model, TOKENS)
    for row, loss in zip(TOKENS, found, strict=True):
        with torch.no_grad():
            assert loss == pytest.approx(theirs(input_ids=row[None], labels=row[None]).loss.item(), abs=1e-5)


def test_passes() -> None:
    assert Amounts(12, 2, 16, 4).passes(3) == 12 + 4 + 3
    assert Amounts(0, 2, 16, 4).passes(3) == 4
    assert Amounts(5, 2, 6, 0).passes(3) == 5 + 2
