"""How a model is run, whether it is our decoder or one of transformers with a stream in it.

logits_in_parts(model, ids)        logits of whole sequences, never more than `LOGITS` numbers of them at a time
Session(model)                     the next tokens of a sequence, one call after another
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from twoaxis.model.decoder import Decoder

Model = Decoder | Any
"""A `Decoder`, or a causal model of transformers that has `make_cache` and a stream."""

LOGITS = 2**25
"""Logits made at a time: 128 MiB in float32, whatever the vocabulary."""


def device_of(model: Model) -> torch.device:
    """Where the model's parameters are."""
    return next(model.parameters()).device


def logits_of(output: Any) -> Tensor:
    """The logits of a forward pass."""
    return output if isinstance(output, Tensor) else output.logits


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


class Session:
    """A sequence that grows.

    Args:
        model: the model.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.memory: Any = model.start() if isinstance(model, Decoder) else model.make_cache()

    def next_logits(self, ids: Tensor) -> Tensor:
        """Logits (B, vocabulary) of the token after (B, T) further ones."""
        if isinstance(self.model, Decoder):
            logits, self.memory = self.model.step(ids, self.memory, logits_to_keep=1)
        else:
            output = self.model(input_ids=ids, past_key_values=self.memory, use_cache=True, logits_to_keep=1)
            logits = output.logits
        return logits[:, -1]

    def nbytes_by_part(self) -> dict[str, int]:
        """Bytes of what is remembered: what grows with the sequence, local windows and convolutions, the stream."""
        model: Any = self.model
        return model.cache_bytes(self.memory) if hasattr(model, "cache_bytes") else self.memory.nbytes_by_part()
