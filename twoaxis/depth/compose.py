"""Run anyone's sub-layers through any stream.

    run = compose(stream, [("attention", norm_1, attn_1), ("mlp", norm_2, mlp_1), ...])
    y = run(x, mask=mask)

A sub-layer is a kind, a norm and a function, and may have keywords of its own as a fourth entry. The function gets the
normalised read and returns the increment without its residual. At sites where the stream gives separate ways
(`stream.ways(site)`, for instance q, k, v) it gets them as separate arguments, and the norm may be a tuple with one
entry per way. A keyword argument of a call reaches every function that takes it: a mask the attention alone.

What `compose` returns is a module that owns what it is given. A model keeps its sub-layers in one place: either it
gives them to `compose` in its `__init__` and nowhere else, or it keeps them itself and composes in its `forward`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from twoaxis.depth.site import Site
from twoaxis.depth.stream import Applied, Seen, Stream
from twoaxis.depth.walk import apply_sublayer, visit

Norm = Callable[[Tensor], Tensor] | Sequence[Callable[[Tensor], Tensor]] | None
Sublayer = tuple[str, Norm, Callable[..., Tensor]] | tuple[str, Norm, Callable[..., Tensor], dict[str, Any]]


class Composed(nn.Module):
    """Sub-layers joined by a stream; made by `compose`. It owns the stream and every module it is given, each once."""

    def __init__(self, stream: Stream, sublayers: Sequence[Sublayer]) -> None:
        super().__init__()
        if not isinstance(stream, Stream):
            raise ValueError(f"compose needs a stream (see twoaxis.stream), got {stream!r}")
        for i, sublayer in enumerate(sublayers):
            if not isinstance(sublayer, tuple | list) or len(sublayer) not in (3, 4) or not callable(sublayer[2]):
                raise ValueError(f"sub-layer {i} must be (kind, norm, function[, keywords]), got {sublayer!r}")
            for part in sublayer[1:3]:
                if inspect.isclass(part) and issubclass(part, nn.Module):
                    raise ValueError(f"sub-layer {i} has the class {part.__name__}: give one, {part.__name__}(...)")
        _check_kinds([sublayer[0] for sublayer in sublayers], [site.kind for site in stream.sites])
        self.stream = stream
        self._ways = [stream.ways(site) for site in stream.sites]
        self._norms = [_per_way(stream, site, made[1]) for site, made in zip(stream.sites, sublayers, strict=True)]
        self._functions = [made[2] for made in sublayers]
        self._bound = [dict(made[3]) if len(made) == 4 else {} for made in sublayers]
        self._takes = [
            _check_call(stream, site, fn, bound)
            for site, fn, bound in zip(stream.sites, self._functions, self._bound, strict=True)
        ]
        norms = [m for of_site in self._norms for m in of_site if isinstance(m, nn.Module)]
        owners = [owner for fn in self._functions if (owner := _owner(fn)) is not None]
        inside = {id(m) for top in (*norms, *owners) for m in top.modules() if m is not top}
        self.norms = nn.ModuleList(m for m in dict.fromkeys(norms) if id(m) not in inside)
        self.functions = nn.ModuleList(m for m in dict.fromkeys(owners) if id(m) not in inside)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """The stream from the embedding to what the final norm gets."""
        return self.run(x, **kwargs)[0]

    def run(
        self, x: Tensor, past: tuple[Any, ...] = (), *, reach: Tensor | None = None, keep: bool = False, **kwargs: Any
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Like `forward`, with the stream's memory of earlier tokens going in and, if `keep`, coming out."""
        for name in kwargs:
            if not any(takes.keyword(name) for takes in self._takes):
                raise ValueError(f"no sub-layer takes the keyword {name!r}")
        stream = self.stream
        state = stream.open(x, past, reach=reach, keep=keep)
        state = visit(stream, state, stream.sites, functools.partial(self.sublayer, **kwargs))
        return stream.close(state), stream.memory(state) if keep else ()

    def sublayer(self, site: Site, seen: Seen, **kwargs: Any) -> Applied:
        """The norm and the sub-layer of `site` on what it reads."""
        ways, takes, number = self._ways[site.index], self._takes[site.index], site.index
        given = {name: value for name, value in kwargs.items() if takes.keyword(name)} | self._bound[number]
        if seen.kv is not None and "kv" not in takes.names:
            raise ValueError(
                f"{self.stream.name} changes keys and values in the {site.kind} of block {site.block}: its function "
                "must take the keyword kv and attend to k, v = kv(q, k, v) in place of its own"
            )

        def function(c: Seen) -> Tensor:
            more = given if c.kv is None else given | {"kv": c.kv}
            return self._functions[number](*(getattr(c, way) for way in ways), **more)

        return apply_sublayer(normalise(seen, ways, self._norms[number]), function)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module; refused where a function brings weights that are not among them."""
        self._check_owned(self)
        return super().named_parameters(*args, **kwargs)

    def _check_owned(self, *models: nn.Module) -> None:
        """Refuse functions that use weights which the models do not have."""
        modules = [module for model in models for module in model.modules()]
        owned = {id(p) for module in modules for p in module._parameters.values() if p is not None}
        for site, fn in zip(self.stream.sites, self._functions, strict=True):
            for module in _hidden(fn):
                if any(id(p) not in owned for p in module.parameters()):
                    raise ValueError(
                        f"the weights of {type(module).__name__}, which the function of the {site.kind} of block "
                        f"{site.block} uses, belong to no module of the model: give compose the module itself, "
                        "with its keywords as a fourth entry, or make it part of the model before"
                    )


def compose(stream: Stream, sublayers: Sequence[Sublayer]) -> Composed:
    """A module that runs `sublayers` joined by `stream`, and owns both.

        run = twoaxis.compose(stream, [("attention", norm_1, attn_1), ("mlp", norm_2, mlp_1), ...])
        y = run(x, mask=mask)  # a keyword reaches every function that takes it

    Args:
        stream: built for as many sub-layers of the same kinds.
        sublayers: (kind, norm, function) or (kind, norm, function, keywords) in order. The function gets the normalised
            read, or one for each of `stream.ways(site)`, and returns the increment without its residual. A norm of
            None passes the read on as it is, which is also what a stream asks for that normalises its reads itself.
    """
    _watch_registration()
    return Composed(stream, sublayers)


def normalise(seen: Seen, ways: Sequence[str], norms: Sequence[Callable[[Tensor], Tensor]]) -> Seen:
    """`seen` with the named ways normalised; a way the method does not give separately is the residual way."""
    entries = {}
    for way, norm in zip(ways, norms, strict=True):
        tensor = getattr(seen, way)
        entries[way] = norm(seen.x if tensor is None else tensor)
    return seen._replace(**entries, aux=None)


class _Takes(NamedTuple):
    """What a function can be called with."""

    # how many ways by position, one after the other; None is any number, or unknown. An argument with a default is one
    # only if it is called like the way: an ordinary attention's mask is no way k
    ways: int | None
    names: frozenset[str]  # keywords it names
    any_name: bool  # whether it takes every keyword

    def keyword(self, name: str) -> bool:
        """Whether it takes a keyword."""
        return self.any_name or name in self.names


def _takes(fn: Any, ways: Sequence[str], skip: int = 0) -> _Takes:
    """What a function takes beside its ways, its first `skip` arguments aside."""
    if isinstance(fn, functools.partial):
        return _takes(fn.func, ways, skip + len(fn.args))
    fn = fn.forward if isinstance(fn, nn.Module) else fn
    fn = fn if inspect.isroutine(fn) else fn.__call__
    if inspect.ismethod(fn):
        fn, skip = fn.__func__, skip + 1
    fn = inspect.unwrap(fn)
    if (code := getattr(fn, "__code__", None)) is None:  # a built-in function does not say
        return _Takes(None, frozenset(), False)
    count, required = code.co_argcount, code.co_argcount - len(fn.__defaults__ or ())
    fitting = (
        at < required or name.startswith(way)
        for way, (at, name) in zip(ways, list(enumerate(code.co_varnames[:count]))[skip:], strict=False)
    )
    named = code.co_varnames[
        max(code.co_posonlyargcount, min(skip + len(ways), count)) : count + code.co_kwonlyargcount
    ]
    any_number, any_name = (bool(code.co_flags & flag) for flag in (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS))
    return _Takes(None if any_number else sum(fitting), frozenset(named), any_name)


def _check_call(stream: Stream, site: Site, fn: Any, bound: dict[str, Any]) -> _Takes:
    """What the function of a site takes; refused where it cannot be called as the stream asks."""
    ways = stream.ways(site)
    what = f"the function of the {site.kind} of block {site.block}"
    takes = _takes(fn, ways)
    if takes.ways is not None and takes.ways < len(ways) and ways != ("x",):
        raise ValueError(
            f"{stream.name} gives {', '.join(ways)} separately to the {site.kind} of block {site.block}, and its "
            f"function takes {takes.ways} of them: write it for {len(ways)} arguments, one projection of each, or "
            "choose options of the stream, or a stream, without separate ways"
        )
    for name in bound:
        if not takes.keyword(name):
            raise ValueError(f"{what} does not take the keyword {name!r} that is bound to it")
    return takes


def _check_kinds(kinds: list[str], expected: list[str]) -> None:
    if kinds != expected:
        at = next((i for i, (a, b) in enumerate(zip(kinds, expected, strict=False)) if a != b), None)
        where = f"at {at} it is {kinds[at]!r} instead of {expected[at]!r}" if at is not None else "too few or too many"
        raise ValueError(
            f"the stream was built for {len(expected)} sub-layers, got {len(kinds)}: {where}; "
            "build it with blocks= and kinds= that match"
        )


def _per_way(stream: Stream, site: Site, norm: Norm) -> list[Callable[[Tensor], Tensor]]:
    ways = stream.ways(site)
    if norm is None:
        return [_same] * len(ways)
    if not stream.normed(site):
        raise ValueError(
            f"{stream.name} normalises what the {site.kind} of block {site.block} reads itself: give None as its norm"
        )
    if callable(norm):
        return [norm] * len(ways)
    if len(norm) != len(ways):
        raise ValueError(f"{len(norm)} norms for the {len(ways)} ways {', '.join(ways)}")
    return list(norm)


def _same(x: Tensor) -> Tensor:
    return x


def _owner(fn: Any) -> nn.Module | None:
    """The module whose weights a function uses, where it is one or a method of one."""
    if isinstance(fn, functools.partial):
        return _owner(fn.func)
    fn = getattr(fn, "__self__", fn)
    return fn if isinstance(fn, nn.Module) else None


def _hidden(fn: Any) -> list[nn.Module]:
    """Modules that a function has got hold of otherwise: around it, as defaults, as arguments of a partial one."""
    if isinstance(fn, functools.partial):
        return [*_modules([*fn.args, *fn.keywords.values()]), *_hidden(fn.func)]
    if isinstance(fn, nn.Module) or not inspect.isfunction(fn):
        return []
    cells = [cell.cell_contents for cell in fn.__closure__ or () if cell is not None]
    return _modules([*cells, *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()])


def _modules(values: Sequence[Any]) -> list[nn.Module]:
    return [owner for value in values if (owner := _owner(value)) is not None]


@functools.cache
def _watch_registration() -> None:
    """From now on, refuse a model that keeps a composed module beside the modules in it."""
    register_module_module_registration_hook(_on_registration)


def _on_registration(model: nn.Module, name: str, module: nn.Module | None) -> None:
    """Torch calls it whenever a module becomes part of another."""
    if isinstance(module, Composed):
        composed, others = module, [child for key, child in model._modules.items() if key != name and child is not None]
    else:
        composed = next((child for child in model._modules.values() if isinstance(child, Composed)), None)
        others = [] if module is None else [module]
    if composed is None:
        return
    owned = set(composed.modules())
    twice = [other for child in others for other in child.modules() if other in owned]
    if model in owned or any(True for other in twice for _ in other.parameters()):
        raise ValueError(
            f"{type(model).__name__} would hold the same weights twice, in what compose returned and beside it: give "
            "the modules to compose alone, or keep them in the model and call compose in its forward"
        )
    if composed is module:
        composed._check_owned(model, composed)
