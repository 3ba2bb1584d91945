"""The stream contract: how sub-layers read from and write to each other along depth.

The decoder knows no method by name; its walk over the sites (`twoaxis.depth.walk.visit`) is these lines:

    state = stream.open(embedding)
    for site in sites:
        seen  = stream.read(state, site)              # Seen(x, q, k, v, aux)
        c     = norm[site](seen)                      # one scale per entry of stream.ways(site)
        y     = sublayer[site](c)                     # the increment, without its residual
        state = stream.write(state, site, y, seen, c)
    return final_norm(stream.close(state))            # close is the read of the out site

A method is one file with a subclass of `Stream`, mostly through one of two families: `HistoryStream` (sites read what
earlier ones wrote) and `ParallelStreams` (several residual streams side by side). Anything else fills in `_open`,
`_read`, `_write`, `_pack` and `_unpack` itself. They are pure: the state is a value, nothing is kept on the module, so
that passes may interleave, be recomputed by activation checkpointing, deep-copied and compiled. `definition` is the
same method a second time, as its paper has it: plain lists of tensors from the embedding to the head, without a state
and without kernels. `twoaxis check` and `twoaxis verify` compare the two, values and every gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from twoaxis.base.meter import tensors_in
from twoaxis.base.method import Declared, Entry, ParameterGroup, Quantity
from twoaxis.depth.site import OUT, Placement, Site, make_sites

_NUMBERS = itertools.count(1)


class Seen(NamedTuple):
    """What a site reads. After the pre-norm the same shape carries the normalised ways."""

    x: Tensor  # the residual way
    q: Tensor | None = None  # the attention's ways, only where the method gives them separately
    k: Tensor | None = None
    v: Tensor | None = None
    # opaque. In a read: what `read` computed and `write` needs. In the normalised read that `write` gets: what `kv`
    # left for it, None where it was not called
    aux: Any = None
    # for an attention site whose keys and values the method changes: gets the queries, keys and values (..., heads,
    # head width) after projection and rotary positions, and returns the keys and values to attend to and to cache, and
    # what the write needs of them; the one that a sub-layer gets returns the two
    kv: Callable[[Tensor, Tensor, Tensor], Any] | None = None


class Applied(NamedTuple):
    """What the pre-norm and the sub-layer of one site return."""

    c: Seen  # the normalised read
    y: Tensor  # the sub-layer's output, the increment without its residual


Apply = Callable[[Site, Seen], Applied]
"""Function that runs the pre-norm and the sub-layer of a site on what the site reads."""


class Tokens(NamedTuple):
    """The sequence side of one pass, for the few streams that mix tokens."""

    past: tuple[Any, ...] = ()  # what `Stream.memory` returned for the tokens before these; empty at the start
    reach: Tensor | None = None  # (B, T) how many earlier positions belong to the token's document
    keep: bool = False  # whether `memory` will be asked for


class Stamp(NamedTuple):
    """Says of which parameters something that a state carries was made, and under which conditions."""

    tensors: tuple[tuple[int, int], ...]  # identity and version of each; none in a graph, which has no versions
    tracked: bool  # whether gradients were recorded

    @staticmethod
    def of(tensors: Iterable[Tensor | None]) -> Stamp:
        """Of what is made now."""
        used = () if torch.compiler.is_compiling() else (t for t in tensors if t is not None)
        return Stamp(tuple((id(t), 0 if t.is_inference() else t._version) for t in used), torch.is_grad_enabled())

    def holds(self, tensors: Iterable[Tensor | None]) -> bool:
        """False for another stream's copy of the tensors, new values, or gradients that were switched on since."""
        if torch.is_grad_enabled() and not self.tracked:
            return False
        return torch.compiler.is_compiling() or self.tensors == Stamp.of(tensors).tensors


class State(NamedTuple):
    """What a stream carries from one site to the next during one forward pass: a value, never mutated."""

    owner: int  # number of the stream that opened it; another one refuses it, a deep copy of the stream does not
    index: int  # the site that comes next  # pyright: ignore[reportIncompatibleMethodOverride]
    value: Any  # the method's own NamedTuple
    stamp: Stamp  # of the parameters that some of it was made of


