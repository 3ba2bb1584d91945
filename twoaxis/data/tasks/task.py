"""What a diagnostic task is: examples made by code, a solver that reads the answer off the tokens, and a chance level.

    positions    0   1   2   3   4   5   6   7   8   9
    input_ids    k2  v0  k7  v1  k4  v0  k7  k2  k4  .         facts, then questions, then the end
    labels       -   -   -   -   -   -   -   v1  v0  v0        - is -100: nothing is scored there

A label at position t is what a causal model predicts from positions < t, the way transformers shifts labels itself.
It is *not* always the token at t: answers are never shown, so one question cannot be solved from the answer to another.

Three numbers frame every measurement, all exact. The solver scores 1. `chance` is the accuracy of the best guess that
knows the task and the position but sees no token: answers are symmetric, so it is one over their number, and its loss
the logarithm of that. `bag_chance`, where stated facts are looked up, is the accuracy of the best guess that sees every
token but not their order: it names the value stated most often. A model learns that much first; what it knows beyond is
the lookup.

Example i of a seed is a function of (task, seed, i) alone. Examples are made `CHUNK` at a time, each chunk from a
Philox generator keyed by (seed, held out or not, chunk), so batches may be cut in any way and resumed anywhere.
Held-out examples come from other keys than any training example. They are different draws, not filtered ones.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from twoaxis.base.options import Count, Options, at_least, between, check_type
from twoaxis.base.registry import Registry

Tokens = NDArray[np.int64]
Several = Annotated[int, between(2, 2**20)]
"""A number of things to choose from, each of them a token."""

UNSCORED = -100
"""Label where nothing is scored, the one transformers ignores."""
MOST_CONTEXT = 2**16
"""Tokens of an example; a chunk of them is in memory several times."""
MOST_COMPARED = 2**24
"""Questions times the tokens that each is compared with, in an example."""
CHUNK = 64
"""Examples made at a time. Part of what the examples are: another number makes others."""
END = 0
"""The token that fills what follows the last question."""


class Examples(NamedTuple):
    """Examples of a task."""

    input_ids: Tokens  # (N, T) tokens
    labels: Tokens  # (N, T) what is to be predicted from the tokens before, `UNSCORED` where nothing is


@dataclass(frozen=True, kw_only=True)
class Task(Options, ABC):
    """A diagnostic task: a frozen dataclass of its options that says which tokens there are, draws and solves."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line: what is asked."""
    alphabets: ClassVar[tuple[tuple[str, str], ...]]
    """Roles of the tokens in the order of their numbers: the letter they are written with, and the field or property
    that says how many there are."""
    answer_letter: ClassVar[str] = "v"
    """The alphabet of the answers."""

    context: int
    """T, the tokens of an example."""

    def validate(self) -> None:
        """Refuse a context in which nothing is asked, or more than can be made."""
        if self.context > MOST_CONTEXT:
            raise ValueError(f"the context of a task is at most {MOST_CONTEXT:,} tokens, got {self.context:,}")
        if self.context < self.shortest:
            raise ValueError(
                f"{self.name} with these options needs a context of at least {self.shortest} tokens, got {self.context}"
            )

    @property
    @abstractmethod
    def shortest(self) -> int:
        """The smallest context in which a question is scored."""

    @abstractmethod
    def sample(self, generator: np.random.Generator, count: int) -> Tokens:
        """Draw the tokens of examples, (count, T)."""

    @abstractmethod
    def solve(self, input_ids: Tokens) -> Tokens:
        """Answers by the known solver, (N, T), `UNSCORED` where nothing is asked.

        The answer at t depends on the tokens before t only.
        """

    @property
    def stated(self) -> int | None:
        """How many independent uniform values are stated, any of which may be asked; None for other tasks."""
        return None

    def tokens(self, letter: str) -> range:
        """The tokens of one alphabet."""
        return self._ranges[letter]

    @cached_property
    def _ranges(self) -> dict[str, range]:
        sizes = {letter: getattr(self, size) for letter, size in self.alphabets}
        ends = itertools.accumulate(sizes.values())
        return {letter: range(end - size, end) for (letter, size), end in zip(sizes.items(), ends, strict=True)}

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""
        return sum(map(len, self._ranges.values()))

    @property
    def answers(self) -> int:
        """How many answers there are, all equally likely."""
        return len(self.tokens(self.answer_letter))

    @property
    def chance(self) -> float:
        """Accuracy of the best guess that sees no token."""
        return 1 / self.answers

    @property
    def chance_loss(self) -> float:
        """Loss of that guess, in nats."""
        return math.log(self.answers)

    @property
    def bag_chance(self) -> float | None:
        """Accuracy of the best guess that sees all tokens but not their order; None where no facts are looked up."""
        return None if self.stated is None else bag_accuracy(self.stated, self.answers)

    @property
    def bag_loss(self) -> float | None:
        """Loss of that guess, in nats."""
        return None if self.stated is None else bag_entropy(self.stated, self.answers)

    def examples(self, seed: int, start: int, count: int, *, held_out: bool = False) -> Examples:
        """Examples `start` to `start + count - 1` of a seed, the same however they are batched.

        Those of `held_out` come from randomness that no training example comes from.
        """
        check_type("seed", seed, Annotated[int, at_least(0)])
        check_type("start", start, Annotated[int, at_least(0)])
        check_type("count", count, Count)
        numbers = range(start // CHUNK, (start + count - 1) // CHUNK + 1)
        chunks = [_chunk(self, seed, held_out, number) for number in numbers]
        skip = start - numbers[0] * CHUNK
        return Examples(*(np.concatenate(part)[skip : skip + count] for part in zip(*chunks, strict=True)))

    def word(self, token: int) -> str:
        """How a token is written: `letter0`, `letter1`, ...; a single one of its alphabet is just `letter`."""
        for letter, numbers in self._ranges.items():
            if token in numbers:
                return letter if len(numbers) == 1 else f"{letter}{token - numbers.start}"
        raise ValueError(f"{self.name} has tokens 0 to {self.vocab_size - 1}, got {token}")

    def show(self, examples: Examples, row: int = 0) -> str:
        """One example in words; `a→b` is a question whose answer is b."""
        labels = [*examples.labels[row].tolist()[1:], UNSCORED]
        return " ".join(
            self.word(token) + ("" if answer == UNSCORED else f"→{self.word(answer)}")
            for token, answer in zip(examples.input_ids[row].tolist(), labels, strict=True)
        )

    def describe(self) -> str:
        """One line: what is asked, how large it is, and what guessing gives."""
        bag = "" if self.bag_chance is None else f"; from the bag of tokens {self.bag_chance:.4g}, {self.bag_loss:.4f}"
        return (
            f"{self.name}: {self.summary} ({self.context} tokens of {self.vocab_size}, {self.answers} answers; "
            f"chance {self.chance:.4g}, {self.chance_loss:.4f} nats{bag})"
        )


class Plan(NamedTuple):
    """What an example of a `Lookup` consists of."""

    facts: int  # tokens of the facts
    # independent values among them, any of which may be asked; None where the facts are no such thing
    stated: int | None = None
    asked: int = 1  # tokens of a question


class Lookup(Task):
    """A task whose example states some tokens, the facts, and then asks about them as often as fits."""

    end: ClassVar[int] = 1
    """How many tokens fill what follows the last question: `END` alone."""

    def validate(self) -> None:
        """Refuse more than can be solved."""
        super().validate()
        if (compared := self.questions * self.plan.facts) > MOST_COMPARED:
            raise ValueError(
                f"{self.name} would compare {self.questions:,} questions with {self.plan.facts:,} tokens, which is "
                f"{compared:,}, more than {MOST_COMPARED:,}: give a smaller context"
            )

    @property
    @abstractmethod
    def plan(self) -> Plan:
        """What an example consists of."""

    @property
    def stated(self) -> int | None:
        """As planned."""
        return self.plan.stated

    @property
    def shortest(self) -> int:
        """The facts, one question and the position of its answer."""
        return self.plan.facts + self.plan.asked + 1

    @property
    def questions(self) -> int:
        """How many questions fit."""
        return (self.context - self.plan.facts - 1) // self.plan.asked

    def join(self, facts: Tokens, questions: Tokens) -> Tokens:
        """(N, T): all tokens of the facts, (N, ...), all of the questions, (N, ...), and the end."""
        both = np.concatenate([facts.reshape(len(facts), -1), questions.reshape(len(facts), -1)], 1)
        return np.pad(both, ((0, 0), (0, self.context - both.shape[1])), constant_values=END)

    def split(self, input_ids: Tokens) -> tuple[Tokens, Tokens]:
        """The facts, (N, facts), and the questions, (N, questions, tokens of one)."""
        facts, asked = self.plan.facts, self.plan.asked
        rest = input_ids[:, facts : facts + self.questions * asked]
        return input_ids[:, :facts], rest.reshape(len(input_ids), -1, asked)

    def place(self, answers: Tokens) -> Tokens:
        """(N, T): each answer behind its question."""
        facts, asked = self.plan.facts, self.plan.asked
        labels = np.full((len(answers), self.context), UNSCORED)
        labels[:, facts + asked : facts + self.questions * asked + 1 : asked] = answers
        return labels


TASKS: Registry[Task] = Registry(
    "task",
    {
        "recall": "twoaxis.data.tasks.pairs:Recall",
        "induction": "twoaxis.data.tasks.induction:Induction",
        "multi_hop": "twoaxis.data.tasks.chains:MultiHop",
        "cross_depth": "twoaxis.data.tasks.chains:CrossDepth",
        "overwrite": "twoaxis.data.tasks.pairs:Overwrite",
        "local": "twoaxis.data.tasks.local:Local",
    },
)


def task_names() -> tuple[str, ...]:
    """The names `make_task` takes."""
    return TASKS.names()


def make_task(name: str, /, **options: Any) -> Task:
    """A diagnostic task by name, with fields of its class: `make_task("recall", context=64, pairs=8)`."""
    return TASKS.find(name).from_dict(options, name)


@lru_cache(maxsize=16)
def _chunk(task: Task, seed: int, held_out: bool, number: int) -> Examples:
    """The examples of one chunk; kept, because small batches ask for the same one several times."""
    key = np.random.SeedSequence(seed, spawn_key=(int(held_out), number))
    input_ids = task.sample(np.random.Generator(np.random.Philox(key)), CHUNK)
    examples = Examples(input_ids, task.solve(input_ids))
    for part in examples:
        part.setflags(write=False)
    return examples


def shuffled(generator: np.random.Generator, count: int, deck: NDArray[Any]) -> NDArray[Any]:
    """(count, len(deck)): the deck in a random order in every row."""
    return generator.permuted(np.tile(deck, (count, 1)), axis=1)


@lru_cache(maxsize=64)
def bag_accuracy(stated: int, values: int) -> float:
    """Expected share of the most frequent of `values` among `stated` independent uniform ones.

    The mean of a count is the sum over n of the probability that it is more than n. How often each value is stated is
    distributed as independent Poisson numbers are whose sum happens to be `stated`, and the distribution of a sum is a
    product of Fourier transforms; these are long enough for sums that would come around to be out of the question.
    """
    length = max(256, 4 * stated)
    single, whole = _poisson(stated, stated / values), _poisson(stated, stated)[stated]
    mean = least = -(-stated // values)  # fewer of each do not make up the sum
    for most in range(least, stated):
        more = 1 - np.fft.irfft(np.fft.rfft(single[: most + 1], length) ** values, length)[stated] / whole
        if more < 1e-15:
            break
        mean += more
    return float(mean / stated)


@lru_cache(maxsize=64)
def bag_entropy(stated: int, values: int) -> float:
    """Expected entropy, in nats, of the frequencies of `stated` independent uniform values."""
    # given all others, how often a value is stated is binomial: a Poisson number, given that the rest make up the sum
    single, rest = _poisson(stated, stated / values), _poisson(stated, stated - stated / values)[::-1]
    times = np.arange(1, stated + 1)
    chances = (single * rest)[1:] / _poisson(stated, stated)[stated]
    return float(-values * (chances * times / stated * np.log(times / stated)).sum())


def _poisson(most: int, mean: float) -> NDArray[np.float64]:
    """The probabilities of 0 to `most` under a Poisson distribution."""
    times = np.arange(most + 1)
    factorials = np.concatenate([np.zeros(1), np.cumsum(np.log(times[1:]))])
    return np.exp(times * math.log(mean) - mean - factorials)
