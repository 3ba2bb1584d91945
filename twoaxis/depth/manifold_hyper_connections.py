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

Where it starts decides whether the streams come apart. The paper gives the scales, 0.01, and neither fn nor the biases.
With biases of zero every comb is 1/n up to a part in a hundred: each site replaces the streams by their mean, they stay
equal but for what the last site wrote, and equal streams give comb no gradient. DeepSeek-V4's classes have the same fn
and biases and scales of one; the biases of mhc-lite keep the streams apart from the first token. Preset `nano` on
Python's standard library, 200 steps of 16 x 64 tokens, held-out loss of two seeds; then, for the first, how far streams
are from their mean and the largest distance of an entry of comb from 1/n, in the middle of the trained model:

    plain residual      4.827  4.790        -
    start="paper"       4.814  4.786        0.006     0.014
    start="neutral"     4.814  4.784        0.057     0.749 (near the identity, where it started)
    start="lite"        4.759  4.778        0.399     0.750 (the same)
    start="deepseek"    4.689  4.697        0.330     0.748

After 400 steps the first seed's plain residual is at 4.370, start="paper" at 4.361 with the streams as equal as before,
start="deepseek" at 4.232. So the default is DeepSeek's start in both forms, and the published scale is start="paper".

What surprises: TileKernels' own defaults are 10 iterations and post_scale 1, DeepSeek-V4's 20 and 2. A reversed order
of the two divisions is common elsewhere (`order="columns_last"`) and equal only when converged. The first site's comb
gets no gradient, because its streams are copies and its sums over `from` are one whatever the logits. With the summed
or mean read-out the last site's comb gets next to none, for the same reason with the other sums; with one stream, no
comb gets any.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor

from twoaxis.base.method import Card, Normal, Quantity, Start
from twoaxis.base.options import NotNegative, Options, Positive, between
from twoaxis.depth.parallel import ParallelStreams, Projection, Route, Row, Streams
from twoaxis.depth.site import Site
from twoaxis.depth.stream import Apply, Layout, Neutral, Seen
from twoaxis.kernels.precision import widen
from twoaxis.kernels.sinkhorn import sinkhorn


@dataclass(frozen=True, kw_only=True)
class ManifoldHyperConnectionsConfig(Options):
    """Options of manifold hyper-connections; those left None take the value of the form."""

    streams: Annotated[int, between(1, 256)] = 4
    """n, the expansion rate."""
    form: Literal["paper", "deepseek"] = "paper"
    """Whose epsilons and read-out are the defaults below."""
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
    start: Literal["deepseek", "paper", "lite", "neutral"] = "deepseek"
    """Initial values, compared in the method's description.

    deepseek: fn N(0, init_std), base 0, scale 1, as DeepSeek-V4's classes.
    paper: scale 0.01 as published; fn N(0, init_std) and base 0, which the paper does not state.
    lite: the biases of FFTYYY/mhc-lite (comb near the identity; pre and post +1 at stream k mod n, -1 elsewhere);
    fn 0 and scale 0.01 are this library's choice.
    neutral: the plain residual to rounding, up to sinkhorn_eps per site; fn 0 and scale 0.01.
    """
    init_std: NotNegative = 0.02
    """Of fn at the paper's and DeepSeek's start."""

    def validate(self) -> None:
        """What is not given is as in the chosen form."""
        for field, value in _FORMS[self.form].items():
            if getattr(self, field) is None:
                object.__setattr__(self, field, value)


