"""Local token mixing: the answer is a fixed function of the last few tokens, asked at every position.

    window 2      a5 a0→v1 a3→v6 a2→v7 a2→v4 ...          v = table[the last two tokens]

The function is one of a Latin hypercube: v = out[(in_1[x_{t-1}] + in_2[x_{t-2}] + ...) mod symbols], with permutations
in_j and out that `rule` draws once for the task. Given all tokens of the window but one, every answer is still equally
likely, so no part of the window helps and 1 / symbols is exactly chance for any guess that misses a token. What is
learnt is where the tokens are (fixed lags) and a small table: no search through the context is involved. The longer the
context, the thinner an untrained attention is spread and the longer it takes to find the lags; a local mixer does not
care how long the context is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from twoaxis.base.options import Count, at_least
from twoaxis.data.tasks.task import UNSCORED, Several, Task, Tokens

MOST_NUMBERS = 2**22
"""Numbers that a function of tokens may consist of."""


@dataclass(frozen=True, kw_only=True)
class Local(Task):
    """Local token mixing."""

    name = "local"
    summary = "the answer is a fixed function of the last few tokens"
    alphabets = (("a", "symbols"), ("v", "symbols"))

    context: int = 256
    window: Count = 2
    """Tokens the answer depends on, the newest included."""
    symbols: Several = 8
    """Different tokens, and answers."""
    rule: Annotated[int, at_least(0)] = 0
    """Seed of the function, the same for all examples."""

    def validate(self) -> None:
        """Refuse a function of more numbers than can be drawn."""
        if (numbers := (self.window + 1) * self.symbols) > MOST_NUMBERS:
            raise ValueError(
                f"a window of {self.window} over {self.symbols} symbols is {numbers:,} numbers, more than "
                f"{MOST_NUMBERS:,}: give a smaller one"
            )
        super().validate()

    @property
    def shortest(self) -> int:
        """A window and the position of its answer."""
        return self.window + 1

    def tables(self) -> NDArray[np.int64]:
        """(window + 1, symbols): what each lag makes of a token, the newest first, and what the sum becomes."""
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(self.rule)))
        return generator.permuted(np.tile(np.arange(self.symbols), (self.window + 1, 1)), axis=1)

    def sample(self, generator: np.random.Generator, count: int) -> Tokens:
        """Independent tokens."""
        return generator.integers(self.symbols, size=(count, self.context))

    def solve(self, input_ids: Tokens) -> Tokens:
        """Look the tokens up lag by lag."""
        window, tables = self.window, self.tables()
        total = np.zeros_like(input_ids[:, window:])
        for lag in range(1, window + 1):
            total += tables[lag - 1][input_ids[:, window - lag : input_ids.shape[1] - lag]]
        answers = np.full_like(input_ids, UNSCORED)
        answers[:, window:] = tables[-1][total % self.symbols] + self.tokens("v").start
        return answers
