"""The memory of an operator along an ordered axis: what it has to keep of earlier positions.

append ──► [ spare | window - 1 | new ] ──► an operator looks at it ──► evict ──► [ spare | window - 1 ]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Ring(NamedTuple):
    """What an operator remembers along an ordered axis: the last positions of one or several tensors.

    A value: every method returns a new ring and leaves the old one intact, so passes may interleave and a rejected
    draft is undone by keeping the earlier ring. Memory is constant in the axis when `window` is set. Exact for any
    chunking: an operator appends, looks, and only then evicts.
    """

    window: int | None  # positions an operator sees, the current one included; None keeps everything
    axis: int  # the ordered axis of the tensors, counted from the front
    spare: int = 0  # positions kept beyond the window, so that up to that many can be trimmed
    seen: int = 0  # positions appended so far
    kept: tuple[Tensor, ...] = ()  # the stored positions of each tensor, oldest first

    @property
    def stored(self) -> int:
        """Positions kept right now."""
        return self.kept[0].shape[self.axis] if self.kept else 0

    def append(self, *tensors: Tensor) -> Ring:
        """Add n positions; drops only what none of them can see."""
        check_window(self.window)
        if not tensors or any(not 0 <= self.axis < t.dim() for t in tensors):
            dims = [t.dim() for t in tensors]
            raise ValueError(f"a ring along axis {self.axis} needs tensors that have it, got dimensions {dims}")
        n = tensors[0].shape[self.axis]
        for t in tensors:
            if t.shape[self.axis] != n:
                raise ValueError(f"tensors of one append differ along axis {self.axis}: {n} and {t.shape[self.axis]}")
        if self.kept and len(self.kept) != len(tensors):
            raise ValueError(f"this ring holds {len(self.kept)} tensors a position, got {len(tensors)}")
        if self.kept:
            tensors = tuple(torch.cat(pair, dim=self.axis) for pair in zip(self.kept, tensors, strict=True))
        return self._replace(kept=tensors, seen=self.seen + n)._keep(n)

    def evict(self) -> Ring:
        """Drop what no later position can see."""
        return self._keep(0)

    def _keep(self, new: int) -> Ring:
        """Keep the positions that the last `new` and all later ones can see, and the spare ones."""
        if self.window is None:
            return self
        limit = self.window - 1 + max(new, self.spare)
        extra = self.stored - limit
        if extra <= 0:
            return self
        kept = (t.narrow(self.axis, extra, limit) for t in self.kept)
        # a copy where a short view would keep the long tensor behind it alive
        return self._replace(kept=tuple(t.clone() if extra > limit else t for t in kept) if limit else ())

    def tensors(self) -> tuple[Tensor, ...]:
        """The stored positions of each tensor."""
        if not self.kept:
            raise ValueError("the ring is empty: append positions first")
        return self.kept

    def trim(self, count: int) -> Ring:
        """Take back the last `count` positions, for instance a rejected draft."""
        if count < 0 or count > self.seen:
            raise ValueError(f"cannot trim {count} positions of a ring that has seen {self.seen}")
        if count == 0:
            return self
        left, need = max(self.stored - count, 0), self.seen - count
        if self.window is not None:
            need = min(need, self.window - 1)
        if left < need:
            raise ValueError(
                f"cannot trim {count} positions: {left} would remain and a window of {self.window} needs "
                f"{need}; make the ring with spare >= {count} to keep enough of them"
            )
        kept = tuple(t.narrow(self.axis, 0, left) for t in self.kept) if left else ()
        return self._replace(kept=kept, seen=self.seen - count)

    def reorder(self, index: Tensor) -> Ring:
        """Rows of the batch (dimension 0) in another order, or a selection of them."""
        return self._replace(kept=tuple(t.index_select(0, index) for t in self.kept))

    def repeat(self, times: int) -> Ring:
        """Each row of the batch `times` times, next to each other."""
        return self._replace(kept=tuple(t.repeat_interleave(times, 0) for t in self.kept))

    def nbytes(self) -> int:
        """Bytes of the stored positions."""
        return sum(t.numel() * t.element_size() for t in self.kept)


def check_window(window: int | None) -> None:
    """Refuse a window that is not a positive integer or None."""
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise ValueError(f"window must be a positive integer or None for the full prefix, got {window!r}")
