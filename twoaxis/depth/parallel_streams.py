"""What the hyper-connections family shares: a state of n parallel streams, mixed when written.

    H    = n streams (..., N, D), all copies of the embedding at the start
    x    = Σ_i read[i] H[i]
    H⁺_o = Σ_i mix[o,i] H[i] + gain[o] F(norm(x))

A method says at each of its sites how the streams are read, mixed and written (`_route`), and with which weights the
out site reads them where it does not take their sum or mean (`_head`). Elsewhere the read is the mean of the streams
and the write adds to all of them. Streams are mixed when written, not when read: no mixed copy of them waits for the
sub-layer.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from twoaxis.base.method import Quantity
from twoaxis.depth.rows import Rows
from twoaxis.depth.site import OUT, Site
from twoaxis.depth.stream import Layout, Seen, Stream, Tokens
from twoaxis.kernels.precision import routing_dtype
from twoaxis.kernels.streams import mix_streams, read_streams, spread, stream_mean, stream_sum


class Streams(NamedTuple):
    """The n streams, (..., N, D), and the rows of the sites' parameters."""

    h: Tensor
    rows: Rows


class Route(NamedTuple):
    """What a site does with the streams; weights without leading dimensions are the same for all tokens.

    Attributes:
        read: (..., N) the weights of the read.
        mix: (..., N to, N from).
        gain: (..., N) how much of the sub-layer's output each stream gets.
        h: the streams to go on with; see `twoaxis.kernels.streams`.
    """

    read: Tensor
    mix: Tensor
    gain: Tensor
    h: Tensor


class Mix(NamedTuple):
    """What a read leaves for the write: the mix (..., N to, N from), the gain (..., N), the streams."""

    weights: Tensor
    gain: Tensor
    h: Tensor


class ParallelStreams(Stream):
    """n streams with weights for reading, mixing and writing them; subclasses fill in `_route`."""

    stacked: ClassVar[tuple[str, ...]] = ()
    """Names of the parameters and buffers that have a row per mixing site."""

    def __init__(self, config: Any, layout: Layout) -> None:
        super().__init__(config, layout)
        writing = [site for site in layout.used() if site.kind != OUT]
        self.rows = {site.index: row for row, site in enumerate(writing)}
        """Row of each mixing site in the stacked parameters."""

    def _route(self, h: Tensor, row: int, rows: Rows) -> Route:
        raise NotImplementedError(f"{type(self).__name__} does not define _route")

    def _head(self, h: Tensor) -> Tensor | None:
        """(..., N) the weights of the out site's read; None for the sum or the mean that the options name."""
        return None

    def _open(self, x: Tensor, tokens: Tokens) -> Streams:
        h = x.unsqueeze(-2).expand(*x.shape[:-1], self.config.streams, x.shape[-1])
        return Streams(spread(h), Rows.of(self, self.stacked))

    def _read(self, value: Streams, site: Site) -> Seen:
        row = self.rows.get(site.index)
        if row is not None:
            route = self._route(value.h, row, value.rows.now(self))
            x, h = read_streams(route.h, route.read)
            return Seen(x, aux=Mix(route.mix, route.gain, h))
        if not self.uses(site):
            return Seen(stream_mean(value.h))
        if (head := self._head(value.h)) is not None:
            return Seen(read_streams(value.h, head)[0])
        return Seen(stream_sum(value.h) if self.config.readout == "sum" else stream_mean(value.h))

    def _write(self, value: Streams, site: Site, y: Tensor, seen: Seen, c: Seen) -> Streams:
        mix: Mix | None = seen.aux
        if mix is None:
            return Streams(value.h + y.unsqueeze(-2), value.rows)
        return Streams(mix_streams(mix.h, mix.weights, y, mix.gain), value.rows)

    def _pack(self, value: Streams, site: Site) -> tuple[Tensor, ...]:
        return (value.h,)

    def _unpack(self, tensors: tuple[Tensor, ...], site: Site, tokens: Tokens) -> Streams:
        self._packed(tensors, 1, site)
        return Streams(tensors[0], Rows.of(self, self.stacked))

    def _weights(self, value: Streams, site: Site) -> Tensor | None:
        if not self.uses(site):
            return None
        n, lead = self.config.streams, value.h.shape[:-2]
        if site.kind != OUT:
            read: Tensor | None = self._route(value.h, self.rows[site.index], value.rows.now(self)).read
        else:
            read = self._head(value.h)
        if read is None:
            share = 1.0 if self.config.readout == "sum" else 1.0 / n
            read = value.h.new_full((n,), share, dtype=routing_dtype(value.h.dtype))
        return read.expand(*lead, n).unsqueeze(-2)

    def _quantities(
        self, value: Streams, site: Site, y: Tensor | None, seen: Seen, c: Seen | None
    ) -> dict[str, Quantity]:
        """How the streams are written and mixed; how they are read is what `weights` says."""
        if seen.aux is None:
            return {}
        mix: Mix = seen.aux
        return {"write": Quantity(mix.gain, ("stream",)), "mix": Quantity(mix.weights, ("to", "from"))}

    def sources(self, site: Site) -> tuple[str, ...]:
        """The streams."""
        return tuple(f"stream {i}" for i in range(self.config.streams)) if self.uses(site) else ()
