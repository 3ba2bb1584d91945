"""Manifold hyper-connections (mHC): hyper-connections whose stream mixing is doubly stochastic.

Xie et al.: mHC: Manifold-Constrained Hyper-Connections, arXiv 2512.24880 (2025). Runs in DeepSeek-V4. Code agreed with:
deepseek-ai/TileKernels (its torch reference), which equals DeepSeek-V4's in transformers.

    v    = the n streams of a token in one vector, stream after stream (nD)
    z    = (v fnᵀ) (mean(v²) + norm_eps)^(-1/2)                        norm after the matrix product
    pre  = σ(s_0 z_pre + b_pre) + pre_eps                              (n)
    post = post_scale σ(s_1 z_post + b_post)                           (n)
    comb = Sinkhorn(s_2 z_comb + b_comb)                               (n, n) [from, to]; H_res is its transpose
    x    = Σ_i pre[i] H[i]
    H⁺_o = Σ_i comb[i,o] H[i] + post[o] F(norm(x))

         ┌─────────── comb (doubly stochastic) ─────────┐
    H ═══╪══════════════════════════════════════════════(+)═══ H⁺    ═ n streams
         └─ pre ─ x ─ norm ─ F ─ y ─ post ───────────────┘

    Sinkhorn: softmax over `to`, divide by the sums over `from`, then (iterations - 1) times both divisions.
    The sums over `from`, the forward gain of an output stream, are divided by last and hence exactly one.

A doubly stochastic matrix has spectral norm at most one, and products of such matrices are doubly stochastic: whatever
the depth, mixing neither amplifies nor loses the mean of the streams. Differences from hyper-connections besides: each
coefficient sees all streams of the token, none is negative, there is no tanh.

`form="paper"` has no epsilon in pre and Sinkhorn and reads out the sum of the streams. `form="deepseek"` adds 1e-6 to
pre, after the softmax and to every divisor, and reads out through a head of its own:

    w = σ(s (v fn_headᵀ) / rms + b) + pre_eps        out = Σ_i w_i H[i]

Parameters are packed as in DeepSeek-V4: fn rows are [pre | post | comb row by row], base likewise, scale is (pre, post,
comb); here they are stacked by site.

At zero logits pre = 1/2, post = 1 and comb = 1/n, hence with equal streams H⁺ = x + F(n/2 x): the plain residual up to
the pre-norm's epsilon. `neutral_` reaches the plain residual to rounding with biases alone: pre sums to one (3/4 on
stream k mod n, so that streams can come apart), post is one, comb nearly the identity (0 on the diagonal, -8 off it).
That holds for Sinkhorn without epsilon; with one, every site loses a share sinkhorn_eps of the stream and the class is
none.

What surprises: TileKernels' own defaults are 10 iterations and post_scale 1, DeepSeek-V4's 20 and 2. A reversed order
of the two divisions is common elsewhere (`order="columns_last"`) and equal only when converged. The first site's comb
gets no gradient, because its streams are copies and its sums over `from` are one whatever the logits. With the summed
or mean read-out the last site's comb gets next to none, for the same reason with the other sums; with one stream, no
comb gets any.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from twoaxis.base.method import Card, ParameterGroup, Published, Quantity
from twoaxis.base.options import NotNegative, Options, Positive, between
from twoaxis.depth.parallel_streams import ParallelStreams, Route, Streams
from twoaxis.depth.rows import Rows
from twoaxis.depth.site import Site
from twoaxis.depth.stream import Apply, Cost, Layout, Neutral, Seen
from twoaxis.kernels.precision import widen
from twoaxis.kernels.sinkhorn import sinkhorn
from twoaxis.kernels.streams import stream_logits


@dataclass(frozen=True, kw_only=True)
class ManifoldHyperConnectionsConfig(Options):
    """Options of manifold hyper-connections; those left None take the value of the form."""

    streams: Annotated[int, between(1, 256)] = 4
    """n, the expansion rate."""
    form: Literal["paper", "deepseek"] = "paper"
    """Whose epsilons, read-out and start are the defaults below."""
    iterations: Annotated[int, between(1, 1000)] = 20
    """Pairs of Sinkhorn divisions."""
    order: Literal["rows_last", "columns_last"] = "rows_last"
    """Which sums of H_res[to, from] are exactly one: rows, as published, or columns."""
    sinkhorn_eps: NotNegative | None = None
    """Added after the softmax and to every later divisor; paper 0, deepseek 1e-6."""
    pre_eps: NotNegative | None = None
    """Added to pre and to the head's weights; paper 0, deepseek 1e-6."""
    norm_eps: NotNegative | None = None
    """Inside the root mean square; paper 1e-20, deepseek 1e-6."""
    post_scale: Positive = 2.0
    """Largest value of post."""
    norm_weight: bool = False
    """A scale per channel of the norm; it is the same function as without, its product with fn is what counts."""
    readout: Literal["sum", "mean", "head"] | None = None
    """The sum of the streams, their mean, or a weighted sum with a head of its own; paper sum, deepseek head."""
    start: Literal["paper", "deepseek", "lite", "neutral"] | None = None
    """Initial values; None is those of the form. See `reset_parameters`."""
    init_std: NotNegative = 0.02
    """Of fn at the paper's and DeepSeek's start."""

    def validate(self) -> None:
        """What is not given is as in the chosen form."""
        for field, value in _FORMS[self.form].items():
            if getattr(self, field) is None:
                object.__setattr__(self, field, value)


