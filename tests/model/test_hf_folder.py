"""Saved folders: stable keys, strict loading, the same bits in a new process that never imported twoaxis."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from transformers import AutoModel, AutoModelForCausalLM

from tests.model.hf_helpers import BASE, MEMORIES, ONE_EACH, as_hf, logits, make, prompt
from twoaxis.model.config import ModelConfig
from twoaxis.model.hf_model import TwoAxisForCausalLM, TwoAxisModel

WEIGHTS = "model.safetensors"

MIXED = ModelConfig(
    vocab_size=61,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=24,
    attention_bias=True,
    attention_output_bias=True,
    mlp_bias=True,
    qk_norm=True,
    tie_word_embeddings=False,
    stream="denseformer",
    mixer="short_swa",
    mixer_options={"window": 3, "heads": 2},
    mixer_blocks=(1,),
)
KEYS = {
    "lm_head.weight": (61, 16),
    "model.embed_tokens.weight": (61, 16),
    **{
        f"model.trunk.layers.{block}.{name}": shape
        for block in (0, 1)
        for name, shape in {
            "self_attn.k_proj.bias": (8,),
            "self_attn.k_proj.weight": (8, 16),
            "self_attn.k_norm.weight": (8,),
            "self_attn.o_proj.bias": (16,),
            "self_attn.o_proj.weight": (16, 16),
            "self_attn.q_proj.bias": (16,),
            "self_attn.q_proj.weight": (16, 16),
            "self_attn.q_norm.weight": (8,),
            "self_attn.v_proj.bias": (8,),
            "self_attn.v_proj.weight": (8, 16),
            "mlp.down_proj.bias": (16,),
            "mlp.down_proj.weight": (16, 24),
            "mlp.gate_proj.bias": (24,),
            "mlp.gate_proj.weight": (24, 16),
            "mlp.up_proj.bias": (24,),
            "mlp.up_proj.weight": (24, 16),
        }.items()
    },
    "model.trunk.layers.1.mixer.local.key.weight": (16, 16),
    "model.trunk.layers.1.mixer.local.output.weight": (16, 16),
    "model.trunk.layers.1.mixer.local.query.weight": (16, 16),
    "model.trunk.layers.1.mixer.local.value.weight": (16, 16),
    "model.trunk.norm.weight": (16,),
    "model.trunk.layers.0.input_layernorm.weight": (16,),
    "model.trunk.layers.0.post_attention_layernorm.weight": (16,),
    "model.trunk.layers.1.input_layernorm.weight": (16,),
    "model.trunk.layers.1.mixer.norm.weight": (16,),
    "model.trunk.layers.1.post_attention_layernorm.weight": (16,),
    "model.trunk.stream.alpha.1": (2,),
    "model.trunk.stream.alpha.2": (3,),
}
"""The keys of one checkpoint with every kind of part: checkpoints out there depend on them."""


def mixed_config() -> Any:
    more = {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True, "qk_norm": True}
    return as_hf(MIXED, **more)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make(mixed_config(), torch.float32).save_pretrained(tmp_path)
    return tmp_path


def test_frozen_keys(folder: Path) -> None:
    found = {name: tuple(tensor.shape) for name, tensor in load_file(folder / WEIGHTS).items()}
    assert found == KEYS


def test_what_is_in_the_folder(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["config.json", "generation_config.json", WEIGHTS, "modeling_twoaxis.py"]
    document = json.loads((folder / "config.json").read_text())
    assert document["auto_map"]["AutoModelForCausalLM"] == "modeling_twoaxis.TwoAxisForCausalLM"
    code = (folder / "modeling_twoaxis.py").read_text()
    statements = [line for line in code.splitlines() if line and not line.startswith(('"""', "__all__"))]
    assert all(line.startswith("from twoaxis.model.hf_") for line in statements)


