"""Which data a run trains on and how it is cut into examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypedDict

from twoaxis.base.options import Fraction, Options, between

Examples = Annotated[int, between(1, 2**24)]
"""A number of examples, of which lists are made."""
MOST_TOKENS = 2**27
"""Of a tokenizer, and of a model."""


def bpe_size(spec: str) -> int | None:
    """The size if `spec` is `bpe:SIZE`, None if it is another tokenizer; a size that cannot be is an error."""
    kind, colon, size = spec.partition(":")
    if kind != "bpe":
        return None
    if not colon or not size.isdecimal():
        raise ValueError(f"tokenizer {spec!r} has no size; write bpe:SIZE, such as bpe:2048")
    number = int(size) if len(size) < 20 else MOST_TOKENS + 1
    if number > MOST_TOKENS:
        raise ValueError(f"tokenizer {spec[:40]!r} is too large: a model has at most {MOST_TOKENS} tokens")
    if number < 257:
        raise ValueError(f"tokenizer {spec!r} is too small: 256 bytes and the end-of-text token are 257")
    return number


@dataclass(frozen=True, kw_only=True)
class DataOptions(Options):
    """The data of a run."""

    data: tuple[str, ...] = ("stdlib",)
    """stdlib, files and folders, hf:DATASET, or task:NAME[:option=value,...]."""
    tokenizer: str = "bpe:2048"
    """bytes, bpe:SIZE (trained on the training split), or the folder or hub name of a transformers tokenizer."""
    text_field: str = "text"
    """Where jsonl, parquet and Hugging Face records keep their text."""
    context: Annotated[int, between(2, 2**24)] = 128
    """Tokens of a training example: at least a token and the one it predicts."""
    held_out: Fraction = 0.05
    """Part of the documents kept for evaluation."""
    isolate: bool = False
    """Keep packed documents from seeing each other."""
    eval_examples: Examples = 64
    """Held-out examples of an evaluation, the same for every run."""
    final_examples: Examples = 512
    """Of the last one, by which a run is judged; at least as many as of the others."""
    eval_skip: Annotated[int, between(0, 2**24)] = 0
    """Held-out examples to leave to others: a choice made on these is judged on those before."""
    cache: str | None = None
    """Folder of tokenised data; None is the user's cache folder."""

    @property
    def judged_examples(self) -> int:
        """Held-out examples of the last evaluation."""
        return max(self.final_examples, self.eval_examples)

    def validate(self) -> None:
        """At least one source, and a tokenizer that can be."""
        if not self.data or not all(self.data):
            raise ValueError("data names nothing; give stdlib, files, folders, hf:DATASET or task:NAME")
        if not self.tokenizer:
            raise ValueError("tokenizer is empty; give bytes, bpe:SIZE, or a folder or hub name")
        bpe_size(self.tokenizer)


class ExampleFields(TypedDict, total=False):
    """Names and types of `DataOptions` for editors and type checkers, without the data; a test holds them equal."""

    tokenizer: str
    text_field: str
    context: int
    held_out: float
    isolate: bool
    eval_examples: int
    final_examples: int
    cache: str | None


class DataFields(ExampleFields, total=False):
    """All of them."""

    data: Sequence[str]
    eval_skip: int
