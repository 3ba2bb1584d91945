"""A comparison as a mapping of options: what a plan file holds and what the command line amounts to.

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

Keys are the options of `twoaxis compare`. TOML, JSON and YAML are read; so is the compare.json of another folder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twoaxis.base.registry import did_you_mean
from twoaxis.comparison.plan import FORMAT, FROM_SCRATCH, OWN, Plan, make_contenders
from twoaxis.comparison.request import Request
from twoaxis.model.variant import Contender, make_contender
from twoaxis.training.config import TrainConfig

OPTIONS = (
    *("stream", "mixer", "grid", "contenders", "baseline", "controls", "data", "task", "sizes", "seeds", "match"),
    *("flops", "lr", "lr_seeds", "use"),
)
"""Keys that are not fields of a run."""
FIELDS = tuple(f.name for f in dataclasses.fields(TrainConfig) if f.name not in (*OWN, *FROM_SCRATCH))
"""Keys that are."""


def make_request(options: Mapping[str, Any]) -> Request:
    """A request from options by name; a key nobody knows is an error.

    Args:
        options: see above.
    """
    if options.get("format") == FORMAT and "rows" in options:
        return _of_plan(dict(options))
    for name in options:
        if name not in (*OPTIONS, *FIELDS):
            hint = did_you_mean(name, [*OPTIONS, *FIELDS])
            raise ValueError(f"a comparison has no option {name!r}{hint}; it has {', '.join((*OPTIONS, *FIELDS))}")
    named = make_contenders(_texts(options, "stream"), _texts(options, "mixer"), grid=bool(options.get("grid", False)))
    base = {name: tuple(v) if isinstance(v, list) else v for name, v in options.items() if name in FIELDS}
    tasks = [(f"task:{task}",) for task in _texts(options, "task")]
    sizes = _texts(options, "sizes")
    flops = options.get("flops")
    return Request(
        base=base,
        contenders=named + tuple(_contender(given) for given in options.get("contenders", ())),
        baseline=options.get("baseline"),
        controls=bool(options.get("controls", False)),
        data=tuple(_data(options.get("data", ()))) + tuple(tasks),
        sizes=",".join(sizes) if sizes else None,
        seeds=None if options.get("seeds") is None else parse_seeds(options["seeds"]),
        match=_match(options.get("match")),
        flops=None if flops is None else _number("flops", flops),
        lrs=tuple(_number("lr", rate) for rate in _values(options.get("lr", ()))),
        lr_seeds=None if options.get("lr_seeds") is None else _lr_seeds(options["lr_seeds"]),
        use=tuple(str(Path(file).resolve()) for file in _texts(options, "use")),
    )


def merge_options(file: Mapping[str, Any], line: Mapping[str, Any]) -> dict[str, Any]:
    """A file's options with those of the command line, which take precedence; contenders and data of both count."""
    merged = dict(file)
    for name, value in line.items():
        if name in ("stream", "mixer", "data", "task", "use") and name in merged:
            merged[name] = [*_listed(merged[name]), *_listed(value)]
        elif name == "model" and name in merged:
            merged[name] = merged[name] | value
        else:
            merged[name] = value
    if "steps" in line or "tokens" in line:
        for name in {"steps", "tokens"} - set(line):
            merged.pop(name, None)
    return merged


def parse_seeds(given: Any, first: int = 0) -> tuple[int, ...]:
    """Seeds from `3` (three of them from `first` on), `5,6,7` or a list."""
    if isinstance(given, str):
        parts = [part.strip() for part in given.split(",")]
        try:
            numbers = [int(part) for part in parts if part]
        except ValueError:
            raise ValueError(f"seeds are a number of them, or several with commas between, got {given!r}") from None
        given = numbers if len(parts) > 1 else numbers[0] if numbers else 0
    if isinstance(given, int) and not isinstance(given, bool):
        if given < 1:
            raise ValueError(f"there must be at least one seed, got {given}")
        return tuple(range(first, first + given))
    if not isinstance(given, list | tuple) or not all(isinstance(s, int) and not isinstance(s, bool) for s in given):
        raise ValueError(f"seeds are a number of them or a list, got {given!r}")
    return tuple(given)


def _lr_seeds(given: Any) -> tuple[int, ...]:
    from twoaxis.comparison.plan import LR_SEED

    return parse_seeds(given, LR_SEED)


def _contender(given: Any) -> Contender:
    if isinstance(given, str):
        return make_contender(given)
    known = ("stream", "mixer", "label", "model", "train")
    if not isinstance(given, Mapping) or not set(given) <= set(known):
        raise ValueError(f"a contender has {', '.join(known)}, got {given!r}")
    made = make_contender(given.get("stream"), given.get("mixer"))
    return dataclasses.replace(
        made,
        label=str(given.get("label", made.label)),
        model=made.model | dict(given.get("model", {})),
        train=made.train | dict(given.get("train", {})),
    )


def _data(given: Any) -> list[tuple[str, ...]]:
    """Data sets: text is one of one source, a list inside the list one of several."""
    return [(entry,) if isinstance(entry, str) else tuple(map(str, entry)) for entry in _listed(given)]


def _match(given: Any) -> Any:
    if given not in (None, "tokens", "flops", "time"):
        raise ValueError(f"unknown match {given!r}; it is one of tokens, flops, time")
    return given


def _of_plan(document: dict[str, Any]) -> Request:
    """A request for the same comparison as another folder's."""
    plan = Plan.from_dict(document)
    sizes = [size.label for size in plan.sizes]
    return Request(
        base={name: value for name, value in plan.base.to_dict().items() if name in FIELDS},
        contenders=plan.contenders,
        baseline=plan.baseline,
        data=plan.data,
        sizes=None if sizes == [plan.base.preset] else ",".join(sizes),
        seeds=plan.seeds,
        match=plan.match,
        flops=plan.flops,
        lrs=plan.lrs,
        lr_seeds=plan.lr_seeds,
        use=plan.use,
    )


def _texts(options: Mapping[str, Any], name: str) -> list[str]:
    found = _listed(options.get(name, ()))
    if not all(isinstance(item, str) for item in found):
        raise ValueError(f"{name} must be text or a list of texts, got {options[name]!r}")
    return found


def _values(given: Any) -> list[Any]:
    return [part for part in given.split(",") if part.strip()] if isinstance(given, str) else _listed(given)


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]


def _number(name: str, given: Any) -> float:
    try:
        return float(given)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number, got {given!r}") from None
