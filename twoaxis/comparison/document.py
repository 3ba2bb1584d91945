"""A summary as one JSON document: report/table.json and `--json`.

It has what the report shows and what that is computed from, the losses and curves of every seed, so that every table
can be made anew without the runs.
"""

from __future__ import annotations

from typing import Any

from twoaxis.comparison.statistics import LEVEL
from twoaxis.comparison.summary import Entry, Fit, Summary, Table, ratio

FORMAT = 1
"""Version of table.json."""


def to_document(summary: Summary) -> dict[str, Any]:
    """Everything for JSON: what the report shows and what it is computed from."""
    return {
        "format": FORMAT,
        "name": summary.name,
        "match": summary.match,
        "seeds": list(summary.seeds),
        "level": LEVEL,
        "correction": "Bonferroni over the contenders of a table",
        "lr": list(summary.rates),
        "lr_seeds": list(summary.rate_seeds),
        "shared_lr": summary.shared_rate,
        "init": list(summary.inits),
        "hardware": summary.hardware,
        "versions": summary.versions,
        "commands": list(summary.commands),
        "missing_runs": summary.missing,
        "laws": {data: _law_document(fit) for data, fit in summary.laws.items()},
        "tables": [_table_document(table) for table in summary.tables],
    }


def _law_document(fit: Fit) -> dict[str, Any]:
    return {
        "law": None if fit.law is None else fit.law.to_dict(),
        "alpha": None if fit.exponent is None else fit.exponent.to_dict(),
        "note": fit.note,
        "flops": fit.compute,
        "losses": fit.losses,
    }


def _table_document(table: Table) -> dict[str, Any]:
    return {
        "data": table.data,
        "size": table.size,
        "chance": table.chance,
        "baseline": table.baseline.label,
        "throughput": "measured in turns before the runs" if table.interleaved else "of the runs themselves",
        "contenders": [_entry_document(entry, table.baseline) for entry in table.entries],
    }


def _entry_document(entry: Entry, base: Entry) -> dict[str, Any]:
    plain = ("key", "label", "baseline", "init", "losses", "loss", "bits_per_byte", "accuracy", "parameters", "steps")
    costs = ("flops_per_token", "tokens", "tokens_per_second", "peak_memory", "lr", "lr_edge", "lr_losses")
    relative = ("parameters", "flops_per_token", "tokens", "tokens_per_second", "peak_memory")
    return {
        **{name: getattr(entry, name) for name in (*plain, *costs)},
        **{name: list(getattr(entry, name)) for name in ("finished", "diverged", "missing")},
        "ratios": {name: ratio(getattr(entry, name), getattr(base, name)) for name in relative},
        "verdict": entry.verdict,
        "difference": None if entry.difference is None else entry.difference.to_dict(),
        "accuracy_difference": None if entry.accuracy_difference is None else entry.accuracy_difference.to_dict(),
        "equal": {
            axis: {
                "budget": equal.budget,
                "loss": equal.loss,
                "difference": equal.difference.to_dict(),
                "read_at": equal.part,
                "indicative": equal.indicative,
                "early": equal.early,
            }
            for axis, equal in entry.equal.items()
        },
        "speed_up": None if entry.speed_up is None else entry.speed_up.to_dict(),
        "speed_up_note": entry.speed_up_note,
        "seeds_needed": entry.seeds_needed,
        "curves": {
            seed: {"tokens": list(curve.tokens), "loss": list(curve.loss)} for seed, curve in entry.curves.items()
        },
    }
