"""A residual stream inside someone else's decoder layers: their additions become the stream's writes.

    their layer, untouched                     what happens

    residual = x                               x is a `Residual`: the stream's state on its way through the layer
    h = self.input_layernorm(x)                a child that is called with it gets the read; c is a norm's output
    h, _ = self.self_attn(h, ...)              theirs: masks, positions, cache, kernel
    x = residual + h * self.multiplier         `Residual + tensor` is the write, `Residual * factor` rescales the stream
    return x                                   a `Residual` again: the model's own loop hands it to the next layer

Layer 0 opens the stream and the last one closes it, so embedding, masks, final norm, head and loss see tensors alone.
Where norms stand, whether a factor scales the increment, whether there are two, three or four sub-layers is read off
the layer's own forward by one dry run (`twoaxis.model.survey`); there is no table of families.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from transformers.utils.output_capturing import CompileableContextVar

from twoaxis.depth.stream import Seen, State, Stream
from twoaxis.ring import Ring
from twoaxis.sequence.mixer import LocalOperator

CURRENT = CompileableContextVar("twoaxis_pass")
"""The pass that runs: the model sets it around its backbone's forward, and layer 0 opens the stream of it."""

ADDS = ("add", "__add__", "__radd__", "__iadd__", "add_")
SCALES = ("mul", "__mul__", "__rmul__", "__imul__", "mul_", "multiply")
LAYER_LISTS = ("layers", "h", "blocks", "block", "layer", "decoder")
COUNTS = ("num_hidden_layers", "decoder_layers", "num_decoder_layers", "num_layers", "n_layer")


class Refused(ValueError):
    """This layer cannot carry a stream; the message names the layer and the reason."""


