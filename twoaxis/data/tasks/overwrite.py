"""Overwriting facts: every key is written several times, and its last value is asked.

    k2 v0  k1 v3  k2 v1  k0 v2  k1 v0 ...     k2→v1  k1→v0  .

Every key is written `writes` times, in a random order, with independent values. Between the bag of tokens and the
answer lies the *stale* guess, one of the asked key's values with no regard to which came last: `stale_chance`, which
recall without a sense of order would reach.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from twoaxis.base.options import check_types
from twoaxis.data.tasks.task import END, UNSCORED, Alphabet, Examples, Task, Tokens, check_least, choices, shuffled


@dataclass(frozen=True, kw_only=True)
class OverwriteConfig:
    """Options of overwriting facts."""

    keys: int = 4
    """Different keys, all of them written."""
    writes: int = 4
    """How often each is written."""
    values: int = 32
    """Different values."""

    def __post_init__(self) -> None:
        check_types(self)
        check_least(self, keys=1, writes=1, values=2)

    @property
    def total(self) -> int:
        """Facts stated."""
        return self.keys * self.writes


class Overwrite(Task):
    """Overwriting facts."""

    name = "overwrite"
    summary = "keys are written several times, the last value is asked"
    Config = OverwriteConfig
    config: OverwriteConfig
    default_context = 48

    @property
    def alphabets(self) -> tuple[Alphabet, ...]:
        """The end, keys, values."""
        return Alphabet(".", 1), Alphabet("k", self.config.keys), Alphabet("v", self.config.values)

    @property
    def values(self) -> int:
        """Different values."""
        return self.config.values

    @property
    def stated(self) -> int:
        """One value per write."""
        return self.config.total

    @property
    def facts(self) -> int:
        """Tokens of the facts."""
        return 2 * self.config.total

    @property
    def shortest(self) -> int:
        """The facts, one question and the position of its answer."""
        return self.facts + 2

    @property
    def stale_chance(self) -> float:
        """Accuracy of one of the asked key's values, drawn as often as it was written to it."""
        fresh = 1 / self.config.writes
        return fresh + (1 - fresh) / self.values

    @property
    def bits(self) -> float:
        """The order of the keys, the values and the questions."""
        c = self.config
        orders = choices(c.total, c.total) - c.keys * choices(c.writes, c.writes)
        return orders + c.total * math.log2(c.values) + (self.context - self.facts - 1) * math.log2(c.keys)

    def sample(self, generator: np.random.Generator, count: int) -> Examples:
        """Writes in a random order, then keys drawn with repetition."""
        c, k, v = self.config, self.tokens("k").start, self.tokens("v").start
        keys = shuffled(generator, count, np.arange(c.total) % c.keys)
        values = generator.integers(c.values, size=keys.shape)
        asked = generator.integers(c.keys, size=(count, self.context - self.facts - 1))
        rows = np.arange(count)
        held = np.zeros((count, c.keys), dtype=np.int64)
        for write in range(c.total):
            held[rows, keys[:, write]] = values[:, write]
        facts = np.stack([keys + k, values + v], -1).reshape(count, -1)
        input_ids = np.concatenate([facts, asked + k, np.full((count, 1), END)], 1)
        labels = np.full_like(input_ids, UNSCORED)
        labels[:, self.facts + 1 :] = np.take_along_axis(held, asked, 1) + v
        return Examples(input_ids, labels)

    def solve(self, input_ids: Tokens) -> Tokens:
        """Find the last fact with the key asked."""
        facts = input_ids[:, : self.facts].reshape(len(input_ids), -1, 2)
        asked = input_ids[:, self.facts : -1]
        same_NQF = asked[:, :, None] == facts[:, None, ::-1, 0]  # the latest first
        last = facts.shape[1] - 1 - same_NQF.argmax(-1)
        answers = np.full_like(input_ids, UNSCORED)
        answers[:, self.facts + 1 :] = np.take_along_axis(facts[..., 1], last, 1)
        return answers
