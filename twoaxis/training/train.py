"""One training run, in one folder, which can be killed at any time and taken up again to the same bits.

    train(TrainConfig(stream="deep_delta", steps=500), "runs/delta")

The same call starts a run, goes on with it, or returns the result of a finished one:

    run.json    log.jsonl    checkpoints/   ->   model/    result.json       see `twoaxis.training.results`

What is guaranteed: on one machine, with the same number of threads and the same versions, two runs of one configuration
end in the same weights and the same log, times apart, however often either was interrupted. On a GPU this holds as far
as its kernels are deterministic.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twoaxis.base import files
from twoaxis.base.interrupt import Interrupted, StopSignal
from twoaxis.training.build import check, flops_per_token, learn, make_model, model_config, resolve, source_digest
from twoaxis.training.config import RUNNING, TrainConfig
from twoaxis.training.machine import prepared, rank, training_device, warn, world
from twoaxis.training.reporting import check_reports, make_reports
from twoaxis.training.results import CHECKPOINTS, LOG, MODEL, RUN, Result, load_log, load_result, save_result

if TYPE_CHECKING:
    from twoaxis.data.load import Data
    from twoaxis.training.trainer import Job, LabTrainer

__all__ = ["Interrupted", "finished", "flops_per_token", "model_config", "train"]

FORMAT = 1
"""Of run.json."""


def train(
    config: TrainConfig,
    folder: str | Path,
    *,
    watch: Callable[[int, float | None], None] | None = None,
    data: Data | None = None,
) -> Result:
    """Run a training, or take up the one in `folder`.

    Args:
        config: the run. A folder that holds another one is refused.
        folder: its place; made if it is not there.
        watch: told the step and its loss after every step, and once at the start with the step and None.
        data: of the run, where it is loaded already; None loads what the configuration names.

    Raises:
        Interrupted: after Ctrl-C or SIGTERM; a checkpoint is written, and the same call goes on from there.
    """
    config, folder = resolve(config), Path(folder)
    done = finished(config, folder)
    if done is not None:
        return done
    check(config)
    check_reports(config.report_to)
    with contextlib.ExitStack() as stack:
        if rank() == 0:
            stack.enter_context(files.claim(folder))
            files.remove_partial(folder)
            files.remove_partial(folder / CHECKPOINTS)
            done = finished(config, folder)  # by the process that had the folder before
            if done is not None:
                return done
        stack.enter_context(prepared(config.threads))
        if data is None:
            from twoaxis.data.load import load_data

            data = load_data(config)
        return _run(config, folder, data, watch)


def finished(config: TrainConfig, folder: str | Path) -> Result | None:
    """The result of a run, if it is finished; a folder that holds another run is refused.

    Args:
        config: the run.
        folder: its place.
    """
    config, folder = resolve(config), Path(folder)
    if (folder / RUN).exists():
        there = TrainConfig.from_dict(files.read_json(folder / RUN)["config"])
        if there.key != config.key:
            old, new = there.to_dict(), config.to_dict()
            differing = [name for name in new if old[name] != new[name] and name not in RUNNING]
            told = "; ".join(f"{name} is {old[name]!r} there and {new[name]!r} here" for name in differing)
            raise ValueError(f"{folder} holds another run: {told}. Choose another folder, or remove it")
    done = load_result(folder)
    if done is not None:  # a process that was killed at the very end may have left them
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    return done


def _run(config: TrainConfig, folder: Path, data: Data, watch: Any) -> Result:
    """From the data to the result."""
    from twoaxis.training.trainer import Diverged, LabTrainer, make_arguments

    arguments = make_arguments(config, folder, training_device(config.device), world())
    job, resumed = _prepare(config, folder, data, watch, arguments.device)
    trainer = LabTrainer(job, arguments, make_reports(config.report_to, folder))
    try:
        with job.stop.listening():
            trainer.train(resume_from_checkpoint=resumed)
    except Diverged as error:
        trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
        result = _keep(job, status="diverged", message=f"{error}; the run in {folder} was stopped there")
    else:
        if job.account.step < job.account.steps:
            told = f"stopped after step {job.account.step} of {job.account.steps}; the same command goes on from there"
            raise Interrupted(told, job.stop.signal)
        result = _finish(job, trainer, data)
    if job.stop.requested:  # in the last step: there was nothing left to stop, but whoever called may have more to do
        raise Interrupted("stopped; this run was at its end and its result is saved", job.stop.signal)
    return result


def _prepare(config: TrainConfig, folder: Path, data: Data, watch: Any, device: Any) -> tuple[Job, str | None]:
    """The model, what it learns from and what is done already; also the checkpoint to go on from."""
    from twoaxis.training import checkpoint as saving
    from twoaxis.training.account import Account
    from twoaxis.training.trainer import Job

    found = saving.newest(folder / CHECKPOINTS, warn)
    model = make_model(config, data.vocab_size, data.end)
    groups = learn(config, model)
    flops = flops_per_token(config, model.config)
    account = Account(steps=config.total_steps, tokens_per_step=config.tokens_per_step, flops_per_token=flops)
    if found is not None:
        account = Account(**found[1]["account"])
    if config.recompute:
        model.gradient_checkpointing_enable(every_n_layers=config.recompute)
    job = Job(
        config=config,
        folder=folder,
        model=model.to(device),
        groups=groups,
        examples=data.train(config.seed, config.total_steps * config.batch),
        held_out=data.held_out(config.eval_examples),
        answers=data.answers,
        account=account,
        stop=StopSignal(),
        watch=watch if rank() == 0 else None,
    )
    if (folder / RUN).exists():
        _check_same(job, data)
    elif rank() == 0:
        _describe(job, data)
        _warn_of_closed(model)
    if rank() == 0:
        files.JsonLines(folder / LOG).truncate(lambda record: record["step"] <= account.step)
    if config.compile:
        model.compile()
    return job, None if found is None else str(found[0])


def _warn_of_closed(model: Any) -> None:
    """Say which of the parameters that are to learn cannot, as a retrofit has found."""
    from twoaxis.pretrained.record import closed_paths, record_of

    record = record_of(model)
    if record is not None:
        learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        for line in closed_paths({name: why for name, why in record.still.items() if name.split("[")[0] in learning}):
            warn(f"warning: {line}")


def _check_same(job: Job, data: Data) -> None:
    """Refuse to go on with other data or another model than the run began with."""
    from twoaxis.base.machine import versions

    there, config = files.read_json(job.folder / RUN), job.config
    if there["data"]["fingerprint"] != data.fingerprint:
        raise ValueError(
            f"the data {data.name} has changed since the run in {job.folder} began; start anew in another folder"
        )
    if config.source is not None and there["source"] != source_digest(config.source):
        raise ValueError(f"the model in {config.source} has changed since the run in {job.folder} began")
    now, was = versions() | _workers(), there["versions"] | there["workers"]
    changed = [f"{name} was {was[name]} and is {now.get(name)}" for name in was if was[name] != now.get(name)]
    if changed:
        warn(f"{'; '.join(changed)}: the numbers may differ in their last bits from those of an uninterrupted run")


def _describe(job: Job, data: Data) -> None:
    """Write run.json, before the first step."""
    from twoaxis.base.machine import hardware, versions
    from twoaxis.training import checkpoint as saving

    config, model = job.config, job.model
    about = {
        "format": FORMAT,
        "config": config.to_dict(),
        "key": config.key,
        "data": data.describe() | {"name": data.name, "fingerprint": data.fingerprint},
        "model": model.config.to_dict(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "learned": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "flops_per_token": job.account.flops_per_token,
        "peak_memory": _peak_memory(job) if config.measure_memory else None,
        "initial_weights": saving.weights_digest(model),
        "source": None if config.source is None else source_digest(config.source),
        "versions": versions(),
        "hardware": hardware(),
        "workers": _workers(),
    }
    files.write_json(job.folder / RUN, about)


def _peak_memory(job: Job) -> int:
    """Bytes at the peak of one step of this process, with its own optimiser and precision."""
    from torch import Tensor, nn

    from twoaxis.training.measure import next_token_loss, peak_memory
    from twoaxis.training.trainer import autocast, optimizer_of

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        with autocast(job.config, tokens.device):
            return next_token_loss(model, tokens)

    config = job.config
    return peak_memory(
        job.model,
        config.batch // world(),
        config.context,
        accumulate=config.accumulate,
        loss=loss,
        optimizer=lambda model: optimizer_of(job, model),
    ).peak


def _finish(job: Job, trainer: LabTrainer, data: Data) -> Result:
    """The final model and the result; it is safe to be killed in between."""
    from twoaxis.training import checkpoint as saving

    model = job.model
    if job.config.save_model and rank() == 0:
        model.config.use_cache = True  # the Trainer switches it off
        with files.atomic_folder(job.folder / MODEL, replace=True) as made:
            saving.save_model(made, model)
            data.save_tokenizer(made)
            _stay_retrofit(job.config, made)
    evaluated = trainer.evaluated or [r for r in load_log(job.folder) if "held_out_loss" in r][-1]
    loss = evaluated["held_out_loss"]
    return _keep(
        job,
        loss=loss,
        bits_per_byte=None if data.bytes_per_token is None else loss / math.log(2) / data.bytes_per_token,
        accuracy=evaluated.get("accuracy"),
        chance=data.chance,
        weights=saving.weights_digest(model),
    )


def _stay_retrofit(config: TrainConfig, made: Path) -> None:
    """A retrofitted model that was trained on remains one: what is new in it stays known."""
    if config.source is not None:
        from twoaxis.pretrained.record import read_record, write_record

        record = read_record(config.source)
        if record is not None:
            write_record(record, made)


def _keep(job: Job, **outcome: Any) -> Result:
    """Write the result, then drop what only an unfinished run needs."""
    about, account = files.read_json(job.folder / RUN), job.account
    made: dict[str, Any] = {
        "status": "finished",
        "steps": account.step,
        "tokens": account.position["tokens"],
        "flops": account.position["flops"],
        "seconds": account.seconds,
        "tokens_per_second": account.tokens_per_second,
        "parameters": about["learned"],
        "peak_memory": about["peak_memory"],
        "train_loss": account.train_loss,
        **dict.fromkeys(("loss", "bits_per_byte", "accuracy", "chance", "weights")),
    }
    result = Result(**made | outcome, folder=str(job.folder))
    if rank() == 0:
        save_result(job.folder, result)
        shutil.rmtree(job.folder / CHECKPOINTS, ignore_errors=True)
    return result


def _workers() -> dict[str, Any]:
    """What else decides the order of summation."""
    import torch

    return {"threads": torch.get_num_threads(), "processes": world()}
