"""Someone else's layers with a stream in their residual: the classes that are mixed into theirs.

An object keeps its identity, its children and the name of its class; only how it is called changes, by what travels
through it (`twoaxis.model.graft_residual`). Without a pass announced everything works as before.

Keys and values that a stream changes are exchanged before they are attended to and cached:

    their attention, on a shallow copy of itself          what happens

    q, k, v                                               theirs: projections, head norms, positions
    k, v = past_key_values.update(k, v, layer)            a shallow copy of the cache hands them back and waits
    interface(self, q, k, v, mask, ...)                   `attend`: the stream changes k and v, the cache takes them,
                                                          the function that the model has chosen runs on all of them

All families that dispatch their attention through transformers' interface take part, fused projections or not: what
the interface gets is what the attention compares. One that spells its attention out is refused by name.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from twoaxis.depth.stream import Seen
from twoaxis.model.graft_residual import CURRENT, Carried, Pass, Refused, Residual
from twoaxis.sequence.mixer import LocalOperator

LAYER_LISTS = ("layers", "h", "blocks", "block", "layer", "decoder")
COUNTS = ("num_hidden_layers", "decoder_layers", "num_decoder_layers", "num_layers", "n_layer")


@dataclass(eq=False)
class Joint:
    """What a grafted layer or child knows of itself.

    Attributes:
        where: for messages and for the names of rings.
        argument: of a layer: what its forward calls the residual.
        last: of a layer: whether it closes the stream.
        kind: of a child: norm, attention, mlp or other.
        keeps: of a child: position and name of an argument that stays a `Residual` (Bloom adds it inside).
        wraps: of a norm: whether its output goes on as `Normed`.
        projections: of a sub-layer: its first linear layers, where a mixer or separate ways act on them.
    """

    where: str
    argument: str = ""
    first: bool = False
    last: bool = False
    kind: str = "other"
    keeps: tuple[int | str, ...] = ()
    wraps: bool = False
    projections: tuple[str, ...] = ()


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
            args, kwargs = self._with(hidden, args, kwargs)
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
            args, kwargs = self._with(hidden, args, kwargs)
        return super().forward(*args, **kwargs)

    def _with(self, hidden: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, self.joint.argument: hidden})


REENTRANT = "use_reentrant=True would lose the gradients of the stream silently; leave it out or set it to False"


def _is_reentrant(layer: nn.Module) -> bool:
    """Whether activation checkpointing of the kind that sees tensors only is on."""
    if not (layer.training and getattr(layer, "gradient_checkpointing", False)):
        return False
    return bool(getattr(getattr(layer, "_gradient_checkpointing_func", None), "keywords", {}).get("use_reentrant"))


class MixerSite(nn.Module):
    """A mixer at a site of its own, in front of the layer's sub-layers: operator, and pre-norm unless `eps` is None."""

    def __init__(self, name: str, local: LocalOperator, width: int, eps: float | None) -> None:
        super().__init__()
        self.name = name
        self.norm = nn.Identity() if eps is None else nn.RMSNorm(width, eps=eps)
        self.local = local


