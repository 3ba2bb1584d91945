"""Methods on tiny models of several families, for the tests of grafts."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from tests.model.tiny_families import tiny
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder_as_graft import family_fields
from twoaxis.model.graft import graft

METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "denseformer": {"stream": "denseformer"},
    "attention_residuals": {"stream": "attention_residuals:read=sum"},
    "deep_delta": {"stream": "deep_delta", "blend": True},
    "deep_delta with tokens": {"stream": "deep_delta:value_channels=2,expand=conv", "blend": True},
    "hyper_connections": {"stream": "hyper_connections:readout=mean"},
    "muddformer": {"stream": "muddformer"},
    "gated_streams": {"stream": "gated_streams:rank=6"},
    "depth_kv": {"stream": "depth_kv", "blend": True},
    "lime": {"stream": "lime:over=heads,kv_heads=2"},
    "short_swa": {"mixer": "short_swa:window=4,heads=2,head_width=8"},
    "canon": {"mixer": "canon:start=zero"},
    "rings of both": {
        "stream": "deep_delta:value_channels=2,expand=conv",
        "blend": True,
        "mixer": "canon:start=zero",
        "mixer_blocks": [0, 2],
    },
    "two axes": {"stream": "muddformer", "mixer": "canon:start=zero,set=AB", "mixer_blocks": [0, 2]},
}
TOKENS = 13


def tokens(rows: int = 2, length: int = TOKENS) -> Tensor:
    """Tokens without padding."""
    return torch.randint(3, 99, (rows, length), generator=torch.Generator().manual_seed(3))


def grafted(family: str, method: str = "plain", **changes: Any) -> Any:
    """A tiny model of a family with a method, whose new parameters are off their neutral values."""
    torch.manual_seed(0)
    return copy.deepcopy(_grafted(family, method, **changes))


@functools.cache
def _grafted(family: str, method: str, **changes: Any) -> Any:
    model = graft(tiny(family, **changes), **METHODS[method])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("stream.") or "twoaxis_" in name:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def to_family(config: ModelConfig) -> PreTrainedConfig:
    """The configuration of the family that has a decoder's options."""
    return AutoConfig.for_model(**family_fields(config))


@torch.no_grad()
def logits(model: Any, given: Tensor, **call: Any) -> Tensor:
    """Of a call without a cache unless it has one."""
    return model(input_ids=given, **{"use_cache": False, **call}).logits


def gradients(model: Any, given: Tensor, **call: Any) -> dict[str, Tensor]:
    """Of the loss by parameter; the same random numbers in every call."""
    torch.manual_seed(5)
    model.zero_grad(set_to_none=True)
    out = model(input_ids=given, labels=given, use_cache=False, **call)
    out.loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach(), **found}