_FORMS: dict[str, dict[str, float | str]] = {
    "paper": {"sinkhorn_eps": 0.0, "pre_eps": 0.0, "norm_eps": 1e-20, "readout": "sum", "start": "paper"},
    "deepseek": {"sinkhorn_eps": 1e-6, "pre_eps": 1e-6, "norm_eps": 1e-6, "readout": "head", "start": "deepseek"},
}

_LEADER = 0.75  # how much of a neutral read comes from one stream
_OFF = -8.0  # comb's logits off the diagonal where it starts near the identity


class ManifoldHyperConnections(ParallelStreams):
    """Reads, doubly stochastic mixes and writes of n streams."""

    name = "manifold_hyper_connections"
    Config = ManifoldHyperConnectionsConfig
    config: ManifoldHyperConnectionsConfig
    variants = (
        {},
        {"form": "deepseek", "norm_weight": True},
        {"start": "neutral", "readout": "mean", "streams": 3},
        {"start": "lite", "readout": "head", "order": "columns_last", "streams": 2},
        {"streams": 1, "iterations": 3},
    )
    card = Card(
        title="mHC",
        axis="depth",
        source="one of n parallel streams",
        query="-",
        key="-",
        value="streams",
        literal_qkv=False,
        normaliser="sigmoid for reads and writes, Sinkhorn for the mix",
        adaptivity="per token",
        window="the current n streams",
        granularity="per sub-layer",
        ways="one",
        injection="replaces the read, the shortcut and the write",
        sharing="none",
        gating="sigmoid",
        depth_state="n streams",
        token_state="none",
        paper="Xie et al., mHC: Manifold-Constrained Hyper-Connections, arXiv 2512.24880",
        year=2025,
        quirks=(
            "The stored comb is the transpose of the paper's H_res.",
            "The first site's comb gets no gradient: its streams are copies, and mixing copies changes nothing.",
            "Initial biases are not published; DeepSeek-V4 starts at zero, where every stream is the same.",
            "Implementations with the two Sinkhorn divisions swapped agree only when converged.",
        ),
        published=(
            Published("27B MoE, 262B tokens: final loss -0.021 against plain", "arXiv 2512.24880"),
            Published("27B MoE: BBH 43.8 plain, 48.9 hyper-connections, 51.0 mHC", "arXiv 2512.24880"),
            Published("27B MoE: gain over all layers about 3000 hyper-connections, 1.6 mHC", "arXiv 2512.24880"),
            Published("n=4: 6.7 % more training time with fused kernels and recomputation", "arXiv 2512.24880"),
        ),
    )
    stacked = ("fn", "base", "scale", "norm_weight")
    fn: nn.Parameter
    base: nn.Parameter
    scale: nn.Parameter
    norm_weight: nn.Parameter | None
    head_fn: nn.Parameter
    head_base: nn.Parameter
    head_scale: nn.Parameter
    head_norm_weight: nn.Parameter | None

    def __init__(self, config: ManifoldHyperConnectionsConfig, layout: Layout) -> None:
        super().__init__(config, layout)
        n, wide = config.streams, config.streams * layout.width
        self.has_head = config.readout == "head" and self.uses(layout.out)
        self.pre_eps, self.sinkhorn_eps = float(config.pre_eps or 0.0), float(config.sinkhorn_eps or 0.0)
        self.norm_eps = float(config.norm_eps or 0.0)

        def parameter(name: str, *shape: int, needed: bool = True) -> None:
            self.register_parameter(name, nn.Parameter(torch.empty(*shape)) if needed else None)

        count, some = len(self.rows), bool(self.rows)
        parameter("fn", count, n * n + 2 * n, wide, needed=some)
        parameter("base", count, n * n + 2 * n, needed=some)
        parameter("scale", count, 3, needed=some)
        parameter("norm_weight", count, wide, needed=some and config.norm_weight)
        parameter("head_fn", n, wide, needed=self.has_head)
        parameter("head_base", n, needed=self.has_head)
        parameter("head_scale", 1, needed=self.has_head)
        parameter("head_norm_weight", wide, needed=self.has_head and config.norm_weight)

    def definition(self, x: Tensor, apply: Apply) -> Tensor:
        """The equations on a list of n streams, with Sinkhorn's divisions written out."""
        config, n = self.config, self.config.streams
        eps, pre_eps = config.sinkhorn_eps or 0.0, config.pre_eps or 0.0
        rows, columns = (-1, -2) if config.order == "rows_last" else (-2, -1)
        streams = [x] * n
        for site in self.sites:
            row = site.index
            weight = None if self.norm_weight is None else self.norm_weight[row]
            z = self._defined_logits(streams, self.fn[row], weight)
            scale, base = self.scale[row], self.base[row]
            pre = torch.sigmoid(scale[0] * z[..., :n] + base[:n]) + pre_eps
            post = config.post_scale * torch.sigmoid(scale[1] * z[..., n : 2 * n] + base[n : 2 * n])
            comb = (scale[2] * z[..., 2 * n :] + base[2 * n :]).unflatten(-1, (n, n))  # from, to
            comb = comb.softmax(rows) + eps
            comb = comb / (comb.sum(columns, keepdim=True) + eps)
            for _ in range(config.iterations - 1):
                comb = comb / (comb.sum(rows, keepdim=True) + eps)
                comb = comb / (comb.sum(columns, keepdim=True) + eps)
            old = torch.stack(streams, dim=-1)  # (B, T, D, from)
            y = apply(site, Seen((old * pre.unsqueeze(-2)).sum(-1))).y
            streams = [(old * comb[..., None, :, j]).sum(-1) + post[..., j, None] * y for j in range(n)]
        last = torch.stack(streams, dim=-1)
        if config.readout != "head":
            return last.sum(-1) if config.readout == "sum" else last.mean(-1)
        z = self._defined_logits(streams, self.head_fn, self.head_norm_weight)
        weights = torch.sigmoid(self.head_scale * z + self.head_base) + pre_eps
        return (last * weights.unsqueeze(-2)).sum(-1)

    def _defined_logits(self, streams: list[Tensor], fn: Tensor, weight: Tensor | None) -> Tensor:
        """z, the streams of a token as one normalised vector against the rows of fn; for `definition`."""
        v = torch.cat(streams, dim=-1)
        v = v / torch.sqrt(v.square().mean(-1, keepdim=True) + (self.config.norm_eps or 0.0))
        return (v if weight is None else v * weight) @ fn.T

    def reset_parameters(self, generator: torch.Generator | None = None, std: float = 0.02) -> None:
        """The start that the option names.

        paper: scale 0.01 as published; fn N(0, init_std) and base 0, which the paper does not state.
        deepseek: fn N(0, init_std), base 0, scale 1, as DeepSeek-V4's classes.
        lite: the biases of FFTYYY/mhc-lite (comb near the identity; pre and post +1 at stream k mod n, -1 elsewhere);
        fn 0 and scale 0.01 are this library's choice.
        neutral: the plain residual to rounding, up to sinkhorn_eps per site; fn 0 and scale 0.01.
        """
        start, n = self.config.start, self.config.streams
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("fn") and start in ("paper", "deepseek"):
                    parameter.normal_(0.0, self.config.init_std, generator=generator)
                elif name.endswith("norm_weight"):
                    parameter.fill_(1.0)
                elif name.endswith("scale"):
                    parameter.fill_(1.0 if start == "deepseek" else 0.01)
                else:
                    parameter.zero_()
            if start == "neutral":
                self._neutral_biases()
            elif start == "lite":
                for index, row in self.rows.items():
                    self._near_identity(row)
                    self.base[row, : 2 * n] = -1.0
                    self.base[row, [index % n, n + index % n]] = 1.0

    def neutral_(self) -> None:
        """Biases alone, at which equal streams stay equal and each is the plain residual."""
        if self.neutral == "none":
            super().neutral_()
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("fn"):
                    parameter.zero_()
            self._neutral_biases()

    def _neutral_biases(self) -> None:
        n, eps = self.config.streams, self.pre_eps
        rest = (1.0 - _LEADER) / (n - 1) if n > 1 else 0.0
        for index, row in self.rows.items():
            self._near_identity(row)
            self.base[row, :n] = _logit(rest - eps) if n > 1 else 0.0
            self.base[row, n : 2 * n] = _logit(1.0 / self.config.post_scale)
            if n > 1:
                self.base[row, index % n] = _logit(_LEADER - eps)
        if self.has_head:
            self.head_base.fill_(_logit(1.0 / n - eps) if n > 1 else 0.0)

    def _near_identity(self, row: int) -> None:
        n = self.config.streams
        self.base[row, 2 * n :] = _OFF
        self.base[row, range(2 * n, n * n + 2 * n, n + 1)] = 0.0

    @property
    def neutral(self) -> Neutral:
        """Rounding where biases make pre sum to one; scale with one stream or a summed read-out; none with epsilons."""
        n, out = self.config.streams, self.uses(self.layout.out)
        if self.rows:
            narrow = n > 1 and self.pre_eps >= (1.0 - _LEADER) / (n - 1)
            if self.sinkhorn_eps > 0.0 or self.config.post_scale <= 1.0 or narrow:
                return "none"
        if n == 1:
            # a sigmoid is never one: the only stream is read, or read out, at half its size
            return "scale" if self.rows or self.has_head else "bitwise"
        if out and self.config.readout == "sum":
            return "scale"
        return "rounding" if self.rows or self.has_head else "bitwise"

    # The weights of a site.

    def _logits(self, h: Tensor, fn: Tensor, norm_weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """z (..., P): all streams of a token, RMS-normalised as one vector, against the rows of fn; the streams."""
        z, flat = stream_logits(h.flatten(-2), fn, norm_weight, None, norm="rms", eps=self.norm_eps)
        return z, flat.unflatten(-1, h.shape[-2:])

    def coefficients(self, h: Tensor, row: int) -> tuple[Tensor, Tensor, Tensor]:
        """pre (..., N), post (..., N) and comb (..., N from, N to) of the site with parameter row `row`."""
        return self._coefficients(h, row, Rows.of(self, self.stacked))[:3]

    def _coefficients(self, h: Tensor, row: int, rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """pre, post, comb, and the streams to go on with."""
        n = self.config.streams
        z, h = self._logits(h, rows.rows["fn"][row], rows.get("norm_weight", row))
        scale, base = widen(rows.rows["scale"][row]), widen(rows.rows["base"][row])
        pre = torch.sigmoid(scale[0] * z[..., :n] + base[:n]) + self.pre_eps
        post = self.config.post_scale * torch.sigmoid(scale[1] * z[..., n : 2 * n] + base[n : 2 * n])
        logits = (scale[2] * z[..., 2 * n :] + base[2 * n :]).unflatten(-1, (n, n))
        first = -1 if self.config.order == "rows_last" else -2
        comb = sinkhorn(logits, iterations=self.config.iterations, eps=self.sinkhorn_eps, first=first)
        return pre, post, comb, h

    def _route(self, h: Tensor, row: int, rows: Rows) -> Route:
        pre, post, comb, h = self._coefficients(h, row, rows)
        return Route(pre, comb.mT, post, h)

    def head_weights(self, h: Tensor) -> Tensor:
        """(..., N) what the head reads of each stream."""
        z, _ = self._logits(h, self.head_fn, self.head_norm_weight)
        return torch.sigmoid(widen(self.head_scale) * z + widen(self.head_base)) + self.pre_eps

    def _head(self, h: Tensor) -> Tensor | None:
        return self.head_weights(h) if self.has_head else None

    def _quantities(
        self, value: Streams, site: Site, y: Tensor | None, seen: Seen, c: Seen | None
    ) -> dict[str, Quantity]:
        """As hyper-connections', and how far the row or column sum of H_res that is worst is from one."""
        found = super()._quantities(value, site, y, seen, c)
        if seen.aux is None:
            return found
        mix = seen.aux.weights
        sums = torch.cat([mix.sum(-1), mix.sum(-2)], dim=-1)
        off = (sums - 1.0).abs().amax(-1)
        return {**found, "distance from doubly stochastic": Quantity(off)}

    # What it declares.

    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        """Nothing is published; projections are decayed like any matrix, biases and scales are not."""
        names = [name for name, _ in self.named_parameters()]
        groups = [
            ParameterGroup(tuple(n for n in names if n.endswith("fn")), decay=True),
            ParameterGroup(tuple(n for n in names if not n.endswith("fn"))),
        ]
        return tuple(g for g in groups if g.names)

    def cost(self) -> Cost:
        """Per site the projection 2nd(n²+2n), the mean square 2nd, read 2nd, mix 2n²d and write 2nd; the read-out."""
        n, d = self.config.streams, self.layout.width
        norm = 2 * n * d + (n * d if self.config.norm_weight else 0)  # the root goes into the logits
        per_site = 2 * n * d * (n * n + 2 * n) + norm + (2 * n * n + 4 * n) * d
        mean, used = (2 * n + 1) * d, len(self.rows)
        plain = len(self.layout.sublayers) - used
        flops = used * per_site + plain * (mean + (n - 1) * d)
        if self.has_head:
            flops += 2 * n * d * n + norm + 2 * n * d
        else:
            flops += (n - 1) * d if self.config.readout == "sum" and self.uses(self.layout.out) else mean
        parameters = sum(p.numel() for p in self.parameters())
        return Cost(parameters=parameters, flops=flops, reads=n * len(self.layout.sites), live=n * d)


def _logit(p: float) -> float:
    """The bias at which a sigmoid is `p`, kept inside what a sigmoid reaches."""
    p = min(max(p, 1e-6), 1.0 - 1e-6)
    return math.log(p / (1.0 - p))
