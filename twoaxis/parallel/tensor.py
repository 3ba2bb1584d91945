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
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from twoaxis.depth.blend import Blend
from twoaxis.depth.stream import Stream

COLUMNS, ROWS, PARTIAL = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""Of a transformers plan, what is followed here: linear layers that are spread, and norms of parts of their output."""
PLAN: Mapping[str, str] = {
    **{f"layers.*.self_attn.{name}_proj": COLUMNS for name in "qkv"},
    **{f"layers.*.self_attn.{name}_norm": PARTIAL for name in "qk"},
    **{f"layers.*.mlp.{name}_proj": COLUMNS for name in ("gate", "up")},
    "layers.*.self_attn.o_proj": ROWS,
    "layers.*.mlp.down_proj": ROWS,
}
"""How our decoder is spread, in the words of transformers' `base_model_tp_plan`."""


def spread_tensors(model: Any, mesh: DeviceMesh) -> list[nn.Module]:
    """Spread the sub-layers of a `Decoder`, or of a transformers model with a stream, over a mesh, in place.

    Returns:
        Norms whose gradients are a device's own part: see `add_partial`.
    """
    modules, styles = dict(model.named_modules()), spread_plan(model, mesh.size())
    for name, style in styles.items():
        if style != PARTIAL:
            parent, _, child = name.rpartition(".")
            spread = ColwiseParallel() if style == COLUMNS else RowwiseParallel()
            parallelize_module(modules[parent], mesh, {child: spread})
    return [modules[name] for name, style in styles.items() if style == PARTIAL]


def spread_plan(model: Any, degree: int) -> dict[str, str]:
    """The modules that so many devices share, by name, and how; what cannot be spread is refused with the numbers."""
    stream: Stream = model.stream
    if any(True for _ in stream.parameters()) and any(stream.changes_kv(site) for site in stream.layout.sites):
        # a device has the gradients of its own heads alone, and adding them would count others twice
        name = stream.method.name if isinstance(stream, Blend) else stream.name
        raise ValueError(f"{name} learns how to mix keys and values, whose heads tp spreads; use fsdp")
    backbone = getattr(model, "backbone", model)
    plan = PLAN if backbone is model else getattr(backbone.config, "base_model_tp_plan", None) or {}
    check_heads(backbone.config, degree)
    modules = dict(model.named_modules())
    styles = {name: style for name in modules if (style := _style(name, plan)) is not None}
    if not {COLUMNS, ROWS} & set(styles.values()):
        raise ValueError(f"{type(backbone).__name__} has no plan for tensor parallelism; use fsdp")
    for name, style in list(styles.items()):
        host, module = modules[name.rpartition(".")[0]], modules[name]
        if any(host._modules.get(inside) is not None for inside in ("inside", "twoaxis_inside")):
            del styles[name]  # it stays whole
        elif style != PARTIAL:
            _check(name, int(getattr(module, "out_features" if style == COLUMNS else "in_features")), degree)
    return styles


def _style(name: str, plan: Mapping[str, str]) -> str | None:
    """What a plan says of a module: `*` in its names stands for a number."""
    for pattern, style in plan.items():
        if re.search(rf"(^|\.){re.escape(pattern).replace(re.escape('*'), '[0-9]+')}$", name):
            return style if style in (COLUMNS, ROWS, PARTIAL) else None
    return None


def add_partial(norms: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Add the gradients that are parts, after a backward pass."""
    for grad in (p.grad for norm in norms for p in norm.parameters() if p.grad is not None):
        dist.all_reduce(grad.to_local() if isinstance(grad, DTensor) else grad, group=mesh.get_group())


def check_heads(config: Any, degree: int) -> None:
    """Refuse heads that cannot be spread over so many devices."""
    for field in ("num_attention_heads", "num_key_value_heads"):
        _check(field, getattr(config, field, None) or degree, degree)


def _check(name: str, count: int, degree: int) -> None:
    if count % degree:
        fit = [n for n in range(1, min(count, 1024) + 1) if count % n == 0]
        raise ValueError(f"{name} ({count}) cannot be spread over {degree} devices; {fit} can")
