"""Documents, split and tokenised once, as arrays on the disk.

    sources --survey--> (hash, side) of each document --train--> tokenizer --encode--> CACHE/<key>/

    CACHE/<key>/train.bin, held_out.bin    tokens one after another, uint8, 16 or 32
    CACHE/<key>/train.starts.npy, ...      where each document begins
    CACHE/<key>/held_out.sizes.bin         bytes of UTF-8 that each held-out token stands for, uint32
    CACHE/<key>/tokenizer/                 the tokenizer, if it was trained here
    CACHE/<key>/corpus.json                written last: numbers, and the size and SHA-256 of each file

The key stands for every document's content, the tokenizer and the split. A folder is built beside its place and
renamed; a second process that wants the same waits for the first. A folder whose files are not what they were is built
again.

A document's side depends on its own content alone, so adding documents moves no other, and a document that is there
twice counts once: no held-out document can be in the training part. If no document falls on a side, the nearest one is
taken. A single document is cut: its last part is held out, and one context of tokens before the cut is not trained on.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from twoaxis.base.files import PARTIAL, atomic_folder, claim, read_json, short_hash, write_json
from twoaxis.data import tokenizer as tokenizing
from twoaxis.data.sources import Skipped, read_source
from twoaxis.model.evaluate import Document

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMAT = 1
"""Of the folder."""
BATCH = 2**20
"""Characters that are tokenised between two reports."""

Watch = Callable[[str, int, int], None]
"""Called with what is done, how much of it and how much there is, in bytes of text."""


class Entry(NamedTuple):
    """A document of a survey: the hash of its text, its bytes and whether it is held out."""

    hash: bytes
    size: int
    held_out: bool


class Survey(NamedTuple):
    """What the sources hold.

    Attributes:
        entries: the documents in order; of a single one, its head and its tail.
        cut: characters of the head of a single document, or None.
        duplicates: documents left out because the same text came before.
        skipped: what the sources passed over.
    """

    entries: list[Entry]
    cut: int | None
    duplicates: int
    skipped: Skipped

    @property
    def hash(self) -> str:
        """Stands for every text and its side."""
        hashed = hashlib.sha256()
        for entry in self.entries:
            hashed.update(entry.hash + bytes([entry.held_out]))
        return hashed.hexdigest()


def share(content: bytes) -> float:
    """Where the hash of a document puts it between 0 and 1; those below `held_out` are held out."""
    return int.from_bytes(hashlib.sha256(b"side" + content).digest()[:8], "big") / 2**64


def sides(hashes: Sequence[bytes], held_out: float) -> list[bool]:
    """Which documents are held out; at least one is and one is not.

    Args:
        hashes: of two or more different documents.
        held_out: the part to hold out.
    """
    shares = [share(content) for content in hashes]
    below = [value < held_out for value in shares]
    if not any(below):
        below[shares.index(min(shares))] = True
    elif all(below):
        below[shares.index(max(shares))] = False
    return below


def survey(data: Sequence[str], text_field: str, held_out: float) -> Survey:
    """Read every document once, for its hash and its side.

    Args:
        data: the sources.
        text_field: where records keep their text.
        held_out: the part to hold out.
    """
    if not held_out > 0:
        raise ValueError(f"held_out is {held_out}: nothing would be left to evaluate on; 0.05 is usual")
    hashes: dict[bytes, int] = {}
    duplicates, skipped, last = 0, Counter[str](), None
    for document in _read(data, text_field, skipped):
        content = document.text.encode()
        hashed = hashlib.sha256(content).digest()
        if hashed in hashes:
            duplicates += 1
        else:
            hashes[hashed] = len(content)
            last = document
    if len(hashes) > 1:
        held = sides(list(hashes), held_out)
        entries = [Entry(h, size, side) for (h, size), side in zip(hashes.items(), held, strict=True)]
        return Survey(entries, None, duplicates, skipped)
    assert last is not None  # a source without documents is an error of its own
    cut = find_cut(last.text, held_out)
    if not 0 < cut < len(last.text):
        raise ValueError(f"{last.name} has {len(last.text)} characters, too few to hold {held_out:.0%} of it out")
    head, tail = last.text[:cut].encode(), last.text[cut:].encode()
    entries = [Entry(hashlib.sha256(p).digest(), len(p), p is tail) for p in (head, tail)]
    return Survey(entries, cut, duplicates, skipped)


def find_cut(text: str, held_out: float) -> int:
    """Where to cut a single document: at the line end that follows, if one does before half of the tail is lost."""
    place = len(text) - max(1, round(len(text) * held_out))
    line = text.find("\n", place, place + (len(text) - place) // 2)
    return line + 1 if line >= 0 else place


def _read(data: Sequence[str], text_field: str, skipped: Skipped) -> Iterator[Document]:
    for spec in data:
        yield from read_source(spec, text_field, skipped)


def _again(data: Sequence[str], text_field: str, found: Survey) -> Iterator[tuple[str, Entry]]:
    """The documents of a survey once more, which must not have changed."""
    seen: set[bytes] = set()
    entries = iter(found.entries)
    for document in _read(data, text_field, Counter()):
        hashed = hashlib.sha256(document.text.encode()).digest()
        if hashed in seen:
            continue
        seen.add(hashed)
        texts = [document.text] if found.cut is None else [document.text[: found.cut], document.text[found.cut :]]
        for text in texts:
            entry = next(entries, None)
            if entry is None or hashlib.sha256(text.encode()).digest() != entry.hash:
                raise ValueError(f"{document.name} changed while it was read; start again")
            yield text, entry
    if next(entries, None) is not None:
        raise ValueError("documents vanished while they were read; start again")


class Part:
    """The tokens of one side, mapped from the disk; may be handed to another process, which maps them anew.

    Args:
        folder: of the corpus.
        name: train or held_out.
        dtype: of a token.
    """

    def __init__(self, folder: Path, name: str, dtype: str) -> None:
        self.folder, self.name, self.dtype = folder, name, dtype
        self._open()

    def _open(self) -> None:
        self.tokens: NDArray[Any] = np.memmap(self.folder / f"{self.name}.bin", dtype=self.dtype, mode="r")
        self.starts: NDArray[np.int64] = np.load(self.folder / f"{self.name}.starts.npy", allow_pickle=False)

    def __getstate__(self) -> tuple[Path, str, str]:
        return self.folder, self.name, self.dtype

    def __setstate__(self, state: tuple[Path, str, str]) -> None:
        self.folder, self.name, self.dtype = state
        self._open()


class Corpus(NamedTuple):
    """A tokenised corpus.

    Attributes:
        train: tokens to train on.
        held_out: tokens to evaluate on.
        sizes: bytes that each held-out token stands for.
        tokenizer: what made them.
        cut: whether both parts are of one document.
        facts: corpus.json.
        folder: where all of it is.
    """

    train: Part
    held_out: Part
    sizes: NDArray[Any]
    tokenizer: tokenizing.Tokenizer
    cut: bool
    facts: dict[str, Any]
    folder: Path


def cache_folder(given: str | None) -> Path:
    """The folder of tokenised data: as given, or `twoaxis` in the user's cache folder."""
    if given is not None:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or ""
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "twoaxis" / "data"


