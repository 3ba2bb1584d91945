"""What a training run depends on: one flat dataclass, the same for `twoaxis train` and `twoaxis compare`.

Every field can be given on the command line, in a file (TOML, JSON or YAML) or in Python, in this order of precedence;
the resolved values are saved with the run. Fields under "numbers" decide the weights to the last bit on one machine;
fields under "running" decide only how the run is carried out and watched.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from twoaxis.base.files import short_hash
from twoaxis.base.options import check_types

RUNNING = (
    *("log_every", "save_seconds", "save_every", "keep", "save_model", "report_to", "threads", "device", "cache"),
    "measure_memory",
)
"""Fields that do not change the weights."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run."""

    # numbers: the model
    preset: str = "nano"
    """Shape of the model; see twoaxis.preset_names()."""
    stream: str = "standard"
    """Residual stream, as NAME[:option=value,...]."""
    mixer: str | None = None
    """Local mixer, as NAME[:option=value,...]."""
    model: dict[str, Any] = field(default_factory=dict)
    """Fields of TwoAxisConfig that replace the preset's."""
    source: str | None = None
    """Folder of a saved model to go on from, in place of a preset."""
    train: str = "all"
    """What to train of a saved model: all, new (what a retrofit added) or names of parameters, commas between."""

    # numbers: the data
    data: tuple[str, ...] = ("stdlib",)
    """stdlib, files and folders, hf:DATASET, or task:NAME[:option=value,...]."""
    tokenizer: str = "bpe:2048"
    """bytes, bpe:SIZE (trained on the training split), or the folder or hub name of a transformers tokenizer."""
    text_field: str = "text"
    """Where jsonl, parquet and Hugging Face records keep their text."""
    context: int = 256
    """Tokens of a training example."""
    held_out: float = 0.05
    """Part of the documents kept for evaluation."""
    isolate: bool = False
    """Keep packed documents from seeing each other."""

    # numbers: the optimisation
    steps: int | None = None
    """Optimiser steps; or give tokens."""
    tokens: int | None = None
    """Training tokens, rounded up to whole steps; or give steps."""
    batch: int = 16
    """Examples per optimiser step."""
    accumulate: int = 1
    """Passes a step is made of; it must divide batch."""
    lr: float = 2e-3
    """Peak learning rate."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warm-up: a cosine, stable then a linear decay, or constant."""
    warmup: float | None = None
    """Part of the steps in which the rate rises; None is a twentieth, at least 30 steps and at most half of the run."""
    decay: float = 0.2
    """Part of the steps in which wsd decays."""
    final_lr: float = 0.1
    """Rate at the end as a part of the peak, for cosine and wsd."""
    beta1: float = 0.9
    """Of AdamW."""
    beta2: float = 0.95
    """Of AdamW."""
    epsilon: float = 1e-8
    """Of AdamW."""
    weight_decay: float = 0.1
    """Of matrices; norms, biases and what a method says need none get none."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 does not clip."""
    seed: int = 0
    """Of the initial weights and of the order of the data."""
    init_seed: int | None = None
    """Of the initial weights alone; None is seed."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation; bfloat16 is autocast, the weights stay float32."""
    compile: bool = False
    """torch.compile the model."""
    recompute: int = 0
    """Make the activations of every n-th block anew in the backward pass; 0 keeps all."""
    eval_every: int | None = None
    """Steps between evaluations; None is a tenth of the run. The last step is always evaluated."""
    eval_examples: int = 64
    """Held-out examples of an evaluation, the same for every run."""

    # running
    log_every: int = 10
    """Steps between log records."""
    save_seconds: float = 60.0
    """Seconds between checkpoints: what a crash may cost."""
    save_every: int | None = None
    """Steps between checkpoints, in addition."""
    keep: int = 2
    """Checkpoints kept while training."""
    save_model: bool = True
    """Keep the final model, as a folder of its own."""
    report_to: tuple[str, ...] = ()
    """tensorboard, trackio or wandb; the JSONL log is always written."""
    measure_memory: bool = True
    """Measure the peak memory of one step before the first."""
    threads: int | None = None
    """CPU threads; None is torch's choice."""
    device: str | None = None
    """Such as cpu or cuda:1; None is a GPU if there is one."""
    cache: str | None = None
    """Folder of tokenised data; None is the user's cache folder."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.steps is not None and self.tokens is not None:
            raise ValueError(f"steps ({self.steps}) and tokens ({self.tokens}) are both given; give one of them")
        for name in ("steps", "tokens", "batch", "accumulate", "context", "log_every", "save_every", "keep", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("eval_every", "eval_examples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.context < 2:
            raise ValueError(f"context must be at least 2, a token and the one it predicts, got {self.context}")
        if self.batch % self.accumulate:
            raise ValueError(f"accumulate ({self.accumulate}) must divide batch ({self.batch})")
        for name in ("warmup", "decay", "final_lr"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} must lie between 0 and 1, got {value}")
        if self.schedule == "wsd" and self.warmup is not None and self.warmup + self.decay > 1:
            raise ValueError(f"warmup ({self.warmup}) and decay ({self.decay}) are more than the whole run")
        for name in ("beta1", "beta2", "held_out"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        for name in ("lr", "epsilon", "save_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("weight_decay", "clip", "recompute"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not self.data:
            raise ValueError("data names nothing; give stdlib, files, folders, hf:DATASET or task:NAME")

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
    def decay_steps(self) -> int:
        """Steps in which wsd decays."""
        return round(self.decay * self.total_steps)

    @property
    def tokens_per_step(self) -> int:
        """Training tokens of a step."""
        return self.batch * self.context

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> TrainConfig:
        """The inverse of `to_dict`; a field nobody knows is an error."""
        import difflib

        known = [f.name for f in dataclasses.fields(TrainConfig)]
        for name in values:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f" (did you mean {close[0]!r}?)" if close else ""
                raise ValueError(f"a training run has no field {name!r}{hint}; its fields are {', '.join(known)}")
        listed: dict[str, Any] = {
            name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if name != "model"
        }
        return TrainConfig(**listed, model=dict(values.get("model", {})))

    @property
    def key(self) -> str:
        """Stands for every field that can change the weights."""
        return short_hash({name: value for name, value in self.to_dict().items() if name not in RUNNING})
