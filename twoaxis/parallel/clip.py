"""The norm of gradients that lie in parts on several devices, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate


def squared_norm(grads: Iterable[Tensor], device: torch.device) -> Tensor:
    """The sum of squares of whole gradients; of a part, the devices that share the tensor add theirs."""
    plain = torch.zeros((), device=device)
    by_group: dict[tuple[int, ...], tuple[list[dist.ProcessGroup], Tensor]] = {}
    for grad in grads:
        if not isinstance(grad, DTensor):
            plain += grad.float().square().sum()
            continue
        mesh = grad.device_mesh
        shared = [d for d, placement in enumerate(grad.placements) if not isinstance(placement, Replicate)]
        groups = [mesh.get_group(d) for d in shared]
        key = tuple(id(group) for group in groups)
        before = by_group.get(key, (groups, torch.zeros((), device=device)))[1]
        by_group[key] = groups, before + grad.to_local().float().square().sum()
    for groups, total in by_group.values():
        for group in groups:
            dist.all_reduce(total, group=group)
        plain += total
    return plain


def scale_gradients(grads: Iterable[Tensor], norm: Tensor, largest: float) -> None:
    """Scale gradients, in place, whose norm together is more than `largest`; 0 leaves them."""
    if largest:
        factor = (largest / (norm + 1e-6)).clamp(max=1.0)  # as torch's clip_grad_norm_
        for grad in grads:
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            local.mul_(factor.to(local.dtype))
