"""The one walk over the sites of a stream.

    open ─► visit: for every site  read ─► act (norm, sub-layer) ─► write ─► close

Whatever runs a stream goes through `visit`: the blocks of the decoder, composed sub-layers, counting and the checks.
They differ in what happens between the read and the write (`act`) and in who looks on (`watch`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from twoaxis.depth.site import Site
from twoaxis.depth.stream import Apply, Seen, State, Stream

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
