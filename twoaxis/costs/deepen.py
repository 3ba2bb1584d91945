"""Traces of deep models out of those of two shallow ones, where every block does the same work.

    2 blocks   first         last          what the third block of the second model adds, every further one adds too;
    3 blocks   first  middle last          calls on what all blocks share, such as a table of rows, grow by as much

A stream says that its blocks are alike (`Stream.alike`), and a configuration must give all of them the same layers.
Where the two traces do not fit together the model is traced whole, so that this never changes a number.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from twoaxis.costs.fuse import Kernel, Work
from twoaxis.costs.trace import Kept, StepTrace, TrainTrace, meta_model
from twoaxis.model.config import ModelConfig

FEW = 2
"""Blocks of the smaller model: a first and a last one."""
Trace = TypeVar("Trace", TrainTrace, StepTrace)
Sizes = Counter[tuple[str, int]]
"""Bytes by a kind of part and the block."""


class _UnlikeError(Exception):
    """Two traces of which the deeper one is not the other with a block more."""


def trace_deep(model: Any, config: Any, dtype: str, trace: Callable[[Any], Trace]) -> Trace:
    """What `trace` finds of a model in a dtype, from two shallow ones if that is exact."""
    if alike(model, config):
        few = [dataclasses.replace(config, num_hidden_layers=blocks) for blocks in (FEW, FEW + 1)]
        less, more = (trace(meta_model(each, dtype)) for each in few)
        try:
            return deepen(less, more, config.num_hidden_layers - FEW - 1)
        except _UnlikeError:
            pass
    return trace(model)


def alike(model: Any, config: Any) -> bool:
    """Whether all blocks of a model are the same, and there are enough of them to leave some out."""
    if not isinstance(config, ModelConfig) or config.num_hidden_layers <= 2 * FEW + 1 or not model.stream.alike:
        return False
    by_block = (config.attention_windows, config.mixer_blocks, config.placement)
    return all(each is None for each in by_block) and not config.no_rope_blocks and not config.hidden_ramp


def deepen(less: Trace, more: Trace, blocks: int) -> Trace:
    """The trace of a model with so many blocks more than the second, which has one more than the first."""
    if isinstance(less, TrainTrace) and isinstance(more, TrainTrace):
        return TrainTrace(
            _works(less.forward, more.forward, blocks),
            _works(less.backward, more.backward, blocks),
            int(_beyond(less.sites, more.sites, blocks)),
            _sizes(less.alive, more.alive, blocks),
            _sizes(less.extra, more.extra, blocks),
            None,
        )
    assert isinstance(less, StepTrace)
    assert isinstance(more, StepTrace)
    kept = Kept(*(_beyond(*pair, blocks) for pair in zip(less.kept, more.kept, strict=True)))
    per = len(more.sites) - len(less.sites)
    start, end = per * (FEW - 1), per * FEW
    first, middle, last = more.sites[:start], more.sites[start:end], more.sites[end:]
    grown = [  # calls of the first and the last sites may be on what all blocks share
        high._replace(eager=_beyond(low.eager, high.eager, blocks), fused=_beyond(low.fused, high.fused, blocks))
        for low, high in zip(less.sites, first + last, strict=True)
    ]
    again = [site._replace(block=site.block + n) for n in range(blocks + 1) for site in middle]
    sites = (*grown[:start], *again, *(site._replace(block=site.block + blocks) for site in grown[start:]))
    return StepTrace(_works(less.parts, more.parts, blocks), sites, None, kept)


def _beyond(less: Any, more: Any, blocks: int) -> Any:
    """A number that grows by as much with each further block."""
    return more + blocks * (more - less)


def _works(less: Mapping[Any, Work], more: Mapping[Any, Work], blocks: int) -> dict[Any, Work]:
    if less.keys() != more.keys():
        raise _UnlikeError
    return {
        part: Work(*(_kernels(*pair, blocks) for pair in zip(less[part], more[part], strict=True))) for part in more
    }


def _kernels(less: Counter[Kernel], more: Counter[Kernel], blocks: int) -> Counter[Kernel]:
    """What a block adds, so many times; a call that one of the models lacks is on more rows in the other."""
    gone, come = (sorted((a - b).elements()) for a, b in ((less, more), (more, less)))
    found, grown = Counter(dict(more)), Counter[Kernel]()
    for low in gone:  # by op, the smallest first: sums do not depend on which belongs to which
        high = next((kernel for kernel in come if kernel.op == low.op and kernel.bytes >= low.bytes), None)
        if high is None:
            raise _UnlikeError
        come.remove(high)
        found[high] -= 1
        grown[Kernel(low.op, _beyond(low.bytes, high.bytes, blocks), _beyond(low.flops, high.flops, blocks))] += 1
    for kernel, count in Counter(come).items():
        found[kernel] += blocks * count
    return +found + grown


def _sizes(less: Sizes, more: Sizes, blocks: int) -> Sizes:
    """The middle block again and again; what belongs to no block grows with their number.

    Gradients of what all blocks share grow from the last block to the first, by as much in each.
    """
    middle, found, before = FEW - 1, Sizes(), _shifted(less, more)
    slope = more["blocks", 0] - less["blocks", 0]
    for (kind, block), size in more.items():
        if block == middle:
            found.update({(kind, block + n): size + slope * (blocks - n) for n in range(blocks + 1)})
            continue
        if size - before[kind, block] != (slope if block < middle else 0) and 0 <= block <= FEW:
            raise _UnlikeError
        found[kind, block + blocks * (block > middle)] = _beyond(before[kind, block], size, blocks)
    return found


def _shifted(less: Sizes, more: Sizes) -> Sizes:
    """The smaller model's, at the places of the same blocks in the other; that must have no others but the middle."""
    shifted = Sizes({(kind, block + (block >= FEW - 1)): size for (kind, block), size in less.items()})
    if shifted.keys() != {key for key in more if key[1] != FEW - 1}:
        raise _UnlikeError
    return shifted
