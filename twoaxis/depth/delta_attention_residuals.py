"""Delta Attention Residuals: the residual stream goes on, and each sub-layer also reads a routed choice of increments.

Luo, Cai, Hu: Delta Attention Residuals, arXiv 2605.18855 (2026). Code agreed with: the layers of the authors'
repository wdlctc/delta-attention-residuals-code, per sub-layer, by blocks and with a null source, up to the float32
of its norms.

    h_{l+1} = h_l + f_l( input_l )                           the plain residual, which is also the output
    v_0 = embedding, v_i = f_i( input_i )                    sources: what changed, not what accumulated
    s_i = < w_l ⊙ g_l , v_i / rms(v_i) >                     as in Attention Residuals, with heads if wanted
    input_l = h_l + gate_l Σ_i softmax_i(s) v_i              gate_l = 1, or a learned number that starts at zero

    h ──┬──(+)── f_0 ──(+)──┬──(+)── f_1 ──(+)──┬──(+)── ... ──► h
        │                   │   ▲               │   ▲
       v_0 ─────────────────────┴───────────────────┤
                     v_1 ───────────────────────────┘

    block form: v_n is the increment of a run of `block_size` sub-layers, complete ones only
    recursive:  v_n = h_n - v_{n-1}, with h_n the state after n runs: the increment of the last run, plus the embedding
                and the increments before it in turn with both signs

A gate is the way onto a pretrained model: at zero the model is the plain one to the last bit, and the gate has a
gradient at once. Without one (`gate="none"`, as in training from scratch) no parameters make the method plain. A null
source is one more, a learned vector per site that starts at zero: what it is given, no increment gets.

Readings. The first site has nothing behind it but the embedding it gets anyway, and reads it plainly, as in the
released code, which with a null source adds that there already. The paper's block delta is the increment of the run,
and that is the default; the released code subtracts the last *source* from the state in place of the last state, and
makes a source known one sub-layer after it is complete: `delta="recursive"` does both. Its other gates (a sigmoid of a
scalar or of the state, an interpolation) are not here. It is a method of its own and not an option of Attention
Residuals because neither the averages, windows and two phases of that one nor its read at the head apply.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from twoaxis.base.method import Suggestion, history_card
from twoaxis.base.options import Count, Options, Positive
from twoaxis.depth.history import History, Softmax, View
from twoaxis.depth.plan import Plan, Read
from twoaxis.depth.site import OUT, Site
from twoaxis.depth.stream import Apply, Layout, Seen
from twoaxis.depth.two_phase import AheadStream
from twoaxis.kernels.history import rms_logits, softmax_read
from twoaxis.kernels.precision import widen


@dataclass(frozen=True, kw_only=True)
class DeltaAttentionResidualsConfig(Options):
    """Options of Delta Attention Residuals; the defaults are the paper's training from scratch."""

    block_size: Count = 1
    """Sub-layers whose increments are one source; 1 is the form per sub-layer. The released code counts layers."""
    delta: Literal["sum", "recursive"] = "sum"
    """What the source of a run is: its increment, or the released code's difference."""
    gate: Literal["none", "zero"] = "none"
    """Whether a learned scalar per site, zero at the start, stands before what is routed."""
    null: bool = False
    """Whether each site has a learned source beside the increments, zero at the start."""
    heads: Count = 1
    """Channel groups with weights of their own."""
    scale: float = 1.0
    """Of the logits, the inverse of a temperature."""
    eps: Positive = 1e-6
    """Inside the keys' mean square."""


