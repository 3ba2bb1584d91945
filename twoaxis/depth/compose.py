"""Run anyone's sub-layers through any stream.

    run = compose(stream, [("attention", norm_1, attn_1), ("mlp", norm_2, mlp_1), ...])
    y = run(x, mask=mask)

A sub-layer is a kind, a norm and a function: the function gets the normalised read and returns the increment without
its residual. At sites where the stream gives separate ways (`stream.ways(site)`, for instance q, k, v) the function
gets them as separate arguments, and the norm may be a tuple with one entry per way. Keyword arguments reach every
function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from twoaxis.depth.site import Site
from twoaxis.depth.stream import Applied, Seen, Stream

Norm = Callable[[Tensor], Tensor] | Sequence[Callable[[Tensor], Tensor]] | None
Sublayer = tuple[str, Norm, Callable[..., Tensor]]


class Composed(nn.Module):
    """Sub-layers joined by a stream; made by `compose`. Norms and functions that are modules become its children."""

    def __init__(self, stream: Stream, sublayers: Sequence[Sublayer]) -> None:
        super().__init__()
        if not isinstance(stream, Stream):
            raise ValueError(f"compose needs a stream (see twoaxis.stream), got {stream!r}")
        for i, sublayer in enumerate(sublayers):
            if not isinstance(sublayer, tuple | list) or len(sublayer) != 3 or not callable(sublayer[2]):
                raise ValueError(f"sub-layer {i} must be (kind, norm, function), got {sublayer!r}")
        kinds = tuple(kind for kind, _, _ in sublayers)
        expected = tuple(site.kind for site in stream.sites)
        if kinds != expected:
            at = next((i for i, (a, b) in enumerate(zip(kinds, expected, strict=False)) if a != b), None)
            where = (
                f"at {at} it is {kinds[at]!r} instead of {expected[at]!r}" if at is not None else "too few or too many"
            )
            raise ValueError(
                f"the stream was built for {len(expected)} sub-layers, got {len(kinds)}: {where}; "
                "build it with blocks= and kinds= that match"
            )
        self.stream = stream
        self._ways = [stream.ways(site) for site in stream.sites]
        self._norms = [_per_way(norm, ways) for ways, (_, norm, _) in zip(self._ways, sublayers, strict=True)]
        self._functions = [fn for _, _, fn in sublayers]
        self.norms = nn.ModuleList(m for norms in self._norms for m in norms if isinstance(m, nn.Module))
        self.functions = nn.ModuleList(f for f in self._functions if isinstance(f, nn.Module))

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """The stream from the embedding to what the final norm gets."""
        return self.run(x, **kwargs)[0]

    def run(
        self,
        x: Tensor,
        past: tuple[Any, ...] = (),
        *,
        reach: Tensor | None = None,
        keep: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Like `forward`, with the stream's memory of earlier tokens going in and, if `keep`, coming out."""
        stream = self.stream
        state = stream.open(x, past, reach=reach, keep=keep)
        for site in stream.sites:
            seen = stream.read(state, site)
            c, y = self.sublayer(site, seen, **kwargs)
            state = stream.write(state, site, y, seen, c)
        return stream.close(state), stream.memory(state) if keep else ()

    def sublayer(self, site: Site, seen: Seen, **kwargs: Any) -> Applied:
        """The norm and the sub-layer of `site` on what it reads."""
        ways = self._ways[site.index]
        c = normalise(seen, ways, self._norms[site.index])
        return Applied(c, self._functions[site.index](*(getattr(c, way) for way in ways), **kwargs))


def compose(stream: Stream, sublayers: Sequence[Sublayer]) -> Composed:
    """Join `sublayers` by `stream`; see the module's docstring.

    Args:
        stream: built for as many sub-layers of the same kinds.
        sublayers: (kind, norm, function) in order. A norm of None passes the read on as it is.
    """
    return Composed(stream, sublayers)


def normalise(seen: Seen, ways: Sequence[str], norms: Sequence[Callable[[Tensor], Tensor]]) -> Seen:
    """`seen` with the named ways normalised; a way the method does not give separately is the residual way."""
    entries = {}
    for way, norm in zip(ways, norms, strict=True):
        tensor = getattr(seen, way)
        entries[way] = norm(seen.x if tensor is None else tensor)
    return seen._replace(**entries, aux=None)


def _per_way(norm: Norm, ways: Sequence[str]) -> list[Callable[[Tensor], Tensor]]:
    if norm is None:
        return [_same] * len(ways)
    if callable(norm):
        return [norm] * len(ways)
    if len(norm) != len(ways):
        raise ValueError(f"{len(norm)} norms for the {len(ways)} ways {', '.join(ways)}")
    return list(norm)


def _same(x: Tensor) -> Tensor:
    return x
