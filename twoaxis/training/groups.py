"""Which parameters decay, and how fast each learns.

    parameter                                   weight decay          rate
    linear weights, the embedding               yes                   1
    norms, biases, convolution taps, sinks      no                    1
    the stream's                                as the method says    as the method says
    what a retrofit added                       as above              times what the retrofit says

A tied embedding is the head's matrix too; an untied one decays likewise, as in the code most methods were published
with. Every parameter that learns is in exactly one group; anything else is an error that names it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

STREAM = "model.trunk.stream."
"""Where a model keeps its stream's parameters."""


class Group(NamedTuple):
    """Parameters that an optimiser treats alike.

    Attributes:
        names: as `named_parameters` gives them.
        decay: whether weight decay applies.
        rate: multiplier of the learning rate.
    """

    names: tuple[str, ...]
    decay: bool
    rate: float


def make_groups(model: nn.Module, multipliers: dict[str, float] | None = None) -> list[Group]:
    """The groups of a two-axis model, in a fixed order.

    Args:
        model: a TwoAxisForCausalLM; parameters that do not require a gradient are left out.
        multipliers: of the learning rate, by name, beyond what the method says.
    """
    learning = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not learning:
        raise ValueError("no parameter of the model learns; choose others with train")
    treated: dict[str, tuple[bool, float]] = {}
    stream: Any = model.get_submodule(STREAM.rstrip("."))
    for group in stream.parameter_groups():
        for name in group.names:
            full = STREAM + name
            if full in treated:
                raise ValueError(f"{full} is in two parameter groups of its stream {stream.name}")
            treated[full] = (group.decay, group.rate)
    matrices = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding)}
    for name, parameter in model.named_parameters():
        if not name.startswith(STREAM):
            treated[name] = (id(parameter) in matrices, 1.0)
    known = {name for name, _ in model.named_parameters()}
    if missing := sorted(known - set(treated)):
        raise ValueError(f"{missing[0]} is in no parameter group: its stream {stream.name} must name it in one")
    if unknown := sorted(set(treated) - known):
        raise ValueError(f"a parameter group of the stream {stream.name} names {unknown[0]}, which the model lacks")
    if unknown := sorted(set(multipliers or {}) - known):
        raise ValueError(f"a learning-rate multiplier names {unknown[0]}, which the model lacks")
    grouped: dict[tuple[bool, float], list[str]] = {}
    for name in learning:
        decay, rate = treated[name]
        grouped.setdefault((decay, rate * (multipliers or {}).get(name, 1.0)), []).append(name)
    order = sorted(grouped, key=lambda kind: (not kind[0], -kind[1]))
    return [Group(tuple(grouped[kind]), *kind) for kind in order]


def make_optimizer(
    model: nn.Module,
    groups: list[Group],
    *,
    lr: float,
    betas: tuple[float, float],
    epsilon: float,
    weight_decay: float,
) -> torch.optim.AdamW:
    """AdamW over the groups, fused where the device has it.

    Args:
        model: what the names belong to.
        groups: from `make_groups`.
        lr: peak learning rate; a group's multiplier comes on top.
        betas: of AdamW.
        epsilon: of AdamW.
        weight_decay: of the groups that decay.
    """
    parameters = dict(model.named_parameters())
    made: list[dict[str, Any]] = [
        {
            "params": [parameters[name] for name in group.names],
            "lr": lr * group.rate,
            "weight_decay": weight_decay if group.decay else 0.0,
        }
        for group in groups
    ]
    devices = {parameters[name].device.type for group in groups for name in group.names}
    fused = devices <= {"cpu", "cuda", "mps", "xpu"}
    return torch.optim.AdamW(made, lr=lr, betas=betas, eps=epsilon, fused=fused)
