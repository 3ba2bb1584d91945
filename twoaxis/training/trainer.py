"""transformers' `Trainer`, made to resume to the same bits.

What is ours: the order of the data (by index, from any step on), AdamW over the methods' own groups, the schedule, the
held-out evaluation, the log, and checkpoints without a pickle. What is left to the Trainer: the loop, accumulation with
the loss over all tokens of a step, clipping, and several processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from twoaxis.base.files import JsonLines
from twoaxis.base.interrupt import StopSignal
from twoaxis.training import checkpoint as saving
from twoaxis.training.account import Account
from twoaxis.training.config import TrainConfig
from twoaxis.training.groups import Group, make_optimizer
from twoaxis.training.held_out import collate, measure
from twoaxis.training.results import CHECKPOINTS, LOG
from twoaxis.training.schedule import rate, rates

Watch = Callable[[int, "float | None"], None]
"""Told the step and its loss after every step, and once before the first with None."""


class Diverged(Exception):
    """The loss or its gradient stopped being a number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """Everything a run is made of."""

    config: TrainConfig
    """Its fields."""
    folder: Path
    """Its place."""
    model: Any
    """What is trained."""
    groups: list[Group]
    """Of its parameters."""
    examples: Any
    """Training examples in the order they are used."""
    held_out: Any
    """Examples of an evaluation."""
    answers: bool
    """Whether the accuracy of an evaluation means something."""
    account: Account
    """What is done."""
    stop: StopSignal
    """Whether to stop."""
    watch: Watch | None = None
    """Told of every step."""

    @property
    def eval_every(self) -> int:
        """Steps between evaluations."""
        return self.config.eval_every or max(1, self.config.total_steps // 10)


class From(Sampler[int]):
    """Examples in order, from the first that is still to come; as long as all of them, which is what epochs count."""

    def __init__(self, first: int, total: int) -> None:
        self.first, self.total = first, total

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.total))

    def __len__(self) -> int:
        return self.total


def make_arguments(config: TrainConfig, folder: Path, device: torch.device, processes: int) -> TrainingArguments:
    """What the Trainer itself is told; everything else it would decide is decided by `LabTrainer`."""
    each, rest = divmod(config.batch, config.accumulate * processes)
    if rest:
        raise ValueError(
            f"batch ({config.batch}) is the batch of all processes: accumulate ({config.accumulate}) times the "
            f"{processes} processes must divide it"
        )
    given: dict[str, Any] = {"ddp_backend": "gloo"} if device.type == "cpu" and processes > 1 else {}
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=config.total_steps,
        per_device_train_batch_size=each,
        gradient_accumulation_steps=config.accumulate,
        max_grad_norm=config.clip,
        learning_rate=config.lr,
        weight_decay=config.weight_decay,
        seed=config.seed,
        use_cpu=device.type == "cpu",
        logging_strategy="no",
        eval_strategy="no",
        save_strategy="no",
        logging_nan_inf_filter=False,
        report_to="none",
        project="twoaxis",
        run_name=folder.name,
        disable_tqdm=True,
        log_level="error",
        log_level_replica="error",
        remove_unused_columns=False,
        ignore_data_skip=True,
        ddp_find_unused_parameters=False,  # every parameter of a stream or a mixer has a gradient, if only zero
        **given,
    )
    if arguments.device.type != device.type:
        raise ValueError(f"device is {device}, but the Trainer uses {arguments.device}")
    if processes == 1:
        arguments._n_gpu = min(1, arguments.n_gpu)  # one process uses one GPU, never DataParallel
    return arguments


