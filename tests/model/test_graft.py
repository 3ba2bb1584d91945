"""A graft as an ordinary transformers model: configuration, cache, outputs, files, and what is refused by name."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, StaticCache

import twoaxis.model.graft_survey as survey_module
from tests.model.graft_helpers import gradients, grafted, logits, tokens
from tests.model.tiny_families import tiny, tiny_config
from twoaxis.model.graft import Refused, TwoAxisConfig, TwoAxisForCausalLM, TwoAxisModel, graft
from twoaxis.model.graft_cache import check_packed, find_reach
from twoaxis.model.graft_survey import difference

MIXING = "rings of both"
"""A stream that mixes tokens, and a mixer: all kinds of rings."""


# Configuration.


def test_the_configuration_holds_the_familys_and_the_methods(tmp_path: Path) -> None:
    model = grafted("llama", "two axes")
    model.save_pretrained(tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    assert (document["model_type"], document["format"]) == (TwoAxisConfig.model_type, 1)
    assert document["text_config"]["model_type"] == "llama"
    assert (document["stream"], document["mixer_blocks"]) == ("muddformer", [0, 2])
    assert document["survey"]["exact"] == "bitwise"
    assert len(document["survey"]["forms"]) == 1
    again = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(again, TwoAxisConfig)
    assert again.methods() == model.config.methods()
    assert again.architecture == model.config.architecture
    assert again.vocab_size == model.config.text_config.vocab_size
    assert {key.split(".")[0] for key in load_file(tmp_path / "model.safetensors")} == {"backbone", "stream"}


def test_a_model_is_made_of_a_configuration_without_a_survey() -> None:
    model = TwoAxisForCausalLM(TwoAxisConfig(text_config=tiny_config("llama"), stream="denseformer"))
    assert model.config.survey is not None
    assert model(tokens()).logits.shape == (2, 13, 99)
    with pytest.raises(ValueError, match=r"no field 'streem'.*did you mean 'stream'"):
        TwoAxisConfig(streem="denseformer")  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"stream": "hyper_connections"}, "no exact neutral start"),
        ({"start": "zero"}, "start is neutral or paper"),
        ({"mixer": "canon", "mixer_blocks": [7]}, "mixer_blocks names block 7"),
        ({"placement": "9"}, "placement names block 9"),
    ],
)
def test_a_graft_that_would_not_start_as_its_model_is_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        graft(tiny("llama"), **given)


def test_only_models_of_transformers_are_taken() -> None:
    with pytest.raises(ValueError, match="got Linear"):
        graft(nn.Linear(2, 2))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="got TwoAxisForCausalLM"):
        graft(grafted("llama"))


def test_a_start_of_the_papers_is_no_neutral_one() -> None:
    model = tiny("llama")
    before = logits(model, tokens())
    one, other = (graft(tiny("llama"), "attention_residuals", start="paper", seed=seed) for seed in (0, 0))
    assert difference(logits(one, tokens()), before) > 1e-3
    assert torch.equal(logits(one, tokens()), logits(other, tokens()))


def test_layers_whose_source_has_changed_are_proved_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = grafted("llama", "denseformer")
    model.config.survey["digest"] = "another"
    model.save_pretrained(tmp_path)
    proofs: list[str] = []
    real = survey_module.prove
    monkeypatch.setattr("twoaxis.model.graft.prove", lambda *args: proofs.append("proved") or real(*args))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert proofs == ["proved"]
    assert loaded.config.survey["digest"] != "another"
    forms = [form._replace(addends=(2, 1)) for form in model.config.architecture.forms]
    model.config.survey = model.config.architecture._replace(forms=tuple(forms)).to_dict()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="the layers ended at site"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


# Outputs.


def test_outputs_are_the_familys() -> None:
    model = grafted("mixtral", "hyper_connections", attn_implementation="eager")
    model.set_attn_implementation("eager")
    out = model(tokens(), output_hidden_states=True, output_attentions=True, output_router_logits=True, labels=tokens())
    assert len(out.hidden_states) == 4
    assert all(h.shape == (2, 13, 32) for h in out.hidden_states)
    assert len(out.attentions) == 3
    assert len(out.router_logits) == 3
    assert out.aux_loss is not None
    assert isinstance(model(tokens(), return_dict=False), tuple)
    assert model(tokens(), logits_to_keep=2).logits.shape[1] == 2


def test_depth_weights_are_those_of_the_stream() -> None:
    model = grafted("llama", "attention_residuals")
    out = model(tokens(), output_depth_weights=True)
    sources = model.depth_sources()
    assert len(out.depth_weights) == len(sources) == 7
    for weights, names in zip(out.depth_weights, sources, strict=True):
        assert weights is None or weights.shape[-1] == len(names)
    assert out.depth_weights[-1] is not None


def test_the_base_model_gives_hidden_states_from_the_same_folder(tmp_path: Path) -> None:
    model = grafted("qwen3", "denseformer")
    model.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path)
    assert isinstance(base, TwoAxisModel)
    with torch.no_grad():
        hidden = base(input_ids=tokens(), use_cache=False).last_hidden_state
        assert torch.equal(model.get_output_embeddings()(hidden), logits(model, tokens()))


def test_dropout_is_the_familys() -> None:
    untouched = tiny("gpt2").train()
    before = gradients(untouched, tokens())
    after = gradients(graft(untouched), tokens())
    assert all(torch.equal(after[k if k == "logits" else f"backbone.{k}"], v) for k, v in before.items())


# Cache and masks.


def test_a_cache_is_cropped_exactly_or_not_at_all() -> None:
    model, given = grafted("llama", MIXING), tokens()
    whole = logits(model, given)
    cache = model.make_cache(spare=3)
    logits(model, given[:, :10], past_key_values=cache, use_cache=True)
    cache.crop(torch.tensor(-3))  # as versions of transformers do it
    assert type(cache.layers[-1].get_seq_length()) is int  # a tensor could be added to in place
    rest = logits(model, given[:, 7:], past_key_values=cache, use_cache=True)
    assert difference(rest, whole[:, 7:]) < 3e-6
    short = model.make_cache()
    logits(model, given[:, :10], past_key_values=short, use_cache=True)
    with pytest.raises(ValueError, match="cannot trim 3"):
        short.crop(-3)
    assert short.get_seq_length() == 10
    assert short.layers[0].get_seq_length() == 10
    short.activate_past_recording()
    logits(model, given[:, 10:], past_key_values=short, use_cache=True)
    short.crop(-3)
    again = logits(model, given[:, 10:], past_key_values=short, use_cache=True)
    assert difference(again, whole[:, 10:]) < 3e-6
    parts = model.cache_bytes(short)
    assert parts["backbone"] == 2 * 3 * 2 * 2 * 13 * 8 * 4
    assert parts["stream"] > 0 < parts["mixer"]


def test_a_cache_without_rings_or_of_another_model_is_refused() -> None:
    model, other, plain = grafted("llama", "short_swa"), grafted("llama", "canon"), grafted("llama", "denseformer")
    foreign = DynamicCache()
    logits(plain, tokens(), past_key_values=foreign, use_cache=True)
    with pytest.raises(ValueError, match="filled by another model"):
        model(tokens(), past_key_values=foreign)
    with pytest.raises(ValueError, match="made for another model"):
        model(tokens(), past_key_values=other.make_cache())
    lazy = DynamicCache()  # an empty one gets its rings
    whole = logits(model, tokens())
    first = logits(model, tokens()[:, :6], past_key_values=lazy, use_cache=True)
    rest = logits(model, tokens()[:, 6:], past_key_values=lazy, use_cache=True)
    assert difference(torch.cat([first, rest], dim=1), whole) < 3e-6


def test_masks_that_mean_nothing_are_refused_where_tokens_are_mixed() -> None:
    model, hole = grafted("llama", MIXING), torch.ones(2, 13, dtype=torch.long)
    hole[0, 5] = 0
    with pytest.raises(ValueError, match="hole"):
        model(tokens(), attention_mask=hole)
    with pytest.raises(ValueError, match="must be \\(batch, 0 earlier \\+ 13\\)"):
        model(tokens(), attention_mask=hole[:, :4])
    grafted("llama", "denseformer")(tokens(), attention_mask=hole)  # attention alone knows what to do with it


class Looks(TorchDispatchMode):
    """Counts how often a number of a tensor is waited for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
        return func(*args, **(kwargs or {}))


