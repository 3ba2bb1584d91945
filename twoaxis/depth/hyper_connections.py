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

Frac-Connections (Zhu et al., arXiv 2503.14125; `streams=1,fractions=m`, short `frac`) route m slices of one residual
in place of n copies: the state stays D wide. H are the slices (m, D/m), and with A_m and A_r of m columns each

    x    = concat_f Σ_i A_m[i,f] H[i]        H⁺_j = Σ_i A_r[i,j] H[i] + β[j] y_j        y_j is slice j of F(norm(x))

with the norm and the projections of D/m channels. At the start A_m and A_r are the identity: plain to a bit. Both at
once, n streams of m slices each, is the partitioned form of the package: rows of α and β are the n m slices, and the
sub-layer with number k reads the slices of stream k mod n (for n > 1 a reading, the paper has n = 1). The package's
write differs from the paper's: every slice gets every slice of the output (`write="all"`), with weights

    H⁺_{s,j} = ... + Σ_f (B[s,j] + s_β tanh(H̄[s,f] W_β)_j) y_f

which at its start adds the sum of all slices to each of them. That is not the plain residual for any weights of its
own, and its class is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.base.method import Start, Suggestion, parallel_card
from twoaxis.base.options import NotNegative, Options, between
from twoaxis.depth.parallel import ParallelStreams, Projection, Route
from twoaxis.depth.stream import Apply, Layout, Row, Seen
from twoaxis.kernels.precision import widen


