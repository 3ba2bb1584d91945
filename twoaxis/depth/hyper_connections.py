"""Hyper-Connections: n parallel residual streams, with learned weights for reading, mixing and writing them.

Zhu et al.: Hyper-Connections, arXiv 2409.19606 (ICLR 2025). There is no official repository; this follows the paper's
Algorithm 2, and agrees with the package lucidrains/hyper-connections when given its norm.

    H    = n streams (n, D), all copies of the embedding at the start
    α    = [A_m | A_r]  (n, n+1)      β (n)                  one pair per sub-layer
    x    = Σ_i A_m[i] H[i]                                   what the sub-layer reads
    H⁺_j = Σ_i A_r[i,j] H[i] + β[j] F(norm(x))               i is from, j is to
    out  = Σ_j H[j]                                          the final norm follows

    dynamic, per token and stream row i, the same projections for every stream:
    H̄[i]   = norm(H[i])
    α[i,:] = A[i,:] + s_α tanh(H̄[i] W_α)      β[i] = B[i] + s_β tanh(H̄[i] w_β)

         ┌──────────── A_r ────────────┐
    H ═══╪═════════════════════════════(+)═══ H⁺      ═ n streams
         └─ A_m ─ x ─ norm ─ F ─ y ─ β ─┘

At the start W = 0, A_m is one at stream k mod n (k counts sub-layers from 0), A_r the identity and B ones: every stream
is the plain residual to a bit, and the sum of them n times that. The final norm removes the factor, so the class is
`scale`; `readout="mean"` is the plain residual to a bit, for every n, because it is written as one stream plus the mean
difference of the others to it.

What surprises: the read-out is a sum, not a mean; the paper multiplies the initial standard deviation of every output
projection by sqrt(n) (`output_scale`; a matter of the model's initialisation, not done here); one stream with dynamic
weights is worse than the plain residual; A_r is free, so products over depth can grow without bound, which is what
manifold hyper-connections prevent. `frozen` holds width connections (α) or depth connections (β) at their start: the
paper's ablations, and the control that tells mixing from merely having n streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.base.method import Card, Start
from twoaxis.base.options import NotNegative, Options, between
from twoaxis.depth.parallel import ParallelStreams, Projection, Route, Row
from twoaxis.depth.stream import Apply, Layout, Neutral, Seen
from twoaxis.kernels.precision import widen


@dataclass(frozen=True, kw_only=True)
class HyperConnectionsConfig(Options):
    """Options of hyper-connections; the defaults are the paper's dynamic form with four streams (DHC x4)."""

    streams: Annotated[int, between(1, 256)] = 4
    """n, the expansion rate."""
    dynamic: bool = True
    """Per-token weights (DHC), or static ones alone (SHC)."""
    tanh: bool = True
    """Bound the dynamic part; the paper's variant without it drops only the tanh."""
    norm: Literal["layer", "rms", "none"] = "layer"
    """What the dynamic part sees of a stream; Algorithm 2 has layer norm."""
    affine: bool = True
    """Whether that norm has parameters: scale and shift for layer norm, scale for RMS. OLMo's has none."""
    eps: NotNegative = 1e-5
    """Inside the norm's root; the paper does not give it."""
    frozen: Literal["none", "width", "depth", "both"] = "none"
    """Hold the width connections (α), the depth connections (β) or both at their start: the paper's ablations."""
    readout: Literal["sum", "mean"] = "sum"
    """The paper's sum of the streams, or their mean, which is the plain residual exactly at the start."""
    scale_start: float = 0.01
    """s_α and s_β at the start."""


