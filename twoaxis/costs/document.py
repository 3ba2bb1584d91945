"""Costs as tables for people and as one JSON document for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from twoaxis.costs.costs import Costs
from twoaxis.costs.hardware import Profile
from twoaxis.costs.roofline import Seconds
from twoaxis.model.deployment import Deployment
from twoaxis.show.charts import Axis, Chart, Mark, Panel
from twoaxis.show.document import Block, Column, Document, Heading, Items, Prose, Showable, Table, table
from twoaxis.show.numbers import NOTHING, increase, seconds, si, whole
from twoaxis.show.numbers import times as ratio


@dataclass(frozen=True)
class CostTable(Showable):
    """What some methods cost on one shape."""

    shape: str
    """Its name."""
    rows: Sequence[Costs]
    """From one `CostModel`; the first is the plain residual."""
    sites: bool = False
    """With the bytes of every site."""
    charts: tuple[Chart, ...] = ()
    """Besides the tables, on a page."""

    def document(self) -> Document:
        """Everything about them."""
        return document(self.shape, self.rows, sites=self.sites)

    def page(self) -> Document:
        """The same with charts."""
        found = self.document()
        return found._replace(blocks=(*found.blocks, Heading("Charts"), *chart(self.rows), *self.charts))

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return to_json(self.shape, self.rows)


def times(found: Seconds) -> str:
    """A ratio, fused to eager, as 1.07x to 1.35x."""
    low, high = ratio(found.fused), ratio(found.eager)
    return low if low == high else f"{low} to {high}"


def document(shape: str, rows: Sequence[Costs], *, sites: bool = False) -> Document:
    """Everything about some methods on one shape; see `CostTable`."""
    plain, deployment, profile = rows[0], rows[0].deployment, rows[0].profile
    blocks: list[Block] = [
        Prose(_shape_line(plain) + " " + _deployment_line(deployment, profile)),
        Heading("In short"),
        Items(tuple(map(verdict, rows[1:])) or (verdict(plain),)),
        Heading("Parameters and operations"),
        _counts(rows),
        Heading("Bytes"),
        _bytes(rows),
    ]
    if deployment.pipeline_stages > 1:
        blocks += [Heading("Across pipeline stages"), Prose(PIPELINE), _pipeline(rows)]
    blocks += [
        Heading("Memory of the fullest device in training"),
        _memory(rows),
        Heading("Time, as a ratio to the plain residual"),
        _times(rows),
        Prose(assumptions(profile, deployment)),
    ]
    if sites:
        blocks += [Heading("Bytes per token at each site, eager / fused"), _sites(rows)]
    return Document(f"What methods cost on {shape}", tuple(blocks))


PIPELINE = (
    "Bytes per token of one forward pass; gradients take the same way back. Cached: a stage keeps what it has from its "
    "earlier virtual stages."
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


def verdict(row: Costs) -> str:
    """One method in a few sentences."""
    plain, device = row.plain, row.profile.memory
    room = f"{si(row.memory.total)} of {si(device)}"
    if row is plain:
        line = (
            f"**{row.label}**: {si(row.training.total, 'FLOP')} per token in training; it keeps "
            f"{si(row.activations)} of activations where nothing is recomputed, and {si(row.kept.attention)} "
            "of keys and values between tokens. "
        )
        return line + (f"It fits: {room}." if row.fits else f"It does not fit: {room}{_remedy(row)}.")
    added = row.forward.stream + row.forward.mixer
    kept = row.kept.local + row.kept.stream
    line = (
        f"**{row.label}**: {increase(row.parameters_added / plain.parameters.total)} parameters, "
        f"{increase(added / (row.forward.total - added))} operations; training takes {times(row.train)} "
        f"(fused to eager), decoding {times(row.decode)}; it leaves "
        f"{row.activations / plain.activations:.2f}x the activations where nothing is recomputed; between tokens it "
        f"keeps {si(kept) if kept else 'nothing'} beside {si(row.kept.attention)} of keys and values. "
    )
    if row.deployment.pipeline_stages > 1:
        pipeline, bare = row.pipeline, plain.pipeline.whole
        line += (
            f"Pipeline traffic is {pipeline.cached / bare:.3g} times the plain residual's when cached, "
            f"{pipeline.whole / bare:.3g} times when forwarded whole. "
        )
    if row.fits:
        return f"{line}It fits: {room}; the plain residual takes {si(plain.memory.total)}."
    also = f"the plain residual {'does' if plain.fits else 'does not either'} ({si(plain.memory.total)})"
    return f"{line}It does not fit: {room}; {also}{_remedy(row)}."


def _remedy(row: Costs) -> str:
    """What recomputing would bring."""
    order = ("none", "block", "full")
    for recompute in order[order.index(row.deployment.recompute) + 1 :]:
        needed = row.memory_with(dataclasses.replace(row.deployment, recompute=recompute)).total
        if needed <= row.profile.memory:
            return f"; with recompute {recompute} it does, {si(needed)}"
    weights = row.memory.weights + row.memory.gradients + row.memory.optimizer
    if weights > row.profile.memory:
        return f"; weights, gradients and optimiser alone are {si(weights)}: use more devices"
    return "; recomputing is not enough: use a smaller micro-batch or more devices"


def _counts(rows: Sequence[Costs]) -> Table:
    cells = []
    for row in rows:
        added = row.forward.stream + row.forward.mixer
        cells.append(
            (
                row.label,
                whole(row.parameters_added),
                increase(row.parameters_added / row.plain.parameters.total),
                si(row.forward.total, "FLOP"),
                increase(added / (row.forward.total - added)),
                si(row.training.total, "FLOP"),
            )
        )
    headers = ("method", "parameters added", "share", "forward per token", "added", "training per token")
    return table(headers, cells)


def _bytes(rows: Sequence[Costs]) -> Table:
    headers = (
        *("method", "stream per token, eager", "fused", "activations of a micro-batch", "live state, training"),
        *("live state, prefill", "keys and values", "rings", "stream's memory"),
    )
    cells = [
        (
            row.label,
            *(si(row.traffic.eager), si(row.traffic.fused), si(row.activations)),
            *(si(row.live_training), si(row.live_prefill)),
            *(si(part) for part in row.kept),
        )
        for row in rows
    ]
    return table(headers, cells)


def _pipeline(rows: Sequence[Costs]) -> Table:
    headers = ("method", "tensors at the last", "busiest boundary, whole", "cached", "all boundaries, whole", "cached")
    cells = [
        (
            row.label,
            str(len(row.pipeline.boundaries[-1].tensors)),
            *map(si, (row.pipeline.worst_whole, row.pipeline.worst_cached, row.pipeline.whole, row.pipeline.cached)),
        )
        for row in rows
    ]
    return table(headers, cells)


def _memory(rows: Sequence[Costs]) -> Table:
    headers = ("method", "stage", "weights", "gradients", "optimiser", "activations", "backward pass", "all")
    cells = [
        (
            row.label,
            str(row.memory.stage),
            *map(si, (*row.memory[1:], row.memory.total)),
            f"{'yes' if row.fits else 'no'}, {si(row.profile.memory)}",
        )
        for row in rows
    ]
    return table((*headers, Column("fits", number=False)), cells)


def _times(rows: Sequence[Costs]) -> Table:
    ratios = [f"{name}, {kernels}" for name in ("train", "prefill", "decode") for kernels in ("fused", "eager")]
    staged = rows[0].deployment.pipeline_stages > 1
    headers = ("method", *ratios, "training pass of a stage, fused" if staged else "training pass, fused")
    cells = [
        (
            row.label,
            *(f"{n:.3f}" for pair in (row.train, row.prefill, row.decode) for n in (pair.fused, pair.eager)),
            seconds(row.train_time.fused),
        )
        for row in rows
    ]
    return table(headers, cells)


def assumptions(profile: Profile, deployment: Deployment) -> str:
    """What an estimate rests on."""
    if profile.clock is not None:
        unknown = sorted(profile.clock.unknown)
        rest = f"; not measured and estimated from rates: {', '.join(unknown)}" if unknown else ""
        return (
            f"Eager: {len(profile.clock.calls)} distinct calls as {profile.source}{rest}. Fused: at the bandwidth of a "
            f"copy, {profile.bandwidth / 1e9:.3g} GB/s."
        )
    e = profile.efficiency
    transfers = "; transfers between devices are not hidden behind computing" if deployment.chunks > 1 else ""
    return (
        f"Estimate for {profile.title}: {e['matmul']:.0%} of {profile.matmul[deployment.dtype] / 1e12:,.0f} TFLOPS, "
        f"{e['bandwidth']:.0%} of {profile.bandwidth / 1e12:.3g} TB/s, {e['link']:.0%} of "
        f"{profile.link / 1e9:.0f} GB/s between devices, {profile.launch * 1e6:.0f} us per kernel{transfers}. "
        "Eager: every operation of this library is a kernel. Fused: matrix products and one kernel between two of "
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
            line.append(f"{si(found[0].eager)} / {si(found[0].fused)}" if found else NOTHING)
        cells.append(tuple(line))
    headers = ("site", *(row.label for row in rows))
    return table(headers, cells)


def chart(rows: Sequence[Costs]) -> tuple[Chart, ...]:
    """Times and memory beside each other, as bars."""
    kinds = [f"{name}, {way}" for name in ("train", "prefill", "decode") for way in ("fused", "eager")]
    panels = []
    for kind in kinds:
        name, _, way = kind.partition(", ")
        marks = tuple(Mark(row.label, getattr(getattr(row, name), way)) for row in rows)
        choice = {"time of": name, "kernels": way}
        panels.append(Panel("bars", kind, Axis("ratio to the plain residual", "times"), Axis(), marks, choice=choice))
    times_of = Chart("times", "Time as a ratio to the plain residual", tuple((panel,) for panel in panels))
    parts = rows[0].memory._fields[1:]
    marks = tuple(Mark(row.label, getattr(row.memory, part), group=part) for row in rows for part in parts)
    bars = Panel("bars", "", Axis("bytes", "bytes"), Axis(), marks)
    return (times_of, Chart("memory", "Memory of the fullest device in training", ((bars,),)))


def to_json(shape: str, rows: Sequence[Costs]) -> dict[str, Any]:
    """Everything, as plain values."""
    import twoaxis

    deployment, profile = rows[0].deployment, rows[0].profile
    return {
        "twoaxis": twoaxis.__version__,
        "shape": {"name": shape, **_shape(rows[0])},
        "deployment": dataclasses.asdict(deployment),
        "hardware": profile.to_dict(),
        "methods": [row_json(row) for row in rows],
        "assumptions": assumptions(profile, deployment),  # after the rows: it says which calls were not measured
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
            "eager": row.traffic.eager,
            "fused": row.traffic.fused,
            "sites": [site._asdict() for site in row.traffic.sites],
        },
        "activations": row.activations,
        "live": {"numbers": row.live_numbers, "training": row.live_training, "prefill": row.live_prefill},
        "kept": {**row.kept._asdict(), "total": row.kept.total},
        "pipeline": {
            "stages": pipeline.stages,
            "virtual": pipeline.virtual,
            "whole": pipeline.whole,
            "cached": pipeline.cached,
            "boundaries": [b._asdict() for b in pipeline.boundaries],
            "held": list(pipeline.held),
        },
        "memory": {**row.memory._asdict(), "total": row.memory.total, "fits": row.fits},
        "seconds": {name: getattr(row, f"{name}_time")._asdict() for name in ("train", "prefill", "decode")},
        "ratio": {name: getattr(row, name)._asdict() for name in ("train", "prefill", "decode")},
    }
