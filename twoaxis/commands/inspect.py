"""The command that looks inside a saved model: inspect."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from twoaxis.commands.models import open_model, read_prompt
from twoaxis.commands.parsing import AsBytes, SavedFolder, plain

if TYPE_CHECKING:
    from twoaxis.inspection.inspection import Inspection


@plain
def inspect(
    folder: SavedFolder,
    *,
    prompt: str = "",
    beside: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None,
    out: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None,
    as_bytes: AsBytes = False,
    device: str | None = None,
) -> Inspection:
    """Show what every site of a saved model reads, mixes and writes on a prompt.

    Args:
        folder: Folder of a saved model, or the --out of twoaxis train.
        prompt: Text to run through the model; - reads it from stdin, up to its last line end.
        beside: Folder of a second model, shown side by side with the first.
        out: New or empty folder, or one of an earlier inspection, for the page, the data and figures as PNG and SVG.
        as_bytes: Tokens are bytes; for a model without a tokenizer that was moved away from its run.
        device: Such as cpu or cuda:1. None is a GPU if there is one.
    """
    from twoaxis.base.files import check_empty
    from twoaxis.inspection.inspection import inspect as look
    from twoaxis.model import load

    folders = [str(load.check_folder(each)) for each in (folder, beside) if each is not None]
    text = read_prompt(prompt)
    if not text:
        raise ValueError("the prompt is empty: give some text with --prompt, or --prompt - to read it from stdin")
    if out is not None and not (Path(out) / "inspect.json").is_file():
        check_empty(Path(out))
    runs = [look(*open_model(path, device, as_bytes), text, name=path) for path in folders]
    found = sum(runs[1:], runs[0])
    if out is not None:
        for drawn in Path(out).glob("inspect-*.[ps][nv]g"):  # of an earlier inspection, which may have had others
            drawn.unlink()
        saved = found.save(out, "inspect")
        wrote = f"wrote {saved.files[1]} and {len(saved.files) - 1} more"
        print(wrote, *filter(None, [saved.note]), sep="\n", file=sys.stderr)
    return found
