"""Associative recall: key-value pairs, then keys whose values are asked.

    k2 v0  k7 v1  k4 v0  k1 v1    k7→v1  k2→v0  k7→v1  .                 key_length 1
    k2 k5 v0  k2 k3 v1  k5 k2 ... k2 k3→v1                               key_length 2

Values are drawn independently. With `key_length` n a key is n tokens and its tokens recur in other keys, so the key has
to be put together before it can be looked up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from twoaxis.base.options import Count
from twoaxis.data.tasks.task import Alphabet, Lookup, Several, Tokens, shuffled

MOST_KEYS = 4096


@dataclass(frozen=True, kw_only=True)
class Recall(Lookup):
    """Associative recall."""

    name = "recall"
    summary = "key-value pairs, then keys whose values are asked"

    context: int = 32
    pairs: Count = 6
    """Facts stated."""
    values: Several = 32
    """Different values."""
    keys: Several = 16
    """Different tokens that keys are made of."""
    key_length: Count = 1
    """Tokens of a key."""

    def validate(self) -> None:
        """Refuse more keys than there can be."""
        if self.possible > MOST_KEYS:
            raise ValueError(
                f"{self.keys} tokens in keys of {self.key_length} make {self.possible} keys; at most {MOST_KEYS} are "
                "offered, take fewer keys or a smaller key_length"
            )
        if self.pairs > self.possible:
            raise ValueError(f"{self.pairs} pairs need as many different keys; there are {self.possible}")
        super().validate()

    @property
    def possible(self) -> int:
        """How many keys there are."""
        return self.keys**self.key_length

    @property
    def alphabets(self) -> tuple[Alphabet, ...]:
        """The end, keys, values."""
        return Alphabet(".", 1), Alphabet("k", self.keys), Alphabet("v", self.values)

    @property
    def stated(self) -> int:
        """One value per pair."""
        return self.pairs

    @property
    def asked(self) -> int:
        """A key."""
        return self.key_length

    @property
    def facts(self) -> int:
        """Tokens of the pairs."""
        return self.pairs * (self.key_length + 1)

    def sample(self, generator: np.random.Generator, count: int) -> Tokens:
        """Facts in a random order, then questions drawn from them with repetition."""
        codes = shuffled(generator, count, np.arange(self.possible))[:, : self.pairs]
        digits = self.keys ** np.arange(self.key_length)
        keys_NPK = codes[..., None] // digits % self.keys + self.tokens("k").start
        values_NP = generator.integers(self.values, size=(count, self.pairs)) + self.tokens("v").start
        picked_NQ = generator.integers(self.pairs, size=(count, self.questions))
        facts = np.concatenate([keys_NPK, values_NP[..., None]], -1)
        return self.join(facts, keys_NPK[np.arange(count)[:, None], picked_NQ])

    def solve(self, input_ids: Tokens) -> Tokens:
        """Find the fact with the key asked."""
        facts, asked_NQK = self.split(input_ids)
        facts_NPK = facts.reshape(len(facts), self.pairs, -1)
        same_NQP = (asked_NQK[:, :, None] == facts_NPK[:, None, :, :-1]).all(-1)
        return self.place(np.take_along_axis(facts_NPK[..., -1], same_NQP.argmax(-1), 1))
