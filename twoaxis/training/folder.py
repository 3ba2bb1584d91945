"""The folder of a run: everything it leaves behind, as files that can be read again.

run.json        configuration, versions, hardware, data, parameters, FLOPs per token: written before the first step
log.jsonl       a record per logged step and per evaluation
checkpoints/    while it trains
model/          the final model, as save_pretrained writes it
result.json     written last: a run with one is finished and never done again
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from twoaxis.base.files import JsonLines, claim, read_json, remove_partial, write_bytes, write_json
from twoaxis.base.options import from_fields, from_record
from twoaxis.base.plugins import use_options
from twoaxis.show.charts import Axis, Chart, Line, Panel
from twoaxis.show.document import Document, Facts, Showable
from twoaxis.show.numbers import count, loss, percent, si, whole
from twoaxis.training.config import RUNNING, TrainConfig
from twoaxis.training.engines.processes import warn, world

if TYPE_CHECKING:
    from twoaxis.data.load import Data
    from twoaxis.training.checkpoint import Checkpoint

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
            return None
        about = read_json(path)
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise ValueError(f"{path} is not of format {FORMAT}, which this version reads; choose another folder")
        return from_record(About, about, str(path), "Choose another folder, or remove this one")

    def finished(self, run: TrainConfig) -> Result | None:
        """The result of a run that is finished; a folder that holds another run is refused."""
        about = self.about()
        if about is not None and about.config.key != run.key:
            old, new = about.config.to_dict(), run.to_dict()
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


RUN, LOG, RESULT, CHECKPOINTS, MODEL = "run.json", "log.jsonl", "result.json", "checkpoints", "model"
LARGEST = 1e30
"""Beyond it a number in a file is a mistake, and its square or product no number."""


@dataclass(frozen=True, kw_only=True)
class Result(Showable):
    """The outcome of a finished run."""

    status: Literal["finished", "diverged"]  # whether it came to its end, or its loss stopped being a number
    steps: int  # optimiser steps made
    tokens: int  # training tokens seen
    flops: float  # training operations, by the convention of `twoaxis.model.flops`
    seconds: float  # spent in training steps, evaluation and saving left out, summed over interruptions
    tokens_per_second: float  # over the last half of the steps
    parameters: int  # numbers learned
    peak_memory: int | None  # bytes at the peak of a training step, where it was measured
    loss: float | None = None  # held-out nats per token at the end; None if it diverged
    # the same of each held-out example, to seven digits; None for an example without a labelled token
    row_losses: tuple[float | None, ...] | None = None
    bits_per_byte: float | None = None  # the same per byte of text, where tokens stand for text
    accuracy: float | None = None  # part of the held-out answers that are right, for diagnostic tasks
    chance: float | None = None  # what guessing would score
    train_loss: float | None  # mean training loss over the last tenth of the steps
    unmoved: tuple[str, ...] = ()  # parameters that are to learn and never had a gradient
    equal_streams: bool = False  # whether parallel streams are still copies of each other at the end, as at the start
    weights: str | None = None  # SHA-256 of the final weights
    message: str = ""  # what went wrong, if something did
    # where the run is; the same run in another place is the same result
    folder: str | None = field(default=None, compare=False)

    @property
    def exit_code(self) -> int:
        """Whether it diverged."""
        return 1 if self.status == "diverged" else 0

    def document(self) -> Document:
        """The numbers of the run, and its losses against the tokens it has seen."""
        curves = None if self.folder is None else loss_chart(load_log(self.folder))
        return Document("", (Facts(tuple(self._facts())), *(() if curves is None else (curves,))))

    def _facts(self) -> list[tuple[str, str]]:
        if self.status == "diverged":
            facts = [("diverged", self.message)]
        else:
            perplexity = math.exp(min(self.loss or 0.0, 700))
            facts = [("held-out loss", f"{loss(self.loss)} nats per token, perplexity {perplexity:.6g}")]
            if self.bits_per_byte is not None:
                facts.append(("bits per byte", loss(self.bits_per_byte)))
            if self.accuracy is not None:
                facts.append(("accuracy", f"{percent(self.accuracy, 2)} (chance {percent(self.chance, 2)})"))
            facts.append(("training loss", f"{loss(self.train_loss)} over the last tenth"))
        trained = f"{whole(self.steps)} steps, {whole(self.tokens)} tokens, {si(self.flops, 'FLOP')}"
        speed = f"{self.seconds:.1f} s, {whole(self.tokens_per_second)} tokens/s over the last half"
        peak = "" if self.peak_memory is None else f", {si(self.peak_memory)} at the peak of a step"
        facts += [("trained", trained), ("time", speed), ("learned", f"{whole(self.parameters)} parameters{peak}")]
        if self.weights is not None:
            facts.append(("weights", self.weights))
        if self.folder is not None:
            model = Path(self.folder) / MODEL
            facts.append(("folder", self.folder + (f", model in {model}" if model.exists() else "")))
            if model.exists():
                facts.append(("next", self._next(self.folder) + use_options(model)))
        return facts

    def _next(self, folder: str) -> str:
        """The command that uses the model; one of a task has nothing to say, but can be compared with the baseline."""
        config = read_json(Path(folder) / RUN)["config"]
        if self.accuracy is None:
            return f"twoaxis generate {folder} --prompt TEXT"
        given = [(name, config[name]) for name in ("stream", "mixer") if config[name] not in (None, "standard")]
        methods = " ".join(f"--{name} {value}" for name, value in given or [("stream", "NAME")])
        return f"twoaxis compare --out {folder}-compared {methods} --data {config['data'][0]}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def load_result(folder: str | Path) -> Result | None:
    """The outcome of a run, or None where it is not finished."""
    path = Path(folder) / RESULT
    if not path.exists():
        return None
    try:
        result = from_fields(Result, read_json(path) | {"folder": str(folder)}, "a result")
        for name, value in vars(result).items():
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, int | float) and not abs(number) < LARGEST:
                    raise ValueError(f"{name} must be a number below {LARGEST:g}, got {number}")
        return result
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}. Remove it, and the run is made again") from error


def load_log(folder: str | Path) -> list[dict[str, Any]]:
    """The log of a run.

    Training records have step, tokens, flops, seconds, loss, lr, grad_norm, tokens_per_second
    (and auxiliary_loss, of models that have one); records of an evaluation
    have step, tokens, flops, seconds, held_out_loss and, for diagnostic tasks, accuracy.
    """
    return JsonLines(Path(folder) / LOG).read()


def loss_chart(log: list[dict[str, Any]]) -> Chart | None:
    """Training and held-out loss against tokens; None where nothing was logged."""
    lines = []
    for label, key in (("training", "loss"), ("held-out", "held_out_loss")):
        points = [(record["tokens"], record[key]) for record in log if record.get(key) is not None and record["tokens"]]
        if points:
            lines.append(Line(label, tuple(x for x, _ in points), tuple(y for _, y in points)))
    if not lines:
        return None
    panel = Panel("lines", "", Axis("training tokens", "count", "log"), Axis("loss (nats per token)"), tuple(lines))
    last = max(line.x[-1] for line in lines)
    return Chart("loss", f"Loss over {count(last)} tokens", ((panel,),))