@dataclass(eq=False)  # FSDP2 looks for tensors inside tuples, lists, dictionaries and dataclasses, nowhere else
class Residual:
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

    # What layers ask of their input, by name and no more: a catch-all `__getattr__` sends torch.compile into recursion.

    @property
    def shape(self) -> torch.Size:
        """Of the read."""
        return self.x.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the read."""
        return self.x.dtype

    @property
    def device(self) -> torch.device:
        """Of the read."""
        return self.x.device

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
        args, kwargs = pytree.tree_map_only(Residual, lambda r: r.x, (args, kwargs or {}), is_leaf=_is_residual)
        return func(*args, **kwargs)


def _is_residual(value: Any) -> bool:
    return isinstance(value, Residual)


def _residual(state: Any, part: Tensor | None, run: Any, shaped: tuple[int, ...] | None) -> Residual:
    return Residual(run, state, part, shaped)


# what derives from the state (the read) is not handed over: it is made again from the tensors that come back
pytree.register_pytree_node(
    Residual,
    lambda r: ([r.state, r.part], (r.run, r.shaped)),
    lambda children, rest: _residual(*children, *rest),
)


class Normed:
    """A norm's output on its way to a sub-layer that needs more than a tensor: separate ways, or a mixer inside."""

    def __init__(self, run: Pass, c: Seen) -> None:
        self.run, self.c = run, c

    @property
    def shape(self) -> torch.Size:
        """Of the residual way."""
        return self.c.x.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the residual way."""
        return self.c.x.dtype

    @property
    def device(self) -> torch.device:
        """Of the residual way."""
        return self.c.x.device


CARRIED = (Residual, Normed)


class Pass:
    """One forward pass of a grafted model.

    Args:
        stream: the residual stream.
        addends: by site, how many additions of the layer make up one write.
        ways: by site, what the stream's read has.
        memory: rings of what mixes tokens, by name; None remembers nothing.
        reach: (B, T) how many earlier positions belong to the token's document; None is all of them.
        spare: positions that fresh rings keep beyond their window.
        weights: filled with what each site reads from which source, by index; None does not ask.
    """

    def __init__(
        self,
        stream: Stream,
        addends: Sequence[int],
        ways: Sequence[tuple[str, ...]],
        memory: dict[str, Any] | None = None,
        reach: Tensor | None = None,
        spare: int = 0,
        weights: dict[int, Tensor | None] | None = None,
    ) -> None:
        self.stream, self.addends, self.ways = stream, addends, ways
        self.memory, self.reach, self.spare, self.weights = memory, reach, spare, weights

    def open(self, x: Tensor) -> Residual:
        """Layer 0 is called with the embedding."""
        past: tuple[Any, ...] = ()
        if self.memory is not None:
            windows = self.stream.memory_windows()
            past = self.memory.get("stream") or tuple(Ring(taps, axis=1, spare=self.spare) for taps in windows)
        return Residual(self, self.stream.open(x, past, reach=self.reach, keep=self.memory is not None))

    def read(self, state: State) -> Seen:
        """What the next site sees."""
        site = self.stream.layout.sites[state.index]
        if self.weights is not None:
            self.weights[state.index] = self.stream.weights(state, site)
        seen = self.stream.read(state, site)
        if seen.kv is not None:
            raise Refused(
                f"{self.stream.name} changes keys and values inside attention, which is the family's; use a Decoder"
            )
        return seen

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
        if self.memory is not None:
            self.memory["stream"] = self.stream.memory(residual.state)
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
        if not child.joint.norm:
            return child.branch(self, given.seen._replace(aux=None), given, args, kwargs)
        ways = self.ways[given.state.index]
        if ways == ("x",):
            args, kwargs = child.put(given, given.x, args, kwargs)
            given.c = Seen(call(*args, **kwargs))
        else:  # their norm for the first way; copies of it, learned separately, for the others
            found = {}
            for i, way in enumerate(ways):
                tensor = getattr(given.seen, way)
                a, k = child.put(given, given.x if tensor is None else tensor, args, kwargs)
                found[way] = (getattr(child, f"twoaxis_norm_{way}") if i else call)(*a, **k)
            given.c = given.seen._replace(aux=None, **found)
        return Normed(self, given.c) if child.joint.wraps else given.c.x

    def mix(self, name: str, operator: LocalOperator, x: Tensor) -> Tensor:
        """`x` through a mixer's operator, whose memory is called `name`."""
        if self.memory is None:
            return operator(x, reach=self.reach)
        y, self.memory[name] = operator.step(x, self.memory.get(name) or operator.start(self.spare), reach=self.reach)
        return y


class Bare(Pass):
    """A pass without the mixers: what the layers themselves do, for the proof of a model that has some already."""

    def enter_layer(self, layer: nn.Module, residual: Residual) -> Residual:
        """As it comes."""
        return residual

    def mix(self, name: str, operator: LocalOperator, x: Tensor) -> Tensor:
        """As it comes."""
        return x


# The two classes that are mixed in. An object keeps its identity, its children and the name of its class.


class Joint(NamedTuple):
    """What a grafted layer or child knows of itself.

    Attributes:
        where: for messages and for the names of rings.
        argument: of a layer: what its forward calls the residual.
        last: of a layer: whether it closes the stream.
        kind: of a child: norm, attention, mlp or other.
        keeps: of a child: position of an argument called residual, which stays a `Residual` (Bloom adds it inside).
        wraps: of a norm: whether its output goes on as `Normed`.
        projections: of a sub-layer: its first linear layers, where a mixer or separate ways act on them.
    """

    where: str
    argument: str = ""
    first: bool = False
    last: bool = False
    kind: str = "other"
    keeps: int | None = None
    wraps: bool = False
    projections: tuple[str, ...] = ()

    @property
    def norm(self) -> bool:
        """Whether it is a norm."""
        return self.kind == "norm"


