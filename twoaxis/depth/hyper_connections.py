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
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis.base.method import Card, ParameterGroup, Published
from twoaxis.base.options import NotNegative, Options, between
from twoaxis.depth.parallel_streams import ParallelStreams, Route
from twoaxis.depth.rows import Rows
from twoaxis.depth.stream import Apply, Cost, Layout, Neutral, Seen
from twoaxis.kernels.precision import narrowed, widen
from twoaxis.kernels.streams import few, normalised, stream_logits


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
    """Inside the norm's root; the paper does not give it. 0 needs states without all-zero streams."""
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
    card = Card(
        title="Hyper-Connections",
        axis="depth",
        source="one of n parallel streams",
        query="-",
        key="-",
        value="streams",
        literal_qkv=False,
        normaliser="none",
        adaptivity="static scalars plus a per-token part",
        window="the current n streams",
        granularity="per sub-layer",
        ways="one",
        injection="replaces the read, the shortcut and the write",
        sharing="projections shared by the streams of a site",
        gating="bounded additive (tanh times a learned scale)",
        depth_state="n streams",
        token_state="none",
        paper="Zhu et al., Hyper-Connections, arXiv 2409.19606",
        year=2024,
        quirks=(
            "The read-out is the sum of the streams, n times the plain residual at the start.",
            "The paper multiplies the initial standard deviation of output projections by sqrt(n).",
            "alpha[i, j] is the weight from stream i to output j: new streams are the transpose of A_r times the old.",
            "With one stream the dynamic form is worse than the plain residual.",
        ),
        published=(
            Published("OLMo-1B, 500B tokens, V2 loss: plain 2.811, SHC x4 2.791, DHC x4 2.781", "arXiv 2409.19606"),
            Published("OLMo-1B, DHC x1 2.819 against plain 2.811: one stream does not help", "arXiv 2409.19606"),
            Published("OLMo-1B, frozen width connections cost 0.021, frozen beta 0.002 (V2)", "arXiv 2409.19606"),
            Published("OLMo-7B, DHC x4: V2 loss 2.581 to 2.559, downstream average 70.1 to 71.0", "arXiv 2409.19606"),
            Published("OLMoE-1B-7B, DHC x4: training loss -0.027, 1.8 times faster", "arXiv 2409.19606"),
        ),
    )
    stacked = (
        *("static_alpha", "static_beta", "dynamic_alpha_fn", "dynamic_alpha_scale"),
        *("dynamic_beta_fn", "dynamic_beta_scale", "norm_weight", "norm_bias"),
    )
    static_alpha: Tensor
    static_beta: Tensor
    dynamic_alpha_fn: nn.Parameter | None
    dynamic_alpha_scale: nn.Parameter | None
    dynamic_beta_fn: nn.Parameter | None
    dynamic_beta_scale: nn.Parameter | None
    norm_weight: nn.Parameter | None
    norm_bias: nn.Parameter | None

    @classmethod
    def controls(cls, config: HyperConnectionsConfig) -> tuple[dict[str, Any], ...]:
        """Several streams whose mixing does not learn."""
        return ({"frozen": "both"},) if config.frozen == "none" else ()

    def __init__(self, config: HyperConnectionsConfig, layout: Layout) -> None:
        super().__init__(config, layout)
        n, d, count = config.streams, layout.width, len(self.rows)
        self.width_free = config.frozen not in ("width", "both")
        self.depth_free = config.frozen not in ("depth", "both")
        alpha, beta = config.dynamic and self.width_free, config.dynamic and self.depth_free
        normed = (alpha or beta) and config.norm != "none" and config.affine

        def parameter(name: str, *shape: int, needed: bool, free: bool = True) -> None:
            values = torch.empty(count, *shape)
            if not needed or count == 0:
                self.register_parameter(name, None)
            elif free:
                self.register_parameter(name, nn.Parameter(values))
            else:
                self.register_buffer(name, values)

        parameter("static_alpha", n, n + 1, needed=True, free=self.width_free)
        parameter("static_beta", n, needed=True, free=self.depth_free)
        parameter("dynamic_alpha_fn", d, n + 1, needed=alpha)
        parameter("dynamic_alpha_scale", needed=alpha)
        parameter("dynamic_beta_fn", d, needed=beta)
        parameter("dynamic_beta_scale", needed=beta)
        parameter("norm_weight", d, needed=normed)
        parameter("norm_bias", d, needed=normed and config.norm == "layer")

    def definition(self, x: Tensor, apply: Apply) -> Tensor:
        """Algorithm 2, stream by stream: a list of n streams, each of which has its row of α and its β."""
        n, streams = self.config.streams, [x] * self.config.streams
        for site in self.sites:
            row, alpha, beta = site.index, [], []
            for i, h in enumerate(streams):
                a, b = self.static_alpha[row, i].expand(*h.shape[:-1], -1), self.static_beta[row, i]
                normed = self._defined_norm(h, row)
                bound = torch.tanh if self.config.tanh else _identity
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

    def reset_parameters(self, generator: torch.Generator | None = None, std: float = 0.02) -> None:
        """Read stream k mod n, keep every stream, write to all with weight one; no dynamic part: the plain residual."""
        n = self.config.streams
        starts = {"dynamic_alpha_scale": self.config.scale_start, "dynamic_beta_scale": self.config.scale_start}
        starts |= {"norm_weight": 1.0}
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.fill_(starts.get(name, 0.0))
            if not self.rows:
                return
            self.static_beta.fill_(1.0)
            self.static_alpha.zero_()
            self.static_alpha[:, range(n), range(1, n + 1)] = 1.0
            for index, row in self.rows.items():
                self.static_alpha[row, index % n, 0] = 1.0

    def neutral_(self) -> None:
        """The initial values are neutral."""
        self.reset_parameters()

    @property
    def neutral(self) -> Neutral:
        """Weights of one and zero move streams without rounding; the summed read-out is n times the plain residual."""
        summed = self.config.readout == "sum" and self.config.streams > 1 and self.uses(self.layout.out)
        return "scale" if summed else "bitwise"

    @property
    def output_scale(self) -> float:
        """sqrt(n), the paper's factor on the initial deviation of output projections; for the summed read-out only."""
        return self.config.streams**0.5 if self.config.readout == "sum" and self.rows else 1.0

    # The weights of a site.

    def coefficients(self, h: Tensor, row: int) -> tuple[Tensor, Tensor]:
        """α (..., N, N+1) and β (..., N) of the site with parameter row `row`; no leading dimensions where static."""
        return self._coefficients(h, row, Rows.of(self, self.stacked))[:2]

    def _coefficients(self, h: Tensor, row: int, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """α, β, and the streams to go on with."""
        alpha, beta = widen(rows.rows["static_alpha"][row]), widen(rows.rows["static_beta"][row])
        alpha_fn, beta_fn = rows.get("dynamic_alpha_fn", row), rows.get("dynamic_beta_fn", row)
        if alpha_fn is None and beta_fn is None:
            return alpha, beta, h
        t_alpha, t_beta, h = self._dynamic(
            h, alpha_fn, beta_fn, rows.get("norm_weight", row), rows.get("norm_bias", row)
        )
        if t_alpha is not None:
            alpha = torch.addcmul(alpha, t_alpha, widen(rows.rows["dynamic_alpha_scale"][row]))
        if t_beta is not None:
            beta = torch.addcmul(beta, t_beta, widen(rows.rows["dynamic_beta_scale"][row]))
        return alpha, beta, h

    def _dynamic(
        self, h: Tensor, alpha_fn: Tensor | None, beta_fn: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """The dynamic parts of α (..., N, N+1) and β (..., N) before their scales, and the streams to go on with."""
        norm, eps, bound = self.config.norm, self.config.eps, torch.tanh if self.config.tanh else _identity
        if few(h) and not torch.is_grad_enabled() and not narrowed(h.device.type):
            # for a few tokens putting the projections together would cost more than one product saves
            x = normalised(h, weight, bias, norm, eps)
            parts = [None if fn is None else bound(x @ widen(fn)) for fn in (alpha_fn, beta_fn)]
            return parts[0], parts[1], h
        fns = ([] if alpha_fn is None else [alpha_fn.mT]) + ([] if beta_fn is None else [beta_fn.unsqueeze(0)])
        t, h = stream_logits(h, torch.cat(fns), weight, bias, norm=norm, eps=eps)
        t = bound(t)
        columns = t.shape[-1] - (beta_fn is not None)
        return None if alpha_fn is None else t[..., :columns], None if beta_fn is None else t[..., -1], h

    def _route(self, h: Tensor, row: int, rows: Rows) -> Route:
        alpha, beta, h = self._coefficients(h, row, rows)
        return Route(alpha.select(-1, 0), alpha.narrow(-1, 1, self.config.streams).mT, beta, h)

    # What it declares.

    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        """As in the paper: the dynamic part is decayed, the static is not (and the norm's parameters are not)."""
        names = [name for name, _ in self.named_parameters()]
        groups = [
            ParameterGroup(tuple(n for n in names if not n.startswith("dynamic"))),
            ParameterGroup(tuple(n for n in names if n.startswith("dynamic")), decay=True),
        ]
        return tuple(g for g in groups if g.names)

    def cost(self) -> Cost:
        """Read and mix 2dn(n+1), write 2dn, dynamic 2dn per projected column and the norm; the read-out."""
        n, d, config = self.config.streams, self.layout.width, self.config
        columns = (n + 1) * (self.dynamic_alpha_fn is not None) + (self.dynamic_beta_fn is not None)
        per_site = 2 * d * n * (n + 1) + 2 * d * n + 2 * d * n * columns
        if columns:
            # layer: mean, centre, square and add, scale; rms: square and add, scale
            norm = {"layer": 5 * d, "rms": 3 * d, "none": 0}[config.norm]
            affine = sum(d for p in (self.norm_weight, self.norm_bias) if p is not None)
            per_site += n * (norm + affine)
        mean, used = (2 * n + 1) * d, len(self.rows)
        plain = len(self.layout.sublayers) - used
        flops = used * per_site + plain * (mean + (n - 1) * d)
        flops += (n - 1) * d if config.readout == "sum" and self.uses(self.layout.out) else mean
        parameters = sum(p.numel() for p in self.parameters())
        return Cost(parameters=parameters, flops=flops, reads=n * len(self.layout.sites), live=n * d)


def _identity(x: Tensor) -> Tensor:
    return x
