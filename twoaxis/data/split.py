"""Which documents there are, and which of them are held out.

    sources --> hash of each text --> training or held out

A document's side depends on its own content alone, so adding documents moves no other, and a document that is there
twice counts once: no held-out document can be in the training part. If no document falls on a side, the nearest one is
taken. A single document is cut: its last part is held out, and one context of tokens before the cut is not trained on.

Reading and hashing all documents takes long, so what was learnt is kept by the paths, sizes and times of change of
their files, and is good for as long as these stay as they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from twoaxis.base.files import FileError, read_json, short_hash, write_json
from twoaxis.data.sources import Document, Skipped, list_sources, read_sources

if TYPE_CHECKING:
    from twoaxis.data.options import DataOptions

Watch = Callable[[str, int, int], None]
"""Called with what is done, how much of it and how much there is, in bytes of text."""
SETTLED = 2 * 10**9
"""Nanoseconds for which a file must have been left alone before its time of change proves that it is the same."""


class Entry(NamedTuple):
    """A document: the hash of its text, its bytes and whether it is held out."""

    hash: bytes
    size: int
    held_out: bool


class Findings(NamedTuple):
    """What a survey says of the documents together."""

    text_hash: str  # stands for every text and its side
    cut: int | None  # characters of the head of a single document, or None
    duplicates: int  # documents left out because the same text came before
    skipped: dict[str, int]  # what the sources passed over


def split_position(content: bytes) -> float:
    """Where the hash of a document puts it between 0 and 1; those below `held_out` are held out."""
    return int.from_bytes(hashlib.sha256(b"side" + content).digest()[:8], "big") / 2**64


def sides(hashes: Sequence[bytes], held_out: float) -> list[bool]:
    """Which of two or more different documents are held out; at least one is and one is not."""
    positions = [split_position(content) for content in hashes]
    below = [position < held_out for position in positions]
    if not any(below):
        below[positions.index(min(positions))] = True
    elif all(below):
        below[positions.index(max(positions))] = False
    return below


def find_cut(text: str, held_out: float) -> int:
    """Where to cut a single document: at the line end that follows, if one does before half of the tail is lost."""
    place = len(text) - max(1, round(len(text) * held_out))
    line = text.find("\n", place, place + (len(text) - place) // 2)
    return line + 1 if line >= 0 else place


class Survey(NamedTuple):
    """Documents that were read once, and can be read again."""

    options: DataOptions
    entries: list[Entry]  # in order; of a single document its head and its tail
    findings: Findings

    def read(self, what: str, watch: Watch, *, training: bool = False) -> Iterator[tuple[str, Entry]]:
        """All documents, or those for training, which must not have changed.

        `watch` is called with each when the next one is asked for.
        """
        seen: set[bytes] = set()
        expected, cut = iter(self.entries), self.findings.cut
        done, total = 0, sum(entry.size for entry in self.entries if not (training and entry.held_out))
        for document in read_sources(self.options.data, self.options.text_field, Counter()):
            hashed = hashlib.sha256(document.text.encode()).digest()
            if hashed in seen:
                continue
            seen.add(hashed)
            for text in [document.text] if cut is None else [document.text[:cut], document.text[cut:]]:
                entry = next(expected, None)
                if entry is None or hashlib.sha256(text.encode()).digest() != entry.hash:
                    raise ValueError(f"{document.name} changed while it was read; start again")
                if not (training and entry.held_out):
                    yield text, entry
                    done += entry.size
                    watch(what, done, total)
        if next(expected, None) is not None:
            raise ValueError("documents vanished while they were read; start again")


def survey(options: DataOptions) -> Survey:
    """Read every document once."""
    sizes: dict[bytes, int] = {}
    duplicates, skipped, last = 0, Skipped(), Document("", "")
    for document in read_sources(options.data, options.text_field, skipped):
        content = document.text.encode()
        hashed = hashlib.sha256(content).digest()
        if hashed in sizes:
            duplicates += 1
        else:
            sizes[hashed] = len(content)
            last = document
    cut = None
    if len(sizes) > 1:
        held = sides(list(sizes), options.held_out)
        entries = [Entry(*known, side) for known, side in zip(sizes.items(), held, strict=True)]
    else:
        cut = find_cut(last.text, options.held_out)
        if not 0 < cut < len(last.text):
            raise ValueError(
                f"{last.name} has {len(last.text)} characters, too few to hold {options.held_out:.0%} of it out"
            )
        parts = {False: last.text[:cut].encode(), True: last.text[cut:].encode()}
        entries = [Entry(hashlib.sha256(part).digest(), len(part), side) for side, part in parts.items()]
    text_hash = hashlib.sha256(b"".join(entry.hash + bytes([entry.held_out]) for entry in entries)).hexdigest()
    return Survey(options, entries, Findings(text_hash, cut, duplicates, dict(+skipped)))


class Memory:
    """The findings of earlier surveys of some data, text_field and held_out, one small file each."""

    def __init__(self, folder: Path, options: DataOptions) -> None:
        now = time.time_ns()
        listed = list_sources(options.data)
        settings = {"text_field": options.text_field, "held_out": options.held_out}
        self.path = folder / f"{short_hash(settings | {'files': listed})}.json"
        # A file that changed a moment ago may change again without a new time, which file systems count in ticks.
        self.settled = all(stamp < now - SETTLED for _, *stamps in listed for stamp in stamps[1:])

    def recall(self) -> Findings | None:
        """The findings for files that are as they were, if they are known."""
        known = read_sealed(self.path)
        return None if known is None else Findings(**known)

    def keep(self, findings: Findings) -> None:
        """Remember findings; a cache that cannot be written costs time only."""
        if self.settled:
            with contextlib.suppress(FileError):
                write_json(self.path, sealed(findings._asdict()))


def sealed(values: dict[str, Any]) -> dict[str, Any]:
    """A JSON document with a hash of itself."""
    return values | {"seal": short_hash(values)}


def read_sealed(path: Path) -> dict[str, Any] | None:
    """What `sealed` made, or None if it is missing or damaged."""
    try:
        values = read_json(path)
        seal = values.pop("seal")
        return values if seal == short_hash(values) else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