class DeltaAttentionResiduals(AheadStream):
    """The residual, and softmax reads over increments beside it."""

    source, goes_on = "increment", "own"

    name = "delta_attention_residuals"
    Config = DeltaAttentionResidualsConfig
    config: DeltaAttentionResidualsConfig
    variants = (
        {},
        {"gate": "zero"},
        {"block_size": 2, "gate": "zero", "null": True, "heads": 2},
        {"block_size": 2, "delta": "recursive"},
        {"null": True, "scale": 0.5},
    )
    neutral_options = {"gate": "zero"}  # noqa: RUF012
    aliases = ("deltaattnres",)
    card = history_card(
        title="Delta Attention Residuals",
        purpose="the residual goes on, and every sub-layer also attends over all earlier increments",
        source="sub-layer output, or the increment of a run of them; slot 0 is the embedding",
        query="a learned vector per site",
        key="RMS-normalised sources",
        value="raw sources",
        literal_qkv=True,
        normaliser="softmax",
        adaptivity="per token",
        window="all earlier sources (block form: increments of S sub-layers)",
        injection="added to the residual, which goes on by itself",
        gating="a scalar per site, or none",
        depth_state="every source so far, and the residual",
        paper="Luo, Cai, Hu, Delta Attention Residuals, arXiv 2605.18855",
    )
    suggestions = (
        Suggestion(),
        Suggestion(
            "block",
            "the same over the increments of groups of sub-layers",
            lambda shape: {"block_size": 2 * max(1, round(shape.blocks / 8))},
        ),
    )

    def __init__(self, config: DeltaAttentionResidualsConfig, layout: Layout) -> None:
        super().__init__(config, layout)
        self.eps, self.single_reads = config.eps, config.heads == 1 and not config.null
        self.follow(Plan.runs(layout, config.block_size, self._deltas))
        rows = self.row_at[-1]
        self.parameter("query", rows, layout.width, neutral=0.0)
        self.parameter("norm_weight", rows, layout.width, start=1.0, neutral=1.0)
        self.parameter("log_temperature", needed=False)
        self.parameter("gate", rows, neutral=0.0, needed=config.gate == "zero")
        self.parameter("null", rows, layout.width, neutral=0.0, needed=config.null)
        # zero times what is routed changes no bit; without a gate something is always added
        self.neutral = "bitwise" if self.gate is not None or self.query is None else "none"

    def _deltas(self, site: Site) -> Read | None:
        """The increments of the runs that are complete; the released difference is known one sub-layer later."""
        finished = max(0, site.index - (self.config.delta == "recursive")) // self.config.block_size
        return Read(range(finished + 1)) if self.uses(site) and site.index and site.kind != OUT else None

    def route(self, view: View, site: Site) -> Softmax:
        """The softmax of the site's query against RMS-normalised sources, the null source first."""
        asked = self.ask(view, site, 1.0)
        if self.null is None:
            return asked
        assert asked.logits is not None
        x, row = view.kept[0].x, self.row_at[site.index]
        own = rms_logits(self.null[row].to(x.dtype), view.state.own.queries[row : row + 1], eps=self.eps)[..., 0]
        return Softmax([own.expand_as(asked.logits[0]), *asked.logits])

    def mix(self, view: View, site: Site) -> tuple[Tensor, ...]:
        """The routed increments."""
        if self.null is None:
            return super().mix(view, site)
        x, logits = view.kept[0].x, self.route(view, site).logits
        assert logits is not None
        null = self.null[self.row_at[site.index]].to(x.dtype).expand_as(x)
        return (softmax_read([null, *view.sources], logits),)

    def enter(self, way: str, read: Tensor, view: View, site: Site) -> Tensor:
        """Added to the residual, behind the gate."""
        h = view.state.plain
        assert h is not None
        if self.gate is None:
            return h + read
        return h + (widen(read) * self.gate[self.row_at[site.index]].to(widen(read).dtype)).to(h.dtype)

    def _push(self, h: History, x: Tensor | None, boundary: int) -> History:
        """The released difference is of the state and the last source."""
        if self.config.delta == "recursive" and h.kept and h.plain is not None:
            x = h.plain - h.kept[-1].x
        return super()._push(h, x, boundary)

    def sources(self, site: Site) -> tuple[str, ...]:
        """The sources `site` reads, the null source first."""
        found = super().sources(site)
        return ("null", *found) if found and self.config.null else found

    def dead(self) -> dict[str, str]:
        """The query and the key scale of a softmax over one source."""
        return {} if self.config.null else self.lone(["query[{}]", "norm_weight[{}]"])

    def definition(self, x: Tensor, apply: Apply) -> Tensor:
        """Sources are a list; the residual is summed up beside it."""
        config, sources, run = self.config, [x], [x]  # the states since the last run ended
        for site in self.sites:
            routed = torch.zeros_like(x)
            late = config.delta == "recursive" and site.index % config.block_size == 0
            known = sources[:-1] if late else sources
            if site.index:
                routed = self._defined_read(known, site.index - 1)
            x = x + apply(site, Seen(x + routed)).y
            run.append(x)
            if len(run) > config.block_size:
                sources.append(x - (sources[-1] if config.delta == "recursive" else run[0]))
                run = [x]
        return x

    def _defined_read(self, sources: list[Tensor], row: int) -> Tensor:
        """What one site adds to the residual, for `definition`."""
        null = [] if self.null is None else [self.null[row].expand_as(sources[0])]
        v = torch.stack([*null, *sources])  # (S, B, T, D)
        keys = v / torch.sqrt(v.square().mean(-1, keepdim=True) + self.config.eps) * self.norm_weight[row]
        logits = self.config.scale * (self.query[row] * keys).unflatten(-1, (self.config.heads, -1)).sum(-1)
        read = (logits.softmax(0).unsqueeze(-1) * v.unflatten(-1, (self.config.heads, -1))).sum(0).flatten(-2)
        return read if self.gate is None else self.gate[row] * read