@dataclass(frozen=True, kw_only=True)
class HyperConnectionsConfig(Options):
    """Options of hyper-connections; the defaults are the paper's dynamic form with four streams (DHC x4)."""

    streams: Annotated[int, between(1, 256)] = 4
    """n, the expansion rate."""
    fractions: Annotated[int, between(1, 256)] = 1
    """m, slices of the width that are routed by themselves; with streams=1 these are Frac-Connections."""
    write: Literal["slice", "all"] = "slice"
    """With fractions: a slice gets its own slice of the output, as published, or all of them, as in the package."""
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

    def validate(self) -> None:
        """Slices are written in one way or another only where there are some."""
        if self.write == "all" and self.fractions == 1:
            raise ValueError("write='all' is about slices: give fractions, or leave write at 'slice'")


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
        {"streams": 1, "fractions": 4},
        {"streams": 2, "fractions": 2, "write": "all", "norm": "rms", "readout": "mean"},
        {"streams": 2, "fractions": 2, "dynamic": False},
    )
    neutral_options = {"readout": "mean"}  # noqa: RUF012
    aliases = ("hc", "frac:streams=1,fractions=4", "fracconnections:streams=1,fractions=4")
    card = parallel_card(
        title="Hyper-Connections",
        purpose="four residual streams that every sub-layer reads, mixes and writes by learned weights",
        adaptivity="static scalars plus a per-token part",
        sharing="projections shared by the streams of a site",
        gating="bounded additive (tanh times a learned scale)",
        paper="Zhu et al., Hyper-Connections, arXiv 2409.19606",
    )
    suggestions = (
        Suggestion(),
        Suggestion(
            "fractions",
            "the same routing on two slices of one residual, which stays as wide as it was",
            lambda shape: {"streams": 1, "fractions": 2},
        ),
    )

    @classmethod
    def controls(cls, config: HyperConnectionsConfig) -> tuple[dict[str, Any], ...]:
        """Several streams whose mixing does not learn."""
        return ({"frozen": "both"},) if config.frozen == "none" else ()

    def __init__(self, config: HyperConnectionsConfig, layout: Layout) -> None:
        super().__init__(config, layout, config.streams)
        self.fractions = m = config.fractions
        if layout.width % m:
            raise ValueError(f"fractions={m} must divide the width {layout.width}")
        n, d, count = config.streams * m, layout.width // m, len(self.used)  # rows of the routing, and their width
        width, depth = config.frozen not in ("width", "both"), config.frozen not in ("depth", "both")
        self.free = (width, width, depth)
        """Whether the read, the mix and the write are learned."""
        alpha, beta = config.dynamic and width, config.dynamic and depth
        normed = (alpha or beta) and config.norm != "none" and config.affine

        def parameter(name: str, *shape: int, start: Start, **how: Any) -> None:
            self.parameter(name, count, *shape, start=start, neutral=start, **how)

        # sub-layers of all kinds count, whether they use the method
        reads = [site.index % config.streams for site in self.used]
        parameter("static_alpha", n, n + m, start=partial(_read_one_keep_all, reads, m), learned=width)
        parameter("static_beta", n, start=1.0, learned=depth)
        parameter("dynamic_alpha_fn", d, n + m, start=0.0, needed=alpha, decay=True)
        parameter("dynamic_alpha_scale", start=config.scale_start, needed=alpha, decay=True)
        parameter("dynamic_beta_fn", *((d, m) if config.write == "all" else (d,)), start=0.0, needed=beta, decay=True)
        parameter("dynamic_beta_scale", start=config.scale_start, needed=beta, decay=True)
        parameter("norm_weight", d, start=1.0, needed=normed)
        parameter("norm_bias", d, start=0.0, needed=normed and config.norm == "layer")
        # weights of one and zero move streams without rounding; the summed read-out is n times the plain residual
        summed = config.readout == "sum"
        scaled = "scale" if summed and config.streams > 1 and self.reads_out else "bitwise"
        self.neutral = "none" if self.used and config.write == "all" else scaled
        # the paper's factor on the initial deviation of output projections
        self.output_scale = config.streams**0.5 if summed and self.used else 1.0

    def tables(self) -> dict[str, Tensor]:
        """static [A_m | A_r | B]; of the dynamic columns: rows with the norm's scale, its shift's logits, scale."""
        if not self.used:
            return {}
        alpha, beta = widen(self.static_alpha), widen(self.static_beta).unsqueeze(-1)
        if self.config.write == "all":  # the row of a slice has a column per slice of the same stream that it writes
            columns = beta.squeeze(-1).unflatten(-1, (self.streams, 1, self.fractions))
            beta = columns.expand(-1, -1, self.fractions, -1).flatten(1, 2)
        found = {"static": torch.cat([alpha, beta], dim=-1)}
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
        m, n, static = self.fractions, self.streams * self.fractions, p["static"]
        sizes = (m, n, static.shape[-1] - m - n)
        parts = static.split(sizes, dim=-1)
        if z is not None:
            z = z + p["shift"] if "shift" in p else z
            first = 0 if self.free[0] else n + m
            start = static if all(self.free) else static[:, first : first + z.shape[-1]]
            made = torch.addcmul(start, torch.tanh(z) if self.config.tanh else z, p["scale"])
            learned = iter(made.split([size for size, free in zip(sizes, self.free, strict=True) if free], dim=-1))
            parts = [next(learned) if free else part for part, free in zip(parts, self.free, strict=True)]
        read, mix, gain = parts
        if m == 1:
            return Route(read.squeeze(-1), gain.squeeze(-1), mix.mT)  # α is [from, to]
        gain = gain.unflatten(-2, (self.streams, m))
        own = torch.eye(m, dtype=gain.dtype, device=gain.device)
        gain = gain.mT if self.config.write == "all" else gain * own
        return Route(read.mT, gain.flatten(-3, -2), mix.mT.expand(*h.shape[:-2], n, n))

    def definition(self, x: Tensor, apply: Apply) -> Tensor:
        """Algorithm 2, slice by slice: a list of n m slices (m = 1: streams), each with its row of α and its β."""
        n, m, write = self.config.streams, self.config.fractions, self.config.write
        slices = list(x.chunk(m, dim=-1)) * n
        for site in self.sites:
            row, alpha, beta = site.index, [], []
            for i, h in enumerate(slices):
                a, b = self.static_alpha[row, i].expand(*h.shape[:-1], -1), self.static_beta[row, i]
                if write == "all":
                    b = self.static_beta[row, i // m * m : i // m * m + m]
                normed = self._defined_norm(h, row)
                bound = torch.tanh if self.config.tanh else torch.clone
                if self.dynamic_alpha_fn is not None and self.dynamic_alpha_scale is not None:
                    a = a + self.dynamic_alpha_scale[row] * bound(normed @ self.dynamic_alpha_fn[row])
                if self.dynamic_beta_fn is not None and self.dynamic_beta_scale is not None:
                    b = b + self.dynamic_beta_scale[row] * bound(normed @ self.dynamic_beta_fn[row])
                alpha.append(a)
                beta.append(b.expand(*h.shape[:-1], m) if write == "all" else b.expand(h.shape[:-1]).unsqueeze(-1))
            old = torch.stack(slices)  # (from, B, T, D/m)
            weights = torch.stack(alpha).unsqueeze(-1)  # (from, B, T, read and to, 1)
            read = torch.cat([(weights[..., f, :] * old).sum(0) for f in range(m)], dim=-1)
            parts = apply(site, Seen(read)).y.chunk(m, dim=-1)
            slices = [(weights[..., m + j, :] * old).sum(0) for j in range(n * m)]
            for j in range(n * m):
                if write == "slice":
                    slices[j] = slices[j] + beta[j] * parts[j % m]
                for f in range(m if write == "all" else 0):  # weighed by slice f of the same stream
                    slices[j] = slices[j] + beta[j // m * m + f][..., j % m, None] * parts[f]
        total = torch.stack([torch.cat(slices[s * m : s * m + m], dim=-1) for s in range(n)]).sum(0)
        return total if self.config.readout == "sum" else total / n

    def _defined_norm(self, h: Tensor, row: int) -> Tensor:
        """What the dynamic weights of a site see of one stream, for `definition`."""
        width, eps = h.shape[-1:], self.config.eps
        weight = None if self.norm_weight is None else self.norm_weight[row]
        bias = None if self.norm_bias is None else self.norm_bias[row]
        if self.config.norm == "layer":
            return F.layer_norm(h, width, weight, bias, eps)
        return F.rms_norm(h, width, weight, eps) if self.config.norm == "rms" else h

    def flops(self) -> int:
        """Per row of routing: read and mix 2d(n+m), write 2dm, dynamic 2d per projected column, the norm; read-out."""
        m = self.fractions
        n, d = self.streams * m, self.layout.width // m
        wrote = m if self.config.write == "all" else 1
        columns = (n + m) * (self.dynamic_alpha_fn is not None) + wrote * (self.dynamic_beta_fn is not None)
        # layer: mean, centre, square and add, scale; rms: square and add, scale
        norm = {"layer": 5 * d, "rms": 3 * d, "none": 0}[self.config.norm] if columns else 0
        affine = sum(d for p in (self.norm_weight, self.norm_bias) if p is not None)
        per_row = 2 * d * (n + 2 * m) + 2 * d * columns + norm + affine
        return len(self.used) * n * per_row + self.plain_flops() + self.readout_flops()


def _read_one_keep_all(reads: list[int], m: int, alpha: Tensor, generator: torch.Generator | None) -> None:
    """A_m the identity at the m slices of the stream that a site reads, A_r the identity."""
    n = alpha.shape[1]
    alpha.zero_()[:, range(n), range(m, n + m)] = 1.0
    for row, read in enumerate(reads):
        alpha[row, range(read * m, read * m + m), range(m)] = 1.0
