"""What a comparison runs: contenders, budgets, sizes, rates, controls, and what a folder may grow by."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.comparison.comparing import TINY
from twoaxis.base.options import read_fields
from twoaxis.base.timer import Rounds, Throughput
from twoaxis.comparison import contenders, report
from twoaxis.comparison.budget import TOLERANCE, fits, make_rows, smallest
from twoaxis.comparison.contenders import make_contenders, parse_spelled, recipe_checks, spelled_out, with_budget
from twoaxis.comparison.decisions import choose, choose_rates
from twoaxis.comparison.options import FIELDS, SET_HERE, merge, parse_seeds, parse_sizes
from twoaxis.comparison.plan import Plan, data_label, folder_name
from twoaxis.comparison.run import read_options
from twoaxis.model.flops import training_flops
from twoaxis.model.presets import PRESETS
from twoaxis.model.variant import make_contender
from twoaxis.training.config import SharedFields, TrainConfig
from twoaxis.training.result import Result
from twoaxis.training.setup import model_config

BASE: dict[str, Any] = {"batch": 4, "context": 32, "tokenizer": "bytes", "model": TINY, "steps": 100}


def make_plan(*streams: str, base: dict[str, Any] | None = None, **options: Any) -> Plan:
    return Plan.new({"stream": list(streams), **BASE, **(base or {}), **options})


def make(plan: Plan, **options: Any) -> Plan:
    words = {data_label(sources): 256 for sources in plan.data}
    return dataclasses.replace(plan, rows=make_rows(plan, words, **options))


def by_label(plan: Plan) -> Any:
    return {plan.contender(row.contender).label: row for row in plan.rows}


def test_contenders_alone_and_as_a_grid() -> None:
    streams, mixers = ["standard", "deep_delta:value_channels=4"], ["short_swa:window=4", "canon"]
    ours, plain = [("deep_delta", each) for each in (None, "short_swa", "canon")], ("standard", None)
    alone = [(c.stream, c.mixer) for c in make_contenders(streams, mixers)]
    assert alone == [plain, ours[0], ("standard", "short_swa"), ("standard", "canon")]
    grid = make_contenders(streams, mixers, grid=True)
    assert len({c.key for c in grid}) == len(grid) == 2 * 3
    assert [(c.stream, c.mixer) for c in grid[3:]] == ours
    assert make_contenders([], mixers, grid=True)[0].key == make_contender().key


@pytest.mark.parametrize(
    ("streams", "options", "labels", "baseline"),
    [
        (["deep_delta"], {}, ["standard", "deep_delta"], "standard"),
        (["deep_delta", "standard"], {}, ["deep_delta", "standard"], "standard"),
        (["standard:label=plain", "deep_delta"], {}, ["plain", "deep_delta"], "plain"),
        (["deep_delta", "denseformer"], {"baseline": "denseformer"}, ["deep_delta", "denseformer"], "denseformer"),
    ],
)
def test_the_baseline_is_added_where_it_is_missing_and_only_there(
    streams: list[str], options: dict[str, Any], labels: list[str], baseline: str
) -> None:
    plan = make_plan(*streams, **options)
    assert (plan.labels, plan.baseline) == (labels, baseline)
    assert plan.baseline_key == plan.contenders[labels.index(baseline)].key


COLOURED = {"stream": "deep_delta", "colour": "red"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"stream": []}, "only the baseline to run"),
    ({"stream": ["deep_delta", "deep_delta:label=again"]}, "'deep_delta' and 'again' are the same"),
    ({"stream": ["deep_delta:label=x", "denseformer:label=x"]}, "two contenders are called 'x'"),
    ({"baseline": "deep_dleta"}, "there is no contender 'deep_dleta' to be the baseline (did you mean 'deep_delta'?)"),
    ({"stream": ["deep_delta:train.steps=5"]}, "'deep_delta:train.steps=5' changes train.steps"),
    ({"stream": ["deep_delta:train.wieght_decay=5"]}, "did you mean 'weight_decay'?"),
    ({"stream": ["deep_delta:train.batch=2"], "match": "time"}, "with --match time batch, accumulate, dtype are the"),
    ({"stream": ["deep_delta:train.budget=-1"]}, "train.budget must be a number from 0 on, got -1"),
    ({"seeds": 0}, "at least one seed and at most 100,000, got 0"),
    ({"seeds": "a,b"}, "seeds are a number of them"),
    ({"seeds": "8-6"}, "the first and the last as 6-11, got '8-6'"),
    ({"seeds": [1, 1]}, "seeds names something twice: 1, 1"),
    ({"seeds": [-1]}, "seeds must not be negative, got -1"),
    ({"seeds": [1000, 1], "lr": "1e-3,2e-3"}, "seed 1000 is in both --seeds and --lr-seeds"),
    ({"lr": "1e-3,x"}, "lr must be a number, got 'x'"),
    ({"lr": [0.0]}, "lrs must be positive, got 0.0"),
    ({"match": "energy"}, "unknown match 'energy'"),
    ({"flops": 1e9}, "--flops is a budget for --match flops, and this comparison matches tokens"),
    ({"flops": 1e9, "match": "flops"}, "--flops and --steps or --tokens are two budgets"),
    ({"lr_sedes": 3}, "a comparison has no option 'lr_sedes' (did you mean 'lr_seeds'?)"),
    ({"eval_skip": 3}, "a comparison has no option 'eval_skip' of its own; it has rows for choosing learning rates"),
    ({"seed": 1}, "no option 'seed' of its own; it has the seeds (--seeds)"),
    ({"batch": 0}, "batch must be at least 1, got 0"),
    ({"contenders": [COLOURED]}, "a contender has no option 'colour'; its options are stream, mixer, label, model, "),
    ({"stream": ["standard:wider=deep_delta,deeper=deep_delta"]}, "is to be both wider and deeper"),
    ({"stream": ["standard:wider=3"]}, "wider takes the label or the spelling of a contender, got 3"),
    (
        {"stream": ["standard:wider=muddformer,label=w", "standard:wider=w"]},
        "matched with 'w', which is itself matched",
    ),
    ({"sizes": "nano,nano"}, "two sizes have the name 'nano'"),
    ({"sizes": "huge"}, "unknown preset 'huge'"),
    ({"sizes": "nano:wide"}, "the size 'nano:wide': 'wide' is no change"),
    ({"sizes": "width=100"}, "heads of 32 channels, as nano has them, do not divide the width 100"),
    ({"sizes": "nano:steps=0"}, "the size 'nano:steps=0': steps must be at least 1, got 0"),
    ({"sizes": "nano:steps=5:tokens=5"}, "gives both steps and tokens"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Plan.new({"stream": ["deep_delta"], **BASE, **options})


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        ("deep_dleta", "did you mean 'deep_delta'"),
        ("deep_delta:valu_channels=2", "deep_delta has no option 'valu_channels'"),
        ("standard:wider=mudformer", "unknown stream 'mudformer'"),
        ("standard:model.hidden_size=33", "must divide hidden_size"),
    ],
)
def test_a_method_that_does_not_exist_is_named_with_its_contender(stream: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{stream}.*{message}"):
        make(make_plan(stream))


def test_runs_of_one_seed_are_paired() -> None:
    """Everything but the method is the same, and seeds come one after the other."""
    plan = make_plan("deep_delta", "standard:train.weight_decay=0,label=no decay", seeds=2, mixer=["canon"])
    made = make(plan)
    runs, labels = made.runs(), ("standard", "deep_delta", "no decay", "standard + canon")
    assert [(r.seed, r.label) for r in runs] == [(seed, label) for seed in (0, 1) for label in labels]
    configs = [made.config(run) for run in runs]
    assert len({config.key for config in configs}) == len({run.folder for run in runs}) == 8
    own = dict.fromkeys(("stream", "mixer", "weight_decay"))
    for seed in (0, 1):
        first, *others = (config.to_dict() | own for config in configs if config.seed == seed)
        assert others == [first] * 3
    assert [config.weight_decay for config in configs[:4]] == [0.1, 0.1, 0, 0.1]
    assert runs[1].folder == Path("runs/stdlib/nano", plan.contenders[1].key, "lr-0.004", "seed-0")


def test_labels_of_data_become_folders_that_differ() -> None:
    names = ["stdlib", "task:recall", "task-recall", "task:recall:gap=3", "/a/b", "a/b", "a-b", "ä", ".."]
    made = [folder_name(name) for name in names]
    assert len(set(made)) == len(names)
    assert made[0] == "stdlib"
    assert all(set("/:") & set(name) == set() and not name.startswith(".") for name in made)


# Budgets.


@given(
    steps=st.integers(60, 4000),
    batch=st.sampled_from([2, 4, 8]),
    own=st.sampled_from([1, 4, 16]),
    channels=st.sampled_from([1, 2, 4]),
)
def test_flops_are_matched_within_one_percent(steps: int, batch: int, own: int, channels: int) -> None:
    streams = (f"deep_delta:value_channels={channels}", f"hyper_connections:train.batch={own}")
    base = {"steps": steps * (4 if own == 16 else 1), "batch": batch}
    plan = make_plan(*streams, base=base, match="flops")
    made, costs = make(plan), []
    for run in made.runs()[:3]:
        config = made.config(run)
        shape: Any = model_config(config, 256)
        assert run.row.flops_per_token == training_flops(shape, config.context).total
        assert run.row.tokens == config.total_steps * config.tokens_per_step
        costs.append(run.row.flops_per_token * run.row.tokens)
    budget = plan.base.total_steps * plan.base.tokens_per_step * made.rows[0].flops_per_token
    assert costs[0] == budget
    assert all(abs(cost - budget) <= TOLERANCE * budget for cost in costs)


def test_a_budget_of_flops_that_is_too_small_says_what_would_do() -> None:
    def asked(tokens: int | None = None, **options: Any) -> tuple[Any, ...]:
        base = {"steps": None, "tokens": tokens}
        return make(make_plan("deep_delta:value_channels=4", base=base, match="flops", **options)).rows

    with pytest.raises(ValueError, match="more than 1%; the smallest budget that works for all is --tokens ") as said:
        asked(3 * 4 * 32)
    tokens = int(str(said.value).split("--tokens ")[1].split(" ")[0].replace(",", ""))
    assert tokens % (4 * 32) == 0
    assert asked(tokens)[0].tokens == tokens
    with pytest.raises(ValueError, match="cannot match the budget"):
        asked(tokens - 4 * 32)
    with pytest.raises(ValueError, match="--flops ") as said:
        asked(flops=1e6)
    enough = float(str(said.value).split("--flops ")[1])
    assert [row.tokens * row.flops_per_token for row in asked(flops=enough)] == pytest.approx([enough] * 2, rel=0.01)


@given(base=st.integers(1, 10**6), others=st.lists(st.integers(1, 10**6), min_size=1, max_size=3))
def test_the_smallest_budget_is_the_smallest(base: int, others: list[int]) -> None:
    others = [max(other, base // 3 + 1) for other in others if other < 9 * base] or [base]
    found = smallest(base, [base, *others])
    works = [all(fits(cost, n * base) for cost in [base, *others]) for n in (*range(1, min(found, 300)), found)]
    assert works == [False] * (len(works) - 1) + [True]


def test_tokens_are_the_same_for_contenders_with_another_batch() -> None:
    made = make(make_plan("standard:train.batch=16,label=large", "standard:train.batch=1,label=small"))
    assert [row.steps for row in made.rows] == [100, 25, 400]
    assert {row.tokens for row in made.rows} == {100 * 4 * 32}


def clock(rounds: dict[str, tuple[float, ...]], asked: list[list[str]] | None = None, factor: float = 1.0) -> Any:
    """A measurement of throughput whose answer for each stream is known."""

    def measure(configs: Any, vocabulary: int) -> dict[str, Throughput]:
        assert vocabulary == 256
        if asked is not None:
            asked.append([config.stream for config in configs.values()])
        times = {key: [factor * each for each in rounds[config.stream]] for key, config in configs.items()}
        return {key: Throughput(Rounds(tuple(its)), None) for key, its in times.items()}

    return measure


def test_time_is_measured_once_and_then_kept() -> None:
    speeds, asked = {"standard": (1000.0,) * 3, "deep_delta": (500.0,) * 3, "denseformer": (1600.0,) * 3}, []
    plan = make_plan("deep_delta", match="time")
    made = make(plan, measure=clock(speeds, asked))
    assert [row.steps for row in made.rows] == [100, 50]
    assert make(plan, old=made.rows, measure=clock(speeds, asked, 9.0)).rows == made.rows
    assert len(asked) == 1
    # on a faster day what counts is the ratio
    grown = make(plan.grow({"stream": ["denseformer"]}), old=made.rows, measure=clock(speeds, asked, 3.0))
    assert asked[1] == ["standard", "denseformer"]
    assert grown.rows[:2] == made.rows
    assert (grown.rows[2].steps, grown.rows[2].tokens_per_second) == (160, 1600.0)


def test_chance_decides_no_budget_of_equal_time() -> None:
    """A throughput that is off by less than it varies over rounds counts as the baseline's."""
    rounds = {"standard": (1000.0,) * 3, "deep_delta": (900.0, 970.0, 1100.0), "denseformer": (880.0, 900.0, 920.0)}
    made = make(make_plan("deep_delta", "denseformer", match="time"), measure=clock(rounds))
    assert [row.steps for row in made.rows] == [100, 100, 90]


