"""Costs as tables for people and as one JSON document for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
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

PASSES = ("train", "prefill", "decode")
TIMES = tuple((name, way) for name in PASSES for way in ("fused", "eager"))


@dataclass(frozen=True)
class CostTable(Showable):
    """What some methods cost on one shape."""

    shape: str  # its name
    costs: Sequence[Costs]  # from one `CostModel`; the first is the plain residual
    sites: bool = False  # with the bytes of every site
    charts: tuple[Chart, ...] = ()  # besides the tables, on a page

    def document(self) -> Document:
        """Everything about them."""
        rows, plain = self.costs, self.costs[0]
        staged = plain.deployment.pipeline_stages > 1
        shown: dict[str, Sequence[Block]] = {}
        if not plain.unmetered:
            shown["In short"] = [Items(tuple(map(verdict, rows[1:])) or (verdict(plain),))]
        said = not_counted(plain)
        shown["Parameters and operations"] = [_table(rows, COUNTS), *([Prose(said)] if said else ())]
        if not plain.unmetered:
            shown["Bytes"] = [_table(rows, BYTES)]
            if staged:
                shown["Across pipeline stages"] = [Prose(PIPELINE), _table(rows, CROSSING)]
            shown["Memory of the fullest device in training"] = [_table(rows, MEMORY)]
            what = "training pass of a stage, fused" if staged else "training pass, fused"
            taken = _table(rows, (*RATIOS, (what, lambda row: seconds(row.train_time.fused))))
            rests_on = Prose(assumptions(plain.profile, plain.deployment))
            shown["Time, as a ratio to the plain residual"] = [taken, rests_on]
            if self.sites:
                shown["Bytes per token at each site, eager / fused"] = [_sites(rows)]
        about = Prose(_shape_line(plain) + " " + deployment_line(plain.deployment, plain.profile))
        blocks = [block for heading, inside in shown.items() for block in (Heading(heading), *inside)]
        return Document(f"What methods cost on {self.shape}", (about, *blocks))

    def page(self) -> Document:
        """The same with charts."""
        found = self.document()
        return found._replace(blocks=(*found.blocks, Heading("Charts"), *chart(self.costs), *self.charts))

    def rows(self) -> list[dict[str, Any]]:
        """A row of numbers for each method: the fields of `to_dict`, inner ones behind a dot, sites left out."""
        return [dict(_flat(row_json(row))) for row in self.costs]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain values."""
        import twoaxis

        rows, plain, methods = self.costs, self.costs[0], ("stream", "mixer", "placement")
        fields = dataclasses.asdict(plain.shape)
        return {
            "twoaxis": twoaxis.__version__,
            "shape": {"name": self.shape, **{k: v for k, v in fields.items() if not k.startswith(methods)}},
            "deployment": dataclasses.asdict(plain.deployment),
            "hardware": plain.profile.to_dict(),
            "methods": [row_json(row) for row in rows],
            "not_counted": not_counted(plain) or None,
            # after the rows: it says which calls were not measured
            "assumptions": assumptions(plain.profile, plain.deployment),
        }


