"""The command that looks inside a saved model: inspect."""

from __future__ import annotations

import sys
from typing import Annotated

import tyro

from twoaxis.commands.models import open_model, read_prompt
from twoaxis.show.document import Shown


def inspect(
    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")],
    *,
    prompt: str = "",
    out: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None,
    as_bytes: Annotated[bool, tyro.conf.arg(name="bytes")] = False,
    device: str | None = None,
) -> Shown:
    """Show what every site of a saved model reads, mixes and writes on a prompt.

    Args:
        folder: Folder that save_pretrained wrote.
        prompt: Text to run through the model; - reads it from stdin, up to its last line end.
        out: Folder for inspect.html, inspect.json and figures as PNG and SVG.
        as_bytes: Tokens are bytes; for models without a tokenizer.
        device: Such as cpu or cuda:1. None is a GPU if there is one.
    """
    from twoaxis.inspection import files
    from twoaxis.inspection.document import inspect_prompt
    from twoaxis.inspection.tables import tables
    from twoaxis.model import load

    load.check_folder(folder)
    text = read_prompt(prompt)
    if not text:
        raise ValueError("the prompt is empty: give some text with --prompt, or --prompt - to read it from stdin")
    target = None if out is None else files.prepare_folder(out)
    model, tokenizer = open_model(folder, device, as_bytes)
    found = inspect_prompt(model, tokenizer, text, name=folder)
    if target is not None:
        written, left_out = files.write_files(target, found)
        print(f"wrote {', '.join(str(path) for path in written)}", file=sys.stderr)
        if left_out:
            print(left_out, file=sys.stderr)
    return Shown(found, tables(found))
