"""A residual stream inside someone else's decoder layers: their additions become the stream's writes.

    their layer, untouched                     what happens

    residual = x                               x is a `Residual`: the stream's state on its way through the layer
    h = self.input_layernorm(x)                a child that is called with it gets the read; c is a norm's output
    h, _ = self.self_attn(h, ...)              theirs: masks, positions, cache, kernel
    x = residual + h * self.multiplier         `Residual + tensor` is the write, `Residual * factor` rescales the stream
    return x                                   a `Residual` again: the model's own loop hands it to the next layer

Layer 0 opens the stream and the last one closes it, so embedding, masks, final norm, head and loss see tensors alone.
Where norms stand, whether a factor scales the increment, whether there are two, three or four sub-layers is read off
the layer's own forward by one dry run (`twoaxis.model.graft_survey`); there is no table of families.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from transformers.utils.output_capturing import CompileableContextVar

from twoaxis.depth.stream import Seen, State, Stream
from twoaxis.model.memory import Memory, close_stream, mix, open_stream
from twoaxis.sequence.mixer import LocalOperator

if TYPE_CHECKING:
    from twoaxis.model.graft_layers import GraftedChild

CURRENT = CompileableContextVar("twoaxis_pass")
"""The pass that runs: the model sets it around its backbone's forward, and layer 0 opens the stream of it."""

ADDS = ("add", "__add__", "__radd__", "__iadd__", "add_")
SCALES = ("mul", "__mul__", "__rmul__", "__imul__", "mul_", "multiply")


class Refused(ValueError):
    """This layer cannot carry a stream; the message names the layer and the reason."""


class Carried:
    """What stands in the place of a tensor; layers ask it for these by name, and for no more: a catch-all
    `__getattr__` sends torch.compile into recursion."""

    run: Any
    x: Any
    """The tensor that the layer's own code sees."""

    @property
    def shape(self) -> torch.Size:
        """Of `x`."""
        return self.x.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of `x`."""
        return self.x.dtype

    @property
    def device(self) -> torch.device:
        """Of `x`."""
        return self.x.device


@dataclass(eq=False)  # FSDP2 looks for tensors inside tuples, lists, dictionaries and dataclasses, nowhere else
class Residual(Carried):
    """The stream between two additions of someone else's layer.

    Attributes:
        run: the `Pass` or the survey that it belongs to.
        state: what the run carries: the stream's state.
        part: what a parallel layer has added so far, where it adds attention and MLP one after the other.
        shaped: the shape that the layer sees, where it flattens batch and time.
    """

    run: Any
    state: Any
    part: Tensor | None = None
    shaped: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        self.c: Seen | None = None
        """The normalised read, noted when a norm was entered."""
        self._seen: Seen | None = None

    @property
    def seen(self) -> Seen:
        """The read of the next site, made where it is first asked for: inside the layer that activation checkpointing
        runs again, not at its boundary."""
        seen: Seen = self.run.read(self.state) if self._seen is None else self._seen
        self._seen = seen
        return seen

    @property
    def x(self) -> Tensor:
        """What the layer's own code sees."""
        return self.seen.x if self.shaped is None else self.seen.x.view(self.shaped)

    def like(self, state: Any, part: Tensor | None = None) -> Residual:
        """Another state in the same shape."""
        return Residual(self.run, state, part, self.shaped)

    def __add__(self, y: Any) -> Residual:
        return self.run.join(self, y)

    __radd__ = __iadd__ = __add__  # GPT-J and Falcon add the residual last; x + y = y + x to the last bit

    def __mul__(self, factor: Any) -> Residual:
        return self.run.scale(self, factor)

    __rmul__ = __imul__ = __mul__

    def reshape(self, *shape: Any) -> Any:
        """The same stream seen in another shape (OPT flattens batch and time); a tensor where the width changes."""
        made = self.x.reshape(*shape)
        if made.shape[-1] != self.x.shape[-1]:
            return made
        seen = Residual(self.run, self.state, self.part, tuple(made.shape))
        seen._seen, seen.c = self.seen, self.c
        return seen

    view = reshape

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """On another device: the state there. In another dtype: a plain tensor, refused where the layer returns it."""
        moved = self.x.to(*args, **kwargs)
        if moved.dtype != self.x.dtype:
            return moved
        if moved.device == self.x.device:
            return self
        return self.like(pytree.tree_map_only(Tensor, lambda t: t.to(moved.device), self.state))

    def contiguous(self) -> Residual:
        """Itself: every read is."""
        return self

    def clone(self) -> Any:
        """Refused: whoever copies it changes the copy in place, as for features of images between two layers."""
        raise Refused("the residual is copied to be changed in place, and no addition that a stream could carry")

    def size(self, dim: int | None = None) -> Any:
        """Of the read."""
        return self.x.shape if dim is None else self.x.shape[dim]

    def dim(self) -> int:
        """Of the read."""
        return self.x.dim()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ADDS or name in SCALES:
            one, other = args[:2]
            residual, y = (one, other) if isinstance(one, Residual) else (other, one)
            if name in SCALES:
                return residual.run.scale(residual, y)
            return residual.run.join(residual, y)  # not `+`: dynamo sends every + here
        args, kwargs = pytree.tree_map_only(
            Residual, lambda r: r.x, (args, kwargs or {}), is_leaf=lambda v: isinstance(v, Residual)
        )
        return func(*args, **kwargs)


