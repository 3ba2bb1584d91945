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
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from twoaxis.depth.stream import Stream

AS_STORED = MixedPrecisionPolicy(cast_forward_inputs=False)
"""Parameters and gradients stay as they are stored, and what a unit gets is not cast."""


def find_blocks(model: Any) -> nn.ModuleList:
    """The blocks of a `Decoder`, or the layers of a transformers model that a stream was put on."""
    if not isinstance(getattr(model, "stream", None), Stream):
        raise ValueError(f"{type(model).__name__} has no residual stream of ours: put one on it first")
    if not hasattr(model, "backbone"):
        return model.layers
    from twoaxis.model.graft_layers import find_layers  # it needs transformers, which a decoder does not

    return find_layers(model.backbone)


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype | None = None,  # that blocks compute in; None is that of their parameters
    recompute: int = 0,  # make the activations of every n-th block anew in the backward pass; 0 keeps all
    compile: bool = False,  # each block by itself
    reshard: bool = True,  # free a block's gathered parameters between its forward and its backward pass
) -> nn.Module:
    """Shard a model in place over a mesh: of one dimension, or of two whose first replicates.

    It may be on the meta device; then `materialise` gives it its weights.
    """
    blocks = find_blocks(model)
    prepare_blocks(blocks, recompute=recompute, compile=compile)
    narrow = {} if dtype is None else {"param_dtype": dtype, "reduce_dtype": torch.float32}
    policy = MixedPrecisionPolicy(**narrow, cast_forward_inputs=False)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    shard_stream(model, mesh)
    return cast(nn.Module, fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False))


def shard_stream(model: Any, mesh: DeviceMesh) -> None:
    """Shard a model's stream alone, as a unit that stays float32; whoever shards the model afterwards passes it by."""
    # The warning is of in-place operations on what a unit returns; states are values, which nobody changes.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    if any(True for _ in model.stream.parameters()):
        fully_shard(model.stream, mesh=mesh, mp_policy=AS_STORED, reshard_after_forward=False)
        for opening in ("open", "unpack"):
            register_fsdp_forward_method(model.stream, opening)


def prepare_blocks(blocks: Sequence[nn.Module] | nn.ModuleList, *, recompute: int = 0, compile: bool = False) -> None:
    """Activation checkpointing and compilation of blocks, which come before their sharding."""
    for number, block in enumerate(blocks):
        if recompute and number % recompute == 0:
            checkpoint(block)
        if compile:
            block.compile()
    if compile:
        # Blocks share a function: else those beyond a limit run uncompiled, and numbers of sites are taken to vary.
        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, 2 * len(blocks) + 8)
        config.specialize_int = True


def units(model: nn.Module) -> Iterator[FSDPModule]:
    """The modules of a model that are sharded each by itself."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


@torch.no_grad()
def materialise(model: nn.Module, device: torch.device, whole: nn.Module | None) -> None:
    """Give a model in parts on the meta device the weights and buffers of one that the first process has.

    A tensor at a time is whole on a device, and processes may lack tensors that others have. The values come from one
    process because those that are drawn depend on the whole tensor, and operations on a part of it would draw others.
    """
    model.to_empty(device=device)
    if hasattr(model, "tie_weights"):
        cast(Any, model).tie_weights()  # to_empty makes a tensor for each name
    mine, theirs = _tensors(model), {} if whole is None else _tensors(whole)
    listed = [[(name, tensor.shape, tensor.dtype) for name, tensor in theirs.items()]]
    dist.broadcast_object_list(listed, 0)
    for name, shape, dtype in listed[0]:
        full = torch.empty(shape, dtype=dtype, device=device) if whole is None else theirs[name].to(device).contiguous()
        dist.broadcast(full, 0)
        if (own := mine.get(name)) is not None:
            parted = isinstance(own, DTensor)
            own.copy_(distribute_tensor(full, own.device_mesh, own.placements, src_data_rank=None) if parted else full)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def whole_tensor(tensor: Tensor) -> Tensor:
    """A tensor with the parts of all devices; every device that has one takes part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def total_norm(grads: Iterable[Tensor]) -> Tensor:
    """The norm of gradients together, some of them in parts; devices that share a tensor take part together."""
    alike: dict[Any, list[Tensor]] = {}  # torch takes those of one mesh that lie there in one way
    for grad in grads:
        alike.setdefault((grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None, []).append(grad)
    return nn.utils.get_total_norm([whole_tensor(nn.utils.get_total_norm(group)) for group in alike.values()])
