"""Checkpoints: everything a run needs to go on to the same bits, without a pickle.

    checkpoints/step-00000120/
      model.safetensors        every weight that learns; the others are those that the run began with
      optimizer.safetensors    NAME/exp_avg, NAME/exp_avg_sq, NAME/step for every parameter that learns
      random.safetensors       states of torch's generators
      log.jsonl                the run's log up to this step
      state.json               counters and configuration
      SHA256SUMS               digests of all files above, as `sha256sum --check` reads them

A sharded model's has `shards/` in place of the first two, where every process writes its own parts and whichever
processes read them take what they hold: torch's distributed checkpoints in safetensors files. Whole files are read the
same way, so that any number of processes, one included, goes on from either.

A folder appears whole or not at all. Should the disk damage one all the same, in whatever file, its sums do not fit,
and the checkpoint before it is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from twoaxis.base.files import atomic_folder, file_errors, file_sha256, read_json, write_bytes, write_json, write_text
from twoaxis.base.machine import quiet_logger, quietly
from twoaxis.model.decoder import Decoder
from twoaxis.model.save import save_decoder, save_tensors, system_errors

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
    learning, moving = learned(engine.model), moments(job.optimizer, engine.model)
    if engine.rank != 0:
        if engine.sharded:
            job.saving = write_parts(Path(engine.gather("")[0]), learning | moving, engine.background)
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
            parts = write_parts(Path(engine.gather(str(place / SHARDS))[0]), learning | moving, engine.background)
            job.saving = _THREAD.submit(_complete, job, place, stack.pop_all(), parts)
        else:
            save_tensors(place / WEIGHTS, learning)
            save_tensors(place / OPTIMIZER, moving)
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
        from torch.distributed.checkpoint.api import CheckpointException

        saving, job.saving = job.saving, None
        with file_errors(job.folder.checkpoints):
            try:
                saving.result()
            except CheckpointException as error:  # of torch, and no `Exception`: it lists those of each process
                raise next(iter(error.failures.values()))[0] from None


def load_checkpoint(checkpoint: Checkpoint, job: Job) -> None:
    """Put weights, moments, generators and counters back to what they were."""
    model, optimizer, device = job.engine.model, job.optimizer, job.engine.device
    shards = checkpoint.path / SHARDS
    make_moments(optimizer)
    try:
        if job.engine.sharded or shards.is_dir():
            folder = shards if shards.is_dir() else checkpoint.path
            read_parts(folder, learned(model))
            filled = read_parts(folder, moments(optimizer, model), optional=True)
        else:
            fill(learned(model), load_file(checkpoint.path / WEIGHTS))
            filled = fill(moments(optimizer, model), load_file(checkpoint.path / OPTIMIZER), optional=True)
    except ValueError as error:
        raise ValueError(f"{checkpoint.path} does not fit the model: {error}; remove that folder") from error
    for name, parameter in model.named_parameters():
        if parameter in optimizer.state and f"{name}/step" not in filled:
            del optimizer.state[parameter]  # it has not had a gradient yet
    random = load_file(checkpoint.path / RANDOM)
    torch.set_rng_state(random["torch"])
    if "cuda" in random and device.type == "cuda":
        torch.cuda.set_rng_state(random["cuda"], device)
    job.counters.restore(checkpoint.counters)


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


FORMATS = "torch.distributed.checkpoint"
"""The logger in which torch remarks on formats that it would rather write."""


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Every weight of a model once, by the first of its names; what is not saved with a model is left out."""
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    tied = {id(parameter) for parameter in model.parameters()}
    kept = model.state_dict(keep_vars=True)
    return named | {name: t.detach() for name, t in kept.items() if name not in named and id(t) not in tied}


def learned(model: nn.Module, tensors: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Of weights by name, the model's own unless others are given, those that the model does not hold frozen."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    found = weights(model) if tensors is None else tensors
    return {name: tensor for name, tensor in found.items() if name not in frozen}


def weights_digest(tensors: dict[str, Tensor]) -> str:
    """SHA-256 over the names, types, shapes and bytes of weights, in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.to("cpu").contiguous().reshape(-1)
        digest.update(cast(Any, flat.view(torch.uint8).numpy()))
    return digest.hexdigest()


@torch.no_grad()
def fill(tensors: Mapping[str, Tensor], found: Mapping[str, Tensor], optional: bool = False) -> set[str]:
    """Copy tensors of the same names and shapes into others; returns the names, which may be fewer if `optional`."""
    if odd := sorted(set(found) - set(tensors) if optional else set(found) ^ set(tensors)):
        raise ValueError(f"{odd[0]} is in one of them only")
    for name, tensor in found.items():
        if tensor.shape != tensors[name].shape:  # which copy_ might expand
            raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, not {tuple(tensors[name].shape)}")
        tensors[name].copy_(tensor)
    return set(found)


def moments(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The moments and step counts of an optimiser by the names of the model's parameters."""
    return {
        f"{name}/{kind}": value
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def save_model(folder: Path, model: Any) -> None:
    """A model into a folder of its own; a file that the system refuses is a `FileError` that names it."""
    if isinstance(model, Decoder):
        save_decoder(folder, model)
        return
    with quietly(), system_errors(folder / "model.safetensors"):
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
