"""Which new parameters cannot learn: measured on a narrow twin, before anybody waits for a training run.

A start that equals the plain model is made of zeros. One zero factor on a path gets a gradient at once; two in series
get none, ever. The twin has the same stream, mixer, placement and blocks at a small width, and random sub-layers; its
new parameters take a few steps along their gradients, and those that never get one are named.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from twoaxis.model.config import Methods
from twoaxis.model.graft import TwoAxisForCausalLM, graft

WIDTHS = (16, 32, 48, 64, 96, 128)
"""Widths to try; options such as heads or head widths may refuse the small ones."""
STEPS, LENGTH, VOCABULARY = 4, 12, 37
CLOSED = f"no gradient in the first {STEPS} steps: the paths it acts on stay closed"


@torch.enable_grad()  # of a caller who has switched gradients off
def stuck(model: TwoAxisForCausalLM, seed: int = 0) -> dict[str, str]:
    """New parameters of a retrofit, or rows of them (`name[row]`), that do not learn from this start, and why.

    `seed` is that of the twin's weights.
    """
    new = model.new_parameters()
    if not new:
        return {}
    methods, blocks = model.config.methods(), len(model.config.architecture.forms)
    names = {_place(name): name for name in new}
    found = {f"stream.{name}": why for name, why in model.stream.dead().items()}
    for path, local in model.local_operators():
        found |= {f"{path}.{leaf}": why for leaf, why in local.dead().items()}
    for name, rows in _unmoved(_twin(methods, blocks, model.config.architecture.width, seed), seed).items():
        own = names.get(_place(name))
        if own is None:  # a place that this family has not: its blocks have other sub-layers
            continue
        if bool(rows.all()):
            found.setdefault(own, CLOSED)
        elif own not in found:
            for row in rows.nonzero().flatten().tolist():
                found.setdefault(f"{own}[{row}]", CLOSED)
    return found


def _place(name: str) -> str:
    """Where a new parameter stands, whatever a family calls its lists and sub-layers."""
    inside = re.search(r"\.(\d+)\.(?:.*?(mlp|moe|ff)?[^.]*\.)?(twoaxis_.*)$", name)
    if inside is None:
        return name
    block, kind, rest = inside.groups()
    return f"{block} {'mlp' if kind else ''} {rest}"


def _unmoved(model: TwoAxisForCausalLM, seed: int) -> dict[str, Tensor]:
    """For each new parameter: which of its rows never got a gradient while the new parameters took some steps."""
    parameters = {name: model.get_parameter(name) for name in model.new_parameters()}
    unmoved = {name: torch.ones(len(p) if p.dim() else 1, dtype=torch.bool) for name, p in parameters.items()}
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
        model.zero_grad(set_to_none=True)
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        with torch.no_grad():
            for name, parameter in parameters.items():
                if parameter.grad is not None and bool(parameter.grad.any()):
                    unmoved[name] &= (parameter.grad.reshape(len(unmoved[name]), -1) == 0).all(-1)
                    parameter -= 0.02 * parameter.grad / parameter.grad.abs().max()
    return unmoved


def _twin(methods: Methods, blocks: int, width: int, seed: int) -> TwoAxisForCausalLM:
    """A narrow model with the same methods, every new parameter at its start; of the first width that they accept."""
    small: dict[str, Any] = {"vocab_size": VOCABULARY, "intermediate_size": 8, "head_dim": 2, "initializer_range": 0.3}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": blocks, "pad_token_id": None}
    for each in (*WIDTHS, width):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            plain = AutoModelForCausalLM.from_config(LlamaConfig(hidden_size=each, **small)).double()
            try:
                return graft(plain, methods, seed=seed).train()
            except ValueError:
                if each == width:
                    raise
    raise AssertionError("the last width is the model's own")
