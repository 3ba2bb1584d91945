"""Hardware profiles: what a device can do, from data sheets or measured on this machine.

A profile of a data sheet has rates and an assumed efficiency. A profile that `twoaxis cost --calibrate` wrote has, in
`ops`, the measured time of every operation by its size; it describes one machine and one build of torch.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from twoaxis.base.registry import did_you_mean

DATA = Path(__file__).parent / "hardware.json"
NEEDED = ("title", "kind", "matmul", "bandwidth", "memory", "launch", "efficiency", "source")
"""Fields of every profile."""


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
        ops: measured times; empty for data sheets.
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
    ops: dict[str, Any]


@cache
def _sheet() -> dict[str, Any]:
    return json.loads(DATA.read_text())["profiles"]


def hardware_names() -> tuple[str, ...]:
    """The devices with a data sheet."""
    return tuple(_sheet())


def find_profile(given: str) -> Profile:
    """The profile of a name, or of a file that `--calibrate` wrote."""
    sheet = _sheet()
    if (name := given.lower()) in sheet:
        return _make(name, sheet[name])
    path = Path(given).expanduser()
    if path.is_file():
        return read_profile(path)
    if path.suffix == ".json":
        raise ValueError(f"there is no hardware profile {given}; make one with twoaxis cost --calibrate --out {given}")
    hint = did_you_mean(name, sheet)
    raise ValueError(
        f"unknown hardware {given!r}{hint}; give one of {', '.join(sheet)}, or a profile written by "
        "twoaxis cost --calibrate"
    )


def read_profile(path: Path) -> Profile:
    """A profile that `--calibrate` wrote."""
    try:
        fields = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not a JSON document: {error}") from error
    missing = [name for name in NEEDED if not isinstance(fields, dict) or name not in fields]
    if missing:
        raise ValueError(
            f"{path} is no hardware profile: it has no {missing[0]}; make one with twoaxis cost --calibrate"
        )
    return _make(path.stem, fields)


def _make(name: str, fields: dict[str, Any]) -> Profile:
    link = fields.get("nvlink") or fields.get("pcie") or fields["bandwidth"]
    taken = {key: fields[key] for key in NEEDED}
    return Profile(name=name, link=link, ops=fields.get("ops", {}), **taken)
