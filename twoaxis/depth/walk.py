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
    """A sub-layer on its normalised read, with what `values` leaves for the write.

    Args:
        c: the normalised read.
        sublayer: gets `c`; where that has `values`, as a function of queries, keys and values that returns the values
            alone. It calls it exactly once.
    """
    if (values := c.values) is None:
        return Applied(c, sublayer(c))
    left: list[Any] = []

    def change(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        v, aux = values(q, k, v)
        left.append(aux)
        return v

    y = sublayer(c._replace(values=change))
    if len(left) != 1:
        raise ValueError(
            f"the stream changes the values of an attention, which asked {len(left)} times for them, not once"
        )
    return Applied(c._replace(aux=left[0]), y)


def without_aux(seen: Seen) -> Seen:
    """The normalised read of a site whose read is normalised already: what `read` noted for `write` is not in it."""
    return seen._replace(aux=None)
