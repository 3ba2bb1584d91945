"""Rows of a fixed length out of tokens that stand one after another, in an order that is a function.

    tokens   a a a a ; b b ; c c c c c c ;        context 4
    epoch 0    [a a a ;][b b ; c][c c c c]        offset 1, rows in the order 2 0 1
    epoch 1  [a a a a][; b b ;][c c c c]          offset 0, rows in the order 1 2 0

Example i of a seed is row `order[i % rows]` of epoch `i // rows`. Offset and order of an epoch come from (seed, epoch)
by hashing counters, so that any example can be had at once, in any process, with any version of any library. Within an
epoch no token comes twice. Held-out rows stand side by side from the first token on, each once, spread over the
documents. With `isolate`, positions begin anew with each document, and its first token is not predicted.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from twoaxis.data.corpus import Part

IGNORED = -100
"""The label of a token that is not predicted."""


def splitmix64(key: int, count: int) -> NDArray[np.uint64]:
    """The first words of the splitmix64 generator; word n is a hash of (key, n) and needs none before it."""
    words = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def random_words(seed: int, epoch: int, count: int) -> NDArray[np.uint64]:
    """Random 64-bit words that depend on the seed and the epoch only."""
    key = hashlib.sha256(f"order {seed} {epoch}".encode()).digest()
    return splitmix64(int.from_bytes(key[:8], "big"), count)


def count_rows(tokens: int, context: int) -> int:
    """Rows of an epoch: those that fit whatever the offset, but at least one if one fits at all."""
    return max((tokens - context + 1) // context, min(1, tokens // context))


@lru_cache(maxsize=4)
def epoch_starts(tokens: int, context: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Where the examples of an epoch, counted from 0, begin, in their order."""
    rows = count_rows(tokens, context)
    words = random_words(seed, epoch, rows + 1)
    spare = min(tokens - rows * context, context - 1)
    offset = int(words[-1]) % (spare + 1)
    return offset + np.argsort(words[:-1], kind="stable").astype(np.int64) * context


@lru_cache(maxsize=4)
def held_out_starts(tokens: int, context: int) -> NDArray[np.int64]:
    """Where held-out rows begin, in their order."""
    return np.argsort(random_words(0, 0, tokens // context), kind="stable").astype(np.int64) * context


class Rows(Dataset[dict[str, Tensor]]):
    """So many examples out of the first `tokens` of one side; `seed` is that of their order, None for held-out rows."""

    def __init__(self, part: Part, tokens: int, count: int, context: int, *, seed: int | None, isolate: bool) -> None:
        self.part, self.tokens, self.count = part, tokens, count
        self.context, self.seed, self.isolate = context, seed, isolate

    def __len__(self) -> int:
        return self.count

    def start(self, example: int) -> int:
        """The place of the first token of an example."""
        if not 0 <= example < self.count:
            raise IndexError(f"example {example} of {self.count}")
        if self.seed is None:
            return int(held_out_starts(self.tokens, self.context)[example])
        epoch, row = divmod(example, count_rows(self.tokens, self.context))
        return int(epoch_starts(self.tokens, self.context, self.seed, epoch)[row])

    def __getitem__(self, example: int) -> dict[str, Tensor]:
        start = self.start(example)
        row = torch.from_numpy(self.part.tokens[start : start + self.context].astype(np.int64))
        if not self.isolate:
            return {"input_ids": row, "labels": row.clone()}
        begins = self._begins(start)
        positions = np.arange(self.context)
        first = np.zeros_like(positions)
        first[begins] = begins
        labels = row.clone()
        labels[begins] = IGNORED
        return {
            "input_ids": row,
            "labels": labels,
            "position_ids": torch.from_numpy(positions - np.maximum.accumulate(first)),
        }

    def _begins(self, start: int) -> NDArray[np.int64]:
        """Where documents begin in a row."""
        starts = self.part.starts
        first, last = np.searchsorted(starts, (start, start + self.context))
        return starts[first:last] - start

    def predicted(self, sizes: NDArray[Any]) -> tuple[int, int]:
        """How many tokens of these rows are predicted, and how many bytes they stand for, given those of all tokens."""
        tokens = size = 0
        for start in map(self.start, range(self.count)):
            counted = np.ones(self.context, dtype=bool)
            counted[0] = False
            if self.isolate:
                counted[self._begins(start)] = False
            tokens += int(counted.sum())
            size += int(sizes[start : start + self.context][counted].sum(dtype=np.int64))
        return tokens, size
