"""Costs as tables for people and as one JSON document for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from twoaxis.costs.costs import Costs
from twoaxis.costs.hardware import Profile, find_profile
from twoaxis.costs.roofline import Seconds
from twoaxis.model.deployment import Deployment
from twoaxis.show.document import Block, Column, Document, Heading, Items, Prose, Table, table
from twoaxis.show.numbers import NOTHING, increase, seconds, si, whole
from twoaxis.show.numbers import times as ratio


def times(found: Seconds) -> str:
    """A ratio, fused to naive, as 1.07x to 1.35x."""
    low, high = ratio(found.fused), ratio(found.naive)
    return low if low == high else f"{low} to {high}"


def document(shape: str, rows: Sequence[Costs], *, sites: bool = False) -> Document:
    """Everything about some methods on one shape; the first row is the plain residual.

    Args:
        shape: its name.
        rows: from `cost`.
        sites: with the bytes of every site.
    """
    deployment, plain = rows[0].deployment, rows[0]
    profile = find_profile(deployment.hardware)
    blocks: list[Block] = [
        Prose(_shape_line(plain) + " " + _deployment_line(deployment, profile)),
        Heading("In short"),
        Items(tuple(verdict(row, plain, profile) for row in rows[1:]) or (verdict(plain, plain, profile),)),
        Heading("Parameters and operations"),
        _counts(rows),
        Heading("Bytes"),
        _bytes(rows),
    ]
    if deployment.pipeline_stages > 1:
        blocks += [Heading("Across pipeline stages"), Prose(PIPELINE), _pipeline(rows)]
    blocks += [
        Heading("Memory of the fullest device in training"),
        _memory(rows, profile),
        Heading("Time, as a ratio to the plain residual"),
        _times(rows),
        Prose(assumptions(profile, deployment)),
    ]
    if sites:
        blocks += [Heading("Bytes per token at each site, naive / fused"), _sites(rows)]
    return Document(f"What methods cost on {shape}", tuple(blocks))


PIPELINE = (
    "Bytes per token of one forward pass; gradients take the same way back. Cached: a stage keeps what it has from its "
    "earlier virtual stages. Recomputed: only the tokens are sent and every chunk runs all blocks before it again."
)


def _shape_line(plain: Costs) -> str:
    shape = plain.shape
    return (
        f"{shape.num_hidden_layers} blocks of width {shape.hidden_size}, {shape.num_attention_heads} heads "
        f"({shape.kv_heads} for keys), hidden {shape.hidden_width(0)}, "
        f"{plain.parameters.total:,} parameters."
    )


def _deployment_line(d: Deployment, profile: Profile) -> str:
    parts = [profile.title, d.dtype, f"context {d.context:,}", f"micro-batch {d.micro_batch}"]
    for name, count in (("data", d.data_parallel), ("tensor", d.tensor_parallel), ("pipeline", d.pipeline_stages)):
        if count > 1:
            parts.append(f"{name} parallel {count}")
    if d.virtual_stages > 1:
        parts.append(f"{d.virtual_stages} virtual stages")
    if d.sequence_parallel:
        parts.append("sequence parallel")
    parts.append(f"recompute {d.recompute}")
    prefill = "" if d.prefill_chunk is None else f", prefill in chunks of {d.prefill_chunk:,}"
    decoding = f"{d.batch} sequence{'s' if d.batch > 1 else ''} decoding"
    return f"{', '.join(parts)}; {decoding}{prefill}."


def verdict(row: Costs, plain: Costs, profile: Profile) -> str:
    """One method in a few sentences.

    Args:
        row: the method.
        plain: the plain residual of the same shape.
        profile: of the device.
    """
    room = f"{si(row.memory.total)} of {si(profile.memory)}"
    if row is plain:
        line = (
            f"**{row.label}**: {si(row.training.total, 'FLOP')} per token in training; it keeps "
            f"{si(row.activations)} of activations where nothing is recomputed, and {si(row.kept.attention)} "
            "of keys and values between tokens. "
        )
        return line + (f"It fits: {room}." if row.fits else f"It does not fit: {room}{_remedy(row, profile)}.")
    base = row.parameters.total - row.parameters_added
    added = row.forward.stream + row.forward.mixer
    kept = row.kept.local + row.kept.stream
    line = (
        f"**{row.label}**: {increase(row.parameters_added / base)} parameters, "
        f"{increase(added / (row.forward.total - added))} operations; training takes {times(row.train)} "
        f"(fused to as written), decoding {times(row.decode)}; it leaves "
        f"{row.activations / plain.activations:.2f}x the activations where nothing is recomputed; between tokens it "
        f"keeps {si(kept) if kept else 'nothing'} beside "
        f"{si(row.kept.attention)} of keys and values. "
    )
    if row.deployment.pipeline_stages > 1:
        pipeline, bare = row.pipeline, plain.pipeline.naive
        line += (
            f"Pipeline traffic is {pipeline.cached / bare:.3g} times the plain residual's when cached, "
            f"{pipeline.naive / bare:.3g} times when forwarded whole. "
        )
    if row.fits:
        return f"{line}It fits: {room}; the plain residual takes {si(plain.memory.total)}."
    also = f"the plain residual {'does' if plain.fits else 'does not either'} ({si(plain.memory.total)})"
    return f"{line}It does not fit: {room}; {also}{_remedy(row, profile)}."


def _remedy(row: Costs, profile: Profile) -> str:
    """What recomputing would bring."""
    from twoaxis.costs.costs import cost
    from twoaxis.model.variant import Contender

    order = ("none", "block", "full")
    for recompute in order[order.index(row.deployment.recompute) + 1 :]:
        asked = dataclasses.replace(row.deployment, recompute=recompute)
        same = Contender(
            label=row.label,
            stream=row.shape.stream,
            stream_options=dict(row.shape.stream_options),
            mixer=row.shape.mixer,
            mixer_options=dict(row.shape.mixer_options),
            model={"placement": row.shape.placement, "blend": row.shape.blend, "mixer_blocks": row.shape.mixer_blocks},
        )
        found = cost(row.shape, same, asked)
        if found.fits:
            return f"; with recompute {recompute} it does, {si(found.memory.total)}"
    weights = row.memory.weights + row.memory.gradients + row.memory.optimizer
    if weights > profile.memory:
        return f"; weights, gradients and optimiser alone are {si(weights)}: use more devices"
    return "; recomputing is not enough: use a smaller micro-batch or more devices"


def _counts(rows: Sequence[Costs]) -> Table:
    cells = []
    for row in rows:
        base, added = row.parameters.total - row.parameters_added, row.forward.stream + row.forward.mixer
        cells.append(
            (
                row.label,
                whole(row.parameters_added),
                increase(row.parameters_added / base),
                si(row.forward.total, "FLOP"),
                increase(added / (row.forward.total - added)),
                si(row.training.total, "FLOP"),
            )
        )
    headers = ("method", "parameters added", "share", "forward per token", "added", "training per token")
    return table(headers, cells)


def _bytes(rows: Sequence[Costs]) -> Table:
    headers = (
        *("method", "stream per token, naive", "fused", "activations of a micro-batch", "live state, training"),
        *("live state, prefill", "keys and values", "rings", "stream's memory"),
    )
    cells = [
        (
            row.label,
            *(si(row.traffic.naive), si(row.traffic.fused), si(row.activations)),
            *(si(row.live_training), si(row.live_prefill)),
            *(si(part) for part in row.kept),
        )
        for row in rows
    ]
    return table(headers, cells)


def _pipeline(rows: Sequence[Costs]) -> Table:
    headers = (
        *("method", "tensors at the last boundary", "busiest boundary, naive", "cached", "all, naive", "all, cached"),
        *("all, recomputed", "forward passes it adds"),
    )
    cells = [
        (
            row.label,
            str(len(row.pipeline.boundaries[-1].tensors)),
            si(row.pipeline.worst_naive),
            si(row.pipeline.worst_cached),
            si(row.pipeline.naive),
            si(row.pipeline.cached),
            si(row.pipeline.recomputed),
            f"{row.pipeline.recomputed_share:.3g}",
        )
        for row in rows
    ]
    return table(headers, cells)


def _memory(rows: Sequence[Costs], profile: Profile) -> Table:
    headers = ("method", "stage", "weights", "gradients", "optimiser", "activations", "backward pass", "all")
    headers = (*headers, Column("fits", number=False))
    cells = [
        (
            row.label,
            str(row.memory.stage),
            *(si(part) for part in row.memory[1:]),
            si(row.memory.total),
            f"{'yes' if row.fits else 'no'}, {si(profile.memory)}",
        )
        for row in rows
    ]
    return table(headers, cells)


def _times(rows: Sequence[Costs]) -> Table:
    ratios = [f"{name}, {kernels}" for name in ("train", "prefill", "decode") for kernels in ("fused", "naive")]
    staged = rows[0].deployment.pipeline_stages > 1
    headers = ("method", *ratios, "training pass of a stage, fused" if staged else "training pass, fused")
    cells = [
        (
            row.label,
            *(f"{n:.3f}" for pair in (row.train, row.prefill, row.decode) for n in (pair.fused, pair.naive)),
            seconds(row.times.train.fused),
        )
        for row in rows
    ]
    return table(headers, cells)


def assumptions(profile: Profile, deployment: Deployment) -> str:
    """What an estimate rests on."""
    if profile.ops:
        return f"Times of operations as measured: {profile.source}."
    e = profile.efficiency
    transfers = "; transfers between devices are not hidden behind computing" if deployment.chunks > 1 else ""
    return (
        f"Estimate for {profile.title}: {e['matmul']:.0%} of {profile.matmul[deployment.dtype] / 1e12:,.0f} TFLOPS, "
        f"{e['bandwidth']:.0%} of {profile.bandwidth / 1e12:.3g} TB/s, {e['link']:.0%} of "
        f"{profile.link / 1e9:.0f} GB/s between devices, {profile.launch * 1e6:.0f} us per kernel{transfers}. "
        "Naive: every operation of this library is a kernel. Fused: matrix products and one kernel between two of "
        "them. A training pass is forward and backward of one micro-batch, without the optimiser and without pipeline "
        "bubbles, which are the same for all methods."
    )


def _sites(rows: Sequence[Costs]) -> Table:
    """Sites as rows; a method without a site there has a dash."""
    widest = max(rows, key=lambda row: len(row.traffic.sites))
    cells = []
    for site in widest.traffic.sites:
        line = [f"{site.block} {site.kind}"]
        for row in rows:
            found = [s for s in row.traffic.sites if (s.block, s.kind) == (site.block, site.kind)]
            line.append(f"{si(found[0].naive)} / {si(found[0].fused)}" if found else NOTHING)
        cells.append(tuple(line))
    headers = ("site", *(row.label for row in rows))
    return table(headers, cells)


def to_json(shape: str, rows: Sequence[Costs]) -> dict[str, Any]:
    """Everything, as plain values."""
    import twoaxis

    deployment = rows[0].deployment
    profile = find_profile(deployment.hardware)
    sheet = {name: value for name, value in profile._asdict().items() if name != "ops"}
    return {
        "twoaxis": twoaxis.__version__,
        "shape": {"name": shape, **_shape(rows[0])},
        "deployment": dataclasses.asdict(deployment),
        "hardware": sheet,
        "assumptions": assumptions(profile, deployment),
        "methods": [row_json(row) for row in rows],
    }


def _shape(row: Costs) -> dict[str, Any]:
    fields = dataclasses.asdict(row.shape)
    return {name: value for name, value in fields.items() if not name.startswith(("stream", "mixer", "placement"))}


def row_json(row: Costs) -> dict[str, Any]:
    """One method."""
    pipeline = row.pipeline
    return {
        "label": row.label,
        "stream": row.shape.stream,
        "stream_options": dict(row.shape.stream_options),
        "mixer": row.shape.mixer,
        "mixer_options": dict(row.shape.mixer_options),
        "parameters": {**row.parameters._asdict(), "total": row.parameters.total, "added": row.parameters_added},
        "forward_flops": {**row.forward._asdict(), "total": row.forward.total},
        "training_flops": {**row.training._asdict(), "total": row.training.total},
        "traffic": {
            "naive": row.traffic.naive,
            "fused": row.traffic.fused,
            "sites": [site._asdict() for site in row.traffic.sites],
        },
        "activations": row.activations,
        "live": {"numbers": row.live_numbers, "training": row.live_training, "prefill": row.live_prefill},
        "kept": {**row.kept._asdict(), "total": row.kept.total},
        "pipeline": {
            "stages": pipeline.stages,
            "virtual": pipeline.virtual,
            "naive": pipeline.naive,
            "cached": pipeline.cached,
            "recomputed": pipeline.recomputed,
            "recomputed_passes": pipeline.recomputed_share,
            "boundaries": [b._asdict() for b in pipeline.boundaries],
            "held": list(pipeline.held),
        },
        "memory": {**row.memory._asdict(), "total": row.memory.total, "fits": row.fits},
        "seconds": {name: getattr(row.times, name)._asdict() for name in row.times._fields},
        "ratio": {name: getattr(row, name)._asdict() for name in ("train", "prefill", "decode")},
    }