def open_corpus(
    data: Sequence[str],
    *,
    tokenizer: str,
    text_field: str,
    held_out: float,
    cache: str | None = None,
    watch: Watch | None = None,
) -> Corpus:
    """The tokenised corpus of some sources, from the cache or built into it.

    Args:
        data: the sources.
        tokenizer: bytes, bpe:SIZE, or the name of one.
        text_field: where records keep their text.
        held_out: part of the documents to hold out.
        cache: where tokenised data is kept; see `cache_folder`.
        watch: told of the progress of building.
    """
    loaded = tokenizing.load(tokenizer)
    found = survey(data, text_field, held_out)
    name = short_hash({"format": FORMAT, "text": found.hash, "tokenizer": tokenizing.key(tokenizer, loaded)})
    root = cache_folder(cache)
    folder = root / name
    facts = _whole(folder)
    if facts is None:
        with claim(root / "locks" / name, wait=True):
            facts = _whole(folder, say=True)  # another process may have built it meanwhile
            if facts is None:
                _sweep(root, name)
                if folder.is_file():
                    folder.unlink()
                with atomic_folder(folder, replace=True) as made:
                    _build(made, _Job(data, text_field, tokenizer, loaded, found, _silent if watch is None else watch))
                facts = _whole(folder)
    if facts is None:
        raise ValueError(f"{folder} is not what was just written there; the disk may be failing")
    if loaded is None:
        loaded = tokenizing.Pretrained(tokenizing.load_pretrained(folder / "tokenizer"), tokenizer)
    facts = facts | {"duplicates": found.duplicates, "skipped": dict(+found.skipped), "text_hash": found.hash}
    sizes = np.memmap(folder / "held_out.sizes.bin", dtype="<u4", mode="r")
    train, held = (Part(folder, part, facts["dtype"]) for part in ("train", "held_out"))
    return Corpus(train, held, sizes, loaded, found.cut is not None, facts, folder)


class _Job(NamedTuple):
    """What is needed to build."""

    data: Sequence[str]
    text_field: str
    spec: str
    loaded: tokenizing.Tokenizer | None
    found: Survey
    watch: Watch


def _silent(what: str, done: int, total: int) -> None:
    pass


