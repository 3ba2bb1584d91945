"""Blend: any method on a pretrained model without changing it at step 0.

    every site and way sees   lerp( plain.x , method.way , gate )        one float32 gate per site, zero at the start

    y ──┬──► plain stream  ──► p ──┐
        └──► method        ──► m ──┴─ p + g (m - p) ──► norm ──► sub-layer ──► y

The plain stream and the method both receive every sub-layer output, each continuing from its own un-blended read. A
gate of zero is the plain model and a gate of one the method, both to the last bit. At gate zero the method's
parameters have no gradient; they get one as soon as the gate moves. A method whose read is not finite while its gate
is zero raises instead of leaking NaN into a model that should not notice it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twoaxis.base.method import ParameterGroup, Quantity
from twoaxis.depth.site import Site
from twoaxis.depth.stream import Seen, State, Stream, Tokens
from twoaxis.kernels.precision import widen


class Both(NamedTuple):
    """The plain residual and the method's own state."""

    plain: Tensor
    method: State


class Blend(Stream):
    """A method faded in over the plain residual.

    Args:
        method: the stream to fade in.
    """

    name = "blend"
    neutral = "bitwise"

    def __init__(self, method: Stream) -> None:
        super().__init__(method.config, method.layout)
        if (why := method.unblendable()) is not None:
            raise ValueError(f"{method.name} {why}")
        self.method, self.kv_heads = method, method.kv_heads
        self.parameter("gate", len(method.layout.sites), start=0.0, neutral=0.0)
        super().reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None, std: float = 0.02) -> None:
        """The method's own start, behind closed gates."""
        self.method.reset_parameters(generator, std)
        super().reset_parameters(generator, std)

    def ways(self, site: Site) -> tuple[str, ...]:
        """The method's."""
        return self.method.ways(site)

    def changes_kv(self, site: Site) -> bool:
        """The method's."""
        return self.method.changes_kv(site)

    def memory_windows(self) -> tuple[int, ...]:
        """The method's."""
        return self.method.memory_windows()

    def sources(self, site: Site) -> tuple[str, ...]:
        """The method's."""
        return self.method.sources(site)

    def dead(self) -> dict[str, str]:
        """The method's; its parameters have no gradient while every gate is closed."""
        return {f"method.{name}": why for name, why in self.method.dead().items()}

    def held(self, value: Both) -> list[Tensor]:
        """The plain residual, beside what the method's state holds."""
        return [value.plain, *self.method.held(value.method.value)]

    def _open(self, x: Tensor, tokens: Tokens) -> Both:
        return Both(x, self.method.open(x, tokens.past, reach=tokens.reach, keep=tokens.keep))

    def _read(self, value: Both, site: Site) -> Seen:
        seen, plain = self.method.read(value.method, site), value.plain
        gate = self.gate[site.index]
        ways = {name: way for name in ("x", "q", "k", "v") if (way := getattr(seen, name)) is not None}
        for name, way in ways.items():
            finite = torch.isfinite(way).all() | (gate != 0)
            torch._assert_async(  # pyright: ignore[reportPrivateImportUsage]
                finite, f"{self.method.name} read a non-finite {name} at site {site.index} behind a closed gate"
            )
            ways[name] = _lerp(plain, way, gate)
        return Seen(**ways, aux=seen, kv=None if seen.kv is None else partial(_blended, seen.kv, gate))

    def _write(self, value: Both, site: Site, y: Tensor, seen: Seen, c: Seen) -> Both:
        return Both(value.plain + y, self.method.write(value.method, site, y, seen.aux, c))

    def _rescale(self, value: Both, factor: Tensor | float) -> Both:
        return Both(value.plain * factor, self.method.rescale(value.method, factor))

    def _memory(self, value: Both) -> tuple[Any, ...]:
        return self.method.memory(value.method)

    def _weights(self, value: Both, site: Site) -> Tensor | None:
        return self.method.weights(value.method, site)

    def _quantities(self, value: Both, site: Site, y: Tensor | None, seen: Seen, c: Seen | None) -> dict[str, Quantity]:
        """The gate of the blend, and what the method shows of its own un-blended read."""
        own = self.method.quantities(value.method, site, y, seen.aux, c)
        meaning = "0 where the plain stream is read, 1 where the method is, and in between a mixture"
        return {"blend gate": Quantity(self.gate[site.index], meaning=meaning), **own}

    def _pack(self, value: Both, site: Site) -> tuple[Tensor, ...]:
        return (value.plain, *self.method.pack(value.method))

    def _unpack(self, tensors: tuple[Tensor, ...], site: Site, tokens: Tokens) -> Both:
        if not tensors:
            raise ValueError("a blend packs into the plain residual and the method's tensors, got 0 tensors")
        method = self.method.unpack(tensors[1:], site, tokens.past, reach=tokens.reach, keep=tokens.keep)
        return Both(tensors[0], method)

    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        """The gates, never decayed, and the method's own groups."""
        groups = (g._replace(names=tuple(f"method.{n}" for n in g.names)) for g in self.method.parameter_groups())
        return (ParameterGroup(("gate",)), *groups)

    def flops(self) -> int:
        """The method's, the plain residual beside it and one interpolation per site and way."""
        if type(self.method).flops is Stream.flops:  # the method has no formula: it is counted in here
            return super().flops()
        ways, width = sum(max(1, len(self.ways(site))) for site in self.layout.sites), self.layout.width
        return self.method.flops() + 3 * width * ways + width * len(self.layout.sublayers)


def _blended(kv: Callable[..., Any], gate: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Any]:
    """Keys and values between the attention's own and those that the method makes of them."""
    changed_k, changed_v, aux = kv(q, k, v)
    return _lerp(k, changed_k, gate), _lerp(v, changed_v, gate), aux


def _lerp(plain: Tensor, way: Tensor, gate: Tensor) -> Tensor:
    """`plain` at gate 0 and `way` at gate 1, exactly; in float32 at least."""
    wide = widen(plain)
    return torch.lerp(wide, way.to(wide.dtype), gate.to(wide.dtype)).to(plain.dtype)
