"""Hardware profiles: what a device can do, from data sheets, or measured call by call on a machine.

A profile of a data sheet has rates and an assumed efficiency. One that `twoaxis cost --hardware here --save FILE` wrote
has besides them the time that each call took there; it describes one machine and one build of torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from twoaxis.base.files import read_json, user_path, write_json
from twoaxis.base.options import NotNegative, Options, Positive, at_least, check_type, from_record
from twoaxis.base.registry import did_you_mean

if TYPE_CHECKING:
    from twoaxis.costs.fuse import Kernel

DATA = Path(__file__).parent / "hardware.json"
REMEDY = f"Copy an entry of {DATA}, or write one by twoaxis cost --hardware here --save FILE."
Rate = Annotated[float, at_least(1)]


@dataclass(eq=False)
class Clock(Options):
    """Seconds of calls on a machine."""

    overhead: NotNegative  # of each call in a model, beyond what it takes by itself
    view: NotNegative  # of a call that moves nothing by itself
    calls: dict[str, float]  # of others by themselves, by their spelling
    unknown: set[str] = field(default_factory=set)  # operators that were asked for and are not there

    def validate(self) -> None:
        """Refuse times below zero."""
        check_type("a time", list(self.calls.values()), tuple[NotNegative, ...])

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
        from twoaxis.costs.this_machine import spelled

        return self.calls.get(spelled(signature_of(kernel.number)))


@dataclass(frozen=True)
class Rates(Options):
    """Peak operations per second of matrix products."""

    bfloat16: Positive
    float16: Positive
    float32: Positive


@dataclass(frozen=True)
class Efficiency(Options):
    """The share of each peak that kernels reach."""

    matmul: Positive
    bandwidth: Positive
    link: Positive


@dataclass(frozen=True, kw_only=True)
class Profile(Options):
    """A device."""

    name: str  # what `--hardware` calls it
    title: str  # for people
    kind: Literal["gpu", "cpu"]
    matmul: Rates
    bandwidth: Rate  # of its memory, bytes per second
    memory: Rate  # bytes
    link: Rate | None  # to the next device, bytes per second in one direction; None takes no time
    launch: NotNegative  # seconds that a call costs before it does anything
    efficiency: Efficiency
    source: str  # where the numbers are from
    clock: Clock | None = None  # measured times; None for data sheets

    def to_dict(self) -> dict[str, Any]:
        """For JSON, without measured calls."""
        return {name: value for name, value in asdict(replace(self, clock=None)).items() if value is not None}


def find_profile(given: str) -> Profile:
    """The profile of a name, of a file, or of this machine."""
    sheet = read_json(DATA)["profiles"]
    if (name := given.lower()) in sheet:
        return _make(name, given, sheet[name])
    if name == "here":
        from twoaxis.costs.this_machine import measure

        return measure()
    path = user_path(given)
    if path.is_file():
        return _make(path.stem, str(path), read_json(path))
    if path.suffix == ".json":
        raise ValueError(
            f"there is no hardware profile {given}; make one with twoaxis cost --hardware here --save {given}"
        )
    hint = did_you_mean(name, [*sheet, "here"])
    raise ValueError(
        f"unknown hardware {given!r}{hint}; give one of {', '.join(sheet)}, here for this machine, or a file that "
        "--save wrote"
    )


def save_profile(path: str | Path, profile: Profile) -> None:
    """Write a measured machine for `--hardware` elsewhere."""
    clock = profile.clock
    if clock is None:
        raise ValueError(f"--save keeps times of this machine: give --hardware here, got {profile.name!r}")
    saved = {name: value for name, value in vars(clock).items() if name in ("overhead", "view", "calls")}
    write_json(path, profile.to_dict() | {"clock": saved})


def _make(name: str, where: str, fields: Any) -> Profile:
    """A profile from plain values, every one of them checked."""
    if isinstance(fields, dict):
        links = (fields.get(key) for key in ("nvlink", "pcie", "link", "bandwidth"))
        fields = fields | {"name": name, "link": next(filter(None, links), None)}
    return from_record(Profile, fields, f"hardware profile {where}", REMEDY)
