"""Loggers: where the records of a run go. `log.jsonl` is always written, others are named by `report_to`.

tensorboard    event files in RUN/tensorboard
trackio, wandb a run of the project "twoaxis", named after the run's folder; a resumed run goes on there
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from twoaxis.base.files import JsonLines, short_hash
from twoaxis.base.registry import did_you_mean

if TYPE_CHECKING:
    from twoaxis.training.config import TrainConfig
    from twoaxis.training.folder import RunFolder

TRACKERS = ("tensorboard", "trackio", "wandb")
"""Names for `report_to`; the packages are called the same."""

Record = Mapping[str, Any]
"""A training record or one of an evaluation; see `twoaxis.training.results.load_log`."""


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
