"""The records: complete, well formed, and what they come to."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from twoaxis.depth.registry import STREAMS
from twoaxis.guide.evidence import DATA, Evidence, Law, Record, read_evidence, sentences
from twoaxis.sequence.registry import MIXERS

LAW = Law(exponent=0.057, typical_loss=2.0, source="a test")
OWN: dict[str, Any] = {"method": "denseformer", "kind": "own", "source": "a paper", "metric": "loss"}


def record(**fields: Any) -> Record:
    return Record(**{**OWN, **fields})


def trust(*records: Record, parameters: int = 10**9, setting: Any = "scratch") -> float:
    return Evidence(LAW, records).trust(records, parameters, setting).log_speed_up


def test_the_file_covers_every_method() -> None:
    evidence = read_evidence()
    assert len(evidence.records) > 200
    for name in (*STREAMS.names(), *MIXERS.names()):
        found = evidence.of(name)
        assert found, f"{name}: give a record, or one of kind none"
        for r in found:
            assert r.source
            if r.kind == "none" or not r.counted:
                assert r.note, f"{r.method}: say why nothing counts"


def test_a_sentence_holds_what_one_setting_measured() -> None:
    """Records that differ in what was measured alone are one sentence, each number in it; others are their own."""
    found = read_evidence().of("attention_residuals", "block")
    told = sentences(found)
    assert len(told) < len(found)
    kimi = [text for text in told if "Kimi Linear" in text]
    assert len(kimi) == 1
    parts = ("`block_size=6`: MMLU 73.5 to 74.6", "C-Eval 79.6 to 82.5", "3 B parameters", "its authors")
    assert all(part in kimi[0] for part in parts)
    assert sentences(read_evidence().of("depth_attention")) == (
        "No published result: The paper reports no experiment.",
    )


def test_published_speed_ups_come_out_of_the_losses() -> None:
    """The law turns losses into the factors that the papers themselves print; no record counts for more than twice."""
    for fields, factor in (
        ({"baseline": 1.714, "value": 1.692}, pytest.approx(1.25, abs=0.01)),
        ({"metric": "perplexity", "baseline": 11.68, "value": 10.77}, pytest.approx(1.8, abs=0.1)),  # 1.89 at 834M
        ({"metric": "speed-up", "baseline": 1, "value": 1.5}, pytest.approx(1.5)),
        ({"metric": "loss difference", "difference": -0.02}, pytest.approx((2 / 1.98) ** (1 / 0.057))),
        ({"baseline": 1.301, "value": 1.1}, pytest.approx(2)),
        ({"baseline": 1.1, "value": 1.301}, pytest.approx(0.5)),
    ):
        assert math.exp(record(**fields).log_speed_up(LAW) or 0.0) == factor


def test_interpolated_accuracies_by_hand() -> None:
    """Canon's gains in a mean of ten tasks, as compute between the plain models of the same table."""
    compute = {1: 2.0, 3: 3.0, 8: 8.0}  # parameters times tokens, in units of 1e21
    plain = {1: 53.6, 3: 58.0, 8: 62.8}
    canon = [r for r in read_evidence().of("canon") if r.metric == "speed-up"]
    means = {r.parameters: r for r in read_evidence().of("canon") if r.measure == "mean of ten tasks"}
    for r, (low, high) in zip(canon, ((1, 3), (3, 8), (3, 8)), strict=True):
        mean = means[r.parameters]
        slope = math.log(compute[high] / compute[low]) / (plain[high] - plain[low])
        assert r.value == pytest.approx(math.exp(mean.gain * slope), abs=0.001)


@pytest.mark.parametrize(
    ("metric", "fields", "gain"),
    [
        ("loss", {"baseline": 2.0, "value": 1.9}, 0.1),
        ("accuracy", {"baseline": 50, "value": 52}, 2),
        ("loss difference", {"difference": -0.02}, 0.02),
        ("accuracy", {"difference": 1.5}, 1.5),  # more is better, as a difference too
        ("wall-clock speed-up", {"baseline": 1, "value": 0.95}, -0.05),
        ("throughput", {"baseline": 100, "value": 90}, -10),
        ("overhead", {"baseline": 0, "value": 4}, -4),
    ],
)
def test_gain_is_positive_where_better(metric: Any, fields: dict[str, Any], gain: float) -> None:
    assert record(metric=metric, **fields).gain == pytest.approx(gain)


