"""The part of the recording that is in git: a few numbers per run and variant, not the arrays.

Losses have 9 significant digits and are compared at 1e-6: the last bits of float32 depend on the processor. Of arrays
in float64 there are five numbers with 10 digits, compared at 1e-8: the loss, the norms of the logits and of all
gradients, and a weighted sum of each.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

PATH = Path(__file__).with_name("small.json")
BOUNDS = {"runs": 1e-6, "arrays": 1e-8, "counts": 0.0}


def read() -> dict[str, Any]:
    """The file in git."""
    return json.loads(PATH.read_text())


def write(document: dict[str, Any]) -> None:
    """Write it with a line for each item."""
    parts = [f'"commit": {json.dumps(document["commit"])}']
    for part in BOUNDS:
        lines = (f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in document[part].items())
        parts.append(f'"{part}": {{\n' + ",\n".join(lines) + "\n}")
    PATH.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def summary(place: Path, commit: str) -> dict[str, Any]:
    """The same from a recording; parts that are not recorded are empty."""
    index = place / "arrays" / "index.json"
    arrays = json.loads(index.read_text()) if index.exists() else {}
    counts = place / "counts" / "counts.json"
    folders = sorted(path.parent for path in (place / "runs").glob("*/result.json"))
    return {
        "commit": commit,
        "runs": {folder.name: of_run(folder) for folder in folders},
        "arrays": {
            label: of_arrays(load_file(place / "arrays" / entry["file"]))
            for label, entry in arrays.items()
            if "file" in entry
        },
        "counts": json.loads(counts.read_text()) if counts.exists() else {},
    }


def digits(number: float, count: int) -> float:
    """Rounded to so many significant digits."""
    return float(f"{number:.{count}g}")


def of_run(folder: Path) -> dict[str, Any]:
    """Losses of a run at every tenth step, held-out losses, and the SHA-256 of its weights (of one machine only)."""
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    losses = [digits(r["loss"], 9) for r in log if "loss" in r and (r["step"] == 1 or r["step"] % 10 == 0)]
    held_out = [digits(r["held_out_loss"], 9) for r in log if "held_out_loss" in r]
    result = json.loads((folder / "result.json").read_text())
    return {"losses": losses, "held_out": held_out, "weights": result["weights"]}


def of_arrays(tensors: dict[str, Tensor]) -> list[float]:
    """Five numbers; sums do not depend on the names or the order of parameters."""
    gradients = [tensor for name, tensor in tensors.items() if name.startswith("gradient/")]

    def weighted(tensor: Tensor) -> float:
        flat = tensor.flatten()
        return float(flat @ torch.arange(len(flat), dtype=flat.dtype).cos())

    squares = sum(float(g.square().sum()) for g in gradients)
    made = (
        float(tensors["loss"]),
        float(tensors["logits"].norm()),
        weighted(tensors["logits"]),
        squares**0.5,
        sum(weighted(g) for g in gradients),
    )
    return [digits(number, 10) for number in made]


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Lines about items that differ, of the parts that `found` has."""
    lines = []
    for part, bound in BOUNDS.items():
        if found[part]:
            names = sorted(found[part].keys() ^ wanted[part].keys())
            lines += [f"{part}/{name} is on one side only" for name in names]
            for name in found[part].keys() & wanted[part].keys():
                if not near(found[part][name], wanted[part][name], bound):
                    lines.append(f"{part}/{name}: {found[part][name]} here, {wanted[part][name]} in small.json")
    return lines


def near(found: Any, wanted: Any, bound: float) -> bool:
    """Whether two JSON values agree, numbers within a relative bound; SHA-256 of weights are passed over."""
    if isinstance(wanted, dict):
        keys = wanted.keys() - {"weights"}
        return isinstance(found, dict) and all(k in found and near(found[k], wanted[k], bound) for k in keys)
    if isinstance(wanted, list):
        same = isinstance(found, list) and len(found) == len(wanted)
        return same and all(near(a, b, bound) for a, b in zip(found, wanted, strict=True))
    if isinstance(wanted, float):
        return abs(found - wanted) <= bound * abs(wanted)
    return found == wanted
