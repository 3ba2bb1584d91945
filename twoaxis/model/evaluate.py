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
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.data.tokenizer import Encoded

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from twoaxis.model.hf_model import TwoAxisForCausalLM

LOGITS = 2**25
"""Logits made at a time: 128 MiB in float32, whatever the vocabulary."""
DEFAULT_CONTEXT = 1024
"""Longest context that is taken when none is given."""


class Window(NamedTuple):
    """Tokens `start` to `stop - 1` of a document, of which those from `first` on are counted."""

    start: int
    stop: int
    first: int


class Evaluation(NamedTuple):
    """What was measured.

    Attributes:
        loss: nats per token.
        perplexity: its exponential; infinite where that is beyond a float.
        bits_per_byte: loss in bits over the bytes of the counted tokens.
        tokens: counted.
        bytes: of UTF-8 that they stand for.
        documents: with at least one of them.
        context: tokens of a window.
        stride: tokens between the starts of two windows.
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


def windows(length: int, context: int, stride: int) -> Iterator[Window]:
    """The windows over a document of `length` tokens; see the drawing above."""
    start, stop, first = 0, min(context, length), 1
    while first < length:
        yield Window(start, stop, first)
        start, first = start + stride, stop
        stop = min(start + context, length)


def cut(documents: Sequence[Encoded], max_tokens: int | None) -> list[Encoded]:
    """The documents up to the token with which `max_tokens` are counted; those with nothing to count left out."""
    left = sum(len(d.ids) for d in documents) if max_tokens is None else max_tokens
    kept = []
    for document in documents:
        counted = min(len(document.ids) - 1, left)
        if counted > 0:
            kept.append(Encoded(document.ids[: counted + 1], document.sizes[: counted + 1]))
            left -= counted
    return kept


def count_tokens(documents: Sequence[Encoded], max_tokens: int | None = None) -> int:
    """How many tokens `evaluate` will count."""
    return sum(len(d.ids) - 1 for d in cut(documents, max_tokens))


def pick_context(model: TwoAxisForCausalLM, context: int | None, stride: int | None) -> tuple[int, int]:
    """Context and stride with their defaults: what the model is made for but at most 1024, and half of the context."""
    if context is None:
        context = min(DEFAULT_CONTEXT, model.config.max_position_embeddings)
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
    model: TwoAxisForCausalLM,
    documents: Sequence[Encoded],
    *,
    context: int | None = None,
    stride: int | None = None,
    batch: int = 8,
    max_tokens: int | None = None,
    watch: Callable[[int, float], None] | None = None,
) -> Evaluation:
    """Measure a model on documents.

    Args:
        model: the model; its mode, training or not, is put back.
        documents: from a tokenizer's `encode`, with sizes; windows never cross from one to another.
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
    documents = cut(documents, max_tokens)
    if not documents:
        raise ValueError("there is nothing to predict: every document has fewer than two tokens")
    jobs = [(document, window) for document in documents for window in windows(len(document.ids), context, stride)]
    jobs.sort(key=lambda job: job[1].start - job[1].stop)  # alike in length side by side, the longest first
    was_training = model.training
    model.eval()
    started, sums, tokens = time.perf_counter(), [], 0
    try:
        for at in range(0, len(jobs), batch):
            losses = token_losses(model, [(d.ids, w) for d, w in jobs[at : at + batch]])
            sums.append(losses.sum(dtype=torch.float64).item())
            tokens += len(losses)
            if watch is not None:
                watch(len(losses), math.fsum(sums) / tokens)
    finally:
        model.train(was_training)
    seconds = time.perf_counter() - started
    total = math.fsum(sums)
    if not math.isfinite(total):
        raise ValueError(f"the loss over {tokens} tokens is {total}: the model has diverged, or its weights are broken")
    size = sum(int(document.sizes[1:].sum()) for document in documents)
    if size == 0:
        raise ValueError(f"the {tokens} counted tokens stand for no bytes; give a longer text")
    bits = total / math.log(2) / size
    return Evaluation(
        total / tokens, _exp(total / tokens), bits, tokens, size, len(documents), context, stride, seconds
    )


def token_losses(model: TwoAxisForCausalLM, jobs: Sequence[tuple[NDArray[np.int64], Window]]) -> Tensor:
    """Nats of every counted token of some windows, in one pass.

    Args:
        model: the model.
        jobs: a document's tokens and a window of it.
    """
    longest = max(window.stop - window.start for _, window in jobs) - 1
    inputs = torch.zeros(len(jobs), longest, dtype=torch.long)
    places, targets = torch.zeros(len(jobs), longest, dtype=torch.bool), []
    for row, (tokens, window) in enumerate(jobs):
        seen = tokens[window.start : window.stop - 1]
        inputs[row, : len(seen)] = torch.from_numpy(seen)  # what stands after them is never looked at: reads are causal
        places[row, window.first - 1 - window.start : len(seen)] = True
        targets.append(torch.from_numpy(tokens[window.first : window.stop]))
    device = model.device
    if not hasattr(model, "lm_head"):  # a family's head may scale or cap its logits: it runs as it is, by windows
        together = max(1, LOGITS // (longest * model.config.vocab_size))
        found = []
        for first in range(0, len(jobs), together):
            part = slice(first, first + together)
            logits = model(input_ids=inputs[part].to(device), use_cache=False).logits[places[part].to(device)]
            found.append(F.cross_entropy(_widen(logits), torch.cat(targets[part]).to(device), reduction="none"))
        return torch.cat(found)
    hidden: Tensor = model.model(input_ids=inputs.to(device), use_cache=False).last_hidden_state[places.to(device)]
    rows = max(1, LOGITS // model.config.vocab_size)
    losses = [
        F.cross_entropy(_widen(model.lm_head(part)), wanted, reduction="none")
        for part, wanted in zip(hidden.split(rows), torch.cat(targets).to(device).split(rows), strict=True)
    ]
    return torch.cat(losses)


def _widen(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _exp(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
