"""Loss, perplexity and bits per byte of a model on text, with a sliding context.

    context 6, stride 4          tokens  0 1 2 3 4 5 6 7 8 9 ...
    window 0                            [0 1 2 3 4 5]                 counts 1 2 3 4 5
    window 1                                    [4 5 6 7 8 9]         counts         6 7 8 9

Every token after a document's first is counted once. It is predicted from at least `context - stride` and at most
`context - 1` tokens before it in its document, or from all of them where there are fewer. A small stride gives each
token more to go by and costs `context / stride` passes over the text.

Bits per byte divide the same loss by the bytes of UTF-8 that exactly the counted tokens stand for, so that models
with different tokenizers compare. A document's first token has nothing to be predicted from: unless the tokenizer
puts a beginning-of-text token in front of it, neither it nor its bytes count.

Documents are taken as they come and in pieces, so that a text of any length needs the same memory.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.data.tokenizer import Encoded, Tokenizer, pieces
from twoaxis.model.decoder import Decoder, Model
from twoaxis.model.loss import IGNORED

if TYPE_CHECKING:
    from numpy.typing import NDArray

LOGITS = 2**25
"""Logits made at a time: 128 MiB in float32, whatever the vocabulary."""
DEFAULT_CONTEXT = 1024
"""Longest context that is taken when none is given."""
PIECE = 2**17
"""Characters of a document that are encoded at a time: a tokenizer needs some three hundred bytes for each."""
SORTED = 64
"""Passes whose windows are collected, so that those of one length run together."""

Document = Encoded | Iterable[Encoded]
"""The tokens of a document, whole or in consecutive pieces; see `encode_pieces`."""


class Window(NamedTuple):
    """Tokens that are run together, with the bytes each stands for. Those before `first` are there to be seen only:
    counted by the window before, or a document's first."""

    ids: NDArray[np.int64]
    sizes: NDArray[np.int64]
    first: int

    @property
    def counted(self) -> int:
        """How many tokens are counted."""
        return len(self.ids) - self.first


class Evaluation(NamedTuple):
    """What was measured.

    Attributes:
        loss: nats per token.
        perplexity: its exponential; infinite where that is beyond a float.
        bits_per_byte: loss in bits over the bytes of the counted tokens.
        tokens: counted, with the bytes of UTF-8 that they stand for and the documents that have at least one of them.
        context: tokens of a window; its `stride` are those between the starts of two.
        seconds: for the passes, without loading.
    """

    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int
    bytes: int
    documents: int
    context: int
    stride: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens counted per second."""
        return self.tokens / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity: an infinite perplexity is None."""
        finite = self.perplexity if math.isfinite(self.perplexity) else None
        return self._asdict() | {"perplexity": finite, "tokens_per_second": self.rate}


def encode_pieces(tokenizer: Tokenizer, text: str) -> Iterator[Encoded]:
    """The tokens of a document a piece after the other, cut at line ends."""
    for number, piece in enumerate(pieces(text, PIECE)):
        (encoded,) = tokenizer.encode([piece], sizes=True, prompt=True)
        begin = len(tokenizer.begin) if number else 0  # one beginning of text is enough
        yield Encoded(encoded.ids[begin:], encoded.sizes[begin:])


def windows(document: Document, context: int, stride: int) -> Iterator[Window]:
    """The windows over a document; see the drawing above."""
    waiting = iter([document] if isinstance(document, Encoded) else document)
    ids, sizes, first = np.zeros(0, np.int64), np.zeros(0, np.int64), 1
    while True:
        while len(ids) < context and (piece := next(waiting, None)) is not None:
            ids, sizes = np.concatenate([ids, piece.ids]), np.concatenate([sizes, piece.sizes])
        if len(ids) <= first:
            return
        stop = min(context, len(ids))
        yield Window(ids[:stop], sizes[:stop], first)
        if stop < context:  # the document's end
            return
        ids, sizes, first = ids[stride:], sizes[stride:], stop - stride


def jobs(documents: Iterable[Document], context: int, stride: int, most: int | None) -> Iterator[tuple[int, Window]]:
    """The windows over all documents with the number of each document, up to the one with which `most` are counted."""
    left = math.inf if most is None else most
    for number, document in enumerate(documents):
        for window in windows(document, context, stride):
            kept = int(min(window.counted, left)) + window.first
            yield number, Window(window.ids[:kept], window.sizes[:kept], window.first)
            left -= kept - window.first
            if left == 0:
                return


