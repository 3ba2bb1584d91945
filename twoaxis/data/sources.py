"""Where text comes from: documents out of files, folders, records, hubs and the interpreter's own library.

    notes.txt, src/            a file is a document; of a folder every file below it, in the order of their names
    facts.jsonl, web.parquet   a record is a document; its text stands in `text_field`
    hf:NAME[:config][@split]   a data set of the Hugging Face hub, or a local folder of one; the split is train
    stdlib                     the modules of the running interpreter's standard library, without their tests

A file that is named must be readable text. In folders, what is hidden, empty or no text is passed over and counted, and
so are links to other folders. Nothing is kept in memory: a source is read again for each pass over it.
"""

from __future__ import annotations

import json
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from twoaxis.base.files import file_errors, user_path
from twoaxis.base.machine import needs, quiet_logger
from twoaxis.base.registry import did_you_mean

RECORDS = (".jsonl", ".ndjson", ".parquet")
"""Ends of the names of files whose records are documents."""
NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload"})
"""Folders of the standard library that are not read."""

HALF_A_PAIR = re.compile("[\ud800-\udfff]")
"""A surrogate, which JSON can spell alone and UTF-8 cannot."""

Skipped = Counter[str]
"""How much was passed over, by kind: hidden, empty, binary, linked (folders) and special (sockets, broken links)."""


class Document(NamedTuple):
    """A text and where it comes from."""

    name: str
    text: str


def read_sources(specs: Iterable[str], text_field: str, skipped: Skipped) -> Iterator[Document]:
    """The documents of some sources, in an order that depends on their names only; what is passed over is counted."""
    for spec in specs:
        if spec.startswith("hf:"):
            yield from _documents(_hub(spec, text_field), spec, text_field, skipped)
            continue
        count, before = 0, Counter(skipped)
        root, files = _files(spec, skipped)
        for file in files:
            for document in _read(file, root, text_field, skipped):
                count += 1
                yield document
        if not count:
            passed = f": {skipped_text(skipped - before)} passed over" if skipped - before else ""
            raise ValueError(f"the folder {root} has no files with text{passed}")


def list_sources(specs: Iterable[str]) -> list[Any]:
    """What can be known of sources without reading them, as a JSON value that changes if a document does.

    Of a file: its path, size and times of change in nanoseconds; of a data set: the fingerprint that `datasets` gives.
    """
    listed: list[Any] = []
    for spec in specs:
        if spec.startswith("hf:"):
            listed.append([spec, _load_hub(spec)._fingerprint])
            continue
        skipped: Skipped = Counter()
        root, files = _files(spec, skipped)
        listed.append([str(root), dict(+skipped)])
        for file in files:
            with file_errors(file, "read"):
                stat = file.stat()
            listed.append([os.path.abspath(file), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns])
    return listed


def check_outside(place: str | Path, specs: Iterable[str], what: str) -> None:
    """Refuse to write into a folder whose files are the data: they would be other data when they are read again."""
    written = Path(place).resolve()
    for folder in (user_path(spec) for spec in specs if not spec.startswith(("hf:", "task:"))):
        if folder.is_dir() and written.is_relative_to(folder.resolve()):
            between = written.relative_to(folder.resolve()).parts
            if not any(part.startswith(".") for part in between):  # what is hidden is not read
                raise ValueError(f"{what} {place} lies in {folder}, whose files are the data: choose another folder")


def source_name(spec: str) -> str:
    """What tables call a source: `stdlib`, `hf:...`, `file notes.txt` or `folder notes`."""
    if spec == "stdlib" or spec.startswith(("hf:", "task:")):
        return spec
    path = user_path(spec)
    return f"{'folder' if path.is_dir() else 'file'} {path.resolve().name}"


def skipped_text(skipped: Skipped) -> str:
    """As `3 hidden, 1 binary`."""
    return ", ".join(f"{count:,} {kind}" for kind, count in sorted(skipped.items()) if count)


def _files(spec: str, skipped: Skipped) -> tuple[Path | None, list[Path]]:
    """The folder of a source, None for a file that is named, and its files in order."""
    if spec == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        enter = lambda name: name not in NOT_LIBRARY and not name.startswith("config-")  # noqa: E731
        return root, [file for file in _walk(root, Counter(), enter) if file.suffix == ".py"]
    path = user_path(spec)
    if path.is_dir():
        return path, _walk(path, skipped)
    if not path.exists():
        if spec.startswith("task:"):
            raise ValueError(f"{spec} has no text: a task stands alone, where a model is trained or compared")
        near = did_you_mean(spec.partition(":")[0].lower(), ("stdlib", "task", "hf"))
        raise ValueError(
            f"there is no file or folder {spec}{near or '; data is stdlib, files, folders, hf:DATASET or task:NAME'}"
        )
    if not path.is_file():
        raise ValueError(f"{spec} is no regular file, and data is read several times: write it into one")
    return None, [path]


