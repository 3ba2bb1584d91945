"""What a training run depends on: one flat dataclass, the same for `twoaxis train` and `twoaxis compare`.

Every field can be given on the command line, in a file (TOML, JSON or YAML) or in Python, in this order of precedence;
the resolved values are saved with the run. The fields come in four sections, a class each. Those of the model, the data
and the optimisation decide the weights to the last bit on one machine; `RunningOptions` decide only how the run is
carried out and watched.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from twoaxis.base.files import short_hash
from twoaxis.base.machine import MOST_THREADS, can_compile
from twoaxis.base.options import Count, Fraction, NotNegative, Options, Positive, Share, at_least, between
from twoaxis.data.options import DataOptions


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
