"""The one walk over the sites of a stream.

    open ─► visit: for every site  read ─► act (norm, sub-layer) ─► write ─► close

Whatever runs a stream goes through `visit`: the blocks of the decoder, composed sub-layers, counting and the checks.
They differ in what happens between the read and the write (`act`) and in who looks on (`watch`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from twoaxis.depth.site import Site
from twoaxis.depth.stream import Applied, Apply, Seen, State, Stream

Watch = Callable[[Site, State, Seen], None]
"""Function that is called at every site with the site, the state before it and what the site reads."""


def visit(stream: Stream, state: State, sites: Iterable[Site], act: Apply, watch: Watch | None = None) -> State:
    """The state after some sites.

    Args:
        stream: whose state it is.
        state: before the first of the sites.
        sites: consecutive sub-layers, in order.
        act: the pre-norm and the sub-layer of a site.
        watch: looks on; what it does changes nothing.
    """
    for site in sites:
        seen = stream.read(state, site)
        if watch is not None:
            watch(site, state, seen)
        c, y = act(site, seen)
        state = stream.write(state, site, y, seen, c)
    return state


def apply_sublayer(c: Seen, sublayer: Callable[[Seen], Tensor]) -> Applied:
    """A sub-layer on its normalised read, with what `kv` leaves for the write.

    Args:
        c: the normalised read.
        sublayer: gets `c`; where that has `kv`, as a function of queries, keys and values that returns the keys and
            values alone. It calls it exactly once.
    """
    if (kv := c.kv) is None:
        return Applied(c, sublayer(c))
    left: list[Any] = []

    def change(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v, aux = kv(q, k, v)
        left.append(aux)
        return k, v

    y = sublayer(c._replace(kv=change))
    if len(left) != 1:
        raise ValueError(
            f"the stream changes the keys and values of an attention, which asked {len(left)} times, not once"
        )
    return Applied(c._replace(aux=left[0]), y)


def apply_nothing(stream: Stream, seen: Seen, y: Tensor, heads: tuple[int, int] | None = None) -> Applied:
    """What a sub-layer returns that is not there: its increment is `y`, its keys and values are blank.

    Args:
        stream: whose read it is.
        seen: the read, which goes on as it is.
        y: the increment.
        heads: number and width of the keys and values; None is as many as the stream asks for, as wide as it is.
    """
    count = stream.kv_heads or 1
    shape = (*seen.x.shape[:-1], *(heads or (count, seen.x.shape[-1] // count)))

    def blank(c: Seen) -> Tensor:
        if c.kv is not None:
            c.kv(*(y.new_zeros(shape) for _ in range(3)))
        return y

    return apply_sublayer(without_aux(seen), blank)


def without_aux(seen: Seen) -> Seen:
    """The normalised read of a site whose read is normalised already: what `read` noted for `write` is not in it."""
    return seen._replace(aux=None)
