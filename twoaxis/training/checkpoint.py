"""Checkpoints: everything a run needs to go on to the same bits, without a pickle.

    checkpoints/step-00000120/
      model.safetensors        every weight
      optimizer.safetensors    NAME/exp_avg, NAME/exp_avg_sq, NAME/step for every parameter that learns
      random.safetensors       states of torch's generators and of NumPy's
      trainer_state.json       what transformers' Trainer keeps
      state.json               the run's account, its configuration, Python's generator, SHA-256 of the files above

A folder appears whole or not at all. Should the disk damage one all the same, `state.json` tells, and the one before it
is taken.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from twoaxis.base.files import atomic_folder, file_errors, file_sha256, read_json, write_json, write_text

WEIGHTS, OPTIMIZER, RANDOM = "model.safetensors", "optimizer.safetensors", "random.safetensors"
TRAINER, STATE = "trainer_state.json", "state.json"
FORMAT = 1


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Every weight of a model once, by the first of its names; what is not saved with a model is left out."""
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    tied = {id(parameter) for parameter in model.parameters()}
    kept = model.state_dict(keep_vars=True)
    found |= {name: tensor.detach() for name, tensor in kept.items() if name not in found and id(tensor) not in tied}
    return found


def weights_digest(model: nn.Module) -> str:
    """SHA-256 over the names, types, shapes and bytes of all weights, in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights(model).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.to("cpu").contiguous().reshape(-1)
        digest.update(cast(Any, flat.view(torch.uint8).numpy()))
    return digest.hexdigest()


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """A safetensors file; what the system refuses is a `FileError` that names it."""
    with _translated(path):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Turn the refusals that safetensors reports in words of its own into the system's, with the file's name."""
    with file_errors(path):
        try:
            yield
        except SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def save_model(folder: Path, model: Any) -> None:
    """`save_pretrained` into a folder, with the same errors."""
    with _translated(folder / WEIGHTS):
        model.save_pretrained(folder)


def optimizer_tensors(optimizer: Any, model: nn.Module) -> dict[str, Tensor]:
    """The moments and step counts of an optimiser by the names of the model's parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}/{kind}": value.detach().to("cpu").reshape(value.shape)
        for group in optimizer.param_groups
        for parameter in group["params"]
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer(optimizer: Any, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """The inverse of `optimizer_tensors`; the learning rates are the scheduler's to set."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = optimizer.state_dict()
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    by_name: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, kind = key.rpartition("/")
        by_name.setdefault(name, {})[kind] = tensor
    if unknown := sorted(set(by_name) - set(order)):
        raise ValueError(f"the checkpoint's optimizer knows {unknown[0]}, which does not learn in this run")
    state["state"] = {number: by_name[name] for number, name in enumerate(order) if name in by_name}
    optimizer.load_state_dict(state)


def random_states() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The states of all generators: tensors, and what is not a tensor."""
    numpy_state = cast(dict[str, Any], np.random.get_state(legacy=False))  # noqa: NPY002  it is the global one
    tensors = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64))}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    rest = {
        "numpy": [numpy_state["state"]["pos"], numpy_state["has_gauss"], numpy_state["gauss"]],
        "python": random.getstate(),
    }
    return tensors, rest


def restore_random(tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
    """The inverse of `random_states`."""
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
    position, has_gauss, gauss = rest["numpy"]
    key = tensors["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, position, has_gauss, gauss))  # noqa: NPY002
    version, words, gauss = rest["python"]
    random.setstate((version, tuple(words), gauss))


@contextlib.contextmanager
def own_random() -> Iterator[None]:
    """Leave all generators as they were found."""
    kept = random_states()
    try:
        yield
    finally:
        restore_random(*kept)


def save_checkpoint(
    folder: Path,
    *,
    model: nn.Module,
    optimizer: Any,
    trainer_state: str,
    state: dict[str, Any],
    keep: int,
) -> None:
    """Write a checkpoint whole and drop the oldest ones.

    Args:
        folder: of the checkpoints.
        model: not wrapped.
        optimizer: with the parameters of `model`.
        trainer_state: JSON of transformers' state.
        state: what else to keep, as JSON values; `state["account"]["step"]` names the checkpoint.
        keep: how many to keep.
    """
    place = folder / f"step-{state['account']['step']:08d}"
    tensors, rest = random_states()
    with atomic_folder(place, replace=True) as made:
        save_tensors(made / WEIGHTS, weights(model))
        save_tensors(made / OPTIMIZER, optimizer_tensors(optimizer, model))
        save_tensors(made / RANDOM, tensors)
        write_text(made / TRAINER, trainer_state)
        digests = {name: file_sha256(made / name) for name in (WEIGHTS, OPTIMIZER, RANDOM, TRAINER)}
        write_json(made / STATE, {"format": FORMAT, **state, "random": rest, "files": digests})
    for old in checkpoints(folder)[keep:]:
        shutil.rmtree(old, ignore_errors=True)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, the newest first."""
    return sorted(folder.glob("step-????????"), reverse=True) if folder.is_dir() else []


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The `state` of a checkpoint; a `ValueError` says why where it is not whole."""
    state = read_json(checkpoint / STATE)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{checkpoint / STATE} is not of format {FORMAT}")
    for name, digest in state["files"].items():
        if not (checkpoint / name).is_file():
            raise ValueError(f"{checkpoint / name} is missing")
        if file_sha256(checkpoint / name) != digest:
            raise ValueError(f"{checkpoint / name} is not what was written")
    return state


def newest(folder: Path, warn: Any) -> tuple[Path, dict[str, Any]] | None:
    """The newest whole checkpoint and its state, or None.

    Args:
        folder: of the checkpoints.
        warn: called with a line for each one that is passed over.
    """
    for checkpoint in checkpoints(folder):
        try:
            return checkpoint, read_state(checkpoint)
        except (ValueError, KeyError) as error:
            warn(f"{checkpoint.name} is damaged and passed over: {error}")
    return None


def load_weights(model: nn.Module, checkpoint: Path) -> None:
    """Set the weights of a model."""
    there, here = load_file(checkpoint / WEIGHTS), weights(model)
    if set(there) != set(here):
        name = sorted(set(there) ^ set(here))[0]
        raise ValueError(f"{checkpoint} does not fit the model: {name} is in one of them only")
    with torch.no_grad():
        for name, tensor in there.items():
            here[name].copy_(tensor)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    return load_file(path)
