"""Rows of a fixed length out of tokens that stand one after another, in an order that is a function.

    tokens   a a a a ; b b ; c c c c c c ;        context 4
    epoch 0    [a a a ;][b b ; c][c c c c]        offset 1, rows in the order 2 0 1
    epoch 1  [a a a a][; b b ;][c c c c]          offset 0, rows in the order 1 2 0

Example i of a seed is row `order[i % rows]` of epoch `i // rows`. Offset and order of an epoch come from (seed, epoch)
by hashing counters, so that any example can be had at once, in any process, with any version of any library. Within an
epoch no token comes twice. With `isolate`, positions begin anew with each document, and its first token is not
predicted.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from twoaxis.data.corpus import Part

if TYPE_CHECKING:
    from numpy.typing import NDArray

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


class Order:
    """Where in the tokens example i of a seed begins.

    Args:
        tokens: how many there are.
        context: tokens of a row.
        seed: of the order.
    """

    def __init__(self, tokens: int, context: int, seed: int) -> None:
        self.tokens, self.context, self.seed = tokens, context, seed
        self.rows = count_rows(tokens, context)
        self._epoch = -1
        self._starts: NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def start(self, example: int) -> int:
        """The place of the first token of an example."""
        epoch, place = divmod(example, self.rows)
        if epoch != self._epoch:
            self._starts, self._epoch = self.epoch(epoch), epoch
        return int(self._starts[place])

    def epoch(self, epoch: int) -> NDArray[np.int64]:
        """The places of all examples of an epoch."""
        words = random_words(self.seed, epoch, self.rows + 1)
        spare = min(self.tokens - self.rows * self.context, self.context - 1)
        offset = int(words[-1]) % (spare + 1)
        return offset + np.argsort(words[:-1], kind="stable").astype(np.int64) * self.context

    def __getstate__(self) -> tuple[int, int, int]:
        return self.tokens, self.context, self.seed

    def __setstate__(self, state: tuple[int, int, int]) -> None:
        self.__init__(*state)


class Fixed:
    """The same for held-out rows: side by side from the first token on, each once, spread over the documents.

    Args:
        tokens: how many there are.
        context: tokens of a row.
    """

    def __init__(self, tokens: int, context: int) -> None:
        self.rows = tokens // context
        self._starts = np.argsort(random_words(0, 0, self.rows), kind="stable").astype(np.int64) * context

    def start(self, example: int) -> int:
        """The place of the first token of a row."""
        return int(self._starts[example])


class Rows(Dataset[dict[str, Tensor]]):
    """The first examples of an order.

    Args:
        part: the tokens.
        order: where examples begin.
        count: how many examples there are.
        context: tokens of each.
        isolate: keep documents apart.
    """

    def __init__(self, part: Part, order: Order | Fixed, count: int, context: int, *, isolate: bool) -> None:
        self.part, self.order, self.count = part, order, count
        self.context, self.isolate = context, isolate

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, example: int) -> dict[str, Tensor]:
        start = self._start(example)
        row = torch.from_numpy(self.part.tokens[start : start + self.context].astype(np.int64))
        if not self.isolate:
            return {"input_ids": row, "labels": row.clone()}
        positions, begins = self._positions(start)
        labels = row.clone()
        labels[begins] = IGNORED
        return {"input_ids": row, "labels": labels, "position_ids": positions}

    def _start(self, example: int) -> int:
        if not 0 <= example < self.count:
            raise IndexError(f"example {example} of {self.count}")
        return self.order.start(example)

    def _positions(self, start: int) -> tuple[Tensor, Tensor]:
        """Positions that count from each document's first token, or the row's, and where documents begin in the row."""
        starts = self.part.starts
        first, last = np.searchsorted(starts, (start, start + self.context))
        begins = starts[first:last] - start
        positions = np.arange(self.context)
        anew = np.zeros(self.context, dtype=np.int64)
        anew[begins] = begins
        return torch.from_numpy(positions - np.maximum.accumulate(anew)), torch.from_numpy(begins)

    def predicted(self, sizes: NDArray[Any]) -> tuple[int, int]:
        """How many tokens of these rows are predicted, and how many bytes they stand for.

        Args:
            sizes: bytes of each token of the part.
        """
        tokens = size = 0
        for example in range(self.count):
            start = self._start(example)
            counted = np.ones(self.context, dtype=bool)
            counted[0] = False
            if self.isolate:
                counted[self._positions(start)[1].numpy()] = False
            tokens += int(counted.sum())
            size += int(sizes[start : start + self.context][counted].sum(dtype=np.int64))
        return tokens, size
