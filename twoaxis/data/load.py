"""What a run trains on and is measured on: text, or a diagnostic task.

    data = load_data(DataOptions(data=("stdlib",), tokenizer="bpe:2048", context=256))
    data.train(seed=0, count=8000)[17]     {"input_ids": (256,), "labels": (256,)}
    data.held_out(64)                      the same for every seed and run

An example depends on (data.fingerprint, seed, number) only, and any of them can be had at once: a run that goes on
from a checkpoint begins at its example without reading those before. Labels are aligned with the tokens, as
transformers wants them: the model shifts them itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from twoaxis.base.files import short_hash
from twoaxis.base.progress import Progress
from twoaxis.base.registry import parse, spell
from twoaxis.data.corpus import Part, open_corpus
from twoaxis.data.packing import Rows, count_rows
from twoaxis.data.sources import skipped_text, source_name
from twoaxis.data.split import Watch
from twoaxis.data.tasks import Task, make_task

if TYPE_CHECKING:
    from twoaxis.data.options import DataOptions

TASK = "task:"
"""How the spelling of a task begins."""


class Data:
    """Base class of what a run trains on and is measured on."""

    name: str  # what tables call it
    fingerprint: str  # changes if and only if a token of an example could
    vocab_size: int  # tokens there are
    context: int  # tokens of an example
    answers: bool = False  # whether the accuracy of the labelled positions means something, as for tasks
    chance: float | None = None  # what guessing would score, for tasks
    bytes_per_token: float | None = None  # mean UTF-8 bytes of a predicted token of the evaluation, where it is text
    end: int | None = None  # the token that ends a document, where there is one

    def train(self, seed: int, count: int) -> Dataset[dict[str, Tensor]]:
        """The first `count` examples of the seed's endless order."""
        raise NotImplementedError

    def held_out(self, count: int) -> Dataset[dict[str, Tensor]]:
        """The examples to evaluate on; text may have fewer than `count`."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """For JSON: what it is; of text also documents, tokens, bytes, split, tokenizer and hashes."""
        return {name: getattr(self, name) for name in ("name", "fingerprint", "context", "vocab_size")}

    def excerpt(self, example: int = 0, *, seed: int = 0) -> str:
        """A training example as text."""
        raise NotImplementedError

    def save_tokenizer(self, folder: str | Path) -> None:
        """Put the tokenizer, if it has files, beside a model, where transformers and `twoaxis generate` find it."""


def load_data(options: DataOptions, *, watch: Watch | None = None, check: bool = False) -> TextData | TaskData:
    """The data of a run; see `open_corpus` for `check`, and `bars` for a `watch`."""
    tasks = [given for given in options.data if given.startswith(TASK)]
    if not tasks:
        return TextData(options, watch=watch, check=check)
    if len(options.data) > 1:
        raise ValueError(f"{tasks[0]} cannot be mixed with other data: {', '.join(options.data)}")
    return TaskData(tasks[0], options.context)


@contextlib.contextmanager
def bars() -> Iterator[Watch]:
    """A `watch` for `load_data` that shows a progress bar on stderr for each piece of work.

    with bars() as watch:
        data = load_data(options, watch=watch)
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
    """Documents, packed into rows."""

    def __init__(self, options: DataOptions, *, watch: Watch | None = None, check: bool = False) -> None:
        self.options, self.context = options, options.context
        self.name = " + ".join(map(source_name, options.data))
        self.corpus = corpus = open_corpus(options, watch=watch, check=check)
        self.vocab_size, self.end = corpus.tokenizer.vocab_size, corpus.tokenizer.end
        self.train_tokens = len(corpus.train.tokens) - (self.context if corpus.findings.cut is not None else 0)
        self._check_length()
        self.rows = count_rows(self.train_tokens, self.context)
        hashes = {name: known[1] for name, known in corpus.facts["files"].items() if not name.startswith("tokenizer/")}
        settings = {"context": self.context, "isolate": options.isolate, "tokens": self.train_tokens}
        self.fingerprint = short_hash({"files": hashes, "vocab_size": self.vocab_size, **settings})
        tokens, size = self.held_out(options.judged_examples).predicted(corpus.sizes)
        self.bytes_per_token = size / tokens if tokens and size else None

    def _check_length(self) -> None:
        """Both parts must fill an example."""
        corpus, context = self.corpus, self.context
        gap = f" after a gap of {context:,} before the cut" if corpus.findings.cut is not None else ""
        for part, label, tokens, less, remedy in (
            ("train", "training", self.train_tokens, gap, "smaller"),
            ("held_out", "held-out", len(corpus.held_out.tokens), "", "larger"),
        ):
            if tokens < context:
                raise ValueError(
                    f"{self.name} is too little text for a context of {context:,} tokens: the {label} part has "
                    f"{max(0, tokens):,}{less}, of {corpus.facts[part]['bytes']:,} bytes; give more text, a smaller "
                    f"context or a {remedy} held_out than {self.options.held_out}"
                )

    def train(self, seed: int, count: int) -> Rows:
        """Rows in an order of the seed's; see `twoaxis.data.packing`."""
        return self._rows(self.corpus.train, self.train_tokens, count, seed)

    def held_out(self, count: int) -> Rows:
        """Held-out rows, fewer than `count` if there are no more."""
        tokens = len(self.corpus.held_out.tokens)
        return self._rows(self.corpus.held_out, tokens, min(count, tokens // self.context), None)

    def _rows(self, part: Part, tokens: int, count: int, seed: int | None) -> Rows:
        return Rows(part, tokens, count, self.context, seed=seed, isolate=self.options.isolate)

    def notes(self) -> list[str]:
        """What a reader of the numbers should know."""
        facts, findings, notes = self.corpus.facts, self.corpus.findings, []
        if findings.cut is not None:
            notes.append(
                f"one document only: its end is held out, and the {self.context:,} tokens before the cut are not used"
            )
        if findings.skipped:
            notes.append(f"passed over: {skipped_text(Counter(findings.skipped))}")
        if findings.duplicates:
            notes.append(f"left out because the same text came before: {findings.duplicates:,}")
        held, asked = facts["held_out"]["bytes"], self.options.held_out
        share = held / (held + facts["train"]["bytes"])
        if not asked / 2 <= share <= asked * 2:
            notes.append(f"{share:.1%} of the bytes are held out, not {asked:.1%}: documents stay whole")
        if self.end is None:
            notes.append(f"{self.corpus.tokenizer.name} has no end-of-text token: documents follow each other without")
        return notes

    def describe(self) -> dict[str, Any]:
        """Documents, tokens and bytes of both parts, and what they were made of and with."""
        facts, findings = self.corpus.facts, self.corpus.findings
        described = super().describe() | {
            "sources": list(self.options.data),
            "isolate": self.options.isolate,
            "tokenizer": self.corpus.tokenizer.name,
            "train": facts["train"] | {"rows": self.rows, "used_tokens": self.train_tokens},
            "held_out": facts["held_out"] | {"rows": len(self.corpus.held_out.tokens) // self.context},
            "bytes_per_token": self.bytes_per_token,
            "duplicates": findings.duplicates,
            "skipped": findings.skipped,
            "text_hash": findings.text_hash,
            "notes": self.notes(),
        }
        return described | ({"python": platform.python_version()} if "stdlib" in self.options.data else {})

    def excerpt(self, example: int = 0, *, seed: int = 0) -> str:
        """A training row, decoded."""
        return self.corpus.tokenizer.decode(self.train(seed, example + 1)[example]["input_ids"].tolist())

    def save_tokenizer(self, folder: str | Path) -> None:
        """As the tokenizer does."""
        self.corpus.tokenizer.save(folder)


class TaskData(Data):
    """A diagnostic task, spelled task:NAME[:option=value,...]."""

    answers = True

    def __init__(self, spelling: str, context: int) -> None:
        if not spelling.removeprefix(TASK):
            raise ValueError(f"{spelling!r} names no task; write task:NAME or task:NAME:option=value,option=value")
        name, options = parse(spelling.removeprefix(TASK))
        if "context" in options:
            raise ValueError(f"the context of {TASK}{name} is the run's: give --context {options['context']}")
        self.task: Task = make_task(name, context=context, **options)
        self.name = TASK + spell(name, options)
        self.context, self.vocab_size = context, self.task.vocab_size
        self.chance = self.task.chance
        first = hashlib.sha256()
        for held_out in (False, True):
            for part in self.task.examples(0, 0, 64, held_out=held_out):
                first.update(part.tobytes())
        self.fingerprint = short_hash({"task": name, "options": self.task.to_dict(), "first": first.hexdigest()})

    def train(self, seed: int, count: int) -> TaskExamples:
        """Examples of the seed."""
        return TaskExamples(self.task, seed, count, held_out=False)

    def held_out(self, count: int) -> TaskExamples:
        """Examples that come from other randomness than any seed's."""
        return TaskExamples(self.task, 0, count, held_out=True)

    def describe(self) -> dict[str, Any]:
        """The task and its options."""
        return super().describe() | {
            "sources": [self.name],
            "tokenizer": None,
            "task": self.task.name,
            "summary": self.task.describe(),
            "options": {name: value for name, value in self.task.to_dict().items() if name != "context"},
            "chance": self.chance,
            "chance_loss": self.task.chance_loss,
            "notes": [],
        }

    def excerpt(self, example: int = 0, *, seed: int = 0) -> str:
        """An example in words, its answers behind the questions."""
        return self.task.show(self.task.examples(seed, example, 1))


class TaskExamples(Dataset[dict[str, Tensor]]):
    """The first `count` examples of a task and a seed, or of its evaluation."""

    def __init__(self, task: Task, seed: int, count: int, *, held_out: bool) -> None:
        self.task, self.seed, self.count, self.is_held_out = task, seed, count, held_out

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, example: int) -> dict[str, Tensor]:
        if not 0 <= example < self.count:
            raise IndexError(f"example {example} of {self.count}")
        row = self.task.examples(self.seed, example, 1, held_out=self.is_held_out)
        return {"input_ids": torch.tensor(row.input_ids[0]), "labels": torch.tensor(row.labels[0])}
