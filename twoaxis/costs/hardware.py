"""Hardware profiles: what a device can do, from data sheets, or measured call by call on a machine.

A profile of a data sheet has rates and an assumed efficiency. One that `twoaxis cost --hardware here --save FILE` wrote
has besides them the time that each call took there; it describes one machine and one build of torch.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from twoaxis.base.registry import did_you_mean

if TYPE_CHECKING:
    from twoaxis.costs.fuse import Kernel

DATA = Path(__file__).parent / "hardware.json"
RATES = ("bandwidth", "memory", "launch")
TABLES = {"matmul": ("bfloat16", "float16", "float32"), "efficiency": ("matmul", "bandwidth", "link")}
WORDS = ("title", "kind", "source")


class Clock:
    """Seconds of calls on a machine.

    Args:
        overhead: of each call in a model, beyond what it takes by itself.
        view: of a call that moves nothing, by itself.
        calls: of others, by their spelling.
    """

    def __init__(self, overhead: float, view: float, calls: dict[str, float]) -> None:
        self.overhead, self.view, self.calls = overhead, view, calls
        self.unknown: set[str] = set()

    def seconds(self, kernel: Kernel) -> float | None:
        """One call in a model; None where it is not known, and for kernels that only could be."""
        if kernel.op == "fused":
            return None
        taken = self.view if kernel.op == "view" else self.call(kernel) if kernel.number >= 0 else None
        if taken is None:
            self.unknown.add(kernel.op)
            return None
        return taken + self.overhead

    def call(self, kernel: Kernel) -> float | None:
        """One call by itself, as it was saved."""
        from twoaxis.base.meter import signature_of
        from twoaxis.costs.here import spelled

        return self.calls.get(spelled(signature_of(kernel.number)))


class Profile(NamedTuple):
    """A device.

    Attributes:
        name: what `--hardware` calls it.
        title: for people.
        kind: gpu or cpu.
        matmul: peak operations per second by dtype.
        bandwidth: of its memory, bytes per second.
        memory: bytes.
        link: to the next device, bytes per second in one direction.
        launch: seconds that a call costs before it does anything.
        efficiency: the share of matmul, bandwidth and link that kernels reach.
        source: where the numbers are from.
        clock: measured times; None for data sheets.
    """

    name: str
    title: str
    kind: str
    matmul: dict[str, float]
    bandwidth: float
    memory: float
    link: float
    launch: float
    efficiency: dict[str, float]
    source: str
    clock: Clock | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON, without measured calls."""
        return {name: value for name, value in self._asdict().items() if name != "clock" and value != float("inf")}


@cache
def _sheet() -> dict[str, Any]:
    return json.loads(DATA.read_text())["profiles"]


def hardware_names() -> tuple[str, ...]:
    """The devices with a data sheet."""
    return tuple(_sheet())


def find_profile(given: str) -> Profile:
    """The profile of a name, of a file, or of this machine."""
    sheet = _sheet()
    if (name := given.lower()) in sheet:
        return _make(name, given, sheet[name])
    if name == "here":
        return _here()
    path = Path(given).expanduser()
    if path.is_file():
        try:
            return _make(path.stem, str(path), json.loads(path.read_bytes()))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not a JSON document: {error}") from error
    if path.suffix == ".json":
        raise ValueError(
            f"there is no hardware profile {given}; make one with twoaxis cost --hardware here --save {given}"
        )
    hint = did_you_mean(name, [*sheet, "here"])
    raise ValueError(
        f"unknown hardware {given!r}{hint}; give one of {', '.join(sheet)}, here for this machine, or a file that "
        "--save wrote"
    )


@cache
def _here() -> Profile:
    from twoaxis.costs.here import measure

    return measure()


def save_profile(path: str | Path, profile: Profile) -> None:
    """Write a measured machine for `--hardware` elsewhere."""
    from twoaxis.base.files import write_json

    clock = profile.clock
    if clock is None:
        raise ValueError(f"--save keeps times of this machine: give --hardware here, got {profile.name!r}")
    measured = {"overhead": clock.overhead, "view": clock.view, "calls": clock.calls}
    write_json(path, {**profile.to_dict(), "clock": measured})


def _make(name: str, where: str, fields: Any) -> Profile:
    """A profile from plain values, every one of them checked."""
    if not isinstance(fields, dict):
        raise ValueError(f"{where} is no hardware profile: it must be an object, got {fields!r:.60}")
    for key in (*WORDS, *RATES, *TABLES):
        if key not in fields:
            raise ValueError(f"{where} is no hardware profile: it has no {key}; copy an entry of {DATA}")
    for key in WORDS:
        if not isinstance(fields[key], str):
            raise ValueError(f"{where}: {key} must be text, got {fields[key]!r}")
    if fields["kind"] not in ("gpu", "cpu"):
        raise ValueError(f"{where}: kind must be gpu or cpu, got {fields['kind']!r}")
    for key, inside in TABLES.items():
        if not isinstance(fields[key], dict) or {*inside} - {*fields[key]}:
            raise ValueError(f"{where}: {key} must have {', '.join(inside)}, got {fields[key]!r:.80}")
        for part in inside:
            _positive(where, f"{key}.{part}", fields[key][part])
    link = fields.get("nvlink") or fields.get("pcie") or fields.get("link") or fields["bandwidth"]
    for key, value in (*((key, fields[key]) for key in RATES), ("the link to the next device", link)):
        _positive(where, key, value, least=0.0 if key == "launch" else 1.0)
    taken = {key: fields[key] for key in (*WORDS, *RATES, *TABLES)}
    return Profile(name=name, link=link, clock=_clock(where, fields.get("clock")), **taken)


def _clock(where: str, fields: Any) -> Clock | None:
    if fields is None:
        return None
    wanted = ("overhead", "view", "calls")
    if not isinstance(fields, dict) or {*wanted} - {*fields} or not isinstance(fields["calls"], dict):
        raise ValueError(f"{where}: clock must have {', '.join(wanted)}; write the file again with --save")
    for key, value in {"overhead": fields["overhead"], "view": fields["view"], **fields["calls"]}.items():
        _positive(where, f"clock: {key}", value, least=0.0)
    return Clock(**{key: fields[key] for key in wanted})


def _positive(where: str, key: str, value: Any, least: float = 1e-9) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < float("inf"):
        raise ValueError(f"{where}: {key} must be a number of at least {least:g}, got {value!r}")
