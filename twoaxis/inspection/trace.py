"""`twoaxis.trace`: record what happens at every site while a model runs, and leave no trace on the model.

    with twoaxis.trace(model) as seen:
        model(ids)
    seen[3].weights                     (B, T, W, S): what site 3 read from which source
    seen[3].probes["gate"].value        what the method shows of itself

For the time of the `with` block the stream's `open`, `read` and `write` and the mixers' `step` are wrapped, on this one
model. Each wrapper calls the original with the arguments it got and returns what that gave, so outputs are the same to
the last bit; what is recorded is computed beside it, without gradients, and copied to the CPU. A few numbers per token
and site are kept, never a state.

    open ──► read ──► (norm, sub-layer, mixers inside it) ──► write ──► read ──► ...      read of out: the pass is over
              │                          │                      │
              └─ site                    └─ Inner               └─ Look: weights, norms, probes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from twoaxis.base.method import Quantity
from twoaxis.depth.site import OUT, Site
from twoaxis.depth.stream import Seen, State, Stream
from twoaxis.inspection.measure import cosine, effective_sources, norm
from twoaxis.model.groups import outer_streams
from twoaxis.model.sublayers import POINTS
from twoaxis.sequence.mixer import LocalOperator

Tokens = slice | Sequence[int] | None
"""Which tokens of a pass to keep: positions, or None for all."""


class Inner(NamedTuple):
    """A local operator that ran inside a sub-layer.

    Attributes:
        name: its class, and where it acts if its sub-layer hosts it.
        probes: what it shows of itself.
    """

    name: str
    probes: dict[str, Quantity]


class Look(NamedTuple):
    """One site during one pass. Tensors begin with the tokens' dimensions, (B, T) in a decoder.

    Attributes:
        site: which.
        sources: names of what `weights` speaks of.
        weights: (B, T, W, S) what it read from which source; None where the method has no such weights.
        norm: (B, T) length of the residual way it read.
        increment: (B, T) length of what its sub-layer gave; None at the out site.
        cosine: (B, T) between the two; None at the out site.
        probes: what the method shows of itself.
        inner: the mixers that ran in its sub-layer.
    """

    site: Site
    sources: tuple[str, ...]
    weights: Tensor | None
    norm: Tensor
    increment: Tensor | None
    cosine: Tensor | None
    probes: dict[str, Quantity]
    inner: tuple[Inner, ...] = ()

    @property
    def effective(self) -> Tensor | None:
        """(B, T, W) how many sources the read is spread over; see `effective_sources`."""
        return None if self.weights is None else effective_sources(self.weights)


class Trace:
    """What was recorded: `trace[i]` is site i of the newest pass, `trace.passes` has every whole pass.

    Args:
        sites: of the model, the out site last.
    """

    def __init__(self, sites: tuple[Site, ...]) -> None:
        self.sites = sites
        self.passes: list[tuple[Look, ...]] = []

    @property
    def looks(self) -> tuple[Look, ...]:
        """The newest pass, one entry per site."""
        if not self.passes:
            raise ValueError("nothing was recorded: run the model inside the `with` block")
        return self.passes[-1]

    def __getitem__(self, index: int) -> Look:
        return self.looks[index]

    def __iter__(self) -> Iterator[Look]:
        return iter(self.looks)

    def __len__(self) -> int:
        return len(self.sites)

    def __repr__(self) -> str:
        return f"Trace({len(self.passes)} passes of {len(self.sites)} sites)"


@contextmanager
def trace(model: nn.Module, *, tokens: Tokens = None) -> Iterator[Trace]:
    """Record every pass of `model` inside the `with` block; its outputs stay the same to the last bit.

        with twoaxis.trace(model) as seen:
            model(ids)
        seen[3].weights  # (B, T, W, S): what site 3 read from which source
        seen[3].probes["gate"].value  # what the method shows of itself

    Args:
        model: a `Decoder`, `TwoAxisModel`, `TwoAxisForCausalLM`, or any module with one stream inside it.
        tokens: which tokens of each pass to keep, as a slice or as positions; None is all of them.
    """
    stream = find_stream(model)
    found = Trace(stream.layout.sites)
    recorder = _Recorder(stream, found, tokens)
    with ExitStack() as undo:
        for name in ("open", "read", "write"):
            undo.enter_context(_wrapped(stream, name, getattr(recorder, name)))
        for path, module in model.named_modules():
            if isinstance(module, LocalOperator):
                undo.enter_context(_wrapped(module, "step", partial(recorder.step, module, _inner_name(path, module))))
        yield found


def find_stream(model: nn.Module) -> Stream:
    """The one stream of a model."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"trace needs a model, got {type(model).__name__}")
    if any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) for m in model.modules()):
        raise ValueError("a compiled model cannot be traced, its sites are fused; trace the model before torch.compile")
    streams = outer_streams(model)
    if len(streams) != 1:
        raise ValueError(f"trace needs a model with one residual stream, {type(model).__name__} has {len(streams)}")
    return streams[0][1]


