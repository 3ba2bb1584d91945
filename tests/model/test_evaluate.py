"""Loss, perplexity and bits per byte, against computing every token by itself."""

from __future__ import annotations

import functools
import math
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twoaxis.data.tokenizer import Bytes, Encoded
from twoaxis.model import evaluate as measuring
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.model.evaluate import encode_pieces, evaluate, pick_context, windows

SHAPE: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "both axes": {
        "stream": "deep_delta",
        "stream_options": {"value_channels": 2, "compress": "token", "expand": "conv"},
        "mixer": "canon",
        "attention_windows": (3, None),
    },
}


LINE = "a line of text\n"


class Small(Bytes):
    """Bytes that a model of 23 tokens knows."""

    def encode(self, texts: Sequence[str], *, sizes: bool = False, prompt: bool = False) -> list[Encoded]:
        return [Encoded(e.ids % 23, e.sizes) for e in super().encode(texts, sizes=sizes, prompt=prompt)]


@functools.cache
def model_of(method: str) -> Decoder:
    return Decoder(ModelConfig(**SHAPE, **METHODS[method]), 1).double().eval()


def document(length: int, seed: int) -> Encoded:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, SHAPE["vocab_size"], (length,), generator=generator)
    return Encoded(tokens.numpy(), torch.randint(0, 5, (length,), generator=generator).numpy())


def nats(model: Decoder, seen: list[int], token: int) -> float:
    """What the last of `seen` costs to go on with `token`, from a pass of its own."""
    with torch.no_grad():
        return -model(torch.tensor([seen]))[0, -1].log_softmax(-1)[token].item()


def by_hand(model: Decoder, tokens: list[int], context: int, stride: int) -> float:
    total = 0.0
    for at in range(1, len(tokens)):
        moves = 0
        while moves * stride + context <= at:  # the first window that reaches this token
            moves += 1
        total += nats(model, tokens[moves * stride : at], tokens[at])
    return total


@given(
    method=st.sampled_from(sorted(METHODS)),
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=3),
    context=st.integers(2, 9),
    batch=st.integers(1, 4),
    data=st.data(),
)
def test_every_token_by_itself(method: str, lengths: list[int], context: int, batch: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, context - 1), label="stride")
    model = model_of(method)
    documents = [document(length, seed) for seed, length in enumerate(lengths)]
    tokens, size = sum(n - 1 for n in lengths), sum(sum(d.sizes[1:]) for d in documents)
    if tokens == 0 or size == 0:
        with pytest.raises(ValueError, match="nothing to predict" if tokens == 0 else "stand for no bytes"):
            evaluate(model, documents, context=context, stride=stride, batch=batch)
        return
    total = sum(by_hand(model, d.ids.tolist(), context, stride) for d in documents)
    found = evaluate(model, documents, context=context, stride=stride, batch=batch)
    assert (found.tokens, found.bytes, found.documents) == (tokens, size, sum(n > 1 for n in lengths))
    assert found.loss == pytest.approx(total / tokens, rel=1e-11)
    assert found.perplexity == pytest.approx(math.exp(total / tokens), rel=1e-10)
    assert found.bits_per_byte == pytest.approx(total / math.log(2) / size, rel=1e-11)
    assert (found.context, found.stride) == (context, stride)


def test_windows_of_the_drawing() -> None:
    def spans(length: int) -> list[tuple[int, int, int]]:
        made = windows(Encoded(np.arange(length), np.arange(length)), 6, 4)
        return [(int(w.ids[0]), int(w.ids[-1]) + 1, int(w.ids[w.first])) for w in made]

    assert spans(10) == [(0, 6, 1), (4, 10, 6)]
    assert spans(11) == [(0, 6, 1), (4, 10, 6), (8, 11, 10)]
    assert spans(1) == []


def test_a_long_text_is_measured_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "PIECE", 16)
    text = "one line\nanother line\n" * 9
    (whole,) = Bytes().encode([text], sizes=True, prompt=True)
    parts = list(encode_pieces(Bytes(), text))
    assert len(parts) > 9
    assert np.array_equal(np.concatenate([part.ids for part in parts]), whole.ids)
    assert np.array_equal(np.concatenate([part.sizes for part in parts]), whole.sizes)


