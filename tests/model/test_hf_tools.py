"""Other people's tools on a two-axis model: Trainer, torch.compile, lm-eval."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

pytest.importorskip("transformers")

from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from tests.model.hf_helpers import BASE, ONE_EACH, VOCABULARY, as_hf, logits, make, output, prompt
from tests.support.foreign import trained_tokenizer
from tests.support.numbers import far
from twoaxis.model.config import ModelConfig
from twoaxis.model.hf_model import TwoAxisForCausalLM


class Counting(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows that count upwards from somewhere: quickly learned."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (torch.arange(12) + 7 * index) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


def train(folder: Path, config: ModelConfig, resume: bool | str = False, **changes: Any) -> tuple[Trainer, list[float]]:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "max_steps": 20,
        "save_steps": 10,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "seed": 3,
        "disable_tqdm": True,
        **changes,
    }
    model = TwoAxisForCausalLM(as_hf(config))
    trainer = Trainer(model=model, args=TrainingArguments(output_dir=str(folder), **settings), train_dataset=Counting())
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weights(model: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", ["standard", "two axes", "hyper_connections"])
def test_trainer_learns_and_resumes_to_the_same_bits(name: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    config = ONE_EACH[name]
    whole, losses = train(tmp_path / "whole", config)
    assert len(losses) == 20
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 0.15
    checkpoint = tmp_path / "whole" / "checkpoint-10"
    assert (checkpoint / "model.safetensors").exists()
    assert (checkpoint / "modeling_twoaxis.py").exists()
    resumed, later = train(tmp_path / "resumed", config, resume=str(checkpoint))
    assert later[-10:] == losses[-10:]
    expected, found = weights(whole.model), weights(resumed.model)
    assert expected.keys() == found.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
    last = get_last_checkpoint(str(tmp_path / "resumed"))
    assert last is not None
    stored = load_file(Path(last) / "model.safetensors")
    assert all(torch.equal(stored[key], tensor) for key, tensor in expected.items() if key in stored)


def test_trainer_with_checkpointing_and_accumulation(tmp_path: Path) -> None:
    """Four rows at once, or two times two with recomputed blocks: the same losses to rounding."""
    pytest.importorskip("accelerate")
    _, plain = train(tmp_path / "plain", BASE, max_steps=5, save_steps=5)
    _, parts = train(
        tmp_path / "parts",
        BASE,
        max_steps=5,
        save_steps=5,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
    )
    assert parts == pytest.approx(plain, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["standard", "attention_residuals", "hyper_connections", "short_swa"])
def test_compiled_forward_equals_eager(name: str) -> None:
    torch._dynamo.reset()
    model, tokens = make(ONE_EACH[name], torch.float32), prompt(1)
    compiled: Any = torch.compile(model.forward, fullgraph=True)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2]])
    for given in ({}, {"attention_mask": mask}, {"position_ids": positions}):
        with torch.no_grad():
            found = compiled(input_ids=tokens, use_cache=False, **given).logits
        assert far(found, logits(model, tokens, use_cache=False, **given)) <= 1e-5
    loss = compiled(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    found_gradients = {key: p.grad for key, p in model.named_parameters()}
    model.zero_grad()
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            found = found_gradients[key]
            assert found is not None, key
            assert (found - parameter.grad).abs().max() <= 1e-5 * (1 + parameter.grad.abs().max()), key


@pytest.mark.slow
def test_a_hole_in_the_mask_is_refused_when_compiled() -> None:
    torch._dynamo.reset()
    model, tokens = make(BASE, torch.float32), prompt(2)
    mask = torch.ones_like(tokens)
    mask[0, 4] = 0
    with pytest.raises(RuntimeError, match="attention_mask has a hole"):
        torch.compile(model.forward, fullgraph=True)(input_ids=tokens, attention_mask=mask, use_cache=False)


@pytest.mark.slow
def test_generation_with_a_compiled_forward() -> None:
    torch._dynamo.reset()
    model, tokens = make(BASE, torch.float32), prompt(3, length=6)
    expected = model.generate(tokens, max_new_tokens=6, do_sample=False)  # type: ignore[operator]
    model.forward = torch.compile(model.forward, fullgraph=True, dynamic=True)  # type: ignore[method-assign]
    found = model.generate(tokens, max_new_tokens=6, do_sample=False)  # type: ignore[operator]
    assert torch.equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two axes", "short_swa"])
def test_steps_of_a_generation_share_their_graphs(name: str) -> None:
    """The prompt, the first step and the later ones: what grows with the sequence does not compile anew."""
    torch._dynamo.reset()
    graphs: list[Any] = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    model, tokens = make(ONE_EACH[name], torch.float32), prompt(3, length=6)
    expected = model.generate(tokens, max_new_tokens=12, do_sample=False)  # type: ignore[operator]
    model.forward = torch.compile(model.forward, fullgraph=True, dynamic=True, backend=count)  # type: ignore[method-assign]
    found = model.generate(tokens, max_new_tokens=12, do_sample=False)  # type: ignore[operator]
    assert torch.equal(found, expected)
    assert len(graphs) <= 4


TEXT = "the cat sat on the mat and the dog sat on the log while the fox ran past the box of rocks"


TASK = """
task: two_axis_words
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
"""


@pytest.fixture
def evaluation(tmp_path: Path) -> tuple[Path, Path, list[dict[str, Any]]]:
    """A saved model with a tokenizer, a folder with a task, and its questions."""
    folder, tasks = tmp_path / "model", tmp_path / "tasks"
    tasks.mkdir()
    tokenizer = trained_tokenizer(TEXT, "<|end|>")
    tokenizer.save_pretrained(folder)
    config = ModelConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        mixer="canon",
    )
    make(as_hf(config, stream="attention_residuals", eos_token_id=0), torch.float32).save_pretrained(folder)
    words = TEXT.split()
    questions = [
        {"question": " ".join(words[i : i + 3]), "choices": [f" {words[i + 3]}", " and then", " ran"], "answer": i % 3}
        for i in range(6)
    ]
    (tasks / "data.json").write_text("\n".join(json.dumps(question) for question in questions))
    (tasks / "task.yaml").write_text(TASK.format(data=tasks / "data.json"))
    return folder, tasks, questions


def accuracy_by_hand(folder: Path, questions: list[dict[str, Any]]) -> float:
    """The share of questions whose right answer is the likeliest."""
    model = TwoAxisForCausalLM.from_pretrained(folder).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    right = 0
    for question in questions:
        scores = []
        for choice in question["choices"]:
            start, whole = (tokenizer(question["question"] + part).input_ids for part in ("", choice))
            found = output(model, torch.tensor([whole[:-1]])).logits
            assert found is not None
            chosen = torch.tensor(whole[1:])
            each = found[0].log_softmax(-1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
            scores.append(each[len(start) - 1 :].sum().item())
        right += scores.index(max(scores)) == question["answer"]
    return right / len(questions)


@pytest.mark.slow
def test_lm_eval_with_nothing_but_the_folder(
    evaluation: tuple[Path, Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    pytest.importorskip("lm_eval")
    folder, tasks, questions = evaluation
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "home"),
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
    }
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args"]
    command += [f"pretrained={folder},trust_remote_code=True,dtype=float32", "--include_path", str(tasks)]
    command += ["--tasks", "two_axis_words", "--device", "cpu", "--batch_size", "2"]
    command += ["--output_path", str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(next((tmp_path / "out").rglob("results_*.json")).read_text())
    assert results["results"]["two_axis_words"]["acc,none"] == pytest.approx(accuracy_by_hand(folder, questions))