# what derives from the state (the read) is not handed over: it is made again from the tensors that come back
pytree.register_pytree_node(
    Residual,
    lambda r: ([r.state, r.part], (r.run, r.shaped)),
    lambda children, rest: Residual(rest[0], *children, rest[1]),  # pyright: ignore[reportCallIssue]
)


class Normed(Carried):
    """A norm's output on its way to a sub-layer that needs more than a tensor: separate ways, or a mixer inside."""

    def __init__(self, run: Pass, residual: Residual) -> None:
        self.run, self.residual = run, residual

    @property
    def c(self) -> Seen:
        """The normalised read."""
        assert self.residual.c is not None
        return self.residual.c

    @property
    def x(self) -> Tensor:
        """The residual way."""
        return self.c.x


class Pass:
    """One forward pass of a grafted model; no dataclass, so that FSDP2 leaves it as it is.

    Args:
        stream: whose pass it is.
        addends: by site, how many additions of the layer make up one write.
        ways: by site, what the stream's read has.
        memory: of what mixes tokens; None remembers nothing.
        reach: (B, T) how many earlier positions belong to the token's document; None is all of them.
        weights: filled with what each site reads from which source, by index; None does not ask.
    """

    def __init__(
        self,
        stream: Stream,
        addends: Sequence[int],
        ways: Sequence[tuple[str, ...]],
        memory: Memory | None = None,
        reach: Tensor | None = None,
        weights: dict[int, Tensor | None] | None = None,
    ) -> None:
        self.stream, self.addends, self.ways = stream, addends, ways
        self.memory, self.reach, self.weights = memory, reach, weights

    def open(self, x: Tensor) -> Residual:
        """Layer 0 is called with the embedding."""
        return Residual(self, open_stream(self.stream, x, self.memory, self.reach))

    def read(self, state: State) -> Seen:
        """What the next site sees."""
        site = self.stream.layout.sites[state.index]
        if self.weights is not None:
            self.weights[state.index] = self.stream.weights(state, site)
        return self.stream.read(state, site)

    def join(self, residual: Residual, y: Any) -> Residual:
        """An addition to the residual: the write, or a part of it."""
        index, shape = residual.state.index, residual.seen.x.shape
        if index >= len(self.addends):
            raise Refused("an addition too many: the layer adds to its residual more often than in the survey")
        if residual.shaped is not None:
            y = y.view(shape)
        left = self.addends[index] - (1 if residual.part is None else 2)
        y = y if residual.part is None else residual.part + y
        if left > 0:
            waiting = residual.like(residual.state, y)
            waiting._seen, waiting.c = residual.seen, residual.c
            return waiting
        c = residual.seen._replace(aux=None) if residual.c is None else residual.c
        if residual.shaped is not None:
            c = c._replace(x=c.x.view(shape))
        return residual.like(self.stream.write(residual.state, self.stream.layout.sites[index], y, residual.seen, c))

    def scale(self, residual: Residual, factor: Any) -> Residual:
        """The layer multiplies its residual: the stream as a whole is rescaled, and read anew where that is needed."""
        scaled = residual.like(self.stream.rescale(residual.state, factor), residual.part)
        scaled.c = residual.c
        return scaled

    def close(self, residual: Residual) -> Tensor:
        """The last layer returned."""
        if residual.state.index != self.stream.layout.out.index:
            raise Refused(f"the layers ended at site {residual.state.index} of {self.stream.layout.out.index}")
        close_stream(self.stream, residual.state, self.memory)
        return residual.x

    def enter_layer(self, layer: nn.Module, residual: Residual) -> Residual:
        """A layer's own code is about to run: a mixer at a site of its own comes first."""
        site: Any = layer._modules.get("twoaxis_mixer")
        if site is None:
            return residual
        residual.c = Seen(site.norm(residual.x))
        return self.join(residual, self.mix(f"{site.name}.mixer", site.local, residual.c.x))

    def enter(self, child: GraftedChild, call: Callable[..., Any], given: Any, args: Any, kwargs: Any) -> Any:
        """A direct child of a layer is called with the stream or with a norm's output: hand it tensors."""
        if isinstance(given, Normed):
            return child.branch(self, given.c, given, args, kwargs)
        if child.joint.kind != "norm":
            return child.branch(self, given.seen._replace(aux=None), given, args, kwargs)
        ways = self.ways[given.state.index]
        if ways == ("x",):
            args, kwargs = child.put(given, given.x, args, kwargs)
            # a parallel layer may have a second norm, after the attention left something for the write
            left = None if given.c is None else given.c.aux
            given.c = Seen(call(*args, **kwargs), aux=left, kv=given.seen.kv)
        else:  # their norm for the first way; copies of it, learned separately, for the others
            found = {}
            for i, way in enumerate(ways):
                tensor = getattr(given.seen, way)
                a, k = child.put(given, given.x if tensor is None else tensor, args, kwargs)
                found[way] = (getattr(child, f"twoaxis_norm_{way}") if i else call)(*a, **k)
            given.c = given.seen._replace(aux=None, **found)
        return Normed(self, given) if child.joint.wraps else given.c.x

    def mix(self, name: str, operator: LocalOperator, x: Tensor) -> Tensor:
        """`x` through a mixer's operator, whose memory is called `name`."""
        return mix(operator, x, name, self.memory, self.reach)


class Bare(Pass):
    """A pass without the mixers: what the layers themselves do, for the proof of a model that has some already."""

    def enter_layer(self, layer: nn.Module, residual: Residual) -> Residual:
        """As it comes."""
        return residual

    def mix(self, name: str, operator: LocalOperator, x: Tensor) -> Tensor:
        """As it comes."""
        return x
