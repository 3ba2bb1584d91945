"""Where text comes from: documents out of files, folders, records, hubs and the interpreter's own library.

    notes.txt, src/            a file is a document; of a folder every file below it, in the order of their names
    facts.jsonl, web.parquet   a record is a document; its text stands in `text_field`
    hf:NAME[:config][@split]   a data set of the Hugging Face hub, or a local folder of one; the split is train
    stdlib                     the modules of the running interpreter's standard library, without their tests

A file that is named must be readable text. In folders, what is hidden, empty or no text is passed over and counted, and
so are links to other folders. Nothing is kept in memory: a source is read again for each pass over it.
"""

from __future__ import annotations

import difflib
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from twoaxis.base.files import file_errors
from twoaxis.model.evaluate import Document, read_documents

RECORDS = (".jsonl", ".ndjson", ".parquet")
"""Ends of the names of files whose records are documents."""
NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload"})
"""Folders of the standard library that are not read."""

Skipped = Counter[str]
"""How much was passed over, by kind: hidden, empty, binary, linked (folders) and special (sockets, broken links)."""


def source_name(spec: str) -> str:
    """What tables call a source: `stdlib`, `hf:...`, `file notes.txt` or `folder notes`."""
    if spec == "stdlib" or spec.startswith(("hf:", "task:")):
        return spec
    path = Path(spec).expanduser()
    return f"{'folder' if path.is_dir() else 'file'} {path.resolve().name}"


def read_source(spec: str, text_field: str, skipped: Skipped) -> Iterator[Document]:
    """The documents of a source, in an order that depends on their names only.

    Args:
        spec: see above.
        text_field: where records keep their text.
        skipped: counts what is passed over.
    """
    if spec == "stdlib":
        yield from _library(skipped)
    elif spec.startswith("hf:"):
        yield from _hub(spec, text_field, skipped)
    else:
        path = Path(spec).expanduser()
        if path.is_dir():
            yield from _folder(path, text_field, skipped)
        elif not path.exists():
            raise ValueError(f"there is no file or folder {spec}{_hint(spec)}")
        elif path.suffix.lower() in RECORDS:
            yield from _records(path, text_field, skipped)
        else:
            yield from read_documents([path])


def _hint(spec: str) -> str:
    close = difflib.get_close_matches(spec.partition(":")[0].lower(), ("stdlib", "task", "hf"), n=1)
    if close:
        meant = close[0] if close[0] == "stdlib" else f"{close[0]}:{spec.partition(':')[2] or 'NAME'}"
        return f" (did you mean {meant!r}?)"
    return "; data is stdlib, files, folders, hf:DATASET or task:NAME"


def _folder(path: Path, text_field: str, skipped: Skipped) -> Iterator[Document]:
    found, before = 0, Counter(skipped)
    for file in _files(path, skipped):
        if file.suffix.lower() in RECORDS:
            for document in _records(file, text_field, skipped, named=False):
                found += 1
                yield document
            continue
        text = _text(file, skipped)
        if text is not None:
            found += 1
            yield Document(str(file), text)
    if not found:
        passed = tell_skipped(skipped - before)
        raise ValueError(f"the folder {path} has no files with text" + (f": {passed} passed over" if passed else ""))


def _files(path: Path, skipped: Skipped) -> list[Path]:
    """Every file below a folder by name; a hidden folder counts once and is not looked into."""

    def refuse(error: OSError) -> None:
        raise error

    found = []
    with file_errors(path, "read"):
        for where, folders, names in os.walk(path, onerror=refuse):
            shown = [name for name in folders if not name.startswith(".")]
            skipped["hidden"] += len(folders) - len(shown) + sum(name.startswith(".") for name in names)
            skipped["linked"] += sum(Path(where, name).is_symlink() for name in shown)  # walking them may never end
            folders[:] = shown
            found += [Path(where, name) for name in names if not name.startswith(".")]
    files = [file for file in found if file.is_file()]
    skipped["special"] += len(found) - len(files)
    return sorted(files, key=lambda file: file.relative_to(path).parts)


def _text(file: Path, skipped: Skipped) -> str | None:
    """The text of a file of a folder, or None and a count."""
    with file_errors(file, "read"):
        data = file.read_bytes()
    if not data:
        skipped["empty"] += 1
        return None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        skipped["binary"] += 1
        return None
    return text


