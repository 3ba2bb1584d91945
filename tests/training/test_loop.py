"""`train`: what a step computes, and what a run logs and leaves behind."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.training.runs import SHAPE, Uneven, numbers, small
from twoaxis import mixer_names, stream_names
from twoaxis.data.load import load_data
from twoaxis.model.flops import training_flops
from twoaxis.model.load import load_model
from twoaxis.model.loss import labelled, logits_of, score, summed_loss
from twoaxis.training.checkpoint import weights, weights_digest
from twoaxis.training.config import TrainConfig
from twoaxis.training.engines.engine import Engine, load_batch
from twoaxis.training.engines.processes import Place
from twoaxis.training.folder import load_log
from twoaxis.training.result import load_result
from twoaxis.training.setup import make_model, make_optimizer, model_config
from twoaxis.training.train import train

BOTH: dict[str, Any] = {"stream": "deep_delta:value_channels=2,expand=conv", "mixer": "canon"}
HYPER: dict[str, Any] = {"stream": "hyper_connections:streams=2", "mixer": "short_swa:window=3,heads=2"}
HERE = Place(0, 1, torch.device("cpu"))


def by_hand(run: TrainConfig, data: Any) -> tuple[nn.Module, list[float], list[float]]:
    """The same training with the whole batch at once: the model, losses and gradient norms."""
    model = make_model(run, data.vocab_size)
    optimizer = make_optimizer(run, model)
    examples = data.train(run.seed, run.total_steps * run.batch)
    losses, norms = [], []
    for step in range(1, run.total_steps + 1):
        batch = load_batch(examples, range((step - 1) * run.batch, step * run.batch), HERE.device)
        labels = batch.pop("labels")[:, 1:]
        logits = logits_of(model(**batch, use_cache=False))[:, :-1]
        loss = nn.functional.cross_entropy(logits[labels != -100], labels[labels != -100])
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), run.clip or math.inf).item())
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * run.rate(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses, norms


def trained(run: TrainConfig, folder: Path, data: Any = None) -> dict[str, Tensor]:
    train(dataclasses.replace(run, save_model=True), folder, data=data)
    return weights(load_model(folder / "model", "cpu"))


@pytest.mark.parametrize("changes", [{"accumulate": 1}, {"accumulate": 4}, BOTH | {"accumulate": 2, "clip": 0.0}])
def test_against_a_loop_by_hand(changes: dict[str, Any], tmp_path: Path) -> None:
    """The loss is over all labelled tokens of a step, however they are spread over its micro-batches."""
    run = small(**changes, batch=8, steps=5, log_every=1, context=16, epsilon=1e-4)
    model, losses, norms = by_hand(run, Uneven())
    after = trained(run, tmp_path, Uneven())
    for name, tensor in weights(model).items():
        assert torch.allclose(after[name], tensor, rtol=0, atol=2e-6), name
    log = [record for record in load_log(tmp_path) if "loss" in record]
    assert [record["loss"] for record in log] == pytest.approx(losses, abs=2e-6)
    assert [record["grad_norm"] for record in log] == pytest.approx(norms, rel=2e-5)
    assert [record["lr"] for record in log] == [run.lr * run.rate(step) for step in range(1, 6)]


def test_loss_is_that_of_transformers_to_the_bit() -> None:
    """Values and gradients, in float32 and for logits in bfloat16; the first label of a row never counts."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 11, (3, 7), generator=generator).masked_fill(torch.arange(7) % 3 == 1, -100)
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(3, 7, 11, generator=generator).to(dtype).requires_grad_()
        ours = summed_loss(logits, labels) / labelled(labels)
        theirs = ForCausalLMLoss(logits, labels, 11, num_items_in_batch=labelled(labels))
        assert torch.equal(ours, theirs)
        gradients = [torch.autograd.grad(loss, logits)[0] for loss in (ours, theirs)]
        assert torch.equal(*gradients)
        (nats, _, tokens), rows = (part.tolist() for part in score(logits.detach(), labels))
        assert [sum(column) for column in zip(*rows, strict=True)] == pytest.approx([nats, tokens], rel=1e-12)
        assert tokens == labelled(labels) == 3 * 4
        assert nats / tokens == pytest.approx(ours.item(), rel=1e-5)


