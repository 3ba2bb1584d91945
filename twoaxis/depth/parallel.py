"""The family of parallel streams: the state is N copies of the residual, read, mixed and written by learned weights.

    H    = N streams (..., N, D), copies of the embedding at the start        split
    z    = rows · norm(H)                                                      project
    x    = Σ_i read[i] H[i]                                                    route
    H⁺_o = Σ_i mix[o,i] H[i] + gain[o] F(norm(x))                              route
    out  = Σ_i H[i], their mean, or Σ_i head[i] H[i]                           head

A method says at each of its sites how the streams are read, mixed and written (`route`), from logits of the streams
where the weights depend on the token (`project`). One whose read or write is another replaces `take` and `put`. At
sites without the method the read is the mean of the streams, and the write adds to all of them.

Streams are mixed when written, not when read: no mixed copy of them waits for the sub-layer. The logits and the read
hand the streams on, so that their gradient is collected in one pass; see `twoaxis.kernels.streams`.

With `fractions` the same happens to slices of the width: each stream is cut into m slices of D/m channels, the rows of
the routing are N m slices, a read puts m of them together, and a write distributes the m slices of an output.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from twoaxis.base.method import Quantity
from twoaxis.depth.site import OUT, Site
from twoaxis.depth.stream import Layout, Row, Rows, RowStream, Seen, Tokens
from twoaxis.kernels.precision import routing_dtype
from twoaxis.kernels.streams import mix_streams, read_streams, stream_logits, stream_mean
from twoaxis.ring import Ring


class Projection(NamedTuple):
    """How the logits of a site are made."""

    rows: Tensor  # (P, D), or (P, N D) where the streams are taken as one vector
    norm: str  # layer, rms or none
    eps: float  # inside the norm's root
    flat: bool = False  # whether the streams of a token are one vector: z is (..., P), otherwise (..., N, P)


class Route(NamedTuple):
    """What a site does with the streams; weights without leading dimensions are the same for all tokens."""

    read: Tensor | None  # (..., N) of the read; None where `x` is given. With fractions (..., m, N m)
    gain: Tensor  # (..., N) how much of the sub-layer's output each stream gets. With fractions (..., N m, m)
    mix: Tensor | None = None  # (..., N to, N from), or (..., N m, N m); (N,) scales each stream; None keeps them
    x: Tensor | None = None  # (..., D) a read that is no weighted sum of the streams


class Taken(NamedTuple):
    """What a read leaves for the write: its route, and the streams to go on with."""

    route: Route
    h: Tensor


class Streams(NamedTuple):
    """The state of the family."""

    h: Tensor  # the streams (..., N, D)
    rows: Rows  # the stream's tables, taken apart
    tokens: Tokens  # the sequence side, for methods that mix tokens
    kept: tuple[Ring, ...] = ()  # rings that later tokens will need


class ParallelStreams(RowStream):
    """N streams side by side; subclasses fill in `tables`, `project`, `route` and `head`."""

    fractions = 1
    """m, slices of a stream that are routed by themselves."""

    def __init__(self, config: Any, layout: Layout, streams: int) -> None:
        super().__init__(config, layout)
        self.streams = streams
        """N."""

    # What a method fills in.

    def split(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, tuple[Ring, ...]]:
        """The streams (..., N, D) of an embedding, and what later tokens need of it."""
        return x.unsqueeze(-2).expand(*x.shape[:-1], self.streams, x.shape[-1]).contiguous(), ()

    def project(self, p: Row) -> Projection | None:
        """What logits the route of a site needs; None where it needs none."""
        return None

    def route(self, z: Tensor | None, h: Tensor, p: Row) -> Route:
        """The method: how a site reads, mixes and writes the streams.

        Args:
            z: the logits that `project` asked for.
            h: (..., N, D) the streams.
            p: the site's row of each table.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define route")

    def head(self, h: Tensor) -> Tensor | None:
        """(..., N) the weights of the out site's read; None for the sum or the mean that the option readout names."""
        return None

    def take(self, value: Streams, site: Site, p: Row) -> Seen:
        """The read of a site that uses the method; `put` gets what it leaves in `aux`."""
        z, h = self.logits(self.sliced(value.h), self.project(p))
        route = self.route(z, h, p)
        if route.x is not None:
            return Seen(route.x, aux=Taken(route, h))
        assert route.read is not None, f"{type(self).__name__}.route gives neither a read nor x"
        if self.fractions > 1:
            return Seen(mix_streams(h, route.read).flatten(-2), aux=Taken(route, h))
        x, h = read_streams(h, route.read.unsqueeze(-1))
        return Seen(x, aux=Taken(route, h))

    def put(self, value: Streams, site: Site, p: Row, y: Tensor, seen: Seen, c: Seen) -> Streams:
        """The write of a site that uses the method."""
        (_, gain, mix, _), h = seen.aux
        if self.fractions == 1:
            return value._replace(h=mix_streams(h, mix, y, gain))
        both = torch.cat([h, y.unflatten(-1, (self.fractions, -1))], dim=-2)
        weights = torch.cat([mix, gain.expand(*mix.shape[:-1], -1)], dim=-1)
        return value._replace(h=mix_streams(both, weights).view(value.h.shape))

    def read_out(self, value: Streams) -> Tensor:
        """The read of an out site that uses the method."""
        h = value.h
        if (head := self.head(h)) is not None:
            return read_streams(h, head.unsqueeze(-1))[0]
        return h.sum(-2, dtype=routing_dtype(h.dtype)).to(h.dtype) if self.config.readout == "sum" else stream_mean(h)

    # What they share.

    def sliced(self, h: Tensor) -> Tensor:
        """The slices (..., N m, D/m) of streams (..., N, D), stream after stream."""
        return h if self.fractions == 1 else h.unflatten(-1, (self.fractions, -1)).flatten(-3, -2)

    def logits(self, h: Tensor, projection: Projection | None) -> tuple[Tensor | None, Tensor]:
        """The logits of the streams, and the streams to go on with."""
        if projection is None:
            return None, h
        rows, norm, eps, flat = projection
        if not flat:
            return stream_logits(h, rows, norm=norm, eps=eps)
        z, v = stream_logits(h.flatten(-2), rows, norm=norm, eps=eps)
        return z, v.unflatten(-1, h.shape[-2:])

    def routed(self, h: Tensor, row: int) -> Route:
        """The route of the site with row `row` for streams `h`, for looking at it."""
        p = self.row_of(self.used[row], self.take_apart())
        z, h = self.logits(self.sliced(h), self.project(p))
        return self.route(z, h, p)

    def _open(self, x: Tensor, tokens: Tokens) -> Streams:
        h, kept = self.split(x, tokens)
        return Streams(h, self.take_apart(), tokens, kept if tokens.keep else ())

    def _read(self, value: Streams, site: Site) -> Seen:
        if not self.uses(site):
            return Seen(stream_mean(value.h))
        return Seen(self.read_out(value)) if site.kind == OUT else self.take(value, site, self.row_of(site, value.rows))

    def _write(self, value: Streams, site: Site, y: Tensor, seen: Seen, c: Seen) -> Streams:
        if not self.uses(site):
            return value._replace(h=value.h + y.unsqueeze(-2))
        return self.put(value, site, self.row_of(site, value.rows), y, seen, c)

    def _rescale(self, value: Streams, factor: Tensor | float) -> Streams:
        return value._replace(h=value.h * factor)

    def _pack(self, value: Streams, site: Site) -> tuple[Tensor, ...]:
        return (value.h,)

    def _unpack(self, tensors: tuple[Tensor, ...], site: Site, tokens: Tokens) -> Streams:
        self._packed(tensors, 1, site)
        return Streams(tensors[0], self.take_apart(), tokens)

    def _weights(self, value: Streams, site: Site) -> Tensor | None:
        """What the site reads of each stream; None where that is no weighted sum."""
        if not self.sources(site):
            return None
        n, h, m = self.streams, value.h, self.fractions
        if site.kind != OUT:
            read = self.routed(h, self.rows[site.index]).read
        elif (read := self.head(h)) is None:
            read = h.new_full((n,), 1.0 if self.config.readout == "sum" else 1.0 / n, dtype=routing_dtype(h.dtype))
            read = read if m == 1 else torch.kron(read, torch.eye(m, dtype=read.dtype, device=read.device))
        if read is None:
            return None
        return (read.unsqueeze(-2) if m == 1 else read).expand(*h.shape[:-2], m, n * m)

    def _quantities(
        self, value: Streams, site: Site, y: Tensor | None, seen: Seen, c: Seen | None
    ) -> dict[str, Quantity]:
        """How the streams are written and mixed; how they are read is what `weights` says."""
        if not isinstance(seen.aux, Taken):
            return {}
        route = seen.aux.route
        found = {"write": Quantity(route.gain, ("stream",), meaning="the factor of the increment in each stream")}
        if route.mix is not None and route.mix.dim() >= 2:
            found["mix"] = Quantity(route.mix, ("to", "from"), meaning="how much of each stream goes on in each")
        return found

    def sources(self, site: Site) -> tuple[str, ...]:
        """The streams, or their slices."""
        if not self.uses(site):
            return ()
        names = [f"stream {i}" for i in range(self.streams)]
        m = self.fractions
        return tuple(names if m == 1 else [f"{name}, slice {f}" for name in names for f in range(m)])

    def plain_flops(self) -> int:
        """Operations of the sites without the method: the mean of the streams, and the sum with each of them."""
        plain, writes = len(self.layout.sites) - len(self.layout.used()), len(self.sites) - len(self.used)
        return plain * self._mean_flops() + writes * (self.streams - 1) * self.layout.width

    def readout_flops(self) -> int:
        """Operations of an out site that takes the sum or the mean of the streams."""
        if not self.reads_out or self.config.readout == "head":
            return 0
        return (self.streams - 1) * self.layout.width if self.config.readout == "sum" else self._mean_flops()

    def _mean_flops(self) -> int:
        return (2 * self.streams + 1) * self.layout.width if self.streams > 1 else 0
