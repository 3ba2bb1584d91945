"""Comparisons on a pretrained model, and what a probe says where the answer is known."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import twoaxis
from tests.comparison.comparing import stamps
from tests.comparison.probing import trained_source, write_text
from tests.support.commands import run
from tests.support.foreign import byte_llama, save
from twoaxis.comparison import retrofit_rates
from twoaxis.comparison.plan import Plan
from twoaxis.comparison.probe import AMOUNTS, MIXERS, STREAMS, new_options
from twoaxis.comparison.results import Comparison
from twoaxis.comparison.retrofit_rates import GRID, find_rate
from twoaxis.comparison.run import load_all, prepare
from twoaxis.comparison.statistics import BETTER, OPEN
from twoaxis.training.config import TrainConfig
from twoaxis.training.folder import RUN
from twoaxis.training.setup import make_model

PROBE: dict[str, Any] = {"tokenizer": "bytes", "context": 64, "batch": 4, "steps": 30, "final_examples": 48, "seeds": 3}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("probe")


@pytest.fixture(scope="module")
def options(place: Path) -> dict[str, Any]:
    """A comparison on a source that takes a moment."""
    source = save(byte_llama(num_hidden_layers=2), place / "source")
    common = {"data": [str(write_text(place / "text", words=60))], "cache": str(place / "cache"), "tokenizer": "bytes"}
    amounts = {"context": 24, "batch": 2, "steps": 3, "eval_examples": 4, "seeds": 1, "measure_memory": False}
    return common | amounts | {"source": str(source), "train": "new+norms", "final_examples": 4}


# What is known beforehand.


def test_a_stream_that_was_taken_away_is_found(place: Path) -> None:
    text = write_text(place / "planted")
    source = trained_source(text, place / "robbed", stream="denseformer")
    made = twoaxis.probe(str(source), out=str(place / "found"), stream=["denseformer"], data=[str(text)], **PROBE)
    assert made.failed == ()
    dense, low_rank = made.sections[0].contenders
    assert dense.verdict == BETTER
    assert dense.difference.high < -0.02  # nats per token beyond what the norms gain
    assert low_rank.label.startswith("norms + LoRA")
    assert "Resolved as better than norms: denseformer" in "".join(str(block) for block in made.document().blocks)


def test_where_the_text_holds_no_information_nothing_is_found(place: Path) -> None:
    text = write_text(place / "letters", random_letters=True)
    source = trained_source(text, place / "knows")
    methods: dict[str, Any] = {"stream": ["denseformer"], "mixer": ["short_conv"]}
    made = twoaxis.probe(str(source), out=str(place / "nothing"), data=[str(text)], **methods, **PROBE)
    assert made.failed == ()
    assert made.sections[0].baseline.mean("loss") == pytest.approx(3.258, abs=0.05)  # log 26: there is no more to know
    assert BETTER not in made.verdicts.values()
    assert made.verdicts["denseformer"] == made.verdicts["standard + short_conv"] == OPEN


# The plan.


def test_a_probe_is_a_comparison_with_the_norms_as_its_baseline(options: dict[str, Any], tmp_path: Path) -> None:
    plan = prepare(new_options(options | {"controls": True}), tmp_path / "out")
    labels = plan.labels
    assert labels[0] == plan.baseline == "norms"
    assert labels[1:3] == [*STREAMS, *(f"standard + {mixer}" for mixer in MIXERS)]
    assert labels[3].startswith("norms + LoRA")
    assert labels[4:] == list(plan.checks) == ["frozen"]
    assert plan.base.train == "new+norms"
    assert (plan.lrs, plan.base.save_model) == ((AMOUNTS["lr"],), False)
    learned = {label: row.parameters for label, row in zip(labels, plan.rows, strict=True)}
    norms = learned["norms"]
    assert norms == learned["frozen"] == 5 * 32
    most = max(count for label, count in learned.items() if "LoRA" not in label) - norms
    one = (learned[labels[3]] - norms) / int(labels[3].split()[-1])  # parameters of rank 1
    assert abs(learned[labels[3]] - norms - most) <= one / 2 or learned[labels[3]] - norms == one
    assert [row.steps for row in plan.rows] == [3, 3, 3, 3, 0]


def test_amounts_are_a_probes_where_nothing_is_said(options: dict[str, Any]) -> None:
    asked = new_options({"source": "x", "stream": "denseformer", "tokens": 1000})
    assert asked["stream"] == ("standard:label=norms", "denseformer")
    assert "steps" not in asked
    assert "mixer" not in asked
    assert new_options({"source": "x"})["eval_every"] == AMOUNTS["steps"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": "nano,tiny"}, "--sizes are shapes of models from scratch"),
        ({"stream": ["standard:wider=denseformer"]}, "wider and deeper are for models from scratch"),
        ({"stream": ["denseformer:model.hidden_size=64"]}, "model.hidden_size cannot be chosen: the shape is that of"),
        ({"stream": ["standard:model.lora=0"]}, "model.lora is the rank of additions to linear layers, at least 1"),
        ({"preset": "tiny", "stream": ["denseformer"]}, "preset cannot be chosen with a model to begin from"),
        ({"source": "nowhere", "stream": ["denseformer"]}, "there is no folder or file nowhere"),
        ({"train": "nwe", "stream": ["denseformer"]}, "no parameter is called 'nwe' (did you mean 'new'?)"),
    ],
)
def test_what_makes_no_sense_on_a_source(
    options: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        prepare(options | changes, tmp_path)


def test_a_probe_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "probe.json").write_text("{}")
    for refused in (Plan.load, Comparison.load):
        with pytest.raises(ValueError, match="holds a probe of an earlier version, in which norms did not learn"):
            refused(tmp_path)


# Running.


def test_a_comparison_on_a_source_grows_and_knows_its_source(options: dict[str, Any], place: Path) -> None:
    out = place / "grown"
    words: dict[str, Any] = {"lr": "0.003,0.01", "lr_seeds": 1, "jobs": 1}
    made: Any = twoaxis.compare(out=str(out), stream=["denseformer"], report=False, **options | words)
    assert made.failed == ()
    assert set(made.losses) == {"standard", "denseformer", "frozen"}
    before = stamps(out)
    grown: Any = twoaxis.compare(out=str(out), mixer=["short_conv"], seeds=2, jobs=1)
    assert grown.failed == ()
    assert {name: stamps(out)[name] for name in before} == before
    assert [entry.label for entry in grown.entries] == ["standard", "denseformer", "frozen", "standard + short_conv"]
    assert {row.contender: row.new_rate for row in grown.plan.rows}.items() >= {
        (row.contender, row.new_rate) for row in made.plan.rows
    }
    frozen = next(row.folder for row in grown.plan.rows if not row.steps)
    assert len(list((out / frozen).glob("lr-0.003/seed-*"))) == 1  # whatever the seed
    assert len(grown.losses["frozen"]) == len(grown.losses["denseformer"]) == 2
    dry = run("compare", "--out", str(out), "--seeds", "3", "--dry-run")
    assert dry.code == 0, dry.err
    assert "to do" in dry.out
    weights = Path(options["source"]) / "model.safetensors"
    kept = weights.read_bytes()
    try:
        weights.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
        with pytest.raises(ValueError, match=r"the model .* is not what it was when the comparison began"):
            prepare({}, out)
    finally:
        weights.write_bytes(kept)


# Rates of what is new.


@pytest.fixture(scope="module")
def text(options: dict[str, Any]) -> Any:
    """The data of the comparison."""
    (data,) = load_all(Plan.new(options | {"stream": ["denseformer"]})).values()
    return data


def tried(options: dict[str, Any], stream: str, **fields: Any) -> TrainConfig:
    """A run whose rate is looked for."""
    shared = {name: options[name] for name in ("source", "train", "tokenizer", "context", "batch", "cache")}
    return TrainConfig(stream=stream, data=tuple(options["data"]), lr=3e-3, **shared | fields)


def test_the_search_for_a_rate_begins_where_one_step_does_little_harm(
    options: dict[str, Any], text: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    harm = 4e-4  # what a source that has learned nothing has to lose
    monkeypatch.setattr(retrofit_rates, "HARM", harm)
    monkeypatch.setattr(retrofit_rates, "_best_below", lambda run, model, most, loss: most)
    config = tried(options, "deep_delta")
    assert find_rate(tried(options, "standard"), text) is None  # nothing is new
    found = find_rate(config, text)
    assert found in GRID[1:-1]

    def rise(rate: float) -> float:
        """By one step of Adam along the gradient of the first batch, of the loss of the second."""
        model: Any = make_model(config, text.vocab_size)
        rows = torch.stack([text.train(999_983, 4)[number]["input_ids"] for number in range(4)])
        new = [model.get_parameter(name) for name in model.begun.new]
        before = model(input_ids=rows[2:], labels=rows[2:]).loss.item()
        optimizer = torch.optim.Adam(new, lr=rate, eps=1e-30)
        model(input_ids=rows[:2], labels=rows[:2]).loss.backward()
        optimizer.step()
        return model(input_ids=rows[2:], labels=rows[2:]).loss.item() - before

    assert rise(found) <= harm + 1e-5
    assert rise(GRID[GRID.index(found) + 1]) > harm - 1e-5


def test_smaller_rates_are_taken_while_they_leave_a_clearly_lower_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_optimizer(run: TrainConfig, model: Any) -> torch.optim.SGD:
        rate = run.lr * run.new_rate
        return torch.optim.SGD([{"params": model.parameters(), "peak_lr": rate}], lr=rate)

    monkeypatch.setattr("twoaxis.training.setup.make_optimizer", make_optimizer)
    model = torch.nn.Linear(4, 1, bias=False)
    noise = torch.randn(64, generator=torch.Generator().manual_seed(0))

    def loss(first: int, count: int, slope: float) -> torch.Tensor:
        """A parabola of curvature 200: steps overshoot from a rate of 0.005 on and grow beyond 0.01."""
        apart = 100 * (model.weight - 0.01).square().sum() * (1 + 0.1 * noise[first : first + count])
        return (slope * apart + noise[first : first + count]).mean()

    run = TrainConfig(batch=2, steps=100, warmup=0.25, lr=3e-3, clip=0.0)

    def found(most: float, slope: float = 1.0) -> float:
        torch.nn.init.zeros_(model.weight)
        return retrofit_rates._best_below(run, model, most, lambda *given: loss(*given, slope=slope))

    assert GRID[6] == 0.01
    assert found(GRID[8]) == found(GRID[7]) == found(GRID[6]) == GRID[6]
    assert found(GRID[2]) == GRID[2]  # smaller ones learn less
    assert found(GRID[8], slope=0.0) == GRID[8]  # all are the same


def test_the_rates_are_those_of_the_runs(options: dict[str, Any], place: Path) -> None:
    for row in Comparison.load(place / "grown").plan.rows:
        for about in (place / "grown" / row.folder).rglob(RUN):
            config = json.loads(about.read_text())["config"]
            assert config["new_rate"] == (1.0 if row.new_rate is None else row.new_rate)
