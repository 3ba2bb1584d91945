"""Text from a graft that mixes tokens: every strategy of transformers gives what recomputing everything gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from tests.model.graft_helpers import grafted, logits, tokens
from tests.model.tiny_families import tiny
from twoaxis.model.graft_cache import ring_layer
from twoaxis.model.graft_survey import difference

METHOD = "rings of both"
NEW = 8


def grow(model: Any, given: Tensor | None = None, **changes: Any) -> Any:
    """Text of `NEW` tokens, greedy unless something else is asked for."""
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(given, **{**settings, **changes})


def test_rows_of_a_cache_are_reordered_repeated_and_selected() -> None:
    model, given = grafted("llama", METHOD), tokens(3, 11)
    whole = logits(model, given)[:, 7:]

    def after(change: str, argument: Any, rows: list[int]) -> float:
        cache = model.make_cache()
        logits(model, given[:, :7], past_key_values=cache, use_cache=True)
        getattr(cache, change)(argument)
        return difference(logits(model, given[rows, 7:], past_key_values=cache, use_cache=True), whole[rows])

    assert after("reorder_cache", torch.tensor([2, 2, 0]), [2, 2, 0]) < 3e-6
    assert after("batch_select_indices", torch.tensor([1, 0]), [1, 0]) < 3e-6
    assert after("batch_select_indices", torch.tensor([True, False, True]), [0, 2]) < 3e-6
    assert after("batch_repeat_interleave", 2, [0, 0, 1, 1, 2, 2]) < 3e-6


def test_rings_do_not_grow_and_recording_ends_with_a_crop() -> None:
    model = grafted("llama", METHOD)
    sizes = []
    for length in (24, 48):
        plain, recording = model.make_cache(), model.make_cache()
        recording.activate_past_recording()
        for cache in (plain, recording):
            logits(model, tokens(2, length), past_key_values=cache, use_cache=True)
        assert sum(model.cache_bytes(recording).values()) > sum(model.cache_bytes(plain).values())
        recording.crop(0)
        assert model.cache_bytes(recording) == model.cache_bytes(plain)
        sizes.append(model.cache_bytes(plain))
    assert sizes[1]["backbone"] == 2 * sizes[0]["backbone"]
    assert {k: v for k, v in sizes[0].items() if k != "backbone"} == {
        k: v for k, v in sizes[1].items() if k != "backbone"
    }


def test_a_copy_of_a_cache_is_independent_and_a_reset_one_empty() -> None:
    model, given = grafted("llama", METHOD), tokens()
    cache = model.make_cache()
    logits(model, given[:, :6], past_key_values=cache, use_cache=True)
    copied = copy.deepcopy(cache)
    first = logits(model, given[:, 6:], past_key_values=cache, use_cache=True)
    assert copied.get_seq_length() == 6
    assert torch.equal(logits(model, given[:, 6:], past_key_values=copied, use_cache=True), first)
    cache.reset()
    ring = ring_layer(cache)
    assert ring is not None
    assert (ring.past.seen, ring.past.rings) == (0, {})


def test_drafts_of_the_prompt_and_of_foreign_models() -> None:
    model, foreign = grafted("llama", METHOD), tiny("qwen3")
    given = tokens(1, 9).repeat(1, 2)  # repeats itself, so that the prompt offers drafts
    assert torch.equal(grow(model, given, prompt_lookup_num_tokens=4), grow(model, given))
    assert torch.equal(grow(model, given, assistant_model=foreign), grow(model, given))
    assert torch.equal(grow(foreign, given, assistant_model=model), grow(foreign, given))


def test_a_left_padded_batch_equals_each_row_alone() -> None:
    model, given = grafted("llama", METHOD), tokens(3, 8)
    mask = torch.ones_like(given)
    pads = (5, 0, 2)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    together = grow(model, given, attention_mask=mask)
    for row, pad in enumerate(pads):
        assert torch.equal(together[row : row + 1, pad:], grow(model, given[row : row + 1, pad:]))


@pytest.mark.parametrize("method", ["plain", METHOD])
def test_a_conversation_goes_on_with_its_cache(method: str) -> None:
    model, given = grafted("llama", method), tokens(2, 6)
    cache = model.make_cache()
    first = grow(model, given, past_key_values=cache)
    assert cache.get_seq_length() == first.shape[1] - 1  # the last token has not been read yet
    longer = torch.cat([first, tokens(2, 3)], dim=1)
    assert torch.equal(grow(model, longer, past_key_values=cache), grow(model, longer, use_cache=False))


def test_embeddings_chunks_penalties_ends_and_details() -> None:
    model, given = grafted("llama", METHOD), tokens(2, 11)
    expected = grow(model, given)
    embedded = model.get_input_embeddings()(given).detach()
    assert torch.equal(grow(model, inputs_embeds=embedded), expected[:, 11:])
    assert torch.equal(grow(model, given, prefill_chunk_size=4), expected)
    asked = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}
    assert torch.equal(grow(model, given, **asked), grow(model, given, use_cache=False, **asked))
    end = int(expected[0, 13])
    stop = expected[0, 11:].tolist().index(end) + 11
    ended = grow(model, given, eos_token_id=end)
    assert torch.equal(ended[0, : stop + 1], expected[0, : stop + 1])
    assert not ended[0, stop + 1 :].any()
    details = grow(model, given, return_dict_in_generate=True, output_logits=True, output_hidden_states=True)
    whole = logits(model, details.sequences[:, :-1])
    assert difference(torch.stack(details.logits, dim=1), whole[:, -NEW:]) < 1e-5
    assert [len(states) for states in details.hidden_states] == [4] * NEW


def test_logits_to_keep_are_the_last_ones_or_the_named() -> None:
    model, given = grafted("llama", METHOD), tokens()
    whole, some = logits(model, given), torch.tensor([0, 3, 11])
    for kept, expected in ((1, whole[:, -1:]), (5, whole[:, -5:]), (some, whole[:, some])):
        assert difference(logits(model, given, logits_to_keep=kept), expected) < 1e-6


def test_nothing_is_remembered_while_layers_are_recomputed() -> None:
    model = grafted("llama", METHOD).train()
    assert model(tokens(), use_cache=True).past_key_values is not None
    model.activation_checkpointing_enable()
    out = model(tokens(), labels=tokens(), use_cache=True)
    assert out.past_key_values is None
    out.loss.backward()


@pytest.mark.parametrize("method", ["hyper_connections", pytest.param("short_swa", marks=pytest.mark.slow)])
def test_a_compiled_forward_generates_the_same_text(method: str) -> None:
    model, given = grafted("llama", method, num_hidden_layers=1), tokens(2, 6)
    expected = grow(model, given)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="aot_eager")
    cached = {"cache_implementation": "static"} if method != "short_swa" else {}
    assert torch.equal(grow(model, given, **cached), expected)
