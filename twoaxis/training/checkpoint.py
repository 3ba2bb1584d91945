"""Checkpoints: everything a run needs to go on to the same bits, without a pickle.

    checkpoints/step-00000120/
      model.safetensors        every weight that learns; the others are those that the run began with
      optimizer.safetensors    NAME/exp_avg, NAME/exp_avg_sq, NAME/step for every parameter that learns
      random.safetensors       states of torch's generators
      log.jsonl                the run's log up to this step
      state.json               counters and configuration
      SHA256SUMS               digests of all files above, as `sha256sum --check` reads them

A sharded model's has `shards/` in place of the first two, where every process writes what it holds. Any number of
processes, one included, goes on from either.

A folder appears whole or not at all. Should the disk damage one all the same, in whatever file, its sums do not fit,
and the checkpoint before it is used.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from twoaxis.base.files import atomic_folder, file_errors, file_sha256, read_json, write_bytes, write_json, write_text
from twoaxis.model.save import save_tensors
from twoaxis.training import tensors

if TYPE_CHECKING:
    from twoaxis.training.loop import Job

WEIGHTS, OPTIMIZER, RANDOM = "model.safetensors", "optimizer.safetensors", "random.safetensors"
LOG, STATE, SUMS, SHARDS = "log.jsonl", "state.json", "SHA256SUMS", "shards"
FORMAT = 2
"""Number in state.json; a checkpoint with another one is passed over."""
_THREAD = ThreadPoolExecutor(1, "checkpoint")
"""Completes the checkpoints of sharded models while the training goes on."""


class Checkpoint(NamedTuple):
    """A checkpoint whose files are what was written."""

    path: Path  # its folder
    step: int  # after which it was saved
    counters: dict[str, Any]  # of the run at that step, see `Counters.to_dict`
    log: bytes  # the run's log up to that step


def save_checkpoint(job: Job) -> None:
    """Write a checkpoint and remove the oldest ones: the first process does, and the others what they alone hold.

    Of a sharded model only the copies are made here; a thread writes them while the training goes on, and
    `wait_for_checkpoint` waits for it. A checkpoint that is not whole when a process dies is not there.
    """
    wait_for_checkpoint(job)
    engine = job.engine
    if engine.rank != 0:
        if engine.sharded:
            job.saving = tensors.write_parts(Path(engine.gather("")[0]), _all_tensors(job), engine.background)
        return
    job.folder.check_claim()
    random = {"torch": torch.get_rng_state()}
    if engine.device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(engine.device)
    state = {"format": FORMAT, "counters": job.counters.to_dict(), "key": job.run.key, "config": job.run.to_dict()}
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(atomic_folder(_place(job.folder.checkpoints, job.counters.step), replace=True))
        save_tensors(place / RANDOM, random)
        write_bytes(place / LOG, job.folder.log.read_bytes() if job.folder.log.exists() else b"")
        write_json(place / STATE, state)
        if engine.sharded:
            (place / SHARDS).mkdir()
            parts = tensors.write_parts(
                Path(engine.gather(str(place / SHARDS))[0]), _all_tensors(job), engine.background
            )
            job.saving = _THREAD.submit(_complete, job, place, stack.pop_all(), parts)
        else:
            save_tensors(place / WEIGHTS, tensors.weights(engine.model, frozen=False))
            save_tensors(place / OPTIMIZER, tensors.moments(job.optimizer, engine.model))
            _complete(job, place, stack.pop_all(), None)


def _complete(job: Job, place: Path, stack: contextlib.ExitStack, parts: Future[Any] | None) -> None:
    """Put a checkpoint in its place as soon as its parts are written, and remove the oldest ones."""
    with stack:
        if parts is not None:
            parts.result()
        write_text(place / SUMS, _sums(place))
    for old in checkpoints(job.folder.checkpoints)[job.run.keep :]:
        shutil.rmtree(old, ignore_errors=True)


def wait_for_checkpoint(job: Job) -> None:
    """Wait until the checkpoint that is being written is there; what went wrong with it is raised here."""
    if job.saving is not None:
        saving, job.saving = job.saving, None
        saving.result()


def load_checkpoint(checkpoint: Checkpoint, job: Job) -> None:
    """Put weights, moments, generators and counters back to what they were."""
    model, device, shards = job.engine.model, job.engine.device, checkpoint.path / SHARDS
    try:
        if job.engine.sharded or shards.is_dir():
            _load_parts(job, shards if shards.is_dir() else checkpoint.path)
        else:
            tensors.load_weights(model, load_file(checkpoint.path / WEIGHTS), frozen=False)
            tensors.load_optimizer(job.optimizer, model, load_file(checkpoint.path / OPTIMIZER))
    except ValueError as error:
        raise ValueError(f"{checkpoint.path} does not fit the model: {error}; remove that folder") from error
    random = load_file(checkpoint.path / RANDOM)
    torch.set_rng_state(random["torch"])
    if "cuda" in random and device.type == "cuda":
        torch.cuda.set_rng_state(random["cuda"], device)
    job.counters.restore(checkpoint.counters)


def _all_tensors(job: Job) -> dict[str, Tensor]:
    return tensors.weights(job.engine.model, frozen=False) | tensors.moments(job.optimizer, job.engine.model)


def _load_parts(job: Job, folder: Path) -> None:
    """What this process holds of weights and moments, from a folder of whole tensors or of parts."""
    model, optimizer = job.engine.model, job.optimizer
    tensors.read_parts(folder, tensors.weights(model, frozen=False))
    tensors.make_moments(optimizer)
    filled = tensors.read_parts(folder, tensors.moments(optimizer, model), optional=True)
    for name, parameter in model.named_parameters():
        if parameter in optimizer.state and f"{name}/step" not in filled:
            del optimizer.state[parameter]  # it has not had a gradient yet


def newest_checkpoint(folder: Path, key: str, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest sound checkpoint of the run with this key; `warn` is called with a line for each one passed over.

    None where there is none, and the run starts from the beginning.
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


def _place(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _sums(folder: Path) -> str:
    """What `SHA256SUMS` has to say about the files of a checkpoint."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return "".join(f"{file_sha256(folder / name)}  {name}\n" for name in names if name != SUMS)