class HyperConnections(ParallelStreams):
    """Learned reads, mixes and writes of n streams."""

    name = "hyper_connections"
    Config = HyperConnectionsConfig
    config: HyperConnectionsConfig
    variants = (
        {},
        {"dynamic": False, "streams": 3, "readout": "mean"},
        {"norm": "rms", "tanh": False, "frozen": "depth"},
        {"norm": "none", "streams": 2, "frozen": "width"},
        {"affine": False, "streams": 1},
        {"frozen": "both", "readout": "mean"},
    )
    neutral_options = {"readout": "mean"}  # noqa: RUF012
    card = Card(
        title="Hyper-Connections",
        source="one of n parallel streams",
        value="streams",
        normaliser="none",
        adaptivity="static scalars plus a per-token part",
        window="the current n streams",
        granularity="per sub-layer",
        injection="replaces the read, the shortcut and the write",
        sharing="projections shared by the streams of a site",
        gating="bounded additive (tanh times a learned scale)",
        depth_state="n streams",
        paper="Zhu et al., Hyper-Connections, arXiv 2409.19606",
        year=2024,
    )

    @classmethod
    def controls(cls, config: HyperConnectionsConfig) -> tuple[dict[str, Any], ...]:
        """Several streams whose mixing does not learn."""
        return ({"frozen": "both"},) if config.frozen == "none" else ()

    def __init__(self, config: HyperConnectionsConfig, layout: Layout) -> None:
        super().__init__(config, layout, config.streams)
        n, d, count = config.streams, layout.width, len(self.used)
        width, depth = config.frozen not in ("width", "both"), config.frozen not in ("depth", "both")
        self.free = (width, width, depth)
        """Whether the read, the mix and the write are learned."""
        alpha, beta = config.dynamic and width, config.dynamic and depth
        normed = (alpha or beta) and config.norm != "none" and config.affine

        def parameter(name: str, *shape: int, start: Start, **how: Any) -> None:
            self.parameter(name, count, *shape, start=start, neutral=start, **how)

        reads = [site.index % n for site in self.used]  # sub-layers of all kinds count, whether they use the method
        parameter("static_alpha", n, n + 1, start=partial(_read_one_keep_all, reads), learned=width)
        parameter("static_beta", n, start=1.0, learned=depth)
        parameter("dynamic_alpha_fn", d, n + 1, start=0.0, needed=alpha, decay=True)
        parameter("dynamic_alpha_scale", start=config.scale_start, needed=alpha, decay=True)
        parameter("dynamic_beta_fn", d, start=0.0, needed=beta, decay=True)
        parameter("dynamic_beta_scale", start=config.scale_start, needed=beta, decay=True)
        parameter("norm_weight", d, start=1.0, needed=normed)
        parameter("norm_bias", d, start=0.0, needed=normed and config.norm == "layer")

    def tables(self) -> dict[str, Tensor]:
        """static [A_m | A_r | B]; of the dynamic columns: rows with the norm's scale, its shift's logits, scale."""
        if not self.used:
            return {}
        alpha, beta = widen(self.static_alpha), widen(self.static_beta)
        found = {"static": torch.cat([alpha, beta.unsqueeze(-1)], dim=-1)}
        pairs = ((self.dynamic_alpha_fn, self.dynamic_alpha_scale), (self.dynamic_beta_fn, self.dynamic_beta_scale))
        rows, scales = [], []
        for fn, scale in pairs:
            if fn is not None and scale is not None:
                rows.append(widen(fn).mT if fn.dim() == 3 else widen(fn).unsqueeze(1))
                scales.append(widen(scale).unsqueeze(-1).expand(-1, rows[-1].shape[1]))
        if not rows:
            return found
        fns = torch.cat(rows, dim=1)
        if self.norm_bias is not None:
            found["shift"] = (fns * widen(self.norm_bias).unsqueeze(1)).sum(-1)
        found["rows"] = fns if self.norm_weight is None else fns * widen(self.norm_weight).unsqueeze(1)
        return {**found, "scale": torch.cat(scales, dim=1)}

    def project(self, p: Row) -> Projection | None:
        """Each stream by itself, the same rows for all."""
        return Projection(p["rows"], self.config.norm, self.config.eps) if "rows" in p else None

    def route(self, z: Tensor | None, h: Tensor, p: Row) -> Route:
        """α = A + s tanh(z), β likewise."""
        sizes, static = (1, self.streams, 1), p["static"]
        parts = static.split(sizes, dim=-1)
        if z is not None:
            z = z + p["shift"] if "shift" in p else z
            first = 0 if self.free[0] else self.streams + 1
            start = static if all(self.free) else static[:, first : first + z.shape[-1]]
            made = torch.addcmul(start, torch.tanh(z) if self.config.tanh else z, p["scale"])
            learned = iter(made.split([size for size, free in zip(sizes, self.free, strict=True) if free], dim=-1))
            parts = [next(learned) if free else part for part, free in zip(parts, self.free, strict=True)]
        read, mix, gain = parts
        return Route(read.squeeze(-1), gain.squeeze(-1), mix.mT)  # α is [from, to]

    def definition(self, x: Tensor, apply: Apply) -> Tensor:
        """Algorithm 2, stream by stream: a list of n streams, each of which has its row of α and its β."""
        n, streams = self.config.streams, [x] * self.config.streams
        for site in self.sites:
            row, alpha, beta = site.index, [], []
            for i, h in enumerate(streams):
                a, b = self.static_alpha[row, i].expand(*h.shape[:-1], -1), self.static_beta[row, i]
                normed = self._defined_norm(h, row)
                bound = torch.tanh if self.config.tanh else torch.clone
                if self.dynamic_alpha_fn is not None and self.dynamic_alpha_scale is not None:
                    a = a + self.dynamic_alpha_scale[row] * bound(normed @ self.dynamic_alpha_fn[row])
                if self.dynamic_beta_fn is not None and self.dynamic_beta_scale is not None:
                    b = b + self.dynamic_beta_scale[row] * bound(normed @ self.dynamic_beta_fn[row])
                alpha.append(a)
                beta.append(b.expand(h.shape[:-1]).unsqueeze(-1))
            old = torch.stack(streams)  # (from, B, T, D)
            weights = torch.stack(alpha).unsqueeze(-1)  # (from, B, T, read and to, 1)
            y = apply(site, Seen((weights[..., 0, :] * old).sum(0))).y
            streams = [(weights[..., 1 + j, :] * old).sum(0) + beta[j] * y for j in range(n)]
        total = torch.stack(streams).sum(0)
        return total if self.config.readout == "sum" else total / n

    def _defined_norm(self, h: Tensor, row: int) -> Tensor:
        """What the dynamic weights of a site see of one stream, for `definition`."""
        width, eps = (self.layout.width,), self.config.eps
        weight = None if self.norm_weight is None else self.norm_weight[row]
        bias = None if self.norm_bias is None else self.norm_bias[row]
        if self.config.norm == "layer":
            return F.layer_norm(h, width, weight, bias, eps)
        return F.rms_norm(h, width, weight, eps) if self.config.norm == "rms" else h

    @property
    def neutral(self) -> Neutral:
        """Weights of one and zero move streams without rounding; the summed read-out is n times the plain residual."""
        summed = self.config.readout == "sum" and self.streams > 1 and self.reads_out
        return "scale" if summed else "bitwise"

    @property
    def output_scale(self) -> float:
        """sqrt(n), the paper's factor on the initial deviation of output projections; for the summed read-out only."""
        return self.streams**0.5 if self.config.readout == "sum" and self.used else 1.0

    def flops(self) -> int:
        """Read and mix 2dn(n+1), write 2dn, dynamic 2dn per projected column and the norm; the read-out."""
        n, d = self.streams, self.layout.width
        columns = (n + 1) * (self.dynamic_alpha_fn is not None) + (self.dynamic_beta_fn is not None)
        # layer: mean, centre, square and add, scale; rms: square and add, scale
        norm = {"layer": 5 * d, "rms": 3 * d, "none": 0}[self.config.norm] if columns else 0
        affine = sum(d for p in (self.norm_weight, self.norm_bias) if p is not None)
        per_site = 2 * d * n * (n + 2) + 2 * d * n * columns + n * (norm + affine)
        return len(self.used) * per_site + self.plain_flops() + self.readout_flops()


def _read_one_keep_all(reads: list[int], alpha: Tensor, generator: torch.Generator | None) -> None:
    """A_m one at the stream that a site reads, A_r the identity."""
    n = alpha.shape[1]
    alpha.zero_()[:, range(n), range(1, n + 1)] = 1.0
    alpha[range(len(reads)), reads, 0] = 1.0
