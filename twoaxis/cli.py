"""The command line: one typed function per command.

Nothing heavy is imported before a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import io
import json
import os
import sys
from typing import Annotated, Any

import tyro
from tyro.extras import SubcommandApp

app = SubcommandApp()


@app.command
def verify(
    *,
    seed: int = 0,
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FAMILY")] = (),
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Measure the certificates on random instances; exit with 1 if one does not hold.

    Args:
        seed: Seed of the random instances.
        only: Families to measure: duality, neutral, blend, algebra, reduction, sequence, orders. None named is all.
        json_output: Print one JSON document instead of lines.
    """
    import torch

    from twoaxis.verify.run import certificates

    torch.set_num_threads(1)  # the instances are small
    results = []
    for certificate in certificates(seed, only):
        results.append(certificate)
        if not json_output:
            mark = "holds" if certificate.holds else "FAILS"
            numbers = f"{certificate.error:8.1e} <= {certificate.bound:<7.0e} {certificate.instances:4d}x"
            print(f"{mark}  {numbers}  {certificate.family:9s} {certificate.statement}", flush=True)
    failed = [c for c in results if not c.holds]
    if json_output:
        print(json.dumps(_certificates_document(seed, results), indent=1))
    else:
        held = f"{len(results) - len(failed)} of {len(results)} certificates hold"
        print(f"{held} (seed {seed}, float64, torch {torch.__version__})")
    return 1 if failed else 0


def _certificates_document(seed: int, results: list[Any]) -> dict[str, Any]:
    import torch

    import twoaxis

    return {
        "twoaxis": twoaxis.__version__,
        "torch": torch.__version__,
        "seed": seed,
        "holds": all(c.holds for c in results),
        "certificates": [{**c._asdict(), "holds": c.holds} for c in results],
    }


@app.command
def methods(
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = None,
    *,
    blocks: int = 12,
    width: int = 768,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_width: int | None = None,
    hidden: int | None = None,
    columns: Annotated[tuple[str, ...], tyro.conf.arg(metavar="COLUMN")] = (),
    markdown: bool = False,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Print the map of every method with exact costs for a shape of decoder, or the page of one method.

    Args:
        name: Method whose page is printed. None named is the map.
        blocks: Number of blocks.
        width: Width of the residual stream.
        heads: Attention heads. None is one per 64 channels.
        kv_heads: Key and value heads. None is as many as heads.
        head_width: Width of a head. None is width / heads.
        hidden: Hidden width of the MLP. None is 8/3 of the width.
        columns: Columns of the map, or groups of them: read, weights, wiring, cost, origin, or all of these.
        markdown: Print Markdown, by default with all columns.
        json_output: Print one JSON document with everything.
    """
    if markdown and json_output:
        raise ValueError("--markdown and --json are two forms of one document; give one of them")
    if columns and (json_output or name is not None):
        raise ValueError("--columns belongs to the map; a page and --json always have everything")
    from twoaxis.atlas import document, entries, pages

    shape = entries.make_shape(blocks, width, heads, kv_heads, head_width, hidden)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # drawings must not fail where the encoding is narrow
    if json_output:
        rows = entries.entries(shape) if name is None else (entries.entry(name, shape),)
        print(json.dumps(pages.document(shape, rows), indent=1, ensure_ascii=False))
        return 0
    asked = columns or (("all",) if markdown else ())
    blocks_of_page = pages.the_map(shape, asked) if name is None else pages.page(entries.entry(name, shape))
    if markdown:
        print(document.markdown(blocks_of_page), end="")
    else:
        document.show([*blocks_of_page, pages.more()] if name is None and not columns else blocks_of_page)
    return 0


@app.command
def check(
    path: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")],
    *,
    compiled: Annotated[bool, tyro.conf.arg(name="compile")] = True,
    seed: int = 0,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Run the conformance kit on every stream and mixer that a Python file defines; exit with 1 if a check fails.

    Args:
        path: The file. It is imported: check your own files only.
        compiled: Also compile with fullgraph=True and compare; --no-compile leaves it out and is much quicker.
        seed: Seed of the random instances.
        json_output: Print one JSON document instead of text.
    """
    import torch

    import twoaxis
    from twoaxis.testing.load import check_file

    torch.set_num_threads(1)  # the instances are small
    reports = check_file(path, compile=compiled, seed=seed)
    ok = all(report.ok for report in reports)
    if json_output:
        found = {"twoaxis": twoaxis.__version__, "torch": torch.__version__, "seed": seed, "ok": ok}
        print(json.dumps({**found, "reports": [report.to_dict() for report in reports]}, indent=1))
    else:
        print("\n\n".join(report.text() for report in reports))
    return 0 if ok else 1


@app.command
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
    from twoaxis.model import generate as making

    making.check(text, tokens, temperature, top_p)  # before the model is loaded, which may take long
    model = load.load_model(folder, device)
    codec = load.load_codec(folder, model.config.vocab_size, as_bytes=as_bytes)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if echo:
        print(text, end="", flush=True)
    made = making.generate(
        model,
        codec,
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


@app.command(name="eval")
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
        data: Text files in UTF-8, and folders whose files are all read. Each file is a document of its own.
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
    from twoaxis.model import evaluate as measuring
    from twoaxis.progress import Progress

    documents = measuring.read_documents(data)
    model = load.load_model(folder, device)
    context, stride = measuring.pick_context(model, context, stride)
    codec = load.load_codec(folder, model.config.vocab_size, as_bytes=as_bytes)
    encoded = [codec.encode(document.text) for document in documents]
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
        print(json.dumps(_evaluation_document(folder, data, codec.name, found), indent=1))
        return 0
    print(f"loss           {found.loss:.4f} nats per token")
    print(f"perplexity     {found.perplexity:.6g}")
    print(f"bits per byte  {found.bits_per_byte:.4f}")
    print(f"counted        {found.tokens:,} tokens, {found.bytes:,} bytes, {found.documents:,} documents")
    print(f"context        {found.context:,} tokens, stride {found.stride:,}, {codec.name}")
    print(f"time           {found.seconds:.2f} s, {found.rate:,.0f} tokens/s")
    return 0


def _evaluation_document(folder: str, data: tuple[str, ...], tokenizer: str, found: Any) -> dict[str, Any]:
    import torch

    import twoaxis

    made_with = {"twoaxis": twoaxis.__version__, "torch": torch.__version__}
    return {**made_with, "model": folder, "data": list(data), "tokenizer": tokenizer, **found.to_dict()}


def main() -> None:
    """Entry point of the `twoaxis` command: a mistake of the user's ends in one line, not in a traceback."""
    try:
        code = app.cli(
            prog="twoaxis",
            description="Residual streams and local mixers for decoder language models.",
        )
        sys.stdout.flush()
    except ValueError as error:
        print(f"twoaxis: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("twoaxis: interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the exit does not flush into the pipe
        code = 141
    sys.exit(code or 0)


if __name__ == "__main__":
    main()
