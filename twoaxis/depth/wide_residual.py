"""Wide residual: K residual streams with static scalars for reading and writing them, equal to plain at the start.

NVIDIA, Megatron-LM (pull request 6716, 2026). There is no paper; this follows the code of the request.

    X    = K streams (K, D), all copies of the embedding at the start
    x    = Σ_i σ(a_i) X_i                                     what the sub-layer reads
    X_i  ← ρ_i X_i + 2 σ(b_i) F(norm(x))
    ρ_i  = 1 - forget σ(-r_i)                                 with `retention`; one without
    out  = Σ_i σ(e_i) X_i                                     or the mean of the streams

         ┌──────────── ρ ───────────┐
    X ═══╪══════════════════════════(+)═══ X⁺      ═ K streams
         └─ σ(a) ─ x ─ norm ─ F ─ 2σ(b)

At the start σ(a_i) = σ(e_i) = 1/K and b is evenly spaced from -spread to spread: writes differ, so that streams come
apart, and their mean is one. Hence every read, of streams that differ, is the plain residual to rounding. A retention
below one forgets the embedding with depth and has no plain value: its class is none.

What surprises: nothing depends on the token, and streams are never mixed; a stream differs from another only in how
much of each increment it has. The first version of the request read out the mean (`readout="mean"`), the later one
learns the read-out like every other read. A zero spread keeps the streams equal, and their scalars learn together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor

from twoaxis.base.method import parallel_card
from twoaxis.base.options import Bound, NotNegative, Options, between
from twoaxis.depth.parallel import ParallelStreams, Route
from twoaxis.depth.stream import Apply, Layout, Row, Seen
from twoaxis.kernels.precision import widen


@dataclass(frozen=True, kw_only=True)
class WideResidualConfig(Options):
    """Options of the wide residual."""

    streams: Annotated[int, between(2, 256)] = 4
    """K."""
    spread: NotNegative = 0.01
    """The b of a site start evenly spaced between minus this and this."""
    retention: bool = False
    """Whether streams learn to forget: ρ."""
    retention_start: Annotated[float, Bound(0.0, 1.0, open_low=True, open_high=True)] = 0.999
    """ρ at the start, between 1 - forget and 1."""
    forget: Annotated[float, Bound(0.0, 1.0, open_low=True)] = 0.1
    """The most that a site can forget of a stream."""
    readout: Literal["head", "mean"] = "head"
    """A read of its own, or the mean of the streams."""

    def validate(self) -> None:
        """A retention lies where its sigmoid can reach."""
        if self.retention and self.retention_start <= 1.0 - self.forget:
            raise ValueError(f"retention_start={self.retention_start} must lie above 1 - forget = {1 - self.forget:g}")


class WideResidual(ParallelStreams):
    """Static reads and writes of K streams."""

    name = "wide_residual"
    Config = WideResidualConfig
    config: WideResidualConfig
    variants = ({}, {"retention": True, "streams": 3}, {"readout": "mean", "streams": 2, "spread": 0.5})
    card = parallel_card(
        title="Wide residual",
        purpose="four residual streams read and written by static scalars; plain at the start",
        source="one of K parallel streams",
        normaliser="sigmoid for reads and writes",
        adaptivity="static scalars",
        window="the current K streams",
        injection="replaces the read and the write",
        gating="sigmoid",
        depth_state="K streams",
        paper="NVIDIA, Megatron-LM pull request 6716 (no paper)",
        year=2026,
    )

    def __init__(self, config: WideResidualConfig, layout: Layout) -> None:
        super().__init__(config, layout, config.streams)
        count, k, even = len(self.used), config.streams, -math.log(config.streams - 1)
        forgets = (1.0 - config.retention_start) / config.forget
        keeps = math.log((1.0 - forgets) / forgets) if config.retention else 0.0
        spaced = partial(_spaced, config.spread)
        self.parameter("read_logits", count, k, start=even, neutral=even)
        self.parameter("write_logits", count, k, start=spaced, neutral=spaced)
        self.parameter("retain_logits", count, k, start=keeps, needed=config.retention)
        self.parameter("exit_logits", k, start=even, neutral=even, needed=config.readout == "head" and self.reads_out)
        forgets = config.retention and self.used  # what is forgotten never comes back
        self.neutral = "none" if forgets else "rounding" if self.used or self.reads_out else "bitwise"

    def tables(self) -> dict[str, Tensor]:
        """The scalars of every site."""
        if not self.used:
            return {}
        found = {"read": torch.sigmoid(widen(self.read_logits)), "gain": 2.0 * torch.sigmoid(widen(self.write_logits))}
        if self.retain_logits is not None:
            found["keep"] = 1.0 - self.config.forget * torch.sigmoid(-widen(self.retain_logits))
        return found

    def route(self, z: Tensor | None, h: Tensor, p: Row) -> Route:
        """The same for every token."""
        return Route(p["read"], p["gain"], p.get("keep"))

    def head(self, h: Tensor) -> Tensor | None:
        """The read of the out site."""
        return None if self.exit_logits is None else torch.sigmoid(widen(self.exit_logits))

    def definition(self, x: Tensor, apply: Apply) -> Tensor:
        """The equations on a list of K streams."""
        config, streams = self.config, [x] * self.config.streams
        for site in self.sites:
            a, b = torch.sigmoid(self.read_logits[site.index]), torch.sigmoid(self.write_logits[site.index])
            y = apply(site, Seen(torch.stack([w * s for w, s in zip(a, streams, strict=True)]).sum(0))).y
            keep = torch.ones_like(a)
            if config.retention:
                keep = 1.0 - config.forget * (1.0 - torch.sigmoid(self.retain_logits[site.index]))
            streams = [r * s + 2.0 * w * y for r, s, w in zip(keep, streams, b, strict=True)]
        if config.readout == "mean":
            return torch.stack(streams).mean(0)
        return torch.stack([torch.sigmoid(e) * s for e, s in zip(self.exit_logits, streams, strict=True)]).sum(0)

    def flops(self) -> int:
        """Per site the read 2Kd, the write 2Kd and what is kept Kd; the read-out."""
        each = self.streams * self.layout.width
        per_site = (5 if self.config.retention else 4) * each
        head = 2 * each if self.exit_logits is not None else 0
        return len(self.used) * per_site + head + self.plain_flops() + self.readout_flops()


def _spaced(spread: float, b: Tensor, generator: torch.Generator | None) -> None:
    """Evenly from minus `spread` to `spread`."""
    b.copy_(torch.linspace(-spread, spread, b.shape[-1], dtype=b.dtype))
