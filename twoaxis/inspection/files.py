"""The files of an inspection: inspect.json, inspect.html and, with matplotlib, figures as PNG and SVG.

A folder may hold other things; they are left alone. A file of one of our names is replaced only if an earlier
inspection wrote it, which its inspect.json says. Every file is written beside its place and moved there whole.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

KIND = "twoaxis inspection"
"""What inspect.json says it is."""
NAMES = (
    "inspect.html",
    *(f"{figure}.{form}" for figure in ("sources", "depth", "window") for form in ("png", "svg")),
    "inspect.json",
)
"""Every file that an inspection may write."""


def prepare_folder(folder: str | Path) -> Path:
    """Make the folder, and refuse one that cannot be written to or has foreign files of our names.

    Args:
        folder: where the files will go.
    """
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise ValueError(f"--out {path} is a file; give a folder")
    path.mkdir(parents=True, exist_ok=True)
    ours = _ours(path / "inspect.json")
    foreign = [name for name in NAMES if os.path.lexists(path / name) and name not in ours]
    if foreign:
        raise ValueError(
            f"{path} has {', '.join(foreign)}, which no inspection wrote; move that away or give another folder"
        )
    with tempfile.TemporaryFile(dir=path):  # now rather than after the model has run
        return path


def _ours(record: Path) -> set[str]:
    """The files that the inspection of this folder wrote."""
    try:
        document = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return set()
    if not isinstance(document, dict) or document.get("kind") != KIND:
        return set()
    return {name for name in NAMES if name in document.get("files", [])}


def write_files(folder: Path, document: dict[str, Any]) -> tuple[list[Path], str]:
    """Write every file; those of an earlier inspection that this one has not are removed.

    Args:
        folder: from `prepare_folder`.
        document: from `inspect_prompt`.

    Returns:
        The files, and what had to be left out, if anything.
    """
    from twoaxis.inspection.page import page

    earlier, left_out = _ours(folder / "inspect.json"), ""
    try:
        from twoaxis.inspection.plots import FORMATS, figures

        drawn = {f"{name}.{form}": (figure, form) for name, figure in figures(document).items() for form in FORMATS}
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        drawn, left_out = {}, "no figures: matplotlib is not installed; install twoaxis with its extra [report]"
    names = [name for name in NAMES if name in drawn or name.startswith("inspect.")]
    # the record comes first and names old and new, so that whatever is interrupted the files are known as ours
    record = {**document, "files": sorted({*names, *earlier})}
    _write(folder / "inspect.json", lambda to: to.write_text(_json(record), encoding="utf-8"))
    for name in earlier - set(names):
        (folder / name).unlink(missing_ok=True)
    html = page(document)
    _write(folder / "inspect.html", lambda to: to.write_text(html, encoding="utf-8"))
    for name, (figure, form) in drawn.items():
        _write(folder / name, lambda to, figure=figure, form=form: figure.savefig(to, format=form, dpi=120))
    record = {**document, "files": names}
    _write(folder / "inspect.json", lambda to: to.write_text(_json(record), encoding="utf-8"))
    return [folder / name for name in names], left_out


def _json(document: dict[str, Any]) -> str:
    return json.dumps(document, allow_nan=False) + "\n"


def _write(path: Path, make: Callable[[Path], Any]) -> None:
    """Let `make` write a file beside `path`, then move it there."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        make(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
