"""What a run tells while it trains: counters of steps, seconds and losses, records of them, and where these go.

Counters are plain floats, which JSON returns to the last bit: a run that is resumed in the middle of a log interval
writes the record that an uninterrupted one would have written. `log.jsonl` is always written; `report_to` names others:

tensorboard    event files in RUN/tensorboard
trackio, wandb a run of the project "twoaxis", named after the run's folder; a resumed run goes on there
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from twoaxis.base.files import JsonLines, short_hash
from twoaxis.base.registry import did_you_mean

if TYPE_CHECKING:
    from twoaxis.training.config import TrainConfig
    from twoaxis.training.folder import RunFolder

GIVEN = {"given": True}
"""Marks a field that follows from the run's configuration and is not saved."""


@dataclass(kw_only=True)
class Counters:
    """Steps, seconds and losses of a run."""

    steps: int = field(metadata=GIVEN)  # steps of the whole run
    tokens_per_step: int = field(metadata=GIVEN)  # training tokens of a step
    flops_per_token: float = field(metadata=GIVEN)  # training operations of a token
    step: int = 0  # steps done
    seconds: float = 0.0  # seconds spent in them, data included, evaluation and saving left out
    logged_step: int = 0  # last step of the last training record
    logged_seconds: float = 0.0  # seconds at that step
    logged_loss: float = 0.0  # sum of the losses since that step
    half_step: int = 0  # last step of the first half, once it is done
    half_seconds: float = 0.0  # seconds at that step
    tail_loss: float = 0.0  # sum of the losses in the last tenth of the steps
    tail_steps: int = 0  # number of steps in that sum

    def add_step(self, loss: float, seconds: float) -> None:
        """Count a step."""
        self.step += 1
        self.seconds += seconds
        self.logged_loss += loss
        if self.step <= self.steps // 2:
            self.half_step, self.half_seconds = self.step, self.seconds
        if self.step > self.steps - max(1, self.steps // 10):
            self.tail_loss += loss
            self.tail_steps += 1

    @property
    def position(self) -> dict[str, Any]:
        """The fields that every record of the log begins with."""
        tokens = self.step * self.tokens_per_step
        return {"step": self.step, "tokens": tokens, "flops": self.flops_per_token * tokens, "seconds": self.seconds}

    def training_record(self, lr: float, grad_norm: float) -> dict[str, Any]:
        """A record over the steps since the last one; the next record begins after it."""
        steps, seconds = self.step - self.logged_step, self.seconds - self.logged_seconds
        record = self.position | {
            "loss": self.logged_loss / steps,
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens_per_second": steps * self.tokens_per_step / seconds if seconds > 0 else 0.0,
        }
        self.logged_step, self.logged_seconds, self.logged_loss = self.step, self.seconds, 0.0
        return record

    @property
    def tokens_per_second(self) -> float:
        """Speed over the last half of the steps."""
        seconds = self.seconds - self.half_seconds
        return (self.step - self.half_step) * self.tokens_per_step / seconds if seconds > 0 else 0.0

    @property
    def train_loss(self) -> float | None:
        """Mean over the last tenth of the steps; None before they begin."""
        return self.tail_loss / self.tail_steps if self.tail_steps else None

    def to_dict(self) -> dict[str, Any]:
        """What was counted, for JSON."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if not f.metadata}

    def restore(self, counted: dict[str, Any]) -> None:
        """Go back to what `to_dict` gave."""
        for name, value in counted.items():
            setattr(self, name, value)


TRACKERS = ("tensorboard", "trackio", "wandb")
"""Names for `report_to`; the packages are called the same."""

Record = Mapping[str, Any]
"""A training record or one of an evaluation; see `twoaxis.training.folder.load_log`."""


class Logger(NamedTuple):
    """A place where the records of a run go."""

    log: Callable[[Record], None]  # takes a record
    close: Callable[[], None]  # sends what is held back, as the run ends or stops


def tensorboard(folder: RunFolder, step: int) -> Logger:
    """Event files for TensorBoard; those after `step`, of a run that is resumed there, are marked as outdated."""
    from torch.utils.tensorboard.writer import SummaryWriter

    writer = SummaryWriter(str(folder.path / "tensorboard"), purge_step=step + 1 if step else None)

    def log(record: Record) -> None:
        for name, value in curves(record).items():
            writer.add_scalar(name, value, record["step"])

    return Logger(log, writer.close)


def tracker(package: str, folder: RunFolder, run: TrainConfig) -> Logger:
    """A run of wandb, or of trackio, which has the same functions."""
    module: Any = import_module(package)
    options: dict[str, Any] = {"project": "twoaxis", "name": folder.path.name, "config": run.to_dict()}
    if package == "wandb":  # trackio knows a run by its name
        options |= {"id": short_hash([str(folder.path.resolve()), run.key]), "dir": str(folder.path)}
    module.init(**options, resume="allow")
    return Logger(lambda record: module.log(curves(record), step=record["step"]), module.finish)


def curves(record: Record) -> dict[str, float]:
    """The values of a record by the names of their curves, such as train/loss and held_out/loss."""
    values = {name: value for name, value in record.items() if name not in ("step", "tokens", "flops", "seconds")}
    if "held_out_loss" in values:
        return {f"held_out/{name.removeprefix('held_out_')}": value for name, value in values.items()}
    return {f"train/{name}": value for name, value in values.items()}


def check_loggers(names: Sequence[str]) -> None:
    """Refuse names that are not known and packages that are not installed."""
    for name in names:
        if name not in TRACKERS:
            hint = did_you_mean(name, TRACKERS)
            raise ValueError(f"unknown report_to {name!r}{hint}; the log can be sent to {', '.join(TRACKERS)}")
        if find_spec(name) is None:
            raise ValueError(f"report_to {name} needs the package {name}, which is not installed: pip install {name}")


def make_loggers(run: TrainConfig, folder: RunFolder, step: int) -> list[Logger]:
    """The log file, and the loggers that `report_to` names, of a run that has done `step` steps."""
    lines, names = JsonLines(folder.log), run.report_to

    def log(record: Record) -> None:
        folder.check_claim()
        lines.append(dict(record))

    named = [tensorboard(folder, step) if name == "tensorboard" else tracker(name, folder, run) for name in names]
    return [Logger(log, lambda: None), *named]
