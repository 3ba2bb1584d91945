"""Which new parameters cannot learn: measured on a narrow twin, before anybody waits for a training run.

A start that equals the plain model is made of zeros. One zero factor on a path gets a gradient at once; two in series
get none, ever. The twin has the same stream, mixer, placement and blocks at a small width, and random sub-layers; its
new parameters take a few steps along their gradients, and those that never get one are named.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twoaxis.model.hf_config import TwoAxisConfig
from twoaxis.model.hf_model import TwoAxisForCausalLM
from twoaxis.pretrained.build import locals_of, new_names
from twoaxis.pretrained.families import TRUNK

WIDTHS = (16, 32, 48, 64, 96, 128)
"""Widths to try; options such as heads or head widths may refuse the small ones."""
STEPS, LENGTH, VOCABULARY = 4, 12, 37
CLOSED = f"no gradient in the first {STEPS} steps: the paths it acts on stay closed"


def still(config: TwoAxisConfig, seed: int = 0) -> dict[str, str]:
    """New parameters, or rows of them (`name[row]`), that do not learn from this start, and why.

    Args:
        config: of the retrofitted model.
        seed: of the twin's weights.
    """
    if config.stream == "standard" and config.mixer is None:
        return {}
    model = _twin(config, seed)
    found = _declared(model)
    for name, rows in _unmoved(model, seed).items():
        if bool(rows.all()):
            found.setdefault(name, CLOSED)
        elif name not in found:
            for row in rows.nonzero().flatten().tolist():
                found.setdefault(f"{name}[{row}]", CLOSED)
    return found


def _declared(model: TwoAxisForCausalLM) -> dict[str, str]:
    """What streams and mixers say of themselves."""
    trunk = model.model.trunk
    found = {f"{TRUNK}stream.{name}": why for name, why in trunk.stream.dead().items()}
    for name, local in locals_of(trunk):
        found |= {f"{TRUNK}{name}.{leaf}": why for leaf, why in local.dead().items()}
    return found


def _unmoved(model: TwoAxisForCausalLM, seed: int) -> dict[str, Tensor]:
    """For each new parameter: which of its rows never got a gradient while the new parameters took some steps."""
    new = set(new_names(model))
    parameters = {name: p for name, p in model.named_parameters() if name in new}
    unmoved = {name: torch.ones(len(p) if p.dim() else 1, dtype=torch.bool) for name, p in parameters.items()}
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
        model.zero_grad(set_to_none=True)
        model(input_ids=tokens, labels=tokens).loss.backward()
        with torch.no_grad():
            for name, parameter in parameters.items():
                if parameter.grad is not None and bool(parameter.grad.any()):
                    unmoved[name] &= (parameter.grad.reshape(len(unmoved[name]), -1) == 0).all(-1)
                    parameter -= 0.02 * parameter.grad / parameter.grad.abs().max()
    return unmoved


def _twin(config: TwoAxisConfig, seed: int) -> TwoAxisForCausalLM:
    """A narrow model with the methods of `config`, every new parameter at its start."""
    fields = {name: value for name, value in config.to_dict().items() if name in TwoAxisConfig.__dataclass_fields__}
    del fields["hidden_size"]
    small = {"vocab_size": VOCABULARY, "intermediate_size": 8, "head_dim": 2, "num_attention_heads": 2}
    small |= {"num_key_value_heads": 1, "rope_parameters": None, "pad_token_id": None, "bos_token_id": None}
    small |= {"eos_token_id": None, "initializer_range": 0.3, "tie_word_embeddings": False, "dtype": None}
    small |= {"hidden_act": "silu"}  # a ReLU may close channels by chance
    with torch.random.fork_rng(devices=[]):
        model = _narrowest({**fields, **small}, (*WIDTHS, config.hidden_size), seed).double()
    trunk = model.model.trunk
    trunk.stream.neutral_()
    for _, local in locals_of(trunk):
        local.neutral_()
    return model.train()


def _narrowest(fields: dict[str, Any], widths: tuple[int, ...], seed: int) -> TwoAxisForCausalLM:
    """The model of the first width that the methods' options accept; the last one is known to be good."""
    for width in widths[:-1]:
        torch.manual_seed(seed)
        try:
            return TwoAxisForCausalLM(TwoAxisConfig(**fields, hidden_size=width))
        except ValueError:
            continue
    return TwoAxisForCausalLM(TwoAxisConfig(**fields, hidden_size=widths[-1]))
