"""Loggers: where the records of a run go. `log.jsonl` is always written, others are named by `report_to`.

tensorboard    event files in RUN/tensorboard
trackio, wandb a run of the project "twoaxis", named after the run's folder; a resumed run goes on there
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from twoaxis.base.files import JsonLines, short_hash

if TYPE_CHECKING:
    from twoaxis.training.config import TrainConfig
    from twoaxis.training.folder import RunFolder

TRACKERS = ("tensorboard", "trackio", "wandb")
"""Names for `report_to`; the packages are called the same."""


class Logger(Protocol):
    """Receives the records of a run."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Take a training record or one of an evaluation; see `twoaxis.training.results.load_log`."""

    def close(self) -> None:
        """Send what is held back, as the run ends or stops."""


class JsonLog:
    """The log in the run's folder."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.lines = folder, JsonLines(folder.log)

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a line."""
        self.folder.check_claim()
        self.lines.append(dict(record))

    def close(self) -> None:
        """Nothing is held back."""


class TensorBoard:
    """Event files for TensorBoard; those after `step`, of a run that is resumed there, are marked as outdated."""

    def __init__(self, folder: RunFolder, step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self.writer = SummaryWriter(str(folder.path / "tensorboard"), purge_step=step + 1 if step else None)

    def log(self, record: Mapping[str, Any]) -> None:
        """Write a point of each curve."""
        for name, value in curves(record).items():
            self.writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Flush the files."""
        self.writer.close()


class Tracker:
    """A run of wandb, or of trackio, which has the same functions."""

    def __init__(self, package: str, folder: RunFolder, run: TrainConfig) -> None:
        self.package: Any = import_module(package)
        options: dict[str, Any] = {"project": "twoaxis", "name": folder.path.name, "config": run.to_dict()}
        if package == "wandb":  # trackio knows a run by its name
            options |= {"id": short_hash([str(folder.path.resolve()), run.key]), "dir": str(folder.path)}
        self.package.init(**options, resume="allow")

    def log(self, record: Mapping[str, Any]) -> None:
        """Send a point of each curve."""
        self.package.log(curves(record), step=record["step"])

    def close(self) -> None:
        """End the run there."""
        self.package.finish()


def curves(record: Mapping[str, Any]) -> dict[str, float]:
    """The values of a record by the names of their curves, such as train/loss and held_out/loss."""
    values = {name: value for name, value in record.items() if name not in ("step", "tokens", "flops", "seconds")}
    if "held_out_loss" in values:
        return {f"held_out/{name.removeprefix('held_out_')}": value for name, value in values.items()}
    return {f"train/{name}": value for name, value in values.items()}


def check_loggers(names: Sequence[str]) -> None:
    """Refuse names that are not known and packages that are not installed."""
    from twoaxis.base.registry import did_you_mean

    for name in names:
        if name not in TRACKERS:
            hint = did_you_mean(name, TRACKERS)
            raise ValueError(f"unknown report_to {name!r}{hint}; the log can be sent to {', '.join(TRACKERS)}")
        if find_spec(name) is None:
            raise ValueError(f"report_to {name} needs the package {name}, which is not installed: pip install {name}")


def make_loggers(run: TrainConfig, folder: RunFolder, step: int) -> list[Logger]:
    """The log file, and the loggers that `report_to` names.

    Args:
        run: the run.
        folder: its files.
        step: steps done before.
    """
    return [
        JsonLog(folder),
        *(TensorBoard(folder, step) if name == "tensorboard" else Tracker(name, folder, run) for name in run.report_to),
    ]
