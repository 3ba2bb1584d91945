"""Documents, split and tokenised once, as arrays on the disk.

    survey of the documents --train--> tokenizer --encode--> CACHE/<key>/

    CACHE/<key>/train.bin, held_out.bin          tokens one after another, uint8, 16 or 32
    CACHE/<key>/train.starts.bin, ...            where each document begins, int64
    CACHE/<key>/held_out.sizes.bin               bytes of UTF-8 that each held-out token stands for, uint32
    CACHE/<key>/tokenizer/                       the tokenizer, if it was trained here
    CACHE/<key>/corpus.json                      written last: numbers, size and SHA-256 of each file, a hash of itself
    CACHE/surveys/                               findings of surveys, for files that are as they were

The key stands for every document's content, the tokenizer and the split. A folder is built beside its place and
renamed; a second process that wants the same waits for the first. A folder that is damaged is built again. Whether it
is, is judged by corpus.json, the sizes of all files and the contents of all but the large arrays; those are hashed when
a caller asks for it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from twoaxis.base.files import atomic_folder, claim, file_sha256, remove_partial, short_hash, user_path, write_json
from twoaxis.base.machine import versions
from twoaxis.data.options import bpe_size
from twoaxis.data.sources import check_outside
from twoaxis.data.split import Entry, Findings, Memory, Survey, Watch, read_sealed, sealed, survey
from twoaxis.data.tokenizer import Tokenizer, load_tokenizer, train_bpe

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from twoaxis.data.options import DataOptions

FORMAT = 2
"""Of the folder."""
BATCH = 2**20
"""Characters that are tokenised between two reports."""
SMALL = 2**20
"""Bytes of an array that is hashed whenever a corpus is opened, which takes a millisecond."""


class Part:
    """The tokens of one side, train or held_out, mapped from the disk; a process it is handed to maps them anew."""

    def __init__(self, folder: Path, name: str, dtype: str) -> None:
        self.source = folder, name, dtype
        self.tokens: NDArray[Any] = np.memmap(folder / f"{name}.bin", dtype=dtype, mode="r")
        self.starts: NDArray[np.int64] = np.fromfile(folder / f"{name}.starts.bin", dtype="<i8")

    def __reduce__(self) -> tuple[type[Part], tuple[Path, str, str]]:
        return Part, self.source


class Corpus(NamedTuple):
    """A tokenised corpus."""

    train: Part  # tokens to train on
    held_out: Part  # tokens to evaluate on
    sizes: NDArray[Any]  # bytes that each held-out token stands for
    tokenizer: Tokenizer  # what made them
    findings: Findings  # of the survey of its documents
    facts: dict[str, Any]  # corpus.json
    folder: Path  # where all of it is


def cache_folder(given: str | None) -> Path:
    """The folder of tokenised data: as given, or `twoaxis` in the user's cache folder."""
    if given is not None:
        return user_path(given)
    base = os.environ.get("XDG_CACHE_HOME") or ""
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "twoaxis" / "data"


def open_corpus(options: DataOptions, *, watch: Watch | None = None, check: bool = False) -> Corpus:
    """The tokenised corpus of some sources, from the cache or built into it, with `watch` called meanwhile.

    With `check` documents are read and every file is hashed, instead of trusting times of change and sizes.
    """
    if not options.held_out > 0:
        raise ValueError(f"held_out is {options.held_out}: nothing would be left to evaluate on; 0.05 is usual")
    tokenizer = None if bpe_size(options.tokenizer) else load_tokenizer(options.tokenizer)
    trained = f"{options.tokenizer} tokenizers {versions()['tokenizers']}"
    recipe = trained if tokenizer is None else tokenizer.key
    root = cache_folder(options.cache)
    check_outside(root, options.data, "the cache")

    def place(findings: Findings) -> Path:
        return root / short_hash({"format": FORMAT, "text": findings.text_hash, "tokenizer": recipe})

    memory = Memory(root / "surveys", options)
    findings = None if check else memory.recall()
    facts = None if findings is None else _facts(place(findings))
    if findings is None or facts is None:
        surveyed = survey(options)
        findings = surveyed.findings
        memory.keep(findings)
        facts = _facts(place(findings), check=check)
        if facts is None:
            watched = (lambda what, done, total: None) if watch is None else watch
            facts = _build(place(findings), surveyed, tokenizer, watched, check=check)
    folder = place(findings)
    if tokenizer is None:
        tokenizer = load_tokenizer(folder / "tokenizer")
        tokenizer.name = options.tokenizer
    sizes = np.memmap(folder / "held_out.sizes.bin", dtype="<u4", mode="r")
    train, held = (Part(folder, part, facts["dtype"]) for part in ("train", "held_out"))
    return Corpus(train, held, sizes, tokenizer, findings, facts, folder)


