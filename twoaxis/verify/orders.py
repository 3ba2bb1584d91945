"""The paper's cost orders, counted: ShortSWA O(T w d), a depth window O(T K L d), full depth O(T L² d).

Projections, which both axes pay alike, are left out: what is counted is the reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from twoaxis.base.meter import Meter
from twoaxis.ring import Ring
from twoaxis.verify.certificate import Certificate
from twoaxis.window import attend, window_attention

FAMILY = "orders"


def sequence_read(tokens: int, window: int, width: int) -> int:
    """Operations of a windowed read along time."""
    q, k, v = (torch.ones(1, tokens, 1, width) for _ in range(3))
    with Meter(record=False) as count:
        window_attention(q, k, v, window, axis=1)
    return count.flops


def depth_read(tokens: int, window: int | None, depths: int, width: int) -> int:
    """Operations of reading over depth at every layer, one layer after the other."""
    q, k, v = (torch.ones(1, tokens, 1, 1, width) for _ in range(3))
    with Meter(record=False) as count:
        ring = Ring(window, axis=2, merge=False)
        for _ in range(depths):
            ring = ring.append(k, v)
            attend(ring, q)
    return count.flops


def orders(seed: int) -> Iterator[Certificate]:
    """Exponents of every size in the three orders; the seed is not needed, the counts are exact."""
    swa: Callable[..., int] = sequence_read
    base = {"tokens": 1024, "window": 33, "width": 32}
    for size, what in (("tokens", "T"), ("window", "w"), ("width", "d")):
        doubled = base | {size: base[size] * 2 - (size == "window")}  # w - 1 doubles with the chunk
        yield _exponent(f"ShortSWA O(T w d): exponent of {what}", swa(**base), swa(**doubled), 1.0)
    window = {"tokens": 8, "window": 4, "depths": 64, "width": 64}
    for size, what in (("tokens", "T"), ("window", "K"), ("depths", "L"), ("width", "d")):
        doubled = window | {size: window[size] * 2}
        count = _exponent(
            f"depth window O(T K L d): exponent of {what}", depth_read(**window), depth_read(**doubled), 1.0
        )
        yield count
    full = {"tokens": 8, "window": None, "depths": 64, "width": 64}
    for size, what, power in (("tokens", "T", 1.0), ("depths", "L", 2.0), ("width", "d", 1.0)):
        first, second = depth_read(**full), depth_read(**(full | {size: full[size] * 2}))
        yield _exponent(f"full depth O(T L² d): exponent of {what}", first, second, power)


def _exponent(statement: str, small: int, large: int, expected: float) -> Certificate:
    return Certificate(FAMILY, statement + f" = {expected:g}", abs(math.log2(large / small) - expected), 0.1)
