"""What the events of a meter amount to: work as it runs, and work in as few kernels as possible.

    x ──mul──► a ──add──► b ──sum──► c      eager  every call reads its inputs and writes its outputs
        └──────── one stretch ───────┘      fused  what comes from outside is read once, what outlives it written once

A **stretch** is a run of calls that one kernel could do. It ends where the part of the model changes and around every
call that is a kernel of its own: attention, the products of sub-layers, the wide products of a stream. A product with a
short side is bound by memory and fuses with its neighbours.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from twoaxis.base.meter import ATTENTION, Allocate, Call, Event, Free, Region

STREAM = ("stream", "norm")
"""Kinds of parts that fuse with each other: the pre-norms follow the reads."""
WIDE = 64
"""Shortest side from which a product of a stream is a kernel of its own."""


class Part(NamedTuple):
    """Where in the model something happens."""

    kind: str  # `embedding`, `stream`, `norm`, a kind of sub-layer, or `head`
    block: int = -1  # number of the block; -1 before the first, and the number of blocks after the last
    site: int = 0  # index of the site that the work leads to: the write of site 3 leads to site 4

    @property
    def work(self) -> str:
        """The kind of part that an event of this part is counted under."""
        return "stream" if self.kind in STREAM else self.kind


class Kernel(NamedTuple):
    """One kind of launch."""

    op: str  # its name; `fused` for a stretch
    bytes: int  # read and written
    flops: int = 0  # of a matrix product, a convolution or attention; 0 for everything else
    number: int = -1  # of the call, by which its time on a machine is found; -1 for a stretch

    @staticmethod
    def of(call: Call) -> Kernel:
        """The kernel of one call as it runs, without fusion."""
        return Kernel(call.op, call.bytes, call.products, call.number)


VIEW = Kernel("view", 0)
"""A call that moves nothing: free on a device that runs ahead of Python, and a call like any other where none does."""


class Work(NamedTuple):
    """What some events amount to."""

    eager: Counter[Kernel]  # every call, views too where they were counted
    fused: Counter[Kernel]  # kernels of their own as they are, and one kernel for each stretch between them

    @property
    def flops(self) -> int:
        """FLOPs of matrix products, convolutions and attention."""
        return sum(kernel.flops * n for kernel, n in self.eager.items())

    @property
    def eager_bytes(self) -> int:
        """Bytes read and written when every call is a kernel of its own."""
        return sum(kernel.bytes * n for kernel, n in self.eager.items())

    @property
    def fused_bytes(self) -> int:
        """Bytes read and written when each stretch is one kernel."""
        return sum(kernel.bytes * n for kernel, n in self.fused.items())


def total(works: Iterable[Work]) -> Work:
    """The sum of several works."""
    found = Work(Counter(), Counter())
    for work in works:
        found.eager.update(work.eager)
        found.fused.update(work.fused)
    return found


def work_by(events: Sequence[Event], key: Callable[[Part], Hashable]) -> dict[Hashable, Work]:
    """The work of each group of parts; a stretch ends where the group changes."""
    found: dict[Hashable, Work] = defaultdict(lambda: Work(Counter(), Counter()))
    for group, stretch in stretches(events, key):
        kernels = [Kernel.of(event) for event in stretch if isinstance(event, Call)]
        found[group].eager.update(kernels)
        if len(kernels) == 1 and any(isinstance(event, Call) and is_kernel(event) for event in stretch):
            found[group].fused.update(kernels)
        elif kernels:
            found[group].fused[Kernel("fused", moved(stretch))] += 1
    return dict(found)


def stretches(events: Iterable[Event], key: Callable[[Part], Hashable]) -> Iterator[tuple[Hashable, list[Event]]]:
    """Runs of events that one kernel could do, with their group; what is freed belongs to the run before."""
    current: list[Event] = []
    group: Hashable = None
    alone = False  # the run is a kernel of its own
    for event in events:
        if not isinstance(event, Free):
            heavy, here = isinstance(event, Call) and is_kernel(event), key(_part(event))
            if current and (here != group or heavy or alone):
                yield group, current
                current = []
            group, alone = here, heavy
        current.append(event)
    if current:
        yield group, current


def is_kernel(call: Call) -> bool:
    """Whether a call is a kernel of its own."""
    if not call.products:
        return False
    wide = min(call.dims[1:], default=0) >= WIDE or call.op.startswith(ATTENTION)
    return wide or _part(call).kind not in STREAM


def moved(stretch: Iterable[Event]) -> int:
    """Bytes that one kernel must move in place of a stretch."""
    inside: set[int] = set()  # allocated here: reading it again moves nothing
    written: dict[int, int] = {}  # bytes of what is made here and still alive
    read: dict[int, dict[Region, int]] = defaultdict(dict)
    changed: dict[int, dict[Region, int]] = defaultdict(dict)
    for event in stretch:
        if isinstance(event, Free):
            written.pop(event.allocation, None)
            continue
        if isinstance(event, Allocate):
            inside.add(event.allocation)
            continue
        for region in event.reads:
            if region.allocation not in inside:
                read[region.allocation][region] = region.bytes
        for region in event.makes:
            inside.add(region.allocation)
            written[region.allocation] = region.whole
        for region in event.changes:
            if region.allocation in inside:
                written[region.allocation] = region.whole
            else:
                changed[region.allocation][region] = region.bytes
    return sum(written.values()) + _distinct(read) + _distinct(changed)


def highest(events: Iterable[Event], without: set[int]) -> dict[tuple[str, int], int]:
    """Most bytes above the start while the head and while each block runs, without some allocations.

    What comes before the first block is counted with it.
    """
    now, most = 0, dict[tuple[str, int], int]()
    for event in events:
        if isinstance(event, Free):
            now -= 0 if event.allocation in without else event.bytes
            continue
        grown = isinstance(event, Allocate)
        made = {event.allocation: event.bytes} if grown else {r.allocation: r.whole for r in event.makes}
        now += sum(size for allocation, size in made.items() if allocation not in without)
        part = _part(event)
        key = ("head" if part.kind == "head" else "blocks", max(0, part.block))
        most[key] = max(most.get(key, now), now)
    return most


def _part(event: Call | Allocate) -> Part:
    assert isinstance(event.part, Part), f"{event} ran outside every part of the model"
    return event.part


def _distinct(touched: dict[int, dict[Region, int]]) -> int:
    """Bytes of regions; those that overlap count twice as long as that is less than the allocation."""
    return sum(min(next(iter(regions)).whole, sum(regions.values())) for regions in touched.values())
