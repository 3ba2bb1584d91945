"""Models of any family from scratch: their configurations, their initial values, what they share at a seed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.model.graft_helpers import to_family
from tests.model.tiny_families import tiny, tiny_config
from twoaxis.model.config import Methods, ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.model.decoder_as_graft import family_fields, graft_key
from twoaxis.model.flops import count
from twoaxis.model.graft import TwoAxisForCausalLM
from twoaxis.model.graft_config import TwoAxisConfig, as_fields
from twoaxis.model.graft_from_scratch import from_scratch, on_meta, read_family, scratch_config
from twoaxis.model.graft_survey import difference, examine, narrow, survey_of
from twoaxis.model.variant import make_contender, with_method

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
DATA = {"vocab_size": 61, "max_position_embeddings": 64, "eos_token_id": 7}
NAMED = ("qwen3", "llama", "gemma3_text", "mixtral")
BASE = ModelConfig(vocab_size=61, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)


def made(family: str, said: dict[str, Any] | None = None, **methods: Any) -> TwoAxisConfig:
    return scratch_config(family, SIZES, DATA | (said or {}), Methods(**methods), context=16)


def file_of(folder: Path, **fields: Any) -> str:
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder / "config.json")


# Configurations.


@pytest.mark.parametrize("family", [*NAMED, "gpt2", "qwen3_moe", "falcon"])
def test_sizes_tokens_and_positions_take_the_familys_names(family: str) -> None:
    text: Any = made(family).text_config
    assert [getattr(text, name) for name in SIZES if name != "intermediate_size"] == [32, 3, 4]
    assert (text.vocab_size, text.max_position_embeddings) == (61, 64)
    assert (text.eos_token_id, text.bos_token_id, text.pad_token_id) == (7, None, None)
    assert made(family).hidden_field()[1] == (16 if family == "qwen3_moe" else 48)
    if hasattr(text, "head_dim"):
        assert text.head_dim == 8
    deeper: Any = made(family, {"num_hidden_layers": 7, "hidden_size": 64}).text_config
    assert (deeper.num_hidden_layers, len(getattr(deeper, "layer_types", None) or range(7))) == (7, 7)
    assert getattr(deeper, "query_pre_attn_scalar", 16) == 16


@pytest.mark.parametrize(
    ("family", "said", "why"),
    [
        ("qwen33", {}, r"no family 'qwen33' of causal language models \(did you mean 'qwen3'\?\)"),
        ("gemma3", {}, "gemma3 is a model of several parts; the family of its text is gemma3_text"),
        ("llama", {"hiden_size": 64}, r"llama has no field 'hiden_size' \(did you mean 'hidden_size'\?\)"),
        ("llama", {"qk_norm": True}, "llama has no field for qk_norm; leave it out, or train a decoder without"),
        ("gpt2", {"kv_heads": 2}, "gpt2 has no field for kv_heads"),
        ("bloom", {"hidden": 64}, "bloom has no field for hidden"),
        ("llama", {"output_hidden_states": True}, "output_hidden_states is a setting of transformers"),
        ("qwen3", {"sliding_window": 8}, "qwen3 makes sliding_window=None of 8: it does not use it"),
        ("llama", {"num_attention_heads": "4"}, "text_config.num_attention_heads must be an integer"),
        ("llama", {"hidden_size": 33}, "text_config is no configuration of llama"),
        ("gemma3_text", {"layer_types": ["full_attention", "sliding_attention"]}, "2 entries and no period, for 3"),
        ("gpt2", {"max_position_embeddings": 8}, "context is 16, max_position_embeddings of gpt2 8"),
    ],
)
def test_what_a_family_does_not_have_is_refused_by_name(family: str, said: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        made(family, said)
    assert "\n" not in str(caught.value)


def test_a_configuration_file_gives_the_family_and_its_fields(tmp_path: Path) -> None:
    usual = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4}
    given = file_of(tmp_path, **usual, head_dim=16, sliding_window=8, vocab_size=999, eos_token_id=5, dtype="bfloat16")
    family, fields = read_family(given)
    assert family == "gemma3_text"
    assert (fields["hidden_size"], fields["sliding_window"]) == (64, 8)
    assert not set(fields) & {"vocab_size", "eos_token_id", "layer_types", "dtype", "use_cache"}
    assert read_family(str(tmp_path)) == (family, fields)
    deeper: Any = made(family, fields | {"num_hidden_layers": 12}).text_config
    assert [n for n, kind in enumerate(deeper.layer_types) if kind == "full_attention"] == [5, 11]
    pattern = ["full_attention", "sliding_attention"] * 3
    _, own = read_family(file_of(tmp_path, **usual, head_dim=16, layer_types=pattern))
    assert own["layer_types"] == pattern  # another than the family's own: its period goes on
    changed: Any = made(family, own | {"num_hidden_layers": 5}).text_config
    assert changed.layer_types == [*pattern[:4], "full_attention"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"hidden_size": 64}, "has no model_type"),
        ({"model_type": "llama", "hiden_size": 64}, r"no field 'hiden_size' \(did you mean 'hidden_size'\?\)"),
        ({"model_type": "llama", "hidden_size": "64"}, "hidden_size must be an integer"),
        ({"model_type": "llama", "dtype": [[]]}, "dtype must be the name of a dtype"),
        ({"model_type": "llama", "rope_parameters": {"dtype": []}}, "is no configuration of llama: list index out"),
        ({"model_type": "1"}, "no family '1' of causal language models"),
    ],
)
def test_a_wrong_configuration_file_is_named(tmp_path: Path, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=f"config.json.*{why}"):
        read_family(file_of(tmp_path, **fields))


# Surveys and counts without weights.


@pytest.mark.parametrize("family", ["gemma3_text", "mixtral", "gpt2", "deepseek_v3", "falcon"])
def test_a_narrow_twin_tells_what_the_weights_tell(family: str) -> None:
    model = tiny(family)
    assert survey_of(model.config) == examine(model)


def test_a_large_configuration_needs_no_weights() -> None:
    from transformers import Qwen3Config

    config = Qwen3Config(num_hidden_layers=5)
    small: Any = narrow(config)
    assert (small.num_attention_heads, small.num_key_value_heads, small.hidden_size) == (2, 2, 16)
    model = on_meta(TwoAxisConfig(text_config=config, stream="muddformer", mixer="canon:start=zero"))
    assert model.config.architecture.width == config.hidden_size
    inside: Any = model.get_submodule("backbone.model.layers.0.self_attn.twoaxis_inside")
    assert sum(p.numel() for p in inside.parameters()) == 4 * 3 * 32 * 128  # four taps on every projected channel
    with torch.device("meta"):
        assert model(torch.zeros(1, 16, dtype=torch.long), use_cache=False).logits.shape == (1, 16, config.vocab_size)


def test_a_family_is_changed_in_depth_and_in_its_methods() -> None:
    shape = TwoAxisConfig(text_config=tiny_config("gemma3_text", num_hidden_layers=6))
    deeper = with_method(shape, make_contender("denseformer:model.num_hidden_layers=12"))
    text: Any = deeper.text_config
    assert [n for n, kind in enumerate(text.layer_types) if kind == "full_attention"] == [5, 11]
    assert (deeper.num_hidden_layers, len(deeper.make_stream().layout.sites)) == (12, 25)
    other = with_method(deeper, make_contender("muddformer", "canon"))
    assert other.survey is deeper.survey  # nothing is run again
    assert (other.stream, other.mixer, deeper.mixer) == ("muddformer", "canon", None)
    with pytest.raises(ValueError, match=r"gemma3_text has no field 'hiden_size' \(did you mean 'hidden_size'\?\)"):
        with_method(shape, make_contender("standard:model.hiden_size=3"))


@pytest.mark.parametrize(
    ("stream", "mixer"),
    [("standard", None), ("muddformer", "canon"), ("hyper_connections", "short_swa:window=4,heads=2,head_width=8")],
)
def test_a_family_counts_as_the_decoder_that_it_is(stream: str, mixer: str | None) -> None:
    windows = {"qk_norm": True, "attention_windows": (3, None, 3), "head_dim": 12}
    for recompute, shape in ((0, {}), (2, windows)):
        config = dataclasses.replace(BASE, stream=stream, mixer=mixer, **shape)
        graft = TwoAxisConfig(text_config=to_family(config), **as_fields(config.methods()))
        assert count(graft, 16, recompute=recompute) == count(config, 16, recompute=recompute)


def test_of_experts_those_count_that_see_a_token() -> None:
    few, many = (count(made("mixtral", {"num_local_experts": n}), 16) for n in (2, 8))
    router = 3 * 32  # numbers of a router per expert, in three layers
    assert many[0] - few[0] == 6 * (3 * 3 * 32 * 48 + router)
    assert many[1] - few[1] == 6 * 2 * 3 * router


# Initial values.


def backbone(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights that no method adds."""
    return {n: p.detach() for n, p in model.named_parameters() if not n.startswith("stream.") and "twoaxis_" not in n}


