"""Compares the tree of today with the recording: `python -m tests.freeze.compare [PART ...] [--case NAME ...]`.

Each recorder runs in the tree of today, with the weights of the recording where weights matter, and every item is
compared; see the table in this package's docstring for how near it must be. Prints what differs at all, how much, and
exits with 1 if something differs more than allowed. What an item is: one configuration (arrays, counts), one file of
one run (runs), one command (texts).
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.freeze import names
from tests.freeze.make import PARTS, ROOT, cache, run_recorder

BOUNDS = {"arrays": 1e-12, "runs": 0.0, "texts": 1e-9, "counts": 0.0}
FLOOR = 1e-3
"""A small gradient is the difference of large ones: its error is relative to at least this part of the largest."""
CLOCK = ("seconds", "tokens_per_second")
VERSIONS = ("twoaxis", "torch", "versions")
NOISE = {"verify.json": ("error",), "check.json": ("measured",), "eval.json": CLOCK, "fake-compare.json": ("warmup",)}
"""Keys of texts that say nothing: differences of equal things, times, a default that was changed on purpose."""


class Item(NamedTuple):
    """What was compared.

    Attributes:
        name: part/item.
        deviation: largest relative difference; infinite where the two cannot be compared.
        where: of the largest difference.
    """

    name: str
    deviation: float
    where: str = ""


def tensor_deviation(found: Tensor, wanted: Tensor, scale: float = 0.0) -> float:
    """Largest absolute difference over the largest value, or over `scale` where that is more."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return math.inf
    if torch.equal(found, wanted) or not wanted.numel():
        return 0.0
    a, b = found.double(), wanted.double()
    # NaN on either side, also beside an equal one, makes the difference infinite
    worst, largest = torch.nan_to_num((a - b).abs(), nan=math.inf).max().item(), max(b.abs().max().item(), scale)
    return worst / largest if largest else math.inf


