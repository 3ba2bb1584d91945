"""Methods with active parameters inside families: chunks, padding, documents, recomputation, files, generated text."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from tests.model.graft_helpers import METHODS, TOKENS, gradients, grafted, logits, tokens
from tests.model.tiny_families import tiny
from twoaxis.model.graft import graft
from twoaxis.model.graft_survey import difference

FAMILIES = ("llama", "qwen3", "gemma3_text", "olmo2", "granite", "phi3", "mixtral", "qwen3_moe", "cohere", "gpt2")
FAMILIES = (*FAMILIES, "qwen3_next", "deepseek_v3", "gpt_neox")
FAST = {("llama", name) for name in METHODS} | {("gemma3_text", "deep_delta with tokens"), ("phi3", "canon")}
FAST |= {("mixtral", "hyper_connections"), ("cohere", "short_swa"), ("qwen3_next", "attention_residuals")}
PAIRS = [
    pytest.param(family, method, marks=() if (family, method) in FAST else pytest.mark.slow)
    for family in FAMILIES
    for method in METHODS
]
FUSED = {"phi3", "gpt_neox", "gpt2", "deepseek_v3", "qwen3_next"}
EXACT = {"qwen3_next": 3e-6, "deepseek_v3": 3e-6}
"""Families whose linear attention or router computes in float32 whatever the model's dtype."""
EXPERTS = {"mixtral", "qwen3_moe", "qwen3_next"}
NO_RMS = {"olmo2": "something that is no norm", "cohere": "no RMSNorm", "gpt2": "no RMSNorm", "gpt_neox": "and not one"}
MORE_HEADS = {"gpt2", "deepseek_v3", "gpt_neox"}


def refused(family: str, method: str) -> str | None:
    """Why a family has no place for a method."""
    if method in ("muddformer", "two axes") and family in FUSED:
        return "they are fused or latent"
    if method in ("depth_kv", "lime") and family == "qwen3_next":
        return "calls transformers' attention function 0 times"
    if method == "lime" and family in MORE_HEADS:
        return "the attention has 4 key heads"
    if method == "gated_streams" and family in NO_RMS:
        return NO_RMS[family]
    canon = method in ("canon", "rings of both")
    if canon and family in ("deepseek_v3", "qwen3_next"):
        return "qkv: they are fused or latent"
    return "hidden: they are inside experts" if canon and family in EXPERTS else None


def check_cuts(model: Any, given: Tensor, generator: torch.Generator, bound: float) -> None:
    """Any cuts through a sequence give what one pass gives, in float64."""
    model = copy.deepcopy(model).double()
    if model.backbone._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the grouped product has no float64
    whole = logits(model, given)
    assert whole.dtype == torch.float64
    for _ in range(3):
        inner = torch.randperm(given.shape[1] - 1, generator=generator)[
            : int(torch.randint(1, 7, (), generator=generator))
        ]
        cuts = [0, *(inner.sort().values + 1).tolist(), given.shape[1]]
        cache, found = model.make_cache(), []
        for start, end in itertools.pairwise(cuts):
            mask = torch.ones(2, end, dtype=torch.long)
            part = given[:, start:end]
            found.append(logits(model, part, past_key_values=cache, use_cache=True, attention_mask=mask))
        assert difference(torch.cat(found, dim=1), whole) < bound, cuts


@pytest.mark.parametrize(("family", "method"), PAIRS)
def test_method_in_family(family: str, method: str, tmp_path: Path) -> None:
    if (why := refused(family, method)) is not None:
        with pytest.raises(ValueError, match=why) as caught:
            grafted(family, method)
        assert "\n" not in str(caught.value)
        return
    given = tokens()
    plain = tiny(family)
    before = logits(plain, given)
    start = graft(plain, **METHODS[method])
    bound = 0.0 if family != "cohere" and start.stream.neutral == "bitwise" else 1e-5
    assert difference(logits(start, given), before) <= bound
    model = grafted(family, method)
    whole = logits(model, given)
    assert method == "plain" or difference(whole, before) > 1e-4  # it is active

    check_cuts(model, given, torch.Generator().manual_seed(len(family) + len(method)), EXACT.get(family, 1e-10))
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, :4] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    left = logits(model, given * mask, attention_mask=mask, position_ids=positions)
    alone = logits(model, given[:1, 4:])
    assert difference(left[0, 4:], alone[0]) < 3e-6
    right = logits(model, given * mask.flip(-1), attention_mask=mask.flip(-1))
    assert difference(right[0, :9], logits(model, given[:1, :9])[0]) < 3e-6
    if model.config.architecture.packs:
        places = torch.cat([torch.arange(6), torch.arange(TOKENS - 6)]).expand(2, -1)
        apart = [logits(model, given[:, :6]), logits(model, given[:, 6:])]
        assert difference(logits(model, given, position_ids=places), torch.cat(apart, dim=1)) < 3e-6
    else:
        with pytest.raises(ValueError, match="packed documents"):
            logits(model, given, position_ids=torch.zeros(2, TOKENS, dtype=torch.long))

    for settings in ({}, {"num_beams": 3}):
        text = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, **settings}
        assert torch.equal(model.generate(given, **text), model.generate(given, use_cache=False, **text))

    model.train()
    ordinary = gradients(model, given)
    model.activation_checkpointing_enable()
    again = gradients(model.train(), given)
    assert set(again) == set(ordinary)
    assert all(torch.equal(again[name], ordinary[name]) for name in ordinary)

    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert difference(logits(loaded, given), whole) < 1e-6