class Cost(NamedTuple):
    """What a method adds to the plain residual, as exact counts for one layout and width."""

    parameters: int  # numbers learned
    flops: int  # operations per token and forward pass that grow with the width; a multiply-add is 2
    reads: int  # source vectors of the model's width that reads touch, per token and forward pass
    live: int  # numbers per token alive across sites at their most; the plain residual has its width
    kept: int = 0  # numbers per sequence kept between tokens when decoding


class Layout(NamedTuple):
    """The shape a stream is built for."""

    width: int  # D, of the residual stream
    sites: tuple[Site, ...]  # every site, out last
    placement: Placement  # which of them use the method
    eps: float = 1e-6  # inside the root of the model's norms, for a method that normalises its own reads

    @staticmethod
    def make(
        blocks: int,
        width: int,
        kinds: Sequence[str] | Sequence[Sequence[str]] = ("attention", "mlp"),
        placement: Placement | str | dict[str, Any] | None = None,
        eps: float = 1e-6,
    ) -> Layout:
        """A layout from the number of blocks, the width and the sub-layers of a block."""
        if not isinstance(width, int) or isinstance(width, bool) or width < 1:
            raise ValueError(f"width must be a positive integer, got {width!r}")
        sites = make_sites(blocks, kinds)
        parsed = Placement.parse(placement)
        parsed.check(blocks)
        return Layout(width, sites, parsed, eps)

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.sites[-1].block

    @property
    def out(self) -> Site:
        """The out site."""
        return self.sites[-1]

    @property
    def sublayers(self) -> tuple[Site, ...]:
        """Every site but out."""
        return self.sites[:-1]

    def used(self) -> tuple[Site, ...]:
        """The sites that use the method."""
        return tuple(s for s in self.sites if self.placement.uses(s))


