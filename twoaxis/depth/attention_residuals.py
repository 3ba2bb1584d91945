"""Attention Residuals: every sub-layer reads a softmax-weighted average of all earlier sub-layer outputs.

Kimi Team: Attention Residuals, arXiv 2603.15031 (2026). Runs in Kimi-K3. Code agreed with: Kimi-K3's model file,
flash-linear-attention, tokenbender/nanogpt-attnres-repro (all equal to 1e-14).

    v_0 = embedding, v_i = f_i(h_i)                          sources: sub-layer outputs, not running sums
    r_i = ( mean(v_i²) + eps )^(-1/2)
    s_i = < w_l ⊙ g_l , v_i r_i >                            fixed query w_l against RMS-normalised keys
    h_l = Σ_i softmax_i(s) v_i                               values are the raw sources

    block form: sources are b_0 = embedding, the sums b_n over runs of `block_size` sub-layers, and the sum of the
    current run so far, if it has one (an absent partial is absent, not zero)

    b_0 ─┬──────────┬───────────┬──────────┬───────────────┐
         ▼          ▼           ▼          ▼               ▼
       site 0     site 1      site 2     site 3    ...    out
         │ y_0      ▲│ y_1      ▲ ▲│ y_2   ▲ ▲
         └──partial─┘└──► b_1 ──┴─┼┼───────┘ │
                                  └┴─partial─┘

There is no other residual path: h_l replaces the running sum. With w = 0 (the initial value) every read is the plain
average, so the network equals the plain one up to the pre-norm's epsilon: an average over n sources multiplies the
effective epsilon by n², which is a large error for small states. `read="sum"` reads n times the average instead and is
exact to rounding.

Because the queries do not depend on the input, a finished source gets its logits for all later sites from one small
matrix product; `evaluation="two_phase"` also batches the reads of finished sources over a group of sites and merges
the rest in by their log-sum-exp, which is the same algebra.

Readings where the paper is silent: the input-dependent query is a map of the newest source; sigmoid weights are not
normalised; input-independent scalars pass through the softmax; heads split query, keys and values into channel groups
under one full-width RMS; the depth window counts sources besides the embedding and also holds for the final read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from twoaxis.base.method import Card, ParameterGroup, Published
from twoaxis.base.options import Count, NotNegative, Options
from twoaxis.depth.bank import Ahead, Bank, Slot, decodes, spent
from twoaxis.depth.site import Site
from twoaxis.depth.stream import Apply, Cost, Layout, Neutral, Seen, Stream, Tokens
from twoaxis.kernels.precision import routing_dtype, widen
from twoaxis.kernels.softmax_read import open_source, softmax_and_lse, softmax_read, token_read
from twoaxis.kernels.weighted_sum import rms_logits, share, source_dots, weighted_sum


@dataclass(frozen=True, kw_only=True)
class AttentionResidualsConfig(Options):
    """Options of Attention Residuals; the defaults are the full form of the paper."""

    block_size: Count = 1
    """Sub-layers summed into one source; 1 is the full form. Kimi-K3 counts Transformer layers: twice as many."""
    window: Count | None = None
    """How many of the newest sources are read; None is all of them."""
    keep_first: bool = True
    """The embedding is always read and does not count in the window."""
    overflow: Literal["drop", "sum"] = "drop"
    """Sources that leave the window are forgotten, or summed into one more source."""
    read: Literal["average", "sum"] = "average"
    """The published average, or its multiple that equals the plain residual exactly at the start."""
    evaluation: Literal["direct", "two_phase"] = "direct"
    """Each read on its own, or reads of finished sources batched over a group of sites."""
    group: Count | None = None
    """Sub-layers per two-phase group; None is block_size, or about sqrt(sub-layers) when that is 1."""
    query: Literal["static", "input", "none"] = "static"
    """A learned vector per site; a learned map of the newest source; or no query, just a scalar per source."""
    weighting: Literal["softmax", "sigmoid"] = "softmax"
    """How logits become weights."""
    key_norm: bool = True
    """RMS-normalise the keys."""
    heads: Count = 1
    """Channel groups with weights of their own."""
    scale: float = 1.0
    """Of the logits; the paper has none."""
    eps: NotNegative = 1e-6
    """Inside the keys' mean square; Kimi-K3 uses 1e-5."""

    def validate(self) -> None:
        """Rules between fields."""
        if self.evaluation == "two_phase":
            if self.window is not None or self.query != "static" or self.weighting != "softmax":
                raise ValueError(
                    "two_phase needs window=None, query='static' and weighting='softmax', got "
                    f"window={self.window}, query={self.query!r}, weighting={self.weighting!r}"
                )
            if self.group is not None and self.group % self.block_size:
                raise ValueError(f"group ({self.group}) must be a multiple of block_size ({self.block_size})")
        if self.query == "none" and self.heads != 1:
            raise ValueError(f"scalar weights have no heads: query='none' needs heads=1, got {self.heads}")


