"""Facts that lead from level to level, shared by the tasks that follow them.

    level 0     level 1     level 2             every level has the same number of entities, and the facts
    e0 ───────> e5 ───────> e7                  between two levels pair them one to one at random
    e1 ───────> e4 ───────> e8                  what the last level leads to is the task's own

Entity i of level l has the number l * entities + i.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from twoaxis.data.tasks.task import Tokens, choices, shuffled


class Chains(NamedTuple):
    """Chains between entities.

    Attributes:
        targets: (N, hops * entities) what each entity below the last level leads to.
        ends: (N, (hops + 1) * entities) which entity of the last level each entity leads to, counted from 0.
    """

    targets: Tokens
    ends: Tokens


def draw_chains(generator: np.random.Generator, count: int, entities: int, hops: int) -> Chains:
    """Random chains.

    Args:
        generator: where the randomness comes from.
        count: N.
        entities: of each level.
        hops: steps from the first level to the last.
    """
    steps = [shuffled(generator, count, np.arange(entities)) for _ in range(hops)]
    ends = [np.tile(np.arange(entities), (count, 1))]
    for step in reversed(steps):
        ends.insert(0, np.take_along_axis(ends[0], step, 1))
    targets = [step + (level + 1) * entities for level, step in enumerate(steps)]
    return Chains(np.concatenate([np.zeros((count, 0), np.int64), *targets], 1), np.concatenate(ends, 1))


def look_up(keys: Tokens, targets: Tokens, asked: Tokens) -> tuple[Tokens, np.ndarray]:
    """What each question's fact leads to, and whether there is such a fact.

    Args:
        keys: (N, F) of the facts.
        targets: (N, F) of the facts.
        asked: (N, Q).
    """
    found = asked[:, :, None] == keys[:, None, :]
    return np.take_along_axis(targets, found.argmax(-1), 1), found.any(-1)


def chain_bits(entities: int, hops: int) -> float:
    """Bits in random chains."""
    return hops * choices(entities, entities)
