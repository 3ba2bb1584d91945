"""Which data a run trains on and how it is cut into examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypedDict

from twoaxis.base.options import Count, Fraction, Options, at_least


@dataclass(frozen=True, kw_only=True)
class DataOptions(Options):
    """The data of a run."""

    data: tuple[str, ...] = ("stdlib",)
    """stdlib, files and folders, hf:DATASET, or task:NAME[:option=value,...]."""
    tokenizer: str = "bpe:2048"
    """bytes, bpe:SIZE (trained on the training split), or the folder or hub name of a transformers tokenizer."""
    text_field: str = "text"
    """Where jsonl, parquet and Hugging Face records keep their text."""
    context: Annotated[int, at_least(2)] = 128
    """Tokens of a training example: at least a token and the one it predicts."""
    held_out: Fraction = 0.05
    """Part of the documents kept for evaluation."""
    isolate: bool = False
    """Keep packed documents from seeing each other."""
    eval_examples: Count = 64
    """Held-out examples of an evaluation, the same for every run."""
    final_examples: Count = 512
    """Of the last one, by which a run is judged; at least as many as of the others."""
    eval_skip: Annotated[int, at_least(0)] = 0
    """Held-out examples to leave to others: a choice made on these is judged on those before."""
    cache: str | None = None
    """Folder of tokenised data; None is the user's cache folder."""

    @property
    def judged_examples(self) -> int:
        """Held-out examples of the last evaluation."""
        return max(self.final_examples, self.eval_examples)

    def validate(self) -> None:
        """At least one source."""
        if not self.data:
            raise ValueError("data names nothing; give stdlib, files, folders, hf:DATASET or task:NAME")


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
