"""The card of a method: where it stands on the two axes, in the same words for every stream and mixer.

The map that `twoaxis methods` prints, and the page of each method, are made of these cards, the module's docstring
(equation and drawing), the options' docstrings and the cost formulas. Nothing about a method is said twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


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
