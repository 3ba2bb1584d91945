"""`generate`: every strategy gives what the model gives without a cache, for every kind of memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import DynamicCache, set_seed

from tests.model.hf_helpers import BASE, MEMORIES, ONE_EACH, logits, make, output, prompt, shared
from tests.support.foreign import llama, pretrained, shake
from twoaxis.model.config import ModelConfig
from twoaxis.model.hf_cache import TwoAxisCache
from twoaxis.model.hf_model import TwoAxisForCausalLM

NEW = 10


def grow(model: Any, tokens: Tensor | None = None, **arguments: Any) -> Tensor:
    """The tokens `generate` returns, greedily unless told otherwise."""
    return model.generate(tokens, **{"max_new_tokens": NEW, "do_sample": False, **arguments})


def by_hand(model: TwoAxisForCausalLM, tokens: Tensor) -> Tensor:
    """Greedy continuation without `generate` and without a cache."""
    for _ in range(NEW):
        following = logits(model, tokens, use_cache=False)[:, -1:].argmax(-1)
        tokens = torch.cat([tokens, following], dim=1)
    return tokens


@pytest.mark.parametrize("config", MEMORIES)
def test_greedy(config: ModelConfig) -> None:
    model, tokens = shared(config), prompt(0, length=6)
    expected = by_hand(model, tokens)
    assert torch.equal(grow(model, tokens), expected)
    assert torch.equal(grow(model, tokens, use_cache=False), expected)


@pytest.mark.parametrize("config", MEMORIES)
def test_a_left_padded_batch_equals_each_row_alone(config: ModelConfig) -> None:
    model, tokens = shared(config), prompt(1, batch=3, length=8)
    mask = torch.ones_like(tokens)
    for row, pad in enumerate((5, 0, 2)):
        mask[row, :pad] = 0
    together = grow(model, tokens, attention_mask=mask)
    for row, pad in enumerate((5, 0, 2)):
        assert torch.equal(together[row : row + 1, pad:], grow(model, tokens[row : row + 1, pad:]))


@pytest.mark.parametrize("config", MEMORIES)
def test_beams(config: ModelConfig) -> None:
    model, tokens = shared(config), prompt(2, length=6)
    mask = torch.ones_like(tokens)
    mask[1, :2] = 0
    arguments: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "attention_mask": mask, "pad_token_id": 0}
    with_cache = grow(model, tokens, **arguments)
    assert torch.equal(with_cache, grow(model, tokens, use_cache=False, **arguments))
    assert with_cache.shape == (4, 6 + NEW)


def test_beams_do_reorder() -> None:
    """Equal beams would mean little if the best beam were the first one all along."""
    model, orders = make(BASE), []
    original = TwoAxisCache.reorder_cache
    model.make_cache = lambda spare=0: Watched(model.model.trunk, orders, original)  # type: ignore[method-assign]
    grow(model, prompt(2, length=6), num_beams=3)
    assert len(orders) == NEW
    assert any(order != sorted(order) or len(set(order)) < len(order) for order in orders)


class Watched(TwoAxisCache):
    def __init__(self, trunk: Any, orders: list[list[int]], original: Any) -> None:
        super().__init__(trunk)
        self.orders, self.original = orders, original

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.orders.append(beam_idx.tolist())
        self.original(self, beam_idx)


@pytest.mark.parametrize("config", MEMORIES)
def test_assisted_decoding(config: ModelConfig) -> None:
    """Drafts of a model that often errs, of one that never does, and of the prompt itself."""
    model = shared(config)
    tokens = prompt(3, batch=1, length=9).repeat(1, 2)  # repeats itself, so that the prompt offers drafts
    expected = by_hand(model, tokens)
    wrong, nearly = make(config, seed=7), make(config)
    shake(nearly, seed=5, by=0.02)
    crops: list[int] = []
    original = TwoAxisCache.crop

    def crop(cache: TwoAxisCache, count: int) -> None:
        crops.append(count)
        original(cache, count)

    patch = pytest.MonkeyPatch()
    patch.setattr(TwoAxisCache, "crop", crop)
    try:
        for draft in (
            {"assistant_model": wrong},
            {"assistant_model": nearly},
            {"assistant_model": model},
            {"prompt_lookup_num_tokens": 4},
        ):
            assert torch.equal(grow(model, tokens, **draft), expected), list(draft)
    finally:
        patch.undo()
    assert any(count < 0 for count in crops)  # drafts were taken back


def test_drafts_of_a_foreign_model_and_for_one() -> None:
    model, tokens = make(ONE_EACH["two axes"]), prompt(4, batch=1, length=7)
    foreign: Any = pretrained(llama(num_hidden_layers=2, pad_token_id=None), torch.float64)
    assert torch.equal(grow(model, tokens, assistant_model=foreign), grow(model, tokens))
    assert torch.equal(grow(foreign, tokens, assistant_model=model), grow(foreign, tokens))


def test_sampling() -> None:
    model, tokens = make(ONE_EACH["two axes"]), prompt(5)
    found = []
    for seed in (0, 0, 1):
        set_seed(seed)
        found.append(grow(model, tokens, do_sample=True, top_k=20, temperature=0.8))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    set_seed(0)
    assert torch.equal(found[0], grow(model, tokens, do_sample=True, top_k=20, temperature=0.8, use_cache=False))
    assert found[0].shape == (2, 12 + NEW)


def test_the_end_token_ends_a_row() -> None:
    model, tokens = make(BASE), prompt(6, length=6)
    plain = grow(model, tokens)
    end = int(plain[0, 8])
    found = grow(model, tokens, eos_token_id=end, pad_token_id=0)
    stop = plain[0, 6:].tolist().index(end) + 6
    assert torch.equal(found[0, : stop + 1], plain[0, : stop + 1])
    assert (found[0, stop + 1 :] == 0).all()


def test_other_caches_are_refused() -> None:
    model, tokens = make(BASE), prompt(7)
    for kind in ("static", "quantized", "offloaded", "dynamic"):
        with pytest.raises(ValueError, match=f"cache_implementation='{kind}' is not offered: a two-axis model has"):
            grow(model, tokens, cache_implementation=kind)
    with pytest.raises(ValueError, match=r"must come from model\.make_cache\(\), got DynamicCache"):
        grow(model, tokens, past_key_values=DynamicCache())


@pytest.mark.parametrize("name", ["standard", "two axes", "short_swa"])
def test_a_users_cache_goes_on(name: str) -> None:
    """A conversation: each turn's cache is the next one's beginning."""
    model, tokens = make(ONE_EACH[name]), prompt(8, length=6)
    cache = model.make_cache()
    first = grow(model, tokens, past_key_values=cache)
    assert cache.get_seq_length() == first.shape[1] - 1  # the last token has not been read yet
    longer = torch.cat([first, prompt(9, length=3)], dim=1)
    second = grow(model, longer, past_key_values=cache)
    assert torch.equal(second, grow(model, longer, use_cache=False))
    # a prompt that was read before `generate`
    cache = model.make_cache()
    logits(model, tokens[:, :-1], past_key_values=cache)
    assert torch.equal(grow(model, tokens, past_key_values=cache), first)


def test_returned_details() -> None:
    model, tokens = make(BASE), prompt(10)
    found: Any = grow(
        model,
        tokens,
        return_dict_in_generate=True,
        output_logits=True,
        output_hidden_states=True,
    )
    assert isinstance(found.past_key_values, TwoAxisCache)
    assert len(found.logits) == len(found.hidden_states) == NEW
    whole = output(model, found.sequences[:, :-1])
    assert whole.logits is not None
    # `generate` keeps logits in float32
    assert (torch.stack(found.logits, dim=1) - whole.logits[:, -NEW:]).abs().max() <= 1e-5
    assert [len(states) for states in found.hidden_states] == [4] * NEW


def test_embeddings_as_a_prompt() -> None:
    model, tokens = make(ONE_EACH["two axes"]), prompt(11, length=6)
    with torch.no_grad():
        x = model.get_input_embeddings()(tokens)
    assert torch.equal(grow(model, inputs_embeds=x), grow(model, tokens)[:, 6:])
    assert torch.equal(grow(model, inputs_embeds=x, use_cache=False), grow(model, tokens)[:, 6:])


def test_a_prompt_in_chunks() -> None:
    model, tokens = make(ONE_EACH["two axes"]), prompt(12, length=11)
    assert torch.equal(grow(model, tokens, prefill_chunk_size=4), grow(model, tokens))


def test_contrasting_strategies_run() -> None:
    """Strategies that look at scores or groups of beams rather than at the cache."""
    model, tokens = make(ONE_EACH["deep_delta TC+EC"]), prompt(13, length=6)
    penalised = grow(model, tokens, repetition_penalty=1.5, no_repeat_ngram_size=2)
    assert torch.equal(penalised, grow(model, tokens, repetition_penalty=1.5, no_repeat_ngram_size=2, use_cache=False))
    several = grow(model, tokens, do_sample=True, num_return_sequences=3)
    assert several.shape == (6, 6 + NEW)
