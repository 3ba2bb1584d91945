"""Commands that run a saved model: generate, eval."""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from typing import Annotated, Any

import tyro


def generate(
    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")],
    *,
    prompt: str = "",
    tokens: int = 64,
    temperature: float = 0.0,
    top_p: float | None = None,
    seed: int = 0,
    as_bytes: Annotated[bool, tyro.conf.arg(name="bytes")] = False,
    echo: bool = False,
    device: str | None = None,
) -> int:
    """Continue a prompt with a saved model; the text goes to stdout as it is made, everything else to stderr.

    Args:
        folder: Folder that save_pretrained wrote.
        prompt: Text to continue; - reads it from stdin, up to its last line end.
        tokens: How many tokens to make, unless the text ends before.
        temperature: Of the sampling; 0 takes the likeliest token.
        top_p: Sample from the likeliest tokens that have this much of the probability. None is all of them.
        seed: Seed of the sampling.
        as_bytes: Tokens are bytes; for models without a tokenizer.
        echo: Print the prompt too.
        device: Such as cpu or cuda:1. None is a GPU if there is one.
    """
    from twoaxis.model import load

    load.check_folder(folder)
    text = _stdin() if prompt == "-" else prompt
    load.quiet()
    from twoaxis.data.tokenizer import load_tokenizer
    from twoaxis.model import generate as making

    making.check(text, tokens, temperature, top_p)  # before the model is loaded, which may take long
    model = load.load_model(folder, device)
    tokenizer = load_tokenizer("bytes" if as_bytes else folder, model.config.vocab_size)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if echo:
        print(text, end="", flush=True)
    made = making.generate(
        model,
        tokenizer,
        text,
        tokens=tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        say=lambda piece: print(piece, end="", flush=True),
    )
    if sys.stdout.isatty():
        print(flush=True)
    kept = ", ".join(f"{part} {size:,}" for part, size in made.cache_bytes.items() if size)
    print(
        f"{made.tokens:,} tokens in {made.seconds:.2f} s ({made.rate:,.1f} tokens/s), prompt {made.prompt_tokens:,} "
        f"tokens, cache {sum(made.cache_bytes.values()):,} bytes ({kept})",
        file=sys.stderr,
    )
    return 0


def _stdin() -> str:
    """What stands on stdin, without the line end that shells and editors put behind a text."""
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt on stdin is not UTF-8: byte {error.start} cannot be read") from error
    return text.removesuffix("\n").removesuffix("\r")


def evaluate(
    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")],
    *,
    data: Annotated[tuple[str, ...], tyro.conf.arg(metavar="PATH")] = (),
    context: int | None = None,
    stride: int | None = None,
    batch: int = 8,
    max_tokens: int | None = None,
    as_bytes: Annotated[bool, tyro.conf.arg(name="bytes")] = False,
    device: str | None = None,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Measure loss, perplexity and bits per byte of a saved model on text.

    Args:
        folder: Folder that save_pretrained wrote.
        data: Text files and folders, jsonl and parquet files, hf:DATASET or stdlib; each file or record is a document.
        context: Tokens of a window. None is what the model is made for, but at most 1024.
        stride: Tokens by which windows move on; each token is counted once. None is half of the context.
        batch: Windows per pass.
        max_tokens: Count the first ones only.
        as_bytes: Tokens are bytes; for models without a tokenizer.
        device: Such as cpu or cuda:1. None is a GPU if there is one.
        json_output: Print one JSON document instead of lines.
    """
    from twoaxis.model import load

    load.check_folder(folder)
    load.quiet()
    from twoaxis.base.progress import Progress
    from twoaxis.data.sources import Skipped, read_sources, skipped_text
    from twoaxis.data.tokenizer import load_tokenizer
    from twoaxis.model import evaluate as measuring

    if not data:
        raise ValueError("there is nothing to evaluate: name text files or folders with --data")
    skipped: Skipped = Counter()
    texts = [document.text for document in read_sources(data, "text", skipped)]
    if passed := skipped_text(skipped):
        print(f"passed over: {passed}", file=sys.stderr)
    model = load.load_model(folder, device)
    context, stride = measuring.pick_context(model, context, stride)
    tokenizer = load_tokenizer("bytes" if as_bytes else folder, model.config.vocab_size)
    encoded = tokenizer.encode(texts, sizes=True, prompt=True)
    with Progress("eval", measuring.count_tokens(encoded, max_tokens), "tokens") as bar:
        found = measuring.evaluate(
            model,
            encoded,
            context=context,
            stride=stride,
            batch=batch,
            max_tokens=max_tokens,
            watch=lambda tokens, loss: bar.advance(tokens, f"loss {loss:.4f}"),
        )
    if json_output:
        print(json.dumps(_evaluation_document(folder, data, tokenizer.name, found), indent=1))
        return 0
    print(f"loss           {found.loss:.4f} nats per token")
    print(f"perplexity     {found.perplexity:.6g}")
    print(f"bits per byte  {found.bits_per_byte:.4f}")
    print(f"counted        {found.tokens:,} tokens, {found.bytes:,} bytes, {found.documents:,} documents")
    print(f"context        {found.context:,} tokens, stride {found.stride:,}, {tokenizer.name}")
    print(f"time           {found.seconds:.2f} s, {found.rate:,.0f} tokens/s")
    return 0


def _evaluation_document(folder: str, data: tuple[str, ...], tokenizer: str, found: Any) -> dict[str, Any]:
    import torch

    import twoaxis

    made_with = {"twoaxis": twoaxis.__version__, "torch": torch.__version__}
    return {**made_with, "model": folder, "data": list(data), "tokenizer": tokenizer, **found.to_dict()}