class Stream(Declared):
    """A residual-stream method: what sub-layers read along depth, and what becomes of what they write.

        state = stream.open(embedding)
        for site in stream.sites:
            seen = stream.read(state, site)
            c = norm[site](seen)
            state = stream.write(state, site, sublayer[site](c), seen, c)
        x = stream.close(state)

    Subclasses fill in `_open`, `_read`, `_write`, `_pack`, `_unpack` and `definition`, mostly through one of the
    families `HistoryStream` and `ParallelStreams` (docs/howto/write_a_stream.md).
    """

    remedy = "its neutral class is none; use Blend"
    alike: ClassVar[bool] = False
    """Whether every block does the same work, so that the costs of a few tell those of many."""
    output_scale: float = 1.0
    """Factor on the initial standard deviation of output projections, where a paper prescribes one."""
    kv_heads: int | None = None
    """How many key and value heads the attentions must have, where the method changes them and asks for a number."""

    def __init__(self, config: Any, layout: Layout) -> None:
        super().__init__()
        self.config = config
        self.layout = layout
        self._by_block = [tuple(sites) for _, sites in itertools.groupby(layout.sublayers, lambda site: site.block)]
        # it tells streams apart that look the same; a deep copy keeps it, and with it its states
        self._number = next(_NUMBERS)

    # What a method fills in.

    def _open(self, x: Tensor, tokens: Tokens) -> Any:
        raise NotImplementedError(f"{type(self).__name__} does not define _open")

    def _read(self, value: Any, site: Site) -> Seen:
        raise NotImplementedError(f"{type(self).__name__} does not define _read")

    def _write(self, value: Any, site: Site, y: Tensor, seen: Seen, c: Seen) -> Any:
        raise NotImplementedError(f"{type(self).__name__} does not define _write")

    def _pack(self, value: Any, site: Site) -> tuple[Tensor, ...]:
        raise NotImplementedError(f"{type(self).__name__} does not define _pack")

    def _unpack(self, tensors: tuple[Tensor, ...], site: Site, tokens: Tokens) -> Any:
        raise NotImplementedError(f"{type(self).__name__} does not define _unpack")

    def _used(self) -> Iterable[Tensor | None]:
        """Parameters that what a state carries is made of: `_remade` is called where they changed since."""
        return ()

    def _remade(self, value: Any, boundary: int) -> Any:
        """`value`, before the site of index `boundary`, with what is made of parameters made anew."""
        raise NotImplementedError(f"{type(self).__name__} does not define _remade")

    def _rescale(self, value: Any, factor: Tensor | float) -> Any:
        raise ValueError(
            f"{self.name} cannot stand in a model whose layers scale their residual; use standard, or another model"
        )

    def _memory(self, value: Any) -> tuple[Any, ...]:
        return ()

    def _weights(self, value: Any, site: Site) -> Tensor | None:
        return None

    def held(self, value: Any) -> list[Tensor]:
        """What counts as live in a state: its vectors, without logits and what else is derived."""
        return [t for t in tensors_in([value]) if t.shape[-1:] == (self.layout.width,)]

    def _quantities(self, value: Any, site: Site, y: Tensor | None, seen: Seen, c: Seen | None) -> dict[str, Quantity]:
        return {}

    def definition(self, x: Tensor, apply: Apply) -> Tensor:
        """Reference implementation: the pass as the paper writes it, from the embedding to what the final norm gets.

        Both are (B, T, D) in float64, and the method is at every site. It uses parameters, options and layout, and
        neither kernels nor the methods that it is compared with. Without it only consistency is checked.
        """
        raise NotImplementedError(f"{type(self).__name__} does not give its definition")

    @classmethod
    def controls(cls, config: Any) -> tuple[dict[str, Any], ...]:
        """Changes of a contender's options that keep what comes along with the method and leave its idea out."""
        return ()

    def flops(self) -> int:
        """Operations per token that the method adds, as `Cost` has them; counted, unless the method has a formula."""
        from twoaxis.depth.counts import count_flops, on_meta

        return count_flops(on_meta(self))

    def ways(self, site: Site) -> tuple[str, ...]:
        """Which entries of `Seen` the pre-norm of `site` normalises, each with its own scale."""
        return ("x",)

    def normed(self, site: Site) -> bool:
        """Whether the model normalises what `site` reads (out: the final norm); False where that is done already."""
        return True

    def changes_kv(self, site: Site) -> bool:
        """Whether the read of `site` has `kv`: the method changes the keys and values of that attention."""
        return False

    def unblendable(self) -> str | None:
        """Why a `Blend` cannot mix the method with the plain residual; None where it can."""
        if all(self.normed(site) for site in self.layout.sites):
            return None
        return "normalises its own reads, which a blend cannot mix with plain ones"

    def adopt_norm_(self, site: Site, weight: Tensor) -> None:
        """Take over the scale of a pretrained model's norm; only where `normed` is False."""
        raise ValueError(f"{self.name} leaves the norm of site {site.index} to the model: there is none to adopt")

    def memory_windows(self) -> tuple[int, ...]:
        """Windows of the rings that `memory` returns, the current token included; empty unless tokens are mixed."""
        return ()

    def sources(self, site: Site) -> tuple[str, ...]:
        """Names of the sources that `weights` speaks of, in its order."""
        return ()

    # What callers use.

    @property
    def sites(self) -> tuple[Site, ...]:
        """Every sub-layer's site, in order; the out site is `layout.out`."""
        return self.layout.sublayers

    def sites_of(self, block: int) -> tuple[Site, ...]:
        """The sub-layers' sites of one block."""
        return self._by_block[block]

    def open(self, x: Tensor, past: tuple[Any, ...] = (), *, reach: Tensor | None = None, keep: bool = False) -> State:
        """Begin a pass.

        Args:
            x: (..., D) the embedding; (B, T, D) for streams that mix tokens.
            past: what `memory` returned for the tokens before these.
            reach: (B, T) how many earlier positions belong to the token's document; None is all of them.
            keep: whether `memory` will be asked for.
        """
        if not isinstance(x, Tensor) or x.dim() < 1 or not x.is_floating_point():
            got = f"{x.dtype} of {x.dim()} dimensions" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"the embedding must be a floating-point tensor (..., {self.layout.width}), got {got}")
        if x.shape[-1] != self.layout.width:
            raise ValueError(
                f"the embedding has width {x.shape[-1]}, the stream was built for width {self.layout.width}"
            )
        if windows := self.memory_windows():
            if x.dim() != 3:
                raise ValueError(f"a stream that mixes tokens needs (batch, time, width), got {x.dim()} dimensions")
            if past and len(past) != len(windows):
                raise ValueError(f"past has {len(past)} rings, this stream keeps {len(windows)}")
        return self._state(0, self._open(x, Tokens(tuple(past), reach, keep)))

    def read(self, state: State, site: Site) -> Seen:
        """What the sub-layer at `site` sees."""
        return self._read(self._checked(state, site).value, site)

    def write(self, state: State, site: Site, y: Tensor, seen: Seen, c: Seen) -> State:
        """Hand the sub-layer's increment back to the stream.

        Args:
            state: the state that was read.
            site: the site that was read.
            y: (..., D) the sub-layer's output without its residual.
            seen: what `read` returned.
            c: the normalised read that the sub-layer got; its `aux` is what `seen.kv` returned for the write.
        """
        state = self._checked(state, site)
        if site.kind == OUT:
            raise ValueError("the out site is read by close and never written")
        if (wrong := self._wrong(y, seen)) is not None:
            raise ValueError(f"the sub-layer at site {site.index} ({site.kind} of block {site.block}) returned {wrong}")
        return State(self._number, site.index + 1, self._write(state.value, site, y, seen, c), state.stamp)

    def rescale(self, state: State, factor: Tensor | float) -> State:
        """The state of a residual that a layer multiplies by `factor` between two sites."""
        self._own(state)
        return state._replace(value=self._rescale(state.value, factor))

    def close(self, state: State) -> Tensor:
        """The read of the out site: what the final norm and the head get."""
        return self.read(state, self.layout.out).x

    def memory(self, state: State) -> tuple[Any, ...]:
        """What later tokens need of these; a tuple of rings, empty for streams that do not mix tokens."""
        return self._memory(self._checked(state, self.layout.out).value)

    def weights(self, state: State, site: Site) -> Tensor | None:
        """What `site` reads from which source: (..., W, S), or None where the method has no such weights."""
        return self._weights(self._checked(state, site).value, site)

    def quantities(self, state: State, site: Site, y: Tensor | None, seen: Seen, c: Seen | None) -> dict[str, Quantity]:
        """What else the method shows at `site`, by name, from the write's arguments; at out `y` and `c` are None."""
        return self._quantities(self._checked(state, site).value, site, y, seen, c)

    def pack(self, state: State) -> tuple[Tensor, ...]:
        """The state as tensors for a stage boundary; only between blocks, where its structure is fixed.

        What is kept for later tokens is not packed: it stays with the stage whose sites it belongs to.
        """
        self._own(state)
        return self._pack(state.value, self._boundary(state.index))

    def unpack(
        self,
        tensors: Sequence[Tensor],
        site: Site,
        past: tuple[Any, ...] = (),
        *,
        reach: Tensor | None = None,
        keep: bool = False,
    ) -> State:
        """The state that `pack` gave at `site`, the first of a block; derived state is rebuilt."""
        self._known(site)
        site = self._boundary(site.index)
        return self._state(site.index, self._unpack(tuple(tensors), site, Tokens(tuple(past), reach, keep)))

    def uses(self, site: Site) -> bool:
        """Whether the method acts at `site`; elsewhere the read and the write are plain."""
        return self.layout.placement.uses(site)

    def _boundary(self, index: int) -> Site:
        site = self.layout.sites[index]
        if not site.first:
            raise ValueError(
                f"a state packs between blocks only: site {index} ({site.kind} of block {site.block}) is inside one"
            )
        return site

    def _packed(self, tensors: tuple[Tensor, ...], want: int, site: Site) -> None:
        """Refuse another number of tensors than `_pack` gives at `site`."""
        if len(tensors) != want:
            raise ValueError(f"the state before block {site.block} packs into {want} tensors, got {len(tensors)}")

    def _wrong(self, y: Tensor, seen: Seen) -> str | None:
        """What is wrong with a sub-layer's output, if anything."""
        width = self.layout.width
        if not isinstance(y, Tensor) or y.dim() < 1:
            got = "a number" if isinstance(y, Tensor) else type(y).__name__
            return f"{got}, not a tensor of width {width}"
        if y.shape[-1] != width:
            return f"width {y.shape[-1]}, the stream has width {width}"
        return None if y.shape == seen.x.shape else f"shape {tuple(y.shape)}, its read has {tuple(seen.x.shape)}"

    def _own(self, state: State) -> None:
        if not isinstance(state, State):
            raise ValueError(f"a state comes from the stream's open, write or unpack, got {type(state).__name__}")
        if state.owner != self._number:
            raise ValueError(
                f"this state belongs to another stream (number {state.owner}, this is {self._number}: {self.config})"
            )

    def _known(self, site: Site) -> None:
        if not isinstance(site, Site):
            raise ValueError(f"a site must be one of the stream's {len(self.layout.sites)} sites, got {site!r}")
        if not 0 <= site.index < len(self.layout.sites) or self.layout.sites[site.index] != site:
            raise ValueError(f"{site} is none of the stream's {len(self.layout.sites)} sites")

    def _state(self, index: int, value: Any) -> State:
        """A state whose value was made now."""
        return State(self._number, index, value, Stamp.of(self._used()))

    def _checked(self, state: State, site: Site) -> State:
        """A state that is at `site`, made anew where parameters changed or gradients were switched on since."""
        if torch.compiler.is_compiling():
            return state  # the order of calls is fixed when a graph is made; checks would only add guards
        self._own(state)
        self._known(site)
        if site.index != state.index:
            raise ValueError(
                f"sites out of order: the state is at site {state.index} of {len(self.layout.sites)}, "
                f"asked for site {site.index} ({site.kind} of block {site.block})"
            )
        used = tuple(self._used())
        if not used or state.stamp.holds(used):
            return state
        return self._state(state.index, self._remade(state.value, state.index))

    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        """How an optimiser should treat the parameters; each is in exactly one group."""
        undeclared = Entry(0.0, None, decay=False, rate=1.0, float32=True)
        table = {name: self._table.get(name, undeclared)[2:] for name, _ in self.named_parameters()}
        return tuple(
            ParameterGroup(tuple(name for name, own in table.items() if own == treatment), *treatment)
            for treatment in dict.fromkeys(table.values())
        )

    def extra_repr(self) -> str:
        """The options, for printing the module."""
        return f"{self.config}, blocks={self.layout.blocks}, width={self.layout.width}"


