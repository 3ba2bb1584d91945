"""What counting alone predicts: losses of a table of tokens and of a table of pairs, on the tokens a run trains on.

    unigram   p(b)     = (c(b) + 1) / (N + V)                                   N tokens, V in the vocabulary
    bigram    p(b | a) = (c(a, b) + T(a) p(b)) / (c(a) + T(a))                  T(a) different tokens came after a

The second is Witten and Bell's smoothing: what was seen counts, and unseen pairs share as much as there were firsts. A
model that does not come below it has learned less than a table of counts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from twoaxis.data.packing import IGNORED

MOST = 4_000_000
"""Training tokens that are counted at most."""


class Counted(NamedTuple):
    """Held-out nats per token of two tables, and how many tokens they were counted on."""

    unigram: float
    bigram: float
    tokens: int


def count_ngrams(train: Any, held_out: Any, vocabulary: int) -> Counted:
    """Losses of what is counted in training examples on the labelled tokens of held-out ones."""
    context = len(train[0]["input_ids"])
    rows = [train[number] for number in range(min(len(train), max(1, MOST // context)))]
    first, second = _pairs(rows)
    seen = np.bincount(second, minlength=vocabulary)
    single = (seen + 1) / (seen.sum() + vocabulary)
    pairs, counts = np.unique(first * vocabulary + second, return_counts=True)
    before = np.bincount(first, minlength=vocabulary)
    kinds = np.bincount(pairs // vocabulary, minlength=vocabulary)
    a, b = _pairs([held_out[number] for number in range(len(held_out))])
    places = np.minimum(np.searchsorted(pairs, a * vocabulary + b), len(pairs) - 1)
    together = np.where(pairs[places] == a * vocabulary + b, counts[places], 0)
    # A token that nothing has followed yet says nothing: kinds and counts of it are zero.
    double = np.where(kinds[a] > 0, (together + kinds[a] * single[b]) / np.maximum(before[a] + kinds[a], 1), single[b])
    return Counted(float(-np.log(single[b]).mean()), float(-np.log(double).mean()), len(rows) * context)


def _pairs(rows: list[dict[str, torch.Tensor]]) -> tuple[np.ndarray, np.ndarray]:
    """Labelled tokens and those before them."""
    ids = torch.stack([row["input_ids"] for row in rows])
    labels = torch.stack([row["labels"] for row in rows])[:, 1:]
    known = labels != IGNORED
    return ids[:, :-1][known].numpy(), labels[known].numpy()
