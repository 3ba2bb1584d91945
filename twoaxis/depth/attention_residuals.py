"""Attention Residuals: every sub-layer reads a softmax-weighted average of all earlier sub-layer outputs.

Kimi Team: Attention Residuals, arXiv 2603.15031 (2026). Runs in Kimi-K3. Code agreed with: Kimi-K3's model file,
flash-linear-attention, tokenbender/nanogpt-attnres-repro (all equal to 1e-14). With `heads` it is Multi-Head Attention
Residuals (MHAR), arXiv 2607.27230 (2026), whose authors find 4 to 8 best; `mhar` is this method with 4.

    v_0 = embedding, v_i = f_i(h_i)                          sources: sub-layer outputs, not running sums
    r_i = ( mean(v_i²) + eps )^(-1/2)
    s_i = < w_l ⊙ g_l , v_i r_i >                            fixed query w_l against RMS-normalised keys
    h_l = Σ_i softmax_i(s) v_i                               values are the raw sources

    MHAR: H contiguous groups of channels, each with a softmax of its own; r_i is still that of the full width
    s_{i,h} = scale e^{-t_{l,h}} < (w_l ⊙ g_l)_h , (v_i r_i)_h >        h_{l,h} = Σ_i softmax_i(s_{·,h}) v_{i,h}

    block form: sources are b_0 = embedding, the sums b_n over runs of `block_size` sub-layers (Kimi-K3's sizes
    count Transformer layers), and the sum of the current run so far, if it has one (a partial is absent, not zero)

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

A head's logit has D/H terms where a single one has D, so heads also make the softmax flatter, and the newest version of
the MHAR paper is said to credit that with most of the gain. Hence a temperature: `scale` is a constant one, the control
of H heads is one head with 1/sqrt(H) times the scale (`controls` names it), and `temperature="learned"` adds t.

Readings where the papers are silent: the input-dependent query is a map of the newest source; sigmoid weights are not
normalised; input-independent scalars pass through the softmax; the learned temperature is ours, starts at one and is
per site and head; the depth window counts sources besides the embedding and also holds for the final read. MHAR is
held to wdlctc/hyper-connection-factory's equations, read, not run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from twoaxis.base.method import Suggestion, history_card
from twoaxis.base.options import Count, Options, Positive
from twoaxis.depth.history import Softmax, View, Weights
from twoaxis.depth.plan import Plan, Read
from twoaxis.depth.site import Site
from twoaxis.depth.stream import Apply, Layout, Seen
from twoaxis.depth.two_phase import AheadStream
from twoaxis.kernels.history import source_dots
from twoaxis.kernels.precision import full_precision, product, routing_dtype, widen


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
    """Channel groups with weights of their own; more than one is MHAR."""
    scale: float = 1.0
    """Of the logits, the inverse of a constant temperature; the papers have none."""
    temperature: Literal["fixed", "learned"] = "fixed"
    """Whether each site and head also learns a temperature of its softmax."""
    eps: Positive = 1e-6
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
        if self.query == "none" and self.temperature == "learned":
            raise ValueError("temperature='learned' with query='none' would scale weights that are learned already")


class AttentionResiduals(AheadStream):
    """Softmax reads over sub-layer outputs."""

    source, goes_on = "increment", "own"

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
        {"query": "input", "block_size": 2, "heads": 2, "temperature": "learned"},
        {"heads": 4, "scale": 0.5, "temperature": "learned"},
        {"query": "none", "read": "sum"},
        {"weighting": "sigmoid", "key_norm": False, "read": "sum"},
    )
    neutral_options = {"read": "sum"}  # noqa: RUF012
    aliases = ("attnres", "mhar:heads=4")
    card = history_card(
        title="Attention Residuals",
        purpose="every sub-layer attends over the outputs of earlier ones in place of their sum",
        source="sub-layer output, or the sum over a run of them; slot 0 is the embedding",
        query="a learned vector per site",
        key="RMS-normalised sources",
        value="raw sources",
        literal_qkv=True,
        normaliser="softmax",
        adaptivity="per token",
        window="all earlier sources (block form: sums of S sub-layers)",
        injection="replaces the input; there is no other residual path",
        depth_state="every source so far",
        paper="Kimi Team, Attention Residuals, arXiv 2603.15031",
    )
    suggestions = (
        Suggestion(
            "block",
            "every sub-layer attends over the sums of earlier groups of sub-layers",
            lambda shape: {
                "block_size": 2 * max(1, round(shape.blocks / 8))
            },  # about 8 sources: the paper finds it enough
        ),
        Suggestion("full", "every sub-layer attends over all earlier outputs"),
        Suggestion(
            "heads",
            "the same with a softmax for each of four groups of channels (MHAR)",
            lambda shape: {"heads": 4},
        ),
    )

    def __init__(self, config: AttentionResidualsConfig, layout: Layout) -> None:
        super().__init__(config, layout)
        width, rows = layout.width, len(layout.used())
        self.eps = config.eps if config.key_norm else None
        self.single_reads = config.query == "static" and config.weighting == "softmax" and config.heads == 1
        if config.evaluation == "two_phase":
            root = max(1, round(math.sqrt(len(layout.sublayers))))  # where reads of the full form touch fewest
            self.group = config.group or (config.block_size if config.block_size > 1 else root)
        self.follow(Plan.runs(layout, config.block_size, self._window))
        keyed = config.query != "none" and config.key_norm
        self.parameter("query", rows, width, neutral=0.0, needed=config.query == "static")
        self.parameter("query_map", rows, width, width, neutral=0.0, decay=True, needed=config.query == "input")
        self.parameter("norm_weight", rows, width, start=1.0, neutral=1.0, needed=keyed)
        self.parameter("log_temperature", rows, config.heads, needed=config.temperature == "learned")
        for row, read in enumerate(self.plan.reads.values()):
            self.parameter(f"scalars.{row}", read.total, neutral=0.0, needed=config.query == "none")
        # a forgetful window is never plain, the average rescales the stream, the sum form is exact to rounding
        lost = any(read.numbers.start > config.keep_first for read in self.plan.reads.values())
        forgets = lost and config.overflow == "drop"
        self.neutral = "none" if forgets else "rounding" if config.read == "sum" else "scale"

    @classmethod
    def controls(cls, config: AttentionResidualsConfig) -> tuple[dict[str, Any], ...]:
        """For heads: one head, and one head whose softmax is as flat as theirs."""
        flat = {"heads": 1, "scale": config.scale * config.heads**-0.5}
        return ({"heads": 1}, flat) if config.heads > 1 else ()

    def _window(self, site: Site) -> Read | None:
        """What the window leaves at `site`; the partial, if there is one, counts as its newest source."""
        config, pinned = self.config, int(self.config.keep_first)
        finished, newest = site.index // config.block_size, -(-site.index // config.block_size)
        oldest = max(pinned, 0 if config.window is None else newest - config.window + 1)
        rest = config.overflow == "sum" and oldest > pinned
        read = Read(range(oldest, finished + 1), ("x",), config.keep_first, rest, newest > finished)
        return read if self.uses(site) else None

    def scale(self, site: Site) -> float:
        """The sum form reads as many times the average as there are sources."""
        return float(self.plan.reads[site.index].total) if self.config.read == "sum" else 1.0

    def route(self, view: View, site: Site) -> Weights | Softmax:
        """Softmax of fixed queries against RMS-normalised sources, and the variants of the ablations."""
        config, x = self.config, view.kept[0].x
        if config.query == "static" and config.weighting == "softmax":
            return self.ask(view, site, self.scale(site))
        if config.query == "static":
            logits = self.logits(view, site)
        elif config.query == "input":
            logits = self._input_logits(view.sources, self.row_at[site.index])
        else:
            scalars = self.scalars[str(self.row_at[site.index])].to(routing_dtype(x.dtype))
            logits = scalars.expand(*x.shape[:-1], 1, -1).unbind(-1)
        if config.weighting == "softmax":
            return Softmax(logits, scale=self.scale(site))
        weights = torch.stack(list(logits), dim=-1).sigmoid() * (2.0 if config.read == "sum" else 1.0)
        return Weights(token=weights.unsqueeze(-2) if config.heads > 1 else weights, heads=config.heads)

    @full_precision
    def _input_logits(self, sources: list[Tensor], row: int) -> tuple[Tensor, ...]:
        """Logits (..., H) of a query made from the newest source."""
        assert self.query_map is not None
        q = product(widen(sources[-1]), widen(self.query_map[row]).mT) * self.config.scale
        q = q if self.norm_weight is None else q * widen(self.norm_weight[row])
        heads = (self.config.heads, -1)
        dots = source_dots(q.unflatten(-1, heads).unsqueeze(-2), [s.unflatten(-1, heads) for s in sources]).squeeze(-2)
        if self.config.key_norm:
            inverse = [torch.rsqrt(widen(s).square().mean(-1) + self.config.eps) for s in sources]
            dots = dots * torch.stack(inverse, dim=-1).unsqueeze(-2)
        if self.log_temperature is not None:
            dots = dots * widen(-self.log_temperature[row]).exp().unsqueeze(-1)
        return dots.unbind(-1)

    def dead(self) -> dict[str, str]:
        """The row of a softmax over one source."""
        names = ["scalars.{}"] if self.config.query == "none" else [f"{n}[{{}}]" for n, _ in self.named_parameters()]
        return self.lone(names) if self.config.weighting == "softmax" else {}

    def flops(self) -> int:
        """Per source read a dot product and a multiply-add; per logit's source one mean square; sums; the merges."""
        config, reads = self.config, self.plan.reads
        total, norm = sum(read.total for read in reads.values()), 2 * config.key_norm
        per_channel = 2 * total
        if config.query == "input":
            per_channel += 2 * self.layout.width * len(reads) + (2 + norm) * total
        elif config.query == "static":
            finished = sum(last >= 0 for last in self.plan.last)
            per_channel += 2 * total + norm * (finished + sum(read.part + read.rest for read in reads.values()))
        if self.group is not None:
            merged = [read.total > self._begun[i] or config.read == "sum" for i, read in reads.items()]
            per_channel += 2 * sum(m and self._begun[i] > 1 for i, m in zip(reads, merged, strict=True))
        return self.layout.width * (per_channel + self.additions())

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
            logits = self.scalars[str(row)][:, None, None, None]
        else:
            keys = v
            if self.norm_weight is not None:
                keys = v / torch.sqrt(v.square().mean(-1, keepdim=True) + config.eps) * self.norm_weight[row]
            learned = self.query if self.query_map is None else self.query_map
            assert learned is not None
            w = learned[row] if config.query == "static" else v[-1] @ learned[row].T
            logits = config.scale * (w * keys).unflatten(-1, heads).sum(-1)  # (S, B, T, H)
            logits = logits if self.log_temperature is None else logits / self.log_temperature[row].exp()
        weights, full = (logits.softmax(0), len(v)) if config.weighting == "softmax" else (logits.sigmoid(), 2)
        weights = full * weights if config.read == "sum" else weights
        return (weights.unsqueeze(-1) * v.unflatten(-1, heads)).sum(0).flatten(-2)
