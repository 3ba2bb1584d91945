"""Small decoders of every method."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from twoaxis.base.registry import spell
from twoaxis.model.config import ModelConfig
from twoaxis.verify.subject import SMALL, SUBJECTS, build

__all__ = ["SMALL", "build", "instances", "sample_tokens"]


def instances(**changes: Any) -> Iterator[tuple[str, ModelConfig]]:
    """A decoder configuration for every variant of every stream and mixer, with its label."""
    for kind in SUBJECTS:
        for name in kind.registry.names():
            for options in kind.registry.find(name).variants:
                _, config = next(kind(name, options).configs())
                yield spell(name, dict(options)), dataclasses.replace(config, **changes)


def sample_tokens(seed: int, length: int = 12) -> Tensor:
    """A small random batch."""
    return torch.randint(0, SMALL.vocab_size, (2, length), generator=torch.Generator().manual_seed(seed))