def test_a_loss_of_the_models_own_is_logged_apart() -> None:
    """The balance of experts is learned and logged; the reported loss is that of the tokens alone."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 29, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 3}
    config = transformers.MixtralConfig(**sizes, **heads, router_aux_loss_coef=0.5)
    model: Any = transformers.MixtralForCausalLM(config)
    engine = Engine(small(batch=4, accumulate=2, context=16), HERE)
    engine.build(lambda: model)
    batches = engine.micro_batches(Uneven().train(0, 4), 1)
    tokens = engine.labelled(batches)
    engine.start(None)
    found = []
    for asked in (False, True):
        model.config.output_router_logits = asked
        model.zero_grad()
        found.append((engine.gradients(batches, tokens), model.model.layers[0].mlp.gate.weight.grad))
    (plain, without), (losses, gradient) = found
    assert plain.auxiliary is None
    assert torch.equal(losses.tokens, plain.tokens)
    assert losses.auxiliary > 0.5
    assert not torch.equal(gradient, without)


def test_an_evaluation_leaves_the_mode_of_the_model() -> None:
    """Steps are computed in training mode and held-out examples are not, whatever mode the model is in."""
    engine = Engine(small(batch=4, context=16), HERE)
    model, modes = engine.build(lambda: make_model(small(), Uneven.vocab_size)), []
    model.register_forward_pre_hook(lambda *_: modes.append(model.training))
    engine.start(None)
    batches = engine.micro_batches(Uneven().train(0, 4), 1)
    for mode in (True, False):
        model.train(mode)
        engine.score(Uneven().held_out(4))
        assert model.training == mode
        engine.gradients(batches, engine.labelled(batches))
    assert modes == [False, True, False, True]


def test_log_and_result(tmp_path: Path) -> None:
    run = small(steps=14, log_every=4, eval_every=5, batch=6, measure_memory=True, save_model=True)
    seen: list[tuple[int, float | None]] = []
    result: Any = train(run, tmp_path, on_step=lambda step, loss: seen.append((step, loss)))
    log, data = load_log(tmp_path), load_data(run)
    assert [(r["step"], "loss" in r) for r in log] == [
        *((4, True), (5, False), (8, True), (10, False), (12, True), (14, True), (14, False))
    ]
    assert [step for step, _ in seen] == list(range(15))
    assert seen[0] == (0, None)
    losses = [loss for _, loss in seen[1:] if loss is not None]
    means = [sum(losses[a:b]) / (b - a) for a, b in ((0, 4), (4, 8), (8, 12), (12, 14))]
    assert [r["loss"] for r in log if "loss" in r] == pytest.approx(means, rel=1e-12)
    own = {True: {"loss", "lr", "grad_norm", "tokens_per_second"}, False: {"held_out_loss", "accuracy"}}
    assert all(set(r) == {"step", "tokens", "flops", "seconds"} | own["loss" in r] for r in log)
    config: Any = model_config(run, data.vocab_size)
    per_token = training_flops(config, run.context).total
    assert all(r["tokens"] == r["step"] * 6 * 24 and r["flops"] == r["tokens"] * per_token for r in log)
    assert (result.status, result.steps, result.tokens) == ("finished", 14, 14 * 6 * 24)
    assert (result.loss, result.accuracy) == (log[-1]["held_out_loss"], log[-1]["accuracy"])
    assert result.chance == data.chance == 1 / 32
    assert len(result.row_losses) == run.eval_examples
    assert sum(result.row_losses) / run.eval_examples == pytest.approx(result.loss)  # each has as many answers
    assert load_result(tmp_path) == result
    assert result.train_loss == losses[-1]  # a tenth of 14 steps is one
    assert result.seconds == log[-1]["seconds"]
    assert result.tokens_per_second > 0
    assert result.parameters == sum(p.numel() for p in load_model(tmp_path / "model").parameters())
    assert result.peak_memory > 4 * 4 * result.parameters  # weights, gradients and two moments
    assert {p.name for p in tmp_path.iterdir()} == {"log.jsonl", "model", "result.json", "run.json"}


def test_the_saved_model_is_the_one_that_was_measured(tmp_path: Path) -> None:
    run = small(**HYPER, save_model=True)
    result = train(run, tmp_path)
    model = load_model(tmp_path / "model", "cpu")
    assert weights_digest(weights(model)) == result.weights
    assert not list((tmp_path / "model").glob("*.bin"))
    total, right, count = 0.0, 0, 0
    examples = load_data(run).held_out(run.eval_examples)
    for index in range(len(examples)):  # pyright: ignore[reportArgumentType]
        item = examples[index]
        with torch.no_grad():
            found = model(item["input_ids"][None])[0, :-1].log_softmax(-1)
        for position, label in enumerate(item["labels"][1:].tolist()):
            if label != -100:
                total, count = total - found[position, label].item(), count + 1
                right += int(found[position].argmax()) == label
    assert count > 0
    assert result.loss == pytest.approx(total / count, abs=1e-5)
    assert result.accuracy == right / count


def test_same_seed_same_bits_other_seed_others(tmp_path: Path) -> None:
    changes: dict[str, dict[str, int]] = {"a": {}, "b": {}, "c": {"seed": 1}, "d": {"seed": 1, "init_seed": 0}}
    found = {name: train(small(**BOTH, **more), tmp_path / name).weights for name, more in changes.items()}
    assert found["a"] == found["b"]
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")
    assert len({*found.values()}) == 3
    begun = {name: json.loads((tmp_path / name / "run.json").read_text())["initial_weights"] for name in "acd"}
    assert begun["a"] == begun["d"] != begun["c"]


@pytest.mark.slow
@pytest.mark.parametrize("stream", stream_names())
@pytest.mark.parametrize("mixer", [None, *mixer_names()])
def test_every_method_trains(stream: str, mixer: str | None, tmp_path: Path) -> None:
    """With deterministic algorithms only, and to the same bits."""
    run = small(stream=stream, mixer=mixer, steps=4)
    first, again = (train(run, tmp_path / name) for name in ("a", "b"))
    assert first.status == "finished"
    assert first.weights == again.weights
    assert json.loads((tmp_path / "a" / "run.json").read_text())["initial_weights"] != first.weights


def test_contenders_of_a_seed_start_alike() -> None:
    plain, *others = (weights(make_model(small(**fields), 29)) for fields in ({}, BOTH, HYPER))
    for other in others:
        shared = set(plain) & set(other)
        assert {"embed_tokens.weight", "layers.1.mlp.gate_proj.weight"} <= shared
        alike = [name for name in shared if plain[name].shape == other[name].shape]
        same = [name for name in alike if torch.equal(plain[name], other[name])]
        # what a paper rescales (output projections) may differ
        assert all(name.endswith((".o_proj.weight", ".down_proj.weight")) for name in set(alike) - set(same))
    moved = weights(make_model(small(init_seed=7), 29))
    assert set(moved) == set(plain)
    assert not torch.equal(moved["embed_tokens.weight"], plain["embed_tokens.weight"])


def test_evaluation_and_saving_leave_no_trace(tmp_path: Path) -> None:
    run = small(stream="deep_delta")
    often = train(dataclasses.replace(run, eval_every=1, save_every=1, log_every=1), tmp_path / "often")
    rarely = train(dataclasses.replace(run, eval_every=100), tmp_path / "rarely")
    assert (often.weights, often.loss) == (rarely.weights, rarely.loss)
    assert [r["step"] for r in load_log(tmp_path / "rarely") if "held_out_loss" in r] == [12]


def test_the_process_is_left_as_it_was(tmp_path: Path) -> None:
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    train(small(steps=2, threads=2), tmp_path)
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize(
    ("changes", "steps", "message"),
    [
        ({"model": SHAPE | {"initializer_range": 1e38}}, 0, "the loss of step 1 is nan"),
        ({"lr": 1e30, "warmup": 0.0}, 1, "the gradient's norm of step 2 is nan"),  # of a loss that is a number
        ({"lr": 1e38, "warmup": 0.0, "eval_every": 1}, 1, "the held-out loss after step 1 is nan"),
    ],
)
def test_divergence(changes: dict[str, Any], steps: int, message: str, tmp_path: Path) -> None:
    run = small(**changes, save_every=1, log_every=1)
    result = train(run, tmp_path)
    assert (result.status, result.steps, result.loss, result.weights) == ("diverged", steps, None, None)
    assert result.message == f"{message}; the run in {tmp_path} was stopped there"
    assert train(run, tmp_path) == load_result(tmp_path) == result
    assert [record["step"] for record in load_log(tmp_path)] == list(range(1, steps + 1))
    assert not (tmp_path / "checkpoints").exists()


def test_the_last_evaluation_takes_more_rows_and_leaves_some_to_others(tmp_path: Path) -> None:
    run = small(steps=2, eval_every=1, eval_examples=3, final_examples=9)
    judged = train(run, tmp_path / "a")
    others = train(dataclasses.replace(run, eval_skip=4), tmp_path / "b")
    assert judged.weights == others.weights
    assert (judged.row_losses or ())[4:] == (others.row_losses or ())[:5]
    assert len(judged.row_losses or ()) == len(others.row_losses or ()) == 9
    first = next(record["held_out_loss"] for record in load_log(tmp_path / "a") if "held_out_loss" in record)
    data = load_data(run)
    assert len(data.held_out(run.judged_examples)) == 9
    assert first != judged.loss == pytest.approx(sum(row or 0 for row in judged.row_losses or ()) / 9, rel=1e-5)


def test_what_does_not_learn_is_named(tmp_path: Path) -> None:
    # Without tokens to look back on a window of one has a single source, whose weight is one whatever its score.
    plain, alone, *streams = (
        train(small(steps=2, **{axis: spelled}), tmp_path / str(number))
        for number, (axis, spelled) in enumerate(
            [
                *(("stream", "standard"), ("mixer", "short_swa:window=1"), ("stream", "hyper_connections")),
                *(("stream", "hyper_connections:frozen=both"), ("stream", "denseformer")),
            ]
        )
    )
    assert plain.unmoved == ()
    assert alone.unmoved
    assert all("mixer" in name or "local" in name for name in alone.unmoved)
    assert [result.equal_streams for result in streams] == [False, True, False]


def test_evaluation_needs_labels(tmp_path: Path) -> None:
    class Unlabelled(Uneven):
        def held_out(self, count: int) -> Any:
            return [{"input_ids": torch.arange(8), "labels": torch.full((8,), -100)}]

    with pytest.raises(ValueError, match="no token of the held-out examples is labelled"):
        train(small(context=16, steps=1), tmp_path, data=Unlabelled())


def test_recompute_changes_memory_not_numbers(tmp_path: Path) -> None:
    run = small(**BOTH, steps=2, batch=16, measure_memory=True)
    plain = train(run, tmp_path / "plain")
    again = train(dataclasses.replace(run, recompute=1), tmp_path / "again")
    assert again.train_loss == pytest.approx(plain.train_loss, abs=1e-6)
    assert again.peak_memory < plain.peak_memory  # type: ignore[operator]
    shape: Any = model_config(run, 29)
    none, full, half = (training_flops(shape, run.context, recompute=n).total for n in (0, 1, 2))
    assert half - none == (full - none) / 2 > 0


def test_bfloat16(tmp_path: Path) -> None:
    """Passes in bfloat16 differ a little; the weights stay in float32."""
    run = small(**BOTH, steps=6, log_every=1)
    dtypes: tuple[Any, ...] = ("float32", "bfloat16")
    _, narrow = (trained(dataclasses.replace(run, dtype=dtype), tmp_path / dtype) for dtype in dtypes)
    losses = [[r["loss"] for r in load_log(tmp_path / d) if "loss" in r] for d in dtypes]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)
    assert {tensor.dtype for tensor in narrow.values()} == {torch.float32}
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in narrow.values())


@pytest.mark.slow
def test_compile(tmp_path: Path) -> None:
    run = small(stream="denseformer", steps=6)
    plain = train(run, tmp_path / "plain")
    compiled = train(dataclasses.replace(run, compile="yes", save_model=True), tmp_path / "compiled")
    assert compiled.loss == pytest.approx(plain.loss, abs=1e-4)
    assert compiled.train_loss == pytest.approx(plain.train_loss, abs=1e-4)
    assert weights_digest(weights(load_model(tmp_path / "compiled" / "model", "cpu"))) == compiled.weights


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(small(report_to=("tensorboard",)), tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    curves = {"train/loss": "loss", "train/lr": "lr", "held_out/loss": "held_out_loss", "held_out/accuracy": "accuracy"}
    for curve, key in curves.items():
        wanted = [(r["step"], pytest.approx(r[key], rel=1e-6)) for r in load_log(tmp_path) if key in r]
        assert [(e.step, e.value) for e in events.Scalars(curve)] == wanted


def test_trackers_that_are_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for package in ("trackio", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ValueError, match=f"report_to {package} needs the package {package}, which is not inst"):
            train(small(report_to=(package,)), tmp_path)
    assert not (tmp_path / "run.json").exists()


def test_a_seed_gives_the_losses_it_always_gave(tmp_path: Path) -> None:
    """Initial weights, examples and steps of a seed stay what they are from version to version."""
    train(small(), tmp_path)
    found = [record.get("loss", record.get("held_out_loss")) for record in load_log(tmp_path)]
    assert found == pytest.approx([3.9608546, 3.8646716, 3.8852472, 3.9114913, 3.7938465], rel=1e-4)
