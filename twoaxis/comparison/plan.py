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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from twoaxis.base.files import read_json, short_hash, write_json
from twoaxis.base.options import Count, NotNegative, Options, Positive, Share, at_least, check_type, from_record
from twoaxis.base.registry import did_you_mean, spell
from twoaxis.comparison.contenders import BUDGET, TIMED, check_contenders, freeze_references, without_matching
from twoaxis.comparison.options import FIELDS, FIRST_SEEDS, Match, Size, Until, merge, parse, parse_seeds, parse_sizes
from twoaxis.comparison.statistics import Look, added_looks, planned_looks
from twoaxis.model.variant import Contender, make_contender
from twoaxis.training.config import RUNNING, TrainConfig

FORMAT = 3
"""Version of compare.json."""
PLAN = "compare.json"
SEEDS, MOST_SEEDS = 6, 16
"""Default number of seeds, and of the most with `until`."""
ABOUT: dict[str, Any] = {
    "data": dict[str, dict[str, Any]],
    "use": dict[str, str],
    "commands": tuple[str, ...],
    "versions": dict[str, Any],
    "hardware": dict[str, Any],
    "hardware_line": str,
    "ngrams": dict[str, dict[str, dict[str, float]]],
    "source": str,
}
"""What a comparison notes about itself, and in which shape: facts of its data and digests of its files among it."""


@dataclass(frozen=True, kw_only=True)
class Row(Options):
    """A contender on a data set at a size: what was counted, measured and decided for it, once and for all."""

    data: str  # label of the data set
    size: str  # label of the size
    contender: str  # key of the contender
    steps: Annotated[int, at_least(0)]  # optimiser steps of its runs
    tokens: Annotated[int, at_least(0)]  # training tokens of its runs
    parameters: Annotated[int, at_least(0)]  # numbers learned
    flops_per_token: Count  # training operations per token
    uncounted: tuple[str, ...] = ()  # a family's modules whose operations are in that number for their matrices alone
    model: dict[str, Any] = field(default_factory=dict)  # what `wider` or `deeper` came to at this size
    tokens_per_second: Positive | None = None  # throughput, measured in turns with the others before the runs
    speed_spread: NotNegative = 0.0  # of its ratio to the baseline's, as a part of it
    new_rate: Positive | None = None  # multiplies the learning rate of what a retrofit adds; see `new_rates`
    fixed_share: Share | None = None  # part of its training step that a step of two tokens takes too
    lr: Positive | None = None  # its learning rate; None until it is chosen
    lr_losses: dict[str, float | None] = field(default_factory=dict)  # mean held-out loss by rate; None is diverged
    lr_edge: bool = False  # whether the chosen rate is the smallest or largest: a better one may lie beyond

    @property
    def flops(self) -> float:
        """Training operations of a whole run."""
        return float(self.tokens) * self.flops_per_token

    @property
    def folder(self) -> Path:
        """Its place in the comparison's folder, which follows from labels and key and is never read from a file."""
        return Path("runs", folder_name(self.data), folder_name(self.size), self.contender)


