"""Scaled residuals: one residual whose two sides are weighed by scalars, channels or a schedule.

    x ← a ⊙ (x + c) + b ⊙ (y + d)          y = F(norm(x)), one line of this table per form

    form         a                        b                 besides                        start
    rezero       1                        scalar            -                              b 0
    layerscale   1                        channels          -                              b 0.1, 1e-5, 1e-6 by depth
    affine       channels                 channels          c, d channels; the embedding   a, b 1 and c, d 0
    variance     √max((1-b)(1+b), floor)  σ(g/τ), channels  y normalised                   g as projections
    schedule     √((k-1)/k)               1/√k              y normalised; k = 2, 3, ...    no parameters
    laurel_rw    2 softmax(w)_1           2 softmax(w)_0    -                              w 0: a, b 1
    laurel_lr    1                        1                 x + x A B for x                B 0
    laurel       as laurel_rw             as laurel_rw      x + x A B for x                w, B 0
    deepnorm     (2 blocks)^(1/4)         1                 goes on from norm(x)           no parameters
    x0           1                        1                 below                          λ 1.15-1.05, μ .20-.05, κ .2

         ┌──────── a ─────────┐
    x ───┤                    (+)─── x⁺
         └─ norm ─ F ─ y ─ b ─┘

    x0:  before a block x ← λ x + μ x0,  out = x - κ x_mid         x0 the embedding, x_mid after the block in the middle

rezero: Bachlechner et al., arXiv 2003.04887. layerscale: Touvron et al., arXiv 2103.17239. affine: ZAYA1 (Zyphra),
transformers' modeling_zaya; the embedding is scaled as well. variance: Muse-Spark (Meta, 2026), modeling_muse_spark.
schedule: BEAM (2026), modeling_beam: the sum of increments of one variance keeps it. laurel: Menghani et al., arXiv
2411.07501. deepnorm: Wang et al., DeepNet, arXiv 2203.00555. x0: karpathy/nanochat (2026), with its back-out.

Readings. variance and schedule stand in models that normalise a sub-layer's output first; that is done here, without a
scale (`post_norm`), because sub-layers here do not. LAuReL asks for bounded weights and fixes no bound: 2 softmax is
one at the start. DeepNorm is a post-norm, LayerNorm(α x + y), after every sub-layer: the pre-norm of the next site is
that norm, so the residual goes on from what the sub-layer was given; its first site normalises the embedding too, and
of the smaller start of projections only the output's is given (`output_scale`, (8 blocks)^(-1/4)). nanochat's x0 is the
normalised embedding, here it is what enters the stream; its gates of value embeddings are no matter of the stream.

Neutral to a bit are rezero, layerscale, affine, the laurels and x0; variance, schedule and deepnorm have no plain
value. deepnorm cannot be blended, because it goes on from the norm of a mixture that is not its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.base.method import Card, Normal, Quantity, Start, Suggestion
from twoaxis.base.options import Bound, Count, Options, Positive
from twoaxis.depth.site import OUT, Site
from twoaxis.depth.stream import Apply, Layout, Rows, RowStream, Seen, Tokens
from twoaxis.kernels.precision import widen

Form = Literal[
    "x0", "rezero", "layerscale", "affine", "variance", "schedule", "laurel_rw", "laurel_lr", "laurel", "deepnorm"
]
FREE = ("variance", "schedule", "deepnorm")
"""Forms that no parameters make plain."""


@dataclass(frozen=True, kw_only=True)
class ScaledConfig(Options):
    """Options of scaled residuals."""

    form: Form = "x0"
    """Which line of the table."""
    start: Annotated[float, Bound()] | None = None
    """b at the start, for rezero and layerscale; None is as published."""
    rank: Count = 16
    """Of A and B, for laurel_lr and laurel."""
    temperature: Positive = 0.3
    """τ, for variance."""
    floor: Positive = 1e-3
    """The least square of a, for variance."""
    post_norm: bool | None = None
    """Normalise what a sub-layer returns; None: for variance and schedule, which need it."""
    eps: Positive = 1e-6
    """Inside the root of that norm."""

    def validate(self) -> None:
        """What is not given is as in the chosen form."""
        if self.start is not None and self.form not in ("rezero", "layerscale"):
            raise ValueError(f"start={self.start} is the b of rezero and layerscale, the form is {self.form!r}")
        if self.post_norm is None:
            object.__setattr__(self, "post_norm", self.form in ("variance", "schedule"))


class Scales(NamedTuple):
    """The state: the residual, and what the x0 form remembers."""

    x: Tensor  # the residual
    rows: Rows  # the tables of the pass
    x0: Tensor | None = None  # the embedding, while a later block reads it
    mid: Tensor | None = None  # the residual after the middle block, for the out site


class Scaled(RowStream):
    """One residual with weights on both sides of its sum."""

    name = "scaled"
    Config = ScaledConfig
    alike = False  # the embedding is read again where it is not the state itself: everywhere but in the first block
    config: ScaledConfig
    variants = (
        {},
        {"form": "rezero"},
        {"form": "layerscale", "start": 0.5, "post_norm": True},
        {"form": "affine"},
        {"form": "variance", "floor": 0.8},
        {"form": "schedule", "post_norm": False},
        {"form": "laurel_rw"},
        {"form": "laurel_lr", "rank": 3},
        {"form": "laurel", "rank": 2},
        {"form": "deepnorm"},
    )
    aliases = ("rezero:form=rezero", "layerscale:form=layerscale", "laurel:form=laurel", "deepnorm:form=deepnorm")
    card = Card(
        title="Scaled residual",
        purpose="scalars on the residual, and on the embedding or a low-rank map beside it",
        goal="shortcut",
        source="increment of a sub-layer",
        value="raw increments",
        adaptivity="static scalars or channels",
        window="all earlier sub-layers; x0: the embedding and the middle again",
        granularity="per sub-layer; x0: per block",
        injection="scales both sides of the residual's sum",
        depth_state="one vector; x0: and the embedding",
        paper="Bachlechner et al., ReZero, arXiv 2003.04887; LayerScale, LAuReL, DeepNorm and others: see the file",
    )
    suggestions = (
        Suggestion("x0", "scalars per block on the residual and on the embedding, which is added again"),
        Suggestion(
            "laurel",
            "bounded weights on both sides of the sum, and a low-rank map of the residual",
            lambda shape: {"form": "laurel"},
        ),
    )

    def __init__(self, config: ScaledConfig, layout: Layout) -> None:
        super().__init__(config, layout)
        form, width, blocks, acts = config.form, layout.width, layout.blocks, bool(self.used)
        if form == "x0":  # its rows are blocks
            self.used = [site for site in self.used if site.first]
            self.rows = {site.index: row for row, site in enumerate(self.used)}
        count, low_rank = len(self.used), form in ("laurel_lr", "laurel")
        self.middle = self.sites_of(blocks // 2)[-1].index if form == "x0" and self.reads_out else None
        """Index of the site after which the out site's back-out is remembered."""
        self.last_skip = self.used[-1].index if form == "x0" and self.used else -1
        """Index of the last site that reads the embedding."""
        numbers = [site.index + 2 for site in self.used]
        schedule = {"keep": [((k - 1) / k) ** 0.5 for k in numbers], "gain": [k**-0.5 for k in numbers]}
        constant = {"keep": [(2.0 * blocks) ** 0.25] * count}
        self.fixed: dict[str, list[float]] = {"schedule": schedule, "deepnorm": constant}.get(form, {})
        """a and b of every row that are not learned."""
        deep = 0.1 if blocks <= 18 else 1e-5 if blocks <= 24 else 1e-6
        first = {"rezero": 0.0, "layerscale": deep}.get(form, 1.0) if config.start is None else config.start
        size = 1 if form == "rezero" else width
        self.parameter("gain", count, size, start=first, neutral=1.0, needed=form in ("rezero", "layerscale", "affine"))
        self.parameter("keep", count, width, start=1.0, neutral=1.0, needed=form == "affine")
        for name in ("gain_shift", "keep_shift"):
            self.parameter(name, count, width, neutral=0.0, needed=form == "affine")
        opens = form == "affine" and 0 in self.rows
        self.parameter("open_scale", width, start=1.0, neutral=1.0, needed=opens)
        self.parameter("open_shift", width, neutral=0.0, needed=opens)
        self.parameter("gate", count, width, start=Normal(), needed=form == "variance")
        self.parameter("weights_logits", count, 2, neutral=0.0, needed=form in ("laurel_rw", "laurel"))
        self.parameter("down", count, width, config.rank, start=_columns, decay=True, needed=low_rank)
        self.parameter("up", count, config.rank, width, neutral=0.0, decay=True, needed=low_rank)
        self.parameter("carry", count, 1, start=self._falling(1.15, 1.05), neutral=1.0, needed=form == "x0")
        self.parameter("skip", count, 1, start=self._falling(0.20, 0.05), neutral=0.0, needed=form == "x0")
        self.parameter("back_out", 1, start=0.2, neutral=0.0, needed=self.middle is not None)
        if not (acts and (form in FREE or config.post_norm)):  # a factor of one and a term of zero are exact
            self.neutral = "bitwise"
        if form == "deepnorm" and self.used:
            self.output_scale = (8.0 * blocks) ** -0.25

    def _falling(self, first: float, last: float) -> Start:
        """A start that falls evenly from the first block to the last."""
        steps = max(self.layout.blocks - 1, 1)
        return partial(_numbers, [[first + (last - first) * site.block / steps] for site in self.used])

    def tables(self) -> dict[str, Tensor]:
        """a and b, made of what they are parametrised by, and the other parameters as they are."""
        names = ("gain", "keep", "gain_shift", "keep_shift", "down", "up", "carry", "skip")
        found = {name: widen(t) for name in names if (t := getattr(self, name)) is not None}
        if self.gate is not None:
            w = widen(self.gate) / self.config.temperature
            found["gain"] = torch.sigmoid(w)
            # 1 - σ(w) = σ(-w), which does not cancel
            found["keep"] = (torch.sigmoid(-w) * (1.0 + found["gain"])).clamp(min=self.config.floor).sqrt()
        if self.weights_logits is not None:
            found["gain"], found["keep"] = (2.0 * widen(self.weights_logits).softmax(-1)).split(1, dim=-1)
        return found

    def _open(self, x: Tensor, tokens: Tokens) -> Scales:
        if self.open_scale is not None and self.open_shift is not None:
            x = ((widen(x) + widen(self.open_shift)) * widen(self.open_scale)).to(x.dtype)
        return Scales(x, self.take_apart(), x if self.last_skip >= 0 else None)

    def _read(self, value: Scales, site: Site) -> Seen:
        x, out = value.x, None
        if site.kind == OUT:
            if value.mid is not None and self.back_out is not None:
                out = torch.addcmul(widen(x), -widen(self.back_out), widen(value.mid))
        elif value.x0 is not None and site.index in self.rows:
            p = self.row_of(site, value.rows)
            out = torch.addcmul(p["carry"] * widen(x), p["skip"], widen(value.x0))
        return Seen(x if out is None else out.to(x.dtype))

    def _write(self, value: Scales, site: Site, y: Tensor, seen: Seen, c: Seen) -> Scales:
        if not self.uses(site):
            x = seen.x + y
        else:
            x = self._sum(c.x if self.config.form == "deepnorm" else seen.x, y, self._weights_of(value, site))
        x0 = value.x0 if site.index < self.last_skip else None
        return Scales(x, value.rows, x0, x if site.index == self.middle else value.mid)

    def _weights_of(self, value: Scales, site: Site) -> dict[str, Any]:
        """What a site has of the tables and the constants; of x0's none but the first of a block."""
        if (row := self.rows.get(site.index)) is None:
            return {}
        return {**self.row_of(site, value.rows), **{name: each[row] for name, each in self.fixed.items()}}

    def _sum(self, x: Tensor, y: Tensor, p: Mapping[str, Any]) -> Tensor:
        """The equation, in float32 at least."""
        dtype, x, y = torch.promote_types(x.dtype, y.dtype), widen(x), widen(y)
        if self.config.post_norm:
            y = F.rms_norm(y, y.shape[-1:], eps=self.config.eps)
        if "gain_shift" in p:
            x, y = x + p["keep_shift"], y + p["gain_shift"]
        if "down" in p:
            x = x + x @ p["down"] @ p["up"]
        x, gain = p["keep"] * x if "keep" in p else x, p.get("gain", 1.0)
        return (torch.add(x, y, alpha=gain) if isinstance(gain, float) else torch.addcmul(x, gain, y)).to(dtype)

    def _rescale(self, value: Scales, factor: Tensor | float) -> Scales:
        return value._replace(x=value.x * factor)

    def _remembered(self, site: Site) -> tuple[bool, bool]:
        """Whether the state before a site has the embedding, and the middle."""
        return site.index <= self.last_skip, self.middle is not None and site.index > self.middle

    def _pack(self, value: Scales, site: Site) -> tuple[Tensor, ...]:
        return (value.x, *(t for t in (value.x0, value.mid) if t is not None))

    def _unpack(self, tensors: tuple[Tensor, ...], site: Site, tokens: Tokens) -> Scales:
        has = self._remembered(site)
        self._packed(tensors, 1 + sum(has), site)
        x, *rest = tensors
        x0, mid = (rest.pop(0) if there else None for there in has)
        return Scales(x, self.take_apart(), x0, mid)

    def _quantities(
        self, value: Scales, site: Site, y: Tensor | None, seen: Seen, c: Seen | None
    ) -> dict[str, Quantity]:
        """The weights of a site, one number or one per channel."""
        p = {name: torch.as_tensor(weight) for name, weight in self._weights_of(value, site).items()}
        names = {"carry": "residual", "skip": "embedding", "keep": "residual", "gain": "increment"}
        found = {name: p[key].squeeze() if p[key].numel() == 1 else p[key] for key, name in names.items() if key in p}
        meaning = "what the residual, the increment or the embedding is multiplied by in the sum"
        axes = ("channel",)
        return {f"scale, {n}": Quantity(t, axes if t.dim() else (), meaning=meaning) for n, t in found.items()}

    def definition(self, x: Tensor, apply: Apply) -> Tensor:
        """The table, form by form."""
        config, form, blocks, middle = self.config, self.config.form, self.layout.blocks, x
        if form == "affine":
            x = (x + self.open_shift) * self.open_scale
        x0 = x
        for site in self.sites:
            i = site.index
            if form == "x0" and site.first:
                x = self.carry[site.block] * x + self.skip[site.block] * x0
            c, y = apply(site, Seen(x))
            if config.post_norm:
                y = y / (y.square().mean(-1, keepdim=True) + config.eps).sqrt()
            if form in ("rezero", "layerscale"):
                x = x + self.gain[i] * y
            elif form == "affine":
                x = (x + self.keep_shift[i]) * self.keep[i] + (y + self.gain_shift[i]) * self.gain[i]
            elif form == "variance":
                b = 1.0 / (1.0 + torch.exp(-self.gate[i] / config.temperature))
                x = ((1.0 - b) * (1.0 + b)).clamp(min=config.floor).sqrt() * x + b * y
            elif form == "schedule":
                x = (((i + 1) / (i + 2)) ** 0.5) * x + y / (i + 2) ** 0.5
            elif form == "deepnorm":
                x = (2 * blocks) ** 0.25 * c.x + y
            elif form == "x0":
                x = x + y
            else:
                b, a = 2.0 * self.weights_logits[i].softmax(0) if form != "laurel_lr" else (1.0, 1.0)
                x = a * (x + (x @ self.down[i]) @ self.up[i] if form != "laurel_rw" else x) + b * y
            if site.last and site.block == blocks // 2:
                middle = x
        return x - self.back_out * middle if form == "x0" else x

    def unblendable(self) -> str | None:
        """DeepNorm goes on from the normalised read, which in a blend is not its own."""
        if self.config.form == "deepnorm" and self.used:
            return "form='deepnorm' goes on from the normalised read, which in a blend is a mixture with the plain one"
        return None


def _numbers(rows: list[list[float]], t: Tensor, generator: torch.Generator | None) -> None:
    """What is known beforehand."""
    t.copy_(torch.tensor(rows, dtype=t.dtype))


def _columns(down: Tensor, generator: torch.Generator | None) -> None:
    """A with orthogonal columns of one length: channel i feeds column i mod rank."""
    _, width, rank = down.shape
    channels = torch.arange(width)
    down.zero_()[:, channels, channels % rank] = (rank * width) ** -0.5
