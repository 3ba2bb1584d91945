"""Standard: the plain residual stream of a pre-norm decoder.

    x_{l+1} = x_l + f_l(x_l)

    x ──┬────────────(+)──┬────────────(+)── out
        └─norm──attn──┘   └─norm──mlp──┘

The stream every other method is compared with. It has no parameters and is its own neutral point. It is a causal depth
read with uniform weights, times their number: `twoaxis verify` shows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from twoaxis.base.method import Card
from twoaxis.depth.site import Site
from twoaxis.depth.stream import Apply, Seen, Stream, Tokens


@dataclass(frozen=True, kw_only=True)
class StandardConfig:
    """The plain residual has no options."""


class Plain(NamedTuple):
    """The running sum."""

    x: Tensor


class Standard(Stream):
    """The plain residual stream."""

    name = "standard"
    neutral = "bitwise"
    Config = StandardConfig
    card = Card(
        title="Plain residual",
        purpose="the baseline: every sub-layer adds its output to one running sum",
        source="increment of a sub-layer",
        value="raw increments",
        normaliser="none: every weight is one",
        adaptivity="fixed",
        window="all earlier sub-layers",
        injection="the running sum is the input",
        sharing="-",
        depth_state="one vector",
        paper="He, Zhang, Ren, Sun, Identity Mappings in Deep Residual Networks, arXiv 1603.05027",
    )
    suggestions = ()
    alike = True

    def definition(self, x: Tensor, apply: Apply) -> Tensor:
        """x_{l+1} = x_l + f_l(x_l)."""
        for site in self.sites:
            x = x + apply(site, Seen(x)).y
        return x

    def _open(self, x: Tensor, tokens: Tokens) -> Plain:
        return Plain(x)

    def _read(self, value: Plain, site: Site) -> Seen:
        return Seen(value.x)

    def _write(self, value: Plain, site: Site, y: Tensor, seen: Seen, c: Seen) -> Plain:
        return Plain(value.x + y)

    def _pack(self, value: Plain, site: Site) -> tuple[Tensor, ...]:
        return (value.x,)

    def _unpack(self, tensors: tuple[Tensor, ...], site: Site, tokens: Tokens) -> Plain:
        self._packed(tensors, 1, site)
        return Plain(*tensors)

    def _rescale(self, value: Plain, factor: Tensor | float) -> Plain:
        return Plain(value.x * factor)

    def flops(self) -> int:
        """Nothing is added to the plain residual."""
        return 0
