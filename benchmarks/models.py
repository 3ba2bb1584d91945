"""Whole decoders: a training step in time and memory, memory against depth and window, decoding token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from benchmarks.scale import CONTENDERS, Scale, activation_peak, config, training_step
from benchmarks.tables import Table, timed
from benchmarks.timing import Run, calls, exponent, interleave
from twoaxis import Decoder

DEEP = (
    "Attention Residuals, full",
    "Attention Residuals, block S=8",
    "MUDDFormer",
    "hyper-connections n=4, static",
    "hyper-connections n=4, dynamic",
    "DDL CC d_v=4 with EC",
)
"""Whose memory is also measured at twice the depth."""

DECODED = (
    "Attention Residuals, block S=8",
    "Attention Residuals, full",
    "DDL d_v=1",
    "hyper-connections n=4, static",
    "hyper-connections n=4, dynamic",
    "MUDDFormer",
    "DCA k=2",
    "ShortSWA w=16, thin",
)
"""Who decodes."""

GROUP = 4
"""Contenders whose parameters are in memory at once, beside those of `standard`."""


def groups(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """`standard` and a few contenders at a time."""
    others = [name for name in names if name != "standard"]
    for at in range(0, len(others), GROUP):
        yield ("standard", *others[at : at + GROUP])


def steps(scale: Scale) -> Table:
    """The training step of every stream and mixer: time and peak memory against `standard`."""
    rows: dict[str, dict[str, float]] = {"standard": {}}
    for names in groups(list(CONTENDERS)):
        models = {name: Decoder(config(name, scale)) for name in names}
        peaks = {name: activation_peak(model, scale.length) for name, model in models.items()}
        runs = {name: training_step(model, scale.length) for name, model in models.items()}
        for name, timing in interleave(runs, scale.model_rounds, warm=0).items():  # counting bytes was a warm-up
            rows[name] = timed(timing) | {"memory": peaks[name] / peaks["standard"]}
    note = (
        f"{scale.blocks} blocks of width {scale.width}, {scale.heads} heads, hidden {scale.hidden}, vocabulary "
        f"{scale.vocabulary} tied, T = {scale.length}, batch 1, float32, eager, forward + backward. Memory is the "
        "peak of activations."
    )
    return Table("Training step against `standard`", note, rows)


def small_steps(scale: Scale) -> Table:
    """The training step of every stream and mixer in a small model, where the number of calls decides."""
    small = scale._replace(width=128, heads=4, hidden=352, vocabulary=1024, blocks=4, length=min(512, scale.length))
    rows: dict[str, dict[str, float]] = {"standard": {}}
    for names in groups(list(CONTENDERS)):
        runs = {name: training_step(Decoder(config(name, small)), small.length) for name in names}
        counts = {name: calls(run) for name, run in runs.items()}
        for name, timing in interleave(runs, scale.rounds, warm=0).items():  # counting was a warm-up
            rows[name] = timed(timing) | {"calls": counts[name]}
    note = (
        f"{small.blocks} blocks of width {small.width}, {small.heads} heads, hidden {small.hidden}, vocabulary "
        f"{small.vocabulary}, T = {small.length}, batch 1, float32, eager, forward + backward. Calls are operations "
        "of PyTorch in a step, views apart; a rank of gated streams is an eighth of the width."
    )
    return Table("Training step of a small model against `standard`", note, rows)


def deep_memory(scale: Scale) -> Table:
    """Peak activation memory at twice the depth."""
    blocks = 2 * scale.blocks
    rows: dict[str, dict[str, float]] = {}
    base = activation_peak(Decoder(config("standard", scale, num_hidden_layers=blocks)), scale.length)
    for name in DEEP:
        peak = activation_peak(Decoder(config(name, scale, num_hidden_layers=blocks)), scale.length)
        rows[name] = {"memory": peak / base}
    return Table(f"Peak activation memory at {blocks} blocks against `standard`", "Shape as above.", rows)


def memory_by_depth(scale: Scale) -> Table:
    """Peak activation memory of every stream by depth, and the fitted exponent."""
    small = scale._replace(width=96, heads=3, hidden=256, vocabulary=256, length=64)
    names = [name for name, options in CONTENDERS.items() if "mixer" not in options]
    found = {
        name: [
            activation_peak(Decoder(config(name, small, num_hidden_layers=blocks)), small.length)
            for blocks in scale.depths
        ]
        for name in names
    }
    rows = {}
    for name, peaks in found.items():
        ratios = {
            f"{2 * blocks} sub-layers": peak / base
            for blocks, peak, base in zip(scale.depths, peaks, found["standard"], strict=True)
        }
        rows[name] = ratios | {"exponent": exponent(scale.depths, peaks)}
    note = "Ratio to `standard` of the same depth; the exponent is that of the method's own memory, 1 where linear."
    return Table("Peak activation memory against depth", note, rows)


def memory_by_window(scale: Scale) -> Table:
    """Peak activation memory of depth reads by their window K."""
    small = scale._replace(width=96, heads=3, hidden=256, vocabulary=256, length=64, blocks=2 * scale.blocks)
    base = activation_peak(Decoder(config("standard", small)), small.length)
    rows: dict[str, dict[str, float]] = {}
    for title, name in (("Attention Residuals", "attention_residuals"), ("depth attention", "depth_attention")):
        rows[title] = {}
        for window in (2, 4, 8, 16, None):
            made = Decoder(config("standard", small, stream=name, stream_options={"window": window}))
            rows[title]["full" if window is None else f"K = {window}"] = activation_peak(made, small.length) / base
    note = (
        f"{small.blocks} blocks, ratio to `standard`. Training keeps every state for its own sub-layer's backward pass "
        "whatever the window: a read adds references and small weights, so a shorter window saves next to nothing."
    )
    return Table("Peak activation memory against the depth window", note, rows)


def decoding(scale: Scale) -> Table:
    """Time per token, batch 1, after a prefix, against `standard`."""
    rows: dict[str, dict[str, float]] = {"standard": {}}
    prefix = torch.randint(0, scale.vocabulary, (1, scale.cached), generator=torch.Generator().manual_seed(0))
    for names in groups(DECODED):
        runs = {name: _decode(Decoder(config(name, scale)), prefix, 2 if scale.quick else 8) for name in names}
        for name, timing in interleave(runs, scale.rounds).items():
            rows[name] = timed(timing)
    note = f"Batch 1, {scale.cached} cached tokens, one token at a time."
    return Table("Decoding, per token, against `standard`", note, rows)


def _decode(model: Decoder, prefix: torch.Tensor, count: int) -> Run:
    with torch.no_grad():
        _, before = model.step(prefix, model.start())

    def run() -> None:
        past = before
        with torch.no_grad():
            for i in range(count):
                _, past = model.step(prefix[:, i : i + 1], past)

    return run