def _walk(root: Path, skipped: Skipped, enter: Callable[[str], bool] = lambda _: True) -> list[Path]:
    """Every file below a folder by name; a hidden folder counts once and is not looked into."""

    def refuse(error: OSError) -> None:
        raise error

    below = []
    with file_errors(root, "read"):
        for where, folders, names in os.walk(root, onerror=refuse):
            shown = [name for name in folders if not name.startswith(".") and enter(name)]
            skipped["hidden"] += sum(name.startswith(".") for name in (*folders, *names))
            skipped["linked"] += sum(Path(where, name).is_symlink() for name in shown)  # walking them may never end
            folders[:] = shown
            below += [Path(where, name) for name in names if not name.startswith(".")]
    files = [file for file in below if file.is_file()]
    skipped["special"] += len(below) - len(files)
    return sorted(files, key=lambda file: file.relative_to(root).parts)


def _read(file: Path, root: Path | None, text_field: str, skipped: Skipped) -> Iterator[Document]:
    """The documents of a file: what is no text is an error in a file that is named, and counted in a folder."""
    if file.suffix.lower() in RECORDS:
        rows = _parquet(file, text_field) if file.suffix.lower() == ".parquet" else _jsonl(file, text_field)
        yield from _documents(rows, str(file), text_field, skipped, named=root is None)
        return
    with file_errors(file, "read"):
        data = file.read_bytes()
    try:
        text = data.decode("utf-8")  # not read_text, which would change line ends and with them the bytes
        problem = "is empty" if not data else f"is not text: byte {data.index(0)} is zero" if "\0" in text else ""
    except UnicodeDecodeError as error:
        text, problem = "", f"is not UTF-8 text: byte {error.start} is {data[error.start]:#04x}"
    if not problem:
        yield Document(str(file), text)
    elif root is None:
        raise ValueError(f"{file} {problem}")
    else:
        skipped["binary" if data else "empty"] += 1


Rows = Iterator[tuple[str, Any]]
"""Where a record stands, and what its text field holds."""


def _documents(rows: Rows, source: str, text_field: str, skipped: Skipped, *, named: bool = True) -> Iterator[Document]:
    """Documents of records; a source that the user named, and not its folder, must have a text."""
    count = 0
    for place, text in rows:
        if text is None or text == "":
            skipped["empty"] += 1
            continue
        if not isinstance(text, str):
            raise ValueError(f"{source}, {place}: the field {text_field!r} is {type(text).__name__}, not text")
        if "\0" in text or HALF_A_PAIR.search(text):
            skipped["binary"] += 1
            continue
        count += 1
        yield Document(f"{source}, {place}", text)
    if named and not count:
        raise ValueError(f"{source} has no record with text in its field {text_field!r}")


def _jsonl(path: Path, text_field: str) -> Rows:
    with file_errors(path, "read"), open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}, is not a JSON record: {error}") from error
            if not isinstance(record, dict):
                raise ValueError(f"{path}, line {number}, is {type(record).__name__}, not a record with fields")
            _check_field(f"{path}, line {number},", text_field, list(record))
            yield f"line {number}", record[text_field]


def _parquet(path: Path, text_field: str) -> Rows:
    """Read as a stream; `datasets` would first write a copy of the text into a cache of its own."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ValueError(f"{path} needs pyarrow, which is not installed; it comes with datasets") from error
    with file_errors(path, "read"):
        try:
            file = pyarrow.parquet.ParquetFile(path)
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{path} is not a parquet file: {error}") from error
        with file:
            _check_field(str(path), text_field, file.schema_arrow.names)
            batches = file.iter_batches(batch_size=1024, columns=[text_field])
            texts = (text for batch in batches for text in batch.column(0).to_pylist())
            yield from ((f"row {number}", text) for number, text in enumerate(texts, start=1))


def _hub(spec: str, text_field: str) -> Rows:
    loaded = _load_hub(spec)
    _check_field(spec, text_field, loaded.column_names)
    for number, record in enumerate(loaded.select_columns([text_field]), start=1):
        yield f"row {number}", record[text_field]


def _load_hub(spec: str) -> Any:
    """A data set of the hub; its code, if it has any, is never run."""
    name, config, split = parse_hub(spec)
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ValueError(needs(spec, "datasets")) from error
    datasets.disable_progress_bars()
    try:
        with quiet_logger("huggingface_hub"):  # which tells of every attempt to reach the hub
            return datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the library and the connection below it raise many kinds
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{spec} cannot be loaded: {first}; it is fetched over the network unless it is in the local cache"
        ) from error


def parse_hub(spec: str) -> tuple[str, str | None, str]:
    """`hf:NAME[:config][@split]` as name, configuration and split."""
    rest, at, split = spec.removeprefix("hf:").partition("@")
    name, colon, config = rest.partition(":")
    if not name or (colon and not config) or (at and not split):
        raise ValueError(f"{spec!r} names no data set; write hf:NAME, hf:NAME:CONFIG, or either with @SPLIT")
    return name, config or None, split or "train"


def _check_field(place: str, wanted: str, fields: list[str]) -> None:
    if wanted not in fields:
        listed = ", ".join(fields) or "none"
        raise ValueError(
            f"{place} has no field {wanted!r}{did_you_mean(wanted, fields)}; its fields are {listed}: choose one as "
            "text_field"
        )
