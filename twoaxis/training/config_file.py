"""A run's fields from a file and from the command line, which takes precedence.

    preset = "nano"                  run.toml; JSON and YAML alike
    stream = "deep_delta"
    steps = 2000
    model = { hidden_size = 96 }

The run.json of a folder is such a file too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from twoaxis.base.spec import parse_value, split
from twoaxis.training.config import TrainConfig


def read_fields(path: str | Path) -> dict[str, Any]:
    """The fields in a TOML, JSON or YAML file; of a run.json those of its run."""
    from twoaxis.comparison.request_file import read_options

    found = read_options(path)
    if "config" in found and "key" in found:
        found = found["config"]
    if "from" in found:  # as the command line calls it
        found = found | {"source": found["from"]}
        del found["from"]
    if not isinstance(found.get("model", {}), dict):
        raise ValueError(f"model in {path} must be a table of fields and values, got {found['model']!r}")
    return found


def parse_model(changes: Iterable[str]) -> dict[str, Any]:
    """Fields of the model from `FIELD=VALUE[,FIELD=VALUE...]`, each once."""
    fields: dict[str, Any] = {}
    for change in (part for text in changes for part in split(text)):
        name, equals, value = (word.strip() for word in change.partition("="))
        if not equals or not name:
            raise ValueError(f"--model {change} changes nothing; write --model FIELD=VALUE[,FIELD=VALUE]")
        if name in fields:
            raise ValueError(f"--model gives {name} twice")
        fields[name] = parse_value(value)
    return fields


def merge(file: Mapping[str, Any], line: Mapping[str, Any]) -> TrainConfig:
    """A run from a file's fields and those of the command line.

    Fields of the model are merged one by one. Steps and tokens stand for one another: the command line's displaces the
    file's.

    Args:
        file: from `read_fields`; empty where there is none.
        line: only what was given there.
    """
    fields = dict(file) | dict(line)
    if "model" in file and "model" in line:
        fields["model"] = file["model"] | line["model"]
    if "steps" in line or "tokens" in line:
        for name in {"steps", "tokens"} - set(line):
            fields.pop(name, None)
    return TrainConfig.from_dict(fields)