def _library(skipped: Skipped) -> Iterator[Document]:
    """Modules of the standard library by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for where, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_LIBRARY and not name.startswith((".", "config-"))]
        files += [Path(where, name) for name in names if name.endswith(".py")]
    found = 0
    for file in sorted(files, key=lambda file: file.relative_to(root).parts):
        text = _text(file, skipped)
        if text is not None:
            found += 1
            yield Document(file.relative_to(root).as_posix(), text)
    if not found:
        raise ValueError(f"this Python keeps no readable standard library in {root}; name other data")


def _records(path: Path, text_field: str, skipped: Skipped, *, named: bool = True) -> Iterator[Document]:
    """Documents of a jsonl or parquet file.

    Args:
        path: the file.
        text_field: where its records keep their text.
        skipped: counts records without text.
        named: whether the user named this very file, so that it must have a text.
    """
    found = 0
    rows = _parquet(path, text_field) if path.suffix.lower() == ".parquet" else _jsonl(path, text_field)
    for place, text in rows:
        checked = _record_text(text, f"{path}, {place}", text_field, skipped)
        if checked is not None:
            found += 1
            yield Document(f"{path}, {place}", checked)
    if named and not found:
        raise ValueError(f"{path} has no record with text in its field {text_field!r}")


def _record_text(text: Any, place: str, text_field: str, skipped: Skipped) -> str | None:
    """The text of a record, or None and a count where it has none."""
    if text is None or text == "":
        skipped["empty"] += 1
        return None
    if not isinstance(text, str):
        raise ValueError(f"{place}: the field {text_field!r} is {type(text).__name__}, not text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        text = "\0"
    if "\0" in text:
        skipped["binary"] += 1
        return None
    return text


def _jsonl(path: Path, text_field: str) -> Iterator[tuple[str, Any]]:
    with file_errors(path, "read"), open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}, is not a JSON record: {error}") from error
            if not isinstance(record, dict):
                raise ValueError(f"{path}, line {number}, is {type(record).__name__}, not a record with fields")
            if text_field not in record:
                raise ValueError(_no_field(f"{path}, line {number},", text_field, list(record)))
            yield f"line {number}", record[text_field]


def _parquet(path: Path, text_field: str) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ValueError(f"{path} needs pyarrow, which is not installed; it comes with datasets") from error
    number = 0
    with file_errors(path, "read"):
        try:
            file = pyarrow.parquet.ParquetFile(path)
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{path} is not a parquet file: {error}") from error
        with file:
            if text_field not in file.schema_arrow.names:
                raise ValueError(_no_field(str(path), text_field, file.schema_arrow.names))
            for batch in file.iter_batches(batch_size=1024, columns=[text_field]):
                for text in batch.column(0).to_pylist():
                    number += 1
                    yield f"row {number}", text


def _no_field(place: str, wanted: str, fields: list[str]) -> str:
    close = difflib.get_close_matches(wanted, fields, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return (
        f"{place} has no field {wanted!r}{hint}; its fields are {', '.join(fields) or 'none'}: choose one as text_field"
    )


def _hub(spec: str, text_field: str, skipped: Skipped) -> Iterator[Document]:
    """Records of a data set of the hub; its code, if it has any, is never run."""
    name, config, split = parse_hub(spec)
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ValueError(f"{spec} needs datasets, which is not installed: pip install datasets") from error
    datasets.disable_progress_bars()
    try:
        loaded: Any = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the library and the connection below it raise many kinds
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{spec} cannot be loaded: {first}; it is fetched over the network unless it is in the local cache"
        ) from error
    if text_field not in loaded.column_names:
        raise ValueError(_no_field(spec, text_field, loaded.column_names))
    found = 0
    for number, record in enumerate(loaded.select_columns([text_field]), start=1):
        place = f"{spec}, row {number}"
        text = _record_text(record[text_field], place, text_field, skipped)
        if text is not None:
            found += 1
            yield Document(place, text)
    if not found:
        raise ValueError(f"{spec} has no record with text in its field {text_field!r}")


def parse_hub(spec: str) -> tuple[str, str | None, str]:
    """`hf:NAME[:config][@split]` as name, configuration and split."""
    rest, at, split = spec.removeprefix("hf:").partition("@")
    name, colon, config = rest.partition(":")
    if not name or (colon and not config) or (at and not split):
        raise ValueError(f"{spec!r} names no data set; write hf:NAME, hf:NAME:CONFIG, or either with @SPLIT")
    return name, config or None, split or "train"


def tell_skipped(skipped: Skipped) -> str:
    """As `3 hidden, 1 binary`."""
    return ", ".join(f"{count:,} {kind}" for kind, count in sorted(skipped.items()) if count)
