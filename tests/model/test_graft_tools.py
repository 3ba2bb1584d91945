"""Other people's tools on a graft: Trainer, PEFT, lm-eval, torch.compile, and what serving engines check."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from transformers import AttentionInterface, AutoModel, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.model.graft_helpers import METHODS, gradients, grafted, logits, tokens
from tests.model.tiny_families import tiny
from twoaxis.model.graft import graft
from twoaxis.model.graft_layers import original_class
from twoaxis.model.graft_survey import difference


class Counting(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows that count upwards from somewhere: quickly learned."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = (torch.arange(12) + 7 * index) % 99
        return {"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)}


def trained(folder: Path, resume: Path | None = None, **changes: Any) -> tuple[Any, list[float]]:
    """A trainer after its run, and the losses."""
    settings: dict[str, Any] = {"max_steps": 8, "save_steps": 4, "per_device_train_batch_size": 4, "seed": 3}
    settings |= {"learning_rate": 1e-2, "logging_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    model = grafted("llama", "two axes")
    arguments = TrainingArguments(output_dir=str(folder), **{**settings, **changes})
    trainer = Trainer(model=model, args=arguments, train_dataset=Counting())
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trainer_learns_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    whole, losses = trained(tmp_path / "whole")
    assert losses[-1] < losses[0]
    again, _ = trained(tmp_path / "again", resume=tmp_path / "whole" / "checkpoint-4")
    one, other = whole.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_trainers_checkpointing_is_not_reentrant_or_refused(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    plain = trained(tmp_path / "plain", max_steps=2, save_steps=100)[1]
    new = hasattr(TrainingArguments, "activation_checkpointing")  # transformers before 5.23 calls it otherwise
    name = "activation_checkpointing" if new else "gradient_checkpointing"
    on: dict[str, Any] = {name: True}
    assert trained(tmp_path / "on", max_steps=2, save_steps=100, **on)[1] == plain
    with pytest.raises(ValueError, match="use_reentrant=True would lose"):
        trained(tmp_path / "lost", max_steps=2, **{**on, f"{name}_kwargs": {"use_reentrant": True}})


@pytest.mark.parametrize(
    ("family", "method"), [("llama", "two axes"), ("phi3", "hyper_connections"), ("llama", "canon")]
)
def test_lora_trains_saves_loads_and_merges(family: str, method: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = grafted(family, method)
    before = logits(model, tokens())
    targets = ["qkv_proj", "o_proj"] if family == "phi3" else ["q_proj", "k_proj", "v_proj", "up_proj"]
    new = [
        "stream",
        *sorted({n.split(".")[-1] for n, _ in model.named_modules() if n.split(".")[-1].startswith("twoaxis_")}),
    ]
    settings = peft.LoraConfig(r=2, target_modules=targets, modules_to_save=new)
    wrapped = peft.get_peft_model(model, settings)
    assert torch.equal(logits(wrapped, tokens()), before)
    wrapped.train()
    found = gradients(wrapped, tokens())
    learning = {name for name, p in wrapped.named_parameters() if p.requires_grad}
    assert learning <= set(found) | {n for n in learning if "gate" in n}
    assert any("lora_B" in n for n in found)
    assert any("stream" in n for n in found) == any(
        "stream" in n for n, _ in model.stream.named_parameters(prefix="stream")
    )
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if name in learning:
                parameter += 0.05 * torch.randn_like(parameter)
    wrapped.eval()
    after = logits(wrapped, tokens())
    assert difference(after, before) > 1e-3
    wrapped.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(grafted(family, method), tmp_path)
    assert difference(logits(again, tokens()), after) < 1e-6
    settings_ = {"max_new_tokens": 5, "do_sample": False}
    expected = wrapped.generate(input_ids=tokens(), use_cache=False, **settings_)
    assert torch.equal(wrapped.generate(input_ids=tokens(), **settings_), expected)
    assert difference(logits(wrapped.merge_and_unload(), tokens()), after) < 3e-6


def test_lm_eval_scores_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from tests.support.foreign import trained_tokenizer

    tokenizer = trained_tokenizer("def f(): import the os and more", "<end>")
    model = grafted("llama", "two axes", vocab_size=len(tokenizer))
    make: Any = HFLM
    scorer = make(pretrained=model, tokenizer=tokenizer, batch_size=2, device="cpu", max_length=32)
    requests = [Instance("loglikelihood", {}, (a, b), 0) for a, b in (("def", " f"), ("import the", " os and more"))]
    alone = [scorer.loglikelihood([request])[0] for request in requests]
    together = scorer.loglikelihood(requests)
    assert all(abs(a[0] - b[0]) < 1e-4 and a[0] < 0 for a, b in zip(alone, together, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_compiled_graft_is_one_graph_and_gives_the_same(method: str) -> None:
    model = grafted("llama", method)
    expected = logits(model, tokens())
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert difference(logits(compiled, tokens()), expected) < 1e-5


# Serving: what vLLM's and SGLang's transformers backends check, restated.


def attention_calls(forward: Any) -> int:
    """Calls of a function that came from the attention interface, in the source of a forward."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    names = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign) and "ALL_ATTENTION_FUNCTIONS" in ast.unparse(node)
        for target in (node.targets if isinstance(node, ast.Assign) else (node.target,))
        if isinstance(target, ast.Name)
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return sum(node.func.id in names for node in calls if isinstance(node.func, ast.Name))


