"""What has been published about the methods, as records with their sources, and how much of it to trust.

`evidence.json` is the only place of published numbers. Another file of the same form takes its place with
`--evidence FILE`; its `figures` and `advice` may be left out.

    law        how the plain model's loss falls with compute
    records    results: a method, what was measured, at which scale, with how many seeds, by whom
    figures    counts and speeds that the cost model gives as well, see `published`
    advice     which method somebody advises for a goal

Losses, perplexities and speed-ups of different papers meet on one scale, the **compute at equal loss**: how many times
the plain model's compute buys the same loss, by the law in the file.

    loss              ln(baseline / value) / exponent                the logarithm of that factor
    perplexity        the same of its logarithm, which is a loss
    loss difference   the same with the law's typical loss as the baseline
    speed-up          its own logarithm
    all of them       at most a factor of two either way: beyond, the law is stretched too far
    anything else     shown, not counted: accuracies, wall-clock times, throughput, memory

A method's trusted speed-up is a mean over sources that leans to "no effect":

    trusted = sum over sources of (weight x gain) / (sum of the weights + 1/2)
    weight  = seeds x scale x setting
              seeds    1 for three or more, else 1/2
              scale    1 / (1 + decades between the record's parameters and yours); unknown counts as two decades
              setting  1 if the record is from scratch or a retrofit as yours is, else 1/4

The 1/2 is one more study, of your scale and with one seed, that found nothing. A source's gain is the mean of its
records, weighted likewise, and its weight is that of its best one. A failed replication is a source whose gain is what
it measured, zero where it gives no number.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from twoaxis.base.files import read_json, user_path
from twoaxis.base.options import Count, Options, Positive
from twoaxis.base.registry import parse
from twoaxis.depth.registry import STREAMS
from twoaxis.sequence.registry import MIXERS
from twoaxis.show.numbers import si

DATA = Path(__file__).parent / "evidence.json"

Counted = Literal["loss", "bits per byte", "perplexity", "loss difference", "speed-up"]
Shown = Literal["perplexity difference", "wall-clock speed-up", "accuracy", "throughput", "memory", "overhead", "other"]
Metric = Literal[Counted, Shown]
Kind = Literal["own", "third party", "failed replication", "this library", "none"]
Setting = Literal["scratch", "retrofit"]

HIGHER = ("speed-up", "wall-clock speed-up", "accuracy", "throughput")
"""Metrics of which more is better; of all others less is."""
MOST = math.log(2.0)
"""Of a record's logarithm. Tiny models on simple text reach losses that no compute at your scale would."""
UNKNOWN = 2.0
"""Decades between your model and a record whose parameters are not known."""
SEEDS = 3
"""Seeds that make a record count in full."""
NOTHING = 0.5
"""Weight of the study that found nothing, which every method has."""
OTHER_SETTING = 0.25
"""What a record from scratch says about a retrofit, and the other way round."""


@dataclass(frozen=True, kw_only=True)
class Law(Options):
    """How the plain model's loss falls with compute: loss = A C^-exponent."""

    exponent: Positive  # of the compute
    typical_loss: Positive  # the baseline of records that give a difference alone
    source: str  # of both