class AttentionResiduals(Stream):
    """Softmax reads over sub-layer outputs."""

    name = "attention_residuals"
    Config = AttentionResidualsConfig
    config: AttentionResidualsConfig
    variants = (
        {},
        {"block_size": 3},
        {"block_size": 2, "read": "sum", "evaluation": "two_phase"},
        {"evaluation": "two_phase", "group": 3, "heads": 2},
        {"window": 2},
        {"block_size": 2, "window": 2, "overflow": "sum", "read": "sum"},
        {"window": 3, "keep_first": False, "overflow": "sum"},
        {"query": "input", "block_size": 2, "heads": 2},
        {"query": "none", "read": "sum"},
        {"weighting": "sigmoid", "key_norm": False, "read": "sum"},
    )
    card = Card(
        title="Attention Residuals",
        axis="depth",
        source="sub-layer output, or the sum over a run of them; slot 0 is the embedding",
        query="a learned vector per site",
        key="RMS-normalised sources",
        value="raw sources",
        literal_qkv=True,
        normaliser="softmax",
        adaptivity="per token",
        window="all earlier sources (block form: sums of S sub-layers)",
        granularity="per sub-layer",
        ways="one",
        injection="replaces the input; there is no other residual path",
        sharing="none over depth, shared by all tokens",
        gating="-",
        depth_state="every source so far",
        token_state="none",
        paper="Kimi Team, Attention Residuals, arXiv 2603.15031",
        year=2026,
        quirks=(
            "The first site's query never gets a gradient: it has one source.",
            "At the start the read is an average, so the pre-norm's epsilon weighs n² times more than in the plain "
            "model; "
            "read='sum' avoids it.",
            "Block sizes count sub-layers here and in the paper, Transformer layers in Kimi-K3.",
            "The partial sum of a run that has not begun is absent, not a zero source.",
        ),
        published=(
            Published(
                "MoE 194M to 528M, validation loss baseline/block/full: 1.931/1.909/1.899 ... "
                "1.719/1.693/1.692; 1.25x compute",
                "arXiv 2603.15031, table 2 and fits",
            ),
            Published(
                "Depth window of 8 outputs and the embedding: 1.764 against 1.737 full, 1.766 baseline", "table 4"
            ),
            Published(
                "Data-matched MoE d512/d768: throughput-adjusted speed-up 1.01 / 1.19", "marin issue 9290 (third party)"
            ),
            Published(
                "A reviewer could not replicate a gain and ran out of memory at d18",
                "nanochat pull request 646 (third party)",
            ),
        ),
    )

    def __init__(self, config: AttentionResidualsConfig, layout: Layout) -> None:
        super().__init__(config, layout)
        width, used = layout.width, layout.used()
        if width % config.heads:
            raise ValueError(f"heads ({config.heads}) must divide the width ({width})")
        self.rows = {site.index: row for row, site in enumerate(used)}
        """Row of each reading site in the stacked parameters."""
        self.rows_before = [sum(u.index < i for u in used) for i in range(len(layout.sites) + 1)]
        """For each site: how many reading sites come before it."""
        numbers = range(len(layout.sublayers) // config.block_size + 1)
        self.rows_reading = {n: self._rows_reading(n) for n in numbers}
        """For each finished source: rows of the sites that read it, which are consecutive."""
        self.eps = config.eps if config.key_norm else None
        self.plain_sites = len(used) < len(layout.sites)
        root = max(1, round(math.sqrt(len(layout.sublayers))))  # where two-phase reads of the full form touch fewest
        self.group = config.group or (config.block_size if config.block_size > 1 else root)
        self.counts = {site.index: self._count(site) for site in used}
        """How many sources each reading site has."""
        self.register_parameter("query", None)
        self.register_parameter("query_map", None)
        self.register_parameter("norm_weight", None)
        self.scalars = nn.ParameterList()
        if config.query == "static":
            self.query = nn.Parameter(torch.empty(len(used), width))
        elif config.query == "input":
            self.query_map = nn.Parameter(torch.empty(len(used), width, width))
        else:
            self.scalars.extend(nn.Parameter(torch.empty(n)) for n in self.counts.values())
        if config.query != "none" and config.key_norm:
            self.norm_weight = nn.Parameter(torch.empty(len(used), width))

    def definition(self, x: Tensor, apply: Apply) -> Tensor:
        """Sources are the embedding, the sums of finished runs of sub-layers and the sum of the run begun."""
        runs: list[list[Tensor]] = [[x], []]
        for site in self.sites:
            runs[-1].append(apply(site, Seen(self._defined_read(runs, site.index))).y)
            if len(runs[-1]) == self.config.block_size:
                runs.append([])
        return self._defined_read(runs, self.layout.out.index)

    def _defined_read(self, runs: list[list[Tensor]], row: int) -> Tensor:
        """The read of one site, for `definition`: everything is stacked anew."""
        sources = [torch.stack(run).sum(0) for run in runs if run]
        first, rest = (sources[:1], sources[1:]) if self.config.keep_first else ([], sources)
        window = self.config.window or len(sources)
        lost, kept = rest[:-window], rest[-window:]
        if lost and self.config.overflow == "sum":
            first = [*first, torch.stack(lost).sum(0)]
        v = torch.stack([*first, *kept])  # (S, B, T, D)
        config, heads = self.config, (self.config.heads, -1)
        if config.query == "none":
            logits = self.scalars[row][:, None, None, None]
        else:
            keys = v
            if self.norm_weight is not None:
                keys = v / torch.sqrt(v.square().mean(-1, keepdim=True) + config.eps) * self.norm_weight[row]
            w = v[-1] @ self.query_map[row].T if self.query_map is not None else self.query[row]
            logits = config.scale * (w * keys).unflatten(-1, heads).sum(-1)  # (S, B, T, H)
        weights, full = (logits.softmax(0), len(v)) if config.weighting == "softmax" else (logits.sigmoid(), 2)
        weights = full * weights if config.read == "sum" else weights
        return (weights.unsqueeze(-1) * v.unflatten(-1, heads)).sum(0).flatten(-2)

    def reset_parameters(self, generator: torch.Generator | None = None, std: float = 0.02) -> None:
        """Queries and scalars zero, the key norm's scale one: every read is the plain average."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.fill_(1.0 if name == "norm_weight" else 0.0)

    def neutral_(self) -> None:
        """The initial values are neutral, unless the window forgets sources."""
        if self.neutral == "none":
            super().neutral_()
        self.reset_parameters()

    @property
    def neutral(self) -> Neutral:
        """The sum form is exact to rounding; the average rescales the stream; a forgetful window is never plain."""
        if self.config.overflow == "drop" and any(self._lost(site) for site in self.layout.used()):
            return "none"
        return "rounding" if self.config.read == "sum" else "scale"

    # Which sources a site reads: a function of its index alone.

    def _numbers(self, index: int) -> range:
        """Numbers of the finished sources that the window leaves at site `index`."""
        size = self.config.block_size
        finished, newest = index // size, -(-index // size)  # the partial, if there is one, counts as newest
        first = 0 if self.config.window is None else newest - self.config.window + 1
        return range(max(first, 1 if self.config.keep_first else 0), finished + 1)

    def _lost(self, site: Site) -> bool:
        """Whether sources have left the window at `site`."""
        return self._numbers(site.index).start > (1 if self.config.keep_first else 0)

    def _overflows(self, site: Site) -> bool:
        return self.config.overflow == "sum" and self._lost(site)

    def _has_part(self, index: int) -> bool:
        return index % self.config.block_size != 0

    def sources(self, site: Site) -> tuple[str, ...]:
        """The sources `site` reads, oldest first."""
        if not self.uses(site):
            return ()
        unit = "sub-layer" if self.config.block_size == 1 else "run"
        names = ["embedding"] if self.config.keep_first else []
        if self._overflows(site):
            names.append("overflow")
        names += ["embedding" if n == 0 else f"{unit} {n - 1}" for n in self._numbers(site.index)]
        return (*names, "partial") if self._has_part(site.index) else tuple(names)

    def _count(self, site: Site) -> int:
        return len(self.sources(site))

    # The reads.

    def _queries(self) -> Tensor | None:
        """Folded queries w ⊙ g · scale of every site, (n, H, D/H), if they are static."""
        if self.query is None:
            return None
        u = widen(self.query) if self.config.scale == 1.0 else widen(self.query) * self.config.scale
        if self.norm_weight is not None:
            u = u * widen(self.norm_weight)
        return u.unflatten(-1, (self.config.heads, -1))

    def _single(self, x: Tensor) -> bool:
        """Whether this pass decodes, and its reads are such that they can be made in few calls."""
        config = self.config
        return config.query == "static" and config.weighting == "softmax" and config.heads == 1 and decodes(x)

    def _slot(self, x: Tensor, number: int, index: int, queries: Tensor | None, single: bool) -> Slot:
        """A finished source with its logits for every site from `index` on that will read it."""
        rows = self.rows_reading[number]
        row = max(rows.start, self.rows_before[index])
        if queries is None or single or row >= rows.stop:
            return Slot(number, x, share(self._by_heads(x)), (), row)
        return Slot(number, x, *open_source(x, queries[row : rows.stop], self.eps), row)

    def _rows_reading(self, number: int) -> range:
        pinned = number == 0 and self.config.keep_first
        rows = [row for i, row in self.rows.items() if pinned or number in self._numbers(i)]
        return range(rows[0], rows[-1] + 1) if rows else range(0)

    def _by_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.config.heads, -1))

    def _logit(self, x: Tensor, row: int, queries: Tensor | None) -> Tensor:
        """Of one source for one site: (..., H)."""
        assert queries is not None
        return rms_logits(x, queries[row : row + 1], self.eps)[..., 0]

    def _gather(self, value: Bank, site: Site, oldest: int = -1) -> tuple[list[Tensor], list[Tensor]]:
        """Sources of `site` numbered above `oldest`, by heads, and their logits (..., H) where queries are static."""
        row = self.rows[site.index]
        static = self.config.query == "static"
        sources, logits = [], []
        for slot in value.slots:
            if slot.number > oldest:
                sources.append(slot.shared)
                if static:
                    kept = slot.logits[row - slot.row] if slot.logits else self._logit(slot.x, row, value.queries)
                    logits.append(kept)
        if value.overflow is not None:
            sources.insert(1 if self.config.keep_first else 0, self._by_heads(value.overflow))
            if static:
                logits.insert(1 if self.config.keep_first else 0, self._logit(value.overflow, row, value.queries))
        if value.part is not None:
            sources.append(self._by_heads(value.part))
            if static:
                logits.append(self._logit(value.part, row, value.queries))
        return sources, logits

    def _weigh(self, value: Bank, site: Site) -> tuple[list[Tensor], Tensor]:
        """The sources of `site` and their weights (..., H, S)."""
        sources, columns = self._gather(value, site)
        row, config = self.rows[site.index], self.config
        if config.query == "static":
            logits = torch.stack(columns, dim=-1)
        elif config.query == "input":
            logits = self._input_logits(sources, row)
        else:
            wide = routing_dtype(sources[0].dtype)
            logits = self.scalars[row].to(wide).expand(*sources[0].shape[:-1], -1)
        if config.weighting == "sigmoid":
            weights, scale = logits.sigmoid(), 2.0
        else:
            weights, scale = logits.softmax(-1), float(len(sources))
        return sources, weights * scale if config.read == "sum" else weights

    def _input_logits(self, sources: list[Tensor], row: int) -> Tensor:
        """Logits of a query made from the newest source: (..., H, S)."""
        assert self.query_map is not None
        flat = [s.flatten(-2) for s in sources]
        q = widen(flat[-1]) @ widen(self.query_map[row]).mT * self.config.scale
        if self.norm_weight is not None:
            q = q * widen(self.norm_weight[row])
        heads = (self.config.heads, -1)
        logits = source_dots(q.unflatten(-1, heads).unsqueeze(-2), [s.unflatten(-1, heads) for s in flat]).squeeze(-2)
        if not self.config.key_norm:
            return logits
        inverse = [torch.rsqrt(widen(s).square().mean(-1) + self.config.eps) for s in flat]
        return logits * torch.stack(inverse, dim=-1).unsqueeze(-2)

    def _mix(self, sources: list[Tensor], weights: Tensor) -> Tensor:
        """One way of sources by heads, with weights (..., H, S)."""
        return weighted_sum(sources, token=weights.unsqueeze(-2))[0].flatten(-2)

    def _scale(self, site: Site) -> float:
        """Of the average that a softmax read gives."""
        return float(self.counts[site.index]) if self.config.read == "sum" else 1.0

    def _token_read(self, value: Bank, site: Site) -> Tensor:
        """The read of one token at a time."""
        sources = [slot.x for slot in value.slots]
        if value.overflow is not None:
            sources.insert(1 if self.config.keep_first else 0, value.overflow)
        if value.part is not None:
            sources.append(value.part)
        if len(sources) == 1 or value.queries is None:
            return sources[0]
        return token_read(sources, value.queries[self.rows[site.index], 0], self.eps, self._scale(site))

    def _read(self, value: Bank, site: Site) -> Seen:
        if not self.uses(site):
            assert value.total is not None
            return Seen(value.total)
        if value.single:
            return Seen(self._token_read(value, site))
        if self.counts[site.index] == 1 and self.config.weighting == "softmax":
            return Seen(self._gather(value, site)[0][0].flatten(-2))  # the softmax of one logit is one
        if value.ahead is not None:
            return Seen(self._second_phase(value, site))
        if self.config.query == "static" and self.config.weighting == "softmax":
            sources, logits = self._gather(value, site)
            return Seen(softmax_read(sources, logits, self._scale(site)).flatten(-2))
        return Seen(self._mix(*self._weigh(value, site)))

    # Two phases: finished sources batched over a group of sites, then the rest merged in by log-sum-exp.

    def _first_phase(self, value: Bank, index: int) -> Bank:
        """Reads of the sources finished when the group of site `index` began, for its sites from `index` on."""
        if self.config.evaluation == "direct" or value.single:
            return value
        start = index // self.group * self.group
        finished = [slot for slot in value.slots if slot.number <= start // self.config.block_size]
        row = self.rows_before[index]
        stop = self.rows_before[min(start + self.group, len(self.layout.sites))]
        if len(finished) < 2 or row >= stop:
            return value._replace(ahead=None)
        columns = [torch.stack(slot.logits[row - slot.row : stop - slot.row], dim=-1) for slot in finished]
        logits = torch.stack(columns, dim=-1)  # (..., H, n, S)
        weights, lse = softmax_and_lse(logits)
        reads = weighted_sum([slot.shared for slot in finished], token=weights)
        return value._replace(ahead=Ahead(tuple(r.flatten(-2) for r in reads), lse, row))

    def _second_phase(self, value: Bank, site: Site) -> Tensor:
        """The merge: the batched read is one more source, its log-sum-exp the logit."""
        assert value.ahead is not None
        reads, lse, row = value.ahead
        start, position = site.index // self.group * self.group, self.rows[site.index] - row
        batched = reads[position]
        assert batched is not None
        sources, columns = self._gather(value, site, oldest=start // self.config.block_size)
        scale = self._scale(site)
        if not sources and scale == 1.0:
            return batched
        return softmax_read([self._by_heads(batched), *sources], [lse[..., position], *columns], scale).flatten(-2)

    # The state machine.

    def _open(self, x: Tensor, tokens: Tokens) -> Bank:
        queries, single = self._queries(), self._single(x)
        slot = self._slot(x, 0, 0, queries, single)
        bank = Bank((slot,), None, None, x if self.plain_sites else None, None, queries, single)
        return self._first_phase(bank, 0)

    def _write(self, value: Bank, site: Site, y: Tensor, seen: Seen, c: Seen) -> Bank:
        index, size = site.index + 1, self.config.block_size
        part = y if value.part is None else value.part + y
        total = None if value.total is None else value.total + y
        ahead = spent(value.ahead, self.rows.get(site.index))
        if index % size and self.config.window is None:  # inside a run nothing but its sum changes
            return Bank(value.slots, None, part, total, ahead, value.queries, value.single)
        slots, overflow = list(value.slots), value.overflow
        if index % size == 0:
            slots.append(self._slot(part, index // size, index, value.queries, value.single))
        stay = self._numbers(index)
        pinned = 0 if self.config.keep_first else -1
        kept = tuple(slot for slot in slots if slot.number in stay or slot.number == pinned)
        if self.config.overflow == "sum":
            for slot in slots:
                if slot.number not in stay and slot.number != pinned:
                    overflow = slot.x if overflow is None else overflow + slot.x
        bank = Bank(kept, overflow, part if index % size else None, total, ahead, value.queries, value.single)
        return self._first_phase(bank, index) if index % self.group == 0 else bank

    def _pack(self, value: Bank, site: Site) -> tuple[Tensor, ...]:
        rest = (value.overflow, value.part, value.total)
        return (*(slot.x for slot in value.slots), *(t for t in rest if t is not None))

    def _unpack(self, tensors: tuple[Tensor, ...], site: Site, tokens: Tokens) -> Bank:
        numbers = ([0] if self.config.keep_first else []) + list(self._numbers(site.index))
        self._packed(tensors, self._held(site), site)
        queue = iter(tensors)
        queries, single = self._queries(), self._single(tensors[0])
        slots = tuple(self._slot(next(queue), n, site.index, queries, single) for n in numbers)
        overflow = next(queue) if self._overflows(site) else None
        part = next(queue) if self._has_part(site.index) else None
        total = next(queue) if self.plain_sites else None
        return self._first_phase(Bank(slots, overflow, part, total, None, queries, single), site.index)

    def _weights(self, value: Bank, site: Site) -> Tensor | None:
        return self._weigh(value, site)[1] if self.uses(site) else None

    # What it declares.

    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        """Nothing is published; vectors and scalars are not decayed, the input-dependent query's map is."""
        names = [name for name, _ in self.named_parameters()]
        groups = [
            ParameterGroup(tuple(n for n in names if n != "query_map")),
            ParameterGroup(tuple(n for n in names if n == "query_map"), decay=True),
        ]
        return tuple(g for g in groups if g.names)

    def dead(self) -> dict[str, str]:
        """A softmax over one source is one whatever its logit: the site's row gets a gradient of exactly zero."""
        if self.config.weighting == "sigmoid":
            return {}
        lone = [self.rows[index] for index, n in self.counts.items() if n == 1]
        names = ["scalars.{}"] if self.config.query == "none" else [f"{n}[{{}}]" for n, _ in self.named_parameters()]
        return {name.format(row): "the site has one source, its softmax is constant" for row in lone for name in names}

    def cost(self) -> Cost:
        """Per source read a dot product and a multiply-add; per logit's source one mean square; sums; the merges."""
        config, layout, used = self.config, self.layout, self.layout.used()
        counts = {site: self.counts[site.index] for site in used}
        mixed = [n for n in counts.values() if n > 1 or config.weighting == "sigmoid"]  # one source is a plain copy
        reads, norm = sum(mixed), 2 * config.key_norm
        flops = 2 * reads  # per channel
        if config.query == "input":
            flops += 2 * layout.width * len(mixed) + (2 + norm) * reads
        elif config.query == "static":
            finished = sum(len(rows) > 0 for rows in self.rows_reading.values())
            again = sum(self._has_part(site.index) + self._overflows(site) for site in used)
            flops += 2 * sum(counts.values()) + norm * (finished + again)
        flops += sum(self._has_part(s.index) + self.plain_sites - 1 for s in layout.sublayers)  # less the plain sum
        flops += max(0, self._numbers(layout.out.index).start - config.keep_first - 1) * (config.overflow == "sum")
        if config.evaluation == "two_phase":
            begun = {site: site.index // self.group * self.group // config.block_size + 1 for site in used}
            flops += 2 * sum(begun[s] > 1 and (n > begun[s] or config.read == "sum") for s, n in counts.items())
        parameters, held = sum(p.numel() for p in self.parameters()), map(self._held, layout.sites)
        return Cost(parameters=parameters, flops=flops * layout.width, reads=reads, live=max(held) * layout.width)

    def _held(self, site: Site) -> int:
        """Vectors in the state on arrival at `site`, without the derived ones."""
        finished = len(self._numbers(site.index)) + self.config.keep_first
        return finished + self._overflows(site) + self._has_part(site.index) + self.plain_sites
