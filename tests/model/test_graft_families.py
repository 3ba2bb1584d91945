"""The plain stream inside every family: the untouched model to the last bit, to rounding, or refused by name."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.model.graft_helpers import METHODS, gradients
from tests.model.tiny_families import causal_types, limit, tiny, tiny_config
from twoaxis.model.graft import Refused, graft
from twoaxis.model.graft_survey import difference, sample

BITWISE = ("llama", "qwen3", "gemma3_text", "gemma4_text", "olmo2", "granite", "phi3", "mixtral", "gpt2", "qwen3_next")
BITWISE = (*BITWISE, "deepseek_v3", "gpt_neox", "doge", "opt", "bloom", "mamba")
REFUSED = {
    "bert": "BertLayer 0 returned a Tensor",
    "minimax": "MiniMaxDecoderLayer 0 returned a Tensor",
    "hy_v4": "HYV4DecoderLayer 0 cannot carry a stream",
    "xlm": "XLMWithLMHeadModel has no list",
}


def compare(family: str) -> tuple[str, str]:
    """How a graft with the plain stream stands to the untouched model, logits and the gradient of every parameter."""
    try:
        model = tiny(family)
        given = sample(model)
        before = gradients(model, given)
    except TimeoutError:
        raise
    except Exception as error:  # a family that a generic small configuration cannot build, or not run on tokens alone
        return "not built", f"{type(error).__name__}: {error}"
    try:
        made = graft(model)
    except Refused as error:
        return "refused", str(error)
    after = {name.removeprefix("backbone."): value for name, value in gradients(made, given).items()}
    assert set(after) == set(before)
    apart = max(difference(after[name], value) for name, value in before.items())
    said = made.config.architecture.exact
    return ("bitwise" if apart == 0.0 else "rounding" if apart < 1e-5 and said == "rounding" else "wrong"), str(apart)


def need(family: str) -> None:
    """Skip where the installed transformers is older than a family."""
    if family not in causal_types():
        pytest.skip(f"this transformers has no {family}")


@pytest.mark.parametrize("family", BITWISE)
def test_a_graft_is_the_untouched_model_to_the_last_bit(family: str) -> None:
    assert compare(family)[0] == "bitwise"


def test_two_additions_of_one_site_are_a_matter_of_rounding_and_said_so() -> None:
    assert compare("cohere")[0] == "rounding"


@pytest.mark.parametrize(
    ("family", "method"),
    [("doge", "denseformer"), ("gemma4_text", "hyper_connections"), ("beam", "deep_delta")],
)
def test_a_residual_that_layers_scale_carries_methods(family: str, method: str) -> None:
    need(family)
    model = tiny(family)
    for name, scale in model.named_buffers():
        if name.endswith("layer_scalar"):
            scale.fill_(0.7)
    with torch.no_grad():
        before = model(sample(model), use_cache=False).logits
        after = graft(model, **METHODS[method])(sample(model), use_cache=False).logits
    assert difference(after, before) < 1e-5


def test_masks_are_measured_on_the_familys_layers() -> None:
    """Where all of them slide, the layer of rings would be taken for one that does not."""
    need("moshi")
    model = tiny("moshi").eval()
    tokens = torch.randint(3, 60, (2, 13))

    def in_two(model: Any) -> torch.Tensor:
        first = model(input_ids=tokens[:, :7], use_cache=True)
        second = model(input_ids=tokens[:, 7:], past_key_values=first.past_key_values, use_cache=True)
        return torch.cat([first.logits, second.logits], 1)

    with torch.no_grad():
        before = in_two(model)
        assert torch.equal(in_two(graft(model, mixer="short_swa:window=4,heads=2,head_width=8")), before)


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_carry_a_stream_is_refused_by_the_layers_name(family: str) -> None:
    need(family)
    kind, why = compare(family)
    assert kind == "refused"
    assert why.startswith(REFUSED[family])


def seeing(name: str) -> Any:
    """A tiny model that sees images, as many layers in its encoder as in its decoder, and a call with two images."""
    text: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 99}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 2, "head_dim": 8}
    given = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(1))
    given[:, 2:6] = 95
    eye: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "patch_size": 4}
    fields: dict[str, Any] = {"image_token_id": 95}
    if name == "llava":
        eye |= {"num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 8, "projection_dim": 16}
        fields |= {"text_config": {"model_type": "llama", **text}, "vision_feature_layer": -1}
        call = {"pixel_values": torch.randn(2, 3, 8, 8)}
    else:
        eye |= {"depth": 3, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16}
        eye |= {"window_size": 16, "fullatt_block_indexes": [1]} if name == "qwen2_5_vl" else {}
        eye |= {"deepstack_visual_indexes": [0, 1]} if name == "qwen3_vl" else {}
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
        fields |= {"text_config": {**text, "rope_parameters": rope}, "vision_start_token_id": 94}
        fields |= {"vision_end_token_id": 93}
        call = {"pixel_values": torch.randn(32, 96), "image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}
        call["mm_token_type_ids"] = (given == 95).long()
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(name, vision_config=eye, **fields))
    return model.eval(), {"input_ids": given, **call}


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_a_model_that_sees_images_is_the_same_with_them(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, call = seeing(name)
    made: Any = graft(copy.deepcopy(model), "hyper_connections:readout=mean", mixer="short_swa:window=3,heads=2")
    with torch.no_grad():
        assert torch.equal(made(**call).logits, model(**call).logits)
    for beams in (1, 2):  # positions in images are no documents, and features of images follow their rows
        made_text, text = (
            m.generate(**call, max_new_tokens=5, num_beams=beams, do_sample=False) for m in (made, model)
        )
        assert torch.equal(made_text, text)
    made.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(**call).logits, model(**call).logits)


def test_features_of_images_between_layers_are_refused_by_name() -> None:
    model, call = seeing("qwen3_vl")
    made = graft(copy.deepcopy(model))  # an encoder of images with as many layers is not taken for the decoder
    with torch.no_grad():
        assert torch.equal(made(call["input_ids"] % 90).logits, model(call["input_ids"] % 90).logits)
        with pytest.raises(Refused, match="copied to be changed in place"):
            made(**call)


def test_what_is_no_causal_language_model_is_refused_before_it_is_touched() -> None:
    tiny_t5 = transformers.T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=3, num_heads=2, vocab_size=32)
    with pytest.raises(Refused, match="T5ForConditionalGeneration is an encoder with a decoder"):
        graft(transformers.T5ForConditionalGeneration(tiny_t5))
    llama: Any = tiny_config("llama")
    for kind in (transformers.LlamaModel, transformers.LlamaForSequenceClassification):
        with pytest.raises(ValueError, match=f"takes a causal language model of transformers, got {kind.__name__}"):
            graft(kind(llama))
    model = tiny("bert").train()
    with pytest.raises(Refused):
        graft(model)
    assert model.training


@pytest.mark.slow
def test_every_causal_type_is_bitwise_rounding_or_refused_by_name() -> None:
    found: dict[str, tuple[str, str]] = {}
    for family in causal_types():
        try:
            with limit(60):
                found[family] = compare(family)
        except TimeoutError as error:
            found[family] = ("not built", str(error))
    counts = Counter(kind for kind, _ in found.values())
    print(counts, {family: why for family, (kind, why) in found.items() if kind not in ("bitwise", "refused")})
    assert counts["wrong"] == 0, {family: why for family, (kind, why) in found.items() if kind == "wrong"}
    assert counts["bitwise"] >= 130
    for family, (kind, why) in found.items():
        if kind == "refused":
            assert any(word in why for word in ("residual", "layers", "cannot carry")), (family, why)


def test_the_proof_compares_with_logits_from_before_anything_was_touched() -> None:
    """A configuration that nests a live one overwrites its choice of attention: both sides attend without a mask."""
    model, given = tiny("llama"), sample(tiny("llama"))
    with torch.no_grad():
        before = model(given).logits
        config = model.config._attn_implementation
        made = graft(model)
        assert model.config._attn_implementation == config is not None
        assert torch.equal(made(given).logits, before)
        broken = copy.deepcopy(model)
        broken.config._attn_implementation = None
        assert not torch.equal(broken(given).logits, before)  # what the trap is about
