"""`train`: what it computes, what it leaves behind and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from torch import Tensor, nn

from tests.pretrained.helpers import byte_llama
from tests.training.train_helpers import SHAPE, Uneven, numbers, small
from twoaxis import mixer_names, stream_names
from twoaxis.data.load import load_data
from twoaxis.model.load import load_model
from twoaxis.pretrained.convert import retrofit
from twoaxis.training.build import flops_per_token, learn, make_model, model_config, resolve
from twoaxis.training.checkpoint import weights, weights_digest
from twoaxis.training.config import TrainConfig
from twoaxis.training.groups import make_optimizer
from twoaxis.training.held_out import collate, measure
from twoaxis.training.results import load_log, load_result
from twoaxis.training.schedule import rate
from twoaxis.training.train import train

METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "both axes": {"stream": "deep_delta:value_channels=2,expand=conv", "mixer": "canon"},
    "hyper": {"stream": "hyper_connections:streams=2", "mixer": "short_swa:window=3,heads=2"},
}


def by_hand(config: TrainConfig, data: Any) -> tuple[nn.Module, list[float], list[float]]:
    """A training loop with nothing but torch: the whole batch at once. The model, losses and gradient norms."""
    model = make_model(config, data.vocab_size)
    optimizer = make_optimizer(
        model,
        learn(config, model),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        epsilon=config.epsilon,
        weight_decay=config.weight_decay,
    )
    peaks = [group["lr"] for group in optimizer.param_groups]
    examples = data.train(config.seed, config.total_steps * config.batch)
    losses, norms = [], []
    for step in range(1, config.total_steps + 1):
        batch = collate([examples[i] for i in range((step - 1) * config.batch, step * config.batch)])
        labels = batch.pop("labels")[:, 1:]
        logits = model(**batch, use_cache=False).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits[labels != -100], labels[labels != -100])
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), config.clip or math.inf).item())
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * rate(config, step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses, norms


def trained(config: TrainConfig, folder: Path, data: Any) -> dict[str, Tensor]:
    train(dataclasses.replace(config, save_model=True), folder, data=data)
    return weights(load_model(folder / "model", "cpu"))


@pytest.mark.parametrize("changes", [{"accumulate": 1}, {"accumulate": 4}, {"accumulate": 2, "clip": 0.0}])
@pytest.mark.parametrize("method", ["plain", "both axes"])
def test_against_a_loop_by_hand(method: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """The loss is over all labelled tokens of a step, however they are spread over its passes."""
    config = small(**METHODS[method], **changes, batch=8, steps=5, log_every=1, context=16, epsilon=1e-4)
    model, losses, norms = by_hand(config, Uneven())
    found = trained(config, tmp_path, Uneven())
    for name, tensor in weights(model).items():
        torch.testing.assert_close(
            found[name], tensor, rtol=0, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    log = [record for record in load_log(tmp_path) if "loss" in record]
    assert [record["loss"] for record in log] == pytest.approx(losses, abs=2e-6)
    assert [record["grad_norm"] for record in log] == pytest.approx(norms, rel=2e-5)
    assert [record["lr"] for record in log] == [config.lr * rate(config, step) for step in range(1, 6)]


def test_log_and_result(tmp_path: Path) -> None:
    config = small(steps=14, log_every=4, eval_every=5, batch=6, measure_memory=True, save_model=True)
    seen: list[tuple[int, float | None]] = []
    result = train(config, tmp_path, watch=lambda step, loss: seen.append((step, loss)))
    log = load_log(tmp_path)
    assert [(r["step"], "loss" in r) for r in log] == [
        *((4, True), (5, False), (8, True), (10, False), (12, True), (14, True), (14, False))
    ]
    assert [step for step, _ in seen] == list(range(15))
    assert seen[0] == (0, None)
    losses = [loss for _, loss in seen[1:] if loss is not None]
    records = [r for r in log if "loss" in r]
    means = [sum(losses[a:b]) / (b - a) for a, b in ((0, 4), (4, 8), (8, 12), (12, 14))]
    assert [r["loss"] for r in records] == pytest.approx(means, rel=1e-12)
    keys = {"step", "tokens", "flops", "seconds"}
    assert all(set(r) == keys | {"loss", "lr", "grad_norm", "tokens_per_second"} for r in records)
    assert all(set(r) == keys | {"held_out_loss", "accuracy"} for r in log if "loss" not in r)
    shape = model_config(config, load_data(config).vocab_size)
    per_token = flops_per_token(config, shape)
    assert all(r["tokens"] == r["step"] * 6 * 24 and r["flops"] == r["tokens"] * per_token for r in log)
    assert (result.status, result.steps, result.tokens) == ("finished", 14, 14 * 6 * 24)
    assert result.loss == log[-1]["held_out_loss"]
    assert result.accuracy == log[-1]["accuracy"]
    assert result.chance == load_data(config).chance == 1 / 32
    assert result.train_loss == losses[-1]  # a tenth of 14 steps is one
    assert result.seconds == log[-1]["seconds"]
    assert result.tokens_per_second > 0
    assert result.parameters == sum(p.numel() for p in load_model(tmp_path / "model").parameters())
    assert result.peak_memory is not None
    assert result.peak_memory > 4 * 4 * result.parameters  # weights, gradients and two moments
    assert load_result(tmp_path) == result
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.jsonl", "model", "result.json", "run.json"]


def test_the_saved_model_is_the_one_that_was_measured(tmp_path: Path) -> None:
    config = small(**METHODS["hyper"], save_model=True)
    result = train(config, tmp_path)
    model = load_model(tmp_path / "model", "cpu")
    assert weights_digest(model) == result.weights
    assert model.config.use_cache is True
    assert not list((tmp_path / "model").glob("*.bin"))
    total, right, count = 0.0, 0, 0
    examples = load_data(config).held_out(config.eval_examples)
    for index in range(len(examples)):  # pyright: ignore[reportArgumentType]
        item = examples[index]
        with torch.no_grad():
            found = model(item["input_ids"][None]).logits[0, :-1].log_softmax(-1)
        for position, label in enumerate(item["labels"][1:].tolist()):
            if label != -100:
                total, count = total - found[position, label].item(), count + 1
                right += int(found[position].argmax()) == label
    assert count > 0
    assert result.loss == pytest.approx(total / count, abs=1e-5)
    assert result.accuracy == right / count


def test_same_seed_same_bits_other_seed_others(tmp_path: Path) -> None:
    first, again = (train(small(**METHODS["both axes"]), tmp_path / name) for name in ("a", "b"))
    assert first.weights == again.weights
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")
    other = train(small(**METHODS["both axes"], seed=1), tmp_path / "c")
    assert other.weights != first.weights
    start = train(small(**METHODS["both axes"], seed=1, init_seed=0), tmp_path / "d")
    begun = {name: json.loads((tmp_path / name / "run.json").read_text())["initial_weights"] for name in "acd"}
    assert begun["a"] == begun["d"] != begun["c"]
    assert start.weights not in (first.weights, other.weights)


@pytest.mark.slow
@pytest.mark.parametrize("stream", stream_names())
@pytest.mark.parametrize("mixer", [None, *mixer_names()])
def test_every_method_trains(stream: str, mixer: str | None, tmp_path: Path) -> None:
    """With deterministic algorithms only, and to the same bits."""
    config = small(stream=stream, mixer=mixer, steps=4)
    first, again = (train(config, tmp_path / name) for name in ("a", "b"))
    assert first.status == "finished"
    assert first.weights == again.weights
    assert json.loads((tmp_path / "a" / "run.json").read_text())["initial_weights"] != first.weights


def test_contenders_of_a_seed_start_alike() -> None:
    plain, *others = (weights(make_model(small(**fields, model=SHAPE), 29)) for fields in METHODS.values())
    for other in others:
        shared = set(plain) & set(other)
        assert {"model.embed_tokens.weight", "model.trunk.blocks.1.mlp.gate.weight"} <= shared
        alike = [name for name in shared if plain[name].shape == other[name].shape]
        same = [name for name in alike if torch.equal(plain[name], other[name])]
        # what a paper rescales (output projections) may differ
        assert all(name.endswith((".output.weight", ".down.weight")) for name in set(alike) - set(same))
    assert set(weights(make_model(small(init_seed=7), 29))) == set(plain)
    assert not torch.equal(
        weights(make_model(small(init_seed=7), 29))["model.embed_tokens.weight"], plain["model.embed_tokens.weight"]
    )


def test_evaluation_and_saving_leave_no_trace(tmp_path: Path) -> None:
    config = small(stream="deep_delta")
    often = train(dataclasses.replace(config, eval_every=1, save_every=1, log_every=1), tmp_path / "often")
    rarely = train(dataclasses.replace(config, eval_every=100), tmp_path / "rarely")
    assert often.weights == rarely.weights
    assert often.loss == rarely.loss
    evaluated = [record for record in load_log(tmp_path / "rarely") if "held_out_loss" in record]
    assert [record["step"] for record in evaluated] == [12]


def _seed() -> None:
    torch.manual_seed(3)
    random.seed(4)
    np.random.seed(5)  # noqa: NPY002


def test_the_process_is_left_as_it_was(tmp_path: Path) -> None:
    _seed()
    wanted = torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
    _seed()
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    train(small(steps=2, threads=2), tmp_path)
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == (threads, strict)
    assert torch.equal(torch.rand(3), wanted[0])
    assert (random.random(), np.random.rand()) == wanted[1:]  # noqa: NPY002


def test_a_finished_run_is_not_done_again(tmp_path: Path) -> None:
    first = train(small(), tmp_path)
    (tmp_path / "checkpoints").mkdir()  # as a process leaves it that is killed at the very end

    def never(step: int, loss: float | None) -> None:
        raise AssertionError

    assert train(small(keep=5, log_every=1), tmp_path, watch=never) == first
    assert not (tmp_path / "checkpoints").exists()


def test_another_run_is_refused(tmp_path: Path) -> None:
    train(small(), tmp_path)
    with pytest.raises(
        ValueError, match=r"holds another run: batch is 4 there and 8 here; lr is 0.002 there and 0.1 here"
    ):
        train(small(lr=0.1, batch=8, log_every=1), tmp_path)


def test_changed_data_is_refused(tmp_path: Path) -> None:
    class Other(Uneven):
        fingerprint = "changed"

    def stop(step: int, loss: float | None) -> None:
        if step == 3:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        train(small(context=16), tmp_path, data=Uneven(), watch=stop)
    with pytest.raises(ValueError, match=f"data uneven has changed since the run in {tmp_path} began"):
        train(small(context=16), tmp_path, data=Other())


@pytest.mark.parametrize(
    ("changes", "steps", "message"),
    [
        ({"model": SHAPE | {"initializer_range": 1e38}}, 0, "the loss of step 1 is nan"),
        ({"lr": 1e30, "warmup": 0.0}, 1, "the gradient's norm of step 2 is nan"),  # of a loss that is a number
    ],
)
def test_divergence(changes: dict[str, Any], steps: int, message: str, tmp_path: Path) -> None:
    config = small(**changes, save_every=1, log_every=1)
    result = train(config, tmp_path)
    assert (result.status, result.steps, result.loss, result.weights) == ("diverged", steps, None, None)
    assert result.message == f"{message}; the run in {tmp_path} was stopped there"
    assert load_result(tmp_path) == result
    assert train(config, tmp_path) == result
    assert [record["step"] for record in load_log(tmp_path)] == list(range(1, steps + 1))
    assert not (tmp_path / "checkpoints").exists()


def test_held_out_loss_that_is_no_number(tmp_path: Path) -> None:
    result = train(small(lr=1e38, warmup=0.0, eval_every=1), tmp_path)
    assert (result.status, result.steps) == ("diverged", 1)
    assert result.message.startswith("the held-out loss after step 1 is nan")


def test_recompute_changes_memory_not_numbers(tmp_path: Path) -> None:
    config = small(**METHODS["both axes"], steps=3, context=24, batch=16, measure_memory=True)
    plain = train(config, tmp_path / "plain")
    again = train(dataclasses.replace(config, recompute=1), tmp_path / "again")
    assert again.train_loss == pytest.approx(plain.train_loss, abs=1e-6)
    assert again.peak_memory is not None
    assert plain.peak_memory is not None
    assert again.peak_memory < plain.peak_memory
    shape = model_config(config, 29)
    full, part = (flops_per_token(dataclasses.replace(config, recompute=n), shape) for n in (1, 2))
    assert part - flops_per_token(config, shape) == (full - flops_per_token(config, shape)) / 2
    assert again.flops > plain.flops


def test_bfloat16(tmp_path: Path) -> None:
    """Passes in bfloat16 differ a little; the weights stay in float32."""
    config = small(**METHODS["both axes"], steps=6, log_every=1)
    wide, narrow = (
        trained(dataclasses.replace(config, dtype=dtype), tmp_path / dtype, None) for dtype in ("float32", "bfloat16")
    )
    losses = [[r["loss"] for r in load_log(tmp_path / d) if "loss" in r] for d in ("float32", "bfloat16")]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)
    assert {tensor.dtype for tensor in narrow.values()} == {torch.float32}
    assert any(not torch.equal(wide[name], narrow[name].bfloat16().float()) for name in wide)


@pytest.mark.slow
def test_compile(tmp_path: Path) -> None:
    config = small(stream="denseformer", steps=6)
    plain = train(config, tmp_path / "plain")
    compiled = train(dataclasses.replace(config, compile=True, save_model=True), tmp_path / "compiled")
    assert compiled.loss == pytest.approx(plain.loss, abs=1e-4)
    assert compiled.train_loss == pytest.approx(plain.train_loss, abs=1e-4)
    assert weights_digest(load_model(tmp_path / "compiled" / "model", "cpu")) == compiled.weights


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(small(report_to=("tensorboard",)), tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    log = load_log(tmp_path)
    for tag, key in (("train/loss", "loss"), ("eval/loss", "held_out_loss"), ("eval/accuracy", "accuracy")):
        wanted = [(r["step"], r[key]) for r in log if key in r]
        assert [(e.step, e.value) for e in events.Scalars(tag)] == [(s, pytest.approx(v, rel=1e-6)) for s, v in wanted]


def test_reports_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown report_to 'tensorbord' \(did you mean 'tensorboard'\?\)"):
        train(small(report_to=("tensorbord",)), tmp_path)
    import importlib.util

    if importlib.util.find_spec("wandb") is None:
        with pytest.raises(ValueError, match="report_to wandb needs the package wandb, which is not installed"):
            train(small(report_to=("wandb",)), tmp_path)
    assert not tmp_path.joinpath("run.json").exists()


def test_going_on_from_a_saved_model(tmp_path: Path) -> None:
    train(small(stream="deep_delta", save_model=True), tmp_path / "first")
    source = str(tmp_path / "first" / "model")
    config = small(model={}, source=source, train="model.trunk.stream.*,lm_head", steps=4, save_model=True)
    with pytest.raises(ValueError, match="no parameter is called 'lm_head'"):  # it is tied to the embedding
        train(config, tmp_path / "no")
    config = dataclasses.replace(config, train="model.trunk.stream.*,model.trunk.final_norm")
    result = train(config, tmp_path / "second")
    before, after = weights(load_model(source)), weights(load_model(tmp_path / "second" / "model"))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    chosen = {n for n in before if n.startswith("model.trunk.stream.") or n == "model.trunk.final_norm.weight"}
    assert moved == chosen
    assert result.parameters == sum(before[name].numel() for name in chosen)
    with pytest.raises(ValueError, match="stream, model cannot be chosen with a model to go on from"):
        train(dataclasses.replace(config, stream="denseformer", model=SHAPE), tmp_path / "third")
    with pytest.raises(ValueError, match="has no tokenizer; name the one its model was trained with, such as bytes"):
        train(dataclasses.replace(config, data=("stdlib",)), tmp_path / "third")
    with pytest.raises(ValueError, match="train=new chooses from a saved model"):
        train(small(train="new"), tmp_path / "third")


def test_going_on_from_a_retrofit(tmp_path: Path) -> None:
    source = tmp_path / "retrofit"
    made = retrofit(byte_llama(), stream="denseformer", mixer="short_conv", out=source, tokens=8)
    new = set(made.record.new)
    config = small(model={}, source=str(source), steps=3, train="new", save_model=True)
    train(config, tmp_path / "new")
    before, after = weights(load_model(source)), weights(load_model(tmp_path / "new" / "model"))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved <= new
    assert any(name.startswith("model.trunk.stream.") for name in moved)
    model = load_model(tmp_path / "new" / "model")  # it stays a retrofit
    groups = learn(dataclasses.replace(config, source=str(tmp_path / "new" / "model"), train="all"), model)
    assert {name for group in groups if group.rate == 0.1 for name in group.names} == set(before) - new
    assert {name for group in groups if group.rate == 1.0 for name in group.names} == new


def test_source_that_changed_is_refused(tmp_path: Path) -> None:
    train(small(save_model=True), tmp_path / "first")
    config = small(model={}, source=str(tmp_path / "first" / "model"), steps=4)

    def stop(step: int, loss: float | None) -> None:
        if step == 2:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        train(config, tmp_path / "second", watch=stop)
    changed = load_model(tmp_path / "first" / "model")
    with torch.no_grad():
        changed.model.trunk.final_norm.weight.add_(1e-3)
    changed.save_pretrained(tmp_path / "first" / "model")
    with pytest.raises(ValueError, match="has changed since the run"):
        train(config, tmp_path / "second")


def test_fields_in_a_spelling(tmp_path: Path) -> None:
    spelled = small(stream="deep_delta:value_channels=2,train.lr=0.01,train.tokens=960,label=mine", mixer=None)
    plain = small(stream="deep_delta:value_channels=2", lr=0.01, steps=None, tokens=960)
    assert resolve(spelled) == plain
    assert resolve(plain) is plain
    assert train(spelled, tmp_path).steps == 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stream": "deep_dleta"}, "deep_delta"),
        ({"stream": "deep_delta:vlaue_channels=2"}, "value_channels"),
        ({"preset": "nanno"}, r"unknown preset 'nanno' \(did you mean 'nano'\?\)"),
        ({"model": {"hiden_size": 32}}, r"no field 'hiden_size' \(did you mean 'hidden_size'\?\)"),
        ({"model": SHAPE | {"vocab_size": 5}}, "the data has [0-9]+ tokens, model.vocab_size is 5"),
        ({"device": "gpu"}, "device 'gpu' cannot be used"),
        ({"source": "nowhere", "model": {}}, "there is no folder nowhere"),
    ],
)
def test_mistakes(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        train(small(**changes), tmp_path)
    assert load_result(tmp_path) is None


def test_measure_needs_labels() -> None:
    model = make_model(small(), 29)
    items = [{"input_ids": torch.arange(8), "labels": torch.full((8,), -100)}]
    with pytest.raises(ValueError, match="no token of the held-out examples is labelled"):
        measure(model, items, batch=1, autocast=torch.no_grad, part=(0, 1), total=lambda sums: sums)
