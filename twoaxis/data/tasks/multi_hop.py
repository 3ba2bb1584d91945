"""Multi-hop lookup: facts lead from entity to entity and at last to a value, which is asked.

    e4 v8  e0 e5  e5 v2  e1 e4 ...    e0→v2  e4→v8  e1→v8  .               2 hops: e0 -> e5 -> v2

Facts are stated in a random order. A question is any entity, so chains of 1 to `hops` hops are asked and the short ones
teach the long ones; `start="first"` asks the full chain only. No intermediate answer is shown, so the hops are made
inside the network, one after the other. One hop is associative recall. Values are drawn independently.
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
class MultiHopConfig:
    """Options of multi-hop lookup."""

    hops: int = 2
    """Steps of the longest chain, the one to the value included."""
    entities: int = 4
    """Entities of each level."""
    values: int = 32
    """Different values."""
    start: Literal["any", "first"] = "any"
    """Level of the questions: any, or the first."""

    def __post_init__(self) -> None:
        check_types(self)
        check_least(self, hops=1, entities=1, values=2)

    @property
    def total(self) -> int:
        """Entities of all levels, and facts."""
        return self.hops * self.entities


class MultiHop(Task):
    """Multi-hop lookup."""

    name = "multi_hop"
    summary = "facts lead from entity to entity to a value, which is asked"
    Config = MultiHopConfig
    config: MultiHopConfig
    default_context = 48

    @property
    def alphabets(self) -> tuple[Alphabet, ...]:
        """The end, the entities of all levels, values."""
        return Alphabet(".", 1), Alphabet("e", self.config.total), Alphabet("v", self.config.values)

    @property
    def values(self) -> int:
        """Different values."""
        return self.config.values

    @property
    def stated(self) -> int:
        """One value per entity of the last level."""
        return self.config.entities

    @property
    def facts(self) -> int:
        """Tokens of the facts."""
        return 2 * self.config.total

    @property
    def shortest(self) -> int:
        """The facts, one question and the position of its answer."""
        return self.facts + 2

    @property
    def starts(self) -> int:
        """How many entities may be asked."""
        return self.config.entities if self.config.start == "first" else self.config.total

    @property
    def bits(self) -> float:
        """Chains, values, the order of the facts and the questions."""
        c, asked = self.config, self.context - self.facts - 1
        stated = chain_bits(c.entities, c.hops - 1) + c.entities * math.log2(c.values) + choices(c.total, c.total)
        return stated + asked * math.log2(self.starts)

    def sample(self, generator: np.random.Generator, count: int) -> Examples:
        """Facts in a random order, then entities drawn with repetition."""
        c, e, v = self.config, self.tokens("e").start, self.tokens("v").start
        chains = draw_chains(generator, count, c.entities, c.hops - 1)
        values = generator.integers(c.values, size=(count, c.entities)) + v
        order = shuffled(generator, count, np.arange(c.total))
        asked = generator.integers(self.starts, size=(count, self.context - self.facts - 1))
        targets = np.take_along_axis(np.concatenate([chains.targets + e, values], 1), order, 1)
        facts = np.stack([order + e, targets], -1).reshape(count, -1)
        input_ids = np.concatenate([facts, asked + e, np.full((count, 1), END)], 1)
        labels = np.full_like(input_ids, UNSCORED)
        labels[:, self.facts + 1 :] = np.take_along_axis(values, np.take_along_axis(chains.ends, asked, 1), 1)
        return Examples(input_ids, labels)

    def solve(self, input_ids: Tokens) -> Tokens:
        """Look up one fact after the other until a value is reached."""
        facts = input_ids[:, : self.facts].reshape(len(input_ids), -1, 2)
        now = input_ids[:, self.facts : -1]
        for _ in range(self.config.hops):
            after, found = look_up(facts[..., 0], facts[..., 1], now)
            now = np.where(found, after, now)
        answers = np.full_like(input_ids, UNSCORED)
        answers[:, self.facts + 1 :] = now
        return answers