def _whole(folder: Path, *, say: bool = False) -> dict[str, Any] | None:
    """The facts of a finished folder, or None if it is missing or its files are not what they were.

    Args:
        folder: the folder.
        say: on stderr what is wrong with it.
    """
    wrong = f"{folder} cannot be read"
    try:
        facts = read_json(folder / "corpus.json")
        for name, (size, hashed) in facts["files"].items():
            path = folder / name
            if path.stat().st_size != size or _hash(path) != hashed:
                wrong = f"{path} is not what was written there"
                break
        else:
            return facts
    except (ValueError, TypeError, KeyError, AttributeError, OSError):
        pass  # whatever the reason, it can be built again
    if say and folder.exists():
        print(f"twoaxis: {wrong}; the data is tokenised again", file=sys.stderr)
    return None


def _sweep(root: Path, name: str) -> None:
    """Remove what a killed builder of this very corpus left; others may be building theirs."""
    for left in root.glob(f".{name}{PARTIAL}*"):
        shutil.rmtree(left, ignore_errors=True)


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _build(folder: Path, job: _Job) -> None:
    """Fill the folder of a corpus."""
    entries = job.found.entries
    if job.loaded is None:
        size = tokenizing.check_spelling(job.spec)
        assert size is not None
        tokenizer: tokenizing.Tokenizer = tokenizing.train_bpe(_training_texts(job), size)
        tokenizer.save(folder / "tokenizer")
    else:
        tokenizer = job.loaded
    dtype = next(name for name in ("<u1", "<u2", "<u4") if tokenizer.vocabulary <= 256 ** int(name[-1]))
    counts = _encode(folder, job, tokenizer, dtype)
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    parts = {
        part: {
            "documents": sum(entry.held_out is held for entry in entries),
            "bytes": sum(entry.size for entry in entries if entry.held_out is held),
            "tokens": counts[part],
        }
        for part, held in (("train", False), ("held_out", True))
    }
    facts = {
        "format": FORMAT,
        "dtype": dtype,
        "vocabulary": tokenizer.vocabulary,
        **parts,
        "files": {name: [(folder / name).stat().st_size, _hash(folder / name)] for name in files},
    }
    write_json(folder / "corpus.json", facts)


def _training_texts(job: _Job) -> Iterator[str]:
    total = sum(entry.size for entry in job.found.entries if not entry.held_out)
    done = 0
    for text, entry in _again(job.data, job.text_field, job.found):
        if not entry.held_out:
            yield text
            done += entry.size
            job.watch("tokenizer", done, total)


def _encode(folder: Path, job: _Job, tokenizer: tokenizing.Tokenizer, dtype: str) -> dict[str, int]:
    """Write the tokens of both parts; returns how many."""
    counts, starts = {"train": 0, "held_out": 0}, {"train": [0], "held_out": [0]}
    total, done = sum(entry.size for entry in job.found.entries), 0
    with (
        open(folder / "train.bin", "wb") as train,
        open(folder / "held_out.bin", "wb") as held,
        open(folder / "held_out.sizes.bin", "wb") as sizes,
    ):
        files: dict[str, BinaryIO] = {"train": train, "held_out": held}
        for texts, entries in _batches(_again(job.data, job.text_field, job.found)):
            part = "held_out" if entries[0].held_out else "train"
            for tokens in tokenizer.encode(texts, sizes=part == "held_out"):
                _check(tokens.ids, tokenizer)
                files[part].write(tokens.ids.astype(dtype).tobytes())
                if tokens.sizes is not None:
                    sizes.write(tokens.sizes.astype("<u4").tobytes())
                counts[part] += len(tokens.ids)
                starts[part].append(counts[part])
            done += sum(entry.size for entry in entries)
            job.watch("tokenise", done, total)
    for part, places in starts.items():
        np.save(folder / f"{part}.starts.npy", np.array(places[:-1], dtype=np.int64), allow_pickle=False)
        if not counts[part]:
            raise ValueError(f"the {part.replace('_', '-')} documents have no tokens with {tokenizer.name}")
    return counts


def _check(ids: NDArray[np.int64], tokenizer: tokenizing.Tokenizer) -> None:
    if len(ids) and ids.max() >= tokenizer.vocabulary:
        raise ValueError(f"{tokenizer.name} gives token {ids.max()}, beyond its vocabulary of {tokenizer.vocabulary}")


def _batches(documents: Iterator[tuple[str, Entry]]) -> Iterator[tuple[list[str], list[Entry]]]:
    """Documents of one side in lots of about `BATCH` characters, so that several threads have something to do."""
    texts: list[str] = []
    entries: list[Entry] = []
    length = 0
    for text, entry in documents:
        if texts and (length + len(text) > BATCH or entry.held_out != entries[0].held_out):
            yield texts, entries
            texts, entries, length = [], [], 0
        texts.append(text)
        entries.append(entry)
        length += len(text)
    if texts:
        yield texts, entries
