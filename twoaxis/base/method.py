"""What a stream or a mixer declares about itself: its card for the map, and the quantities inspection may look at.

The map that `twoaxis methods` prints, and the page of each method, are made of cards, the module's docstring (equation
and drawing), the options' docstrings and the cost formulas. Nothing about a method is said twice.

A quantity is a tensor with the names of its axes:

    value     (..., *axes)    the leading dimensions are the tokens'; none where the quantity is the same for all tokens
    gate      ()              one number per token
    write     (stream)        one per stream
    mix       (to, from)      a matrix

A method says what is special to it here, so that what prints and draws knows no method by name. The numbers of a model
never depend on a quantity being looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor


class Published(NamedTuple):
    """A published result: what was found, and where it stands."""

    result: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Card:
    """One row of the map.

    Every field is a short phrase; "-" where it does not apply.
    """

    title: str
    """The method's name as people write it."""
    axis: Literal["depth", "sequence"]
    """The axis it reads along."""
    source: str
    """What one source is."""
    query: str
    """Where the query comes from."""
    key: str
    """Where keys come from."""
    value: str
    """Where values come from."""
    literal_qkv: bool
    """Whether the read is literally softmax(q k) v, hence the paper's operator on this axis."""
    normaliser: str
    """How weights are normalised."""
    adaptivity: str
    """Static weights, or per token, or per channel."""
    window: str
    """What a read may see."""
    granularity: str
    """Per sub-layer or per block."""
    ways: str
    """Which inputs are read separately."""
    injection: str
    """Where the read enters."""
    sharing: str
    """Which parameters are shared over depth or tokens."""
    gating: str
    """What gates the read or write."""
    depth_state: str
    """What is carried from layer to layer."""
    token_state: str
    """What is kept from token to token."""
    paper: str
    """Authors, title, arXiv number."""
    year: int
    """Of the paper."""
    quirks: tuple[str, ...] = ()
    """What surprises people, a sentence each."""
    published: tuple[Published, ...] = ()
    """Published results with their sources."""


class NamedRange(NamedTuple):
    """A range of a quantity that has a name, `low` included and `high` not, the last of several included.

    Attributes:
        name: such as skip.
        low: where it begins.
        high: where it ends.
    """

    name: str
    low: float
    high: float


class Quantity(NamedTuple):
    """A quantity to look at.

    In the dictionaries that `quantities` returns, names of the form `quantity, part` are parts of one quantity and
    belong into one drawing.

    Attributes:
        value: (..., *axes) in float32 at least.
        axes: what the dimensions after the tokens' are.
        regimes: named ranges, from low to high without gaps, where the method has such.
    """

    value: Tensor
    axes: tuple[str, ...] = ()
    regimes: tuple[NamedRange, ...] = ()

    @property
    def per_token(self) -> bool:
        """Whether it differs from token to token."""
        return self.value.dim() > len(self.axes)
