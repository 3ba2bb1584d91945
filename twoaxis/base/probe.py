"""What a stream or a mixer shows of itself for inspection: named quantities with the names of their axes.

    value     (..., *axes)    the leading dimensions are the tokens'; none where the quantity is the same for all tokens
    gate      ()              one number per token
    write     (stream)        one per stream
    mix       (to, from)      a matrix

A method says what is special to it here, so that what prints and draws knows no method by name. The numbers of a model
never depend on a probe.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Regime(NamedTuple):
    """A range of a quantity that has a name, `low` included and `high` not, the last of several included.

    Attributes:
        name: such as skip.
        low: where it begins.
        high: where it ends.
    """

    name: str
    low: float
    high: float


class Probe(NamedTuple):
    """A quantity to look at.

    In the dictionaries that probes come in, names of the form `quantity, part` are parts of one quantity and belong
    into one drawing.

    Attributes:
        value: (..., *axes) in float32 at least.
        axes: what the dimensions after the tokens' are.
        regimes: named ranges, from low to high without gaps, where the method has such.
    """

    value: Tensor
    axes: tuple[str, ...] = ()
    regimes: tuple[Regime, ...] = ()

    @property
    def per_token(self) -> bool:
        """Whether it differs from token to token."""
        return self.value.dim() > len(self.axes)
