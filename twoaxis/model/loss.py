"""The loss: cross-entropy of each labelled token given the tokens before it, in float32 whatever the model's dtype.

    tokens     t0   t1   t2   t3
    labels     -    t1   -    t3         a label stands under its own token; `IGNORED` where none counts
    predicted  t0 -> t1       t2 -> t3

A step divides the sum over all of its labelled tokens by their number, however they are spread over micro-batches and
processes. What a model wants to minimise besides (`auxiliary_loss`) is never part of a reported loss.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100
"""Label of a token that does not count."""


def logits_of(output: Any) -> Tensor:
    """The logits of a forward pass."""
    return output if isinstance(output, Tensor) else output.logits


def labelled(labels: Tensor) -> Tensor:
    """Number of predicted tokens of a batch. The first token of a row has nothing before it and never counts."""
    return (labels[:, 1:] != IGNORED).sum()


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the losses of all labelled tokens; logits (B, T, vocabulary), labels (B, T)."""
    # The last position keeps its logits, with an ignored label: cutting it off would copy all of them.
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def auxiliary_loss(model: Any, output: Any) -> Tensor | None:
    """Balance loss of a model with experts, weighted as its configuration says; None where there is none."""
    term = getattr(output, "aux_loss", None)
    return None if term is None else term * model.config.router_aux_loss_coef


def score(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over the labelled tokens of a held-out batch, in float64: nats, tokens predicted right, tokens.

    Args:
        logits: (B, T, vocabulary).
        labels: (B, T).

    Returns:
        The three sums, and (B, 2) with the nats and the tokens of each row.
    """
    labels = labels[:, 1:]
    wanted = labels != IGNORED
    chosen, answers = logits[:, :-1][wanted].float(), labels[wanted]
    nats = F.cross_entropy(chosen, answers, reduction="none")
    right = chosen.argmax(-1) == answers
    sums = torch.stack([nats.double().sum(), right.double().sum(), wanted.double().sum()])
    row_nats = nats.new_zeros(wanted.shape, dtype=torch.float64).masked_scatter(wanted, nats.double()).sum(1)
    return sums, torch.stack([row_nats, wanted.double().sum(1)], dim=1)


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of each token given those before it; tokens (B, context + 1)."""
    given, target = tokens[:, :-1], tokens[:, 1:]
    logits = logits_of(model(given, use_cache=False))
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())
