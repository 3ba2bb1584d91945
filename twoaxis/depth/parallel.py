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

A method keeps one tensor per kind of parameter with a row per site (`tables`). Indexed at every site, each site's
backward would fill and add a gradient of the whole stack: work that grows with the square of the depth. The tables are
taken apart once per pass, so that autograd puts the rows' gradients together once; they travel with the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor

from twoaxis.base.method import Quantity
from twoaxis.depth.site import OUT, Site
from twoaxis.depth.stream import Layout, Seen, Stamp, Stream, Tokens
from twoaxis.kernels.precision import routing_dtype
from twoaxis.kernels.streams import mix_streams, read_streams, stream_logits, stream_mean
from twoaxis.ring import Ring

Row = Mapping[str, Tensor]
"""What a site has of each table, by the table's name."""


class Projection(NamedTuple):
    """How the logits of a site are made.

    Attributes:
        rows: (P, D), or (P, N D) where the streams are taken as one vector.
        norm: layer, rms or none.
        eps: inside the norm's root.
        flat: whether the streams of a token are one vector: z is (..., P), otherwise (..., N, P).
    """

    rows: Tensor
    norm: str
    eps: float
    flat: bool = False


class Route(NamedTuple):
    """What a site does with the streams; weights without leading dimensions are the same for all tokens.

    Attributes:
        read: (..., N) the weights of the read; None where `x` is given.
        gain: (..., N) how much of the sub-layer's output each stream gets.
        mix: (..., N to, N from); (N,) scales every stream by itself; None keeps them.
        x: (..., D) a read that is no weighted sum of the streams.
    """

    read: Tensor | None
    gain: Tensor
    mix: Tensor | None = None
    x: Tensor | None = None


class Taken(NamedTuple):
    """What a read leaves for the write: its route, and the streams to go on with."""

    route: Route
    h: Tensor


class Streams(NamedTuple):
    """The state of the family.

    Attributes:
        h: the streams (..., N, D).
        tables: the stream's, taken apart, by name.
        stamp: of the parameters that they were made of.
        tokens: the sequence side, for methods that mix tokens.
        kept: rings that later tokens will need.
    """

    h: Tensor
    tables: dict[str, tuple[Tensor, ...]]
    stamp: Stamp
    tokens: Tokens
    kept: tuple[Ring, ...] = ()


class ParallelStreams(Stream):
    """N streams side by side; subclasses fill in `tables`, `project`, `route` and `head`."""

    def __init__(self, config: Any, layout: Layout, streams: int) -> None:
        super().__init__(config, layout)
        self.streams = streams
        """N."""
        self.used = [site for site in layout.used() if site.kind != OUT]
        """The sub-layers' sites that use the method."""
        self.rows = {site.index: row for row, site in enumerate(self.used)}
        """Row of each of them in the tables."""
        self.reads_out = self.uses(layout.out)
        """Whether the out site uses the method."""

    # What a method fills in.

    def tables(self) -> dict[str, Tensor]:
        """What sites need of the parameters: tensors with a row per site, in float32 at least; once per pass."""
        raise NotImplementedError(f"{type(self).__name__} does not define tables")

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
        z, h = self.logits(value.h, self.project(p))
        route = self.route(z, h, p)
        if route.x is not None:
            return Seen(route.x, aux=Taken(route, h))
        assert route.read is not None, f"{type(self).__name__}.route gives neither a read nor x"
        x, h = read_streams(h, route.read)
        return Seen(x, aux=Taken(route, h))

    def put(self, value: Streams, site: Site, p: Row, y: Tensor, seen: Seen, c: Seen) -> Streams:
        """The write of a site that uses the method."""
        taken: Taken = seen.aux
        return value._replace(h=mix_streams(taken.h, taken.route.mix, y, taken.route.gain))

    def read_out(self, value: Streams) -> Tensor:
        """The read of an out site that uses the method."""
        h = value.h
        if (head := self.head(h)) is not None:
            return read_streams(h, head)[0]
        return h.sum(-2, dtype=routing_dtype(h.dtype)).to(h.dtype) if self.config.readout == "sum" else stream_mean(h)

    # What they share.

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
        p = self.row(row)
        z, h = self.logits(h, self.project(p))
        return self.route(z, h, p)

    def _open(self, x: Tensor, tokens: Tokens) -> Streams:
        h, kept = self.split(x, tokens)
        return Streams(h, self._apart(), Stamp.of(self._tensors()), tokens, kept if tokens.keep else ())

    def row(self, row: int, tables: Mapping[str, Sequence[Tensor]] | None = None) -> Row:
        """One row of each table."""
        return {name: rows[row] for name, rows in (self._apart() if tables is None else tables).items()}

    def _row(self, value: Streams, site: Site) -> Row:
        return self.row(self.rows[site.index], value.tables if value.stamp.holds(self._tensors()) else None)

    def _apart(self) -> dict[str, tuple[Tensor, ...]]:
        return {name: table.unbind(0) for name, table in self.tables().items()}

    def _tensors(self) -> Iterable[Tensor | None]:
        return chain(self._parameters.values(), self._buffers.values())

    def _read(self, value: Streams, site: Site) -> Seen:
        if not self.uses(site):
            return Seen(stream_mean(value.h))
        return Seen(self.read_out(value)) if site.kind == OUT else self.take(value, site, self._row(value, site))

    def _write(self, value: Streams, site: Site, y: Tensor, seen: Seen, c: Seen) -> Streams:
        if not self.uses(site):
            return value._replace(h=value.h + y.unsqueeze(-2))
        return self.put(value, site, self._row(value, site), y, seen, c)

    def _rescale(self, value: Streams, factor: Tensor | float) -> Streams:
        return value._replace(h=value.h * factor)

    def _pack(self, value: Streams, site: Site) -> tuple[Tensor, ...]:
        return (value.h,)

    def _unpack(self, tensors: tuple[Tensor, ...], site: Site, tokens: Tokens) -> Streams:
        self._packed(tensors, 1, site)
        return Streams(tensors[0], self._apart(), Stamp.of(self._tensors()), tokens)

    def _weights(self, value: Streams, site: Site) -> Tensor | None:
        """What the site reads of each stream; None where that is no weighted sum."""
        if not self.sources(site):
            return None
        n, h = self.streams, value.h
        if site.kind != OUT:
            read = self.routed(h, self.rows[site.index]).read
        elif (read := self.head(h)) is None:
            read = h.new_full((n,), 1.0 if self.config.readout == "sum" else 1.0 / n, dtype=routing_dtype(h.dtype))
        return None if read is None else read.expand(*h.shape[:-2], n).unsqueeze(-2)

    def _quantities(
        self, value: Streams, site: Site, y: Tensor | None, seen: Seen, c: Seen | None
    ) -> dict[str, Quantity]:
        """How the streams are written and mixed; how they are read is what `weights` says."""
        if not isinstance(seen.aux, Taken):
            return {}
        route = seen.aux.route
        mix = {} if route.mix is None or route.mix.dim() < 2 else {"mix": Quantity(route.mix, ("to", "from"))}
        return {"write": Quantity(route.gain, ("stream",)), **mix}

    def sources(self, site: Site) -> tuple[str, ...]:
        """The streams."""
        return tuple(f"stream {i}" for i in range(self.streams)) if self.uses(site) else ()

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