def _flat(fields: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        elif not isinstance(value, list | tuple):
            yield f"{before}{name}", value


def times(found: Seconds) -> str:
    """A ratio, fused to eager, as 1.07x to 1.35x."""
    low, high = ratio(found.fused), ratio(found.eager)
    return low if low == high else f"{low} to {high}"


def not_counted(plain: Costs) -> str:
    """What the numbers of a family's model leave out, in words."""
    said = []
    if plain.uncounted:
        names = ", ".join(plain.uncounted)
        said.append(f"Not counted: what {names} does besides matrix products; operations are those of products alone.")
    if plain.unmetered:
        said.append(
            f"Not counted: bytes, memory and times, for the model has no pass on meta tensors ({plain.unmetered})."
        )
    return " ".join(said)


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


def deployment_line(d: Deployment, profile: Profile) -> str:
    """Devices, precision and batch sizes in a sentence."""
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
    kept = row.kept.local + row.kept.stream
    line = (
        f"**{row.label}**: {increase(row.parameters_added / plain.parameters.total)} parameters, "
        f"{increase(_added(row))} operations; training takes {times(row.train)} "
        f"(fused to eager), decoding {times(row.decode)}; it leaves "
        f"{row.activations / plain.activations:.2f}x the activations where nothing is recomputed; between tokens it "
        f"keeps {si(kept) if kept else 'nothing'} beside {si(row.kept.attention)} of keys and values. "
    )
    if row.deployment.pipeline_stages > 1:
        pipeline, bare = row.pipeline, plain.pipeline.whole
        cached, whole = (f"{sent / bare:.3g} times" for sent in (pipeline.cached, pipeline.whole))
        split = "" if cached == whole else f" when cached, {whole} when forwarded whole"
        line += f"Pipeline traffic is {cached} the plain residual's{split}. "
    if row.fits:
        return f"{line}It fits: {room}; the plain residual takes {si(plain.memory.total)}."
    also = f"the plain residual {'does' if plain.fits else 'does not either'} ({si(plain.memory.total)})"
    return f"{line}It does not fit: {room}; {also}{_remedy(row)}."


def _remedy(row: Costs) -> str:
    """What recomputing would bring."""
    weights = row.memory.weights + row.memory.gradients + row.memory.optimizer
    if weights > row.profile.memory:  # first: it needs no other pass
        return f"; weights, gradients and optimiser alone are {si(weights)}: use more devices"
    order = ("none", "block", "full")
    for recompute in order[order.index(row.deployment.recompute) + 1 :]:
        needed = row.memory_with(dataclasses.replace(row.deployment, recompute=recompute)).total
        if needed <= row.profile.memory:
            return f"; with recompute {recompute} it does, {si(needed)}"
    return "; recomputing is not enough: use a smaller micro-batch or more devices"


def _added(row: Costs) -> float:
    """Operations of the stream and the mixer, as a part of all others."""
    added = row.forward.stream + row.forward.mixer
    return added / (row.forward.total - added)


Fields = Sequence[tuple[str | Column, Callable[[Costs], str]]]
"""Columns: what stands over each, and its cell of a row."""
COUNTS: Fields = (
    ("parameters added", lambda row: whole(row.parameters_added)),
    ("share", lambda row: increase(row.parameters_added / row.plain.parameters.total)),
    ("forward per token", lambda row: si(row.forward.total, "FLOP")),
    ("added", lambda row: increase(_added(row))),
    ("training per token", lambda row: si(row.training.total, "FLOP")),
)
BYTES: Fields = (
    ("stream per token, eager", lambda row: si(row.prefilled.eager)),
    ("fused", lambda row: si(row.prefilled.fused)),
    ("activations of a micro-batch", lambda row: si(row.activations)),
    ("live state, training", lambda row: si(row.live.training)),
    ("live state, prefill", lambda row: si(row.live.prefill)),
    ("keys and values", lambda row: si(row.kept.attention)),
    ("rings", lambda row: si(row.kept.local)),
    ("stream's memory", lambda row: si(row.kept.stream)),
)
CROSSING: Fields = (
    ("tensors at the last", lambda row: str(len(row.pipeline.boundaries[-1].tensors))),
    ("busiest boundary, whole", lambda row: si(row.pipeline.worst_whole)),
    ("cached", lambda row: si(row.pipeline.worst_cached)),
    ("all boundaries, whole", lambda row: si(row.pipeline.whole)),
    ("cached", lambda row: si(row.pipeline.cached)),
)
MEMORY: Fields = (
    ("stage", lambda row: str(row.memory.stage)),
    ("weights", lambda row: si(row.memory.weights)),
    ("gradients", lambda row: si(row.memory.gradients)),
    ("optimiser", lambda row: si(row.memory.optimizer)),
    ("activations", lambda row: si(row.memory.activations)),
    ("backward pass", lambda row: si(row.memory.backward)),
    ("all", lambda row: si(row.memory.total)),
    (Column("fits", number=False), lambda row: f"{'yes' if row.fits else 'no'}, {si(row.profile.memory)}"),
)
RATIOS: Fields = tuple(
    (f"{name}, {way}", lambda row, name=name, way=way: f"{getattr(getattr(row, name), way):.3f}") for name, way in TIMES
)


def _table(rows: Sequence[Costs], fields: Fields) -> Table:
    """A line for each method."""
    cells = [(row.label, *(cell(row) for _, cell in fields)) for row in rows]
    return table(("method", *(header for header, _ in fields)), cells)


def assumptions(profile: Profile, deployment: Deployment) -> str:
    """What an estimate rests on."""
    if profile.clock is not None:
        unknown = sorted(profile.clock.unknown)
        rest = f"; not measured and estimated from rates: {', '.join(unknown)}" if unknown else ""
        return (
            f"Eager: {len(profile.clock.calls)} distinct calls as {profile.source}{rest}. Fused: at the bandwidth of a "
            f"copy, {profile.bandwidth / 1e9:.3g} GB/s."
        )
    e, peak = profile.efficiency, getattr(profile.matmul, deployment.dtype)
    transfers = "; transfers between devices are not hidden behind computing" if deployment.chunks > 1 else ""
    return (
        f"Estimate for {profile.title}: {e.matmul:.0%} of {peak / 1e12:,.0f} TFLOPS, "
        f"{e.bandwidth:.0%} of {profile.bandwidth / 1e12:.3g} TB/s, {e.link:.0%} of "
        f"{si(profile.link)}/s between devices, {profile.launch * 1e6:.0f} us per kernel{transfers}. "
        "Eager: every operation of this library is a kernel. Fused: matrix products and one kernel between two of "
        "them. A training pass is forward and backward of one micro-batch, without the optimiser and without pipeline "
        "bubbles, which are the same for all methods."
    )


def _sites(rows: Sequence[Costs]) -> Table:
    """Sites as rows; a method without a site there has a dash."""
    by_site = [{(s.block, s.kind): f"{si(s.eager)} / {si(s.fused)}" for s in row.prefilled.sites} for row in rows]
    lines = [(f"{at[0]} {at[1]}", *(found.get(at, NOTHING) for found in by_site)) for at in max(by_site, key=len)]
    return table(("site", *(row.label for row in rows)), lines)


def chart(rows: Sequence[Costs]) -> tuple[Chart, ...]:
    """Times and memory beside each other, as bars."""
    panels = []
    for name, way in TIMES:
        marks = tuple(Mark(row.label, getattr(getattr(row, name), way)) for row in rows)
        axis, choice = Axis("ratio to the plain residual", "times"), {"time of": name, "kernels": way}
        panels.append(Panel("bars", f"{name}, {way}", axis, Axis(), marks, choice=choice))
    times_of = Chart("times", "Time as a ratio to the plain residual", tuple((panel,) for panel in panels))
    parts = rows[0].memory._fields[1:]
    marks = tuple(Mark(row.label, getattr(row.memory, part), group=part) for row in rows for part in parts)
    bars = Panel("bars", "", Axis("bytes", "bytes"), Axis(), marks)
    return (times_of, Chart("memory", "Memory of the fullest device in training", ((bars,),)))


def _summed(parts: Any, **more: Any) -> dict[str, Any]:
    return {**parts._asdict(), "total": parts.total, **more}


def row_json(row: Costs) -> dict[str, Any]:
    """One method; of a model that has no pass on meta tensors its counts alone."""
    pipeline, given = row.pipeline, row.shape
    counts = {
        "label": row.label,
        "stream": given.stream,
        "stream_options": dict(given.stream_options or {}),
        "mixer": given.mixer,
        "mixer_options": dict(given.mixer_options or {}),
        "parameters": _summed(row.parameters, added=row.parameters_added),
        "forward_flops": _summed(row.forward),
        "training_flops": _summed(row.training),
        "live": row.live._asdict(),
        "pipeline": {
            **{name: getattr(pipeline, name) for name in ("stages", "virtual", "whole", "cached")},
            "boundaries": [b._asdict() for b in pipeline.boundaries],
            "held": list(pipeline.held),
        },
    }
    if row.plain.unmetered:
        return counts
    moved = row.prefilled
    return counts | {
        "traffic": {"eager": moved.eager, "fused": moved.fused, "sites": [site._asdict() for site in moved.sites]},
        "activations": row.activations,
        "kept": _summed(row.kept),
        "memory": _summed(row.memory, fits=row.fits),
        "seconds": {name: getattr(row, f"{name}_time")._asdict() for name in PASSES},
        "ratio": {name: getattr(row, name)._asdict() for name in PASSES},
    }
