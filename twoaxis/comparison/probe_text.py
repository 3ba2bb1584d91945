"""The text of a probe: which documents train, which are held out, and what each data seed draws from them.

    documents, by the hash of their text     h t h t h t h t ...        h held out, t training: no text is both
    seed 0                                   3 held-out documents, training windows in the order of seed 0
    seed 1                                   the next 3,           training windows in the order of seed 1

A data seed is therefore another sample of both: other held-out documents as long as there are enough, and other
training text. Every rung of a seed gets the same training windows in the same order and the same held-out windows.
Learning rates are chosen on training text alone: a seed of their own trains on the first documents of its order and
measures on the last.

A window is `context` tokens from a random place of a document. Of a long document a part is used, from a place that
its hash decides. Where there are few documents, parts of them take the place of documents.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from twoaxis.base.files import short_hash
from twoaxis.comparison.probe_plan import TextFacts
from twoaxis.data.sources import Skipped, read_sources, source_name

if TYPE_CHECKING:
    from twoaxis.data.tokenizer import Tokenizer

PART = 64
"""Characters per token of the context that are used of a document."""
FEW = 16
"""With fewer documents their parts take the place of documents."""
MOST = 2000
"""Documents that are tokenised at most: the first by their hash."""


class ProbeText(NamedTuple):
    """Tokenised documents on two sides.

    Attributes:
        name: where the text comes from.
        context: tokens of a window.
        train: documents to train on.
        held_out: documents to measure on.
        fingerprint: changes if a window could.
        note: what a reader should know; empty if nothing.
    """

    name: str
    context: int
    train: tuple[Tensor, ...]
    held_out: tuple[Tensor, ...]
    fingerprint: str
    note: str

    def training_batch(self, seed: int, step: int, batch: int) -> Tensor:
        """(batch, context) windows of a step: every document once, in an order of the seed's, then all again."""
        rows = []
        for number in range(step * batch, (step + 1) * batch):
            epoch, place = divmod(number, len(self.train))
            rows.append(self._window(self.train[self._order(seed, epoch)[place]], "train", seed, number))
        return torch.stack(rows)

    def held_out_windows(self, seed: int, count: int) -> Tensor:
        """(count, context) windows of the seed's own documents."""
        documents = [self.held_out[(seed * count + number) % len(self.held_out)] for number in range(count)]
        return torch.stack([self._window(d, "held out", seed, number) for number, d in enumerate(documents)])

    def choosing_windows(self, seed: int, count: int) -> Tensor:
        """(count, context) windows to choose a learning rate on: of the training documents, the last of the order."""
        order = self._order(seed, 0)
        documents = [self.train[order[-1 - number % len(order)]] for number in range(count)]
        return torch.stack([self._window(d, "choose", seed, number) for number, d in enumerate(documents)])

    def _order(self, seed: int, epoch: int) -> Tensor:
        return torch.randperm(len(self.train), generator=_generator(self.fingerprint, "order", seed, epoch))

    def shared(self, seeds: Sequence[int], count: int) -> int:
        """How many held-out documents several of the seeds, or several windows of one, share."""
        drawn = Counter((seed * count + number) % len(self.held_out) for seed in seeds for number in range(count))
        return sum(times > 1 for times in drawn.values())

    def _window(self, document: Tensor, side: str, seed: int, number: int) -> Tensor:
        room = len(document) - self.context + 1
        start = int(torch.randint(room, (1,), generator=_generator(self.fingerprint, side, seed, number)))
        return document[start : start + self.context]

    def facts(self) -> TextFacts:
        """For the plan."""
        sides = {"train": len(self.train), "held_out": len(self.held_out)}
        return TextFacts(name=self.name, fingerprint=self.fingerprint, note=self.note, **sides)


def read_text(sources: Sequence[str], tokenizer: Tokenizer, context: int, text_field: str = "text") -> ProbeText:
    """Read, tokenise and divide text.

    Args:
        sources: stdlib, files, folders or hf:DATASET.
        tokenizer: the source's, or bytes.
        context: tokens of a window.
        text_field: where records keep their text.
    """
    if not sources:
        raise ValueError("there is no text to train on: name it with --data")
    name = " + ".join(map(source_name, sources))
    if tasks := [given for given in sources if given.startswith("task:")]:
        raise ValueError(f"{tasks[0]} is no text; a probe asks what a pretrained model gains on text")
    skipped: Skipped = Counter()
    texts = {}
    for document in read_sources(sources, text_field, skipped):
        if document.text.strip():
            texts.setdefault(_hash(document.text), document.text)
    if not texts:
        raise ValueError(f"{name} has no text")
    parts, note = _parts(texts, PART * context)
    encoded = []
    for key in sorted(parts)[:MOST]:
        (document,) = tokenizer.encode([parts[key]], prompt=True)
        if len(document.ids) >= context:
            encoded.append(torch.from_numpy(document.ids))
    held_out, train = tuple(encoded[::2]), tuple(encoded[1::2])
    if not train or not held_out:
        characters = sum(map(len, texts.values()))
        raise ValueError(
            f"{name} is too little text for a context of {context} tokens: of {len(parts):,} documents or parts "
            f"({characters:,} characters) {len(encoded)} have that many tokens, and one to train on and one to hold "
            "out are needed; give more text or a smaller --context"
        )
    counted = hashlib.sha256(torch.cat([*held_out, *train]).numpy().tobytes()).hexdigest()
    fingerprint = short_hash({"tokens": counted, "held_out": [len(d) for d in held_out], "context": context})
    return ProbeText(name, context, train, held_out, fingerprint, note)


def _parts(texts: dict[str, str], size: int) -> tuple[dict[str, str], str]:
    """Documents by hash, long ones cut; or parts of few documents."""
    if len(texts) >= FEW:
        return {key: _cut(key, text, size) for key, text in texts.items()}, ""
    small = max(1, size // 8)
    cut: dict[str, str] = {}
    for text in texts.values():
        for start in range(0, len(text), small):
            piece = text[start : start + small]
            cut.setdefault(_hash(piece), piece)
    count = "1 document" if len(texts) == 1 else f"{len(texts)} documents"
    return cut, f"{count} only: held-out parts stand between training parts of the same document"


def _cut(key: str, text: str, size: int) -> str:
    """A part of a long text, from a line's beginning where there is one."""
    if len(text) <= size:
        return text
    start = int(key[:12], 16) % (len(text) - size)
    line = text.find("\n", start, start + size // 8)
    start = start if line < 0 else line + 1
    return text[start : start + size]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _generator(*parts: Any) -> torch.Generator:
    return torch.Generator().manual_seed(int(short_hash(list(parts)), 16))
