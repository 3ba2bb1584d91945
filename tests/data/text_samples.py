"""Small corpora for the tests of data."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from twoaxis.data.load import TextData
from twoaxis.data.options import DataOptions

WORDS = (
    *("the", "stream", "adds", "along", "depth", "while", "mixers", "look", "back", "over", "a", "window", "of"),
    *("tokens", "größer", "naïve", "你好"),
)


def text(seed: int, words: int) -> str:
    """Words in a random order, with line ends."""
    pick = random.Random(seed)
    return "".join(pick.choice(WORDS) + pick.choice("  \n") for _ in range(words))


def write_folder(folder: Path, documents: int = 40, words: int = 120) -> Path:
    """A folder of small documents."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        (folder / f"{number:03d}.txt").write_text(text(number, words), encoding="utf-8")
    return folder


def settings(folder: Path, *data: str | Path, **changes: Any) -> DataOptions:
    """Options with the cache beside the data."""
    fields: dict[str, Any] = {"tokenizer": "bytes", "context": 32, "held_out": 0.2, "cache": str(folder / "cache")}
    return DataOptions(data=tuple(map(str, data)), **fields | changes)


def load(folder: Path, *data: str | Path, **changes: Any) -> TextData:
    """Text of such options."""
    return TextData(settings(folder, *data, **changes))