def test_flops_are_not_matched_where_a_layer_has_no_rule() -> None:
    """Linear attention: refused by name, and the column says that it is not counted."""
    small = {"num_experts": 4, "num_experts_per_tok": 2}
    options = BASE | {"family": "qwen3_next", "model": small, "tokenizer": "bpe:2048", "stream": ["denseformer"]}
    row = make(Plan.new(options)).rows[0]
    assert "Qwen3NextGatedDeltaNet" in row.uncounted
    assert report.cost("flops_per_token", str, SimpleNamespace(row=row)).text == "not counted"  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"no rule for the operations of Qwen3NextGatedDeltaNet.*give --match tokens"):
        make(Plan.new(options | {"match": "flops"}))


# Sizes, and contenders that are matched in parameters.


def test_sizes_are_spelled_as_presets_and_changes() -> None:
    sizes = parse_sizes("nano,tiny:blocks=8:tokens=4000,width=64:blocks=2,width=96:heads=4:hidden=200", TrainConfig())
    assert [(size.label, size.preset, size.tokens) for size in sizes] == [
        ("nano", "nano", None),
        ("tiny:blocks=8:tokens=4000", "tiny", 4000),
        ("width=64:blocks=2", "nano", None),
        ("width=96:heads=4:hidden=200", "nano", None),
    ]
    narrow = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": None}
    assert [size.model for size in sizes[1:3]] == [{"num_hidden_layers": 8}, narrow]
    assert sizes[3].model["intermediate_size"] == 200
    small = "width=64:blocks=2:steps=7"
    made = make(make_plan("deep_delta", sizes=f"nano,{small}", base={"model": {}}))
    assert [(row.size, row.steps) for row in made.rows] == [("nano", 100)] * 2 + [(small, 7)] * 2
    assert made.rows[0].parameters == PRESETS["nano"].parameters > 3 * made.rows[2].parameters


