"""What the library means to reach, and whether a run reached it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from benchmarks.tables import Table, figure

BOTH = "forward + backward"
FASTER = "times faster than full"


class Target(NamedTuple):
    """One figure of one table, and its bound.

    Attributes:
        table: its key.
        row, column: the figure.
        bound: at most this; at least this where `least`.
        least: whether more is better.
        through: a row that the figure is divided into: how many times faster than that row.
    """

    table: str
    row: str
    column: str
    bound: float
    least: bool = False
    through: str | None = None


def _steps() -> list[Target]:
    bounds = {
        "DenseFormer 4x5": 1.01,
        "DenseFormer 1x1": 1.03,
        "Attention Residuals, block S=8": 1.04,
        "Attention Residuals, full": 1.06,
        "DDL d_v=1": 1.04,
        "DDL CC d_v=4 with EC": 1.10,
        "hyper-connections n=4, static": 1.06,
        "hyper-connections n=4, dynamic": 1.12,
        "mHC n=4": 1.14,
        "MUDDFormer": 1.08,
        "DCA k=2": 1.10,
        "ShortSWA w=16": 1.30,
        "ShortSWA w=16, thin": 1.10,
    }
    return [Target("steps", row, "time", bound) for row, bound in bounds.items()]


def _memory() -> list[Target]:
    bounds = {
        "Attention Residuals, full": 1.15,
        "Attention Residuals, block S=8": 1.15,
        "MUDDFormer": 1.40,
        "hyper-connections n=4, static": 1.50,
        "hyper-connections n=4, dynamic": 1.50,
        "DDL CC d_v=4 with EC": 1.50,
    }
    deep = [Target("deep_memory", row, "memory", bound) for row, bound in bounds.items()]
    history = (
        "DenseFormer 1x1",
        "Attention Residuals, full",
        "MUDDFormer",
        "DCA k=2",
        "depth attention K=4",
        "vertical attention",
        "ELC-BERT",
    )
    return deep + [Target("memory_by_depth", row, "exponent", 1.05) for row in history]


def _reads() -> list[Target]:
    found = []
    for count in (16, 64):
        for kind, faster in (("one query", (3.0, 7.0)), ("a query per token", (3.0, 2.5))):
            name = f"{count} sources, {kind}"
            for column, limit, times in (("forward", 1.25, faster[0]), (BOTH, 2.3, faster[1])):
                found.append(Target("depth_reads", f"{name}: twoaxis", column, limit))
                found.append(Target("depth_reads", f"{name}: twoaxis", column, times, True, f"{name}: stack + einsum"))
            if count == 16:
                found.append(Target("depth_reads", f"{name}: compiled", "forward", 1.85))
                found.append(Target("depth_reads", f"{name}: compiled", BOTH, 1.8))
    return found


def _rest() -> list[Target]:
    decode = {
        "Attention Residuals, block S=8": 1.05,
        "DDL d_v=1": 1.04,
        "hyper-connections n=4, static": 1.05,
        "hyper-connections n=4, dynamic": 1.05,
    }
    window = {"w=4": 30.0, "w=4, compiled": 60.0, "w=16": 25.0, "w=16, compiled": 30.0, "w=128": 10.0}
    return [
        *(Target("windows", row, FASTER, bound, True) for row, bound in window.items()),
        Target("windows", "w=16", "exponent of T", 1.05),
        *(Target("decoding", row, "time", bound) for row, bound in decode.items()),
    ]


def _peers() -> list[Target]:
    """Faster and less memory than every public implementation that runs on a CPU; only its forward pass, for one."""
    whole = (
        "flash-linear-attention, naive_attnres",
        "hyper-connections, HyperConnections n=4",
        "deep-cross-attention, DCAGPT k=2, training step of 6 blocks",
        DENSE_MASK,
    )
    found = [Target("peers", row, column, 1.0, True) for row in whole for column in ("time", "memory")]
    return [*found, Target("peers", "FlexAttention compiled, w=16, forward", "time", 1.0, True)]


DENSE_MASK = "scaled_dot_product_attention with a dense band mask, w=16"
TARGETS = [*_steps(), *_memory(), *_reads(), *_rest(), *_peers()]


EAGER_READ = (
    "Eager depth read against the copy limit: the logits of all sources must be known before the sum begins, and torch "
    "has no operation over a list of tensors that does both, so every source is fetched twice. Profile on an AMD EPYC, "
    "16 sources of 2048 x 512, in copy limits: dot products 1.7 (a norm, which only fetches, takes 1.0: the matrix "
    "library's product with a vector does not reach the bandwidth), sums 1.2, the rest calls and small tensors. The "
    "backward pass fetches the gradient and the source for the logit, both again for the source's gradient, and the "
    "source a third time for the query's. The fused attention kernel over one buffer, the form these bounds were set "
    "with on a Xeon (1.1), takes 1.9 forward and 4.0 with backward on the EPYC and needs the buffer filled first."
)
NAIVE_READ = (
    "Depth read against stack + einsum with one query: the spelled-out form takes 5.6 to 6.0 copy limits with backward "
    "on an AMD EPYC (17 on the Xeon the bound was set with), so seven times faster would be below the copy limit. "
    "Eight queries that share the sources, as in a block of sites: 3.3 times faster forward, 2.6 with backward."
)
COMPILED_READ = (
    "Compiled depth read: forward the sources are fetched twice as in eager mode, 1.7 to 2.2 copy limits on an EPYC "
    "that others use too. Backward with one query takes 2.7, and 1.7 if the query needs no gradient: that gradient is "
    "a sum over tokens, one column-wise reduction per source, which the compiler does not fuse with the row-wise rest. "
    "A query per token takes 1.5 to 2.2, as busy as the machine's memory is."
)
DECODING = (
    "Decoding: what is left is calls, not bytes. The weights of a sub-layer pass through the caches between two sites, "
    "so the first use of each operation costs about 10 to 15 microseconds instead of 1 or 2; a read or write that uses "
    "ten different ones adds a tenth of a millisecond to a site of one to two milliseconds."
)


MASKED = (
    "Memory against attention with a dense band mask: the library's kernel works on the tensors as they are and keeps "
    "no logits; the band lays queries, keys and values out in each pass and keeps the weights of its tiles, c + w-1 "
    "per query in chunks of c. Not counted is the mask itself, whose bytes grow with the square of the axis."
)


def _why(target: Target) -> str | None:
    """What profiles say about a target that some machine misses."""
    if target.table == "decoding":
        return DECODING
    if (target.table, target.row) == ("peers", DENSE_MASK):
        return MASKED
    if target.table != "depth_reads":
        return None
    if target.through is not None:
        return NAIVE_READ if "one query" in target.row else EAGER_READ
    return COMPILED_READ if target.row.endswith("compiled") else EAGER_READ


def reasons(tables: Mapping[str, Table]) -> list[str]:
    """A Markdown list of why targets are missed, as far as profiles tell; empty where none is."""
    found = [why for target in TARGETS if _met(tables, target) is False and (why := _why(target)) is not None]
    return [f"- {why}" for why in dict.fromkeys(found)]


def _met(tables: Mapping[str, Table], target: Target) -> bool | None:
    """None where the run does not have the figure."""
    table = tables.get(target.table)
    measured = None if table is None else _measured(table, target)
    if measured is None:
        return None
    return measured >= target.bound if target.least else measured <= target.bound


def verdicts(tables: Mapping[str, Table]) -> list[str]:
    """Target, measured, met: a Markdown table of every target whose figure the run has, a section per title."""
    sections: dict[str, list[str]] = {}
    for target in TARGETS:
        table = tables.get(target.table)
        measured = None if table is None else _measured(table, target)
        if table is None or measured is None:
            continue
        faster = f"{table.title.partition(',')[0]}, times faster than stack + einsum"
        sign, met = "≥" if target.least else "≤", "yes" if _met(tables, target) else "**no**"
        sections.setdefault(faster if target.through else table.title, []).append(
            f"| {target.row}, {target.column} | {sign} {figure(target.bound)} | {figure(measured)} | {met} |"
        )
    lines = ["| figure | target | measured | met |", "|---|---:|---:|---|"]
    for title, rows in sections.items():
        lines += [f"| **{title}** | | | |", *rows]
    return lines


def _measured(table: Table, target: Target) -> float | None:
    value = table.rows.get(target.row, {}).get(target.column)
    if value is None or target.through is None:
        return value
    other = table.rows.get(target.through, {}).get(target.column)
    return None if other is None else other / value
