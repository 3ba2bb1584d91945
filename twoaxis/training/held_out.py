"""Loss and accuracy on held-out examples, without a trace in the training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class HeldOut(NamedTuple):
    """What was measured.

    Attributes:
        loss: nats per labelled token.
        accuracy: part of the labelled tokens that are the likeliest.
        tokens: labelled ones.
    """

    loss: float
    accuracy: float
    tokens: int


def collate(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Examples as a batch."""
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def measure(
    model: Any,
    examples: Any,
    *,
    batch: int,
    autocast: Callable[[], contextlib.AbstractContextManager[Any]],
    part: tuple[int, int],
    total: Callable[[Tensor], Tensor],
) -> HeldOut:
    """Run a model over examples.

    Args:
        model: a causal model; its mode is left as it was.
        examples: a dataset of `input_ids` and `labels`, by index.
        batch: examples per pass.
        autocast: context of the passes.
        part: which of how many parts of the batches is this process's.
        total: adds sums up over all processes.
    """
    device = next(model.parameters()).device
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # nats, right answers, tokens
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for first in range(part[0] * batch, len(examples), part[1] * batch):
                items = collate([examples[i] for i in range(first, min(first + batch, len(examples)))])
                inputs = {name: tensor.to(device) for name, tensor in items.items()}
                labels = inputs.pop("labels")[:, 1:]
                with autocast():
                    logits = model(**inputs, use_cache=False).logits[:, :-1]
                wanted = labels != -100
                chosen, answers = logits[wanted].float(), labels[wanted]
                nats = F.cross_entropy(chosen, answers, reduction="none").double().sum()
                right = (chosen.argmax(-1) == answers).double().sum()
                sums += torch.stack([nats, right, wanted.double().sum()])
    finally:
        model.train(training)
    nats, right, tokens = total(sums).tolist()
    if not tokens:
        raise ValueError("no token of the held-out examples is labelled; there is nothing to evaluate")
    return HeldOut(nats / tokens, right / tokens, round(tokens))
