"""Weights and the optimiser's moments as tensors by name: in a model, in files, whole or in the parts of processes.

One process writes whole tensors. Of a sharded model every process writes its own parts, and whichever processes read
them take what they hold, by torch's distributed checkpoints in safetensors files (`shard-*`); whole files are read the
same way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from twoaxis.base.machine import quiet_logger
from twoaxis.model.decoder import Decoder
from twoaxis.model.save import save_decoder, system_errors

FORMATS = "torch.distributed.checkpoint"
"""The logger in which torch remarks on formats that it would rather write."""


def weights(model: nn.Module, *, frozen: bool = True) -> dict[str, Tensor]:
    """Every weight of a model once, by the first of its names, those that do not learn only if `frozen`.

    What is not saved with a model is left out.
    """
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    tied = {id(parameter) for parameter in model.parameters()}
    kept = model.state_dict(keep_vars=True)
    named |= {name: t.detach() for name, t in kept.items() if name not in named and id(t) not in tied}
    return named if frozen else learned(model, named)


def learned(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of weights by name those that the model does not hold frozen."""
    left = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {name: tensor for name, tensor in tensors.items() if name not in left}


def weights_digest(tensors: dict[str, Tensor]) -> str:
    """SHA-256 over the names, types, shapes and bytes of weights, in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.to("cpu").contiguous().reshape(-1)
        digest.update(cast(Any, flat.view(torch.uint8).numpy()))
    return digest.hexdigest()


def load_weights(model: nn.Module, tensors: dict[str, Tensor], *, frozen: bool = True) -> None:
    """The inverse of `weights`, in place."""
    here = weights(model, frozen=frozen)
    if set(tensors) != set(here):
        name = sorted(set(tensors) ^ set(here))[0]
        raise ValueError(f"{name} is in one of them only")
    with torch.no_grad():
        for name, tensor in tensors.items():
            if tensor.shape != here[name].shape:  # which copy_ might expand
                raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, not {tuple(here[name].shape)}")
            here[name].copy_(tensor)


def moments(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The moments and step counts of an optimiser by the names of the model's parameters."""
    return {
        f"{name}/{kind}": value
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """The inverse of `moments`; the learning rates are the loop's to set."""
    named = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in named.items()}
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    by_name: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, kind = key.rpartition("/")
        by_name.setdefault(name, {})[kind] = tensor
        wanted = () if kind == "step" else getattr(named.get(name), "shape", tensor.shape)
        if tensor.shape != wanted:
            raise ValueError(f"{key} has the shape {tuple(tensor.shape)}, not {tuple(wanted)}")
    if unknown := sorted(set(by_name) - set(order)):
        raise ValueError(f"it has moments of {unknown[0]}, which does not learn in this run")
    state = {number: by_name[name] for number, name in enumerate(order) if name in by_name}
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


def save_model(folder: Path, model: Any) -> None:
    """A model into a folder of its own; a file that the system refuses is a `FileError` that names it."""
    if isinstance(model, Decoder):
        save_decoder(folder, model)
        return
    with system_errors(folder / "model.safetensors"):
        model.save_pretrained(folder)


def write_parts(folder: Path, tensors: Mapping[str, Tensor], group: Any) -> Future[Any]:
    """Copy the parts that this process has of tensors, and have a thread write them; all processes do, into one folder.

    The tensors may change as soon as this returns; the group is on CPUs and used by nobody else meanwhile.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import async_save

    with quiet_logger(FORMATS):
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        parts = {name: tensor.contiguous() for name, tensor in tensors.items()}
        return cast("Future[Any]", async_save(parts, storage_writer=writer, process_group=group))


@torch.no_grad()
def read_parts(folder: Path, tensors: Mapping[str, Tensor], optional: bool = False) -> set[str]:
    """Fill tensors, or the parts of them that this process has, from files of whole tensors or of parts.

    Returns the names that were filled; if `optional`, some may be missing in the files.
    """
    import torch.distributed as dist
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    with quiet_logger(FORMATS):
        reader = HuggingFaceStorageReader(str(folder))
        there: dict[str, Any] = reader.read_metadata().state_dict_metadata
        for name, tensor in tensors.items():
            if name not in there and not optional:
                raise ValueError(f"{name} is not in {folder}")
            if name in there and there[name].size != tensor.shape:
                raise ValueError(f"{name} has the shape {tuple(there[name].size)}, not {tuple(tensor.shape)}")
        wanted = {name: tensor for name, tensor in tensors.items() if name in there}
        found = dict(wanted)
        load(found, storage_reader=reader, no_dist=not dist.is_initialized())
    for name, tensor in wanted.items():  # parts are filled in place, whole tensors may be new ones
        if found[name] is not tensor:
            tensor.copy_(found[name])
    return set(wanted)


def make_moments(optimizer: torch.optim.Optimizer) -> None:
    """Moments of zero for every parameter that has none yet: they must be there to be read."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                zeros = torch.zeros_like(parameter.detach())
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                optimizer.state[parameter] = {"step": step, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
