"""What a model remembers of earlier tokens: rings, by the name of what mixes tokens.

    3.self_attn                   keys and values of block 3
    3.self_attn.before, .inside   a mixer's operators in it; before1 and before2 where k and v are read separately
    3.mixer                       a mixer at a site of its own
    stream.0                      of a residual stream that mixes tokens

A `Past` is a value, so that an old one stays valid; a pass replaces rings in a `Memory` and ends as the next `Past`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from twoaxis.depth.stream import State, Stream
from twoaxis.ring import Ring
from twoaxis.sequence.mixer import LocalOperator


class Past(NamedTuple):
    """What is remembered after some tokens."""

    seen: int = 0
    """Tokens so far, padding included."""
    rings: Mapping[str, Ring] = {}
    """By name; those that have seen nothing yet are missing."""
    spare: int = 0
    """Positions that rings keep beyond their window, so that as many tokens can be taken back."""

    @property
    def stream(self) -> tuple[Ring, ...]:
        """The rings of the residual stream."""
        return tuple(ring for name, ring in self.rings.items() if name.startswith("stream."))

    def map(self, change: Callable[[Ring], Ring]) -> Past:
        """`change` on every ring."""
        return self._replace(rings={name: change(ring) for name, ring in self.rings.items()})

    def trim(self, count: int) -> Past:
        """Take back the last `count` tokens; needs as many spare positions where a window has moved on."""
        return self.map(lambda ring: ring.trim(count))._replace(seen=self.seen - count)

    def reorder(self, index: Tensor) -> Past:
        """Rows of the batch in another order, or a selection of them."""
        return self.map(lambda ring: ring.reorder(index))

    def repeat(self, times: int) -> Past:
        """Each row of the batch `times` times."""
        return self.map(lambda ring: ring.repeat(times))

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(ring.nbytes() for ring in self.rings.values())

    def nbytes_by_part(self) -> dict[str, int]:
        """Bytes of what grows with the sequence, of local windows and convolutions, and of the residual stream."""
        found = {"attention": 0, "local": 0, "stream": 0}
        for name, ring in self.rings.items():
            part = "stream" if name.startswith("stream.") else "attention" if ring.window is None else "local"
            found[part] += ring.nbytes()
        return found


class Memory:
    """The rings of one pass after `past`; no tuple or dictionary, which sharding and recomputation would copy."""

    def __init__(self, past: Past) -> None:
        self.past, self.rings = past, dict(past.rings)

    def ring(self, name: str, window: int | None) -> Ring:
        """The ring of a name, empty before its first token."""
        return self.rings.get(name) or Ring(window, axis=1, spare=self.past.spare)

    def after(self, tokens: int) -> Past:
        """What is remembered when the pass over so many tokens is over."""
        return self.past._replace(seen=self.past.seen + tokens, rings=self.rings)


def mix(operator: LocalOperator, x: Tensor, name: str, memory: Memory | None, reach: Tensor | None) -> Tensor:
    """`x` through a mixer's operator, which remembers under a name unless there is no memory."""
    if memory is None:
        return operator(x, reach=reach)
    past = memory.rings.get(name) or operator.start(memory.past.spare)
    y, memory.rings[name] = operator.step(x, past, reach=reach)
    return y


def open_stream(stream: Stream, x: Tensor, memory: Memory | None, reach: Tensor | None) -> State:
    """The state before the first site, going on from what the stream remembers."""
    if memory is None:
        return stream.open(x, reach=reach)
    past = tuple(memory.ring(f"stream.{i}", taps) for i, taps in enumerate(stream.memory_windows()))
    return stream.open(x, past, reach=reach, keep=True)


def close_stream(stream: Stream, state: State, memory: Memory | None) -> None:
    """Note what the stream remembers after the last site."""
    if memory is not None:
        memory.rings |= {f"stream.{i}": ring for i, ring in enumerate(stream.memory(state))}
