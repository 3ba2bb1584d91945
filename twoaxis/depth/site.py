"""Sites: the places where sub-layers read the stream, and which of them use a method.

A decoder of 2 blocks with a mixer has these sites; `out` is the read of the head:

    index   0      1          2    3      4          5    6
    kind    mixer  attention  mlp  mixer  attention  mlp  out
    block   0      0          0    1      1          1    2
            first             last first             last
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from twoaxis.base.options import Options

MOST_BLOCKS = 10_000
"""Blocks that a model may have: a number beyond it is a slip of the pen, and would take all memory."""
KINDS = ("mixer", "attention", "mlp", "parallel")
"""What a sub-layer may be; `parallel` is attention and MLP side by side in one site."""

OUT = "out"


class Site(NamedTuple):
    """One place where the stream is read."""

    block: int  # the block it belongs to; the out site counts as one block past the last
    kind: str  # mixer, attention, mlp, parallel or out
    index: int  # its number among all sites  # pyright: ignore[reportIncompatibleMethodOverride]
    first: bool  # first of its block; the out site is, because it reads where a next block would
    last: bool  # last of its block


def make_sites(blocks: int, kinds: Sequence[str] | Sequence[Sequence[str]] = ("attention", "mlp")) -> tuple[Site, ...]:
    """All sites of a decoder, the out site last.

    Args:
        blocks: number of blocks.
        kinds: the sub-layers of every block, or one such sequence per block.
    """
    if not isinstance(blocks, int) or isinstance(blocks, bool) or blocks < 1:
        raise ValueError(f"blocks must be a positive integer, got {blocks!r}")
    if isinstance(kinds, str) or not isinstance(kinds, Sequence) or not kinds:
        raise ValueError(f"kinds must be a sequence like ('attention', 'mlp'), or one per block, got {kinds!r}")
    uniform = isinstance(kinds[0], str)
    if not uniform and any(isinstance(names, str) or not isinstance(names, Sequence) for names in kinds):
        raise ValueError(f"kinds must be a sequence like ('attention', 'mlp'), or one per block, got {kinds!r}")
    per_block = [tuple(kinds)] * blocks if uniform else [tuple(names) for names in kinds]
    if len(per_block) != blocks:
        raise ValueError(f"kinds describe {len(per_block)} blocks, the stream has {blocks}")
    sites: list[Site] = []
    for block, names in enumerate(per_block):
        if not names:
            raise ValueError(f"block {block} has no sub-layer")
        for i, kind in enumerate(names):
            if kind not in KINDS:
                raise ValueError(f"unknown sub-layer kind {kind!r} in block {block}; the kinds are {', '.join(KINDS)}")
            sites.append(Site(block, str(kind), len(sites), i == 0, i == len(names) - 1))
    sites.append(Site(blocks, OUT, len(sites), True, True))
    return tuple(sites)


@dataclass(frozen=True, kw_only=True)
class Placement(Options):
    """Which sites use a method; the others read and write plainly on the method's state.

    Written as text it is `blocks/kinds`, either part optional: `"8-11"`, `"attention+out"`, `"0,8-11/attention"`,
    `"all"`, `"none"`. The out site counts as block `blocks` (one past the last).
    """

    blocks: tuple[int, ...] | None = None
    """Blocks that use the method; None is all of them and the out site."""
    kinds: tuple[str, ...] | None = None
    """Kinds of site that use the method; None is all of them."""

    def validate(self) -> None:
        """Rules between fields."""
        for kind in self.kinds or ():
            if kind not in (*KINDS, OUT):
                raise ValueError(f"unknown kind {kind!r} in a placement; the kinds are {', '.join((*KINDS, OUT))}")
        for block in self.blocks or ():
            if block < 0:
                raise ValueError(f"a placement names block {block}; blocks are numbered from 0")

    @staticmethod
    def parse(value: Placement | str | dict[str, Any] | None) -> Placement:
        """A placement from its text, its dictionary or nothing (everywhere)."""
        if value is None or value == "all":
            return Placement()
        if isinstance(value, Placement):
            return value
        if isinstance(value, dict):
            unknown = set(value) - {"blocks", "kinds"}
            if unknown:
                raise ValueError(f"a placement has the keys blocks and kinds, got {sorted(unknown)}")
            return Placement(**{k: tuple(v) if isinstance(v, list) else v for k, v in value.items()})
        if not isinstance(value, str) or not value:
            raise ValueError(f"cannot read the placement {value!r}; write it like '8-11', '8-11/attention+out'")
        if value == "none":
            return Placement(blocks=())
        head, _, tail = value.partition("/")
        if not tail and not head[:1].isdigit():
            head, tail = "", head
        try:
            blocks = tuple(b for part in head.split(",") for b in _span(part)) if head else None
        except ValueError as error:
            raise ValueError(
                f"cannot read the placement {value[:60]!r} ({error}); write it like '8-11', '8-11/attention+out'"
            ) from None
        return Placement(blocks=blocks, kinds=tuple(tail.split("+")) if tail else None)

    def uses(self, site: Site) -> bool:
        """Whether the method acts at `site`."""
        if self.blocks is not None and site.block not in self.blocks:
            return False
        return self.kinds is None or site.kind in self.kinds

    def check(self, blocks: int) -> None:
        """Refuse a placement that names blocks the stream does not have."""
        beyond = [b for b in self.blocks or () if b > blocks]
        if beyond:
            raise ValueError(
                f"the placement names block {beyond[0]}, but the stream has blocks 0 to {blocks - 1} and out {blocks}"
            )


def _span(part: str) -> range:
    first, dash, last = part.partition("-")
    span = range(int(first), int(last if dash else first) + 1)
    if span and span[-1] > MOST_BLOCKS:
        raise ValueError(f"block {span[-1]} is beyond the {MOST_BLOCKS:,} a model may have")
    if not span:
        raise ValueError(f"{part} runs backwards")
    return span
