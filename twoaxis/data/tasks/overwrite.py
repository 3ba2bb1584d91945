"""Overwriting facts: every key is written several times, and its last value is asked.

    k2 v0  k1 v3  k2 v1  k0 v2  k1 v0 ...     k2→v1  k1→v0  .

Every key is written `writes` times, in a random order, with independent values. Between the bag of tokens and the
answer lies the *stale* guess, one of the asked key's values with no regard to which came last: `stale_chance`, which
recall without a sense of order would reach.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from twoaxis.base.options import Count
from twoaxis.data.tasks.task import Alphabet, Lookup, Several, Tokens, shuffled


@dataclass(frozen=True, kw_only=True)
class Overwrite(Lookup):
    """Overwriting facts."""

    name = "overwrite"
    summary = "keys are written several times, the last value is asked"

    context: int = 48
    keys: Count = 4
    """Different keys, all of them written."""
    writes: Count = 4
    """How often each is written."""
    values: Several = 32
    """Different values."""

    @property
    def alphabets(self) -> tuple[Alphabet, ...]:
        """The end, keys, values."""
        return Alphabet(".", 1), Alphabet("k", self.keys), Alphabet("v", self.values)

    @property
    def stated(self) -> int:
        """One value per write."""
        return self.keys * self.writes

    @property
    def facts(self) -> int:
        """A key and a value per write."""
        return 2 * self.stated

    @property
    def stale_chance(self) -> float:
        """Accuracy of one of the asked key's values, drawn as often as it was written to it."""
        fresh = 1 / self.writes
        return fresh + (1 - fresh) / self.values

    def sample(self, generator: np.random.Generator, count: int) -> Tokens:
        """Writes in a random order, then keys drawn with repetition."""
        k, v = self.tokens("k").start, self.tokens("v").start
        keys = shuffled(generator, count, np.arange(self.stated) % self.keys)
        values = generator.integers(self.values, size=keys.shape)
        asked = generator.integers(self.keys, size=(count, self.questions))
        return self.join(np.stack([keys + k, values + v], -1), asked + k)

    def solve(self, input_ids: Tokens) -> Tokens:
        """Find the last fact with the key asked."""
        facts, asked = self.split(input_ids)
        facts = facts.reshape(len(facts), -1, 2)
        same_NQF = asked == facts[:, None, ::-1, 0]  # the latest first
        last = self.stated - 1 - same_NQF.argmax(-1)
        return self.place(np.take_along_axis(facts[..., 1], last, 1))
