"""The folder of a run: everything it leaves behind, as files that can be read again, and the loggers that write there.

run.json        configuration, versions, hardware, data, parameters, FLOPs per token: written before the first step
log.jsonl       a record per logged step and per evaluation
checkpoints/    while it trains
model/          the final model, as save_pretrained writes it
result.json     written last: a run with one is finished and never done again

`log.jsonl` is always written; `report_to` names other places that get the same records:

tensorboard     event files in RUN/tensorboard
trackio, wandb  a run of the project "twoaxis", named after the run's folder; a resumed run goes on there
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from twoaxis.base.files import (
    JsonLines,
    check_contents,
    claim,
    read_json,
    remove_partial,
    short_hash,
    write_bytes,
    write_json,
)
from twoaxis.base.options import from_record
from twoaxis.base.registry import did_you_mean
from twoaxis.training.config import TrainConfig
from twoaxis.training.engines.processes import warn, world

if TYPE_CHECKING:
    from twoaxis.data.load import Data
    from twoaxis.training.checkpoint import Checkpoint
    from twoaxis.training.result import Result

RUN, LOG, RESULT, CHECKPOINTS, MODEL = "run.json", "log.jsonl", "result.json", "checkpoints", "model"
FORMAT = 2
"""Number in run.json; a folder with another one is refused."""


@dataclass(frozen=True, kw_only=True)
class About:
    """What is read from run.json again."""

    config: TrainConfig
    data: dict[str, Any]
    versions: dict[str, Any]
    parallelism: dict[str, Any]
    source: str | None  # digest of the model that it started from
    learned: int  # numbers that learn
    peak_memory: int | None


class RunFolder:
    """The files of one run; the folder is created when something is written."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        # refuses to write after another process has taken the folder over, as when this machine slept
        self.check_claim: Callable[[], None] = lambda: None
        self.log, self.checkpoints, self.model = self.path / LOG, self.path / CHECKPOINTS, self.path / MODEL

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Context manager that keeps the folder to this process, and removes what a killed one left half-written."""
        with claim(self.path) as self.check_claim:
            remove_partial(self.path)
            remove_partial(self.checkpoints)
            yield

    def about(self) -> About | None:
        """What run.json says; None before the run began."""
        path = self.path / RUN
        if not path.exists():
            check_contents(self.path, RUN)
            return None
        about = read_json(path)
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise ValueError(f"{path} is not of format {FORMAT}, which this version reads; choose another folder")
        return from_record(About, about, str(path), "Choose another folder, or remove this one")

    def finished(self, run: TrainConfig) -> Result | None:
        """The result of a run that is finished; a folder that holds another run is refused."""
        about = self.about()
        if about is not None and about.config.key != run.key:
            listed = run.changes(about.config)
            raise ValueError(f"{self.path} holds another run: {listed}. Choose another folder, or remove it")
        if not (self.path / RESULT).exists():
            return None
        from twoaxis.training.result import load_result

        result = load_result(self.path)
        shutil.rmtree(self.checkpoints, ignore_errors=True)  # that a process left which was killed at the very end
        return result

    def describe(self, about: dict[str, Any]) -> None:
        """Write run.json, before the first step."""
        from twoaxis.base.machine import hardware, versions

        more = {"versions": versions(), "hardware": hardware(), "parallelism": parallelism()}
        write_json(self.path / RUN, {"format": FORMAT, **about, **more})

    def check_same(self, data: Data, source: str | None) -> None:
        """Refuse to go on with other data, or another source by its digest, than the run began with.

        Other versions are worth a warning.
        """
        from twoaxis.base.machine import versions

        about = self.about()
        if about is None:
            raise ValueError(
                f"this process does not see {self.path / RUN}, which process 0 has written: share the folder"
            )
        if about.data.get("fingerprint") != data.fingerprint:
            raise ValueError(f"the data {data.name} has changed since the run in {self.path} began; use another folder")
        if about.source != source:
            raise ValueError(f"the model that the run in {self.path} started from has changed; use another folder")
        was, now = about.versions | about.parallelism, versions() | parallelism()
        changed = [f"{name} was {was[name]} and is {now.get(name)}" for name in was if was[name] != now.get(name)]
        if changed:
            warn(f"{'; '.join(changed)}: the numbers may differ in their last bits from those of an uninterrupted run")

    def restore_log(self, checkpoint: Checkpoint | None) -> None:
        """Put the log back to what it was at a checkpoint; None is the beginning.

        A line that was lost or damaged meanwhile comes back with it: every checkpoint holds the log up to its step.
        """
        there = self.log.read_bytes() if self.log.exists() else b""
        wanted = b"" if checkpoint is None else checkpoint.log
        if not there.startswith(wanted):
            warn(f"{self.log} has lost or changed lines; they are restored from step {getattr(checkpoint, 'step', 0)}")
        if there != wanted:
            write_bytes(self.log, wanted)

    def finish(self, result: Result) -> None:
        """Write the result, then remove what only an unfinished run needs."""
        self.check_claim()
        stored = {name: value for name, value in result.to_dict().items() if name != "folder"}  # it may be moved
        write_json(self.path / RESULT, stored)
        shutil.rmtree(self.checkpoints, ignore_errors=True)


def parallelism() -> dict[str, Any]:
    """Thread and process counts: they change the order of summation, and with it the last bits."""
    import torch

    return {"threads": torch.get_num_threads(), "processes": world()}


def load_log(folder: str | Path) -> list[dict[str, Any]]:
    """The log of a run.

    Training records have step, tokens, flops, seconds, loss, lr, grad_norm, tokens_per_second
    (and auxiliary_loss, of models that have one); records of an evaluation
    have step, tokens, flops, seconds, held_out_loss and, for diagnostic tasks, accuracy.
    """
    return JsonLines(Path(folder) / LOG).read()


# Loggers.

TRACKERS = ("tensorboard", "trackio", "wandb")
"""Names for `report_to`; the packages are called the same."""

Record = Mapping[str, Any]
"""A training record or one of an evaluation; see `load_log`."""


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
