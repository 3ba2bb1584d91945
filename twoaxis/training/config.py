"""What a training run depends on: one flat dataclass, the same for `twoaxis train` and `twoaxis compare`.

Every field can be given on the command line, in Python or in a file, which counts less; the resolved values are saved
with the run. The fields come in four sections, a class each. Those of the model, the data and the optimisation decide
the weights to the last bit on one machine; `RunningOptions` decide only how the run is carried out and watched.

    preset = "nano"                  run.toml; JSON and YAML alike, and the run.json of a folder
    stream = "deep_delta"
    steps = 2000
    model = { hidden_size = 96 }

Only what is said is in a mapping of fields (`RunFields`), so that a default never displaces what a file says.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from twoaxis.base import options
from twoaxis.base.files import short_hash
from twoaxis.base.machine import MOST_THREADS, can_compile
from twoaxis.base.options import Count, Fraction, NotNegative, Options, Positive, Share, at_least, between
from twoaxis.base.registry import parse_options
from twoaxis.data.options import DataOptions, ExampleFields


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """The model of a run."""

    preset: str = "nano"
    """Shape of the model; see twoaxis.preset_names()."""
    family: str | None = None
    """Family of transformers, or a config.json, to make the model of; None is our decoder."""
    stream: str = "standard"
    """Residual stream, as NAME[:option=value,...]."""
    mixer: str | None = None
    """Local mixer, as NAME[:option=value,...]."""
    model: dict[str, Any] = field(default_factory=dict)
    """Fields of ModelConfig, or of the family's configuration, that replace the preset's."""
    source: str | None = None
    """A saved model to go on from, or a model of transformers (folder, GGUF file or name on the hub) to put the stream
    and the mixer on, in place of a preset."""
    train: str = "all"
    """What learns of it: all, new (what a retrofit added), norms, names of parameters, or several with + between."""


@dataclass(frozen=True, kw_only=True)
class OptimiserOptions(Options):
    """The optimisation of a run."""

    steps: Annotated[int, at_least(0)] | None = None
    """Optimiser steps, 0 to measure the model as it starts; or give tokens."""
    tokens: Count | None = None
    """Training tokens, rounded up to whole steps; or give steps."""
    batch: Annotated[int, between(1, 2**20)] = 8
    """Examples per optimiser step."""
    accumulate: Count = 1
    """Passes a step is made of; it must divide batch."""
    lr: Positive = 4e-3
    """Peak learning rate."""
    new_rate: Positive = 1.0
    """Multiplier of it for what a retrofit added."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warm-up: a cosine, stable then a linear decay, or constant."""
    warmup: Share | None = None
    """Part of the steps in which the rate rises; None is a twentieth, at least 30 steps and at most half of the run."""
    decay: Share = 0.2
    """Part of the steps in which wsd decays."""
    final_lr: Share = 0.1
    """Rate at the end as a part of the peak, for cosine and wsd."""
    beta1: Fraction = 0.9
    """Decay of AdamW's mean of the gradient."""
    beta2: Fraction = 0.95
    """Decay of AdamW's mean of the squared gradient."""
    epsilon: Positive = 1e-8
    """Added to AdamW's denominator."""
    weight_decay: NotNegative = 0.1
    """Of matrices; norms, biases and what a method says need none get none."""
    clip: NotNegative = 1.0
    """Largest norm of the gradient; 0 does not clip."""
    seed: Annotated[int, between(0, 2**63 - 1)] = 0
    """Of the initial weights and of the order of the data."""
    init_seed: Annotated[int, between(0, 2**63 - 1)] | None = None
    """Of the initial weights alone; None is seed."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation; bfloat16 is autocast, the weights stay float32."""
    compile: Literal["auto", "yes", "no"] = "auto"
    """torch.compile the model; auto does in runs of 5,000 steps and more, where there is a C++ compiler or a GPU."""
    recompute: Annotated[int, at_least(0)] = 0
    """Compute the activations of every n-th block again in the backward pass; 0 keeps all."""
    eval_every: Count | None = None
    """Steps between evaluations; None is a tenth of the run. The last step is always evaluated."""


