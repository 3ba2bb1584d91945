"""Gated streams: n residual streams, read per channel through a low-rank gate of their norms.

Qwen team, arXiv 2608.30320; the residual of Qwen4-Exp and Qwen3.8-Next, as in transformers' modeling_qwen4_exp.

    X    = n streams (n, D), all copies of the embedding at the start
    x̂_i  = RMSNorm(X_i) ⊙ (1 + w_i)                           a scale per channel and stream
    g    = σ( W_up silu( W_down x̂ / n ) )    (n D)            x̂ is all streams of a token in one vector
    x    = mean_i g_i ⊙ x̂_i                                   what the sub-layer reads
    β    = 2 σ( W_inject x̂ / n )             (n)
    X_i  ← X_i + β_i F(x)                                     streams are never mixed
    out  = mean_i g_i ⊙ x̂_i                                   with weights of its own; there is no β

         ┌─────────────────────────────────┐
    X ═══╪═════════════════════════════════(+)═══ X⁺      ═ n streams
         └─ norm ─┬─ down ─ silu ─ up ─ σ ─┐ β
                  ├────────────── ⊙ ─ mean ┴─ F ─ y
                  └─ inject ─ 2σ ─ β

The read is normalised already, so the model has no pre-norm at these sites and no final norm (`normed`): their scales
are 1 + w. At W_up = W_inject = 0 gates are 1/2, β is one and the streams stay equal; with scales twice as large that is
the plain residual behind its norm, to rounding, if `eps` is the model's, as it is unless said otherwise. `neutral_`
sets these, with w of 1; `adopt_norm_` gives a site the scale of a pretrained model's norm, twice as large. A blend with
the plain residual is refused, because its read is not normalised.

What surprises: the gate tells channels apart and the write does not; W_down and W_up are most of what the method
costs, 4 n D rank operations per site.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.base.method import Normal, Suggestion, parallel_card
from twoaxis.base.options import Options, Positive, between
from twoaxis.depth.parallel import ParallelStreams, Route, Streams
from twoaxis.depth.site import OUT, Site
from twoaxis.depth.stream import Apply, Layout, Row, Seen
from twoaxis.kernels.precision import widen


@dataclass(frozen=True, kw_only=True)
class GatedStreamsConfig(Options):
    """Options of gated streams; the defaults are Qwen4-Exp's."""

    streams: Annotated[int, between(1, 256)] = 4
    """n."""
    rank: Annotated[int, between(1, 2**16)] = 320
    """Of the gate."""
    eps: Positive | None = None
    """Inside the norm's root; None is that of the model's own norms, whose place it takes."""


