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

`mix` says what becomes of the streams between two sites; one function from logits to H_res, the rest is the same:

    sinkhorn     n n logits: doubly stochastic, as above
    identity     no logits: H_res = I, the streams never meet but in what is read and written (iHC)
    orthogonal   8 logits: H_res in SO(4), two quaternions p and q by their length, H⁺ = p H q + ... (oHC; four streams)

`form="hy_v4"` is the identity mix as it ships in HY-V4 (transformers' modeling_hy_v4; short `ihc`): epsilons in pre and
in post, 2n rows of fn and two scales, a head of its own, and pre of 1/n at the start. oHC, arXiv 2609.02672, is known
here by its idea alone, SO(4) from two quaternions. The rest is a reading: which logits make them (the last 8 rows of
fn, p then q, real part first), that the four streams are the four parts of H, and the start, scales of 0.01 and biases
of one in the real part, at which H_res is nearly the identity.

Parameters are packed as in DeepSeek-V4: fn rows are [pre | post | comb row by row], base likewise, scale is (pre, post,
comb); here they are stacked by site. Without comb its rows, biases and scale are not there.

At zero logits pre = 1/2, post = 1 and comb = 1/n, hence with equal streams H⁺ = x + F(n/2 x): the plain residual up to
the pre-norm's epsilon. `neutral_` reaches the plain residual to rounding with biases alone: pre sums to one (3/4 on
stream k mod n, so that streams can come apart), post is one, comb nearly the identity (0 on the diagonal, -8 off it).
That holds for Sinkhorn without epsilon; with one, every site loses a share sinkhorn_eps of the stream and the class is
none.

Where it starts decides whether the streams come apart. The paper gives the scales, 0.01, and neither fn nor the biases.
With biases of zero every comb is 1/n up to a part in a hundred: each site replaces the streams by their mean, they stay
equal but for what the last site wrote, and equal streams give comb no gradient. DeepSeek-V4's classes have the same fn
and biases and scales of one; the biases of mhc-lite keep the streams apart from the first token. Preset `nano` from
N(0, 0.02) on Python's standard library, 200 steps of 16 x 64 tokens, held-out loss of two seeds; then, for the first,
how far streams are from their mean and the largest distance of an entry of comb from 1/n, in the middle of the trained
model:

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
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor

from twoaxis.base.method import Neutral, Normal, Quantity, parallel_card
from twoaxis.base.options import NotNegative, Options, Positive, between
from twoaxis.depth.parallel import ParallelStreams, Projection, Route, Streams
from twoaxis.depth.site import Site
from twoaxis.depth.stream import Apply, Layout, Row, Seen
from twoaxis.kernels.precision import widen
from twoaxis.kernels.sinkhorn import sinkhorn


@dataclass(frozen=True, kw_only=True)
class ManifoldHyperConnectionsConfig(Options):
    """Options of manifold hyper-connections; those left None take the value of the form."""

    streams: Annotated[int, between(1, 256)] = 4
    """n, the expansion rate."""
    form: Literal["paper", "deepseek", "hy_v4"] = "paper"
    """Whose mix, epsilons, read-out and start are the defaults below."""
    mix: Literal["sinkhorn", "identity", "orthogonal"] | None = None
    """What happens to the streams between two sites; paper and deepseek sinkhorn, hy_v4 identity."""
    iterations: Annotated[int, between(1, 1000)] = 20
    """Pairs of Sinkhorn divisions."""
    order: Literal["rows_last", "columns_last"] = "rows_last"
    """Which sums of H_res[to, from] are exactly one: rows, as published, or columns."""
    sinkhorn_eps: NotNegative | None = None
    """Added after the softmax and to every later divisor; paper 0, deepseek 1e-6."""
    pre_eps: NotNegative | None = None
    """Added to pre and to the head's weights; paper 0, the others 1e-6."""
    post_eps: NotNegative | None = None
    """Added to post; hy_v4 1e-6, the others 0."""
    norm_eps: NotNegative | None = None
    """Inside the root mean square; paper 1e-20, the others 1e-6."""
    post_scale: Positive = 2.0
    """Largest value of post."""
    norm_weight: bool = False
    """A scale per channel of the norm; it is the same function as without, its product with fn is what counts."""
    readout: Literal["sum", "mean", "head"] | None = None
    """The sum of the streams, their mean, or a weighted sum with a head of its own; paper sum, the others head."""
    start: Literal["deepseek", "paper", "lite", "hy_v4", "neutral"] | None = None
    """Initial values, compared in the method's description; deepseek, for hy_v4 hy_v4, for a rotation paper.

    deepseek: fn N(0, init_std), base 0, scale 1, as DeepSeek-V4's classes.
    paper: scale 0.01 as published; fn N(0, init_std) and base 0, which the paper does not state.
    lite: the biases of FFTYYY/mhc-lite (comb near the identity; pre and post +1 at stream k mod n, -1 elsewhere);
    fn 0 and scale 0.01 are this library's choice.
    hy_v4: fn N(0, init_std), scale 0.01, and biases that make pre and the head's weights 1/n and post 1.
    neutral: the plain residual to rounding, up to sinkhorn_eps per site; fn 0 and scale 0.01.
    """
    init_std: NotNegative = 0.02
    """Of fn at the paper's, DeepSeek's and HY-V4's start."""

    def validate(self) -> None:
        """What is not given is as in the chosen form."""
        if self.mix == "orthogonal" and self.start is None:
            object.__setattr__(self, "start", "paper")
        for field, value in zip(_LEFT_OPEN, _FORMS[self.form], strict=True):
            if getattr(self, field) is None:
                object.__setattr__(self, field, value)
        if self.mix == "orthogonal" and self.streams != 4:
            raise ValueError(f"mix='orthogonal' turns four streams by quaternions, got streams={self.streams}")