def test_trust_by_hand() -> None:
    good = record(baseline=2.0, value=1.95, parameters=10**9, seeds=3)
    full = math.log(2.0 / 1.95) / 0.057
    assert trust(good) == pytest.approx(full * 1.0 / 1.5)
    assert trust(record(baseline=2.0, value=1.95, parameters=10**9)) == pytest.approx(full * 0.5 / 1.0)
    assert trust(record(baseline=2.0, value=1.95, parameters=10**8, seeds=3)) == pytest.approx(full * 0.5 / 1.0)
    assert trust(record(baseline=2.0, value=1.95, seeds=3)) == pytest.approx(full * (1 / 3) / (1 / 3 + 0.5))
    assert trust(good, setting="retrofit") == pytest.approx(full * 0.25 / 0.75)
    failed = record(kind="failed replication", source="elsewhere", parameters=10**9, seeds=3)
    assert trust(good, failed) == pytest.approx(full / 2.5)
    again = record(baseline=2.0, value=1.95, parameters=10**9, seeds=3, source="elsewhere")
    assert trust(good, again) == pytest.approx(full * 2 / 2.5)
    assert trust(good, good, good) == pytest.approx(trust(good)), "a source counts once"
    assert trust(record(metric="accuracy", baseline=1, value=99)) == 0
    assert trust() == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "densformer", "baseline": 2, "value": 1}, "unknown stream 'densformer' (did you mean 'dense"),
        ({"method": "denseformer:dilution=2", "baseline": 2, "value": 1}, "denseformer has no option 'dilution'"),
        ({"valu": 3}, "no option 'valu' (did you mean 'value'?)"),
        ({"value": 3}, "baseline and value belong together"),
        ({}, "a record without a number must say counted: false"),
        ({"baseline": 2.0, "value": -1.0}, "a loss is more than 0, got 2.0 and -1.0"),
        ({"baseline": 2.0, "value": 1.0, "metric": "perplexity"}, "a perplexity is more than 1, got 2.0 and 1.0"),
        ({"baseline": 2, "value": 1, "difference": 1}, "give baseline and value, or the difference alone"),
        ({"baseline": 2, "value": 1, "seeds": 0}, "seeds must be at least 1, got 0"),
        ({"baseline": 2, "value": 1, "kind": "rumour"}, "unknown kind 'rumour'"),
        ({"baseline": 2, "value": 1, "parameters": "7B"}, "parameters must be an integer or None, got '7B'"),
        ({"baseline": 2, "value": 1, "parameters": 0}, "parameters must be at least 1, got 0"),
        ({"kind": None}, "unknown kind None"),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    path = tmp_path / "evidence.json"
    law = {"exponent": 0.05, "typical_loss": 2.0, "source": "a test"}
    path.write_text(json.dumps({"law": law, "records": [{**OWN, "baseline": 2, "value": 1}, {**OWN, **fields}]}))
    with pytest.raises(ValueError, match=r"records\[1\]") as raised:
        read_evidence(path)
    assert message in str(raised.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "evidence.json"
    with pytest.raises(ValueError, match="there is no evidence file"):
        read_evidence(path)
    path.write_text("[1")
    with pytest.raises(ValueError, match="is not a JSON document"):
        read_evidence(path)
    law = {"exponent": 0.05, "typical_loss": 2.0, "source": "a test"}
    figure = {"method": "standard", "source": "s", "what": "w", "metric": "parameters", "shape": "nano", "value": 1}
    fast, ring = (
        {"goal": goal, "method": name, "source": ""} for goal, name in (("speed", "canon"), ("mixing", "ring"))
    )
    for changes, message in (
        ({"law": None}, "it needs law and records"),
        ({"more": []}, "it needs law and records, and may have figures and advice"),
        ({"records": 3}, "records must be a list, got 3"),
        ({"records": [3]}, r"records\[0\] must be an object, got 3"),
        ({"figures": [figure]}, r"figures\[0\] \(standard\): it has no why"),
        ({"figures": [figure | {"why": "", "value": "x"}]}, "value must be"),
        ({"law": law | {"exponent": 0}}, "law: exponent must be positive, got 0"),
        ({"law": law | {"source": 3}}, "law: source must be text, got 3"),
        ({"advice": [fast]}, r"advice\[0\] \(canon\): unknown goal 'speed'; it is one of shortcut, mixing, retrieval"),
        ({"advice": [{"goal": "mixing"}]}, r"advice\[0\]: it has no method"),
        ({"advice": [ring]}, "unknown stream"),
    ):
        document = {"law": law, "records": []} | changes
        path.write_text(json.dumps({name: value for name, value in document.items() if value is not None}))
        with pytest.raises(ValueError, match=message):
            read_evidence(path)


def test_the_file_has_a_record_per_line() -> None:
    """So that a change of one shows as one changed line."""
    lines = DATA.read_text(encoding="utf-8").splitlines()
    found = read_evidence()
    assert sum(line.startswith('  {"method"') for line in lines) == len(found.records) + len(found.figures)
