"""Sharding (FSDP2): every device holds a part of every tensor, and gathers a block when it runs.

    unit         parameters        gathered                                  computed in     gradients reduced in
    a block      its own           while it runs, again in the backward      `dtype`         float32
    the stream   the method's      from its opening to the end of the        float32         float32
                                   backward pass
    the rest     embedding, head   from the first to the last moment         `dtype`         float32

The stream is a unit of its own because its parameters route: they stay float32 whatever the blocks compute in, and the
state that is handed to a block is never cast. Sites of all blocks read the stream, so it is gathered once, when a pass
opens it, and not at every read.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from twoaxis.parallel.parts import find_parts

AS_STORED = MixedPrecisionPolicy(cast_forward_inputs=False)
"""Parameters and gradients of a stream stay as they are stored: float32."""


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype | None = None,
    recompute: int = 0,
    compile: bool = False,
    reshard: bool = True,
) -> nn.Module:
    """Shard a model in place over a mesh: of one dimension, or of two whose first replicates.

    The model may be on the meta device; then `materialise` gives it its weights.

    Args:
        model: a `Decoder`, or a transformers model with a stream.
        mesh: the devices.
        dtype: that blocks compute in; None is that of their parameters.
        recompute: make the activations of every n-th block anew in the backward pass; 0 keeps all.
        compile: compile each block by itself.
        reshard: free a block's gathered parameters between its forward and its backward pass.
    """
    parts = find_parts(model)
    # The warning is of in-place operations on what a unit returns; states are values, which nobody changes.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    prepare_blocks(list(parts.blocks), recompute=recompute, compile=compile)
    policy = make_policy(dtype)
    for block in parts.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    if any(True for _ in parts.stream.parameters()):
        fully_shard(parts.stream, mesh=mesh, mp_policy=AS_STORED, reshard_after_forward=False)
        for opening in ("open", "unpack"):
            register_fsdp_forward_method(parts.stream, opening)
    return cast(nn.Module, fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False))


def make_policy(dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """Of units that compute in `dtype`; gradients are added in float32, and what a block gets is not cast."""
    reduce = None if dtype is None else torch.float32
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce, cast_forward_inputs=False)


def prepare_blocks(blocks: list[nn.Module], *, recompute: int = 0, compile: bool = False) -> None:
    """Activation checkpointing and compilation of blocks, which come before their sharding."""
    for number, block in enumerate(blocks):
        if recompute and number % recompute == 0:
            checkpoint(block)
        if compile:
            block.compile()
    if compile:
        # Every block is compiled from the same function: without this, blocks beyond the limit run uncompiled.
        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, 2 * len(blocks) + 8)


def gather_nothing(model: nn.Module) -> None:
    """Free gathered parameters after passes without a backward pass, so that `parameters` are the shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def set_exchange(model: nn.Module, last: bool) -> None:
    """Whether the next backward pass sends gradients to the other devices: only the last micro-batch of a step does."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last, recurse=False)


Named = tuple[str, torch.Size, torch.dtype]


@torch.no_grad()
def materialise(
    model: nn.Module, device: torch.device, whole: nn.Module | None, names: Sequence[Named] | None = None
) -> None:
    """Give a model in parts on the meta device the weights and buffers of one that the first process has.

    A tensor at a time is whole on a device. The values come from one process because those that are drawn depend on
    the whole tensor, and operations on a part of it would draw or set others.

    Args:
        model: on the meta device.
        device: where it goes.
        whole: the same model on the CPU, in the first process; None in the others.
        names: name, shape and dtype of all tensors of the whole model; None where every process has a part of each.
    """
    model.to_empty(device=device)
    if names is None and hasattr(model, "tie_weights"):
        cast(Any, model).tie_weights()  # to_empty makes a tensor for each name
    mine = dict(model.named_parameters()) | dict(model.named_buffers())
    theirs = {} if whole is None else dict(whole.named_parameters()) | dict(whole.named_buffers())
    for name, shape, dtype in names or [(name, t.shape, t.dtype) for name, t in mine.items()]:
        full = torch.empty(shape, dtype=dtype, device=device)
        if whole is not None:
            full.copy_(theirs[name])
        dist.broadcast(full, 0)
        if name in mine:
            put(mine[name], full)


@torch.no_grad()
def put(tensor: torch.Tensor, full: torch.Tensor) -> None:
    """Copy a device's part of a whole tensor that every device has."""
    if not isinstance(tensor, DTensor):
        tensor.copy_(full)
        return
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    part = full[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
    tensor.to_local().copy_(part)


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the parts of all devices; every device that has one takes part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