class GraftedLayer(nn.Module):
    """Mixed into the class of a decoder layer."""

    joint: Joint

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Their call with the stream in the place of the residual; layer 0 opens it, the last one closes it."""
        # outside of the region that activation checkpointing runs again: nothing here may depend on it
        joint = self.joint
        hidden = args[0] if args else kwargs[joint.argument]
        if joint.first:
            run = CURRENT.get()
            if run is None:  # no pass was announced: the model as it came
                return super().__call__(*args, **kwargs)
            hidden = run.open(hidden)
            args, kwargs = ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, joint.argument: hidden})
        elif not isinstance(hidden, Residual):
            if CURRENT.get() is None:
                return super().__call__(*args, **kwargs)
            raise Refused(f"{joint.where} got a tensor: the model's own loop changes the residual between layers")
        if torch.is_grad_enabled() and _is_reentrant(self):
            raise Refused(REENTRANT)
        out = super().__call__(*args, **kwargs)
        first = out[0] if isinstance(out, tuple) else out
        if not isinstance(first, Residual):
            raise Refused(f"{joint.where} returned a {type(first).__name__}: its residual is not a plain sum")
        if not joint.last:
            return out
        closed = hidden.run.close(first)
        return (closed, *out[1:]) if isinstance(out, tuple) else closed

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Their forward, after a mixer at a site of its own."""
        # a Residual of this execution's own: it remembers its read, and the one at the boundary must stay as it is for
        # the second execution by activation checkpointing
        hidden = args[0] if args else kwargs[self.joint.argument]
        if isinstance(hidden, Residual):
            hidden = hidden.run.enter_layer(self, hidden.like(hidden.state, hidden.part))
            args, kwargs = ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, self.joint.argument: hidden})
        return super().forward(*args, **kwargs)


REENTRANT = "use_reentrant=True would lose the gradients of the stream silently; leave it out or set it to False"


def _is_reentrant(layer: nn.Module) -> bool:
    """Whether activation checkpointing of the kind that sees tensors only is on."""
    if not (layer.training and getattr(layer, "gradient_checkpointing", False)):
        return False
    return bool(getattr(getattr(layer, "_gradient_checkpointing_func", None), "keywords", {}).get("use_reentrant"))


class MixerSite(nn.Module):
    """A mixer at a site of its own, in front of the layer's sub-layers: pre-norm and operator."""

    def __init__(self, name: str, local: LocalOperator, width: int, eps: float) -> None:
        super().__init__()
        self.name = name
        self.norm = nn.RMSNorm(width, eps=eps)
        self.local = local


