"""The claims along time on a model that is not ours, called as the functions that they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from tests.support.foreign import byte_llama
from twoaxis.verify.time import TIME, Stepper, splits


class Memory:
    """A cache of transformers as a value: what changes it works on a copy."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def changed(self, method: str, argument: Any) -> Memory:
        cache = copy.deepcopy(self.cache)
        getattr(cache, method)(argument)
        return Memory(cache)

    def trim(self, count: int) -> Memory:
        return self.changed("crop", -count)

    def reorder(self, index: Tensor) -> Memory:
        return self.changed("reorder_cache", index)

    def repeat(self, times: int) -> Memory:
        return self.changed("batch_repeat_interleave", times)


class Stepped:
    """A causal model of transformers with the calls of a decoder."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, tokens: Tensor, reach: Tensor | None = None) -> Tensor:
        # a token's place in its document: rotary positions are in float32, where a shift is not exact
        return self.model(tokens, attention_mask=mask(reach, 0), position_ids=reach, use_cache=False).logits

    def start(self, spare: int = 0) -> Memory:
        from transformers import DynamicCache

        return Memory(DynamicCache())

    def step(self, tokens: Tensor, past: Memory, reach: Tensor | None = None) -> tuple[Tensor, Memory]:
        cache = copy.deepcopy(past.cache)
        allowed = mask(reach, cache.get_seq_length())
        out = self.model(tokens, past_key_values=cache, attention_mask=allowed, position_ids=reach, use_cache=True)
        return out.logits, Memory(cache)


def mask(reach: Tensor | None, past: int) -> Tensor | None:
    """(B, 1, T, past + T) whether a token sees a position: the `reach` before it and itself."""
    if reach is None:
        return None
    here = past + torch.arange(reach.shape[1])
    distance = here[:, None] - torch.arange(past + reach.shape[1])
    return ((distance >= 0) & (distance <= reach[..., None])).unsqueeze(1)


@pytest.fixture(scope="module")
def llama() -> Stepper:
    """In float64; its memory may grow."""

    def draw(seed: int, batch: int, time: int) -> Tensor:
        return torch.randint(0, 300, (batch, time), generator=torch.Generator().manual_seed(seed))

    return Stepper(Stepped(byte_llama().double().eval()), draw, lambda past: 0)


@pytest.mark.parametrize("name", TIME)
@torch.no_grad()
def test_a_transformers_model_holds_the_claim(llama: Stepper, name: str) -> None:
    assert TIME[name](llama).holds


@torch.no_grad()
def test_memory_that_grows_is_seen(llama: Stepper) -> None:
    growing = llama._replace(kept=lambda past: past.cache.get_seq_length())
    assert TIME["time: memory does not grow"](growing).error == 24


def test_cuts_cover_a_sequence() -> None:
    assert {sum(cuts) for cuts in splits(12, 3)} == {12}
