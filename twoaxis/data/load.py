"""What a run trains on and is measured on: text, or a diagnostic task.

    data = load_data(TrainConfig(data=("stdlib",), tokenizer="bpe:2048", context=256))
    data.train(seed=0, count=8000)[17]     {"input_ids": (256,), "labels": (256,)}
    data.held_out(64)                      the same for every seed and run

An example depends on (data.fingerprint, seed, number) only, and any of them can be had at once: a run that goes on
from a checkpoint begins at its example without reading those before. Labels are aligned with the tokens, as
transformers wants them: the model shifts them itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import platform
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from twoaxis.base import spec
from twoaxis.base.files import short_hash
from twoaxis.base.progress import Progress
from twoaxis.data.corpus import Corpus, Part, Watch, open_corpus
from twoaxis.data.packing import Fixed, Order, Rows
from twoaxis.data.sources import source_name, tell_skipped

if TYPE_CHECKING:
    from twoaxis.data.tasks import Task
    from twoaxis.training.config import TrainConfig

TASK = "task:"
"""How the spelling of a task begins."""


class Data(ABC):
    """What a run trains on and is measured on."""

    name: str
    """What tables call it."""
    fingerprint: str
    """Changes if and only if a token of an example could."""
    vocabulary: int
    """Tokens there are: the model's vocab_size."""
    context: int
    """Tokens of an example."""
    answers: bool
    """Whether the accuracy of the labelled positions means something, as for tasks."""
    chance: float | None = None
    """What guessing would score, for tasks."""
    bytes_per_token: float | None = None
    """Mean bytes of UTF-8 of a predicted token of `held_out(eval_examples)`, where tokens stand for text."""
    end: int | None = None
    """The token that ends a document, where there is one."""

    @abstractmethod
    def train(self, seed: int, count: int) -> Dataset[dict[str, Tensor]]:
        """The first `count` examples of the seed's endless order."""

    @abstractmethod
    def held_out(self, count: int) -> Dataset[dict[str, Tensor]]:
        """The examples to evaluate on; text may have fewer than `count`."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """For JSON: documents, tokens, bytes, split, tokenizer, hashes."""

    @abstractmethod
    def excerpt(self, example: int = 0, *, seed: int = 0) -> str:
        """A training example as text."""

    @abstractmethod
    def save_tokenizer(self, folder: str | Path) -> None:
        """Put the tokenizer beside a model, where transformers, `twoaxis generate` and `twoaxis eval` find it."""


def load_data(config: TrainConfig, *, watch: Watch | None = None) -> Data:
    """The data of a configuration.

    Args:
        config: its fields data, tokenizer, text_field, context, held_out, isolate, cache and eval_examples count.
        watch: told what is done, how much of it and how much there is, while text is tokenised; see `bars`.
    """
    tasks = [given for given in config.data if given.startswith(TASK)]
    if not tasks:
        return TextData(config, watch)
    if len(config.data) > 1:
        raise ValueError(f"{tasks[0]} cannot be mixed with other data: {', '.join(config.data)}")
    return TaskData(tasks[0], config.context)


@contextlib.contextmanager
def bars() -> Iterator[Watch]:
    """A `watch` for `load_data` that shows a progress bar on stderr for each piece of work.

    with bars() as watch:
        data = load_data(config, watch=watch)
    """
    with contextlib.ExitStack() as stack:
        shown: dict[str, Progress] = {}

        def watch(what: str, done: int, total: int) -> None:
            if what not in shown:
                stack.close()
                shown[what] = stack.enter_context(Progress(what, total, "bytes"))
            shown[what].advance(done - shown[what].done)

        yield watch


class TextData(Data):
    """Documents, packed into rows.

    Args:
        config: see `load_data`.
        watch: see `load_data`.
    """

    answers = False

    def __init__(self, config: TrainConfig, watch: Watch | None = None) -> None:
        self.context, self.isolate = config.context, config.isolate
        self.sources, self.asked = config.data, config.held_out
        self.name = " + ".join(map(source_name, config.data))
        self.corpus: Corpus = open_corpus(
            config.data,
            tokenizer=config.tokenizer,
            text_field=config.text_field,
            held_out=config.held_out,
            cache=config.cache,
            watch=watch,
        )
        self.vocabulary = self.corpus.tokenizer.vocabulary
        self.end = self.corpus.tokenizer.end
        self.train_tokens = len(self.corpus.train.tokens) - (self.context if self.corpus.cut else 0)
        self._check(config)
        self.held_out_rows = len(self.corpus.held_out.tokens) // self.context
        self.fingerprint = self._fingerprint()
        tokens, size = self._rows(config.eval_examples).predicted(self.corpus.sizes)
        self.bytes_per_token = size / tokens if tokens and size else None

    def _check(self, config: TrainConfig) -> None:
        """Both parts must fill an example."""
        facts = self.corpus.facts
        gap = f" after a gap of {self.context:,} before the cut" if self.corpus.cut else ""
        sides = (
            ("training", self.train_tokens, facts["train"], gap, "smaller"),
            ("held-out", len(self.corpus.held_out.tokens), facts["held_out"], "", "larger"),
        )
        for part, tokens, side, gap, remedy in sides:
            if tokens < self.context:
                raise ValueError(
                    f"{self.name} is too little text for a context of {self.context:,} tokens: the {part} part has "
                    f"{max(0, tokens):,}{gap}, of {side['bytes']:,} bytes; give more text, a smaller context or a "
                    f"{remedy} held_out than {config.held_out}"
                )

    def _fingerprint(self) -> str:
        files = self.corpus.facts["files"]
        hashes = {name: hashed for name, (_, hashed) in files.items() if not name.startswith("tokenizer/")}
        settings = {"context": self.context, "isolate": self.isolate, "tokens": self.train_tokens}
        return short_hash({"files": hashes, "vocabulary": self.vocabulary, **settings})

    def train(self, seed: int, count: int) -> Rows:
        """Rows in an order of the seed's; see `twoaxis.data.packing`."""
        order = Order(self.train_tokens, self.context, seed)
        return Rows(self.corpus.train, order, count, self.context, isolate=self.isolate)

    def held_out(self, count: int) -> Rows:
        """Held-out rows, fewer than `count` if there are no more."""
        return self._rows(count)

    def _rows(self, count: int) -> Rows:
        part: Part = self.corpus.held_out
        order = Fixed(len(part.tokens), self.context)
        return Rows(part, order, min(count, order.rows), self.context, isolate=self.isolate)

    def held_out_bytes(self, count: int) -> tuple[int, int]:
        """Tokens that are predicted in `held_out(count)`, and the bytes of UTF-8 they stand for."""
        return self._rows(count).predicted(self.corpus.sizes)

    @property
    def rows(self) -> int:
        """Training examples of an epoch."""
        return Order(self.train_tokens, self.context, 0).rows

    def notes(self) -> list[str]:
        """What a reader of the numbers should know."""
        facts, made = self.corpus.facts, []
        if self.corpus.cut:
            made.append(
                f"one document only: its end is held out, and the {self.context:,} tokens before the cut are not used"
            )
        passed = tell_skipped(Counter(facts["skipped"]))
        if passed:
            made.append(f"passed over: {passed}")
        if facts["duplicates"]:
            made.append(f"left out because the same text came before: {facts['duplicates']:,}")
        held, whole = facts["held_out"]["bytes"], facts["held_out"]["bytes"] + facts["train"]["bytes"]
        if not self.asked / 2 <= held / whole <= self.asked * 2:
            made.append(f"{held / whole:.1%} of the bytes are held out, not {self.asked:.1%}: documents stay whole")
        if self.corpus.tokenizer.end is None:
            made.append(f"{self.corpus.tokenizer.name} has no end-of-text token: documents follow each other without")
        return made

    def describe(self) -> dict[str, Any]:
        """Documents, tokens and bytes of both parts, and what they were made of and with."""
        facts, tokenizer = self.corpus.facts, self.corpus.tokenizer
        described = {
            "name": self.name,
            "fingerprint": self.fingerprint,
            "sources": list(self.sources),
            "context": self.context,
            "isolate": self.isolate,
            "vocabulary": self.vocabulary,
            "tokenizer": tokenizer.name,
            "train": facts["train"] | {"rows": self.rows, "used_tokens": self.train_tokens},
            "held_out": facts["held_out"] | {"rows": self.held_out_rows},
            "bytes_per_token": self.bytes_per_token,
            "duplicates": facts["duplicates"],
            "skipped": facts["skipped"],
            "text_hash": facts["text_hash"],
            "notes": self.notes(),
        }
        return described | ({"python": platform.python_version()} if "stdlib" in self.sources else {})

    def excerpt(self, example: int = 0, *, seed: int = 0) -> str:
        """A training row, decoded."""
        return self.corpus.tokenizer.decode(self.train(seed, example + 1)[example]["input_ids"].tolist())

    def save_tokenizer(self, folder: str | Path) -> None:
        """The tokenizer's files; bytes have none."""
        self.corpus.tokenizer.save(folder)


