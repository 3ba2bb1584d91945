"""Checkpoints: everything a run needs to go on to the same bits, without a pickle.

    checkpoints/step-00000120/
      model.safetensors        every weight
      optimizer.safetensors    NAME/exp_avg, NAME/exp_avg_sq, NAME/step for every parameter that learns
      random.safetensors       states of torch's generators
      log.jsonl                the run's log up to this step
      state.json               counters and configuration
      SHA256SUMS               digests of all files above, as `sha256sum --check` reads them

A folder appears whole or not at all. Should the disk damage one all the same, in whatever file, its sums do not fit,
and the checkpoint before it is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from twoaxis.base.files import atomic_folder, file_errors, file_sha256, read_json, write_bytes, write_json, write_text

if TYPE_CHECKING:
    from twoaxis.training.loop import Job

WEIGHTS, OPTIMIZER, RANDOM = "model.safetensors", "optimizer.safetensors", "random.safetensors"
LOG, STATE, SUMS = "log.jsonl", "state.json", "SHA256SUMS"
FORMAT = 2
"""Number in state.json; a checkpoint with another one is passed over."""


class Checkpoint(NamedTuple):
    """A checkpoint whose files are what was written.

    Attributes:
        path: its folder.
        step: after which it was saved.
        counters: of the run at that step, see `Counters.to_dict`.
        log: the run's log up to that step.
    """

    path: Path
    step: int
    counters: dict[str, Any]
    log: bytes


def save_checkpoint(job: Job) -> None:
    """Write a checkpoint and remove the oldest ones; only the first process does."""
    if job.engine.rank != 0:
        return
    job.folder.check_claim()
    model, folder = job.engine.model, job.folder.checkpoints
    random = {"torch": torch.get_rng_state()}
    if job.engine.device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(job.engine.device)
    with atomic_folder(_place(folder, job.counters.step), replace=True) as place:
        save_tensors(place / WEIGHTS, weights(model))
        save_tensors(place / OPTIMIZER, optimizer_tensors(job.optimizer, model))
        save_tensors(place / RANDOM, random)
        write_bytes(place / LOG, job.folder.log.read_bytes() if job.folder.log.exists() else b"")
        state = {"format": FORMAT, "counters": job.counters.to_dict(), "key": job.run.key, "config": job.run.to_dict()}
        write_json(place / STATE, state)
        write_text(place / SUMS, _sums(place))
    for old in checkpoints(folder)[job.run.keep :]:
        shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(checkpoint: Checkpoint, job: Job) -> None:
    """Put weights, moments, generators and counters back to what they were."""
    model, device = job.engine.model, job.engine.device
    try:
        load_weights(model, load_file(checkpoint.path / WEIGHTS))
        load_optimizer(job.optimizer, model, load_file(checkpoint.path / OPTIMIZER))
    except ValueError as error:
        raise ValueError(f"{checkpoint.path} does not fit the model: {error}; remove that folder") from error
    random = load_file(checkpoint.path / RANDOM)
    torch.set_rng_state(random["torch"])
    if "cuda" in random and device.type == "cuda":
        torch.cuda.set_rng_state(random["cuda"], device)
    job.counters.restore(checkpoint.counters)


def newest_checkpoint(folder: Path, key: str, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest sound checkpoint of a run; None where there is none, and the run starts from the beginning.

    Args:
        folder: of the checkpoints.
        key: the run's.
        warn: called with a line for each one that is passed over.
    """
    paths = checkpoints(folder)
    for path in paths:
        try:
            return read_checkpoint(path, key)
        except ValueError as error:
            warn(f"{path.name} is damaged and passed over: {error}")
    if paths:
        warn("no checkpoint is left to go on from: the run starts from the beginning")
    return None


def read_checkpoint(path: Path, key: str) -> Checkpoint:
    """A checkpoint of the run with this key; a `ValueError` says why where it is not sound."""
    with file_errors(path / SUMS, "read"):
        sums = (path / SUMS).read_bytes()
    if sums != _sums(path).encode():
        raise ValueError(f"the files are not those that {path / SUMS} lists")
    state = read_json(path / STATE)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{path / STATE} is not of format {FORMAT}")
    step = state["counters"]["step"]
    if state["key"] != key or path != _place(path.parent, step):
        raise ValueError(f"it is step {step} of another run")
    return Checkpoint(path, step, state["counters"], (path / LOG).read_bytes())


def checkpoints(folder: Path) -> list[Path]:
    """The folders of checkpoints, the newest first."""
    return sorted(folder.glob("step-????????"), reverse=True) if folder.is_dir() else []


def remove_after(folder: Path, step: int) -> None:
    """Remove checkpoints of later steps, which were passed over: they would count among those to keep."""
    for path in checkpoints(folder):
        if path > _place(folder, step):
            shutil.rmtree(path, ignore_errors=True)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Every weight of a model once, by the first of its names; what is not saved with a model is left out."""
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    tied = {id(parameter) for parameter in model.parameters()}
    kept = model.state_dict(keep_vars=True)
    return named | {name: t.detach() for name, t in kept.items() if name not in named and id(t) not in tied}


def weights_digest(model: nn.Module) -> str:
    """SHA-256 over the names, types, shapes and bytes of all weights, in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights(model).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.to("cpu").contiguous().reshape(-1)
        digest.update(cast(Any, flat.view(torch.uint8).numpy()))
    return digest.hexdigest()


def load_weights(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Set the weights of a model, in place."""
    here = weights(model)
    if set(tensors) != set(here):
        name = sorted(set(tensors) ^ set(here))[0]
        raise ValueError(f"{name} is in one of them only")
    with torch.no_grad():
        for name, tensor in tensors.items():
            if tensor.shape != here[name].shape:  # which copy_ might expand
                raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, not {tuple(here[name].shape)}")
            here[name].copy_(tensor)


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The moments and step counts of an optimiser by the names of the model's parameters."""
    return {
        f"{name}/{kind}": value.detach().to("cpu")
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """The inverse of `optimizer_tensors`; the learning rates are the loop's to set."""
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
    """`save_pretrained` into a folder; a file that the system refuses is a `FileError` that names it."""
    with _system_errors(folder / WEIGHTS):
        model.save_pretrained(folder)


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file; one that the system refuses is a `FileError` that names it."""
    with _system_errors(path):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


@contextlib.contextmanager
def _system_errors(path: Path) -> Iterator[None]:
    """Turn the refusals that safetensors words itself into the system's."""
    with file_errors(path):
        try:
            yield
        except SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def _place(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _sums(folder: Path) -> str:
    """What `SHA256SUMS` has to say about the files of a checkpoint."""
    return "".join(f"{file_sha256(folder / name)}  {name}\n" for name in (WEIGHTS, OPTIMIZER, RANDOM, LOG, STATE))
