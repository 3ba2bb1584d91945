"""What a probe says where the answer is known: a planted need is found, and nothing where nothing is to be had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.comparison.probing import byte_model, plant, write_text
from twoaxis.comparison.probe import probe
from twoaxis.comparison.probe_plan import ProbeConfig
from twoaxis.comparison.statistics import BETTER, OPEN

AMOUNTS: dict[str, Any] = {"context": 64, "batch": 4, "steps": 30, "held_out": 8, "seeds": (0, 1, 2)}


def test_a_planted_need_of_an_older_state_is_found_at_the_sites_that_have_it(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text")
    model = byte_model(text, 120)
    plant(model)
    config = ProbeConfig(data=(str(text),), rates=(333.0,), **AMOUNTS)
    made = probe(model, out=tmp_path / "out", streams=["denseformer"], config=config, jobs=1)
    assert made.failed == ()
    control, scalar = made.rows
    assert (control.rung.name, scalar.rung.name) == ("control", "scalar")
    assert scalar.rung.costs.parameters == 2 + 3 + 4  # the reads before blocks 1 and 2, and out
    assert control.rung.costs.parameters == 7 * 32
    assert scalar.gain.verdict == BETTER
    assert scalar.gain.low is not None
    assert scalar.gain.low > 1
    assert scalar.beyond is not None
    assert control.loss is not None
    assert scalar.loss is not None
    assert scalar.beyond.mean == pytest.approx(control.loss - scalar.loss)  # two hundred scales can do much here too
    # block 2 and the head read behind the constant, block 1 does not, and block 0 has nothing to choose from
    rises = {name: sites.rise[0] for name, sites in scalar.sites.items() if sites.rise is not None}
    assert rises["late"] > 1
    assert rises["early"] == 0.0
    assert rises["late"] > 10 * abs(rises["middle"])
    assert scalar.sites["early"].size == 0.0
    late, middle = scalar.sites["late"].size, scalar.sites["middle"].size
    assert late is not None
    assert middle is not None
    assert min(late, middle) > 0.1


def test_where_the_text_holds_no_information_nothing_is_resolved_beyond_the_control(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text", random_letters=True)
    model = byte_model(text, 120)
    config = ProbeConfig(data=(str(text),), rates=(1.0,), **AMOUNTS)
    made = probe(model, out=tmp_path / "out", streams=["denseformer"], mixers=["short_conv"], config=config, jobs=1)
    assert made.loss == pytest.approx(3.258, abs=0.05)  # log 26: the model knows what there is to know
    for row in made.rows[1:]:
        assert row.beyond is not None
        assert row.beyond.verdict == OPEN, row
        assert row.gain.mean == pytest.approx(0, abs=0.02)
