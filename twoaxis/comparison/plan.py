"""What a comparison runs, and the file that holds it.

    contenders x data sets x sizes      rows: one line of a table each
    row x seeds                         runs: one folder of `train` each

    OUT/compare.json                                                  the plan and its rows
    OUT/runs/<data>/<size>/<contender key>/lr-<rate>/seed-<seed>/     a run

A folder only grows: by contenders, data, sizes, seeds and learning rates. What decides the numbers of its runs stays
as it was first given, so finished runs are never done again and always belong to what stands in the table.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from twoaxis.base.files import read_json, short_hash, write_json
from twoaxis.base.registry import did_you_mean
from twoaxis.base.spec import spell
from twoaxis.comparison.sizes import Size
from twoaxis.model.variant import Contender, make_contender
from twoaxis.training.config import RUNNING, TrainConfig

FORMAT = 1
"""Version of compare.json."""
PLAN = "compare.json"
LR_SEED = 1000
"""First of the seeds on which learning rates are chosen."""
Match = Literal["tokens", "flops", "time"]

OWN = ("stream", "mixer", "data", "seed", "lr")
"""Fields of a run that the comparison sets from its own options."""
FROM_SCRATCH = ("source", "train")
"""Fields of a run that goes on from a saved model."""
PER_CONTENDER = (
    *("batch", "accumulate", "lr", "schedule", "warmup", "decay", "final_lr", "beta1", "beta2", "epsilon"),
    *("weight_decay", "clip", "init_seed", "dtype", "compile", "recompute"),
)
"""Fields of a run that one contender may have for itself; data, budget and evaluation are the same for all."""
TIMED = ("batch", "accumulate", "dtype")
"""Those that it may not when throughput is measured, which is done with one batch for all."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A contender on a data set at a size: what was counted, measured and decided for it, once and for all."""

    data: str
    """Label of the data set."""
    data_folder: str
    """Its folder below runs/."""
    size: str
    """Label of the size."""
    contender: str
    """Key of the contender."""
    steps: int
    """Optimiser steps of its runs."""
    tokens: int
    """Training tokens of its runs."""
    parameters: int
    """Numbers learned."""
    flops_per_token: int
    """Training operations per token."""
    model: dict[str, Any] = field(default_factory=dict)
    """What `wider` or `deeper` came to at this size."""
    tokens_per_second: float | None = None
    """Throughput that match="time" was decided by."""
    lr: float | None = None
    """Its learning rate; None until it is chosen."""
    lr_losses: dict[str, float | None] = field(default_factory=dict)
    """Mean held-out loss by rate, where rates were compared; None is a rate with which a run diverged."""
    lr_edge: bool = False
    """Whether the chosen rate is the smallest or largest of several, so that a better one may lie beyond."""

    @property
    def folder(self) -> Path:
        """Its place in the comparison's folder."""
        return Path("runs", self.data_folder, folder_name(self.size), self.contender)