Row = Mapping[str, Tensor]
"""What a site has of each table, by the table's name."""


Rows = Mapping[str, tuple[Tensor, ...]]
"""The tables of a pass, taken apart."""


class RowStream(Stream):
    """A stream whose parameters are stacks with a row per site (`tables`); its state has `rows`, of `take_apart`.

    Indexed at every site, each site's backward would fill and add a gradient of the whole stack: work that grows with
    the square of the depth. Taken apart once per pass, the rows' gradients are put together once.
    """

    alike = True

    def __init__(self, config: Any, layout: Layout) -> None:
        super().__init__(config, layout)
        self.used = [site for site in layout.used() if site.kind != OUT]
        """The sub-layers' sites that use the method."""
        self.rows = {site.index: row for row, site in enumerate(self.used)}
        """Row of each of them in the tables."""
        self.reads_out = self.uses(layout.out)
        """Whether the out site uses the method."""

    def tables(self) -> dict[str, Tensor]:
        """What sites need of the parameters: tensors with a row per site, in float32 at least; once per pass."""
        raise NotImplementedError(f"{type(self).__name__} does not define tables")

    def take_apart(self) -> Rows:
        """The rows for one pass."""
        return {name: table.unbind(0) for name, table in self.tables().items()}

    def row_of(self, site: Site, rows: Rows) -> Row:
        """What a site that uses the method has of each table."""
        return {name: table[self.rows[site.index]] for name, table in rows.items()}

    def _used(self) -> Iterable[Tensor | None]:
        return itertools.chain(self._parameters.values(), self._buffers.values())

    def _remade(self, value: Any, boundary: int) -> Any:
        return value._replace(rows=self.take_apart())