def common(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> int:
    """Tensors of one shape in two models; refused where one differs in a bit."""
    both = [name for name in one if name in other and one[name].shape == other[name].shape]
    assert all(torch.equal(one[name], other[name]) for name in both)
    return len(both)


@pytest.mark.parametrize("family", [None, "gemma3_text", "mixtral", "gpt2"])
def test_contenders_of_a_seed_share_all_they_have_in_common(family: str | None) -> None:
    def build(said: dict[str, Any] | None = None, seed: int = 3, **methods: Any) -> torch.nn.Module:
        torch.rand(len(methods))  # whatever was drawn before counts for nothing
        if family is not None:
            return from_scratch(
                made(family, {"initializer_range": 0.1, **(said or {})}, init="paired", **methods), seed
            )
        return Decoder(ModelConfig(**(SIZES | DATA | (said or {})), init="paired", **methods), seed)

    plain = backbone(build())
    contenders: list[dict[str, Any]] = [
        {"stream": "denseformer"},
        {"stream": "hyper_connections", "mixer": "canon:set=ABC"},
    ]
    for methods in contenders:
        assert common(plain, backbone(build(**methods))) == len(plain)
    deeper, wider = backbone(build({"num_hidden_layers": 5})), backbone(build({"intermediate_size": 64}))
    ends = [name for name in plain if any(end in name for end in ("o_proj", "down_proj", "c_proj.weight"))]
    kept = {name: tensor for name, tensor in plain.items() if name not in ends}  # whose scale goes with the depth
    assert common(kept, deeper) == len(kept)
    assert len(plain) > common(plain, wider) >= len(plain) - 12
    other = backbone(build(seed=4))
    assert all(not torch.equal(plain[n], other[n]) for n in plain if plain[n].std() > 0)


def test_a_decoder_and_its_family_start_alike() -> None:
    config = dataclasses.replace(BASE, qk_norm=True, stream="deep_delta", intermediate_size=48, mixer="canon")
    fields = family_fields(config)
    graft = TwoAxisConfig(text_config=fields, **as_fields(config.methods()))
    decoder, model = Decoder(config, 5), from_scratch(graft, 5)
    theirs = dict(model.named_parameters())
    for name, parameter in decoder.named_parameters():
        assert torch.equal(parameter, theirs[graft_key(name)]), name
    tokens = torch.arange(20).view(2, 10)
    assert difference(model(tokens, use_cache=False).logits, decoder(tokens)) < 1e-5


def test_output_projections_of_conv1d_and_experts_are_scaled() -> None:
    for family, inner, outer in (
        ("gpt2", "transformer.h.1.mlp.c_fc.weight", "transformer.h.1.mlp.c_proj.weight"),
        ("gpt2", "transformer.h.1.attn.c_attn.weight", "transformer.h.1.attn.c_proj.weight"),
        ("mixtral", "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"),
    ):
        model = from_scratch(made(family, {"hidden_size": 128, "head_dim": 8} if family == "mixtral" else {}), 0)
        wide, small = (model.get_parameter(f"backbone.{name}").std().item() for name in (inner, outer))
        assert wide == pytest.approx(0.02, rel=0.1)
        assert small == pytest.approx(0.02 / 6**0.5, rel=0.1), family


def test_what_is_special_in_a_family_starts_as_the_family_says() -> None:
    model: Any = from_scratch(TwoAxisConfig(text_config=tiny("mamba").config), 0)
    mixer = model.backbone.backbone.layers[1].mixer
    assert torch.allclose(mixer.A_log.exp()[0], torch.arange(1.0, 9.0))
    assert bool(mixer.dt_proj.bias.all())  # the inverse of softplus of a time step, never zero
    again: Any = from_scratch(TwoAxisConfig(text_config=tiny("mamba").config), 0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_a_model_of_a_configuration_alone_depends_on_the_global_seed() -> None:
    config = made("llama", stream="denseformer")
    first, second, third = (
        (torch.manual_seed(seed), TwoAxisForCausalLM(config).get_input_embeddings())[1] for seed in (0, 0, 1)
    )
    assert torch.equal(first.weight, second.weight)  # pyright: ignore
    assert not torch.equal(first.weight, third.weight)  # pyright: ignore