class Run(NamedTuple):
    """One training run of a comparison.

    Attributes:
        row: the line of a table it belongs to.
        label: of its contender.
        lr: peak learning rate.
        seed: of weights and data.
        choosing: whether it only serves to choose the learning rate.
    """

    row: Row
    label: str
    lr: float
    seed: int
    choosing: bool

    @property
    def folder(self) -> Path:
        """Its place in the comparison's folder."""
        return self.row.folder / f"lr-{self.lr!r}" / f"seed-{self.seed}"

    @property
    def name(self) -> str:
        """For messages."""
        rate = f", lr {self.lr!r}" if self.choosing else ""
        return f"{self.label}, {self.row.data}, {self.row.size}{rate}, seed {self.seed}"

    @property
    def flops(self) -> float:
        """Training operations of the whole run."""
        return float(self.row.tokens) * self.row.flops_per_token


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A comparison: what was asked for with every default filled in, and what was decided for its rows.

    It is compare.json, one to one.
    """

    base: TrainConfig
    """What all runs share."""
    contenders: tuple[Contender, ...]
    """In the order of the tables."""
    baseline: str
    """Label of the contender the others are compared with."""
    data: tuple[tuple[str, ...], ...]
    """Data sets, each the sources of one; a table each."""
    sizes: tuple[Size, ...]
    """Shapes; a table each."""
    seeds: tuple[int, ...]
    """Of the compared runs."""
    match: Match
    """What is the same for all contenders of a table."""
    flops: float | None = None
    """Budget of a run, for match="flops"; None is what the baseline takes."""
    lrs: tuple[float, ...]
    """Learning rates; of several, each contender gets its best."""
    lr_seeds: tuple[int, ...] = (LR_SEED, LR_SEED + 1)
    """Of the runs that choose the learning rate."""
    use: tuple[str, ...] = ()
    """Python files that register streams and mixers of one's own."""
    rows: tuple[Row, ...] = ()
    """Data by data, size by size, contender by contender; empty until they are counted."""
    about: dict[str, Any] = field(default_factory=dict)
    """data (facts and fingerprint by label), use (digests of files), versions, hardware, hardware_line, commands."""

    def __post_init__(self) -> None:
        check_contenders(self.contenders)
        if self.baseline not in [c.label for c in self.contenders]:
            hint = did_you_mean(self.baseline, self.labels)
            raise ValueError(
                f"there is no contender {self.baseline!r} to be the baseline{hint}; "
                f"the contenders are {', '.join(self.labels)}"
            )
        for name, values in (("seeds", self.seeds), ("lr_seeds", self.lr_seeds), ("lr", self.lrs), ("data", self.data)):
            if not values:
                raise ValueError(f"{name} is empty")
            if len(set(values)) < len(values):
                raise ValueError(f"{name} names something twice: {', '.join(map(str, values))}")
        if min(*self.seeds, *self.lr_seeds) < 0:
            raise ValueError(f"seeds must not be negative, got {min(*self.seeds, *self.lr_seeds)}")
        if any(not 0 < rate < float("inf") for rate in self.lrs):
            raise ValueError(f"learning rates must be positive, got {', '.join(map(str, self.lrs))}")
        both = sorted(set(self.seeds) & set(self.lr_seeds))
        if both and len(self.lrs) > 1:
            raise ValueError(
                f"seed {both[0]} is in both --seeds and --lr-seeds; a rate chosen on the seeds it is judged by looks "
                "better than it is: choose others"
            )
        for contender in self.contenders if self.match == "time" else ():
            for name in TIMED:
                if name in contender.train:
                    raise ValueError(
                        f"{contender.label!r} changes train.{name}; with --match time {', '.join(TIMED)} are the same "
                        "for all, as throughput is measured with one batch"
                    )
        for what, labels in (("size", [s.label for s in self.sizes]), ("data set", [slug(d) for d in self.data])):
            if len(set(labels)) < len(labels):
                raise ValueError(f"two {what}s have the name {max(labels, key=labels.count)!r}")

    @property
    def labels(self) -> list[str]:
        """Of the contenders."""
        return [contender.label for contender in self.contenders]

    def contender(self, key: str) -> Contender:
        """The contender with that key."""
        return next(contender for contender in self.contenders if contender.key == key)

    @property
    def baseline_key(self) -> str:
        """Key of the baseline."""
        return next(contender.key for contender in self.contenders if contender.label == self.baseline)

    def size(self, label: str) -> Size:
        """The size of that name."""
        return next(size for size in self.sizes if size.label == label)

    def row(self, data: str, size: str, contender: str) -> Row:
        """The row of a data set, a size (their labels) and a contender (its key)."""
        return next(r for r in self.rows if (r.data, r.size, r.contender) == (data, size, contender))

    def choosing_runs(self) -> list[Run]:
        """Runs that choose learning rates: seed by seed, row by row."""
        return [
            Run(row, self.contender(row.contender).label, rate, seed, True)
            for seed in self.lr_seeds
            for row in self.rows
            if row.lr is None
            for rate in self.lrs
        ]

    def runs(self) -> list[Run]:
        """The compared runs of all rows whose learning rate is known: seed by seed, row by row."""
        return [
            Run(row, self.contender(row.contender).label, row.lr, seed, False)
            for seed in self.seeds
            for row in self.rows
            if row.lr is not None
        ]

    def config(self, run: Run) -> TrainConfig:
        """The configuration of a run."""
        return run_config(self, run.row, run.lr, run.seed)

    def save(self, folder: str | Path) -> None:
        """Write compare.json."""
        write_json(Path(folder) / PLAN, self.to_dict())

    @staticmethod
    def load(folder: str | Path) -> Plan | None:
        """The plan of a folder, or None where there is none."""
        path = Path(folder) / PLAN
        if not path.exists():
            return None
        document = read_json(path)
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            found = document.get("format") if isinstance(document, dict) else None
            raise ValueError(f"{path} has format {found!r}; this version of twoaxis reads format {FORMAT}")
        return Plan.from_dict(document)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; the inverse is `from_dict`."""
        return {
            "format": FORMAT,
            "base": self.base.to_dict(),
            "contenders": [contender.to_dict() | {"key": contender.key} for contender in self.contenders],
            "baseline": self.baseline,
            "data": [{"label": data_label(d), "folder": slug(d), "sources": list(d)} for d in self.data],
            "sizes": [dataclasses.asdict(size) for size in self.sizes],
            "seeds": list(self.seeds),
            "match": self.match,
            "flops": self.flops,
            "lr": list(self.lrs),
            "lr_seeds": list(self.lr_seeds),
            "use": list(self.use),
            "rows": [dataclasses.asdict(row) | {"folder": row.folder.as_posix()} for row in self.rows],
            "about": self.about,
        }

    @staticmethod
    def from_dict(document: dict[str, Any]) -> Plan:
        """The inverse of `to_dict`; what else is in the document is passed over."""
        known = {f.name for f in dataclasses.fields(Row)}
        contenders = [{name: v for name, v in c.items() if name != "key"} for c in document["contenders"]]
        return Plan(
            base=TrainConfig.from_dict(document["base"]),
            contenders=tuple(Contender(**contender) for contender in contenders),
            baseline=document["baseline"],
            data=tuple(tuple(entry["sources"]) for entry in document["data"]),
            sizes=tuple(Size(**size) for size in document["sizes"]),
            seeds=tuple(document["seeds"]),
            match=document["match"],
            flops=document["flops"],
            lrs=tuple(document["lr"]),
            lr_seeds=tuple(document["lr_seeds"]),
            use=tuple(document["use"]),
            rows=tuple(Row(**{name: v for name, v in row.items() if name in known}) for row in document["rows"]),
            about=document["about"],
        )


def run_config(plan: Plan, row: Row, lr: float, seed: int) -> TrainConfig:
    """The configuration of a run of `row`."""
    contender, size = plan.contender(row.contender), plan.size(row.size)
    data = next(d for d in plan.data if data_label(d) == row.data)
    return dataclasses.replace(
        contender_config(plan.base, contender, size, data, row.model),
        steps=row.steps,
        tokens=None,
        lr=lr,
        seed=seed,
    )


def contender_config(
    base: TrainConfig, contender: Contender, size: Size, data: Sequence[str], resolved: dict[str, Any]
) -> TrainConfig:
    """The base with what a contender, a size and a data set change; the budget is still the base's.

    Args:
        base: what all runs share.
        contender: changes the method, fields of the model and of the training.
        size: changes the shape.
        data: the sources.
        resolved: fields of the model that `wider` or `deeper` came to.
    """
    from twoaxis.comparison.controls import without_matching

    plain = without_matching(contender)
    return dataclasses.replace(
        base,
        preset=size.preset,
        stream=spell(plain.stream, plain.stream_options),
        mixer=None if plain.mixer is None else spell(plain.mixer, plain.mixer_options),
        model=base.model | size.model | plain.model | resolved,
        data=tuple(data),
        **plain.train,
    )


def make_contenders(streams: Iterable[str], mixers: Iterable[str], *, grid: bool = False) -> tuple[Contender, ...]:
    """Contenders from their spellings.

    Args:
        streams: each on its own.
        mixers: each on the plain residual.
        grid: every stream (the plain residual if none is named) without a mixer and with each.
    """
    streams, mixers = list(streams), list(mixers)
    if grid:
        return tuple(make_contender(s, m) for s in streams or ["standard"] for m in (None, *mixers))
    return tuple(make_contender(s) for s in streams) + tuple(make_contender(None, m) for m in mixers)


def check_contenders(contenders: Sequence[Contender]) -> None:
    """Refuse contenders that are the same, that look the same, or that change what must be the same for all."""
    by_key: dict[str, Contender] = {}
    by_label: dict[str, Contender] = {}
    for contender in contenders:
        if contender.key in by_key:
            raise ValueError(
                f"the contenders {by_key[contender.key].label!r} and {contender.label!r} are the same; leave one out"
            )
        if contender.label in by_label:
            raise ValueError(
                f"two contenders are called {contender.label!r}; tell them apart with label=NAME in their options"
            )
        by_key[contender.key] = by_label[contender.label] = contender
        for name in contender.train:
            if name not in PER_CONTENDER:
                raise ValueError(
                    f"{contender.label!r} changes train.{name}{did_you_mean(name, PER_CONTENDER)}; one contender may "
                    f"change {', '.join(PER_CONTENDER)}, the rest is the same for all"
                )


def data_label(sources: Sequence[str]) -> str:
    """What tables call a data set."""
    return " ".join(sources)


def slug(sources: Sequence[str]) -> str:
    """Folder of a data set: its name, with a few digits where the name cannot be one."""
    return folder_name(data_label(sources))


def folder_name(label: str) -> str:
    """A label as the name of a folder, different for different labels."""
    plain = re.sub(r"[^A-Za-z0-9._=-]+", "-", label).strip("-.")[:48]
    return plain if plain == label else f"{plain}-{short_hash(label)[:6]}"


def merge(old: Sequence[Any], new: Iterable[Any]) -> tuple[Any, ...]:
    """The old ones, then what is new."""
    return (*old, *[item for item in dict.fromkeys(new) if item not in old])


def differing(old: TrainConfig, new: dict[str, Any]) -> list[str]:
    """Fields of `new` that would change the weights of runs made with `old`, as `name: old -> new`."""
    was = old.to_dict()
    changed = [name for name, value in new.items() if name not in RUNNING and was[name] != value]
    return [f"{name}: {was[name]!r} -> {new[name]!r}" for name in changed]