@dataclass(frozen=True, kw_only=True)
class RunningOptions(Options):
    """How a run is carried out and watched; none of these changes the weights."""

    log_every: Count = 10
    """Steps between log records."""
    save_seconds: Positive = 60.0
    """Seconds between checkpoints: what a crash may cost."""
    save_every: Count | None = None
    """Steps between checkpoints, in addition."""
    keep: Count = 2
    """Checkpoints kept while training."""
    save_model: bool = True
    """Keep the final model, as a folder of its own."""
    report_to: tuple[str, ...] = ()
    """tensorboard, trackio or wandb; the JSONL log is always written."""
    measure_memory: bool = True
    """Measure the peak memory of one step before the first."""
    threads: Annotated[int, between(1, MOST_THREADS)] | None = None
    """CPU threads; None is torch's choice."""
    device: str | None = None
    """Such as cpu or cuda:1; None is a GPU if there is one."""
    parallel: str | None = None
    """How the processes that torchrun starts share the run, such as fsdp=8 or dp=2,pp=4; None gives each a replica."""


COMPILED_FROM = 5_000
"""Steps of a run that is compiled unless it says otherwise."""

SECTIONS = {"model": ModelOptions, "data": DataOptions, "optimisation": OptimiserOptions, "running": RunningOptions}
"""The fields of a run by what they are about, in the order of the help."""

RUNNING = (*(each.name for each in dataclasses.fields(RunningOptions)), "cache")
"""Fields that do not change the weights."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunningOptions, OptimiserOptions, DataOptions, ModelOptions):
    """A training run."""

    def validate(self) -> None:
        """Rules between fields."""
        DataOptions.validate(self)
        if self.steps is not None and self.tokens is not None:
            raise ValueError(f"steps ({self.steps}) and tokens ({self.tokens}) are both given; give one of them")
        if self.batch % self.accumulate:
            raise ValueError(f"accumulate ({self.accumulate}) must divide batch ({self.batch})")
        if self.schedule == "wsd" and self.warmup is not None and self.warmup + self.decay > 1:
            raise ValueError(f"warmup ({self.warmup}) and decay ({self.decay}) are more than the whole run")

    @property
    def total_steps(self) -> int:
        """Optimiser steps of the run."""
        if self.steps is not None:
            return self.steps
        if self.tokens is None:
            return 500
        return -(-self.tokens // (self.batch * self.context))

    @property
    def warmup_steps(self) -> int:
        """Steps in which the rate rises.

        The default is counted in steps and not only as a part of the run: a small model that starts at the full rate
        stays at the frequencies of single tokens for most of a short run, however good its stream is.
        """
        steps = self.total_steps
        if self.warmup is not None:
            return round(self.warmup * steps)
        falling = self.decay_steps if self.schedule == "wsd" else 0
        return min(max(round(0.05 * steps), 30), steps // 2, steps - falling)

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 1, as a part of the peak.

            rate   cosine                 wsd                     constant
            1      . _                    . ________              . ______________
                  .    .                 .          .            .
                 .       .              .             .         .
            end .          - _         .                -      .
                |W|                    |W|        |  D  |      |W|

        The warm-up rises linearly and is at the peak in step W = `warmup_steps`. The cosine falls from there and is at
        `final_lr` in the last step; wsd stays and falls linearly through the last D = `decay_steps`. A rate depends on
        the step alone, so a run that is resumed needs no memory of it.
        """
        steps, warmup, decay = self.total_steps, self.warmup_steps, self.decay_steps
        step = min(step, steps)
        if step <= warmup:
            return step / warmup
        if self.schedule == "cosine":
            passed = (step - warmup) / (steps - warmup)
            return self.final_lr + (1 - self.final_lr) * (1 + math.cos(math.pi * passed)) / 2
        if self.schedule == "wsd" and step > steps - decay:
            passed = (step - (steps - decay)) / decay
            return 1 - (1 - self.final_lr) * passed
        return 1.0

    @property
    def compiles(self) -> bool:
        """Whether the model is compiled.

        A small model's step takes 0.7 of the time then, which pays for compiling after 1,700 steps.
        """
        if self.compile == "auto":
            return self.total_steps >= COMPILED_FROM and can_compile(self.device)
        return self.compile == "yes"

    @property
    def decay_steps(self) -> int:
        """Steps in which wsd decays."""
        return round(self.decay * self.total_steps)

    @property
    def tokens_per_step(self) -> int:
        """Training tokens of a step."""
        return self.batch * self.context

    @property
    def key(self) -> str:
        """Stands for every field that can change the weights."""
        return short_hash({name: value for name, value in self.to_dict().items() if name not in RUNNING})

    def changes(self, other: TrainConfig, *also: str) -> str:
        """What of another run is not as here, of the fields that change the weights and of some `also`."""
        here, there = self.to_dict(), other.to_dict()
        changed = [name for name in here if here[name] != there[name] and (name not in RUNNING or name in also)]
        return "; ".join(f"{name} is {there[name]!r} there and {here[name]!r} here" for name in changed)


