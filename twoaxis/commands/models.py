"""Commands that run a saved model: generate, eval."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from twoaxis.commands.parsing import AsBytes, SavedFolder, plain
from twoaxis.show.document import Code, Document, Facts, Showable, Shown

if TYPE_CHECKING:
    from twoaxis.data.tokenizer import Tokenizer
    from twoaxis.model.decoder import Model
    from twoaxis.model.generate import Generated


@plain
def generate(
    folder: SavedFolder,
    *,
    prompt: str = "",
    tokens: int = 64,
    temperature: float = 0.0,
    top_p: float | None = None,
    seed: int = 0,
    as_bytes: AsBytes = False,
    echo: bool = False,
    device: str | None = None,
) -> Continuation:
    """Continue a prompt with a saved model; the text goes to stdout as it is made, everything else to stderr.

    Args:
        folder: Folder of a saved model, or the --out of twoaxis train.
        prompt: Text to continue; - reads it from stdin, up to its last line end.
        tokens: How many tokens to make, unless the text ends before.
        temperature: Of the sampling; 0 takes the likeliest token.
        top_p: Sample from the likeliest tokens that have this much of the probability. None is all of them.
        seed: Seed of the sampling.
        as_bytes: Tokens are bytes; for a model without a tokenizer that was moved away from its run.
        echo: Print the prompt too.
        device: Such as cpu or cuda:1. None is a GPU if there is one.
    """
    from twoaxis.model import generate as making
    from twoaxis.model import load

    folder = str(load.check_folder(folder))
    text = read_prompt(prompt)
    making.check(text, tokens, temperature, top_p)  # before the model is loaded, which may take long
    model, tokenizer = open_model(folder, device, as_bytes)
    how = {"tokens": tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    return Continuation(folder, text, echo, lambda say: making.generate(model, tokenizer, text, **how, say=say))


@dataclass(frozen=True)
class Continuation(Showable):
    """Text that a model makes when it is first asked for: piece by piece where it is shown, at once elsewhere."""

    model: str  # its folder
    prompt: str  # what is continued
    echo: bool  # whether the prompt is shown too
    make: Callable[[Callable[[str], None] | None], Generated]  # makes the text and hands each piece to a function

    @cached_property
    def made(self) -> Generated:
        """The text, and what it took."""
        return self.make(None)

    @property
    def text(self) -> str:
        """The text behind the prompt."""
        return self.made.text

    def show(self, width: int | None = None) -> None:
        """The text to standard output as it is made, everything else to stderr."""
        if self.echo:
            print(self.prompt, end="", flush=True)
        if "made" in self.__dict__:  # where cached_property keeps it
            print(self.text, end="", flush=True)
        else:
            self.__dict__["made"] = self.make(lambda piece: print(piece, end="", flush=True))
        made = self.made
        if sys.stdout.isatty() or _in_one_file():
            print(flush=True)
        kept = ", ".join(f"{part} {size:,}" for part, size in made.cache_bytes.items() if size)
        time = f"{made.tokens:,} tokens in {made.seconds:.2f} s ({made.rate:,.1f} tokens/s)"
        print(f"{time}, prompt {made.prompt_tokens:,} tokens", f"cache bytes: {kept}", sep="\n", file=sys.stderr)

    def to_dict(self) -> dict[str, Any]:
        """The text and what it took."""
        return {"model": self.model, "prompt": self.prompt, **self.made._asdict()}

    def rows(self) -> list[dict[str, Any]]:
        """One row, with what `to_dict` has."""
        return [self.to_dict()]

    def document(self) -> Document:
        """The text."""
        return Document("", (Code((self.prompt if self.echo else "") + self.text),))


def _in_one_file() -> bool:
    """Whether what goes to stdout and what goes to stderr end up together."""
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError):  # a stream that is no file
        return False


def read_prompt(prompt: str) -> str:
    """A prompt as given; - is what stands on stdin, without the line end that shells and editors put behind a text."""
    if prompt != "-":
        return prompt
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt on stdin is not UTF-8: byte {error.start} cannot be read") from error
    return text.removesuffix("\n").removesuffix("\r")


def open_model(folder: str, device: str | None, as_bytes: bool) -> tuple[Model, Tokenizer]:
    """The model of a folder and its tokenizer."""
    from twoaxis.data.tokenizer import load_tokenizer
    from twoaxis.model import load

    model: Any = load.load_model(folder, device)
    return model, load_tokenizer("bytes" if as_bytes else folder, model.config.vocab_size)


@plain
def evaluate(
    folder: SavedFolder,
    *,
    data: Annotated[tuple[str, ...], tyro.conf.arg(metavar="PATH")] = (),
    context: int | None = None,
    stride: int | None = None,
    batch: int = 8,
    max_tokens: int | None = None,
    as_bytes: AsBytes = False,
    device: str | None = None,
) -> Shown:
    """Measure loss, perplexity and bits per byte of a saved model on text.

    Args:
        folder: Folder of a saved model, or the --out of twoaxis train.
        data: Text files and folders, jsonl and parquet files, hf:DATASET or stdlib; each file or record is a document.
        context: Tokens of a window. None is what the model is made for, but at most 1024.
        stride: Tokens by which windows move on; each token is counted once. None is half of the context.
        batch: Windows per pass.
        max_tokens: Count the first ones only.
        as_bytes: Tokens are bytes; for a model without a tokenizer that was moved away from its run.
        device: Such as cpu or cuda:1. None is a GPU if there is one.
    """
    from twoaxis.base.machine import versions
    from twoaxis.base.progress import Progress
    from twoaxis.data.sources import Skipped, read_sources, skipped_text
    from twoaxis.model import evaluate as measuring
    from twoaxis.model import load

    folder = str(load.check_folder(folder))
    if not data:
        raise ValueError("there is nothing to evaluate: name text files or folders with --data")
    skipped: Skipped = Counter()
    model, tokenizer = open_model(folder, device, as_bytes)
    documents = (measuring.encode_pieces(tokenizer, each.text) for each in read_sources(data, "text", skipped))
    with Progress("eval", max_tokens, "tokens") as bar:
        found = measuring.evaluate(
            model,
            documents,
            context=context,
            stride=stride,
            batch=batch,
            max_tokens=max_tokens,
            watch=lambda tokens, loss: bar.advance(tokens, f"loss {loss:.4f}"),
        )
    if passed := skipped_text(skipped):
        print(f"passed over: {passed}", file=sys.stderr)
    made_with = {name: version for name, version in versions().items() if name in ("twoaxis", "torch")}
    asked = {"model": folder, "data": list(data), "tokenizer": tokenizer.name}
    rows = (
        ("loss", f"{found.loss:.4f} nats per token"),
        ("perplexity", f"{found.perplexity:.6g}"),
        ("bits per byte", f"{found.bits_per_byte:.4f}"),
        ("counted", f"{found.tokens:,} tokens, {found.bytes:,} bytes, {found.documents:,} documents"),
        ("context", f"{found.context:,} tokens, stride {found.stride:,}, {tokenizer.name}"),
        ("time", f"{found.seconds:.2f} s, {found.rate:,.0f} tokens/s"),
    )
    return Shown(made_with | asked | found.to_dict(), Document("", (Facts(rows),)))