def test_masks_wait_for_no_number_that_the_family_does_not_wait_for() -> None:
    mask, counts = torch.ones(2, 13, dtype=torch.long), []
    mask[0, :4] = 0
    for model in (tiny("llama"), grafted("llama", "hyper_connections")):
        with torch.no_grad(), Looks() as looks:
            model(tokens(), attention_mask=mask, use_cache=False)
        counts.append(looks.count)
    assert counts[0] == counts[1]
    device, given = mask.to("meta"), tokens().to("meta")  # which has no numbers to wait for
    for reach in (find_reach(device, None, given, 0), find_reach(None, device, given, 0)):
        assert reach is not None
        assert reach.shape == (2, 13)
    assert check_packed(device, None, cached=False, packs=True, where="") is False


def test_packed_documents_are_refused_with_a_cache() -> None:
    model = grafted("llama", "denseformer")
    assert model(tokens(), position_ids=torch.arange(13).expand(2, -1)).past_key_values.get_seq_length() == 13
    places = torch.cat([torch.arange(6), torch.arange(7)]).expand(2, -1)
    with pytest.raises(ValueError, match="would see each other with a cache"):
        model(tokens(), position_ids=places, use_cache=True)
    with pytest.raises(ValueError, match="would see each other in OPTForCausalLM"):
        graft(tiny("opt"))(tokens(), position_ids=places)