class TaskData(Data):
    """A diagnostic task.

    Args:
        spelling: task:NAME[:option=value,...].
        context: tokens of an example.
    """

    answers = True

    def __init__(self, spelling: str, context: int) -> None:
        from twoaxis.data.tasks import make_task

        if not spelling.removeprefix(TASK):
            raise ValueError(f"{spelling!r} names no task; write task:NAME or task:NAME:option=value,option=value")
        name, options = spec.parse(spelling.removeprefix(TASK))
        if "context" in options:
            raise ValueError(f"the context of {TASK}{name} is the run's: give --context {options['context']}")
        self.task: Task = make_task(name, context=context, **options)
        self.name = TASK + spec.spell(name, options)
        self.context, self.vocabulary, self.chance = context, self.task.vocabulary, self.task.chance
        first = hashlib.sha256()
        for held_out in (False, True):
            for part in self.task.examples(0, 0, 64, held_out=held_out):
                first.update(part.tobytes())
        config = dataclasses.asdict(self.task.config)
        self.fingerprint = short_hash({"task": name, "options": config, "context": context, "first": first.hexdigest()})

    def train(self, seed: int, count: int) -> TaskExamples:
        """Examples of the seed."""
        return TaskExamples(self.task, seed, count, held_out=False)

    def held_out(self, count: int) -> TaskExamples:
        """Examples that come from other randomness than any seed's."""
        return TaskExamples(self.task, 0, count, held_out=True)

    def describe(self) -> dict[str, Any]:
        """The task and its options."""
        return {
            "name": self.name,
            "fingerprint": self.fingerprint,
            "sources": [self.name],
            "context": self.context,
            "vocabulary": self.vocabulary,
            "tokenizer": None,
            "task": self.task.name,
            "summary": self.task.describe(),
            "options": dataclasses.asdict(self.task.config),
            "chance": self.chance,
            "chance_loss": self.task.chance_loss,
            "notes": [],
        }

    def excerpt(self, example: int = 0, *, seed: int = 0) -> str:
        """An example in words, its answers behind the questions."""
        return self.task.show(self.task.examples(seed, example, 1))

    def save_tokenizer(self, folder: str | Path) -> None:
        """A task has none."""


class TaskExamples(Dataset[dict[str, Tensor]]):
    """The first examples of a task and a seed.

    Args:
        task: the task.
        seed: of the examples.
        count: how many.
        held_out: whether they are those of the evaluation.
    """

    def __init__(self, task: Task, seed: int, count: int, *, held_out: bool) -> None:
        self.task, self.seed, self.count, self.is_held_out = task, seed, count, held_out

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, example: int) -> dict[str, Tensor]:
        if not 0 <= example < self.count:
            raise IndexError(f"example {example} of {self.count}")
        made = self.task.examples(self.seed, example, 1, held_out=self.is_held_out)
        return {"input_ids": torch.tensor(made.input_ids[0]), "labels": torch.tensor(made.labels[0])}
