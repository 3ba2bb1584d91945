"""Cross-depth retrieval: a feature of the question's token is needed again after a chain of lookups.

    facts       e0 e5  e1 e4 ...                 chains between entities, in a random order
    records     e4 v8 v3  e5 v2 v9 ...           then, for each entity of the last level, one value per feature
    question    q(e0,f1): one token that stands for an entity and a feature
    answer      v9, of feature 1 in the record that e0 leads to

    depth       embedding ──── hop 1 ──── ... ──── record
    entity      e0             e5                  e5 ┐
    feature     f1  ............................  f1  ├─> v9
                    nothing in between needs it       ┘

The feature is plain in the embedding and useless until the chain has been followed, so through the sub-layers in
between it must be kept in the stream beside what the hops write, or be read again from an early source. One who finds
the record and ignores the feature is right with probability `featureless_chance`. Questions name entities of all
levels, the last one too (no hop), so that the parts can be learnt one after the other; `start="first"` asks the full
chain only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from twoaxis.base.options import check_types
from twoaxis.data.tasks.chains import chain_bits, draw_chains, look_up
from twoaxis.data.tasks.task import END, UNSCORED, Alphabet, Examples, Task, Tokens, check_least, choices, shuffled


@dataclass(frozen=True, kw_only=True)
class CrossDepthConfig:
    """Options of cross-depth retrieval."""

    hops: int = 1
    """Lookups between the feature and its use."""
    entities: int = 4
    """Entities of each level."""
    features: int = 2
    """Different features: values of a record."""
    values: int = 32
    """Different values."""
    start: Literal["any", "first"] = "any"
    """Level of the questions: any, or the first."""

    def __post_init__(self) -> None:
        check_types(self)
        check_least(self, hops=1, entities=1, features=1, values=2)

    @property
    def total(self) -> int:
        """Entities of all levels."""
        return (self.hops + 1) * self.entities


class CrossDepth(Task):
    """Cross-depth retrieval."""

    name = "cross_depth"
    summary = "a feature of the question's token is needed again after a chain of lookups"
    Config = CrossDepthConfig
    config: CrossDepthConfig
    default_context = 48

    @property
    def alphabets(self) -> tuple[Alphabet, ...]:
        """The end, entities of all levels, values, and questions: entity times feature."""
        c = self.config
        return Alphabet(".", 1), Alphabet("e", c.total), Alphabet("v", c.values), Alphabet("q", self.kinds)

    @property
    def kinds(self) -> int:
        """How many different questions there are."""
        return self.config.features * (self.config.entities if self.config.start == "first" else self.config.total)

    @property
    def values(self) -> int:
        """Different values."""
        return self.config.values

    @property
    def stated(self) -> int:
        """One value per feature of an entity of the last level."""
        return self.config.entities * self.config.features

    @property
    def featureless_chance(self) -> float:
        """Accuracy of one of the values of the right record, whichever feature is asked."""
        right = 1 / self.config.features
        return right + (1 - right) / self.values

    @property
    def links(self) -> int:
        """Tokens of the facts between entities."""
        return 2 * self.config.hops * self.config.entities

    @property
    def facts(self) -> int:
        """Tokens of these and the records."""
        return self.links + self.config.entities * (1 + self.config.features)

    @property
    def shortest(self) -> int:
        """The facts, one question and the position of its answer."""
        return self.facts + 2

    @property
    def bits(self) -> float:
        """Chains, values, the orders of facts and records, and the questions."""
        c, asked = self.config, self.context - self.facts - 1
        orders = choices(c.hops * c.entities, c.hops * c.entities) + choices(c.entities, c.entities)
        stated = chain_bits(c.entities, c.hops) + self.stated * math.log2(c.values)
        return stated + orders + asked * math.log2(self.kinds)

    def word(self, token: int) -> str:
        """Questions are written as the entity and the feature they stand for."""
        if token not in self.tokens("q"):
            return super().word(token)
        entity, feature = divmod(token - self.tokens("q").start, self.config.features)
        return f"q(e{entity},f{feature})"

    def sample(self, generator: np.random.Generator, count: int) -> Examples:
        """Facts and records in a random order, then questions drawn with repetition."""
        c, e, v, q = self.config, *(self.tokens(letter).start for letter in "evq")
        chains = draw_chains(generator, count, c.entities, c.hops)
        records_NER = generator.integers(c.values, size=(count, c.entities, c.features)) + v
        order = shuffled(generator, count, np.arange(c.hops * c.entities))
        listed = shuffled(generator, count, np.arange(c.entities))
        asked = generator.integers(self.kinds, size=(count, self.context - self.facts - 1))
        rows = np.arange(count)[:, None]
        links = np.stack([order, chains.targets[rows, order]], -1).reshape(count, -1) + e
        heads = listed[..., None] + c.hops * c.entities + e
        records = np.concatenate([heads, records_NER[rows, listed]], -1).reshape(count, -1)
        input_ids = np.concatenate([links, records, asked + q, np.full((count, 1), END)], 1)
        labels = np.full_like(input_ids, UNSCORED)
        ends = np.take_along_axis(chains.ends, asked // c.features, 1)
        labels[:, self.facts + 1 :] = records_NER[rows, ends, asked % c.features]
        return Examples(input_ids, labels)

    def solve(self, input_ids: Tokens) -> Tokens:
        """Look up one fact after the other, then the feature in the record."""
        c, count = self.config, len(input_ids)
        links = input_ids[:, : self.links].reshape(count, -1, 2)
        records = input_ids[:, self.links : self.facts].reshape(count, c.entities, -1)
        asked = input_ids[:, self.facts : -1] - self.tokens("q").start
        now = asked // c.features + self.tokens("e").start
        for _ in range(c.hops):
            after, found = look_up(links[..., 0], links[..., 1], now)
            now = np.where(found, after, now)
        place, _ = look_up(records[..., 0], np.tile(np.arange(c.entities), (count, 1)), now)
        answers = np.full_like(input_ids, UNSCORED)
        answers[:, self.facts + 1 :] = records[np.arange(count)[:, None], place, 1 + asked % c.features]
        return answers