def test_shards_and_the_auxiliary_process(tmp_path: Path) -> None:
    model = make(BASE, torch.float32)
    model.save_pretrained(tmp_path / "shards", max_shard_size="6KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    again = TwoAxisForCausalLM.from_pretrained(tmp_path / "shards").eval()
    assert torch.equal(logits(again, prompt(0)), logits(model, prompt(0)))
    (tmp_path / "other").mkdir()
    model.save_pretrained(tmp_path / "other", is_main_process=False)  # another rank of a distributed run
    assert not (tmp_path / "other" / "modeling_twoaxis.py").exists()


@pytest.mark.parametrize("config", [*MEMORIES, *(ONE_EACH[name] for name in ("tied", "blend", "hyper_connections"))])
def test_loads_to_the_last_bit(config: ModelConfig, tmp_path: Path) -> None:
    model, tokens = make(config, torch.float32), prompt(1)
    model.save_pretrained(tmp_path)
    for again in (TwoAxisForCausalLM.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert type(again) is TwoAxisForCausalLM
        assert not again.training
        assert torch.equal(logits(again, tokens), logits(model, tokens))
        assert [name for name, _ in again.named_parameters()] == [name for name, _ in model.named_parameters()]
        assert all(torch.equal(a, b) for a, b in zip(again.buffers(), model.buffers(), strict=True))


def test_the_base_model_loads_and_saves_alone(folder: Path, tmp_path: Path) -> None:
    whole = TwoAxisForCausalLM.from_pretrained(folder).eval()
    inner = {
        name.removeprefix("model."): t for name, t in load_file(folder / WEIGHTS).items() if name != "lm_head.weight"
    }
    base = TwoAxisModel(whole.config).eval()
    base.load_state_dict(inner, strict=True)
    base.save_pretrained(tmp_path / "base")
    again = AutoModel.from_pretrained(tmp_path / "base").eval()
    assert type(again) is TwoAxisModel
    tokens = prompt(2)
    with torch.no_grad():
        expected = whole.model(tokens).last_hidden_state
        assert torch.equal(again(tokens).last_hidden_state, expected)
        # the causal model's folder serves the base model too: its head is left out
        assert torch.equal(AutoModel.from_pretrained(folder).eval()(tokens).last_hidden_state, expected)
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "base")


def damaged(folder: Path, **changes: torch.Tensor | None) -> Path:
    tensors = load_file(folder / WEIGHTS)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


GATE, SCALE = "model.trunk.layers.1.mlp.gate_proj.weight", "model.trunk.layers.0.post_attention_layernorm.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({GATE: None}, rf"missing: {GATE}"),
        ({SCALE: None, GATE: None}, rf"missing: {SCALE}, {GATE}"),
        ({"model.trunk.stream.betas": torch.zeros(3)}, r"unexpected: model\.trunk\.stream\.betas"),
        ({"lm_hed.weight": torch.zeros(61, 16)}, r"unexpected: lm_hed\.weight"),
        ({GATE: torch.zeros(25, 16)}, rf"{GATE}"),
        ({SCALE: torch.ones(4, 16)}, rf"{SCALE}"),
    ],
    ids=["missing", "two missing", "unexpected", "misspelt", "shape", "shape of a norm"],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(
    folder: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    damaged(folder, **changes)
    for loader in (TwoAxisForCausalLM, AutoModelForCausalLM):
        with pytest.raises((ValueError, RuntimeError), match=message):
            loader.from_pretrained(folder)
    with pytest.raises((ValueError, RuntimeError), match=message):
        TwoAxisForCausalLM.from_pretrained(folder, ignore_mismatched_sizes=True)


def test_pickles_are_not_loaded(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    with pytest.raises(OSError, match="safetensors"):
        TwoAxisForCausalLM.from_pretrained(folder)
    with pytest.raises(ValueError, match="use_safetensors=False is refused"):
        TwoAxisForCausalLM.from_pretrained(folder, use_safetensors=False)


def test_loading_information(folder: Path) -> None:
    model, info = TwoAxisForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert isinstance(model, TwoAxisForCausalLM)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


@pytest.mark.parametrize(
    "name", ["attention_residuals", "hyper_connections", "deep_delta TC+EC", "muddformer", "blend"]
)
def test_bfloat16_keeps_the_streams_float32_parameters(name: str, tmp_path: Path) -> None:
    model, tokens = make(ONE_EACH[name], torch.float32), prompt(3)
    model.save_pretrained(tmp_path)
    narrow = TwoAxisForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    stream = narrow.model.trunk.stream
    wide = {name for group in stream.parameter_groups() if group.float32 for name in group.names}
    assert wide
    for name, parameter in stream.named_parameters():
        assert parameter.dtype == (torch.float32 if name in wide else torch.bfloat16), name
        if name in wide:
            assert torch.equal(parameter, model.model.trunk.stream.get_parameter(name))
    others = [p for name, p in narrow.named_parameters() if ".stream." not in name]
    assert {p.dtype for p in others} == {torch.bfloat16}
    found = logits(narrow, tokens)
    assert found.dtype == torch.bfloat16
    assert found.isfinite().all()
    assert narrow.generate(tokens, max_new_tokens=4, do_sample=False).shape == (2, 16)  # type: ignore[operator]
    # saved again, they stay as they are
    narrow.save_pretrained(tmp_path / "again")
    stored = load_file(tmp_path / "again" / WEIGHTS)
    assert all(stored[f"model.trunk.stream.{name}"].dtype == torch.float32 for name in wide)
    assert stored["model.embed_tokens.weight"].dtype == torch.bfloat16


ELSEWHERE = """
import sys
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

torch.set_num_threads(1)
folder, target = sys.argv[1:]
assert "twoaxis" not in sys.modules
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
base = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
tokens = torch.load(target + "/tokens.pt", weights_only=True)
with torch.no_grad():
    torch.save([model(tokens).logits, model.lm_head(base(tokens).last_hidden_state)], target + "/logits.pt")
print(config.stream, config.mixer, type(model).__name__, type(base).__name__)
"""


def elsewhere(program: str, *arguments: object, home: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in a new process, offline, with a cache of its own for remote code."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(home), "HF_MODULES_CACHE": str(home / "modules")}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, check=False)


def test_a_process_that_did_not_import_twoaxis(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    tokens = prompt(4)
    torch.save(tokens, target / "tokens.pt")
    done = elsewhere(ELSEWHERE, folder, target, home=target)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["denseformer", "short_swa", "TwoAxisForCausalLM", "TwoAxisModel"]
    expected = logits(TwoAxisForCausalLM.from_pretrained(folder).eval(), tokens)
    found, through_base = torch.load(target / "logits.pt", weights_only=True)
    assert torch.equal(found, expected)
    assert torch.equal(through_base, expected)


def test_remote_code_is_not_trusted_silently(folder: Path, tmp_path: Path) -> None:
    program = "import sys; from transformers import AutoModelForCausalLM as M; M.from_pretrained(sys.argv[1])"
    done = elsewhere(program, folder, home=tmp_path)
    assert done.returncode != 0
    assert "trust_remote_code" in done.stderr


def test_saving_a_loaded_folder_again(folder: Path, tmp_path: Path) -> None:
    """A folder copied, loaded through the auto classes and saved is the same folder."""
    shutil.copytree(folder, tmp_path / "copy")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "copy", trust_remote_code=True)
    model.save_pretrained(tmp_path / "again")
    for name in ("config.json", WEIGHTS, "modeling_twoaxis.py"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes(), name
