"""Measuring this machine: how long its operations take by size, and how well that predicts whole training passes.

    probes      small models with every stream and mixer run once; each kind of operation is noted at a few sizes
    replay      every noted call is run again by itself, on tensors of the same layouts; its inputs are warm and its
                results are kept for a while, as in a model, which reads what it has just written and writes to memory
                it has not touched for long
    call        what is left of tiny models' time after their operations: Python, autograd and dispatch, per call
    check       the times of other shapes, predicted from counts, against measured ones

Times are the processor's, not the clock's, on one thread, and the shortest of several: another process on the machine
should not change a profile.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twoaxis.base.machine import hardware, hardware_line
from twoaxis.base.meter import Call, Layout, Meter, Signature
from twoaxis.base.timer import take_turns
from twoaxis.costs.fuse import Kernel
from twoaxis.costs.measured import Table as Times
from twoaxis.costs.measured import kernel_seconds, product_flops
from twoaxis.costs.trace import TrainTrace, meta_model, trace_training
from twoaxis.depth.registry import STREAMS
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.model.loss import next_token_loss
from twoaxis.sequence.registry import MIXERS
from twoaxis.show.document import Column, Document, Heading, Prose, table

PROBES = (
    ({"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}, 1, 32),
    ({"vocab_size": 256, "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 3}, 2, 96),
    ({"vocab_size": 512, "hidden_size": 224, "num_hidden_layers": 3, "num_attention_heads": 4}, 4, 160),
)
"""Shapes, sequences and tokens at which operations are noted."""
TINY = ({"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}, 1, 8)
"""A shape whose time is all calls."""
CHECK = ({"vocab_size": 320, "hidden_size": 160, "num_hidden_layers": 5, "num_attention_heads": 5}, 4, 128)
"""A shape that no probe has, for predicted against measured."""
COPY_SIZES = tuple(2**n for n in range(12, 28, 3))
"""Bytes that are copied."""
SIZES, PRODUCTS = 10, 60
"""Sizes at which a kind of operation is timed, and shapes of a kind of matrix product."""
WARM = 2 * 2**20
"""Bytes that a replay's inputs take up together: a model has just written what it reads."""
COLD = 32 * 2**20
"""Bytes that a replay's results take up together before they are given back: a model keeps what it writes."""


class Noted(NamedTuple):
    """A call that ran, without its data.

    Attributes:
        signature: the operation and the layout of its arguments.
        kernel: what it is counted as.
    """

    signature: Signature
    kernel: Kernel


def note(call: Call, calls: dict[str, dict[Any, Noted]]) -> None:
    """Add a call to those noted, by kind and size, unless there is one of its size or it cannot be run again."""
    if call.signature is not None:
        op = Kernel.of(call)
        kind, size = (f"{op.op} product", op.dims) if op.flops else (f"{op.op}/{op.form}", (op.bytes,))
        calls.setdefault(kind, {}).setdefault(size, Noted(call.signature, op))


def filled(layout: Layout) -> Tensor:
    """A real tensor of a layout: ones where arithmetic wants numbers, zeros where an index must exist."""
    last = sum((size - 1) * stride for size, stride in zip(layout.shape, layout.stride, strict=True))
    make = torch.ones if layout.dtype.is_floating_point else torch.zeros
    return make(max(0, last) + 1, dtype=layout.dtype).as_strided(layout.shape, layout.stride)


def spread(noted: dict[Any, Noted], most: int) -> list[Noted]:
    """At most so many calls, their sizes as far from each other as can be: each next one is the farthest from all."""
    sizes = {size: [math.log(n + 1) for n in size] for size in noted}
    taken = [max(sizes, key=lambda size: sum(sizes[size]))]
    gap = {size: math.dist(place, sizes[taken[0]]) for size, place in sizes.items()}
    while len(taken) < most and gap[far := max(gap, key=lambda size: gap[size])]:
        taken.append(far)
        gap = {size: min(found, math.dist(sizes[size], sizes[far])) for size, found in gap.items()}
    return [noted[size] for size in taken]


def methods() -> dict[str, dict[str, Any]]:
    """Every stream and mixer with its default options, as fields of `ModelConfig`."""
    found: dict[str, dict[str, Any]] = {name: {"stream": name} for name in STREAMS.names()}
    found["attention_residuals:block_size=4"] = {"stream": "attention_residuals", "stream_options": {"block_size": 4}}
    wide = {"value_channels": 4, "expand": "conv"}
    found["deep_delta:value_channels=4,expand=conv"] = {"stream": "deep_delta", "stream_options": wide}
    return found | {name: {"mixer": name} for name in MIXERS.names()}