class _Recorder:
    """Sees every call of the stream and of the mixers, in the order of a pass."""

    def __init__(self, stream: Stream, found: Trace, tokens: Tokens) -> None:
        self.stream, self.found, self.tokens = stream, found, tokens
        self.looks: list[Look] | None = None  # of the pass that runs; None between passes
        self.inner: list[Inner] = []  # of the site that runs

    def open(self, original: Callable[..., State], *args: Any, **kwargs: Any) -> State:
        self.looks, self.inner = [], []
        return original(*args, **kwargs)

    def read(self, original: Callable[..., Seen], state: State, site: Site) -> Seen:
        seen = original(state, site)
        self.inner = []
        # the head's read may come twice, and blocks are run anew by activation checkpointing: after the pass is over
        if self.looks is not None and site.kind == OUT:
            self._look(state, site, None, seen, None)
            self.found.passes.append(tuple(self.looks))
            self.looks = None
        return seen

    def write(self, original: Callable[..., State], state: State, site: Site, y: Tensor, seen: Seen, c: Seen) -> State:
        if self.looks is not None:
            self._look(state, site, y, seen, c)
        return original(state, site, y, seen, c)

    def step(
        self, local: LocalOperator, name: str, original: Callable[..., Any], x: Tensor, past: Any, **kwargs: Any
    ) -> Any:
        if self.looks is not None:
            with torch.no_grad():
                probes = local.quantities(x, past, **kwargs)
            known = sum(inner.name.partition(", ")[0] == name for inner in self.inner)
            name = f"{name}, way {known + 1}" if known else name
            self.inner.append(Inner(name, {key: self._keep_probe(p) for key, p in probes.items()}))
        return original(x, past, **kwargs)

    @torch.no_grad()
    def _look(self, state: State, site: Site, y: Tensor | None, seen: Seen, c: Seen | None) -> None:
        assert self.looks is not None
        if site.index != len(self.looks):
            raise ValueError(
                f"passes interleave: site {site.index} came after {len(self.looks)} sites; trace one pass after another"
            )
        weights = self.stream.weights(state, site)
        probes = self.stream.quantities(state, site, y, seen, c)
        look = Look(
            site=site,
            sources=self.stream.sources(site),
            weights=None if weights is None else self._keep(weights, 2),
            norm=self._keep(norm(seen.x)),
            increment=None if y is None else self._keep(norm(y)),
            cosine=None if y is None else self._keep(cosine(seen.x, y)),
            probes={name: self._keep_probe(probe) for name, probe in probes.items()},
            inner=tuple(self.inner),
        )
        self.looks.append(look)

    def _keep_probe(self, probe: Quantity) -> Quantity:
        return probe._replace(value=self._keep(probe.value, len(probe.axes)))

    def _keep(self, value: Tensor, axes: int = 0) -> Tensor:
        """A fresh copy of the tokens asked for; `axes` dimensions come after the tokens'."""
        time = value.dim() - axes - 1
        if self.tokens is not None and time >= 0:
            index = torch.tensor(_positions(self.tokens, value.shape[time]), dtype=torch.long, device=value.device)
            value = value.index_select(time, index)
        return value.detach().to("cpu", copy=True).contiguous()


def _positions(tokens: slice | Sequence[int], length: int) -> list[int]:
    """The positions asked for, counted from the front."""
    if isinstance(tokens, slice):
        return list(range(length)[tokens])
    if beyond := [i for i in tokens if not -length <= i < length]:
        raise ValueError(f"token {beyond[0]} is asked for, the pass has {length} tokens")
    return [i % length for i in tokens]


@contextmanager
def _wrapped(module: nn.Module, name: str, wrapper: Callable[..., Any]) -> Iterator[None]:
    """`module.name` calls `wrapper` with the original in front, until the end of the block."""
    before = module.__dict__.get(name)  # a trace around this one
    module.__dict__[name] = partial(wrapper, getattr(module, name))
    try:
        yield
    finally:
        if before is None:
            del module.__dict__[name]
        else:
            module.__dict__[name] = before


def _inner_name(path: str, local: LocalOperator) -> str:
    """Its class and, where a sub-layer hosts it, the point at which it acts."""
    kind, place = type(local).__name__, tuple(path.replace("twoaxis_", "").split(".")[-2:])
    point = next((point for point, host in POINTS.items() if host == place), place[-1])
    return kind if point in ("", "local") else f"{kind} {point}"