_FORMS: dict[str, dict[str, float | str]] = {
    "paper": {"sinkhorn_eps": 0.0, "pre_eps": 0.0, "norm_eps": 1e-20, "readout": "sum"},
    "deepseek": {"sinkhorn_eps": 1e-6, "pre_eps": 1e-6, "norm_eps": 1e-6, "readout": "head"},
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
    neutral_options = {"readout": "mean"}  # noqa: RUF012
    card = Card(
        title="mHC",
        source="one of n parallel streams",
        value="streams",
        normaliser="sigmoid for reads and writes, Sinkhorn for the mix",
        adaptivity="per token",
        window="the current n streams",
        granularity="per sub-layer",
        injection="replaces the read, the shortcut and the write",
        sharing="none",
        gating="sigmoid",
        depth_state="n streams",
        paper="Xie et al., mHC: Manifold-Constrained Hyper-Connections, arXiv 2512.24880",
        year=2025,
    )

    def __init__(self, config: ManifoldHyperConnectionsConfig, layout: Layout) -> None:
        super().__init__(config, layout, config.streams)
        n, wide, count = config.streams, config.streams * layout.width, len(self.used)
        self.has_head = head = config.readout == "head" and self.reads_out
        self.pre_eps, self.sinkhorn_eps = float(config.pre_eps or 0.0), float(config.sinkhorn_eps or 0.0)
        self.norm_eps = float(config.norm_eps or 0.0)
        fn = Normal(config.init_std) if config.start in ("paper", "deepseek") else 0.0
        scale = 1.0 if config.start == "deepseek" else 0.01
        leads = [site.index % n for site in self.used]
        plain = partial(_plain_biases, n, leads, self.pre_eps, config.post_scale)
        bases: dict[str, Start] = {"neutral": plain, "lite": partial(_lite_biases, n, leads)}
        even = _logit(1.0 / n - self.pre_eps) if n > 1 else 0.0  # of the head: the mean of the streams
        parameter = self.parameter
        parameter("fn", count, n * n + 2 * n, wide, start=fn, neutral=0.0, decay=True)
        parameter("base", count, n * n + 2 * n, start=bases.get(config.start, 0.0), neutral=plain)
        parameter("scale", count, 3, start=scale)
        parameter("norm_weight", count, wide, start=1.0, needed=config.norm_weight)
        parameter("head_fn", n, wide, start=fn, neutral=0.0, decay=True, needed=head)
        parameter("head_base", n, start=even if config.start == "neutral" else 0.0, neutral=even, needed=head)
        parameter("head_scale", 1, start=scale, needed=head)
        parameter("head_norm_weight", wide, start=1.0, needed=head and config.norm_weight)

    def tables(self) -> dict[str, Tensor]:
        """rows: fn with the norm's scale; base; scale, one per row of fn."""
        if not self.used:
            return {}
        n, rows = self.streams, widen(self.fn)
        rows = rows if self.norm_weight is None else rows * widen(self.norm_weight).unsqueeze(1)
        scales = zip(widen(self.scale).split(1, dim=1), (n, n, n * n), strict=True)
        return {"rows": rows, "base": widen(self.base), "scale": torch.cat([s.expand(-1, k) for s, k in scales], dim=1)}

    def project(self, p: Row) -> Projection:
        """All streams of a token, normalised as one vector."""
        return Projection(p["rows"], "rms", self.norm_eps, flat=True)

    def route(self, z: Tensor | None, h: Tensor, p: Row) -> Route:
        """pre, post and comb from the logits."""
        assert z is not None
        n, config = self.streams, self.config
        gates, logits = torch.addcmul(p["base"], z, p["scale"]).split((2 * n, n * n), dim=-1)
        pre, post = torch.sigmoid(gates).chunk(2, dim=-1)
        pre = pre + self.pre_eps if self.pre_eps else pre
        first = -1 if config.order == "rows_last" else -2
        comb = sinkhorn(logits.unflatten(-1, (n, n)), iterations=config.iterations, eps=self.sinkhorn_eps, first=first)
        return Route(pre, config.post_scale * post, comb.mT)  # comb is [from, to]

    def head(self, h: Tensor) -> Tensor | None:
        """w of the head of its own."""
        if not self.has_head:
            return None
        rows = widen(self.head_fn)
        rows = rows if self.head_norm_weight is None else rows * widen(self.head_norm_weight)
        z, _ = self.logits(h, Projection(rows, "rms", self.norm_eps, flat=True))
        assert z is not None
        return torch.sigmoid(torch.addcmul(widen(self.head_base), z, widen(self.head_scale))) + self.pre_eps

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

    @property
    def neutral(self) -> Neutral:
        """Rounding where biases make pre sum to one; scale with one stream or a summed read-out; none with epsilons."""
        n = self.streams
        if self.used:
            narrow = n > 1 and self.pre_eps >= (1.0 - _LEADER) / (n - 1)
            if self.sinkhorn_eps > 0.0 or self.config.post_scale <= 1.0 or narrow:
                return "none"
        if n == 1:
            # a sigmoid is never one: the only stream is read, or read out, at half its size
            return "scale" if self.used or self.has_head else "bitwise"
        if self.reads_out and self.config.readout == "sum":
            return "scale"
        return "rounding" if self.used or self.has_head else "bitwise"

    def _quantities(
        self, value: Streams, site: Site, y: Tensor | None, seen: Seen, c: Seen | None
    ) -> dict[str, Quantity]:
        """As hyper-connections', and how far the row or column sum of H_res that is worst is from one."""
        found = super()._quantities(value, site, y, seen, c)
        if not found:
            return found
        mix = found["mix"].value
        off = (torch.cat([mix.sum(-1), mix.sum(-2)], dim=-1) - 1.0).abs().amax(-1)
        return {**found, "distance from doubly stochastic": Quantity(off)}

    def flops(self) -> int:
        """Per site the projection 2nd(n²+2n), the mean square 2nd, read 2nd, mix 2n²d and write 2nd; the read-out."""
        n, d = self.streams, self.layout.width
        norm = 2 * n * d + (n * d if self.config.norm_weight else 0)  # the root goes into the logits
        per_site = 2 * n * d * (n * n + 2 * n) + norm + (2 * n * n + 4 * n) * d
        head = 2 * n * d * n + norm + 2 * n * d if self.has_head else 0
        return len(self.used) * per_site + head + self.plain_flops() + self.readout_flops()


def _plain_biases(
    n: int, leads: list[int], eps: float, most: float, base: Tensor, generator: torch.Generator | None
) -> None:
    """pre sums to one with most of it on one stream, post is one, comb nearly the identity."""
    _near_identity(n, base)
    rest = (1.0 - _LEADER) / (n - 1) if n > 1 else 0.0
    base[:, :n] = _logit(rest - eps) if n > 1 else 0.0
    base[:, n : 2 * n] = _logit(1.0 / most)
    if n > 1:
        base[range(len(leads)), leads] = _logit(_LEADER - eps)


def _lite_biases(n: int, leads: list[int], base: Tensor, generator: torch.Generator | None) -> None:
    """pre and post +1 at one stream and -1 elsewhere, comb nearly the identity."""
    _near_identity(n, base)
    base[:, : 2 * n] = -1.0
    for first in (0, n):
        base[range(len(leads)), [first + lead for lead in leads]] = 1.0


def _near_identity(n: int, base: Tensor) -> None:
    base[:, 2 * n :] = _OFF
    base[:, 2 * n :: n + 1] = 0.0


def _logit(p: float) -> float:
    """The bias at which a sigmoid is `p`, kept inside what a sigmoid reaches."""
    p = min(max(p, 1e-6), 1.0 - 1e-6)
    return math.log(p / (1.0 - p))
