"""The command that looks inside a saved model: inspect."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import tyro

from twoaxis.commands.models import _stdin


def inspect(
    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")],
    *,
    prompt: str = "",
    out: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None,
    as_bytes: Annotated[bool, tyro.conf.arg(name="bytes")] = False,
    device: str | None = None,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Show what every site of a saved model reads, mixes and writes on a prompt.

    Args:
        folder: Folder that save_pretrained wrote.
        prompt: Text to run through the model; - reads it from stdin, up to its last line end.
        out: Folder for inspect.html, inspect.json and figures as PNG and SVG.
        as_bytes: Tokens are bytes; for models without a tokenizer.
        device: Such as cpu or cuda:1. None is a GPU if there is one.
        json_output: Print one JSON document instead of tables.
    """
    from twoaxis.model import load

    load.check_folder(folder)
    text = _stdin() if prompt == "-" else prompt
    if not text:
        raise ValueError("the prompt is empty: give some text with --prompt, or --prompt - to read it from stdin")
    from twoaxis.inspection import files

    target = None if out is None else files.prepare_folder(out)
    load.quiet()
    from twoaxis.data.tokenizer import load_tokenizer
    from twoaxis.inspection.document import inspect_prompt
    from twoaxis.inspection.tables import tables
    from twoaxis.show import terminal

    model = load.load_model(folder, device)
    tokenizer = load_tokenizer("bytes" if as_bytes else folder, model.config.vocab_size)
    document = inspect_prompt(model, tokenizer, text, name=folder)
    if json_output:
        print(json.dumps(document, allow_nan=False))
    else:
        terminal.show(tables(document))
    if target is not None:
        written, left_out = files.write_files(target, document)
        print(f"wrote {', '.join(str(path) for path in written)}", file=sys.stderr)
        if left_out:
            print(left_out, file=sys.stderr)
    return 0