def test_wider_and_deeper_come_to_the_nearest_number_of_parameters() -> None:
    plan = make_plan(
        *("muddformer", "deep_delta:value_channels=4,expand=conv,label=DDL", "standard:wider=muddformer"),
        *("standard:wider=DDL", "standard:deeper=muddformer"),
        'standard:wider="hyper_connections:streams=2",label=spelled',
    )
    made = make(plan)
    rows, per_unit = by_label(made), 2 * 3 * 32  # blocks, matrices of a gated MLP, width
    plain = rows["standard"].parameters
    for goal in ("muddformer", "DDL"):
        wide = rows[f"standard:wider={goal}"]
        assert wide.parameters == plain + (wide.model["intermediate_size"] - 48) * per_unit > plain
        assert abs(wide.parameters - rows[goal].parameters) <= per_unit // 2
    deeper, each = rows["standard:deeper=muddformer"], (plain - 256 * 32 - 32) // 2
    assert deeper.parameters == plain + (deeper.model["num_hidden_layers"] - 2) * each
    assert abs(deeper.parameters - rows["muddformer"].parameters) <= each // 2
    config = made.config(next(run for run in made.runs() if run.row == wide))
    assert (config.stream, config.model) == ("standard", TINY | wide.model)
    assert "hyper_connections:streams=2" in str(plan.contenders[-1].stream_options)


