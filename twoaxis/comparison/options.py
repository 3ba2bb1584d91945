"""What can be asked of a comparison: one mapping of options, from the command line, a plan file or Python alike.

    seeds = 5
    match = "flops"
    tokens = 2_000_000
    data = ["stdlib", ["notes", "letters.txt"], "task:recall"]     three data sets, the second of two sources
    stream = ["deep_delta:value_channels=4", "hyper_connections"]
    lr = [1e-3, 2e-3, 4e-3]

    [[contenders]]
    stream = "denseformer"
    mixer = "short_swa:window=4"
    label = "dense + local"
    train = { weight_decay = 0.0 }

Only what is said is in the mapping. TOML, JSON and YAML are read; so is the compare.json of another folder. Sizes are
spelled with commas between them and colons between the parts of one:

    nano,tiny                                      presets
    width=64:blocks=2,width=96:blocks=3            changes of the comparison's preset
    tiny:blocks=8:tokens=4000000                   both, with a budget of its own
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from twoaxis.base.options import Count, Options, check_names, check_type
from twoaxis.base.registry import parse as parse_spec
from twoaxis.base.registry import split
from twoaxis.comparison.contenders import make_contenders, parse_spelled
from twoaxis.model.config import SHORT
from twoaxis.model.variant import Contender, make_contender
from twoaxis.training.config import TrainConfig, parse_model
from twoaxis.training.setup import with_family

Match = Literal["tokens", "flops", "time"]
Until = Literal["resolved"]
KINDS = {
    **dict.fromkeys(("grid", "controls", "recipe_check", "exchange"), bool),
    "baseline": str,
    "match": Match,
    "until": Until,
}
"""Options that are taken as they are said, and what they may be."""
FIRST_SEEDS = {"seeds": 0, "lr_seeds": 1000}
"""First of the seeds that are compared, and of those on which learning rates are chosen."""
SET_HERE = {
    "stream": "contenders (--stream)",
    "mixer": "contenders (--mixer)",
    "data": "the data sets (--data)",
    "seed": "the seeds (--seeds)",
    "lr": "the learning rates (--lr)",
    "eval_skip": "rows for choosing learning rates that follow from the others",
}
"""Fields of a run that are no options of a comparison, and what takes their place."""
AMOUNTS: Mapping[str, Any] = {
    "context": 128,
    "batch": 1,
    "steps": 40,
    "seeds": 4,
    "eval_examples": 8,
    "final_examples": 48,
    "lr": 3e-3,
    "warmup": 0.25,
    "weight_decay": 0.0,
    "measure_memory": False,
}
"""How much a probe trains and measures where nothing is said: counted to take a quarter of an hour for 135 million
parameters and two cores. A larger `lr` harms the norms' scales of SmolLM2 at the first step."""
FIELDS = tuple(f.name for f in dataclasses.fields(TrainConfig) if f.name not in SET_HERE)
"""Options that are fields of all runs."""
CONTENDER = {
    **dict.fromkeys(("stream", "mixer"), str | None),
    "label": str,
    **dict.fromkeys(("model", "train"), dict[str, Any]),
}
"""What a table of a contender has."""
COMPARED = (
    *("stream", "mixer", "grid", "contenders", "baseline", "controls", "data", "task", "sizes", "seeds", "match"),
    *("flops", "lr", "lr_seeds", "until", "margin", "recipe_check", "exchange", "use"),
)
"""Options that are not."""


@dataclass(frozen=True, kw_only=True)
class Size(Options):
    """A shape at which every contender is run."""

    label: str  # what tables call it; also its folder
    preset: str  # the shape it starts from
    model: dict[str, Any] = field(default_factory=dict)  # fields of `ModelConfig` that replace the preset's
    steps: Count | None = None  # its own number of steps; None is the comparison's
    tokens: Count | None = None  # its own number of tokens; None is the comparison's


