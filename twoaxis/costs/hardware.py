"""Hardware profiles: what a device can do, from data sheets, or measured call by call on a machine.

A profile of a data sheet has rates and an assumed efficiency. One that `twoaxis cost --hardware here --save FILE` wrote
has besides them the time that each call took there; it describes one machine and one build of torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from twoaxis.base.files import read_json, user_path, write_json
from twoaxis.base.options import NotNegative, Positive, at_least, check_type
from twoaxis.base.registry import did_you_mean

if TYPE_CHECKING:
    from twoaxis.costs.fuse import Kernel

DATA = Path(__file__).parent / "hardware.json"
Rate = Annotated[float, at_least(1)]
CHECKED: dict[str, Any] = {
    "title": str,
    "kind": Literal["gpu", "cpu"],
    "source": str,
    "bandwidth": Rate,
    "memory": Rate,
    "launch": NotNegative,
    "link": Rate,
    **{f"matmul.{dtype}": Positive for dtype in ("bfloat16", "float16", "float32")},
    **{f"efficiency.{part}": Positive for part in ("matmul", "bandwidth", "link")},
}
"""What a profile must have."""
TIMED: dict[str, Any] = {"clock.overhead": NotNegative, "clock.view": NotNegative, "clock.calls": dict[str, float]}
"""What one of a measured machine has besides."""


class Clock:
    """Seconds of calls on a machine."""

    SAVED = ("overhead", "view", "calls")

    def __init__(self, overhead: float, view: float, calls: dict[str, float]) -> None:
        self.overhead = overhead  # of each call in a model, beyond what it takes by itself
        self.view, self.calls = view, calls  # of a call that moves nothing by itself, and of others by their spelling
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
        from twoaxis.costs.this_machine import spelled

        return self.calls.get(spelled(signature_of(kernel.number)))


class Profile(NamedTuple):
    """A device."""

    name: str  # what `--hardware` calls it
    title: str  # for people
    kind: str  # gpu or cpu
    matmul: dict[str, float]  # peak operations per second by dtype
    bandwidth: float  # of its memory, bytes per second
    memory: float  # bytes
    link: float  # to the next device, bytes per second in one direction
    launch: float  # seconds that a call costs before it does anything
    efficiency: dict[str, float]  # the share of matmul, bandwidth and link that kernels reach
    source: str  # where the numbers are from
    clock: Clock | None = None  # measured times; None for data sheets

    def to_dict(self) -> dict[str, Any]:
        """For JSON, without measured calls."""
        return {name: value for name, value in self._asdict().items() if name != "clock" and value != float("inf")}


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
    write_json(path, {**profile.to_dict(), "clock": {key: getattr(clock, key) for key in Clock.SAVED}})


def _make(name: str, where: str, fields: Any) -> Profile:
    """A profile from plain values, every one of them checked."""
    if not isinstance(fields, dict):
        raise ValueError(f"{where} is no hardware profile: it must be an object, got {fields!r:.60}")
    clock = fields.get("clock")
    links = (fields.get(key) for key in ("nvlink", "pcie", "link", "bandwidth"))
    fields = fields | {"link": next(filter(None, links), None)}
    for place, kind in (CHECKED | ({} if clock is None else TIMED)).items():
        value = fields
        for key in place.split("."):
            if not isinstance(value, dict) or key not in value:
                raise ValueError(
                    f"{where} is no hardware profile: it has no {place}; copy an entry of {DATA}, or write it by "
                    "twoaxis cost --hardware here --save"
                )
            value = value[key]
        try:
            check_type(place, value, kind)
            if place == "clock.calls":
                check_type("a time of clock.calls", list(value.values()), tuple[NotNegative, ...])
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    taken = {key: fields[key] for key in dict.fromkeys(place.partition(".")[0] for place in CHECKED)}
    return Profile(name, **taken, clock=None if clock is None else Clock(**{key: clock[key] for key in Clock.SAVED}))