class GatedStreams(ParallelStreams):
    """Gated reads of the norms of n streams, and gated writes."""

    name = "gated_streams"
    Config = GatedStreamsConfig
    config: GatedStreamsConfig
    variants = ({"rank": 6}, {"streams": 3, "rank": 4, "eps": 0.01}, {"streams": 1, "rank": 2})
    card = parallel_card(
        title="Gated streams",
        purpose="four residual streams, read per channel through a low-rank gate of their norms",
        source="one of n parallel streams, normalised",
        value="normalised streams",
        normaliser="sigmoid per channel for reads, twice a sigmoid for writes",
        adaptivity="per token and channel",
        injection="replaces the read with its norm, and the write",
        gating="sigmoid of a low-rank network",
        paper="Qwen team, arXiv 2608.30320",
    )
    # a rank of an eighth of the width, Qwen's at a width of 2560
    suggestions = (Suggestion(options=lambda shape: {"rank": max(4, shape.width // 8)}),)

    def __init__(self, config: GatedStreamsConfig, layout: Layout) -> None:
        super().__init__(config, layout, config.streams)
        n, d, rank = config.streams, layout.width, config.rank
        self.eps = layout.eps if config.eps is None else config.eps
        matrix: dict[str, Any] = {"start": Normal(), "decay": True, "float32": False}
        for prefix, lead, needed in (("", (len(self.used),), True), ("head_", (), self.reads_out)):
            self.parameter(f"{prefix}norm_weight", *lead, n, d, neutral=1.0, needed=needed)
            self.parameter(f"{prefix}down", *lead, rank, n * d, needed=needed, **matrix)
            self.parameter(f"{prefix}up", *lead, n * d, rank, neutral=0.0, needed=needed, **matrix)
        self.parameter("inject", len(self.used), n, n * d, start=Normal(), neutral=0.0, decay=True)
        self.neutral = "rounding" if self.used or self.reads_out else "bitwise"

    def normed(self, site: Site) -> bool:
        """Only sites without the method leave their norm to the model."""
        return not self.uses(site)

    def adopt_norm_(self, site: Site, weight: Tensor) -> None:
        """Twice the scale: a neutral gate halves."""
        if not self.uses(site):
            return super().adopt_norm_(site, weight)
        with torch.no_grad():
            ours = self.head_norm_weight if site.kind == OUT else self.norm_weight[self.rows[site.index]]
            ours.copy_((2.0 * widen(weight) - 1.0).expand_as(ours))
        return None

    def tables(self) -> dict[str, Tensor]:
        """The parameters, without copies: they are matrices of the model's size."""
        if not self.used:
            return {}
        return {name: getattr(self, name) for name in ("norm_weight", "down", "up", "inject")}

    def gated(self, h: Tensor, p: Row) -> tuple[Tensor, Tensor]:
        """The read (..., D), and all normalised streams (..., n D)."""
        n, wide = self.streams, widen(h)
        normed = F.rms_norm(wide, h.shape[-1:], eps=self.eps) * (1.0 + widen(p["norm_weight"]))
        v = normed.flatten(-2)
        inner = F.silu(_linear(v, p["down"], h.dtype) / n)
        gate = torch.sigmoid(_linear(inner, p["up"], h.dtype))
        return (gate.unflatten(-1, (n, -1)) * normed).mean(-2).to(h.dtype), v

    def route(self, z: Tensor | None, h: Tensor, p: Row) -> Route:
        """The gated read, and β."""
        x, v = self.gated(h, p)
        return Route(None, 2.0 * torch.sigmoid(_linear(v, p["inject"], v.dtype) / self.streams), x=x)

    def read_out(self, value: Streams) -> Tensor:
        """The gated read with the out site's own weights."""
        return self.gated(value.h, {name: getattr(self, f"head_{name}") for name in ("norm_weight", "down", "up")})[0]

    def _weights(self, value: Streams, site: Site) -> Tensor | None:
        """None: the read is no weighted sum of the streams."""
        return None

    def definition(self, x: Tensor, apply: Apply) -> Tensor:
        """The equations on a list of n streams."""
        streams = [x] * self.config.streams
        for site in self.sites:
            i = site.index
            read, normed = self._defined_read(streams, self.norm_weight[i], self.down[i], self.up[i])
            beta = 2.0 * torch.sigmoid(normed @ self.inject[i].T / len(streams))
            y = apply(site, Seen(read)).y
            streams = [s + beta[..., j, None] * y for j, s in enumerate(streams)]
        return self._defined_read(streams, self.head_norm_weight, self.head_down, self.head_up)[0]

    def _defined_read(self, streams: list[Tensor], scale: Tensor, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """A read and the normalised streams side by side, for `definition`."""
        n, eps = len(streams), self.eps
        roots = [(s.square().mean(-1, keepdim=True) + eps).sqrt() for s in streams]
        normed = [s / root * (1.0 + w) for s, root, w in zip(streams, roots, scale, strict=True)]
        v = torch.cat(normed, dim=-1)
        inner = v @ down.T / n
        gates = torch.sigmoid((inner * torch.sigmoid(inner)) @ up.T).chunk(n, dim=-1)
        return torch.stack([g * s for g, s in zip(gates, normed, strict=True)]).mean(0), v

    def flops(self) -> int:
        """Per read the norm 4nd, two matrices of rank r 4ndr, gate and mean 2nd; per site β 2n²d and the write 2nd."""
        n, d = self.streams, self.layout.width
        read = n * d * (4 + 4 * self.config.rank + 2)
        return (
            len(self.used) * (read + 2 * n * n * d + 2 * n * d) + (read if self.reads_out else 0) + self.plain_flops()
        )


def _linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A projection in the model's dtype, as its own are, with the result widened."""
    return widen(F.linear(x.to(dtype), weight.to(dtype)))
