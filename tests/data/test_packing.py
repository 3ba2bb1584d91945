"""Rows and their order: every token at most once an epoch, any example at once."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.data.text_samples import load, write_folder
from twoaxis.data.packing import Rows, count_rows, epoch_starts, held_out_starts, splitmix64
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder


def test_the_generator_is_splitmix64() -> None:
    words = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert splitmix64(1234567, 5).tolist() == words  # the published test vector
    assert splitmix64(1234567, 3).tolist() == words[:3]


@given(tokens=st.integers(0, 3000), context=st.integers(2, 60), seed=st.integers(0, 2**40), epoch=st.integers(0, 9))
def test_an_epoch_has_no_token_twice(tokens: int, context: int, seed: int, epoch: int) -> None:
    assert sorted(held_out_starts(tokens, context).tolist()) == [n * context for n in range(tokens // context)]
    rows = count_rows(tokens, context)
    if tokens < context:
        assert rows == 0
        return
    assert tokens - rows * context < 2 * context  # no more than one row's worth is left at each end
    starts = epoch_starts(tokens, context, seed, epoch)
    assert len(starts) == rows >= 1
    assert starts.min() >= 0
    assert starts.max() + context <= tokens
    assert starts.min() < context or rows == 1
    assert set(np.diff(np.sort(starts)).tolist()) <= {context}


def rows(tokens: int, context: int, seed: int) -> Rows:
    """Rows whose places are asked only."""
    part: Any = None
    return Rows(part, tokens, 10**9, context, seed=seed, isolate=False)


def test_any_example_at_once() -> None:
    count, order = count_rows(10_000, 16), rows(10_000, 16, 3)
    straight = [order.start(n) for n in range(3 * count)]
    assert straight == [start for epoch in range(3) for start in epoch_starts(10_000, 16, 3, epoch).tolist()]
    for example in (2 * count + 5, 0, count - 1, count, 7):
        epoch_starts.cache_clear()
        assert rows(10_000, 16, 3).start(example) == straight[example]
    assert straight[:6] == [4781, 29, 1357, 813, 941, 4621]  # an order must never change: runs are resumed by it
    assert straight[count : 2 * count] != straight[:count]


def test_orders_of_seeds_and_epochs_differ() -> None:
    seen = {tuple(epoch_starts(5000, 10, seed, epoch).tolist()) for seed in range(5) for epoch in range(5)}
    assert len(seen) == 25
    offsets = [int(epoch_starts(5000, 10, seed, epoch).min()) for seed in range(40) for epoch in range(25)]
    assert sorted(set(offsets)) == list(range(10))


def test_orders_are_uniform() -> None:
    count, epochs = 6, 3000
    assert count_rows(count * 4 + 3, 4) == count
    ranks = np.stack([epoch_starts(count * 4 + 3, 4, 11, epoch) // 4 for epoch in range(epochs)])
    table = np.stack([np.bincount(ranks[:, place], minlength=count) for place in range(count)])
    chi = ((table - epochs / count) ** 2 / (epochs / count)).sum()
    assert chi < 52.6  # 25 degrees of freedom: exceeded once in a thousand


def test_rows_are_the_tokens(tmp_path: Path) -> None:
    data = load(tmp_path, write_folder(tmp_path / "texts"))
    tokens = np.array(data.corpus.train.tokens)
    examples = data.train(seed=5, count=3 * data.rows)
    starts = np.concatenate([epoch_starts(len(tokens), 32, 5, epoch) for epoch in range(3)])
    assert len(examples) == 3 * data.rows == len(starts)
    for example, start in enumerate(starts):
        item = examples[example]
        assert sorted(item) == ["input_ids", "labels"]
        assert item["input_ids"].dtype == item["labels"].dtype == torch.int64
        assert item["input_ids"].tolist() == tokens[start : start + 32].tolist()
        assert torch.equal(item["labels"], item["input_ids"])
        assert item["labels"].data_ptr() != item["input_ids"].data_ptr()
    for wrong in (-1, len(examples)):
        with pytest.raises(IndexError, match=f"example {wrong} of {len(examples)}"):
            examples[wrong]


def test_rows_go_to_other_processes(tmp_path: Path) -> None:
    data = load(tmp_path, write_folder(tmp_path / "texts"), isolate=True)
    for examples in (data.train(1, 50), data.held_out(20)):
        packed = pickle.dumps(examples)
        assert len(packed) < 4000  # the tokens stay on the disk
        again = pickle.loads(packed)
        for example in range(len(examples)):
            assert all(torch.equal(again[example][key], value) for key, value in examples[example].items())
        loader = torch.utils.data.DataLoader(examples, batch_size=4, num_workers=2)
        together = torch.cat([batch["input_ids"] for batch in loader])
        assert torch.equal(together, torch.stack([examples[n]["input_ids"] for n in range(len(examples))]))


def small_model() -> Decoder:
    torch.manual_seed(2)
    shape: dict[str, Any] = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "initializer_range": 0.3, "mixer": "canon", "max_position_embeddings": 64}
    return Decoder(ModelConfig(**shape)).double().eval()


def test_isolated_documents_do_not_see_each_other(tmp_path: Path) -> None:
    data = load(tmp_path, write_folder(tmp_path / "texts", 60, words=3), isolate=True, context=48)
    model, checked = small_model(), 0
    starts = set(data.corpus.train.starts.tolist())
    for example in range(4):
        item, place = data.train(0, 4)[example], data.train(0, 4).start(example)
        ids, labels, positions = item["input_ids"], item["labels"], item["position_ids"]
        begins = [n for n in range(48) if place + n in starts]
        assert [n for n in range(48) if labels[n] == -100] == begins
        assert torch.equal(labels[labels != -100], ids[labels != -100])
        cuts = sorted({0, *begins})
        assert positions.tolist() == [n - max(c for c in cuts if c <= n) for n in range(48)]
        with torch.no_grad():
            packed = model(ids[None], position_ids=positions[None])[0]
            for begin, stop in zip(cuts, [*cuts[1:], 48], strict=True):
                alone = model(ids[None, begin:stop])[0]
                assert torch.allclose(packed[begin:stop], alone, atol=1e-12)
                checked += 1
    assert checked > 8
