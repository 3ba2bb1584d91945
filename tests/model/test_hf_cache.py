"""`TwoAxisCache`: any cut of a prompt gives one pass's numbers; rows and tokens can be moved and taken back."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("transformers")

from transformers import DynamicCache

from tests.model.hf_helpers import BASE, MEMORIES, MEMORY, logits, make, output, prompt, shared
from tests.support.numbers import far
from twoaxis.model.config import ModelConfig
from twoaxis.model.hf_cache import TwoAxisCache
from twoaxis.model.hf_model import TwoAxisForCausalLM

LENGTH = 11


def draw_cuts(data: st.DataObject, length: int) -> list[int]:
    cuts, left = [], length
    while left:
        cuts.append(data.draw(st.integers(1, left)))
        left -= cuts[-1]
    return cuts


def counted(mask: Tensor, start: int = 0) -> dict[str, Tensor]:
    """A mask with the positions `generate` gives: rotary angles are float32, so their rounding depends on them."""
    return {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_min(0)[:, start:]}


def in_chunks(
    model: TwoAxisForCausalLM,
    tokens: Tensor,
    cuts: list[int],
    mask: Tensor | None = None,
    cache: TwoAxisCache | None = None,
) -> Tensor:
    """Logits of tokens given chunk by chunk."""
    cache = model.make_cache() if cache is None else cache
    rows = []
    for chunk in tokens.split(cuts, dim=1):
        start, end = cache.get_seq_length(), cache.get_seq_length() + chunk.shape[1]
        padded = {} if mask is None else counted(mask[:, :end], start)
        rows.append(logits(model, chunk, past_key_values=cache, **padded))
    return torch.cat(rows, dim=1)


@pytest.mark.parametrize("config", MEMORIES)
@given(data=st.data())
def test_any_split_equals_one_pass(config: ModelConfig, data: st.DataObject) -> None:
    model, tokens = shared(config), prompt(1, length=LENGTH)
    mask = torch.ones_like(tokens)
    pads = data.draw(st.sampled_from([(0, 0), (3, 0), (1, 5)]))
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    found = in_chunks(model, tokens, draw_cuts(data, LENGTH), mask)
    whole = logits(model, tokens, **counted(mask), use_cache=False)
    for row, pad in enumerate(pads):
        alone = logits(model, tokens[row : row + 1, pad:], use_cache=False)
        assert far(found[row : row + 1, pad:], whole[row : row + 1, pad:]) <= 1e-10
        assert far(found[row : row + 1, pad:], alone) <= 1e-10


@pytest.mark.parametrize("config", MEMORIES)
@given(data=st.data())
def test_taken_back_tokens_leave_no_trace(config: ModelConfig, data: st.DataObject) -> None:
    """Recording from some point on, any number of later tokens is cropped, in several rounds, with left padding."""
    model, tokens = shared(config), prompt(2, length=LENGTH)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, :2] = 0
    whole = logits(model, tokens, **counted(mask[:, :LENGTH]), use_cache=False)
    start = data.draw(st.integers(3, 6))
    cache = model.make_cache()
    logits(model, tokens[:, :start], past_key_values=cache, **counted(mask[:, :start]))
    cache.activate_past_recording()
    at = start
    while at < LENGTH:
        good, wrong = data.draw(st.integers(1, LENGTH - at)), data.draw(st.integers(0, 5))
        draft = torch.cat([tokens[:, at : at + good], prompt(at, length=wrong)], dim=1)
        cuts = draw_cuts(data, good + wrong)
        found = in_chunks(model, draft, cuts, mask, cache)[:, :good]
        cache.crop(-wrong)
        assert cache.get_seq_length() == at + good
        assert far(found, whole[:, at : at + good]) <= 1e-10
        at += good


@pytest.mark.parametrize("config", MEMORIES)
def test_spare_tokens_are_always_croppable(config: ModelConfig) -> None:
    model, tokens = shared(config), prompt(3, length=LENGTH)
    whole = logits(model, tokens, use_cache=False)
    cache = model.make_cache(spare=3)
    for chunk in torch.cat([tokens[:, :7], prompt(0, length=3)], dim=1).split([7, 1, 1, 1], dim=1):
        logits(model, chunk, past_key_values=cache)
    cache.crop(-3)
    assert far(in_chunks(model, tokens[:, 7:], [1, 3], cache=cache), whole[:, 7:]) <= 1e-10
    cache.crop(8)  # the length to keep
    assert cache.get_seq_length() == 8
    assert far(logits(model, tokens[:, 8:], past_key_values=cache), whole[:, 8:]) <= 1e-10


def windows_of(cache: TwoAxisCache) -> list[int]:
    return [ring.window for ring in cache.past.rings() if ring.window is not None]


@pytest.mark.parametrize("config", MEMORIES)
def test_cropping_is_exact_or_refused(config: ModelConfig) -> None:
    """Without recording: where a window has moved on the crop is refused, with the reason, and changes nothing."""
    model, tokens = shared(config), prompt(4, length=LENGTH)
    whole = logits(model, tokens, use_cache=False)
    cache = model.make_cache()
    in_chunks(model, tokens, [6, 1, 1, 1, 1, 1], cache=cache)
    narrow = [w for w in windows_of(cache) if 1 < w <= LENGTH]
    if narrow:
        with pytest.raises(ValueError, match=r"cannot trim 2 positions: \d+ would remain and a window of \d+ needs"):
            cache.crop(-2)
        assert cache.get_seq_length() == LENGTH
        extra = prompt(5, length=1)
        expected = logits(model, torch.cat([tokens, extra], dim=1), use_cache=False)[:, -1:]
        assert far(logits(model, extra, past_key_values=cache), expected) <= 1e-10
    else:
        cache.crop(-2)
        assert far(logits(model, tokens[:, -2:], past_key_values=cache), whole[:, -2:]) <= 1e-10


def test_the_refusal_is_met_by_every_kind_of_local_memory() -> None:
    """The test above would say nothing if no configuration had a window that moves on."""
    narrow = {name for name, config in MEMORY.items() if any(w > 1 for w in windows_of(make(config).make_cache()))}
    assert narrow == set(MEMORY) - {"none"}


@pytest.mark.parametrize("config", MEMORIES)
def test_rows_are_reordered_repeated_and_selected(config: ModelConfig) -> None:
    model, tokens = shared(config), prompt(6, batch=3, length=LENGTH)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    mask[2, :1] = 0
    whole = logits(model, tokens, **counted(mask), use_cache=False)[:, 7:]

    def after(change: str, argument: Tensor | int, rows: Tensor) -> float:
        cache = model.make_cache()
        in_chunks(model, tokens[:, :7], [5, 1, 1], mask, cache)
        getattr(cache, change)(argument)
        assert cache.batch_size == len(rows)
        return far(in_chunks(model, tokens[rows, 7:], [1, 3], mask[rows], cache), whole[rows])

    beams = torch.tensor([2, 2, 0])
    assert after("reorder_cache", beams, beams) <= 1e-10
    some = torch.tensor([1, 0])
    assert after("batch_select_indices", some, some) <= 1e-10
    assert after("batch_select_indices", torch.tensor([True, False, True]), torch.tensor([0, 2])) <= 1e-10
    assert after("batch_repeat_interleave", 2, torch.tensor([0, 0, 1, 1, 2, 2])) <= 1e-10


@pytest.mark.parametrize("config", MEMORIES)
def test_only_full_attention_grows(config: ModelConfig) -> None:
    model, sizes = make(config, torch.float32), []
    for length in (24, 48):
        whole, steps = model.make_cache(), model.make_cache()
        tokens = prompt(0, length=length)
        logits(model, tokens, past_key_values=whole)
        in_chunks(model, tokens, [length - 2, 1, 1], cache=steps)
        assert whole.nbytes_by_part() == steps.nbytes_by_part()  # however the tokens came
        assert whole.nbytes() == sum(whole.nbytes_by_part().values())
        sizes.append(whole.nbytes_by_part())
    full = sum(window is None for window in config.attention_windows or (None,) * config.num_hidden_layers)
    per_token = 2 * 2 * 8 * 4 * full  # rows, key and value, one head of 8 channels, bytes
    assert [size["attention"] for size in sizes] == [24 * per_token, 48 * per_token]
    assert sizes[0]["local"] == sizes[1]["local"]
    assert sizes[0]["stream"] == sizes[1]["stream"]
    mixes = config.mixer is not None or config.attention_windows is not None
    if not mixes:
        assert sizes[0]["local"] == 0
    if config.stream != "deep_delta":
        assert sizes[0]["stream"] == 0


def test_local_state_is_what_the_windows_say() -> None:
    model = make(dataclasses.replace(BASE, attention_windows=(3, None, 1)), torch.float32)
    cache = model.make_cache()
    logits(model, prompt(0, length=20), past_key_values=cache)
    assert cache.nbytes_by_part() == {"attention": 2 * 2 * 8 * 4 * 20, "local": 2 * 2 * 8 * 4 * 2, "stream": 0}


def test_recorded_state_is_forgotten_by_a_crop() -> None:
    model = make(MEMORY["two axes"], torch.float32)
    tokens, plain, recording = prompt(0, length=30), model.make_cache(), model.make_cache()
    recording.activate_past_recording()
    logits(model, tokens, past_key_values=plain)
    logits(model, tokens, past_key_values=recording)
    assert recording.nbytes_by_part()["local"] > plain.nbytes_by_part()["local"]
    recording.crop(0)
    assert recording.nbytes_by_part() == plain.nbytes_by_part()


def test_recording_does_not_bring_back_what_was_forgotten() -> None:
    model, tokens = make(MEMORY["two axes"]), prompt(0, length=20)
    cache = model.make_cache()
    in_chunks(model, tokens[:, :16], [8, 8], cache=cache)
    cache.activate_past_recording()
    whole = in_chunks(model, tokens[:, 16:], [2, 2], cache=cache)
    with pytest.raises(ValueError, match="cannot trim 15 positions"):
        cache.crop(-15)
    cache.crop(-4)
    assert far(logits(model, tokens[:, 16:], past_key_values=cache), whole) <= 1e-10


def test_an_old_value_stays_valid() -> None:
    """The past is a value: one prefix serves several continuations, and a deep copy is independent."""
    model, tokens = make(MEMORY["two axes"]), prompt(7, length=LENGTH)
    cache = model.make_cache()
    logits(model, tokens[:, :6], past_key_values=cache)
    past, copied = cache.past, copy.deepcopy(cache)
    first = logits(model, tokens[:, 6:], past_key_values=cache)
    assert copied.get_seq_length() == 6
    assert torch.equal(logits(model, tokens[:, 6:], past_key_values=copied), first)
    cache.past = past
    assert torch.equal(logits(model, tokens[:, 6:], past_key_values=cache), first)


def test_reset_starts_anew() -> None:
    model, tokens = make(MEMORY["two axes"]), prompt(8)
    cache = model.make_cache()
    first = logits(model, tokens, past_key_values=cache)
    cache.activate_past_recording()
    cache.reset()
    assert (cache.get_seq_length(), cache.nbytes(), cache.batch_size, cache.is_initialized) == (0, 0, -1, False)
    assert torch.equal(logits(model, tokens, past_key_values=cache), first)
    cache.crop(-12)  # still recording
    assert torch.equal(logits(model, tokens, past_key_values=cache), first)


def test_what_transformers_asks() -> None:
    model = make(BASE)
    cache = model.make_cache()
    assert (cache.get_seq_length(), cache.get_max_length(), len(cache), cache.is_initialized) == (0, -1, 3, False)
    found = output(model, prompt(0), past_key_values=cache)
    assert found.past_key_values is cache
    assert (cache.get_seq_length(), cache.get_query_offset(), cache.batch_size) == (12, 12, 2)
    assert cache.get_mask_sizes(3) == (15, 0)
    assert (cache.is_compileable, cache.is_croppable, cache.is_initialized) == (False, True, True)
    assert cache.is_sliding == cache.is_linear == [False] * 3
    assert repr(cache) == f"TwoAxisCache(12 tokens, {cache.nbytes()} bytes)"


def test_refusals() -> None:
    model = make(BASE)
    cache = model.make_cache()
    with pytest.raises(ValueError, match="filled by its own model"):
        cache.update(torch.zeros(1), torch.zeros(1), 0)
    with pytest.raises(ValueError, match="filled by its own model"):
        cache.update_conv_state(torch.zeros(1), 0)
    with pytest.raises(ValueError, match="cannot be offloaded"):
        cache.offload(0)
    with pytest.raises(ValueError, match=r"must be a TwoAxisCache .* got DynamicCache"):
        model(prompt(0), past_key_values=DynamicCache())
    logits(model, prompt(0), past_key_values=cache)
    with pytest.raises(ValueError, match="cannot trim 13 positions of a ring that has seen 12"):
        cache.crop(-13)
    with pytest.raises(ValueError, match="covers 5 positions; 12 earlier ones and 1 new ones are there"):
        model(prompt(0, length=1), past_key_values=cache, attention_mask=torch.ones(2, 5))
    with pytest.raises(ValueError, match="the cache holds 2 rows, the tokens have 3"):
        logits(model, prompt(0, batch=3, length=1), past_key_values=cache)
    other = make(dataclasses.replace(BASE, num_hidden_layers=2))
    with pytest.raises(ValueError, match="made for another model"):
        logits(other, prompt(0, length=1), past_key_values=cache)
