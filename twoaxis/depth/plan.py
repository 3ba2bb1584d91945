"""Which sources there are and which site reads which: a function of the layout alone.

    boundary   0    1    2    3    4    5    6        index of the site that comes next
    site       0    1    2    3    4    5    out
    born       0         1         2         3        source 1 is complete before site 2 (runs or blocks of two)
    reads      [0]  ...  [0 1]     [0 1 2]   [0 1 2 3]

The history family (`twoaxis.depth.history`) follows a plan. The time to make one is linear in the number of sites,
whatever the reads: nothing is kept per pair of a site and a source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from twoaxis.depth.site import Site
from twoaxis.depth.stream import Layout


class Read(NamedTuple):
    """What one site reads, and as which ways."""

    numbers: range  # sources one by one, oldest first; a step is a dilation
    # of x, q, k, v, in the order of the weights; without x the residual goes on as it is, without q it is x
    ways: tuple[str, ...] = ("x",)
    first: bool = False  # source 0 as well, outside the window
    rest: bool = False  # the sum of the sources that left the window
    part: bool = False  # the run that is not finished

    @property
    def total(self) -> int:
        """How many sources."""
        return self.first + self.rest + len(self.numbers) + self.part

    @property
    def singles(self) -> int:
        """How many of them are read one by one."""
        return self.first + len(self.numbers)


class Plan:
    """Which sources there are and who reads them; numbers grow with depth, and a window never moves back.

    Args:
        layout: the sites.
        born: boundary (index of the next site) to the number of the source that is complete there, from 0 on.
        reads: by index of the site.
        names: of the sources, by number.
    """

    def __init__(
        self, layout: Layout, born: Mapping[int, int], reads: Mapping[int, Read], names: Sequence[str]
    ) -> None:
        self.born, self.names = dict(born), tuple(names)
        self.reads = {index: reads[index] for index in sorted(reads)}
        self.birth = sorted(born)
        """By number: the boundary at which the source is complete."""
        self.last = [-1] * len(born)
        """By number: the last site that reads the source one by one; -1 where none does."""
        self.ends: dict[int, set[int]] = {}
        """By site: the numbers of the sources that it reads as the last."""
        highest = max((read.numbers[-1] for read in reads.values() if read.numbers), default=0)
        unread = set(range(highest + 1))
        for index, read in reversed(self.reads.items()):
            fewer = read.numbers if len(read.numbers) < len(unread) else unread
            found = {n for n in fewer if n in unread and n in read.numbers} | ({0} & unread if read.first else set())
            unread -= found
            for n in found:
                self.last[n] = index
            if found:
                self.ends[index] = found
        self.rest_last = max((index for index, read in reads.items() if read.rest), default=-1)
        """The last site that reads the rest; -1 where none does."""
        self.rest_first = min((max(self.last[n] + 1, index) for index, n in born.items()), default=0)
        """The boundary at which a source leaves the window for the first time."""
        self._span: list[range] = []
        oldest, newest = 1, -1
        for index in range(len(layout.sites)):
            newest = born.get(index, newest)
            while oldest <= newest and self.last[oldest] < index:
                oldest += 1
            self._span.append(range(oldest, newest + 1))

    @staticmethod
    def blocks(layout: Layout, read: Callable[[Site], Read | None]) -> Plan:
        """Source b is complete before block b; `read` says what the first site of a block reads."""
        firsts = [site for site in layout.sites if site.first]
        reads = {site.index: found for site in firsts if (found := read(site)) is not None}
        names = ("embedding", *(f"block {b}" for b in range(layout.blocks)))
        return Plan(layout, {site.index: site.block for site in firsts}, reads, names)

    @staticmethod
    def runs(layout: Layout, size: int, read: Callable[[Site], Read | None]) -> Plan:
        """Source n is the sum of the n-th run of `size` sub-layers; any site may read."""
        born = {index: n for n, index in enumerate(range(0, len(layout.sites), size))}
        reads = {site.index: found for site in layout.sites if (found := read(site)) is not None}
        unit = "sub-layer" if size == 1 else "run"
        return Plan(layout, born, reads, ("embedding", *(f"{unit} {n}" for n in range(len(born) - 1))))

    def lives(self, number: int, boundary: int) -> bool:
        """Whether a site from `boundary` on reads the source one by one."""
        return self.last[number] >= boundary

    def alive(self, boundary: int) -> list[int]:
        """Numbers of the sources that are complete at `boundary` and that a site from there on reads one by one."""
        recent = [n for n in self._span[boundary] if self.last[n] >= boundary]
        return [0, *recent] if self.birth and self.birth[0] <= boundary <= self.last[0] else recent

    def wanted(self, boundary: int) -> bool:
        """Whether the source that is complete at `boundary` is used at all."""
        return self.lives(self.born[boundary], boundary) or boundary <= self.rest_last

    def has_rest(self, boundary: int) -> bool:
        """Whether there is a rest at `boundary`, and a reader of it ahead."""
        return self.rest_first <= boundary <= self.rest_last


def attention_sites(layout: Layout) -> dict[int, Site]:
    """For each block that has one: its first site that takes queries, keys and values."""
    found: dict[int, Site] = {}
    for site in layout.sublayers:
        if site.kind in ("attention", "parallel"):
            found.setdefault(site.block, site)
    return found


def attention_plan(layout: Layout, uses: Callable[[Site], bool], stride: int = 1, window: int | None = None) -> Plan:
    """Sources are keys and values of attentions, which later attentions read in place of ways.

    Args:
        layout: the sites.
        uses: whether a site takes part.
        stride: every `stride`-th attention that takes part is a source, from the first on.
        window: how many of the last sources are read; None is all of them.
    """
    attentions = [s for s in attention_sites(layout).values() if uses(s)]
    made = attentions[::stride]
    reads = {}
    for n, site in enumerate(attentions):
        complete = -(-n // stride)
        if complete:
            reads[site.index] = Read(range(0 if window is None else max(0, complete - window), complete), ())
    born = {site.index + 1: n for n, site in enumerate(made)}
    return Plan(layout, born, reads, [f"keys and values of block {site.block}" for site in made])


def qkv_ways(site: Site) -> tuple[str, ...]:
    """What a site with separate queries, keys and values normalises; a parallel one also has its MLP's input."""
    return ("q", "k", "v", "x") if site.kind == "parallel" else ("q", "k", "v")