_LEFT_OPEN = ("mix", "start", "readout", "sinkhorn_eps", "pre_eps", "post_eps", "norm_eps")
_FORMS = {
    "paper": ("sinkhorn", "deepseek", "sum", 0.0, 0.0, 0.0, 1e-20),
    "deepseek": ("sinkhorn", "deepseek", "head", 1e-6, 1e-6, 0.0, 1e-6),
    "hy_v4": ("identity", "hy_v4", "head", 0.0, 1e-6, 1e-6, 1e-6),
}

_LEADER = 0.75  # how much of a neutral read comes from one stream
_OFF = -8.0  # comb's logits off the diagonal where it starts near the identity


class Biases(NamedTuple):
    """A start: base, [pre | post | comb] of every site, as the option `start` describes it."""

    config: ManifoldHyperConnectionsConfig
    leads: list[int]  # by site: the stream that is read most
    start: str | None

    def __call__(self, base: Tensor, generator: torch.Generator | None) -> None:
        """Fill a parameter."""
        (config, leads, start), n = self, self.config.streams
        rows, pre_eps, post_eps = range(len(leads)), config.pre_eps or 0.0, config.post_eps or 0.0
        pre, post, comb = base.zero_().tensor_split((n, 2 * n), dim=1)
        if config.mix == "orthogonal":
            comb[:, ::4] = 1.0  # both quaternions one
        elif start in ("neutral", "lite") and comb.numel():
            comb.fill_(_OFF)[:, :: n + 1] = 0.0
        if start == "neutral":
            post.fill_(_logit((1.0 - post_eps) / config.post_scale))
        if start == "neutral" and n > 1:
            pre.fill_(_logit((1.0 - _LEADER) / (n - 1) - pre_eps))
            pre[rows, leads] = _logit(_LEADER - pre_eps)
        elif start == "lite":
            for gate in (pre, post):
                gate.fill_(-1.0)[rows, leads] = 1.0
        elif start == "hy_v4":
            pre.fill_(-math.log(max(n - 1, 1)))


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
        {"form": "hy_v4"},
        {"mix": "identity", "start": "neutral", "readout": "mean", "streams": 3, "post_eps": 0.01},
        {"mix": "orthogonal", "readout": "mean"},
    )
    neutral_options = {"readout": "mean"}  # noqa: RUF012
    aliases = ("mhc", "ihc:form=hy_v4")
    card = parallel_card(
        title="mHC",
        purpose="parallel streams with mixing that cannot grow: doubly stochastic matrices",
        normaliser="sigmoid for reads and writes, Sinkhorn for the mix",
        adaptivity="per token",
        gating="sigmoid",
        paper="Xie et al., mHC: Manifold-Constrained Hyper-Connections, arXiv 2512.24880",
    )

    def __init__(self, config: ManifoldHyperConnectionsConfig, layout: Layout) -> None:
        super().__init__(config, layout, config.streams)
        n, wide, count = config.streams, config.streams * layout.width, len(self.used)
        self.has_head = head = config.readout == "head" and self.reads_out
        self.comb = comb = {"sinkhorn": n * n, "identity": 0, "orthogonal": 8}[config.mix or "sinkhorn"]
        """Logits of the mix."""
        self.pre_eps, self.sinkhorn_eps = float(config.pre_eps or 0.0), float(config.sinkhorn_eps or 0.0)
        self.post_eps, self.norm_eps = float(config.post_eps or 0.0), float(config.norm_eps or 0.0)
        drawn = config.start in ("paper", "deepseek", "hy_v4")
        fn: dict[str, Any] = {"start": Normal(config.init_std) if drawn else 0.0, "neutral": 0.0, "decay": True}
        scale = 1.0 if config.start == "deepseek" else 0.01
        even = _logit(1.0 / n - self.pre_eps) if n > 1 else 0.0  # of the head: the mean of the streams
        starts = {"neutral": even, "hy_v4": -math.log(max(n - 1, 1))}
        biases, parameter = Biases(config, [site.index % n for site in self.used], config.start), self.parameter
        parameter("fn", count, comb + 2 * n, wide, **fn)
        parameter("base", count, comb + 2 * n, start=biases, neutral=biases._replace(start="neutral"))
        parameter("scale", count, 3 if comb else 2, start=scale)
        parameter("norm_weight", count, wide, start=1.0, needed=config.norm_weight)
        parameter("head_fn", n, wide, needed=head, **fn)
        parameter("head_base", n, start=starts.get(config.start or "", 0.0), neutral=even, needed=head)
        parameter("head_scale", 1, start=scale, needed=head)
        parameter("head_norm_weight", wide, start=1.0, needed=head and config.norm_weight)
        self.neutral = self._neutral()

    def _neutral(self) -> Neutral:
        """Rounding where biases make pre sum to one; scale with one stream or a summed read-out; none with epsilons."""
        n, acts = self.streams, bool(self.used) or self.has_head
        narrow = n > 1 and self.pre_eps >= (1.0 - _LEADER) / (n - 1)
        loses = self.config.mix == "sinkhorn" and self.sinkhorn_eps > 0.0
        if self.used and (loses or narrow or self.config.post_scale + self.post_eps <= 1.0 or self.post_eps >= 1.0):
            return "none"
        if n > 1 and self.reads_out and self.config.readout == "sum":
            return "scale"
        # with one stream: a sigmoid is never one, so it is read, or read out, at half its size
        return "bitwise" if not acts else "rounding" if n > 1 else "scale"

    def tables(self) -> dict[str, Tensor]:
        """rows: fn with the norm's scale; base; scale, one per row of fn."""
        if not self.used:
            return {}
        n, rows = self.streams, widen(self.fn)
        rows = rows if self.norm_weight is None else rows * widen(self.norm_weight).unsqueeze(1)
        scales = zip(widen(self.scale).split(1, dim=1), (n, n, self.comb), strict=False)  # without a comb: two
        return {"rows": rows, "base": widen(self.base), "scale": torch.cat([s.expand(-1, k) for s, k in scales], dim=1)}

    def project(self, p: Row) -> Projection:
        """All streams of a token, normalised as one vector."""
        return Projection(p["rows"], "rms", self.norm_eps, flat=True)

    def route(self, z: Tensor | None, h: Tensor, p: Row) -> Route:
        """pre, post and comb from the logits."""
        assert z is not None
        n, most = self.streams, self.config.post_scale
        gates, logits = torch.addcmul(p["base"], z, p["scale"]).split((2 * n, self.comb), dim=-1)
        pre, post = torch.sigmoid(gates).chunk(2, dim=-1)
        pre = pre + self.pre_eps if self.pre_eps else pre
        post = most * post + self.post_eps if self.post_eps else most * post
        return Route(pre, post, self.mixed(logits))

    def mixed(self, logits: Tensor) -> Tensor | None:
        """H_res [to, from] from the logits of the mix; None is the identity."""
        config, n = self.config, self.streams
        if config.mix == "identity":
            return None
        if config.mix == "orthogonal":
            return _rotation(logits)
        first = -1 if config.order == "rows_last" else -2
        comb = sinkhorn(logits.unflatten(-1, (n, n)), iterations=config.iterations, eps=self.sinkhorn_eps, first=first)
        return comb.mT  # comb is [from, to]

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
        """The equations on a list of n streams, with Sinkhorn's divisions and quaternions' products written out."""
        config, n = self.config, self.config.streams
        pre_eps = config.pre_eps or 0.0
        streams = [x] * n
        for site in self.sites:
            row = site.index
            weight = None if self.norm_weight is None else self.norm_weight[row]
            z = self._defined_logits(streams, self.fn[row], weight)
            scale, base = self.scale[row], self.base[row]
            pre = torch.sigmoid(scale[0] * z[..., :n] + base[:n]) + pre_eps
            post = config.post_scale * torch.sigmoid(scale[1] * z[..., n : 2 * n] + base[n : 2 * n])
            post = post + (config.post_eps or 0.0)
            read = sum(pre[..., i, None] * streams[i] for i in range(n))
            assert isinstance(read, Tensor)
            if config.mix != "identity":
                streams = self._defined_mix(streams, scale[2] * z[..., 2 * n :] + base[2 * n :])
            y = apply(site, Seen(read)).y
            streams = [streams[j] + post[..., j, None] * y for j in range(n)]
        last = torch.stack(streams, dim=-1)
        if config.readout != "head":
            return last.sum(-1) if config.readout == "sum" else last.mean(-1)
        z = self._defined_logits(streams, self.head_fn, self.head_norm_weight)
        weights = torch.sigmoid(self.head_scale * z + self.head_base) + pre_eps
        return (last * weights.unsqueeze(-2)).sum(-1)

    def _defined_mix(self, streams: list[Tensor], logits: Tensor) -> list[Tensor]:
        """H_res H, for `definition`."""
        config, n, eps = self.config, self.config.streams, self.config.sinkhorn_eps or 0.0
        if config.mix == "orthogonal":
            p, q = (list((v / v.norm(dim=-1, keepdim=True)).split(1, dim=-1)) for v in logits.split(4, dim=-1))
            return _hamilton(_hamilton(p, streams), q)
        rows, columns = (-1, -2) if config.order == "rows_last" else (-2, -1)
        comb = logits.unflatten(-1, (n, n)).softmax(rows) + eps  # from, to
        comb = comb / (comb.sum(columns, keepdim=True) + eps)
        for _ in range(config.iterations - 1):
            comb = comb / (comb.sum(rows, keepdim=True) + eps)
            comb = comb / (comb.sum(columns, keepdim=True) + eps)
        old = torch.stack(streams, dim=-1)  # (B, T, D, from)
        return [(old * comb[..., None, :, j]).sum(-1) for j in range(n)]

    def _defined_logits(self, streams: list[Tensor], fn: Tensor, weight: Tensor | None) -> Tensor:
        """z, the streams of a token as one normalised vector against the rows of fn; for `definition`."""
        v = torch.cat(streams, dim=-1)
        v = v / torch.sqrt(v.square().mean(-1, keepdim=True) + (self.config.norm_eps or 0.0))
        return (v if weight is None else v * weight) @ fn.T

    def _quantities(
        self, value: Streams, site: Site, y: Tensor | None, seen: Seen, c: Seen | None
    ) -> dict[str, Quantity]:
        """As hyper-connections', and how far the row or column sum of H_res that is worst is from one."""
        found = super()._quantities(value, site, y, seen, c)
        if "mix" not in found or self.config.mix != "sinkhorn":
            return found
        mix = found["mix"].value
        off = (torch.cat([mix.sum(-1), mix.sum(-2)], dim=-1) - 1.0).abs().amax(-1)
        meaning = "how far the sum of a row or column of the mix is from one, at worst"
        return {**found, "distance from doubly stochastic": Quantity(off, meaning=meaning)}

    def flops(self) -> int:
        """Per site the projection 2nd per row, the mean square 2nd, read 2nd, mix 2n²d and write 2nd; the read-out."""
        n, d = self.streams, self.layout.width
        norm = 2 * n * d + (n * d if self.config.norm_weight else 0)  # the root goes into the logits
        per_site = 2 * n * d * (self.comb + 2 * n) + norm + ((2 * n * n if self.comb else 0) + 4 * n) * d
        head = 2 * n * d * n + norm + 2 * n * d if self.has_head else 0
        return len(self.used) * per_site + head + self.plain_flops() + self.readout_flops()


