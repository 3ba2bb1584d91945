"""The result of a run: what it found in numbers, in words and as curves, and `result.json` read again."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from twoaxis.base.files import read_json
from twoaxis.base.options import from_fields
from twoaxis.base.plugins import use_options
from twoaxis.show.charts import Axis, Chart, Line, Panel
from twoaxis.show.document import Document, Facts, Showable
from twoaxis.show.numbers import count, loss, percent, si, whole
from twoaxis.training.folder import MODEL, RESULT, RUN, load_log

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


def loss_chart(log: list[dict[str, Any]]) -> Chart | None:
    """Training and held-out loss against tokens; None where nothing was logged."""
    lines = []
    for label, key in (("training", "loss"), ("held-out", "held_out_loss")):
        found = [(record.get("tokens"), record.get(key)) for record in log]
        points: list[Any] = [(x, y) for x, y in found if x and all(isinstance(each, int | float) for each in (x, y))]
        if points:
            lines.append(Line(label, tuple(x for x, _ in points), tuple(y for _, y in points)))
    if not lines:
        return None
    panel = Panel("lines", "", Axis("training tokens", "count", "log"), Axis("loss (nats per token)"), tuple(lines))
    last = max(line.x[-1] for line in lines)
    return Chart("loss", f"Loss over {count(last)} tokens", ((panel,),))