def merge(file: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """A file's options with those that are said, which count more; contenders and data of both count."""
    merged = dict(file)
    for name, value in said.items():
        if name in ("stream", "mixer", "contenders", "data", "task", "use") and name in merged:
            merged[name] = [*_listed(merged[name]), *_listed(value)]
        elif name == "model" and name in merged:
            merged[name] = _model(merged[name]) | _model(value)
        else:
            merged[name] = value
    if "steps" in said or "tokens" in said:
        for name in {"steps", "tokens"} - set(said):
            merged.pop(name, None)
    return merged


def command_line(
    out: str | Path, file: str | None, said: Mapping[str, Any], command: Sequence[str] = ("compare",)
) -> str:
    """The command that says the same."""
    words = ["twoaxis", *command, "--out", str(out), *([] if file is None else ["--file", file])]
    for name, value in said.items():
        option = "--from" if name == "source" else f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(option if value else f"--no-{option[2:]}")
        elif name == "model":
            words += [word for field, given in _model(value).items() for word in (option, f"{field}={given}")]
        elif name in ("seeds", "lr", "lr_seeds") and isinstance(value, list | tuple):
            words += [option, ",".join(map(str, value))]
        elif name == "report_to":
            words += [option, *_listed(value)]
        else:
            for entry in _listed(value):
                words += [option, *map(str, _listed(entry))]
    return shlex.join(words)


def parse(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as the fields of a `Plan` that they say something about; `base` are the fields of all runs.

    A name nobody knows and a value of the wrong shape are errors.
    """
    for name in options:
        if name in SET_HERE and name not in COMPARED:
            raise ValueError(f"a comparison has no option {name!r} of its own; it has {SET_HERE[name]}")
    check_names(options, dict.fromkeys((*COMPARED, *FIELDS)), "a comparison")
    asked = {name: value for name, value in options.items() if name in COMPARED and value is not None}
    for name in KINDS.keys() & asked.keys():
        check_type(name, asked[name], KINDS[name])
    base = {name: value for name, value in options.items() if name in FIELDS}
    if "model" in base:
        base["model"] = _model(base["model"])
    named = make_contenders(_texts(asked, "stream"), _texts(asked, "mixer"), grid=asked.get("grid", False))
    tasks = tuple((f"task:{task}",) for task in _texts(asked, "task"))
    said: dict[str, Any] = {
        "base": with_family(base),
        "contenders": named + tuple(map(_contender, _listed(asked.get("contenders", ())))),
        "data": tuple(map(_data, _listed(asked.get("data", ())))) + tasks,
        "use": tuple(dict.fromkeys(str(Path(file).resolve()) for file in _texts(asked, "use"))),
        "sizes": ",".join(_texts(asked, "sizes")) or (),
        "lrs": _rates(asked.get("lr", ())),
    }
    said = {name: value for name, value in said.items() if value != ()}
    said |= {name: asked[name] for name in ("baseline", "match", "until") if name in asked}
    said |= {name: parse_seeds(asked[name], first) for name, first in FIRST_SEEDS.items() if name in asked}
    said |= {name: _number(name, asked[name]) for name in ("flops", "margin") if name in asked}
    if (label := said.get("baseline")) and label not in {contender.label for contender in said.get("contenders", ())}:
        with contextlib.suppress(ValueError):  # one of a contender's own that is no spelling of a method
            said["baseline"] = parse_spelled(label).label
    return said


def parse_seeds(given: Any, first: int = 0) -> tuple[int, ...]:
    """Seeds from `3` (three of them from `first` on), `5,6,7`, `5-7` or a list."""
    if isinstance(given, str):
        parts = [part.strip() for part in given.split(",")]
        try:
            seeds = [seed for part in parts if part for seed in _span(part)]
        except ValueError:
            raise ValueError(
                f"seeds are a number of them, several with commas between, or the first and the last as 6-11, got "
                f"{given!r}"
            ) from None
        given = seeds if len(parts) > 1 or len(seeds) > 1 else sum(seeds)
    if isinstance(given, int) and not isinstance(given, bool):
        if not 1 <= given <= 100_000:
            raise ValueError(f"there must be at least one seed and at most 100,000, got {given}")
        return tuple(range(first, first + given))
    if not isinstance(given, list | tuple) or not all(isinstance(s, int) and not isinstance(s, bool) for s in given):
        raise ValueError(f"seeds are a number of them or a list, got {given!r}")
    return tuple(given)


def _span(part: str) -> range:
    """One number, or those from a first to a last one, at most 100,000."""
    first, dash, last = part.partition("-")
    span = range(int(first), int(last) + 1) if dash and first else range(int(part), int(part) + 1)
    if not 1 <= len(span) <= 100_000:
        raise ValueError(part)
    return span


def parse_sizes(text: str | None, base: TrainConfig) -> tuple[Size, ...]:
    """Sizes from their spelling, see above.

    A part is a preset's name, a field of `ModelConfig` or its short name (width, blocks, heads, kv_heads, hidden),
    or steps or tokens. A changed width keeps the width of a head and makes the MLP 8/3 as wide, unless these are given.

    Args:
        text: as above; None is the shape of the base alone.
        base: where changes start when a size names no preset: its own, or the fields of its configuration file.
    """
    sizes, whole = [], base.family is not None and "hidden_size" in base.model
    alone = base.family if base.family is not None and whole else base.preset
    for spelled in [alone] if text is None else map(str.strip, split(text)):
        first, _, changes = spelled.partition(":") if "=" not in spelled.split(":")[0] else (alone, "", spelled)
        try:
            if whole and first != base.family:
                raise ValueError(
                    f"it names a preset, and the shape of {base.family} is given; write changes, such as "
                    "width=64:blocks=2"
                )
            if lost := [part for part in changes.split(":") if changes and "=" not in part]:
                raise ValueError(f"{lost[0]!r} is no change; write preset:field=value:field=value")
            preset, fields = base.preset if whole else first, parse_spec(f"{first}:{changes.replace(':', ',')}")[1]
            budget = {name: fields.pop(name) for name in ("steps", "tokens") if name in fields}
            if len(budget) > 1:
                raise ValueError("it gives both steps and tokens; give one of them")
            model = _shaped(preset, {SHORT.get(name, name): value for name, value in fields.items()}, base)
            sizes.append(Size(label=spelled, preset=preset, model=model, **budget))
        except ValueError as error:
            raise ValueError(f"the size {spelled!r}: {error}") from error
    return tuple(sizes)


def _shaped(preset: str, fields: dict[str, Any], base: TrainConfig) -> dict[str, Any]:
    """Heads and MLP that follow a changed width."""
    from twoaxis.model.presets import preset_fields

    shape = preset_fields(preset) | (base.model if base.family is not None else {})
    width = fields.get("hidden_size")
    if not isinstance(width, int) or width == shape["hidden_size"]:
        return fields
    if "num_attention_heads" not in fields and "head_dim" not in fields:
        head, kv = shape.get("head_dim"), shape.get("num_key_value_heads")
        head = head or shape["hidden_size"] // shape["num_attention_heads"]
        heads, rest = divmod(width, head)
        if rest:
            raise ValueError(
                f"heads of {head} channels, as {preset} has them, do not divide the width {width}; give heads=N, or a "
                f"multiple of {head}"
            )
        fields = fields | {"num_attention_heads": heads}
        if kv is not None and "num_key_value_heads" not in fields and heads % kv:
            raise ValueError(f"it has {heads} heads for {kv} of key and value; give kv_heads=N")
    if base.family is None:
        return {"intermediate_size": None} | fields
    return {"intermediate_size": -(-shape["intermediate_size"] * width // (8 * shape["hidden_size"])) * 8} | fields


def _contender(given: Any) -> Contender:
    if isinstance(given, Contender):
        return given
    if isinstance(given, str):
        return make_contender(given)
    if not isinstance(given, Mapping):
        raise ValueError(f"a contender is a table with {', '.join(CONTENDER)}, got {given!r}")
    check_names(given, CONTENDER, "a contender")
    for name, value in given.items():
        check_type(f"{name} of a contender", value, CONTENDER[name])
    made = make_contender(given.get("stream"), given.get("mixer"))
    more = {name: getattr(made, name) | given.get(name, {}) for name in ("model", "train")}
    return dataclasses.replace(made, label=given.get("label", made.label), **more)


def _data(given: Any) -> tuple[str, ...]:
    """A data set: text is one of one source, a list one of several."""
    sources = (given,) if isinstance(given, str) else given
    if not isinstance(sources, list | tuple) or not sources or not all(isinstance(s, str) and s for s in sources):
        raise ValueError(f"data are names of sources, or lists of them, got {given!r}")
    return tuple(sources)


def _model(given: Any) -> dict[str, Any]:
    """Fields of the model, from a table or from FIELD=VALUE."""
    if isinstance(given, Mapping):
        return dict(given)
    texts = _listed(given)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"model must be a table of fields and values, got {given!r}")
    return parse_model(texts)


def _texts(options: Mapping[str, Any], name: str) -> list[str]:
    found = [] if options.get(name) is None else _listed(options[name])
    if not all(isinstance(item, str) for item in found):
        raise ValueError(f"{name} must be text or a list of texts, got {options[name]!r}")
    return found


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]


def _rates(given: Any) -> tuple[float, ...]:
    listed = [part for part in given.split(",") if part.strip()] if isinstance(given, str) else _listed(given)
    return tuple(_number("lr", rate) for rate in listed)


def _number(name: str, given: Any) -> float:
    try:
        return float(given)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a number, got {given!r}") from None
