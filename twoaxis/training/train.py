"""One training run, in one folder, which can be killed at any time and resumed to the same bits.

    train(TrainConfig(stream="deep_delta", steps=500), "runs/delta")

The same call starts a run, goes on with it, or returns the result of a finished one; what the folder holds is said in
`twoaxis.training.folder`, what a step does in `twoaxis.training.loop`.

On one machine, with the same number of threads and the same versions, two runs of one configuration end in the same
weights and the same log, times apart, however often either was interrupted. On a GPU this holds as far as its kernels
are deterministic.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twoaxis.base.files import atomic_folder
from twoaxis.base.interrupt import Interrupted, StopSignal
from twoaxis.base.machine import quietly, reproducible
from twoaxis.training.engines.processes import (
    find_place,
    gather,
    join_processes,
    lost_processes,
    make_engine,
    read_degrees,
    warn,
    world,
)
from twoaxis.training.folder import RunFolder, check_loggers, make_loggers
from twoaxis.training.setup import check, make_model, make_optimizer, resolve

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from twoaxis.data.load import Data
    from twoaxis.training.checkpoint import Checkpoint
    from twoaxis.training.config import TrainConfig
    from twoaxis.training.engines.engine import Engine
    from twoaxis.training.loop import Job, OnStep
    from twoaxis.training.result import Result

EQUAL = 1e-6
"""Part of the largest number by which parallel streams may differ and be called equal."""
FINISHED = -1
"""Stands for a finished run where processes agree on the step to go on from."""


def train(run: TrainConfig, out: str | Path, *, data: Data | None = None, on_step: OnStep | None = None) -> Result:
    """Train a run, or resume the one in `out`.

    Args:
        run: its configuration. A folder that holds another run is refused.
        out: its folder; created if it is not there.
        data: its data, where they are loaded already; None loads what the configuration names.
        on_step: called with the step and its loss after every step, and once at the start with the step and None.

    Raises:
        Interrupted: after a signal; a checkpoint is written, and the same call goes on from there.
    """
    run, folder = resolve(run), RunFolder(out)
    result = folder.finished(run) if world() == 1 else None  # several processes agree on it below
    if result is not None:
        return result
    check(run)
    check_loggers(run.report_to)
    place, stop = find_place(run.device), StopSignal()
    degrees = read_degrees(run, place.world)  # what does not fit is refused before data is read

    with contextlib.ExitStack() as stack:
        stack.enter_context(stop.listening())
        stack.enter_context(quietly())
        if data is None:
            from twoaxis.data.load import TASK, bars, load_data

            if not run.data[0].startswith(TASK):
                from twoaxis.data.sources import check_outside

                check_outside(out, run.data, "the run")
            with bars() if place.rank == 0 else contextlib.nullcontext() as watch:  # one process shows them
                data = load_data(run, watch=watch)
        check(run, data.vocab_size)  # before there is a folder
        if place.rank == 0:
            stack.enter_context(folder.claimed())
        stack.enter_context(reproducible(run.threads))
        stack.enter_context(lost_processes())
        join_processes(place)
        _check_same(gather(run, place.world))
        engine = make_engine(run, place, degrees)
        result, checkpoint = _where(run, folder, engine)
        if result is not None:
            return result
        job = _prepare(run, folder, engine, data, checkpoint, stop)
        if on_step is not None and place.rank == 0:
            job.on_step = on_step
        result = _train(job, data)
        engine.wait()  # a process that ends early would close the group under the others
    if stop.requested:  # in the last step: there was nothing left to stop, but whoever called may have more to do
        raise Interrupted("stopped; this run was at its end and its result is saved", stop.signal)
    return result


def _check_same(runs: list[TrainConfig]) -> None:
    """Refuse processes that were not all started with the same options, as by other commands on other machines."""
    for rank, other in enumerate(runs):
        if changed := runs[0].changes(other, "parallel"):
            raise ValueError(
                f"process {rank} was started otherwise than process 0: {changed}; give all the same command"
            )


def _where(run: TrainConfig, folder: RunFolder, engine: Engine) -> tuple[Result | None, Checkpoint | None]:
    """The result of a run that another process has finished, or the checkpoint to go on from: the first process says.

    A process that does not see what the first one sees, because they do not share the folder, is an error.
    """
    from twoaxis.training.checkpoint import newest_checkpoint, read_checkpoint

    result = checkpoint = None
    if engine.rank == 0:
        result = folder.finished(run)
        checkpoint = None if result is not None else newest_checkpoint(folder.checkpoints, run.key, warn)
    own = FINISHED if result is not None else 0 if checkpoint is None else checkpoint.step
    step = engine.gather(own)[0]
    if engine.rank > 0:
        result = folder.finished(run)
        path = folder.checkpoints / f"step-{step:08d}"
        if (result is None) == (step == FINISHED) or (step > 0 and not path.is_dir()):
            raise ValueError(f"process {engine.rank} sees other files in {folder.path} than process 0: share it")
        checkpoint = read_checkpoint(path, run.key) if step > 0 else None
    return result, checkpoint


def _prepare(
    run: TrainConfig, folder: RunFolder, engine: Engine, data: Data, checkpoint: Checkpoint | None, stop: StopSignal
) -> Job:
    """The run, at the step that it goes on from."""
    import torch

    from twoaxis.model.flops import training_flops
    from twoaxis.pretrained.model_for_training import source_digest
    from twoaxis.training.checkpoint import learned, load_checkpoint, remove_after, weights_digest
    from twoaxis.training.loop import Counters, Job

    model = engine.build(lambda: make_model(run, data.vocab_size, data.end))
    initial = weights_digest(learned(model, engine.weights()))  # the source's digest stands for the rest
    source = None if run.source is None else source_digest(run.source)
    job = Job(
        run=run,
        folder=folder,
        engine=engine,
        optimizer=make_optimizer(run, model),
        examples=data.train(run.seed, run.total_steps * run.batch),
        held_out=_held_out(run, data, run.eval_examples),
        final=_held_out(run, data, run.judged_examples),
        answers=data.answers,
        counters=Counters(
            steps=run.total_steps,
            tokens_per_step=run.tokens_per_step,
            flops_per_token=training_flops(model, run.context, recompute=run.recompute).total,
        ),
        stop=stop,
    )
    if engine.rank == 0 and folder.about() is None:
        folder.describe(_facts(job) | {"data": data.describe(), "initial_weights": initial, "source": source})
        if run.source is not None:
            _warn_of_closed(model)
    engine.wait()
    folder.check_same(data, source)
    torch.manual_seed(run.seed)
    if checkpoint is not None:
        load_checkpoint(checkpoint, job)
    if engine.rank == 0:
        folder.restore_log(checkpoint)
        remove_after(folder.checkpoints, job.counters.step)
        job.loggers = make_loggers(run, folder, job.counters.step)
    return job


def _held_out(run: TrainConfig, data: Data, count: int) -> Dataset[Any]:
    """So many held-out examples behind those that are left to others."""
    from torch.utils.data import Subset

    examples: Any = data.held_out(run.eval_skip + count)
    if len(examples) <= run.eval_skip:
        raise ValueError(
            f"eval_skip leaves {run.eval_skip} held-out examples to others, and there are {len(examples)}: give more "
            "text, a larger held_out or smaller final_examples"
        )
    return Subset(examples, range(run.eval_skip, len(examples))) if run.eval_skip else examples


def _facts(job: Job) -> dict[str, Any]:
    """What run.json says of the run itself."""
    from torch import Tensor, nn

    from twoaxis.model.loss import next_token_loss
    from twoaxis.training.engines.engine import autocast
    from twoaxis.training.measure import peak_memory

    run, engine = job.run, job.engine
    parameters, learned = engine.parameters

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        with autocast(run, engine.device):
            return next_token_loss(model, tokens)

    peak = None  # of one step of this process, with its own optimiser and precision
    if run.measure_memory and not engine.sharded:
        batch, make = run.batch // engine.world, lambda model: make_optimizer(run, model)
        step: dict[str, Any] = {"accumulate": run.accumulate, "loss": loss, "optimizer": make}
        peak = peak_memory(engine.model, batch, run.context, **step).peak
    return {
        "config": run.to_dict(),
        "key": run.key,
        "model": engine.model.config.to_dict(),
        "parameters": parameters,
        "learned": learned,
        "flops_per_token": job.counters.flops_per_token,
        "peak_memory": peak,
    }


def _warn_of_closed(model: Any) -> None:
    """Name the parameters that are to learn and cannot, as the retrofit noted."""
    from twoaxis.pretrained.record import closed_paths, record_of

    record = record_of(model)
    if record is not None:
        learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        for line in closed_paths({name: why for name, why in record.stuck.items() if name.split("[")[0] in learning}):
            warn(f"warning: {line}")


def _train(job: Job, data: Data) -> Result:
    """From the step at hand to the result, which is written."""
    from twoaxis.training.checkpoint import wait_for_checkpoint
    from twoaxis.training.loop import Diverged, fit

    counters, about = job.counters, job.folder.about()
    assert about is not None
    job.stop.patient = True  # from here on a checkpoint can be written first
    outcome: dict[str, Any] = {"status": "finished"}
    try:
        if not fit(job):
            at = f"stopped after step {counters.step} of {counters.steps}"
            raise Interrupted(f"{at}; the same command goes on from there", job.stop.signal)
    except Diverged as error:
        outcome = {"status": "diverged", "message": f"{error}; the run in {job.folder.path} was stopped there"}
    finally:
        for logger in job.loggers:
            logger.close()
    if outcome["status"] == "finished":
        outcome |= _measure(job, data)
        if job.run.save_model:
            _keep(job, data)
    wait_for_checkpoint(job)
    from twoaxis.training.result import Result

    result = Result(
        steps=counters.step,
        **{name: counters.position[name] for name in ("tokens", "flops", "seconds")},
        tokens_per_second=counters.tokens_per_second,
        parameters=about.learned,
        peak_memory=about.peak_memory,
        train_loss=counters.train_loss,
        folder=str(job.folder.path),
        **outcome,
    )
    if job.engine.rank == 0:
        job.folder.finish(result)
    return result


def _measure(job: Job, data: Data) -> dict[str, Any]:
    """The fields of a result that are about the final model; it is safe to be killed before they are written."""
    from twoaxis.training.checkpoint import learned, weights_digest
    from twoaxis.training.loop import evaluate

    engine = job.engine
    # a run that goes on behind its last step has evaluated nothing yet
    evaluated = job.evaluated or evaluate(job, job.final)
    loss = evaluated["held_out_loss"]
    return {
        "loss": loss,
        "row_losses": tuple(None if row is None else float(f"{row:.7g}") for row in job.row_losses),
        "bits_per_byte": None if data.bytes_per_token is None else loss / math.log(2) / data.bytes_per_token,
        "accuracy": evaluated.get("accuracy"),
        "chance": data.chance,
        "unmoved": _unmoved(engine, job.optimizer) if job.counters.step else (),
        "equal_streams": _equal_streams(job),
        "weights": weights_digest(learned(engine.model, engine.weights())),
    }


def _keep(job: Job, data: Data) -> None:
    """Write the final model; the first process writes what all have."""
    run, folder, engine = job.run, job.folder, job.engine
    if run.model.get("lora"):
        from twoaxis.pretrained.low_rank import merge_low_rank

        merge_low_rank(engine.model)
    if engine.rank > 0:
        engine.export(folder.model)
        return
    folder.check_claim()
    with atomic_folder(folder.model, replace=True) as place:
        engine.export(place)
        data.save_tokenizer(place)
        if run.source is not None and not run.model.get("lora"):  # which is no part of the saved model
            from twoaxis.pretrained.record import read_record, write_record
            from twoaxis.pretrained.retrofit import make_record

            begun: Any = getattr(engine.model, "begun", None)  # a retrofit stays one: what is new in it is known
            made = begun and make_record(begun, engine.model)
            if (record := made or read_record(run.source)) is not None:
                write_record(record, place)


def _unmoved(engine: Engine, optimizer: Any) -> tuple[str, ...]:
    """Names of parameters that learn and never had a gradient other than zero: AdamW has no second moment of them."""
    moved: dict[str, bool] = {}
    for name, parameter in engine.model.named_parameters():
        if parameter.requires_grad:
            moment = optimizer.state.get(parameter, {}).get("exp_avg_sq")
            part = moment.to_local() if hasattr(moment, "to_local") else moment
            moved[name] = part is not None and bool(part.any())
    listed = engine.gather(moved)  # of a parameter in parts, one process may have the part that moved
    names = dict.fromkeys(name for theirs in listed for name in theirs)
    return tuple(name for name in names if not any(theirs.get(name) for theirs in listed))


def _equal_streams(job: Job) -> bool:
    """Whether parallel streams are copies of each other where they are put together, on a held-out example."""
    from torch.utils.data import Subset

    from twoaxis.depth.parallel import ParallelStreams

    found = [module for module in job.engine.model.modules() if isinstance(module, ParallelStreams)]
    streams, apart = [stream for stream in found if stream.streams > 1], []
    if not streams or job.run.compiles or job.engine.world > 1:
        return False
    for stream in streams:

        def watched(value: Any, read_out: Any = stream.read_out) -> Any:
            apart.append(bool((value.h - value.h[..., :1, :]).abs().max() > EQUAL * value.h.abs().max()))
            return read_out(value)

        vars(stream)["read_out"] = watched
    try:
        job.engine.score(Subset(job.held_out, range(1)))
    finally:
        for stream in streams:
            del vars(stream)["read_out"]
    return bool(apart) and not any(apart)