@dataclass(frozen=True, kw_only=True)
class Record(Options):
    """One published number, or the statement that there is none."""

    method: str
    """As NAME[:k=v,...]."""
    form: str = ""
    """Which form of the method it speaks for, such as block or full; advice matches it."""
    kind: Kind
    """By whom: the method's own authors, a third party, a replication that failed, or measured with this library; none
    says that nothing was found."""
    source: str
    """Paper, repository or thread. Records of one source count as one study."""
    where: str = ""
    """Table, figure or section."""
    metric: Metric | None = None
    """What sort of number."""
    measure: str = ""
    """What exactly."""
    baseline: float | int | None = None
    """Of the plain residual."""
    value: float | int | None = None
    """Of the method."""
    difference: float | int | None = None
    """Value less baseline, where only that is published."""
    parameters: Count | None = None
    """Of the model, the active ones of a mixture of experts; None is not said."""
    tokens: Count | None = None
    """Of the training; None is not said."""
    architecture: str = ""
    """Of the model, and the data."""
    seeds: Count | None = None
    """Runs behind the number; None is not said."""
    matched: str | None = None
    """What was the same for both."""
    setting: Setting = "scratch"
    """Trained from scratch, or put onto a trained model."""
    counted: bool = True
    """False where the number is not about this method in a comparable run; the note says why."""
    note: str = ""
    """What one must know to read it."""

    def validate(self) -> None:
        """Rules between fields."""
        if self.kind == "none":
            return
        if self.metric is None:
            raise ValueError("a record needs a metric, or the kind none")
        if (self.baseline is None) != (self.value is None):
            raise ValueError("baseline and value belong together")
        if self.value is not None and self.difference is not None:
            raise ValueError("give baseline and value, or the difference alone")
        positive = self.metric in ("loss", "bits per byte", "speed-up", "wall-clock speed-up", "throughput", "memory")
        if self.value is not None and self.baseline is not None:
            least = 1 if self.metric == "perplexity" else 0
            if (positive or least) and min(self.value, self.baseline) <= least:
                raise ValueError(f"a {self.metric} is more than {least}, got {self.baseline} and {self.value}")
        elif self.difference is None and self.kind != "failed replication" and self.counted:
            raise ValueError("a record without a number must say counted: false, or be a failed replication")

    @property
    def name(self) -> str:
        """Of the method, without options."""
        return parse(self.method)[0]

    @property
    def gain(self) -> float | None:
        """How much better, in the metric's own unit; negative is worse, None where no number is published."""
        more = self.difference if self.value is None or self.baseline is None else self.value - self.baseline
        return more if more is None or self.metric in HIGHER else -more

    def log_speed_up(self, law: Law) -> float | None:
        """The logarithm of the compute at equal loss; None where the record does not count."""
        found = self._log_speed_up(law) if self.counted and self.kind != "none" else None
        return None if found is None else max(-MOST, min(MOST, found))

    def _log_speed_up(self, law: Law) -> float | None:
        if self.metric == "loss difference" and self.difference is not None:
            return math.log(law.typical_loss / (law.typical_loss + self.difference)) / law.exponent
        if self.value is None or self.baseline is None:
            return 0.0 if self.kind == "failed replication" else None
        if self.metric in ("loss", "bits per byte"):
            return math.log(self.baseline / self.value) / law.exponent
        if self.metric == "perplexity":
            return math.log(math.log(self.baseline) / math.log(self.value)) / law.exponent
        return math.log(self.value / self.baseline) if self.metric == "speed-up" else None

    def weight(self, parameters: int, setting: Setting) -> float:
        """How much it says about a model of that many parameters."""
        seeds = 1.0 if (self.seeds or 0) >= SEEDS else 0.5
        decades = UNKNOWN if self.parameters is None else abs(math.log10(self.parameters / parameters))
        return seeds / (1 + decades) * (1.0 if setting == self.setting else OTHER_SETTING)

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with the gain."""
        return dataclasses.asdict(self) | {"gain": self.gain}


def sentences(records: Iterable[Record]) -> tuple[str, ...]:
    """Records in words, those that differ in what was measured alone in one sentence."""
    alike: dict[Record, list[Record]] = {}
    for record in records:
        setting = replace(record, metric="other", measure="", baseline=None, value=None, difference=None, counted=False)
        alike.setdefault(setting, []).append(record)
    told = ((setting.method.partition(":")[2], sentence(*group)) for setting, group in alike.items())
    return tuple(f"`{options}`: {text}" if options else text for options, text in told)


def sentence(*records: Record) -> str:
    """What was measured in one setting, in words."""
    first = records[0]
    if first.kind == "none":
        return f"No published result: {first.note}"
    counts = ((first.parameters, "parameters"), (first.tokens, "tokens"))
    scale = [f"{si(count, '')} {what}".replace("G ", "B ").replace("  ", " ") for count, what in counts if count]
    seeds = "seeds not said" if first.seeds is None else f"{first.seeds} seed{'s' if first.seeds > 1 else ''}"
    by = {"own": "its authors", "this library": "measured with this library"}.get(first.kind, first.kind)
    note = f" ({first.note.rstrip('.')})" if first.note else ""
    where = f", {first.where}" if first.where else ""
    at = ", ".join([*scale, first.architecture] if first.architecture else scale)
    return f"{', '.join(map(_number, records))}; {at}; {seeds}; {by}, {first.source}{where}{note}"


def _number(record: Record) -> str:
    measure = record.measure or str(record.metric)
    if record.value is not None:
        return f"{measure} {record.baseline:g} to {record.value:g}"
    return measure if record.difference is None else f"{measure} {record.difference:+g}"


@dataclass(frozen=True, kw_only=True)
class Figure(Options):
    """A published number that the cost model gives as well."""

    method: str
    """As NAME[:k=v,...]."""
    source: str
    """The paper and the place in it."""
    what: str
    """What is counted or measured, in words."""
    metric: str
    """What of the costs it is: a name of `published.METRICS`."""
    shape: str | dict[str, Any]
    """The model: a name, or fields of a configuration."""
    deployment: dict[str, Any] = field(default_factory=dict)
    """What differs from one device, and from a context of 4096."""
    value: float | int
    """As published."""
    upper: float | int | None = None
    """The upper end where a range is published."""
    why: str
    """Why ours differs, or `equal`."""


class Study(NamedTuple):
    """The records of one source that count."""

    source: str  # of them
    kind: Kind  # own, third party or failed replication
    gain: float  # logarithm of the compute at equal loss
    weight: float  # in the mean


class Trust(NamedTuple):
    """What the records of a method come to."""

    log_speed_up: float  # trusted
    studies: tuple[Study, ...]  # behind it, the weightiest first

    @property
    def speed_up(self) -> float:
        """Compute of the plain model that buys the same loss."""
        return math.exp(self.log_speed_up)


@dataclass(frozen=True, kw_only=True)
class Advised(Options):
    """Somebody's advice."""

    goal: Literal["shortcut", "mixing", "retrieval"]  # what for
    method: str  # the name of it
    source: str  # who says so


