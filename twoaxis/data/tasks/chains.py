"""Facts that lead from entity to entity: multi-hop lookup and cross-depth retrieval.

    level 0     level 1     level 2             every level has the same number of entities, and the facts
    e0 ───────> e5 ───────> e7                  between two levels pair them one to one at random
    e1 ───────> e4 ───────> e8                  what the last level leads to is the task's own

Entity i of level l has the number l * entities + i. Facts are stated in a random order, and no intermediate answer is
shown, so the hops are made inside the network, one after the other. Questions name entities of all levels, so that the
short chains teach the long ones; `start="first"` asks the full chain only. Values are drawn independently.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import numpy as np

from twoaxis.base.options import Count
from twoaxis.data.tasks.task import Lookup, Plan, Several, Tokens, shuffled


@dataclass(frozen=True, kw_only=True)
class Chains(Lookup):
    """A task whose facts are chains."""

    context: int = 48
    hops: Count
    entities: Count = 4
    """Entities of each level."""
    values: Several = 32
    """Different values."""
    start: Literal["any", "first"] = "any"
    """Level of the questions: any, or the first."""

    @property
    @abstractmethod
    def levels(self) -> int:
        """How many levels of entities there are."""

    @property
    def total(self) -> int:
        """Entities of all levels."""
        return self.levels * self.entities

    @property
    def starts(self) -> int:
        """How many entities may be asked."""
        return self.entities if self.start == "first" else self.total

    def draw(self, generator: np.random.Generator, count: int) -> Tokens:
        """(N, (levels - 1) * entities): which entity each one below the last level leads to."""
        steps = [shuffled(generator, count, np.arange(self.entities)) for _ in range(self.levels - 1)]
        targets = [step + (level + 1) * self.entities for level, step in enumerate(steps)]
        return np.concatenate([np.zeros((count, 0), np.int64), *targets], 1)

    def follow(self, links: Tokens, asked: Tokens) -> Tokens:
        """Look up one fact after the other, for `asked` (N, Q) in `links` (N, F, 2); what has no fact stays."""
        now = asked
        for _ in range(self.hops):
            same_NQF = now[:, :, None] == links[:, None, :, 0]
            after = np.take_along_axis(links[..., 1], same_NQF.argmax(-1), 1)
            now = np.where(same_NQF.any(-1), after, now)
        return now


@dataclass(frozen=True, kw_only=True)
class MultiHop(Chains):
    """Multi-hop lookup: facts lead from entity to entity and at last to a value, which is asked.

        e4 v8  e0 e5  e5 v2  e1 e4 ...    e0→v2  e4→v8  e1→v8  .               2 hops: e0 -> e5 -> v2

    One hop is associative recall.
    """

    name = "multi_hop"
    summary = "facts lead from entity to entity to a value, which is asked"
    alphabets = ((".", "end"), ("e", "total"), ("v", "values"))

    hops: Count = 2
    """Steps of the longest chain, the one to the value included."""

    @property
    def levels(self) -> int:
        """The last hop leads to a value."""
        return self.hops

    @property
    def plan(self) -> Plan:
        """A fact per entity, and one value per entity of the last level."""
        return Plan(facts=2 * self.total, stated=self.entities)

    def sample(self, generator: np.random.Generator, count: int) -> Tokens:
        """Facts in a random order, then entities drawn with repetition."""
        e, v = self.tokens("e").start, self.tokens("v").start
        links = self.draw(generator, count)
        values = generator.integers(self.values, size=(count, self.entities)) + v
        order = shuffled(generator, count, np.arange(self.total))
        asked = generator.integers(self.starts, size=(count, self.questions))
        targets = np.take_along_axis(np.concatenate([links + e, values], 1), order, 1)
        return self.join(np.stack([order + e, targets], -1), asked + e)

    def solve(self, input_ids: Tokens) -> Tokens:
        """Follow the facts until a value is reached."""
        facts, asked = self.split(input_ids)
        return self.place(self.follow(facts.reshape(len(facts), -1, 2), asked[..., 0]))


@dataclass(frozen=True, kw_only=True)
class CrossDepth(Chains):
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
    between it must be kept in the stream beside what the hops write, or be read again from an early source. One who
    finds the record and ignores the feature is right with probability `featureless_chance`. An entity of the last
    level may be asked too, which takes no hop.
    """

    name = "cross_depth"
    summary = "a feature of the question's token is needed again after a chain of lookups"
    alphabets = ((".", "end"), ("e", "total"), ("v", "values"), ("q", "kinds"))

    hops: Count = 1
    """Lookups between the feature and its use."""
    features: Count = 2
    """Different features: values of a record."""

    @property
    def levels(self) -> int:
        """Entities of the last one have records."""
        return self.hops + 1

    @property
    def kinds(self) -> int:
        """How many different questions there are."""
        return self.features * self.starts

    @property
    def links(self) -> int:
        """Tokens of the facts between entities."""
        return 2 * self.hops * self.entities

    @property
    def plan(self) -> Plan:
        """These and the records: one value per feature of an entity of the last level."""
        return Plan(self.links + self.entities * (1 + self.features), stated=self.entities * self.features)

    @property
    def featureless_chance(self) -> float:
        """Accuracy of one of the values of the right record, whichever feature is asked."""
        right = 1 / self.features
        return right + (1 - right) / self.values

    def word(self, token: int) -> str:
        """Questions are written as the entity and the feature they stand for."""
        if token not in self.tokens("q"):
            return super().word(token)
        entity, feature = divmod(token - self.tokens("q").start, self.features)
        return f"q(e{entity},f{feature})"

    def sample(self, generator: np.random.Generator, count: int) -> Tokens:
        """Facts and records in a random order, then questions drawn with repetition."""
        e, v, q = (self.tokens(letter).start for letter in "evq")
        targets = self.draw(generator, count)
        records_NER = generator.integers(self.values, size=(count, self.entities, self.features)) + v
        order = shuffled(generator, count, np.arange(self.hops * self.entities))
        listed = shuffled(generator, count, np.arange(self.entities))
        asked = generator.integers(self.kinds, size=(count, self.questions))
        rows = np.arange(count)[:, None]
        links = np.stack([order, targets[rows, order]], -1).reshape(count, -1) + e
        heads = listed[..., None] + self.hops * self.entities + e
        records = np.concatenate([heads, records_NER[rows, listed]], -1).reshape(count, -1)
        return self.join(np.concatenate([links, records], 1), asked + q)

    def solve(self, input_ids: Tokens) -> Tokens:
        """Follow the facts, then look up the feature in the record."""
        facts, asked = self.split(input_ids)
        count, asked = len(facts), asked[..., 0] - self.tokens("q").start
        records = facts[:, self.links :].reshape(count, self.entities, -1)
        links = facts[:, : self.links].reshape(count, -1, 2)
        entity = self.follow(links, asked // self.features + self.tokens("e").start)
        place = (entity[:, :, None] == records[:, None, :, 0]).argmax(-1)
        return self.place(records[np.arange(count)[:, None], place, 1 + asked % self.features])
