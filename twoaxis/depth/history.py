"""The history family: sites read weighted sums of what earlier blocks or sub-layers made.

    sources   0 = the embedding, 1, 2, ...    residuals at boundaries ("state"), or what was added since ("increment");
              0, 1, ...                       or what attentions made, keys and values of one token ("kv")

    read      [first] [rest] numbers [part]  ── route: weights ──►  ways  ── enter ──►  x, q, k, v of the site
              pinned   what   one by   the run
              source   left   one      that is not
              0        the             finished
                       window

A method says which sites read which sources (`Plan`, made of the layout alone) and with what weights (`route`). The
rest is written once, here: which vectors live at a boundary, windows and their rest, partial sums, placement, ways
that wait behind a mixer, stage boundaries, names and counts. What a method may change, each with a default that most
keep:

    route(view, site)                  the method: the weight of each source at a site
    store(x, number, own)              what is kept of a source                         default: the source itself
    derive(x, number, boundary, own)   made once per source for the sites ahead         default: nothing
    prepare()                          `own`: made of parameters, once per pass         default: nothing
    mix(view, site)                    the read itself, where it is no weighted sum     default: `route`, then a sum
    enter(way, read, view, site)       what a way becomes of its weighted sum           default: the sum
    inner(h, site)                     what a site sees that reads no source            default: the residual
    onward(h, site, y, seen)           the running residual after a write               default: the sum
    exchange(q, k, v, view, site)      for "kv": keys and values in place of an         no default
                                       attention's own, and what is kept as a source

The state is a value, and gradients are autograd's own. What was made of parameters (`prepare`, `derive`) carries a
stamp and is made anew where the stamp is another one: a pass that began without gradients, a deep copy of the stream,
parameters that were written to. The time to build a stream is linear in the number of its sites.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from twoaxis.base.meter import tensors_in
from twoaxis.depth.plan import Plan, attention_sites, qkv_ways
from twoaxis.depth.site import Site
from twoaxis.depth.stream import Apply, Layout, Seen, State, Stream, Tokens
from twoaxis.kernels.history import query_read, rms_logits, softmax_read, weighted_sum
from twoaxis.kernels.precision import widen


class Waiting(NamedTuple):
    """Ways read at the first site of a block that wait for its attention; q is None where it is the residual way."""

    q: Tensor | None
    k: Tensor
    v: Tensor

    def plus(self, y: Tensor) -> Waiting:
        """The output of a sub-layer before the attention joins every waiting way."""
        return Waiting(None if self.q is None else self.q + y, self.k + y, self.v + y)


class Source(NamedTuple):
    """A source that a site ahead reads."""

    x: Tensor  # what sums run over
    also: tuple[Tensor, ...] = ()  # what else `store` keeps of it
    derived: Any = None  # what `derive` made of it; never packed


class History(NamedTuple):
    """The state of every history stream. It holds no numbers, so that a compiler has none to guard on."""

    x: Tensor | None  # the running residual, where a site ahead needs it
    plain: Tensor | None  # the plain sum, where sources are increments and a site ahead reads plainly
    kept: tuple[Source, ...] = ()  # the sources of `Plan.alive`, oldest first
    rest: Tensor | None = None  # the sum of those that left the window
    part: Tensor | None = None  # what was added since the last boundary
    waiting: Waiting | None = None  # ways for an attention that is not the first of its block
    inside: Any = None  # what `onward` keeps inside a block: a NamedTuple of vectors, None between blocks
    own: Any = None  # what `prepare` made


class View(NamedTuple):
    """What `route`, `mix` and `enter` look at: the sources of one read in the order of `Read`, and the state."""

    kept: list[Source]
    state: History

    @property
    def sources(self) -> list[Tensor]:
        """What sums run over."""
        return [source.x for source in self.kept]


class Weights(NamedTuple):
    """A weighted sum of the sources; see `twoaxis.kernels.history.weighted_sum`. Whichever are given add."""

    static: Tensor | None = None  # (W, S)
    token: Tensor | None = None  # (..., W, S), or (..., H, W, S) with `heads` groups of channels
    channel: Tensor | None = None  # (W, S, D)
    heads: int = 1  # H


class Softmax(NamedTuple):
    """A softmax average of the sources, of one way; logits, or the query that makes them."""

    logits: Sequence[Tensor] | None = None  # of each source, (..., H)
    query: Tensor | None = None  # (H, D/H), with the key norm's scale folded in
    eps: float | None = None  # inside the keys' mean square; None leaves them un-normalised
    scale: float = 1.0  # of the average


Exchanged = tuple[Tensor, Tensor, tuple[Tensor, ...]]
"""Keys and values for an attention, and what is kept of it as a source."""


class HistoryStream(Stream):
    """A stream whose sites read weighted sums of sources. A subclass calls `follow` and defines `route`."""

    source: Literal["state", "increment", "kv"] = "state"
    """What a source is: the residual at a boundary, what was added to it since the last one, or what `exchange` keeps
    of the attention before it."""
    goes_on: Literal["read", "own"] = "read"
    """Whether the residual inside a block continues from what was read, or from itself."""
    derives: tuple[str, ...] = ()
    """Parameters that `prepare` and `derive` use."""
    tensors: int = 1
    """How many tensors `store` keeps of a source."""

    def __init__(self, config: Any, layout: Layout) -> None:
        super().__init__(config, layout)
        self.attention = attention_sites(layout)

    def follow(self, plan: Plan) -> None:
        """Take over a plan: what there is at each boundary is found here, once."""
        self.plan = plan
        sites = self.layout.sites
        self._origin: list[str] = []
        """By site, where its residual comes from: "read" (a weighted sum), "x" (running) or "plain" (the plain sum)."""
        for site in sites:
            read = plan.reads.get(site.index)
            inside = self.goes_on == "read" and not site.first and self._origin[-1] != "plain"
            origin = "x" if self.source != "increment" or inside else "plain"
            self._origin.append("read" if read is not None and "x" in read.ways else origin)
        self._last_plain = max((i for i, origin in enumerate(self._origin) if origin == "plain"), default=-1)
        self._has_part = [False] * (len(sites) + 1)
        """By boundary inside a run: whether its sum so far is needed."""
        for i in range(len(sites) - 1, 0, -1) if self.source == "increment" else ():
            ahead = plan.wanted(i + 1) if i + 1 in plan.born else self._has_part[i + 1]
            read = plan.reads.get(i)
            self._has_part[i] = i not in plan.born and (ahead or (read is not None and read.part))

    # What a method fills in; see the module's docstring.

    def route(self, view: View, site: Site) -> Weights | Softmax:
        """What weight each source has at `site`."""
        raise NotImplementedError(f"{type(self).__name__} does not define route")

    def store(self, x: Tensor, number: int, own: Any) -> tuple[Tensor, ...]:
        """What is kept of a source: what sums run over, and whatever else; `own` is what `prepare` made."""
        return (x,)

    def exchange(self, q: Tensor, k: Tensor, v: Tensor, view: View | None, site: Site) -> Exchanged:
        """Keys and values for the attention at `site`; without a view, where it has no sources, they are its own."""
        raise NotImplementedError(f"{type(self).__name__} does not define exchange")

    def derive(self, x: Tensor, number: int, boundary: int, own: Any) -> Any:
        """Made once per source for the sites from `boundary` on; `own` is what `prepare` made."""
        return None

    def prepare(self) -> Any:
        """Made of the parameters called in `derives`, once per pass."""
        return None

    def mix(self, view: View, site: Site) -> tuple[Tensor, ...]:
        """The weighted sum of each way."""
        weights, sources = self.route(view, site), view.sources
        if isinstance(weights, Softmax):
            if weights.query is not None:
                return (query_read(sources, weights.query, eps=weights.eps, scale=weights.scale),)
            assert weights.logits is not None
            return (softmax_read(sources, weights.logits, scale=weights.scale),)
        if weights.heads == 1:
            return weighted_sum(sources, weights.static, weights.token, weights.channel)
        by_heads = [x.unflatten(-1, (weights.heads, -1)) for x in sources]
        return tuple(way.flatten(-2) for way in weighted_sum(by_heads, token=weights.token))

    def enter(self, way: str, read: Tensor, view: View, site: Site) -> Tensor:
        """What a way becomes of its weighted sum."""
        return read

    def inner(self, h: History, site: Site) -> Tensor:
        """What a site sees that reads no source."""
        return self._residual(h, site)

    def onward(self, h: History, site: Site, y: Tensor, seen: Seen) -> tuple[Tensor, Any]:
        """The running residual after a write, and what to keep inside the block."""
        return (seen.x if self.goes_on == "read" else self._residual(h, site)) + y, None

    # Reads.

    def _residual(self, h: History, site: Site) -> Tensor:
        x = h.plain if self._origin[site.index] == "plain" else h.x
        assert x is not None
        return x

    def view(self, h: History, site: Site) -> View:
        """The sources that `site` reads."""
        read = self.plan.reads[site.index]
        chosen = list(h.kept)
        if len(chosen) != read.singles:
            numbered = zip(self.plan.alive(site.index), chosen, strict=True)
            chosen = [source for n, source in numbered if n in read.numbers or (read.first and n == 0)]
        if read.rest:
            assert h.rest is not None
            chosen.insert(int(read.first), Source(h.rest))
        if read.part:
            assert h.part is not None
            chosen.append(Source(h.part))
        return View(chosen, h)

    def _read(self, value: History, site: Site) -> Seen:
        read, attention = self.plan.reads.get(site.index), self.attention.get(site.block)
        if self.source == "kv":
            kv = partial(self._exchange, value, site) if self.changes_kv(site) else None
            return Seen(self.inner(value, site), kv=kv)
        if read is None:
            x = self.inner(value, site)
            return Seen(x) if value.waiting is None or site != attention else Seen(x, *value.waiting)
        view = self.view(value, site)
        mixed = zip(read.ways, self.mix(view, site), strict=True)
        ways = {way: self.enter(way, x, view, site) for way, x in mixed}
        x = ways["x"] if "x" in ways else self._residual(view.state, site)
        if "k" not in ways:
            return Seen(x)
        waiting = Waiting(ways.get("q"), ways["k"], ways["v"])
        return Seen(x, *waiting) if site == attention else Seen(x, aux=waiting)

    def changes_kv(self, site: Site) -> bool:
        """Where keys and values are the sources: at attentions that read some, or are one themselves."""
        return self.source == "kv" and (site.index in self.plan.reads or site.index + 1 in self.plan.born)

    def _exchange(self, value: History, site: Site, q: Tensor, k: Tensor, v: Tensor) -> Exchanged:
        return self.exchange(q, k, v, self.view(value, site) if site.index in self.plan.reads else None, site)

    def ways(self, site: Site) -> tuple[str, ...]:
        """q, k and v at the attention of a block that reads them separately; a parallel one also has its MLP's x."""
        if site != self.attention.get(site.block):
            return ("x",)
        read = self.plan.reads.get(self.sites_of(site.block)[0].index)
        return ("x",) if read is None or "k" not in read.ways else qkv_ways(site)

    # Writes.

    def _open(self, x: Tensor, tokens: Tokens) -> History:
        running = x if self._needs_x(0) else None
        h = History(running, x if self._last_plain >= 0 else None, own=self.prepare())
        return self._push(h, x, 0) if 0 in self.plan.born else h

    def _write(self, value: History, site: Site, y: Tensor, seen: Seen, c: Seen) -> History:
        after, plan, h = site.index + 1, self.plan, value
        waiting = h.waiting if seen.aux is None else seen.aux
        if waiting is not None:
            waiting = None if site == self.attention[site.block] else waiting.plus(y)
        x = inside = part = None
        if self._needs_x(after):
            x, inside = self.onward(h, site, y, seen)
        whole = after in plan.born
        if self.source == "increment" and (plan.wanted(after) if whole else self._has_part[after]):
            # a sub-layer may answer in a narrower dtype than the stream's; sums run in the stream's
            part = y if h.part is None else h.part.to(seen.x.dtype) + y
        plain = h.plain + y if h.plain is not None and after <= self._last_plain else None
        rest = h.rest if after <= plan.rest_last else None
        h = h._replace(x=x, plain=plain, rest=rest, part=None if whole else part, waiting=waiting, inside=inside)
        if site.index in plan.ends:
            h = self._forget(h, site.index)
        if self.source == "kv":
            lives = whole and plan.lives(plan.born[after], after)
            if lives and c.aux is None:
                raise ValueError(f"{self.name} reads keys and values of site {site.index}, which did not call seen.kv")
            return h._replace(kept=(*h.kept, self._make(c.aux, plan.born[after], after, h.own))) if lives else h
        new = x if self.source == "state" else part
        return self._push(h, new, after) if whole and new is not None else h

    def _needs_x(self, boundary: int) -> bool:
        return self.source != "increment" or self._origin[boundary] == "x"

    def _push(self, h: History, x: Tensor | None, boundary: int) -> History:
        """Make `x` the source that is complete at `boundary`, if anybody will use it."""
        assert x is not None
        number = self.plan.born[boundary]
        if self.plan.lives(number, boundary):
            return h._replace(kept=(*h.kept, self._make(self.store(x, number, h.own), number, boundary, h.own)))
        return self._fold(h, x) if boundary <= self.plan.rest_last else h

    def _make(self, stored: tuple[Tensor, ...], number: int, boundary: int, own: Any) -> Source:
        return Source(stored[0], stored[1:], self.derive(stored[0], number, boundary, own))

    def _forget(self, h: History, index: int) -> History:
        """Drop the sources that site `index` was the last to read, or fold them into the rest, oldest first."""
        kept, ended, folds = [], self.plan.ends[index], index < self.plan.rest_last
        for number, source in zip(self.plan.alive(index), h.kept, strict=True):
            if number not in ended:
                kept.append(source)
            elif folds:
                h = self._fold(h, source.x)
        return h._replace(kept=tuple(kept))

    def _fold(self, h: History, x: Tensor) -> History:
        return h._replace(rest=x if h.rest is None else h.rest + x)

    # What is made of parameters.

    def _used(self) -> list[Tensor]:
        """The parameters called in `derives`."""
        used: list[Tensor] = []
        for name in self.derives:  # a comprehension that names what it tests cannot be traced by a compiler
            p = getattr(self, name, None)
            used += p.values() if isinstance(p, nn.ParameterDict) else () if p is None else (p,)
        return used

    def _remade(self, value: History, boundary: int) -> History:
        h, own, birth = value, self.prepare(), self.plan.birth
        numbered = zip(self.plan.alive(boundary), h.kept, strict=True)
        # as when the source was complete: a product of another size would round in another way
        kept = tuple(s._replace(derived=self.derive(s.x, n, birth[n], own)) for n, s in numbered)
        h = h._replace(own=own, kept=kept)
        return self._push(h._replace(kept=kept[:-1]), h.x, boundary) if self._newest_is_x(boundary) else h

    # Stage boundaries. Where sources are states, the newest one is made of the residual.

    def _newest_is_x(self, boundary: int) -> bool:
        born = self.plan.born.get(boundary)
        return self.source == "state" and born is not None and self.plan.lives(born, boundary)

    def _alone(self, i: int) -> tuple[bool, bool, bool, bool]:
        """Which of x, plain, rest and part there are at boundary `i`."""
        return self._needs_x(i), i <= self._last_plain, self.plan.has_rest(i), self._has_part[i]

    def _pack(self, value: History, site: Site) -> tuple[Tensor, ...]:
        alone = (value.x, value.plain, value.rest, value.part)
        kept = value.kept[:-1] if self._newest_is_x(site.index) else value.kept
        return (*(t for t in alone if t is not None), *(t for s in kept for t in (s.x, *s.also)))

    def _unpack(self, tensors: tuple[Tensor, ...], site: Site, tokens: Tokens) -> History:
        i, alone, newest = site.index, self._alone(site.index), self._newest_is_x(site.index)
        numbers = self.plan.alive(i)
        older = numbers[:-1] if newest else numbers
        self._packed(tensors, sum(alone) + self.tensors * len(older), site)
        queue = iter(tensors)
        x, plain, rest, part = (next(queue) if there else None for there in alone)
        own = self.prepare()
        kept = [self._make(tuple(next(queue) for _ in range(self.tensors)), n, i, own) for n in older]
        h = History(x, plain, tuple(kept), rest, part, own=own)
        return self._push(h, x, i) if newest else h

    def rescale(self, state: State, factor: Tensor | float) -> State:
        """The state of a residual that a layer multiplies by `factor` between two sites.

        Increments are multiplied one and all, since the residual is their sum. Of states only the one that is
        complete here is: the earlier ones are what earlier layers handed on.
        """
        self._own(state)
        h, i = state.value, state.index

        def scaled(t: Tensor | None) -> Tensor | None:
            return None if t is None else t * factor

        x, plain, rest, part = (scaled(t) for t in (h.x, h.plain, h.rest, h.part))
        waiting, inside = (
            None if group is None else type(group)(*map(scaled, group)) for group in (h.waiting, h.inside)
        )
        h = h._replace(x=x, plain=plain, part=part, waiting=waiting, inside=inside)
        if self.source == "increment":
            kept = tuple(source._replace(x=source.x * factor) for source in h.kept)
            h = self._remade(h._replace(rest=rest, kept=kept), i)
        elif self._newest_is_x(i):
            h = self._push(h._replace(kept=h.kept[:-1]), x, i)
        return state._replace(value=h)

    # Inspection and counts.

    def held(self, value: History) -> list[Tensor]:
        """What a stage boundary sends and what is kept inside a block, of whatever width: no logits, no reads ahead."""
        kept = [(source.x, source.also) for source in value.kept]
        return tensors_in([value.x, value.plain, value.rest, value.part, value.waiting, value.inside, kept])

    def _weights(self, value: History, site: Site) -> Tensor | None:
        """(..., W, S) as `route` gives them, with heads (..., H, S); weights per channel as their mean."""
        if site.index not in self.plan.reads or self.source == "kv":  # those are the attention's business
            return None
        view = self.view(value, site)
        weights, sources = self.route(view, site), view.sources
        if isinstance(weights, Softmax):
            logits = weights.logits
            if logits is None:
                assert weights.query is not None
                logits = [rms_logits(x, weights.query.unsqueeze(0), eps=weights.eps)[..., 0] for x in sources]
            return torch.stack(list(logits), dim=-1).softmax(-1) * weights.scale
        static, token, channel, heads = weights
        found = [] if token is None else [token if heads == 1 else token.squeeze(-2)]
        found += [] if static is None else [widen(static)]
        found += [] if channel is None else [widen(channel).mean(-1)]
        total = sum(found[1:], found[0])
        return total if token is not None else total.expand(*sources[0].shape[:-1], -1, -1)

    def sources(self, site: Site) -> tuple[str, ...]:
        """The sources `site` reads, oldest first."""
        read, names = self.plan.reads.get(site.index), self.plan.names
        if read is None:
            return ()
        found = [names[0]] * read.first + ["overflow"] * read.rest + [names[n] for n in read.numbers]
        return (*found, "partial") if read.part else tuple(found)

    def additions(self) -> int:
        """Additions of vectors in writes, less those of the plain residual; for `flops`."""
        plan, total, begun = self.plan, 0, False
        for site in self.layout.sublayers:
            after = site.index + 1
            whole = after in plan.born
            if self.source == "increment":
                total += self._needs_x(after) + (after <= self._last_plain) - 1
                total += begun and (plan.wanted(after) if whole else self._has_part[after])
                begun = not whole
            total += self._waits(site)
        folded = sum(max(plan.last[n] + 1, index) <= plan.rest_last for index, n in plan.born.items())
        return total + max(0, folded - 1)

    def _waits(self, site: Site) -> int:
        """Ways that wait past `site` for the attention of its block."""
        attention = self.attention.get(site.block)
        if attention is None or site.index >= attention.index:
            return 0
        read = self.plan.reads.get(self.sites_of(site.block)[0].index)
        return 0 if read is None or "k" not in read.ways else 2 + ("q" in read.ways)


def defined_block(sites: Sequence[Site], ways: Sequence[Tensor], apply: Apply) -> Tensor:
    """The increments of a block's sub-layers, summed; for definitions.

    Args:
        sites: of the block.
        ways: what it starts from: the residual alone, or the residual, q, k and v.
        apply: runs the pre-norm and the sub-layer of a site.
    """
    total, met = torch.zeros_like(ways[0]), False
    for site in sites:
        takes = site.kind in ("attention", "parallel") and not met and len(ways) > 1
        met = met or takes
        # what came before in the block joins every way that has not been used yet
        read: list[Any] = [way + total for way in (ways if takes else ways[:1])]
        y = apply(site, Seen(*read)).y
        total = total + y
    return total
