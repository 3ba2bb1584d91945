"""The fields of a run as they are said: in Python, on the command line, and in a file, which counts less.

    preset = "nano"                  run.toml; JSON and YAML alike
    stream = "deep_delta"
    steps = 2000
    model = { hidden_size = 96 }

The run.json of a folder is such a file too. Only what is said is in a mapping of fields, so that a default never
displaces what a file says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from twoaxis.base import options
from twoaxis.base.spec import parse_value, split
from twoaxis.data.options import ExampleFields
from twoaxis.training.config import TrainConfig


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
    fields: dict[str, Any] = {}
    texts = [changes] if isinstance(changes, str) else changes
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"model must be a table of fields and values, or FIELD=VALUE, got {str(changes)[:80]}")
    for change in (part for text in texts for part in split(text)):
        name, equals, value = (word.strip() for word in change.partition("="))
        if not equals or not name:
            raise ValueError(f"--model {change} changes nothing; write --model FIELD=VALUE[,FIELD=VALUE]")
        if name in fields:
            raise ValueError(f"--model gives {name} twice")
        fields[name] = parse_value(value)
    return fields


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