def pick_context(model: Model, context: int | None, stride: int | None) -> tuple[int, int]:
    """Context and stride with their defaults: what the model is made for but at most 1024, and half of the context."""
    if context is None:
        limit: int = model.config.max_position_embeddings
        context = min(DEFAULT_CONTEXT, limit)
    if context < 2:
        raise ValueError(f"context must be at least 2, a token and the one it predicts, got {context}")
    stride = max(1, context // 2) if stride is None else stride
    if not 1 <= stride < context:
        raise ValueError(
            f"stride must be from 1 to {context - 1} with a context of {context}, got {stride}: more would leave "
            "tokens with nothing before them"
        )
    return context, stride


@torch.inference_mode()
def evaluate(
    model: Model,
    documents: Iterable[Document],
    *,
    context: int | None = None,
    stride: int | None = None,
    batch: int = 8,
    max_tokens: int | None = None,
    watch: Callable[[int, float], None] | None = None,
) -> Evaluation:
    """Measure a model on documents.

    Args:
        model: its mode, training or not, is put back.
        documents: tokens with their sizes, read once; windows never cross from one to another.
        context: tokens of a window; see `pick_context`.
        stride: tokens between the starts of two windows.
        batch: windows per pass. It changes the speed only, up to rounding.
        max_tokens: count the first ones only.
        watch: called after each pass with the tokens it counted and the loss so far.
    """
    context, stride = pick_context(model, context, stride)
    for name, given in (("batch", batch), ("max_tokens", max_tokens)):
        if given is not None and given < 1:
            raise ValueError(f"{name} must be at least 1, got {given}")
    was_training = model.training
    model.eval()
    started, sums, tokens, size, counted = time.perf_counter(), [], 0, 0, set()
    try:
        for some in batches(jobs(documents, context, stride, max_tokens), batch):
            losses = token_losses(model, [window for _, window in some])
            sums.append(losses.sum(dtype=torch.float64).item())
            tokens += len(losses)
            size += sum(int(window.sizes[window.first :].sum()) for _, window in some)
            counted |= {number for number, _ in some}
            if watch is not None:
                watch(len(losses), math.fsum(sums) / tokens)
    finally:
        model.train(was_training)
    seconds = time.perf_counter() - started
    if not tokens:
        raise ValueError("there is nothing to predict: every document has fewer than two tokens")
    total = math.fsum(sums)
    if not math.isfinite(total):
        raise ValueError(f"the loss over {tokens} tokens is {total}: the model has diverged, or its weights are broken")
    if size == 0:
        raise ValueError(f"the {tokens} counted tokens stand for no bytes; give a longer text")
    bits = total / math.log(2) / size
    perplexity = torch.tensor(total / tokens, dtype=torch.float64).exp().item()  # infinite where it is beyond a float
    return Evaluation(total / tokens, perplexity, bits, tokens, size, len(counted), context, stride, seconds)


def batches(made: Iterator[tuple[int, Window]], batch: int) -> Iterator[list[tuple[int, Window]]]:
    """Windows in groups of `batch`, those of like length side by side, the longest first."""
    while some := list(itertools.islice(made, SORTED * batch)):
        some.sort(key=lambda job: -len(job[1].ids))
        yield from (some[at : at + batch] for at in range(0, len(some), batch))


def token_losses(model: Model, some: Sequence[Window]) -> Tensor:
    """Nats of every counted token of some windows, in one pass; in several where only a family's own head will do."""
    longest = max(len(window.ids) for window in some) - 1
    together = max(1, LOGITS // (longest * model.config.vocab_size))
    if not isinstance(model, Decoder) and len(some) > together:
        return torch.cat([token_losses(model, some[at : at + together]) for at in range(0, len(some), together)])
    inputs = torch.zeros(len(some), longest, dtype=torch.long)
    targets = torch.full((len(some), longest), IGNORED)
    for row, window in enumerate(some):
        seen = len(window.ids) - 1
        inputs[row, :seen] = torch.from_numpy(window.ids[:-1])  # what stands after them is never looked at: it is later
        targets[row, window.first - 1 : seen] = torch.from_numpy(window.ids[window.first :])
    inputs, targets = (given.to(next(model.parameters()).device) for given in (inputs, targets))
    losses, place = [], 0
    for logits in logits_in_parts(model, inputs):
        wanted = targets[:, place : place + logits.shape[1]]
        place += logits.shape[1]
        chosen = wanted != IGNORED
        wide = logits[chosen].to(torch.promote_types(logits.dtype, torch.float32))
        losses.append(F.cross_entropy(wide, wanted[chosen], reduction="none"))
    return torch.cat(losses)


def logits_in_parts(model: Model, ids: Tensor) -> Iterator[Tensor]:
    """Logits of (B, T) tokens as consecutive parts (B, t, vocabulary) along time.

    A family's head may scale or cap, so that only our own decoder is split there: other models get their tokens in
    parts, with a cache.
    """
    size = max(1, LOGITS // (len(ids) * model.config.vocab_size))
    if isinstance(model, Decoder):
        for part in model.hidden(ids).split(size, dim=1):
            yield model.logits(part)
    elif ids.shape[1] <= size:
        yield model(input_ids=ids, use_cache=False).logits
    else:
        cache = model.make_cache()
        for part in ids.split(size, dim=1):
            yield model(input_ids=part, past_key_values=cache, use_cache=True).logits
