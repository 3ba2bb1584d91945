"""Tables of counts, against counting by hand."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch

from twoaxis.data.ngrams import count_ngrams
from twoaxis.data.packing import IGNORED

VOCABULARY = 7


def examples(seed: int, count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, VOCABULARY - 1, (count, 12), generator=generator)  # the last token never occurs
    labels = torch.where(torch.rand(rows.shape, generator=generator) < 0.2, IGNORED, rows)
    return [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]


def pairs(rows: list[dict[str, torch.Tensor]]) -> list[tuple[int, int]]:
    found = []
    for row in rows:
        ids, labels = row["input_ids"].tolist(), row["labels"].tolist()
        found += [(ids[place - 1], labels[place]) for place in range(1, len(ids)) if labels[place] != IGNORED]
    return found


def test_losses_are_those_of_counting_by_hand() -> None:
    train, held_out = examples(0, 5), examples(1, 9)
    held_out[0]["input_ids"][3] = VOCABULARY - 1  # a token that nothing has followed
    held_out[0]["labels"][4] = 2
    found = count_ngrams(train, held_out, VOCABULARY)
    seen = pairs(train)
    together, before, single = Counter(seen), Counter(a for a, _ in seen), Counter(b for _, b in seen)
    kinds = Counter(a for a, _ in together)

    def one(b: int) -> float:
        return (single[b] + 1) / (len(seen) + VOCABULARY)

    def two(a: int, b: int) -> float:
        return (together[a, b] + kinds[a] * one(b)) / (before[a] + kinds[a]) if before[a] else one(b)

    asked = pairs(held_out)
    assert any(a == VOCABULARY - 1 for a, _ in asked)
    assert found.unigram == pytest.approx(-np.mean([math.log(one(b)) for _, b in asked]))
    assert found.bigram == pytest.approx(-np.mean([math.log(two(a, b)) for a, b in asked]))
    assert found.tokens == 60
    for a in range(VOCABULARY):
        assert sum(two(a, b) for b in range(VOCABULARY)) == pytest.approx(1)


def test_a_table_of_pairs_learns_what_follows_for_certain() -> None:
    row = torch.arange(12) % 6
    found = count_ngrams([{"input_ids": row, "labels": row}] * 50, [{"input_ids": row, "labels": row}], VOCABULARY)
    assert found.bigram < 0.05 < 1.5 < found.unigram