class Run(NamedTuple):
    """One training run of a comparison."""

    row: Row  # the line of a table it belongs to
    label: str  # of its contender
    lr: float  # peak learning rate
    seed: int  # of weights and data
    choosing: bool  # whether it only serves to choose the learning rate

    @property
    def folder(self) -> Path:
        """Its place in the comparison's folder."""
        return self.row.folder / f"lr-{self.lr!r}" / f"seed-{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Plan(Options):
    """A comparison: what was asked for with every default filled in, and what was decided for its rows.

    It is compare.json, one to one.
    """

    base: TrainConfig  # what all runs share
    contenders: tuple[Contender, ...]  # in the order of the tables
    baseline: str  # label of the contender the others are compared with
    data: tuple[tuple[str, ...], ...]  # data sets, each the sources of one; a table each
    sizes: tuple[Size, ...]  # shapes; a table each
    seeds: tuple[int, ...]  # of the compared runs; with `until` the most there may be
    until: Until | None = None  # take more seeds until a difference is resolved; None takes all of them
    grown: tuple[Count, ...] = ()  # how many seeds there were before more were added, each time: verdicts had been seen
    margin: Positive | None = None  # a difference in loss smaller than this does not matter
    match: Match  # what is the same for all contenders of a table
    flops: Positive | None = None  # budget of a run, for match="flops"; None is what the baseline takes
    lrs: tuple[Positive, ...]  # learning rates; of several, each contender gets its best
    lr_seeds: tuple[int, ...] = parse_seeds(SEEDS, FIRST_SEEDS["lr_seeds"])  # of the runs that choose the learning rate
    checks: tuple[str, ...] = ()  # labels of what tells about the baseline: it with another recipe or more tokens
    use: tuple[str, ...] = ()  # Python files that register streams and mixers of your own
    rows: tuple[Row, ...] = ()  # data by data, size by size, contender by contender; empty until they are counted
    about: dict[str, Any] = field(default_factory=dict)  # see `ABOUT`

    def validate(self) -> None:
        """Rules between fields."""
        for name, kind in ABOUT.items():
            if name in self.about:
                check_type(name, self.about[name], kind)
        check_contenders(self.contenders)
        for label in (self.baseline, *self.checks):
            if label not in self.labels:
                raise ValueError(
                    f"there is no contender {label!r} to be the baseline{did_you_mean(label, self.labels)}; "
                    f"the contenders are {', '.join(self.labels)}"
                )
        if (*self.grown, len(self.seeds)) != tuple(sorted({*self.grown, len(self.seeds)})):
            raise ValueError(f"grown must be numbers of seeds that rise to below {len(self.seeds)}, got {self.grown}")
        for name, values in (("seeds", self.seeds), ("lr_seeds", self.lr_seeds), ("lr", self.lrs), ("data", self.data)):
            if not values:
                raise ValueError(f"{name} is empty")
            if len(set(values)) < len(values):
                raise ValueError(f"{name} names something twice: {', '.join(map(str, values))}")
        if min(*self.seeds, *self.lr_seeds) < 0:
            raise ValueError(f"seeds must not be negative, got {min(*self.seeds, *self.lr_seeds)}")
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
        data = [data_label(sources) for sources in self.data]
        for what, labels in (("size", [size.label for size in self.sizes]), ("data set", data)):
            if len({folder_name(label) for label in labels}) < len(labels):
                raise ValueError(f"two {what}s have the name {max(labels, key=labels.count)!r}")
        if self.flops is not None and self.match != "flops":
            raise ValueError(f"--flops is a budget for --match flops, and this comparison matches {self.match}")
        if self.flops is not None and (self.base.steps is not None or self.base.tokens is not None):
            raise ValueError("--flops and --steps or --tokens are two budgets; give one of them")
        places = {(d, s.label, c.key) for d in data for s in self.sizes for c in self.contenders}
        for row in self.rows:
            if (row.data, row.size, row.contender) not in places:
                raise ValueError(f"a row of {row.contender}, {row.data}, {row.size} belongs to nothing that is planned")

    @staticmethod
    def new(options: Mapping[str, Any]) -> Plan:
        """The plan of a new comparison, every default filled in; `twoaxis.comparison.options` has the options."""
        said = parse(options)
        kept = {} if said["base"].get("source") is None else {"save_model": False}  # each would be the whole source
        base, plain = TrainConfig.from_dict(kept | said.pop("base"), "a comparison"), make_contender()
        contenders = said.pop("contenders", ())
        same = [contender.label for contender in contenders if contender.key == plain.key]
        baseline = said.get("baseline") or (same[0] if same else plain.label)
        if not same and baseline == plain.label:
            contenders = (plain, *contenders)
        seeds = tuple(range(MOST_SEEDS if said.get("until") else SEEDS))
        defaults = {"data": (TrainConfig().data,), "seeds": seeds, "match": "tokens", "lrs": (TrainConfig().lr,)}
        alone = len(contenders) < 2 and "sizes" not in said
        sizes = _sizes(said.pop("sizes", None), base)
        fixed = {"base": base, "contenders": freeze_references(contenders), "baseline": baseline, "sizes": sizes}
        plan = Plan(**defaults | said | fixed)
        if alone:
            raise ValueError("there is only the baseline to run; name contenders with --stream or --mixer")
        return plan

    def grow(self, options: Mapping[str, Any]) -> Plan:
        """The plan with what options add to it; more rows come when they are counted.

        Raises:
            ValueError: they contradict the plan; the message has what differs.
        """
        said = parse(options)
        base, was = said["base"], self.base.to_dict()
        now = TrainConfig.from_dict(merge(was, base), "a comparison").to_dict()
        decides = [name for name in base if name not in RUNNING]
        changed = [f"{name}: {was[name]!r} -> {now[name]!r}" for name in decides if was[name] != now[name]]
        fixed = {name: getattr(self, name) for name in ("match", "flops", "baseline", "until")}
        changed += [f"{n}: {old!r} -> {said[n]!r}" for n, old in fixed.items() if n in said and said[n] != old]
        rates, rate_seeds = said.get("lrs", ()), said.get("lr_seeds", self.lr_seeds)
        if rates and not set(self.lrs) <= set(rates):
            changed.append(f"lr: {_listed(self.lrs)} -> {_listed(rates)}, which must hold the ones before")
        if set(rate_seeds) != set(self.lr_seeds) and len(self.lrs) > 1:
            changed.append(f"lr_seeds: {_listed(self.lr_seeds)} -> {_listed(rate_seeds)}")
        known = {size.label: size for size in self.sizes}
        sizes = _sizes(said["sizes"], self.base) if "sizes" in said else ()
        others = [size for size in sizes if known.get(size.label, size) != size]
        changed += [f"size {size.label}: {known[size.label]} -> {size}" for size in others]
        seeds = _more(self.seeds, said.get("seeds", ()))
        if self.until and seeds != self.seeds:
            changed.append(f"seeds: {len(self.seeds)} -> {len(seeds)}, of which --until has planned the use")
        if changed:
            raise ValueError(
                f"the folder holds a comparison with other settings ({'; '.join(changed)}); leave these options out to "
                "go on with it, or choose another folder"
            )
        return dataclasses.replace(
            self.with_contenders(said.get("contenders", ())),
            base=dataclasses.replace(self.base, **{name: now[name] for name in base if name in RUNNING}),
            data=_more(self.data, said.get("data", ())),
            sizes=(*self.sizes, *[size for size in sizes if size.label not in known]),
            seeds=seeds,
            grown=self.grown if seeds == self.seeds else (*self.grown, len(self.seeds)),
            margin=said.get("margin", self.margin),
            lrs=_more(self.lrs, rates),
            lr_seeds=self.lr_seeds if len(self.lrs) > 1 else tuple(rate_seeds),
            use=_more(self.use, said.get("use", ())),
        )

    def with_contenders(self, more: Sequence[Contender], *, checks: bool = False) -> Plan:
        """The plan with further contenders, or checks of the baseline; the same under another label is refused."""
        known = {(contender.key, contender.label) for contender in self.contenders}
        frozen = freeze_references((*self.contenders, *more))[len(self.contenders) :]
        new = [contender for contender in frozen if (contender.key, contender.label) not in known]
        labels = [contender.label for contender in new] if checks else []
        return dataclasses.replace(self, contenders=(*self.contenders, *new), checks=(*self.checks, *labels))

    def options(self) -> dict[str, Any]:
        """The options that ask for the same comparison in another folder."""
        base, sizes = self.base.to_dict(), ",".join(size.label for size in self.sizes)
        alone = self.sizes == parse_sizes(None, self.base)
        said = {name: base[name] for name in FIELDS} | {"contenders": list(self.contenders), "lr": list(self.lrs)}
        said |= {name: getattr(self, name) for name in ("baseline", "match", "flops", "until", "margin")}
        said |= {name: list(getattr(self, name)) for name in ("data", "seeds", "lr_seeds", "use")}
        return said | ({} if alone or self.base.source else {"sizes": sizes})

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

    def row(self, data: str, size: str, contender: str) -> Row:
        """The row of a data set, a size (their labels) and a contender (its key)."""
        return next(r for r in self.rows if (r.data, r.size, r.contender) == (data, size, contender))

    def judged(self, data: str, size: str) -> list[Row]:
        """The rows of a table that get a verdict: all but the baseline and its checks."""
        keys = {c.key for c in self.contenders if c.label not in (self.baseline, *self.checks)}
        return [row for row in self.rows if (row.data, row.size) == (data, size) and row.contender in keys]

    @property
    def looks(self) -> tuple[Look, ...]:
        """When verdicts are given."""
        count = len(self.seeds)
        return planned_looks(count) if self.until else added_looks((*self.grown, count))

    def choosing_runs(self) -> list[Run]:
        """Runs that choose learning rates or have chosen them: seed by seed, row by row."""
        rows = [row for row in self.rows if row.lr is None or row.lr_losses]
        return self._runs(self.lr_seeds, [(row, rate) for row in rows for rate in self.lrs], True)

    def runs(self) -> list[Run]:
        """The compared runs of all rows whose learning rate is known: seed by seed, row by row."""
        rows = [(row, row.lr) for row in self.rows if row.lr is not None]
        return self._runs(self.seeds, rows, False)

    def _runs(self, seeds: Sequence[int], rows: Sequence[tuple[Row, float]], choosing: bool) -> list[Run]:
        labels = {contender.key: contender.label for contender in self.contenders}
        return [
            Run(row, labels[row.contender], rate, seed, choosing)
            for seed in seeds
            for row, rate in rows
            if seed == seeds[0] or not self.is_seedless(row)
        ]

    def is_seedless(self, row: Row) -> bool:
        """Whether a row is the same at every seed, so that the first stands for all: the source as it is."""
        return self.base.source is not None and not row.steps and self.contender(row.contender).label in self.checks

    def name_of(self, run: Run) -> str:
        """A run in messages: data and size only where there are several."""
        where = f", {run.row.data}, {run.row.size}" if len(self.data) * len(self.sizes) > 1 else ""
        rate = f", lr {run.lr!r}" if run.choosing else ""
        return f"{run.label}{where}{rate}, seed {run.seed}"

    def config(self, run: Run) -> TrainConfig:
        """The configuration of a run."""
        row = run.row
        contender = self.contender(row.contender)
        size = next(size for size in self.sizes if size.label == row.size)
        data = next(sources for sources in self.data if data_label(sources) == row.data)
        made = contender_config(self.base, contender, size, data, row.model)
        skip = made.judged_examples if run.choosing else 0
        made = dataclasses.replace(made, steps=row.steps, tokens=None, lr=run.lr, seed=run.seed, eval_skip=skip)
        return made if row.new_rate is None else dataclasses.replace(made, new_rate=row.new_rate)

    def save(self, folder: str | Path) -> None:
        """Write compare.json."""
        write_json(Path(folder) / PLAN, self.to_dict())

    @staticmethod
    def load(folder: str | Path) -> Plan | None:
        """The plan of a folder, or None where there is none; a damaged one is an error that names file and field."""
        path = Path(folder) / PLAN
        if not path.exists() and (Path(folder) / "probe.json").exists():
            raise ValueError(
                f"{folder} holds a probe of an earlier version, in which norms did not learn beside a method; "
                "choose another folder"
            )
        return Plan.from_dict(read_json(path), str(path)) if path.exists() else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON; the inverse is `from_dict`. Keys of contenders and folders of rows stand there for people."""
        contenders = [contender.to_dict() | {"key": contender.key} for contender in self.contenders]
        rows = [row.to_dict() | {"folder": row.folder.as_posix()} for row in self.rows]
        return {"format": FORMAT} | super().to_dict() | {"contenders": contenders, "rows": rows}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], what: str = PLAN) -> Plan:
        """The inverse of `to_dict`; keys that nobody knows are passed over, and `what` names the file in messages."""
        found = values.get("format") if isinstance(values, Mapping) else None
        if found != FORMAT:
            raise ValueError(f"{what} has format {found!r}; this version of twoaxis reads format {FORMAT}")
        return from_record(cls, values, what, "Put back what stood there")


def contender_config(
    base: TrainConfig, contender: Contender, size: Size, data: Sequence[str], resolved: dict[str, Any]
) -> TrainConfig:
    """The base with what a contender, a size, a data set and what `wider` or `deeper` is resolved to change; the budget
    is still the base's."""
    plain = without_matching(contender)
    return dataclasses.replace(
        base,
        preset=size.preset,
        stream=spell(plain.stream, plain.stream_options),
        mixer=None if plain.mixer is None else spell(plain.mixer, plain.mixer_options),
        model=base.model | size.model | plain.model | resolved,
        data=tuple(data),
        **{name: value for name, value in plain.train.items() if name != BUDGET},
    )


def _sizes(spelled: str | None, base: TrainConfig) -> tuple[Size, ...]:
    """The shapes that are asked for; of a source there is one, its own."""
    if base.source is None:
        return parse_sizes(spelled, base)
    if spelled is not None:
        raise ValueError(f"--sizes are shapes of models from scratch, and {base.source} has its own; leave it out")
    return (Size(label=Path(base.source).name or base.source, preset=base.preset),)


def data_label(sources: Sequence[str]) -> str:
    """What tables call a data set."""
    return " ".join(sources)


def folder_name(label: str) -> str:
    """A label as the name of a folder, different for different labels."""
    plain = re.sub(r"[^A-Za-z0-9._=-]+", "-", label).strip("-.")[:48]
    return plain if plain and plain == label else f"{plain}-{short_hash(label)[:6]}"


def _more(old: Sequence[Any], new: Iterable[Any]) -> tuple[Any, ...]:
    """The old ones, then what is new."""
    return (*old, *[item for item in dict.fromkeys(new) if item not in old])


def _listed(values: Sequence[Any]) -> str:
    return ",".join(map(str, values))