def autocast(config: TrainConfig, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The precision of a run's passes; weights and optimiser stay in float32."""
    if config.dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def optimizer_of(job: Job, model: nn.Module) -> torch.optim.AdamW:
    """AdamW over the job's groups."""
    config = job.config
    return make_optimizer(
        model,
        job.groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        epsilon=config.epsilon,
        weight_decay=config.weight_decay,
    )


class LabTrainer(Trainer):
    """Trains a `Job`.

    Args:
        job: the run.
        arguments: from `make_arguments`.
        reports: callbacks of transformers that send the log elsewhere.
    """

    def __init__(self, job: Job, arguments: TrainingArguments, reports: list[TrainerCallback]) -> None:
        super().__init__(model=job.model, args=arguments, data_collator=collate, train_dataset=job.examples)
        self.remove_callback(PrinterCallback)
        for report in (*reports, Flow(self)):
            self.add_callback(report)
        self.job = job
        self.lines = JsonLines(job.folder / LOG)
        self.evaluated: dict[str, Any] | None = None  # the last record of an evaluation
        self.losses: list[Tensor] = []  # of the passes of this step
        self.loss = self.grad_norm = 0.0
        self.begun = self.saved = time.perf_counter()
        self.wants_save = self.wants_stop = False

    # the step

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The examples that are still to come."""
        config, cuda = self.job.config, self.args.device.type == "cuda"
        order = From(self.job.account.step * config.batch, config.total_steps * config.batch)
        loader = DataLoader(
            self.job.examples,
            batch_size=self.args.per_device_train_batch_size,
            sampler=order,
            collate_fn=collate,
            pin_memory=cuda,
            generator=torch.Generator(),  # of its own: the global one must not depend on where a run is taken up
        )
        return self.accelerator.prepare(loader)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """A step begins with its data."""
        self.begun = time.perf_counter()
        return super().get_batch_samples(*args, **kwargs)

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        """Autocast, with the weights in float32."""
        stack = contextlib.ExitStack()
        stack.enter_context(autocast(self.job.config, self.args.device))
        return stack

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """A forward and a backward pass."""
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss)
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The last look at a step before the weights change: what all processes must agree on is agreed on here."""
        norm = super()._get_grad_norm(model, grad_norm)
        step = self.job.account.step + 1
        due = time.perf_counter() - self.saved >= self.job.config.save_seconds
        parts = [sum(self.losses), norm, *(float(flag) for flag in (due, self.job.stop.requested))]
        self.losses.clear()
        numbers = torch.stack([torch.as_tensor(part, dtype=torch.float64, device=self.args.device) for part in parts])
        self.loss, self.grad_norm, due, stop = self._over_all(numbers, "mean").tolist()
        self.wants_save, self.wants_stop = due > 0, stop > 0
        for what, number in (("loss", self.loss), ("gradient's norm", self.grad_norm)):
            if not math.isfinite(number):
                raise Diverged(f"the {what} of step {step} is {number}")
        return norm

    def _over_all(self, numbers: Tensor, how: Literal["sum", "mean"]) -> Tensor:
        """The sum or mean over all processes."""
        return cast(Tensor, self.accelerator.reduce(numbers, how)) if self.args.world_size > 1 else numbers

    def floating_point_ops(self, inputs: Any) -> int:
        """Counted by the account."""
        return 0

    # the optimiser

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """AdamW over the job's groups."""
        if self.optimizer is None:
            self.optimizer = optimizer_of(self.job, self.job.model)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The job's schedule."""
        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rates(self.job.config))
            self._created_lr_scheduler = True
        return self.lr_scheduler

    # log and evaluation

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """A training record; what the Trainer counts by itself is passed over."""
        if "loss" not in logs:
            return
        account = self.job.account
        lr = self.job.config.lr * rate(self.job.config, account.step)
        record = account.record(lr, self.grad_norm)
        names = {
            "loss": "loss",
            "lr": "learning_rate",
            "grad_norm": "grad_norm",
            "tokens_per_second": "tokens_per_second",
        }
        self._record(record, {told: record[name] for name, told in names.items()})

    def _record(self, record: dict[str, Any], told: dict[str, float]) -> None:
        if self.is_world_process_zero():
            self.lines.append(record)
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, told)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Held-out loss, and accuracy where there are answers."""
        found = measure(
            self.job.model,
            self.job.held_out,
            batch=self.args.per_device_train_batch_size,
            autocast=lambda: autocast(self.job.config, self.args.device),
            part=(self.args.process_index, self.args.world_size),
            total=lambda sums: self._over_all(sums, "sum"),
        )
        if not math.isfinite(found.loss):
            raise Diverged(f"the held-out loss after step {self.job.account.step} is {found.loss}")
        record = {**self.job.account.position, "held_out_loss": found.loss}
        told = {"eval_loss": found.loss}
        if self.job.answers:
            record["accuracy"] = told["eval_accuracy"] = found.accuracy
        self._record(record, told)
        self.evaluated = record
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, told)
        return told

    # checkpoints

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.args.should_save:
            state = dataclasses.replace(self.state, log_history=[], stateful_callbacks={})
            saving.save_checkpoint(
                self.job.folder / CHECKPOINTS,
                model=self.job.model,
                optimizer=self.optimizer,
                trainer_state=json.dumps(dataclasses.asdict(state)),
                state={"account": self.job.account.to_dict(), "config": self.job.config.to_dict()},
                keep=self.job.config.keep,
            )
        self.saved = time.perf_counter()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        saving.load_weights(self.job.model, Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        saving.load_optimizer(self.optimizer, self.job.model, saving.load_tensors(Path(checkpoint) / saving.OPTIMIZER))
        scheduler, done = self.create_scheduler(0), self.job.account.step
        scheduler.load_state_dict(scheduler.state_dict() | {"last_epoch": done, "_step_count": done + 1})
        lrs = [base * rate(self.job.config, done + 1) for base in scheduler.base_lrs]
        for group, lr in zip(scheduler.optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr
        scheduler._last_lr = lrs

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            state = json.loads((Path(checkpoint) / saving.STATE).read_text())
            saving.restore_random(saving.load_tensors(Path(checkpoint) / saving.RANDOM), state["random"])

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """The model alone: the Trainer would pickle its arguments beside it."""
        saving.save_model(Path(output_dir or self.job.folder), self.job.model)


class Flow(TrainerCallback):
    """Decides after every step what to do."""

    def __init__(self, trainer: LabTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell where it starts."""
        job = self.trainer.job
        self.trainer.saved = time.perf_counter()
        if job.watch is not None:
            job.watch(job.account.step, None)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Count the step; log, evaluate, save and stop where it is time."""
        trainer, job = self.trainer, self.trainer.job
        config, account = job.config, job.account
        account.add(trainer.loss, time.perf_counter() - trainer.begun)
        assert account.step == state.global_step, f"{account.step} steps counted, the Trainer has {state.global_step}"
        last = account.step == account.steps
        control.should_log = last or account.step % config.log_every == 0
        control.should_evaluate = last or account.step % job.eval_every == 0
        regular = config.save_every is not None and account.step % config.save_every == 0
        control.should_save = regular or ((trainer.wants_save or trainer.wants_stop) and not last)
        control.should_training_stop = last or trainer.wants_stop
        if job.watch is not None:
            job.watch(account.step, trainer.loss)
        return control