class Evidence(NamedTuple):
    """A file of records."""

    law: Law  # of loss and compute
    records: tuple[Record, ...]  # in the file's order
    figures: tuple[Figure, ...] = ()  # published beside what the cost model gives
    advice: tuple[Advised, ...] = ()  # what papers advise

    def of(self, name: str, form: str | None = None) -> tuple[Record, ...]:
        """The records of a method, of one form if one is given; the statement that there is none fits every form."""
        return tuple(r for r in self.records if r.name == name and (form is None or r.form == form or r.kind == "none"))

    def trust(self, records: Iterable[Record], parameters: int, setting: Setting) -> Trust:
        """What some records say about a model of `parameters`."""
        by_source: dict[str, list[tuple[float, float, Kind]]] = {}
        for record in records:
            gain = record.log_speed_up(self.law)
            if gain is not None:
                by_source.setdefault(record.source, []).append((gain, record.weight(parameters, setting), record.kind))
        studies = []
        for source, found in by_source.items():
            total = sum(weight for _, weight, _ in found)
            mean = sum(gain * weight for gain, weight, _ in found) / total
            studies.append(Study(source, found[0][2], mean, max(weight for _, weight, _ in found)))
        studies.sort(key=lambda study: -study.weight)
        whole = sum(study.weight for study in studies) + NOTHING
        return Trust(sum(study.gain * study.weight for study in studies) / whole, tuple(studies))


def read_evidence(path: str | Path | None = None) -> Evidence:
    """Read and check a file of records; None is the one that comes along, which is read once."""
    return _own() if path is None else _read(user_path(path))


@cache
def _own() -> Evidence:
    return _read(DATA)


def _read(path: Path) -> Evidence:
    if not path.is_file():
        raise ValueError(f"there is no evidence file {path}")
    found = read_json(path)
    if not isinstance(found, dict) or not {"law", "records"} <= set(found) <= set(Evidence._fields):
        raise ValueError(f"{path} is no evidence file: it needs law and records, and may have figures and advice")
    lists: dict[str, tuple[Any, ...]] = {}
    for name, kind in (("records", Record), ("figures", Figure), ("advice", Advised)):
        if not isinstance(entries := found.get(name, []), list):
            raise ValueError(f"{path}: {name} must be a list, got {entries!r:.60}")
        lists[name] = tuple(_entry(kind, f"{path}: {name}[{n}]", fields) for n, fields in enumerate(entries))
    return Evidence(_entry(Law, f"{path}: law", found["law"]), **lists)


def _entry(kind: type[Law | Record | Figure | Advised], what: str, fields: Any) -> Any:
    """The law, a record, a figure or a piece of advice, its method checked against the library."""
    if not isinstance(fields, dict):
        raise ValueError(f"{what} must be an object, got {fields!r:.60}")
    try:
        needed = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING]
        if missing := [name for name in needed if name not in fields]:
            raise ValueError(f"it has no {missing[0]}")
        made = kind.from_dict(fields, "it")
        if not isinstance(made, Law):
            name, options = parse(made.method)
            (MIXERS if name in MIXERS.names() else STREAMS).config(name, options)
    except ValueError as error:
        called = f" ({fields['method']})" if "method" in fields else ""
        raise ValueError(f"{what}{called}: {error}") from error
    return made