def test_memory_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "SORTED", 2)

    def peak(lines: int) -> int:
        tracemalloc.start()
        evaluate(model_of("plain"), (encode_pieces(Small(), LINE * 30) for _ in range(lines)), context=8, stride=7)
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    peak(1)  # what is made once
    assert peak(16) < 1.5 * peak(2)


def test_a_smaller_vocabulary_chunk_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, documents = model_of("plain"), [document(30, 1), document(12, 2)]
    whole = evaluate(model, documents, context=8, stride=4)
    monkeypatch.setattr(measuring, "LOGITS", 50)  # two tokens at a time
    assert evaluate(model, documents, context=8, stride=4).loss == pytest.approx(whole.loss, rel=1e-13)


def test_max_tokens_counts_the_first_ones() -> None:
    model, documents = model_of("plain"), [document(9, 1), document(1, 3), document(12, 2)]
    first = Encoded(documents[2].ids[:5], documents[2].sizes[:5])
    expected = evaluate(model, [documents[0], first], context=6, stride=3)
    found = evaluate(model, documents, context=6, stride=3, max_tokens=12)
    assert found.tokens == 12
    assert found._replace(seconds=0.0) == expected._replace(seconds=0.0)
    assert evaluate(model, documents, context=6, stride=3, max_tokens=8).documents == 1
    assert evaluate(model, documents, context=6, stride=3, max_tokens=500).tokens == 19


def test_watching_adds_up_and_the_mode_is_put_back() -> None:
    model, seen = model_of("plain"), []
    model.train()
    try:
        found = evaluate(
            model, [document(30, 1)], context=8, stride=4, batch=2, watch=lambda n, loss: seen.append((n, loss))
        )
        assert model.training
    finally:
        model.eval()
    assert sum(n for n, _ in seen) == found.tokens == 29
    assert seen[-1][1] == found.loss
    assert len(seen) == 4  # seven windows, two a pass


def test_bfloat16_losses_are_summed_wide() -> None:
    model = Decoder(ModelConfig(**SHAPE), 1).bfloat16().eval()
    one = document(20, 5)
    logits = model(torch.from_numpy(one.ids)[None])[0, :-1].float()
    expected = torch.nn.functional.cross_entropy(logits, torch.from_numpy(one.ids[1:])).item()
    assert evaluate(model, [one]).loss == pytest.approx(expected, rel=1e-5)


def test_defaults_of_the_context() -> None:
    model = model_of("plain")
    assert pick_context(model, None, None) == (32, 16)
    assert pick_context(model, 2, None) == (2, 1)
    assert pick_context(model, 100, 99) == (100, 99)
    longer: dict[str, Any] = SHAPE | {"max_position_embeddings": 5000}
    long = Decoder(ModelConfig(**longer))
    assert pick_context(long, None, None) == (1024, 512)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 1}, "context must be at least 2, .* got 1"),
        ({"context": 8, "stride": 8}, "stride must be from 1 to 7 with a context of 8, got 8"),
        ({"context": 8, "stride": 0}, "stride must be from 1 to 7 .* got 0"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    ],
)
def test_impossible_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(model_of("plain"), [document(9, 1)], **options)


def test_a_model_that_has_diverged_has_no_loss() -> None:
    model = Decoder(ModelConfig(**SHAPE))
    assert model.lm_head is not None
    with torch.no_grad():
        model.lm_head.weight[0, 0] = math.nan
    with pytest.raises(ValueError, match="the loss over 8 tokens is nan"):
        evaluate(model, [document(9, 1)])


def test_json_has_no_infinity() -> None:
    found = evaluate(model_of("plain"), [document(9, 1)])
    assert found._replace(perplexity=math.inf).to_dict()["perplexity"] is None
    assert found.to_dict()["tokens_per_second"] == found.tokens / found.seconds
