"""Induction: what followed these tokens the one time they stood here before.

    a3 a1 a4 a1 a5 a9 ...     a5→a9  a3→a1  a1  ...  .           order 1: a5 stood there once, a9 came after it
    a3 a1 a4 a1 a5 a9 ...     a1 a5→a9  a1 a4→a1  ...  .         order 2: a1 alone would not tell

First come `length` independent uniform tokens, then questions: `order` tokens that stand next to each other among them.
A question is scored if they do so only once, so there is one answer and no rule is needed to choose. It differs from
associative recall in that there are no pairs and no roles: every token is key and value at once.

Answers are symmetric in the symbols, so chance is 1 / symbols. A guess that copies the token at a fixed distance is
right with a further probability of about 1 / length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from twoaxis.base.options import check_types
from twoaxis.data.tasks.task import END, UNSCORED, Alphabet, Examples, Task, Tokens, check_least


@dataclass(frozen=True, kw_only=True)
class InductionConfig:
    """Options of induction."""

    length: int = 16
    """Tokens that are asked about."""
    symbols: int = 32
    """Different tokens."""
    order: int = 1
    """Tokens of a question."""

    def __post_init__(self) -> None:
        check_types(self)
        check_least(self, length=2, symbols=2, order=1)
        if self.length <= self.order:
            raise ValueError(f"length ({self.length}) must be more than order ({self.order}): a token has to follow")


class Induction(Task):
    """Induction."""

    name = "induction"
    summary = "what followed these tokens the one time they stood here before"
    Config = InductionConfig
    config: InductionConfig
    default_context = 40

    @property
    def alphabets(self) -> tuple[Alphabet, ...]:
        """The end, and one kind of token."""
        return Alphabet(".", 1), Alphabet("a", self.config.symbols)

    @property
    def values(self) -> int:
        """Every token can be an answer."""
        return self.config.symbols

    @property
    def facts(self) -> int:
        """Tokens that are asked about."""
        return self.config.length

    @property
    def shortest(self) -> int:
        """These, one question and the position of its answer."""
        return self.config.length + self.config.order + 1

    @property
    def questions(self) -> int:
        """How many questions fit."""
        return (self.context - self.facts - 1) // self.config.order

    @property
    def bits(self) -> float:
        """Of the first tokens; questions are not counted, since different places may ask the same."""
        return self.config.length * math.log2(self.config.symbols)

    def sample(self, generator: np.random.Generator, count: int) -> Examples:
        """Independent tokens, then questions from random places of them."""
        c = self.config
        stated = generator.integers(c.symbols, size=(count, c.length)) + self.tokens("a").start
        place = generator.integers(c.length - c.order, size=(count, self.questions, 1)) + np.arange(c.order)
        asked = np.take_along_axis(stated, place.reshape(count, -1), 1)
        rest = np.full((count, self.context - self.facts - asked.shape[1]), END)
        input_ids = np.concatenate([stated, asked, rest], 1)
        return Examples(input_ids, self.solve(input_ids))

    def solve(self, input_ids: Tokens) -> Tokens:
        """Compare each question with every place it can come from."""
        n, length, count = self.config.order, self.config.length, len(input_ids)
        end = self.facts + self.questions * n
        asked_NQO = input_ids[:, self.facts : end].reshape(count, -1, n)
        places = length - n + 1
        same_NQP = np.ones((count, self.questions, places), dtype=bool)
        for offset in range(n):
            same_NQP &= asked_NQO[:, :, None, offset] == input_ids[:, None, offset : offset + places]
        answer = np.take_along_axis(input_ids, same_NQP.argmax(-1) + n, 1)
        once = (same_NQP.sum(-1) == 1) & ~same_NQP[:, :, -1]  # nothing follows the last place
        answers = np.full_like(input_ids, UNSCORED)
        answers[:, self.facts + n : end + 1 : n] = np.where(once, answer, UNSCORED)
        return answers
