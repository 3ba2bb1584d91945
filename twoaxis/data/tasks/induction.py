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

from dataclasses import dataclass

import numpy as np

from twoaxis.base.options import Count
from twoaxis.data.tasks.task import UNSCORED, Lookup, Plan, Several, Tokens


@dataclass(frozen=True, kw_only=True)
class Induction(Lookup):
    """Induction."""

    name = "induction"
    summary = "what followed these tokens the one time they stood here before"
    alphabets = ((".", "end"), ("a", "symbols"))
    answer_letter = "a"

    context: int = 40
    length: Several = 16
    """Tokens that are asked about."""
    symbols: Several = 32
    """Different tokens."""
    order: Count = 1
    """Tokens of a question."""

    def validate(self) -> None:
        """Refuse questions that nothing can follow."""
        if self.length <= self.order:
            raise ValueError(f"length ({self.length}) must be more than order ({self.order}): a token has to follow")
        super().validate()

    @property
    def plan(self) -> Plan:
        """The tokens that are asked about, and some of them."""
        return Plan(facts=self.length, asked=self.order)

    def sample(self, generator: np.random.Generator, count: int) -> Tokens:
        """Independent tokens, then questions from random places of them."""
        stated = generator.integers(self.symbols, size=(count, self.length)) + self.tokens("a").start
        place = generator.integers(self.length - self.order, size=(count, self.questions, 1)) + np.arange(self.order)
        asked = np.take_along_axis(stated, place.reshape(count, -1), 1)
        return self.join(stated, asked)

    def solve(self, input_ids: Tokens) -> Tokens:
        """Compare each question with every place it can come from; score it if there is one, and not the last."""
        stated, asked_NQO = self.split(input_ids)
        places = self.length - self.order + 1
        same_NQP = np.ones((*asked_NQO.shape[:2], places), dtype=bool)
        for offset in range(self.order):
            same_NQP &= asked_NQO[:, :, None, offset] == stated[:, None, offset : offset + places]
        once = (same_NQP.sum(-1) == 1) & ~same_NQP[:, :, -1]  # nothing follows the last place
        after = np.minimum(same_NQP.argmax(-1) + self.order, self.length - 1)
        return self.place(np.where(once, np.take_along_axis(stated, after, 1), UNSCORED))
