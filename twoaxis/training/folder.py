"""The folder of a run: everything it leaves behind, as files that can be read again.

run.json        configuration, versions, hardware, data, parameters, FLOPs per token: written before the first step
log.jsonl       a record per logged step and per evaluation
checkpoints/    while it trains
model/          the final model, as save_pretrained writes it
result.json     written last: a run with one is finished and never done again
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twoaxis.base.files import claim, read_json, remove_partial, write_bytes, write_json
from twoaxis.base.options import check_type
from twoaxis.training.config import RUNNING, TrainConfig
from twoaxis.training.engines.processes import warn, world
from twoaxis.training.results import CHECKPOINTS, LOG, MODEL, RESULT, RUN, Result, load_result

if TYPE_CHECKING:
    from twoaxis.data.load import Data
    from twoaxis.training.checkpoint import Checkpoint

FORMAT = 2
"""Number in run.json; a folder with another one is refused."""
ABOUT: dict[str, Any] = {
    **dict.fromkeys(("config", "data", "versions", "parallelism"), dict[str, Any]),
    "source": str | None,
    "learned": int,
    "peak_memory": int | None,
}
"""What is read from run.json again, and its shape."""


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

    def about(self) -> dict[str, Any] | None:
        """What run.json says; None before the run began."""
        path = self.path / RUN
        if not path.exists():
            return None
        about = read_json(path)
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise ValueError(f"{path} is not of format {FORMAT}, which this version reads; choose another folder")
        try:
            for name, kind in ABOUT.items():
                if name not in about:
                    raise ValueError(f"{name} is missing")
                check_type(name, about[name], kind)
            TrainConfig.from_dict(about["config"], "config")
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}. Choose another folder, or remove this one") from error
        return about

    def finished(self, run: TrainConfig) -> Result | None:
        """The result of a run that is finished; a folder that holds another run is refused."""
        about = self.about()
        if about is not None:
            there = TrainConfig.from_dict(about["config"])
            if there.key != run.key:
                old, new = there.to_dict(), run.to_dict()
                changed = [name for name in new if old[name] != new[name] and name not in RUNNING]
                listed = "; ".join(f"{name} is {old[name]!r} there and {new[name]!r} here" for name in changed)
                raise ValueError(f"{self.path} holds another run: {listed}. Choose another folder, or remove it")
        result = load_result(self.path)
        if result is not None:  # a process that was killed at the very end may have left checkpoints
            shutil.rmtree(self.checkpoints, ignore_errors=True)
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
        if about["data"].get("fingerprint") != data.fingerprint:
            raise ValueError(f"the data {data.name} has changed since the run in {self.path} began; use another folder")
        if about["source"] != source:
            raise ValueError(f"the model that the run in {self.path} started from has changed; use another folder")
        was, now = about["versions"] | about["parallelism"], versions() | parallelism()
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