def _facts(folder: Path, *, check: bool = False, say: bool = False) -> dict[str, Any] | None:
    """The facts of a finished folder, or None if it is missing or damaged; `say` tells stderr what is wrong with it."""
    facts, damaged = read_sealed(folder / "corpus.json"), "corpus.json"
    if facts is not None and facts["name"] == folder.name:
        files = facts["files"].items()
        damaged = next((name for name, known in files if not _same(folder / name, known, check=check)), None)
    if damaged and say and folder.exists():
        print(f"twoaxis: {folder / damaged} is damaged; the data is tokenised again", file=sys.stderr)
    return None if damaged else facts


def _same(path: Path, known: tuple[int, str], *, check: bool) -> bool:
    """Whether a file has the size and the hash that are known of it."""
    size, hashed = known
    try:
        if path.stat().st_size != size:
            return False
        large = path.suffix == ".bin" and size > SMALL
        return (large and not check) or file_sha256(path) == hashed
    except (ValueError, OSError):
        return False


def _build(
    folder: Path, documents: Survey, tokenizer: Tokenizer | None, watch: Watch, *, check: bool
) -> dict[str, Any]:
    """Build a corpus in the place of what may be left of it, unless another process does; returns its facts."""
    with claim(folder, wait=True, beside=True):
        facts = _facts(folder, check=check, say=True)
        if facts is not None:
            return facts
        remove_partial(folder.parent, folder.name)  # of a builder that was killed; others may be building theirs
        if folder.is_file():
            folder.unlink()
        with atomic_folder(folder, replace=True) as partial:
            facts = _fill(partial, documents, tokenizer, watch) | {"name": folder.name}
            files = sorted(path for path in partial.rglob("*") if path.is_file())
            names = {path: path.relative_to(partial).as_posix() for path in files}
            facts["files"] = {names[path]: [path.stat().st_size, file_sha256(path)] for path in files}
            write_json(partial / "corpus.json", sealed(facts))
        facts = _facts(folder, check=check)
    if facts is None:
        raise ValueError(f"{folder} is not what was just written there; the disk may be failing")
    return facts


def _fill(folder: Path, documents: Survey, tokenizer: Tokenizer | None, watch: Watch) -> dict[str, Any]:
    """Write a corpus into its folder, with a tokenizer of its own if none is given; returns numbers of it."""
    if tokenizer is None:
        learned = (text for text, _ in documents.read("tokenizer", watch, training=True))
        tokenizer = train_bpe(learned, bpe_size(documents.options.tokenizer) or 0)
        tokenizer.save(folder / "tokenizer")
    dtype = next(name for name in ("<u1", "<u2", "<u4") if tokenizer.vocab_size <= 256 ** int(name[-1]))
    facts: dict[str, Any] = {"format": FORMAT, "dtype": dtype, "vocab_size": tokenizer.vocab_size}
    starts = {"train": [0], "held_out": [0]}
    with contextlib.ExitStack() as stack:
        names = (*starts, "held_out.sizes")
        files = {name: stack.enter_context(open(folder / f"{name}.bin", "wb")) for name in names}
        for part, texts in _batches(documents.read("tokenise", watch)):
            for tokens in tokenizer.encode(texts, sizes=part == "held_out"):
                files[part].write(tokens.ids.astype(dtype).tobytes())
                files["held_out.sizes"].write(tokens.sizes.astype("<u4").tobytes())  # nothing for the training part
                starts[part].append(starts[part][-1] + len(tokens.ids))
    for part, (*places, tokens) in starts.items():
        if not tokens:
            raise ValueError(f"the {part.replace('_', '-')} documents have no tokens with {tokenizer.name}")
        np.array(places, dtype="<i8").tofile(folder / f"{part}.starts.bin")
        sizes = [entry.size for entry in documents.entries if entry.held_out is (part == "held_out")]
        facts[part] = {"documents": len(sizes), "bytes": sum(sizes), "tokens": tokens}
    return facts


def _batches(documents: Iterator[tuple[str, Entry]]) -> Iterator[tuple[str, list[str]]]:
    """Part and texts of documents of one side in lots of about `BATCH` characters, for several threads."""
    for part, group in itertools.groupby(documents, lambda document: "held_out" if document[1].held_out else "train"):
        texts: list[str] = []
        length = 0
        for text, _ in group:
            if texts and length + len(text) > BATCH:
                yield part, texts
                texts, length = [], 0
            texts.append(text)
            length += len(text)
        yield part, texts