def calibrate(
    say: Callable[[str], None] = lambda text: None,
    *,
    only: Mapping[str, dict[str, Any]] | None = None,
    rounds: int = 7,
) -> dict[str, Any]:
    """Measure this machine.

    Args:
        say: told what is being done.
        only: methods to probe and check; None is all of them.
        rounds: timings of each whole pass.

    Returns:
        profile: for `--hardware`.
        checks: predicted and measured ratios by method, with their errors.
    """
    chosen = dict(methods() if only is None else only)
    chosen.setdefault("standard", {"stream": "standard"})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        say(f"noting the operations of {len(chosen)} methods")
        calls: dict[str, dict[Any, Noted]] = {}
        meter = Meter()
        for fields in chosen.values():
            for shape, batch, tokens in PROBES:
                passes(ModelConfig(**shape, **fields), batch, tokens)(meter)
        for event in meter.take():
            if isinstance(event, Call):
                note(event, calls)
        chosen_calls = {kind: spread(noted, PRODUCTS if "product" in kind else SIZES) for kind, noted in calls.items()}
        say(f"timing {sum(map(len, chosen_calls.values()))} calls of {len(calls)} kinds")
        ops = replay_all(chosen_calls)
        say("timing tiny models for the cost of a call")
        ops["call"] = call_overhead(ops, chosen)
        profile = make_profile(ops)
        say("timing whole passes")
        return {"profile": profile, "checks": check(profile, chosen, rounds)}
    finally:
        torch.set_num_threads(threads)


def passes(config: ModelConfig, batch: int, tokens: int) -> Callable[[Any], None]:
    """A function that runs one forward and backward pass inside a context."""
    model = Decoder(config)
    generator = torch.Generator().manual_seed(0)
    given = torch.randint(0, config.vocab_size, (batch, tokens + 1), generator=generator)

    def run(context: Any) -> None:
        for parameter in model.parameters():
            parameter.grad = None
        with context:
            next_token_loss(model, given).backward()

    return run