SERVED = ("llama", "qwen3", "mixtral")


@pytest.mark.parametrize("family", SERVED)
def test_serving_engines_find_one_attention_per_layer(family: str, tmp_path: Path) -> None:
    model = grafted(family, "hyper_connections")
    model.save_pretrained(tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    assert {"AutoConfig", "AutoModel", "AutoModelForCausalLM"} <= set(document["auto_map"])
    base = AutoModel.from_pretrained(tmp_path)
    assert base._supports_attention_backend
    assert base.backbone._supports_attention_backend
    found = [m for m in base.modules() if attention_calls(original_class(m).forward) and hasattr(m, "layer_idx")]
    assert [m.layer_idx for m in found] == list(range(base.config.get_text_config().num_hidden_layers))
    assert all(attention_calls(original_class(m).forward) == 1 and m.config is not None for m in found)
    assert all(isinstance(m.scaling, float) for m in found)
    out = base(input_ids=tokens(1), position_ids=torch.arange(13)[None], use_cache=False, return_dict=False)
    assert isinstance(out, tuple)
    assert out[0].shape == (1, 13, 32)
    assert {
        f"stream.{n}" for g in base.stream.parameter_groups() if g.float32 for n in g.names
    } <= base._keep_in_fp32_modules_strict


@pytest.mark.parametrize("family", SERVED)
def test_a_paged_attention_function_serves_two_sequences(family: str) -> None:
    """Both sequences in one flattened row, keys and values in pages of a pool, as serving engines do it."""
    model = grafted(family, "hyper_connections", sliding_window=None)
    lengths, pool = (5, 8), {}

    def paged(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        out, at = [], 0
        for sequence, length in enumerate(lengths):
            part = slice(at, at + length)
            pool[module.layer_idx, sequence] = (k[:, :, part], v[:, :, part])
            keys, values = pool[module.layer_idx, sequence]
            mixed = nn.functional.scaled_dot_product_attention(
                q[:, :, part], keys, values, is_causal=True, scale=scaling, enable_gqa=True
            )
            out, at = [*out, mixed], at + length
        return torch.cat(out, dim=2).transpose(1, 2), None

    AttentionInterface.register("twoaxis_paged", paged)
    expected = [logits(model, tokens(1)[:, :5]), logits(model, tokens(1)[:, 5:])]
    model.set_attn_implementation("twoaxis_paged")
    places = torch.cat([torch.arange(n) for n in lengths])[None]
    served = logits(model, tokens(1), position_ids=places)
    assert len(pool) == 2 * 3
    assert difference(served, torch.cat(expected, dim=1)) < 1e-5
    ALL_ATTENTION_FUNCTIONS._global_mapping.pop("twoaxis_paged", None)


def test_an_attention_function_that_is_not_dispatched_is_refused(tmp_path: Path) -> None:
    AttentionInterface.register("twoaxis_nobody", lambda *a, **k: None)
    model = graft(tiny("bloom"))
    with pytest.raises(ValueError, match="'twoaxis_nobody' is ignored by BloomForCausalLM"):
        model.set_attn_implementation("twoaxis_nobody")
    model = grafted("llama")
    with pytest.raises(ValueError, match="would fetch code from a hub"):
        model.set_attn_implementation("someone/kernel")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="would fetch code"):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="someone/kernel")
    for name in ("eager", "sdpa"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
        assert loaded.backbone.config._attn_implementation == name == loaded.config._attn_implementation
        assert difference(logits(loaded, tokens()), logits(model, tokens())) < 1e-5