class GraftedChild(nn.Module):
    """Mixed into the class of every direct child of a decoder layer: its own forward gets tensors."""

    joint: Joint

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Their call with tensors in the place of the stream."""
        keeps = self.joint.keeps
        given = None
        for i, value in enumerate(args):
            if isinstance(value, CARRIED) and i != keeps:
                given = value
        for name, value in kwargs.items():
            if isinstance(value, CARRIED) and (keeps is None or name != "residual"):
                given = value
        if given is not None:
            return given.run.enter(self, super().__call__, given, args, kwargs)
        run = CURRENT.get()
        if run is None or isinstance(run, Pass):
            return super().__call__(*args, **kwargs)
        return run.enter(self, super().__call__, None, args, kwargs)

    def put(self, given: Any, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The arguments with `value` in the place of `given`; an argument called residual stays as it is."""
        keeps = self.joint.keeps
        return (
            tuple(value if v is given and i != keeps else v for i, v in enumerate(args)),
            {k: value if v is given and (keeps is None or k != "residual") else v for k, v in kwargs.items()},
        )

    def branch(self, run: Pass, c: Seen, given: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Their sub-layer on the ways `c`, with the mixer's operators before it and on its first projections.

        Where it has to act inside, a shallow copy runs whose projections return what was projected here: head norms,
        positions, cache and kernel are theirs. The copy is made in every call, so that it has whatever modules (LoRA)
        stand in the original now.
        """
        before: Any = self._modules.get("twoaxis_before")
        inside: Any = self._modules.get("twoaxis_inside")
        where, names = self.joint.where, self.joint.projections
        separate = self.joint.kind == "attention" and c.k is not None
        x = given.x if isinstance(given, Residual) else c.x  # in the shape that the layer sees
        ways = [x if way is None else way for way in (c.q, c.k, c.v)] if separate else [x]
        if before is not None:
            ways = [run.mix(f"{where}.before{i or ''}", before, way) for i, way in enumerate(ways)]
        args, kwargs = self.put(given, ways[0], args, kwargs)
        if not separate and inside is None:
            return super().__call__(*args, **kwargs)
        if "forward" in self.__dict__:  # bound to the original, whose projections are not the given ones
            raise Refused(f"{type(self).__name__} has a hook of a device map, so nothing can act on its projections")
        ways = ways if separate else ways * len(names)
        made = [getattr(self, name)(way) for name, way in zip(names, ways, strict=True)]
        if inside is not None:
            joined = run.mix(f"{where}.inside", inside, torch.cat(made, dim=-1) if len(made) > 1 else made[0])
            # parts of one tensor are strided, and a strided activation may round its tail differently
            made = [part.contiguous() for part in joined.split([m.shape[-1] for m in made], dim=-1)]
        twin = object.__new__(type(self))
        given_modules = {name: Given(value) for name, value in zip(names, made, strict=True)}
        twin.__dict__.update({**self.__dict__, "_modules": {**self._modules, **given_modules}})
        return nn.Module.__call__(twin, *args, **kwargs)


class Given:
    """In the place of a projection whose result is known."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __call__(self, _: Any) -> Tensor:
        """The result."""
        return self.value


_CLASSES: dict[tuple[type, type], type] = {}


def become(module: nn.Module, mixin: type, joint: Joint) -> None:
    """Give `module` a subclass of its class, under the same name: wrap policies and device maps go by names."""
    cls = type(module)
    if not issubclass(cls, mixin):
        if (mixin, cls) not in _CLASSES:
            _CLASSES[mixin, cls] = type(cls.__name__, (mixin, cls), {"__module__": cls.__module__})
        module.__class__ = _CLASSES[mixin, cls]
    object.__setattr__(module, "joint", joint)


def original_class(module: nn.Module) -> type:
    """The class that a grafted module came with."""
    cls = type(module)
    return next(c for c in cls.__mro__[1:] if c.__name__ == cls.__name__) if hasattr(module, "joint") else cls


def find_layers(model: nn.Module) -> nn.ModuleList:
    """The list of decoder layers: as long as the configuration says."""
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    counts = {getattr(text, name, None) for name in COUNTS} - {None}
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) in counts]
    found = [(name, m) for name, m in lists if name.split(".")[-1] in LAYER_LISTS]
    if not found:
        raise Refused(f"{type(model).__name__} has no list of as many decoder layers as its configuration says")
    return min(found, key=lambda pair: pair[0].count("."))[1]


def children_of(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a layer's forward calls itself; LongCat-Flash keeps two of each in lists."""
    for name, child in layer.named_children():
        if name.startswith("twoaxis_"):
            continue
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from ((f"{name}.{part}", module) for part, module in child.named_children())
        else:
            yield name, child


def attach(model: nn.Module, kind_of: Callable[[str, nn.Module], str]) -> nn.ModuleList:
    """Make the layers of `model` able to carry a stream. Without a pass announced they work as before."""
    layers = find_layers(model)
    if len({id(layer) for layer in layers}) != len(layers):
        raise Refused(f"{type(layers[0]).__name__}: layers share their modules")
    for block, layer in enumerate(layers):
        for name, child in children_of(layer):
            # Bloom and MPT hand the residual to the sub-layer, which adds it itself: that argument stays a Residual
            arguments = list(inspect.signature(type(child).forward).parameters)[1:]
            keeps = arguments.index("residual") if "residual" in arguments else None
            become(child, GraftedChild, Joint(f"{block}.{name}", kind=kind_of(name, child), keeps=keeps))
        argument = list(inspect.signature(type(layer).forward).parameters)[1]
        where = f"{type(layer).__name__} {block}"
        become(layer, GraftedLayer, Joint(where, argument, first=block == 0, last=block == len(layers) - 1))
    return layers