def replay_all(calls: dict[str, list[Noted]]) -> dict[str, Any]:
    """Seconds of every kind of call by size, and of copies."""
    points: dict[str, list[tuple[float, float]]] = {}
    products: list[tuple[str, tuple[int, ...], float]] = []
    for kind, noted in calls.items():
        for call in noted:
            seconds = replay(call)
            if call.kernel.flops:
                products.append((call.kernel.op, call.kernel.dims, seconds))
            else:
                points.setdefault(kind, []).append((call.kernel.bytes, seconds))
    for size in COPY_SIZES:
        source, target = (torch.zeros(size // 8) for _ in range(2))
        seconds = shortest(lambda s=source, t=target: t.copy_(s), 0.004)
        points.setdefault("copy_", []).append((size, seconds))
    by_size = {kind: _rising(sorted(found)) for kind, found in points.items()}
    x = torch.zeros(4, 4)
    return {"call": 0.0, "view": shortest(lambda: x.view(16), 0.002), "points": by_size, "products": products}


def _rising(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most one time per size, the median of those within a tenth of it."""
    found: list[tuple[float, float]] = []
    group: list[tuple[float, float]] = []
    for point in [*points, (float("inf"), 0.0)]:
        if group and point[0] > 1.1 * group[0][0] + 64:
            found.append((statistics.mean(p[0] for p in group), statistics.median(p[1] for p in group)))
            group = []
        group.append(point)
    return found


def replay(call: Noted) -> float:
    """Seconds of one call, over several sets of its tensors in turn."""
    copies = max(1, min(16, WARM // max(call.kernel.bytes, 1)))
    kept = max(copies, min(64, COLD // max(call.kernel.bytes, 1)))
    tensors = [call.signature.arguments(filled, "cpu") for _ in range(copies)]
    results: list[Any] = []

    def once() -> None:
        args, kwargs = tensors[len(results) % copies]
        results.append(call.signature.func(*args, **kwargs))
        if len(results) == kept:
            results.clear()

    with torch.no_grad():
        return shortest(once, 0.003, least=kept)


def shortest(run: Callable[[], Any], seconds: float, tries: int = 3, least: int = 1) -> float:
    """The least processor time of a call, in loops of about `seconds` and at least so many calls."""
    run()
    begin = time.thread_time()
    run()
    count = max(least, min(2000, int(seconds / max(time.thread_time() - begin, 1e-7))))
    best = float("inf")
    for _ in range(tries):
        begin = time.thread_time()
        for _ in range(count):
            run()
        best = min(best, (time.thread_time() - begin) / count)
    return best


def counted(config: ModelConfig, batch: int, tokens: int) -> TrainTrace:
    """Everything a forward and backward pass does, counted without running it."""
    return trace_training(meta_model(config, "float32"), batch, tokens, "cpu")


def predicted(ops: dict[str, Any], trace: TrainTrace) -> float:
    """Seconds of a training pass."""
    table = Times(ops)
    kernels = trace.work("all").eager
    return sum(kernel_seconds(table, kernel) * n for kernel, n in kernels.items()) + table.view * trace.views


def call_overhead(ops: dict[str, Any], chosen: Mapping[str, dict[str, Any]]) -> float:
    """Seconds per call that operations by themselves do not account for."""
    shape, batch, tokens = TINY
    found = []
    for fields in chosen.values():
        config = ModelConfig(**shape, **fields)
        trace, run = counted(config, batch, tokens), passes(config, batch, tokens)
        seconds = shortest(lambda run=run: run(contextlib.nullcontext()), 0.05)
        found.append((seconds - predicted(ops, trace)) / (trace.work("all").calls + trace.views))
    return max(0.0, statistics.median(found))


def make_profile(ops: dict[str, Any]) -> dict[str, Any]:
    """A profile of this machine."""
    machine = hardware()
    copies = ops["points"]["copy_"]
    return {
        "title": machine["cpu"],
        "kind": "cpu",
        "matmul": dict.fromkeys(("float32", "bfloat16", "float16"), max(rates(ops))[0]),
        "bandwidth": copies[-1][0] / copies[-1][1],
        "memory": machine["memory"] or 0,
        "launch": ops["call"],
        "efficiency": {"matmul": 1.0, "bandwidth": 1.0, "link": 1.0},
        "source": f"measured: {hardware_line()}",
        "ops": ops,
    }


def rates(ops: dict[str, Any]) -> list[tuple[float, str, tuple[int, ...]]]:
    """Operations per second of every product that was timed."""
    return [(product_flops(name, dims) / seconds, name, tuple(dims)) for name, dims, seconds in ops["products"]]


def check(profile: dict[str, Any], chosen: Mapping[str, dict[str, Any]], rounds: int) -> list[dict[str, Any]]:
    """Predicted and measured seconds of a shape that was not probed, and their ratios to the plain residual's."""
    shape, batch, tokens = CHECK
    runs, guesses = {}, {}
    for name, fields in chosen.items():
        config = ModelConfig(**shape, **fields)
        guesses[name] = predicted(profile["ops"], counted(config, batch, tokens))
        runs[name] = functools.partial(passes(config, batch, tokens), contextlib.nullcontext())
    times = take_turns(runs, rounds)
    best = {name: min(taken.values) for name, taken in times.items()}
    rows = []
    for name in runs:
        guess, found = guesses[name] / guesses["standard"], best[name] / best["standard"]
        rows.append(
            {
                "method": name,
                "predicted_seconds": guesses[name],
                "measured_seconds": best[name],
                "predicted": guess,
                "measured": found,
                "error": guess / found - 1,
            }
        )
    return rows


def errors(checks: list[dict[str, Any]]) -> tuple[float, float]:
    """Median and worst error of the methods, the plain residual left out."""
    found = [abs(row["error"]) for row in checks if row["method"] != "standard"]
    return statistics.median(found), max(found)


def calibration_document(found: dict[str, Any]) -> Document:
    """What was measured, for people."""
    profile, checks = found["profile"], found["checks"]
    copies = [
        (f"{size / 1e3:,.0f} kB", f"{size / seconds / 1e9:.1f} GB/s")
        for size, seconds in profile["ops"]["points"]["copy_"]
    ]
    found_rates = sorted(rates(profile["ops"]))
    chosen = [found_rates[int(place * (len(found_rates) - 1))] for place in (0, 0.25, 0.5, 0.75, 1)]
    products = [(name, " x ".join(map(str, dims)), f"{rate / 1e9:.1f} GFLOPS") for rate, name, dims in chosen]
    rows = [
        (
            row["method"],
            f"{row['predicted_seconds'] * 1e3:.1f}",
            f"{row['measured_seconds'] * 1e3:.1f}",
            f"{row['predicted']:.3f}",
            f"{row['measured']:.3f}",
            f"{row['error']:+.1%}",
        )
        for row in checks
    ]
    shape, batch, tokens = CHECK
    median, worst = errors(checks)
    headers = ("method", "predicted ms", "measured ms", "predicted ratio", "measured ratio", "error")
    blocks = (
        Prose(f"{profile['source'].removeprefix('measured: ')}; {profile['ops']['call'] * 1e6:.1f} us per call."),
        Heading("Copying, read and written"),
        table((Column("bytes"), "rate"), copies),
        Heading("Matrix products, slowest to fastest"),
        table(("operation", Column("batch x rows x inner x columns", number=False), "rate"), products),
        Heading("Predicted against measured"),
        Prose(
            f"Forward and backward of {batch} sequences of {tokens} tokens through {shape['blocks']} blocks of width "
            f"{shape['width']}, a shape that was not probed. Ratios are to the plain residual. "
            f"Median error {median:.1%}, worst {worst:.1%}."
        ),
        table(headers, rows),
    )
    return Document("This machine", blocks)