class CommonFields(ExampleFields, total=False):
    """Names and types of the fields of `TrainConfig` that all runs of a probe share, for editors and checkers.

    A test holds these and `RunFields` equal to it.
    """

    model: Mapping[str, Any] | Sequence[str]
    steps: int | None
    tokens: int | None
    batch: int
    accumulate: int
    new_rate: float
    schedule: Literal["cosine", "wsd", "constant"]
    warmup: float | None
    decay: float
    final_lr: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    clip: float
    init_seed: int | None
    dtype: Literal["float32", "bfloat16"]
    compile: Literal["auto", "yes", "no"]
    recompute: int
    eval_every: int | None
    log_every: int
    save_seconds: float
    save_every: int | None
    keep: int
    save_model: bool
    report_to: Sequence[str]
    measure_memory: bool
    threads: int | None
    device: str | None
    parallel: str | None


class SharedFields(CommonFields, total=False):
    """Those that all runs of a comparison share."""

    preset: str
    family: str | None
    source: str | None
    train: str


class RunFields(SharedFields, total=False):
    """All fields of a run."""

    data: Sequence[str]
    eval_skip: int
    stream: str
    mixer: str | None
    lr: float
    seed: int


def read_fields(path: str | Path) -> dict[str, Any]:
    """The fields in a TOML, JSON or YAML file; of a run.json those of its run."""
    fields = options.read_fields(path)
    if "config" in fields and "key" in fields:
        fields = fields["config"]
        if not isinstance(fields, dict):
            raise ValueError(f"config in {path} must be a table of fields and values, got {fields!r:.80}")
    if isinstance(fields.get("model_type"), str):  # a configuration of transformers, not of a run
        return {"family": str(path)}
    if "from" in fields:  # as the command line calls it
        fields = {name: value for name, value in fields.items() if name != "from"} | {"source": fields["from"]}
    if not isinstance(fields.get("model", {}), dict):
        raise ValueError(f"model in {path} must be a table of fields and values, got {fields['model']!r}")
    return fields


def parse_model(changes: str | Sequence[str]) -> dict[str, Any]:
    """Fields of the model from `FIELD=VALUE[,FIELD=VALUE...]`, each once."""
    texts = [changes] if isinstance(changes, str) else changes
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"model must be a table of fields and values, or FIELD=VALUE, got {str(changes)[:80]}")
    wrong = lambda part: f"--model {part.strip()} changes nothing; write --model FIELD=VALUE[,FIELD=VALUE]"  # noqa: E731
    return parse_options(texts, "--model", wrong)


def merge(file: Mapping[str, Any], said: Mapping[str, Any]) -> TrainConfig:
    """A run from a file's fields (see `read_fields`) and from what is said, which counts more.

    Fields of the model are merged one by one. Steps and tokens stand for one another: what is said displaces the
    file's.
    """
    fields = dict(file) | dict(said)
    tables = [given["model"] for given in (file, said) if "model" in given]
    fields["model"] = {}
    for table in tables:
        fields["model"] |= table if isinstance(table, Mapping) else parse_model(table)
    if "steps" in said or "tokens" in said:
        for name in {"steps", "tokens"} - set(said):
            fields.pop(name, None)
    listed = {name: (value,) if isinstance(value, str) and name in LISTS else value for name, value in fields.items()}
    return TrainConfig.from_dict(listed, "a training run")


LISTS = ("data", "report_to")
"""Fields that are lists, of which one entry may be said alone."""
