"""`retrofit.json`: what a retrofitted folder came from, what was done and what was measured."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from twoaxis.base.files import read_json, write_json
from twoaxis.base.options import from_record

if TYPE_CHECKING:
    from twoaxis.pretrained.choose_start import Start
    from twoaxis.pretrained.source import Source

FILE = "retrofit.json"
Origin = Literal["new", "pretrained"]

RATES: dict[Origin, float] = {"new": 1.0, "pretrained": 0.1}
"""Multipliers of the learning rate: new parameters have everything to learn. A stream's groups multiply on top."""
SHOWN = 3
"""Parameters that a line names before it counts the rest."""


class Begun(NamedTuple):
    """How a model began; `new` are the parameters that the source does not have, `parameters` how many it has."""

    source: Source
    start: Start
    seed: int
    new: tuple[str, ...]
    parameters: int


@dataclass(frozen=True, kw_only=True)
class Record:
    """One retrofit."""

    source: dict[str, Any]
    """name as given, kind (folder, gguf, hub, model), family, and the SHA-256 of its weights by file."""
    method: dict[str, Any]
    """The fields of the configuration that say which stream and mixer, with every option that was set."""
    neutral: str
    """How the stream starts: bitwise, rounding or blend."""
    dtype: str
    """Of the model."""
    seed: int
    """Of the new parameters that start at random."""
    source_parameters: int
    """Of the source."""
    added_parameters: int
    """What the model has beyond them: the new ones, and a scale for every further way of a pre-norm."""
    added_bytes: int
    """The same in bytes."""
    measured: dict[str, Any]
    """The text (name, tokens, bytes), the difference from the source (largest, relative, agree, tokens), and how
    exactly its layers carry the plain stream: bitwise or rounding."""
    new: tuple[str, ...]
    """Parameters that the source does not have; all others are pretrained."""
    stuck: dict[str, str]
    """New parameters that do not learn from this start, and why."""
    notes: tuple[str, ...]
    """What was chosen for the user or ignored, one line each."""
    versions: dict[str, str]
    """Of twoaxis, torch, transformers and Python."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return json.loads(json.dumps(dataclasses.asdict(self)))


def write_record(record: Record, folder: str | Path) -> None:
    """Put the record into a folder; a model that is trained on and saved elsewhere stays a retrofit with it."""
    write_json(Path(folder) / FILE, record.to_dict())


def read_record(folder: str | Path) -> Record | None:
    """The record of a folder; None if it has none."""
    path = Path(folder) / FILE
    if not path.is_file():
        return None
    return from_record(Record, read_json(path), str(path), "Retrofit the source anew")


def record_of(model: Any) -> Record | None:
    """The record of a model: made by `retrofit` in this process, or loaded from a folder that has one."""
    found = getattr(model, "retrofit_record", None)
    if isinstance(found, Record):
        return found
    name = getattr(model, "name_or_path", "")
    return read_record(name) if name else None


def is_retrofit(model: Any) -> bool:
    """Whether it is known which parameters of a model are new."""
    return hasattr(model, "begun") or record_of(model) is not None


def parameter_origins(model: Any) -> dict[str, Origin]:
    """Whether each parameter is new or pretrained; a model that is no retrofit is an error."""
    begun = getattr(model, "begun", None)
    record = record_of(model) if begun is None else begun
    if record is None:
        raise ValueError(
            "this model is no retrofit: there is no retrofit.json in the folder it was loaded from, so nobody knows "
            "which of its parameters are new"
        )
    new, names = set(record.new), [name for name, _ in model.named_parameters()]
    if lost := sorted(new - set(names)):
        raise ValueError(f"retrofit.json speaks of another model: {lost[0]} is none of its {len(names)} parameters")
    return {name: "new" if name in new else "pretrained" for name in names}


def new_parameters(model: Any) -> list[str]:
    """Names of the parameters that a retrofit added, for `twoaxis.model.groups.trainable`."""
    return [name for name, origin in parameter_origins(model).items() if origin == "new"]


def learning_rates(model: Any, rates: Mapping[Origin, float] | None = None) -> dict[str, float]:
    """Multipliers of the learning rate of a retrofit by parameter, for `twoaxis.model.groups.param_groups`.

    Args:
        model: a retrofit.
        rates: other ones than `RATES`. Where every pretrained matrix is frozen, pretrained scales and biases have the
            whole rate: nothing under them moves.
    """
    from twoaxis.model.groups import DECAYED, roles

    origins, known, whole = parameter_origins(model), roles(model), dict[Origin, float]()
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not any(known[name] in DECAYED and origins[name] == "pretrained" for name in learning):
        whole["pretrained"] = 1.0
    return {name: {**RATES, **whole, **(rates or {})}[origin] for name, origin in origins.items()}


def closed_paths(stuck: dict[str, str]) -> list[str]:
    """A line of warning for each reason why new parameters do not learn, by their names as in a record."""
    by_reason: dict[str, list[str]] = {}
    for name, why in stuck.items():
        by_reason.setdefault(why, []).append(name)
    lines = []
    for why, names in by_reason.items():
        shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        lines.append(f"no gradient for {shown}: {why}")
    return lines