def test_a_static_cache_works_where_nothing_mixes_tokens_and_where_something_does() -> None:
    for method in ("hyper_connections", "short_swa"):
        model = grafted("llama", method)
        settings: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "disable_compile": True}
        expected = model.generate(tokens(), **settings)
        assert torch.equal(model.generate(tokens(), cache_implementation="static", **settings), expected)
    cache = StaticCache(config=model.config.get_text_config(), max_cache_len=20)
    assert difference(logits(model, tokens(), past_key_values=cache, use_cache=True), logits(model, tokens())) < 3e-6


@pytest.mark.parametrize("method", ["hyper_connections", MIXING])
def test_sampled_and_assisted_text(method: str) -> None:
    model, draft = grafted("llama", method), grafted("llama", method, num_hidden_layers=3)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    given = tokens(rows=1)
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = model.generate(given, **settings)
    assert torch.equal(model.generate(given, assistant_model=draft, **settings), expected)
    pad = int(expected[0, 15])  # the model emits its pad token in the middle
    padded = model.generate(given, assistant_model=draft, **settings, pad_token_id=pad)
    assert torch.equal(padded, expected)
    torch.manual_seed(0)
    sampled = model.generate(given, max_new_tokens=6, do_sample=True, eos_token_id=None)
    torch.manual_seed(0)
    assert torch.equal(
        model.generate(given, max_new_tokens=6, do_sample=True, use_cache=False, eos_token_id=None), sampled
    )


# Training.


@pytest.mark.filterwarnings("ignore:.*_checkpointing.* is deprecated:FutureWarning")
def test_reentrant_checkpointing_is_refused_by_name() -> None:
    """Under both names that transformers has had for it."""
    model = grafted("llama", "denseformer").train()
    for name in ("activation", "gradient"):
        with pytest.raises(ValueError, match="use_reentrant=True would lose"):
            getattr(model, f"{name}_checkpointing_enable")({"use_reentrant": True})
        getattr(model, f"{name}_checkpointing_enable")()
        assert model.recomputes
        assert getattr(model, f"is_{name}_checkpointing")
        getattr(model, f"{name}_checkpointing_disable")()
        assert not model.recomputes
    for layer in model.backbone.model.layers:  # behind the model's back, as tools do
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=True)
    with pytest.raises(ValueError, match="use_reentrant=True would lose"):
        model(tokens(), labels=tokens())


def test_stream_parameters_stay_in_float32_in_a_bfloat16_model(tmp_path: Path) -> None:
    model = graft(tiny("llama").bfloat16(), "hyper_connections:readout=mean")
    kept = {name: p.dtype for name, p in model.named_parameters() if name.startswith("stream.")}
    wide = {f"stream.{n}" for group in model.stream.parameter_groups() if group.float32 for n in group.names}
    assert wide
    assert {name for name, dtype in kept.items() if dtype == torch.float32} == wide
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert {n: p.dtype for n, p in loaded.named_parameters()} == {n: p.dtype for n, p in model.named_parameters()}
    saved = model.state_dict()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in loaded.state_dict().items())
    assert difference(logits(loaded, tokens()), logits(model, tokens())) < 0.02


def test_embeddings_are_resized_and_tied_as_the_familys(tmp_path: Path) -> None:
    model = grafted("llama", "denseformer", tie_word_embeddings=True)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    model.resize_token_embeddings(111)
    assert model.config.vocab_size == 111
    assert logits(model, tokens()).shape[-1] == 111
    model.save_pretrained(tmp_path)
    assert sum("embed" in key or "head" in key for key in load_file(tmp_path / "model.safetensors")) == 1
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    assert torch.equal(logits(loaded, tokens()), logits(model, tokens()))


# Files.