class GraftedChild(nn.Module):
    """Mixed into the class of every direct child of a decoder layer: its own forward gets tensors."""

    joint: Joint

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Their call with tensors in the place of the stream."""
        given = None
        for place, value in (*enumerate(args), *kwargs.items()):
            if isinstance(value, Carried) and place not in self.joint.keeps:
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
        put = [value if v is given and i not in keeps else v for i, v in enumerate(args)]
        return tuple(put), {k: value if v is given and k not in keeps else v for k, v in kwargs.items()}

    def branch(self, run: Pass, c: Seen, given: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Their sub-layer on the ways `c`, with the mixer's operators before it and on its first projections.

        Where something has to act inside, a shallow copy runs: projections return what was projected here, and keys
        and values that the stream changes are exchanged where it attends to them; head norms, positions, cache and
        kernel are theirs. The copy is made in every call, so that it has whatever modules (LoRA) stand in the original
        now.
        """
        before: Any = self._modules.get("twoaxis_before")
        inside: Any = self._modules.get("twoaxis_inside")
        where, names = self.joint.where, self.joint.projections
        attends = self.joint.kind == "attention"
        separate, exchanges = attends and c.k is not None, attends and c.kv is not None
        x = given.x if isinstance(given, Residual) else c.x  # in the shape that the layer sees
        ways = [x if way is None else way for way in (c.q, c.k, c.v)] if separate else [x]
        if before is not None:
            ways = [run.mix(f"{where}.before{i or ''}", before, way) for i, way in enumerate(ways)]
        args, kwargs = self.put(given, ways[0], args, kwargs)
        if not separate and inside is None and not exchanges:
            return super().__call__(*args, **kwargs)
        if "forward" in self.__dict__:  # bound to the original, whose projections are not the given ones
            raise Refused(f"{type(self).__name__} has a hook of a device map, so nothing can act inside of it")
        known: dict[str, Given] = {}
        if separate or inside is not None:
            ways = ways if separate else ways * len(names)
            made = [getattr(self, name)(way) for name, way in zip(names, ways, strict=True)]
            if inside is not None:
                joined = run.mix(f"{where}.inside", inside, torch.cat(made, dim=-1) if len(made) > 1 else made[0])
                # parts of one tensor are strided, and a strided activation may round its tail differently
                made = [part.contiguous() for part in joined.split([m.shape[-1] for m in made], dim=-1)]
            known = {name: Given(value) for name, value in zip(names, made, strict=True)}
        twin = object.__new__(type(self))
        twin.__dict__.update({**self.__dict__, "_modules": {**self._modules, **known}})
        if not exchanges:
            return nn.Module.__call__(twin, *args, **kwargs)
        residual = given if isinstance(given, Residual) else given.residual

        def change(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            assert c.kv is not None
            k, v, aux = c.kv(q, k, v)
            residual.c = c._replace(aux=aux)  # now: where a sub-layer adds its residual itself, the write comes next
            return k, v

        exchange = Exchange(change, self, original_class(self).__module__)
        exchange.into(twin)
        args = tuple(exchange.held(value) for value in args)
        kwargs = {name: exchange.held(value) for name, value in kwargs.items()}
        out = nn.Module.__call__(twin, *args, **kwargs)
        if exchange.asked != 1:
            raise Refused(
                f"{type(self).__name__} of layer {where.partition('.')[0]} calls transformers' attention function "
                f"{exchange.asked} times, not once, so its keys and values cannot be changed; leave that block out"
            )
        return out


EXCHANGE = "twoaxis_exchange"
"""What `attend` is called in transformers' table, and where a copied attention has its `Exchange`."""


class Exchange:
    """One call of an attention whose keys and values a stream changes."""

    def __init__(self, kv: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]], attention: Any, module: str):
        self.kv, self.attention, self.module, self.asked = kv, attention, module, 0
        self.update: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    def into(self, twin: nn.Module) -> None:
        """Let `twin`, a shallow copy of the attention, call `attend`."""
        config = getattr(self.attention, "config", None)
        if config is not None:  # without one it dispatches nothing, which is noticed by `asked`
            other = object.__new__(type(config))
            other.__dict__.update(config.__dict__)
            other.__dict__["_attn_implementation_internal"] = EXCHANGE
            twin.__dict__["config"] = other
        twin.__dict__[EXCHANGE] = self

    def held(self, value: Any) -> Any:
        """A cache as one that waits; whatever else is given as it is."""
        if not isinstance(value, Cache):
            return value
        waiting = object.__new__(type(value))
        waiting.__dict__.update(value.__dict__)
        waiting.__dict__["update"] = partial(self._wait, value)
        return waiting

    def _wait(self, cache: Cache, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.update = lambda k, v: cache.update(k, v, *args, **kwargs)
        return k, v

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The model's attention function on changed keys and values, cached ones before them."""
        self.asked += 1
        changed = self.kv(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        # kernels may round differently for heads that lie apart in memory
        k, v = (t.transpose(1, 2).contiguous() for t in changed)
        if self.update is not None:
            k, v = self.update(k, v)
        spelled_out: Any = getattr(sys.modules[self.module], "eager_attention_forward", None)
        chosen = ALL_ATTENTION_FUNCTIONS.get_interface(self.attention.config._attn_implementation, spelled_out)
        return chosen(self.attention, q, k, v, *args, **kwargs)


def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The attention function of a copied attention: its exchange."""
    return module.__dict__[EXCHANGE](q, k, v, *args, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(EXCHANGE, attend)


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
    cast(Any, module).joint = joint


def original_class(module: nn.Module) -> type:
    """The class that a grafted module came with, also where sharding has given it another one since."""
    cls, made = type(module), set(_CLASSES.values())
    while grafted := next((c for c in cls.__mro__ if c in made), None):
        cls = grafted.__bases__[1]
    return cls


def find_layers(model: nn.Module) -> nn.ModuleList:
    """The list of decoder layers: as long as the configuration says."""
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    counts = {getattr(text, name, None) for name in COUNTS} - {None}
    # an encoder of images or sound may have a list as long, and stands outside of what transformers calls the decoder
    decoder: Any = getattr(model, "get_decoder", lambda: model)()
    for part in (decoder, model):
        lists = [(name, m) for name, m in part.named_modules() if isinstance(m, nn.ModuleList) and len(m) in counts]
        if found := [(name, m) for name, m in lists if name.split(".")[-1] in LAYER_LISTS]:
            break
    else:
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
            keeps = (arguments.index("residual"), "residual") if "residual" in arguments else ()
            become(child, GraftedChild, Joint(f"{block}.{name}", kind=kind_of(name, child), keeps=keeps))
        argument = list(inspect.signature(type(layer).forward).parameters)[1]
        where = f"{type(layer).__name__} {block}"
        become(layer, GraftedLayer, Joint(where, argument, first=block == 0, last=block == len(layers) - 1))
    return layers