def _rotation(logits: Tensor) -> Tensor:
    """(..., 4, 4) [to, from]: the matrix of H -> p H q, with the quaternions p and q of 8 logits at length one."""
    p, q = (logits.unflatten(-1, (2, 4)) / logits.unflatten(-1, (2, 4)).norm(dim=-1, keepdim=True)).unbind(-2)
    return _product_matrix(p, 1.0) @ _product_matrix(q, -1.0)


def _product_matrix(quaternion: Tensor, side: float) -> Tensor:
    """The matrix of a product with a quaternion, from the left (side 1) or from the right (side -1)."""
    a, b, c, d = quaternion.unbind(-1)
    i, j, k = side * b, side * c, side * d
    rows = [a, -b, -c, -d, b, a, -k, j, c, k, a, -i, d, -j, i, a]
    return torch.stack(rows, dim=-1).unflatten(-1, (4, 4))


def _hamilton(u: list[Tensor], v: list[Tensor]) -> list[Tensor]:
    """The product of two quaternions, part by part; for `definition`."""
    return [
        u[0] * v[0] - u[1] * v[1] - u[2] * v[2] - u[3] * v[3],
        u[0] * v[1] + u[1] * v[0] + u[2] * v[3] - u[3] * v[2],
        u[0] * v[2] - u[1] * v[3] + u[2] * v[0] + u[3] * v[1],
        u[0] * v[3] + u[1] * v[2] - u[2] * v[1] + u[3] * v[0],
    ]


def _logit(p: float) -> float:
    """The bias at which a sigmoid is `p`, kept inside what a sigmoid reaches."""
    p = min(max(p, 1e-6), 1.0 - 1e-6)
    return math.log(p / (1.0 - p))