@given(slope=st.integers(1, 50), start=st.integers(0, 100), goal=st.integers(1, 5000), first=st.integers(1, 300))
def test_nearest(slope: int, start: int, goal: int, first: int) -> None:
    found = contenders.nearest(lambda n: start + slope * n, goal, first)
    off = abs(start + slope * found - goal)
    assert all(off <= abs(start + slope * n - goal) for n in range(1, 5002))


def test_a_comparison_takes_the_shape_of_a_configuration_file(tmp_path: Path) -> None:
    path, heads = tmp_path / "config.json", {"num_attention_heads": 2, "head_dim": 16, "num_key_value_heads": 1}
    path.write_text(json.dumps(TINY | heads | {"model_type": "qwen3", "vocab_size": 151_936}))
    plan = Plan.new({"family": str(path), "stream": ["denseformer"], "steps": 100, "context": 32})
    path.unlink()  # what it says stands in the plan
    assert (plan.base.family, plan.sizes[0].label) == ("qwen3", "qwen3")
    assert Plan.new(plan.options()) == plan
    assert make(plan).rows[0].parameters == 256 * 32 * 2 + 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48 + 96) + 32
    wider = Plan.new({**plan.options(), "sizes": "width=64"}).sizes[0]
    assert wider.model == {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    with pytest.raises(ValueError, match="the size 'tiny': it names a preset, and the shape of qwen3 is given"):
        Plan.new({**plan.options(), "sizes": "tiny"})


@pytest.mark.parametrize(
    ("stream", "mixer"),
    [
        ("deep_delta:value_channels=4,expand=conv,placement=0-1/attention", None),
        ("standard:model.intermediate_size=77,init=paired", "short_swa:window=4"),
        ("hyper_connections", "canon"),
    ],
)
def test_a_contender_is_spelled_out_and_read_back(stream: str, mixer: str | None) -> None:
    contender = make_contender(stream, mixer)
    assert parse_spelled(spelled_out(contender)).key == contender.key


# Controls and checks.


def test_controls_belong_to_the_contenders_that_are_there() -> None:
    streams = ["standard", "deep_delta:value_channels=4,label=DDL", "hyper_connections", "denseformer"]
    given = make_contenders(streams, ["canon"])
    sizes = {"standard": 1000, "DDL": 1005, "hyper_connections": 1100, "denseformer": 1001, "standard + canon": 1010}
    found = contenders.controls(given, given[0], lambda contender: sizes[contender.label])
    assert [c.label for c in found] == [
        *("DDL, update=write", "DDL, update=add", "hyper_connections:frozen=both"),
        *("standard:wider=hyper_connections", "standard:wider=standard + canon"),
    ]
    assert found[0].stream_options == {"value_channels": 4, "update": "write"}
    assert (
        contenders.controls((*given, *found), given[0], lambda c: sizes.get(c.label, 2000)) == []
    )  # none of their own
    made = make(make_plan("deep_delta:value_channels=4"))
    assert made.contenders == contenders.freeze_references(made.contenders)


def test_checks_of_the_baseline_and_its_budget() -> None:
    first = make_contender()
    made = recipe_checks(first, TrainConfig(steps=100, lr=2e-3), rates=True)
    assert [each.train for each in made] == [{"warmup": 0.15}, {"warmup": 0.6}, {"lr": 1e-3}, {"lr": 4e-3}]
    assert made[0].label == "standard, half the warm-up"
    assert len(recipe_checks(first, TrainConfig(steps=100), rates=False)) == 2
    twice = with_budget(first, 2, "standard, twice the tokens")
    plan = make_plan("deep_delta").with_contenders([*made, twice], checks=True)
    assert plan.with_contenders([twice], checks=True) == plan
    rows = make(plan).rows
    assert [row.steps for row in rows] == [100] * 6 + [200]
    assert [row.contender for row in make(plan).judged("stdlib", "nano")] == [rows[1].contender]
    flops = make(make_plan("deep_delta", match="flops").with_contenders([twice], checks=True)).rows
    assert flops[2].tokens == 2 * flops[0].tokens


# Learning rates.


def test_the_baselines_rate_is_kept_unless_another_is_clearly_better() -> None:
    near: dict[float, list[float | None]] = {1e-3: [3.0, 3.3, 3.1], 2e-3: [3.1, 3.0, 3.2], 4e-3: [3.5, 3.4, 3.6]}
    assert [choose(near, kept).lr for kept in (None, 1e-3, 4e-3)] == [2e-3, 1e-3, 2e-3]
    assert choose(near | {4e-3: [None, 3.4, 3.6]}, 4e-3).lr == 2e-3  # where it diverges nobody keeps it
    assert choose(near, 0.5).lr == 2e-3  # one that was not tried


def test_the_best_rate_is_the_one_with_the_smallest_mean() -> None:
    chosen = choose({0.001: [2.0, 2.2], 0.002: [1.9, 2.1], 0.004: [1.8, None]})
    assert (chosen.lr, chosen.losses[0.004], chosen.edge) == (0.002, None, False)
    assert choose({0.001: [1.0], 0.002: [2.0]}).edge
    assert choose({0.002: [None], 0.001: [None]}).lr == 0.001
    assert not choose({0.002: [1.0]}).edge
    assert choose({0.002: [0.0], 0.001: [0.5], 0.004: [0.5]}).lr == 0.002


def test_rates_are_chosen_on_rows_that_nobody_is_judged_by() -> None:
    made = make(make_plan("deep_delta", lr="0.001,0.002", base={"final_examples": 100}))
    run = made.choosing_runs()[0]
    assert [made.config(run._replace(choosing=choosing)).eval_skip for choosing in (True, False)] == [100, 0]


def outcome(loss: float | None) -> Result:
    nothing = dict.fromkeys(("peak_memory", "bits_per_byte", "accuracy", "chance", "train_loss", "weights"))
    numbers = dict.fromkeys(("steps", "tokens", "flops", "seconds", "tokens_per_second", "parameters"), 1)
    return Result(status="finished" if loss is not None else "diverged", loss=loss, **numbers, **nothing)


def test_rates_are_settled_row_by_row_when_all_their_runs_are_there() -> None:
    plan = make_plan("deep_delta", "standard:train.lr=0.5,label=fixed", lr="0.001,0.002,0.004", seeds=1, lr_seeds=2)
    made = make(plan)

    def rates(plan: Plan) -> list[float | None]:
        return [row.lr for row in plan.rows]

    assert rates(made) == [None, None, 0.5]
    asked = [(s, c, lr) for s in (1000, 1001) for c in ("standard", "deep_delta") for lr in (0.001, 0.002, 0.004)]
    assert [(r.seed, r.label, r.lr) for r in made.choosing_runs()] == asked
    assert [run.label for run in made.runs()] == ["fixed"]
    losses = {"standard": {0.001: 3.0, 0.002: 2.0, 0.004: 2.5}, "deep_delta": {0.001: 3.0, 0.002: 2.0, 0.004: None}}
    part = choose_rates(made, lambda run: outcome(losses["standard"][run.lr]) if run.label == "standard" else None)
    assert rates(part) == [0.002, None, 0.5]
    whole = choose_rates(part, lambda run: outcome(losses[run.label][run.lr]))
    assert rates(whole) == [0.002, 0.002, 0.5]
    assert whole.rows[1].lr_losses == {"0.001": 3.0, "0.002": 2.0, "0.004": None}
    assert {run.row.lr for run in whole.choosing_runs()} == {0.002}
    assert choose_rates(whole, lambda run: None) is whole
    alone = choose_rates(made, lambda run: outcome(2.0) if run.label == "deep_delta" else None)
    assert rates(alone) == [None, None, 0.5]  # the baseline's rate comes first
    assert rates(make(plan.grow({"lr": "0.001,0.002,0.004,0.008"}), old=whole.rows)) == [None, None, 0.5]
    assert make(plan, old=whole.rows).rows == whole.rows


# Files, and what a folder may grow by.


def test_a_plan_is_the_same_after_a_file(tmp_path: Path) -> None:
    streams = ("deep_delta:value_channels=4", "standard:wider=deep_delta:value_channels=4")
    more: dict[str, Any] = {"data": ["stdlib", ["a", "b"]], "task": ["recall"], "sizes": "nano,tiny", "lr": "1e-3,2e-3"}
    plan = make_plan(*streams, **more)
    made = make(plan)
    made.save(tmp_path)
    loaded = Plan.load(tmp_path)
    assert loaded == made
    assert [c.key for c in loaded.contenders] == [c.key for c in plan.contenders]
    assert len(made.rows) == 3 * 3 * 2
    assert Plan.new(read_options(str(tmp_path / "compare.json"), {})) == plan
    (tmp_path / "compare.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="has format 99; this version of twoaxis reads format 3"):
        Plan.load(tmp_path)


def test_a_folder_grows_and_does_not_change() -> None:
    plan = make_plan("deep_delta", "standard:wider=deep_delta", seeds=3)
    assert plan.grow({}) == plan
    assert plan.grow({"stream": ["deep_delta", "standard:wider=deep_delta"], **BASE}) == plan
    grown = plan.grow({"stream": ["denseformer"], "seeds": 5, "task": ["recall"], "sizes": "tiny"})
    assert grown.labels == [*plan.labels, "denseformer"]
    assert (grown.seeds, grown.grown, grown.grow({"seeds": 7}).grown) == ((0, 1, 2, 3, 4), (3,), (3, 5))
    assert [look.seeds for look in grown.looks] == [3, 5]
    planned = make_plan("deep_delta", until="resolved")
    assert (len(planned.seeds), [look.seeds for look in planned.looks]) == (16, [4, 8, 16])
    assert grown.data == (("stdlib",), ("task:recall",))
    assert [size.label for size in grown.sizes] == ["nano", "tiny"]
    assert plan.grow({"seeds": "7,"}).seeds == (0, 1, 2, 7)
    assert plan.grow({"log_every": 3}).base.log_every == 3
    old, new = make(plan).rows, make(grown, old=make(plan).rows).rows
    assert all(row in new for row in old)
    changes: dict[str, Any] = {"batch": 8, "model": {"hidden_size": 64}, "steps": 101, "match": "flops"}
    with pytest.raises(ValueError, match="leave these options out to go on with it") as refused:
        plan.grow(changes | {"baseline": "deep_delta", "lr": "1e-3"})
    for part in ("batch: 4 -> 8", "model: ", "steps: 100 -> 101", "match: 'tokens' -> 'flops'", "lr: 0.004 -> 0.001"):
        assert part in str(refused.value)
    for change, message in (
        ({"stream": ["deep_delta:label=again"]}, "'deep_delta' and 'again' are the same"),
        ({"stream": ["denseformer:label=deep_delta"]}, "two contenders are called 'deep_delta'"),
        ({"tokens": 5}, r"steps: 100 -> None|tokens: None -> 5"),
    ):
        with pytest.raises(ValueError, match=message):
            plan.grow(change)
    with pytest.raises(ValueError, match=r"seeds: 16 -> 20, of which --until has planned the use"):
        planned.grow({"seeds": 20})


def test_a_file_says_the_same_and_counts_less(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(
        'seeds = 2\nlr = [1e-3, 2e-3]\nstream = "deep_delta"\nsteps = 5\ndata = ["stdlib", ["a", "b"]]\n'
        '[[contenders]]\nstream = "denseformer"\nmixer = "canon"\nlabel = "mine"\ntrain = {weight_decay = 0.0}\n'
        "[model]\nhidden_size = 64\n"
    )
    options = read_fields(tmp_path / "p.toml")
    plan = Plan.new(options)
    assert plan.labels == ["standard", "deep_delta", "mine"]
    assert plan.contenders[2].train == {"weight_decay": 0.0}
    assert (plan.seeds, plan.lrs, plan.base.steps) == ((0, 1), (1e-3, 2e-3), 5)
    assert (plan.data, plan.base.model) == ((("stdlib",), ("a", "b")), {"hidden_size": 64})
    merged = Plan.new(merge(options, {"tokens": 4096, "stream": ["elc_bert"], "seeds": "1"}))
    assert (merged.base.steps, merged.base.tokens, merged.seeds) == (None, 4096, (0,))
    assert merged.labels == ["standard", "deep_delta", "elc_bert", "mine"]


def test_seeds_are_counted_or_named() -> None:
    for said, seeds in {"3": (0, 1, 2), 3: (0, 1, 2), "5,6,7": (5, 6, 7), "4,": (4,), "0, 6-8": (0, 6, 7, 8)}.items():
        assert parse_seeds(said) == seeds
    assert (parse_seeds([5, 6, 7]), parse_seeds(2, 1000)) == ((5, 6, 7), (1000, 1001))


def test_every_field_of_a_run_has_its_place() -> None:
    fields = {field.name for field in dataclasses.fields(TrainConfig)}
    assert set(FIELDS) | set(SET_HERE) == fields
    assert set(get_type_hints(SharedFields)) == set(FIELDS)
    assert set(contenders.PER_CONTENDER) <= fields | {contenders.BUDGET}