def test_folders_are_strict_by_name_and_may_be_sharded(tmp_path: Path) -> None:
    model = grafted("qwen3_moe", "two axes")
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    for name in ("whole", "shards"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert difference(logits(loaded, tokens()), logits(model, tokens())) < 1e-6
    file = tmp_path / "whole" / "model.safetensors"
    state = load_file(file)
    gone = next(key for key in state if key.startswith("stream."))
    save_file({k: v for k, v in state.items() if k != gone}, file, {"format": "pt"})
    with pytest.raises(ValueError, match="missing: stream"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    save_file({**state, "stream.more": torch.ones(1)}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"unexpected: stream\.more"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    save_file({**state, gone: torch.ones(3, 3, 3)}, file, {"format": "pt"})
    with pytest.raises(ValueError, match="of another shape"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    with pytest.raises(ValueError, match="never from a pickle"):
        TwoAxisForCausalLM.from_pretrained(tmp_path / "shards", use_safetensors=False)


def test_a_folder_loads_where_twoaxis_was_never_imported(tmp_path: Path) -> None:
    model = grafted("llama", "two axes")
    model.save_pretrained(tmp_path)
    torch.save(logits(model, tokens()), tmp_path / "logits.pt")
    code = (
        "import sys, torch\n"
        "torch.set_num_threads(1)  # as many as here, or sums are rounded differently\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "tokens = torch.randint(3, 99, (2, 13), generator=torch.Generator().manual_seed(3))\n"
        "expected = torch.load(sys.argv[1] + '/logits.pt')\n"
        "assert torch.equal(model(tokens, use_cache=False).logits, expected)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)


def test_a_device_map_at_load_and_before(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    for method in ("denseformer", "short_swa", "two axes"):
        model = grafted("llama", method)
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"})
        assert torch.equal(logits(loaded, tokens()), logits(model, tokens()))
    places = {"stream": "cpu", "backbone.lm_head": "cpu", "backbone.model.embed_tokens": "cpu"}
    places |= {"backbone.model.norm": "cpu", "backbone.model.rotary_emb": "cpu"}
    places |= {f"backbone.model.layers.{i}": "disk" if i else "cpu" for i in range(3)}
    model = grafted("llama", "denseformer")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=str(tmp_path / "off"))
    assert torch.equal(logits(loaded, tokens()), logits(model, tokens()))
    from accelerate import cpu_offload

    with pytest.raises(Refused, match="spread by a device map"):
        graft(cast(Any, cpu_offload(tiny("llama"), torch.device("cpu"))))


@pytest.mark.parametrize(("family", "why"), [("gpt_neox", "not one norm to take over"), ("gpt2", "ln_1 is no RMSNorm")])
def test_a_refused_family_keeps_its_norms(family: str, why: str) -> None:
    model = tiny(family)
    before = logits(model, tokens())
    with pytest.raises(Refused, match=why):
        graft(model, "gated_streams:rank=6")
    assert torch.equal(logits(model, tokens()), before)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_stream_takes_over_the_norms_of_the_sites_it_has(family: str) -> None:
    """Gemma's norms scale by 1 + w."""
    model = tiny(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += 0.3 * torch.rand(parameter.shape, generator=torch.Generator().manual_seed(7))
    before, norms = logits(model, tokens()), {name for name, _ in model.named_parameters() if "norm" in name}
    made = graft(model, "gated_streams:rank=6", placement="mlp+out")
    assert difference(logits(made, tokens()), before) < 1e-6
    left = {name.removeprefix("backbone.") for name, _ in made.named_parameters() if "norm" in name} & norms
    pre = {"llama": "post_attention_layernorm", "gemma3_text": "pre_feedforward_layernorm"}[family]
    assert norms - left == {*(f"model.layers.{i}.{pre}.weight" for i in range(3)), "model.norm.weight"}


def test_a_quantised_backbone_is_grafted_and_not_saved(tmp_path: Path) -> None:
    """Weights in eight bits that are numbers again in every product, as quantisers of transformers hold them."""

    class Quantised(nn.Linear):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
            scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
            self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
            self.register_buffer("scale", scale)

        def forward(self, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return nn.functional.linear(x, self.weight.to(x.dtype) * self.get_buffer("scale"))

    model: Any = tiny("llama")
    for layer in model.model.layers:
        for part, names in ((layer.self_attn, ("q_proj", "k_proj", "v_proj", "o_proj")), (layer.mlp, ("down_proj",))):
            for name in names:
                setattr(part, name, Quantised(getattr(part, name)))
    model.hf_quantizer = type("Quantizer", (), {"quantization_config": {"quant_method": "int8"}})()
    before = logits(model, tokens())
    made = graft(model, "muddformer", mixer="canon:start=zero")
    assert torch.equal(logits(made, tokens()), before)
    made.train()(tokens(), labels=tokens()).loss.backward()
    assert all(p.grad is not None for n, p in made.named_parameters() if n in made.new_parameters())
    with pytest.raises(ValueError, match="a backbone of Quantizer is not saved in a graft; load it in full"):
        made.save_pretrained(tmp_path)