def tensors_deviation(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> tuple[float, str]:
    """The largest deviation over tensors by name; `wanted` has today's names already."""
    if differing := sorted(found.keys() ^ wanted.keys()):
        return math.inf, f"{differing[0]} is on one side only"
    gradients = [tensor for name, tensor in wanted.items() if name.startswith("gradient/")]
    scale = FLOOR * max((tensor.abs().max().item() for tensor in gradients), default=0.0)
    pairs = [
        (tensor_deviation(found[name], tensor, scale if name.startswith("gradient/") else 0.0), name)
        for name, tensor in wanted.items()
    ]
    return max(pairs, default=(0.0, ""))


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the recording under today's names; `weights/`, `gradient/`, `/exp_avg` and the like stay."""
    made = {}
    for name, tensor in tensors.items():
        kind, slash, rest = name.partition("/")
        if slash and kind in ("weights", "gradient", "initial"):
            made[f"{kind}/{names.parameter(rest)}"] = tensor
        else:
            made[names.parameter(kind) + slash + rest] = tensor
    return made


def json_deviation(found: Any, wanted: Any, skip: tuple[str, ...], where: str = "") -> tuple[float, str]:
    """The largest relative difference of numbers in two JSON values; words and shapes must be equal."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        keys = [key for key in wanted if key not in skip]
        if differing := sorted(set(keys) ^ {key for key in found if key not in skip}):
            return math.inf, f"{where}.{differing[0]} is on one side only"
        return max((json_deviation(found[k], wanted[k], skip, f"{where}.{k}") for k in keys), default=(0.0, ""))
    if isinstance(wanted, list) and isinstance(found, list) and len(found) == len(wanted):
        pairs = enumerate(zip(found, wanted, strict=True))
        return max((json_deviation(a, b, skip, f"{where}[{n}]") for n, (a, b) in pairs), default=(0.0, ""))
    if found == wanted and isinstance(found, bool) == isinstance(wanted, bool):
        return 0.0, ""
    pair = [value for value in (found, wanted) if isinstance(value, int | float) and not isinstance(value, bool)]
    return (abs(pair[0] - pair[1]) / max(map(abs, pair)), where) if len(pair) == 2 else (math.inf, where)


def read_values(path: Path) -> Any:
    """JSON, lines of JSON, or the words of a text."""
    text = path.read_text()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    return json.loads(text) if path.suffix == ".json" and not text.startswith("exit ") else text.split()


def compare_arrays(here: Path, there: Path) -> Iterator[Item]:
    """An item per configuration."""
    ours, theirs = (json.loads((place / "index.json").read_text()) for place in (here, there))
    for label, entry in theirs.items():
        mine = ours[label]
        if "file" not in entry or "file" not in mine:
            both = "refused" in entry and "refused" in mine
            yield Item(f"arrays/{label}", 0.0 if both else math.inf, mine.get("refused", "not refused any more"))
            continue
        found, wanted = load_file(here / mine["file"]), renamed(load_file(there / entry["file"]))
        yield Item(f"arrays/{label}", *tensors_deviation(found, wanted))


def compare_runs(here: Path, there: Path) -> Iterator[Item]:
    """An item per file of each run that was made."""
    for run in sorted(path.parent.name for path in here.glob("*/result.json")):
        for kind in ("initial", "stopped", "final"):
            found = load_file(here / run / f"{kind}.safetensors")
            yield Item(
                f"runs/{run}/{kind}", *tensors_deviation(found, renamed(load_file(there / run / f"{kind}.safetensors")))
            )
        # the SHA-256 of weights has their names in it; the weights themselves are compared above
        for name in ("log.jsonl", "stopped.jsonl", "result.json", "summary.json"):
            found, wanted = (read_values(place / run / name) for place in (here, there))
            yield Item(f"runs/{run}/{name}", *json_deviation(found, wanted, (*CLOCK, "weights")))


def compare_texts(here: Path, there: Path) -> Iterator[Item]:
    """An item per text that was made."""
    for path in sorted(here.glob("*.*")):
        if path.suffix in (".json", ".txt", ".md"):
            skip = (*VERSIONS, *NOISE.get(path.name, ()))
            found, wanted = (read_values(place / path.name) for place in (here, there))
            yield Item(f"texts/{path.name}", *json_deviation(found, wanted, skip))


def compare_counts(here: Path, there: Path) -> Iterator[Item]:
    """An item per variant."""
    ours, theirs = (json.loads((place / "counts.json").read_text()) for place in (here, there))
    for label, wanted in theirs.items():
        yield Item(f"counts/{label}", *json_deviation(ours[label], wanted, ()))


COMPARE = {"arrays": compare_arrays, "runs": compare_runs, "texts": compare_texts, "counts": compare_counts}


def bound(item: Item) -> float:
    """How far an item may be off; infinite where it was given up."""
    if any(fnmatch.fnmatchcase(item.name, pattern) for pattern in names.GIVEN_UP):
        return math.inf
    loose = [value for pattern, value in names.LOOSER.items() if fnmatch.fnmatchcase(item.name, pattern)]
    return max([BOUNDS[item.name.partition("/")[0]], *loose])


def compare(part: str, place: Path, cases: list[str], *, every: bool = False) -> int:
    """Record a part of today's tree into `place`, print what differs, and return how many items differ too much."""
    there = cache() / part
    if not there.is_dir():
        raise ValueError(f"{there} is not there; make it with python -m tests.freeze.make --only {part}")
    words: list[str | Path] = [place / part]
    words += ["--case", *cases] if cases else []
    run_recorder(ROOT, part, *words, *(() if part == "runs" else ("--weights", there)), before=False)
    items = list(COMPARE[part](place / part, there))
    if not items:
        raise ValueError(f"nothing of {part} was recorded; there is no case {', '.join(cases)}")
    failed = [item for item in items if item.deviation > bound(item)]
    for item in items:
        if item.deviation or every:
            mark = "DIFFERS" if item in failed else "equal" if not item.deviation else "allowed"
            print(f"{mark:8s} {item.deviation:8.1e}  {item.name}  {item.where}")
    equal = sum(not item.deviation for item in items)
    worst = max(item.deviation for item in items)
    print(f"{part}: {equal} of {len(items)} equal, largest deviation {worst:.1e}, {len(failed)} beyond what is allowed")
    return len(failed)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.freeze.compare", description=__doc__)
    parser.add_argument("part", nargs="*", default=[], help=f"of {', '.join(PARTS)}; none named is all")
    parser.add_argument("--case", nargs="+", default=[], help="of runs and texts: only these")
    parser.add_argument("--all", action="store_true", help="print equal items too")
    parser.add_argument("--keep", type=Path, help="folder for the recording of today, which is not removed")
    given = parser.parse_args()
    if unknown := [part for part in given.part if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]}; it is one of {', '.join(PARTS)}")
    place = given.keep.resolve() if given.keep else Path(tempfile.mkdtemp())
    try:
        failed = sum(compare(part, place, given.case, every=given.all) for part in given.part or PARTS)
    finally:
        if given.keep is None:
            shutil.rmtree(place, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
