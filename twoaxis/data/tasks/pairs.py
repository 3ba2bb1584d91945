"""Facts that give a key a value: associative recall, and keys that are written several times.

    recall       k2 v0  k7 v1  k4 v0  k1 v1    k7→v1  k2→v0  k7→v1  .              key_length 1
                 k2 k5 v0  k2 k3 v1  k5 k2 ... k2 k3→v1                            key_length 2
    overwrite    k2 v0  k1 v3  k2 v1  k0 v2  k1 v0 ...     k2→v1  k1→v0  .         the last value is asked

Values are drawn independently. With `key_length` n a key is n tokens and its tokens recur in other keys, so the key has
to be put together before it can be looked up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from twoaxis.base.options import Count, between
from twoaxis.data.tasks.task import Lookup, Plan, Several, Tokens, shuffled

MOST_KEYS = 2**12


class Pairs(Lookup):
    """A task whose facts are a key and a value each, and whose questions are keys."""

    alphabets = ((".", "end"), ("k", "keys"), ("v", "values"))

    def solve(self, input_ids: Tokens) -> Tokens:
        """Find the last fact with the key asked."""
        facts, asked_NQK = self.split(input_ids)
        latest_NFK = facts.reshape(len(facts), -1, self.plan.asked + 1)[:, ::-1]
        same_NQF = (asked_NQK[:, :, None] == latest_NFK[:, None, :, :-1]).all(-1)
        return self.place(np.take_along_axis(latest_NFK[..., -1], same_NQF.argmax(-1), 1))


@dataclass(frozen=True, kw_only=True)
class Recall(Pairs):
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
    key_length: Annotated[int, between(1, 12)] = 1
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
    def plan(self) -> Plan:
        """One value per pair."""
        return Plan(facts=self.pairs * (self.key_length + 1), stated=self.pairs, asked=self.key_length)

    def sample(self, generator: np.random.Generator, count: int) -> Tokens:
        """Facts in a random order, then questions drawn from them with repetition."""
        codes = shuffled(generator, count, np.arange(self.possible))[:, : self.pairs]
        digits = self.keys ** np.arange(self.key_length)
        keys_NPK = codes[..., None] // digits % self.keys + self.tokens("k").start
        values_NP = generator.integers(self.values, size=(count, self.pairs)) + self.tokens("v").start
        picked_NQ = generator.integers(self.pairs, size=(count, self.questions))
        facts = np.concatenate([keys_NPK, values_NP[..., None]], -1)
        return self.join(facts, keys_NPK[np.arange(count)[:, None], picked_NQ])


@dataclass(frozen=True, kw_only=True)
class Overwrite(Pairs):
    """Overwriting facts: every key is written `writes` times, in a random order, and its last value is asked.

    Between the bag of tokens and the answer lies the *stale* guess, one of the asked key's values with no regard to
    which came last: `stale_chance`, which recall without a sense of order would reach.
    """

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
    def plan(self) -> Plan:
        """One value per write."""
        return Plan(facts=2 * self.keys * self.writes, stated=self.keys * self.writes)

    @property
    def stale_chance(self) -> float:
        """Accuracy of one of the asked key's values, drawn as often as it was written to it."""
        fresh = 1 / self.writes
        return fresh + (1 - fresh) / self.values

    def sample(self, generator: np.random.Generator, count: int) -> Tokens:
        """Writes in a random order, then keys drawn with repetition."""
        k, v = self.tokens("k").start, self.tokens("v").start
        keys = shuffled(generator, count, np.arange(self.keys * self.writes) % self.keys)
        values = generator.integers(self.values, size=keys.shape)
        asked = generator.integers(self.keys, size=(count, self.questions))
        return self.join(np.stack([keys + k, values + v], -1), asked + k)
