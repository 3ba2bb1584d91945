"""Associative recall: key-value pairs, then keys whose values are asked.

    k2 v0  k7 v1  k4 v0  k1 v1    k7→v1  k2→v0  k7→v1  .                 key_length 1
    k2 k5 v0  k2 k3 v1  k5 k2 ... k2 k3→v1                               key_length 2

Values are drawn independently. With `key_length` n a key is n tokens and its tokens recur in other keys, so the key has
to be put together before it can be looked up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from twoaxis.base.options import check_types
from twoaxis.data.tasks.task import END, UNSCORED, Alphabet, Examples, Task, Tokens, check_least, choices, shuffled

MOST_KEYS = 4096


@dataclass(frozen=True, kw_only=True)
class RecallConfig:
    """Options of associative recall."""

    pairs: int = 6
    """Facts stated."""
    values: int = 32
    """Different values."""
    keys: int = 16
    """Different tokens that keys are made of."""
    key_length: int = 1
    """Tokens of a key."""

    def __post_init__(self) -> None:
        check_types(self)
        check_least(self, pairs=1, values=2, keys=2, key_length=1)
        if self.possible > MOST_KEYS:
            raise ValueError(
                f"{self.keys} tokens in keys of {self.key_length} make {self.possible} keys; at most {MOST_KEYS} are "
                "offered, take fewer keys or a smaller key_length"
            )
        if self.pairs > self.possible:
            raise ValueError(f"{self.pairs} pairs need as many different keys; there are {self.possible}")

    @property
    def possible(self) -> int:
        """How many keys there are."""
        return self.keys**self.key_length


class Recall(Task):
    """Associative recall."""

    name = "recall"
    summary = "key-value pairs, then keys whose values are asked"
    Config = RecallConfig
    config: RecallConfig
    default_context = 32

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
        """One value per pair."""
        return self.config.pairs

    @property
    def facts(self) -> int:
        """Tokens of the facts."""
        return self.config.pairs * (self.config.key_length + 1)

    @property
    def shortest(self) -> int:
        """The facts, one question and the position of its answer."""
        return self.facts + self.config.key_length + 1

    @property
    def questions(self) -> int:
        """How many questions fit."""
        return (self.context - self.facts - 1) // self.config.key_length

    @property
    def bits(self) -> float:
        """Keys, values and questions."""
        c = self.config
        return choices(c.possible, c.pairs) + c.pairs * math.log2(c.values) + self.questions * math.log2(c.pairs)

    def sample(self, generator: np.random.Generator, count: int) -> Examples:
        """Facts in a random order, then questions drawn from them with repetition."""
        c, asked = self.config, self.questions
        codes = shuffled(generator, count, np.arange(c.possible))[:, : c.pairs]
        digits = c.keys ** np.arange(c.key_length)
        keys_NPK = codes[..., None] // digits % c.keys + self.tokens("k").start
        values_NP = generator.integers(c.values, size=(count, c.pairs)) + self.tokens("v").start
        picked_NQ = generator.integers(c.pairs, size=(count, asked))
        rows = np.arange(count)[:, None]

        input_ids = np.full((count, self.context), END)
        labels = np.full_like(input_ids, UNSCORED)
        input_ids[:, : self.facts] = np.concatenate([keys_NPK, values_NP[..., None]], -1).reshape(count, -1)
        end = self.facts + asked * c.key_length
        input_ids[:, self.facts : end] = keys_NPK[rows, picked_NQ].reshape(count, -1)
        labels[:, self.facts + c.key_length : end + 1 : c.key_length] = values_NP[rows, picked_NQ]
        return Examples(input_ids, labels)

    def solve(self, input_ids: Tokens) -> Tokens:
        """Find the fact with the key asked."""
        c, count = self.config, len(input_ids)
        facts = input_ids[:, : self.facts].reshape(count, c.pairs, c.key_length + 1)
        end = self.facts + self.questions * c.key_length
        asked = input_ids[:, self.facts : end].reshape(count, -1, c.key_length)
        same_NQP = (asked[:, :, None] == facts[:, None, :, :-1]).all(-1)
        answers = np.full_like(input_ids, UNSCORED)
        answers[:, self.facts + c.key_length : end + 1 : c.key_length] = np.take_along_axis(
            facts[..., -1], same_NQP.argmax(-1), 1
        )
        return answers
