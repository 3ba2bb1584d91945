"""Recorder of counts: parameters, FLOPs, bytes kept and alive of every variant, as exact numbers in one JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.freeze import arrays, names

TOKENS, BATCH = 24, 2


def plain_variants() -> dict[str, dict[str, Any]]:
    """Label and fields of every variant in the usual layout."""
    return {label: fields for label, fields in arrays.variants() if " " not in label}


def count(fields: dict[str, Any]) -> dict[str, Any]:
    """Everything that is counted of one configuration, in float32."""
    model = names.decoder(fields, 0)
    with torch.no_grad():
        kept = names.in_chunks(model, torch.zeros(BATCH, TOKENS, dtype=torch.long), (5, TOKENS - 5))[1]
        boundaries = names.boundaries(model, torch.zeros(1, 3, fields["width"]))
    step = names.find("peak_memory")(model, BATCH, TOKENS)._asdict()
    return names.counts(fields, TOKENS) | {"kept": kept, "boundaries": boundaries, "step": step}


def record(out: Path, source: Path | None) -> None:
    """Record the variants of this tree, or those of another recording."""
    out.mkdir(parents=True, exist_ok=True)
    if source is None:
        todo = plain_variants()
    else:
        todo = {label: entry["fields"] for label, entry in json.loads((source / "counts.json").read_text()).items()}
    made = {label: {"fields": fields} | count(fields) for label, fields in todo.items()}
    (out / "counts.json").write_text(json.dumps(made, indent=1))


if __name__ == "__main__":
    arrays.run(record, __doc__)
