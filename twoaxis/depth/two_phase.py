"""Softmax reads with queries that do not depend on the input: logits made ahead, and reads in two phases.

    ahead        a finished source gets its logits for all later sites from one product     s = < u_l , x / rms(x) >
    two phases   first, for a group of sites at once: the reads of the sources that are finished when the group begins
                 r_l = Σ softmax(s_l) x,   lse_l = log Σ exp(s_l)
                 then at each site: r_l is one more source, with lse_l for its logit, beside those that came since

These are evaluations of one and the same read, not methods: a stream says what its folded queries are, and in which
order its read takes them is decided here. What is not finished, the rest and a partial sum, gets its logit when it is
read. One token at a time, without gradients, gets its logits in the read (`twoaxis.kernels.history.query_read`).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twoaxis.depth.history import History, HistoryStream, Softmax, Source, View
from twoaxis.depth.plan import Plan
from twoaxis.depth.site import Site
from twoaxis.depth.stream import Layout, Seen, Tokens
from twoaxis.kernels.history import rms_logits, softmax_read, weighted_sum
from twoaxis.kernels.precision import launch_bound, widen


class GroupReads(NamedTuple):
    """The first phase for the reading sites of a group, the last of which is the last entry."""

    reads: tuple[Tensor | None, ...]  # (..., D) by site, None once used
    lse: Tensor  # (..., H, n) their log-sum-exps


class Ahead(NamedTuple):
    """What the stream makes of its parameters once per pass, and the first phase of the current group."""

    queries: Tensor | None  # (n, H, D/H) folded queries of all reading sites; None where they are not fixed
    group: GroupReads | None = None  # where reads have two phases and the group has finished sources to batch


class AheadStream(HistoryStream):
    """A history stream whose reads may have fixed queries; a subclass declares their parameters and uses `ask`."""

    derives = ("query", "norm_weight", "log_temperature")
    eps: float | None = None
    """Inside the keys' mean square; None leaves the keys un-normalised."""
    single_reads: bool = True
    """Whether all reads are softmaxes over whole sources, which one token takes in one call."""
    group: int | None = None
    """Sub-layers per group where reads have two phases; a multiple of the sub-layers per source."""

    def __init__(self, config: Any, layout: Layout) -> None:
        super().__init__(config, layout)
        if layout.width % config.heads:
            raise ValueError(f"heads ({config.heads}) must divide the width ({layout.width})")

    def queries(self) -> Tensor | None:
        """Folded queries w ⊙ g · scale of all reading sites, (n, H, D/H); None where they are not fixed."""
        if self.query is None:
            return None
        u = widen(self.query) if self.config.scale == 1.0 else widen(self.query) * self.config.scale
        u = u if self.norm_weight is None else u * widen(self.norm_weight)
        u = u.unflatten(-1, (self.config.heads, -1))
        return u if self.log_temperature is None else u * widen(-self.log_temperature).exp().unsqueeze(-1)

    def lone(self, names: Iterable[str]) -> dict[str, str]:
        """Names with the rows of sites that have one source: its softmax is one whatever the logit."""
        rows = [row for row, read in enumerate(self.plan.reads.values()) if read.total == 1]
        return {name.format(row): "the site has one source, its softmax is constant" for row in rows for name in names}

    def follow(self, plan: Plan) -> None:
        """Take over a plan; reading sites are numbered by rows of stacked parameters."""
        super().follow(plan)
        sites = [site.index for site in self.layout.sites]
        self.row_at = [0, *accumulate(int(index in plan.reads) for index in sites)]
        """By site: how many reading sites come before it, hence its row."""
        self._stop = [self.row_at[index + 1] for index in plan.last]
        """By source: the row after its last reader's. Logits end there, whatever they begin with."""
        self._begun: list[int] = []
        """By site: how many sources are finished when its group begins."""
        newest = 0
        for index in sites:
            newest = plan.born.get(index, newest)
            within = self.group is not None and index % self.group
            self._begun.append(self._begun[-1] if within else newest + 1)

    # Logits.

    def prepare(self) -> Ahead:
        """The folded queries."""
        return Ahead(self.queries())

    def derive(self, x: Tensor, number: int, boundary: int, own: Ahead) -> tuple[Tensor, ...] | None:
        """The logits (..., H) of a source for every site from `boundary` on that reads it: consecutive rows."""
        if own.queries is None or self._single(x):
            return None
        queries = own.queries[self.row_at[boundary] : self._stop[number]]
        return rms_logits(x, queries, eps=self.eps).unbind(-1)

    def _single(self, x: Tensor) -> bool:
        """Whether reads make their own logits: one token of a few sequences without gradients, in eager mode."""
        if not self.single_reads or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        return x.dim() > 1 and x.shape[-2] == 1 and launch_bound(x)

    def logits(self, view: View, site: Site, skip: int = 0) -> list[Tensor]:
        """Of every source of a read but the first `skip`, (..., H)."""
        read, row, queries = self.plan.reads[site.index], self.row_at[site.index], view.state.own.queries
        numbers = [0] * read.first + [-1] * read.rest + list(read.numbers) + [-1] * read.part
        return [
            rms_logits(source.x, queries[row : row + 1], eps=self.eps)[..., 0]
            if source.derived is None
            else source.derived[row - self._stop[number]]
            for number, source in zip(numbers[skip:], view.kept[skip:], strict=True)
        ]

    def ask(self, view: View, site: Site, scale: float) -> Softmax:
        """The softmax read of the site's fixed query."""
        if self._single(view.kept[0].x):
            return Softmax(query=view.state.own.queries[self.row_at[site.index]], eps=self.eps, scale=scale)
        return Softmax(self.logits(view, site), scale=scale)

    # Two phases.

    def mix(self, view: View, site: Site) -> tuple[Tensor, ...]:
        """The read in one phase, or the second one: what was batched is merged with the sources that came since."""
        group: GroupReads | None = view.state.own.group
        if group is None:
            return super().mix(view, site)
        begun, place = self._begun[site.index], self.row_at[site.index] - self._group_stop(site.index)
        batched, scale = group.reads[place], self.scale(site)
        assert batched is not None
        if begun == len(view.kept) and scale == 1.0:
            return (batched,)
        sources, logits = view.sources[begun:], self.logits(view, site, skip=begun)
        return (softmax_read([batched, *sources], [group.lse[..., place], *logits], scale=scale),)

    def scale(self, site: Site) -> float:
        """Of the average that a softmax read at `site` gives."""
        return 1.0

    def _group_stop(self, index: int) -> int:
        """The row after the last one of the group that site `index` is in."""
        assert self.group is not None
        return self.row_at[min((index // self.group + 1) * self.group, len(self.layout.sites))]

    def _first_phase(self, h: History, index: int) -> History:
        """The reads of the sources finished when the group of site `index` began, for its sites from `index` on."""
        if self.group is None:
            return h
        row, stop = self.row_at[index], self._group_stop(index)
        finished = [s for n, s in zip(self.plan.alive(index), h.kept, strict=True) if n < self._begun[index]]
        if len(finished) < 2 or row >= stop or finished[0].derived is None:
            return h._replace(own=h.own._replace(group=None))
        return h._replace(own=h.own._replace(group=self._batch(finished, stop - row, row)))

    def _batch(self, finished: list[Source], count: int, row: int) -> GroupReads:
        columns = []
        for number, source in enumerate(finished):
            begin = row - self._stop[number] + len(source.derived)
            columns.append(torch.stack(source.derived[begin : begin + count], dim=-1))
        logits = torch.stack(columns, dim=-1)  # (..., H, n, S)
        lse = logits.logsumexp(-1)
        weights, heads = (logits - lse.unsqueeze(-1)).exp(), logits.shape[-3]
        if heads == 1:
            return GroupReads(weighted_sum([s.x for s in finished], token=weights.squeeze(-3)), lse)
        by_heads = [s.x.unflatten(-1, (heads, -1)) for s in finished]
        return GroupReads(tuple(read.flatten(-2) for read in weighted_sum(by_heads, token=weights)), lse)

    def _remade(self, value: History, boundary: int) -> History:
        return self._first_phase(super()._remade(value, boundary), boundary)

    def _open(self, x: Tensor, tokens: Tokens) -> History:
        return self._first_phase(super()._open(x, tokens), 0)

    def _unpack(self, tensors: tuple[Tensor, ...], site: Site, tokens: Tokens) -> History:
        return self._first_phase(super()._unpack(tensors, site, tokens), site.index)

    def _write(self, value: History, site: Site, y: Tensor, seen: Seen, c: Seen) -> History:
        h = super()._write(value, site, y, seen, c)
        if self.group is None:
            return h
        if (site.index + 1) % self.group == 0:
            return self._first_phase(h, site.index + 1)
        group: Any = h.own.group
        if group is None or site.index not in self.plan.reads:
            return h
        place = self.row_at[site.index] - self._group_stop(site.index) + len(group.reads)
        reads = (*group.reads[:place], None, *group.reads[place + 1 :])  # nobody else reads it: it need not live on
        return h._replace(own=h.own._replace(group=group._replace(reads=reads)))
