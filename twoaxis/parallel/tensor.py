"""Tensor parallelism: devices share the matrices of each sub-layer, and each holds the whole stream.

    stream (whole) ─► norm ─► q, k, v, gate, up   by columns: a device has some heads and hidden channels
                              o, down             by rows: the devices' parts of the output are added ─► stream (whole)

The stream, the pre-norms, the embedding and the head are the same on every device, values and gradients. Norms of
queries and keys see the heads of one device: their gradients are added. A transformers model is spread by the plan of
its own family, as far as that speaks of linear layers; experts stay whole.

A sub-layer stays whole where a mixer in it looks across the channels that would be spread: the projections of an
attention, the hidden channels of an MLP.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

PLAN: Mapping[str, str] = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
    "layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
"""How our decoder is spread, in the words of transformers' `base_model_tp_plan`."""
STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


class Tensors(NamedTuple):
    """What of a model is spread.

    Attributes:
        spread: names of linear layers that are.
        whole: names of sub-layers that stay whole because of a mixer in them.
        partial: norms whose gradients are a device's own part, and must be added.
    """

    spread: tuple[str, ...]
    whole: tuple[str, ...]
    partial: tuple[nn.Module, ...]


def spread_tensors(model: nn.Module, mesh: DeviceMesh) -> Tensors:
    """Spread the sub-layers of a `Decoder`, or of a transformers model with a stream, over a mesh, in place."""
    backbone: Any = getattr(model, "backbone", None)
    plan = PLAN if backbone is None else getattr(backbone.config, "base_model_tp_plan", None) or {}
    config: Any = getattr(model, "config", None) if backbone is None else backbone.config
    for field in ("num_attention_heads", "num_key_value_heads"):
        _check(field, getattr(config, field, None) or mesh.size(), mesh.size())
    modules = dict(model.named_modules())
    by_name = {name: style for name in modules if (style := _style(name, plan)) is not None}
    if not any(style in STYLES for style in by_name.values()):
        raise ValueError(f"{type(backbone or model).__name__} has no plan for tensor parallelism; use fsdp")
    spread, whole, partial = [], [], []
    for name, style in by_name.items():
        parent, _, child = name.rpartition(".")
        host = modules[parent]
        if any(host._modules.get(inside) is not None for inside in ("inside", "twoaxis_inside")):
            whole.append(parent)
        elif style in STYLES:
            linear: Any = modules[name]
            _check(name, linear.out_features if style == "colwise" else linear.in_features, mesh.size())
            parallelize_module(host, mesh, {child: STYLES[style]()})
            spread.append(name)
        else:
            partial.append(modules[name])
    return Tensors(tuple(spread), tuple(dict.fromkeys(whole)), tuple(partial))


def _style(name: str, plan: Mapping[str, str]) -> str | None:
    """What a plan says of a module: `*` in its names stands for a number."""
    for pattern, style in plan.items():
        known = style in STYLES or style == "replicated_with_grad_allreduce"
        if known and re.search(rf"(^|\.){re.escape(pattern).replace(re.escape('*'), '[0-9]+')}$", name):
            return style
    return None


def add_partial(tensors: Tensors, mesh: DeviceMesh) -> None:
    """Add the gradients that are parts, after a backward pass."""
    for norm in tensors.partial:
        for grad in (parameter.grad for parameter in norm.parameters() if parameter.grad is not None):
            dist.all_reduce(grad.to_local() if isinstance(grad, DTensor) else grad, group=mesh.get_group())


def _check(name: str, count: int, degree: int) -> None:
    if count % degree:
        fit = [n for n in range(1, min(count, 1024) + 1) if count % n == 0]
        raise ValueError(f"{name} ({count}) cannot be spread over {degree} devices; {fit} can")
