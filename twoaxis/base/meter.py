"""Operations that run, what they compute and move, and which bytes are alive: one dispatch mode counts all of it.

    with Meter() as meter:
        loss = model(tokens)         # on meta tensors nothing is computed, and any size takes seconds
        saved = meter.now            # bytes alive: what the backward pass still needs
        loss.backward()
    meter.peak, meter.flops          # the most bytes alive at once; operations of both passes
    meter.take()                     # [Call("embedding", ...), Allocate(...), Call("mm", ...), Free(...), ...]

The meter writes down what happens and nothing else: fused kernels, work by part and highest moments are pure functions
of the list of events. It keeps numbers and sizes, never a tensor, so that everything dies when it would without it.

**Bytes.** Each distinct storage counts from the call that returns it until it is freed, at its present size. Storages
that were there before count only if they are given to `watch`. Scratch memory inside a single operation is not seen.

**Operations.** `products` are those of matrix products, convolutions and attention, by the rules of torch's
`FlopCounterMode`. `flops` are all: 2 for each multiply-add, 1 for each element of other arithmetic.

**Parts.** Whoever follows a model assigns `meter.part` while it runs forward. In the backward pass a call belongs to
the part in which its autograd node was *created*: autograd numbers its nodes in the order of creation, so the meter
notes the number at which each part begins and looks up that of the node that runs.

       number   0 ──────── 7 ──────────── 19 ─────── 31          forward:  embedding, attention, head
                embedding   attention      head                  node 12 runs backward: attention
"""

from __future__ import annotations

import math
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
"""Fused attention in ATen; its backward pass ends in `_backward`."""
MATRIX = ("mm", "bmm", "addmm", "baddbmm")
GROUPED = ("_grouped_mm", "transformers::grouped_mm_fallback")
"""Products of experts with the tokens that were sent to them."""
PARTLY_READ = {"embedding", "index", "index_select", "gather"}
"""Operations that read no more of their first input than they return."""
OVERWRITE = {"copy_", "zero_", "fill_"}
"""In-place operations that do not read what they overwrite."""
EMPTY = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted"}
"""Operations that allocate and move nothing."""
ONE_PER_OUTPUT = {"add", "add_", "sub", "rsub", "mul", "mul_", "div", "div_", "neg", "pow", "square", "lerp"}
ONE_PER_OUTPUT |= {"exp", "rsqrt", "sigmoid", "tanh"}
PER_INPUT = {"sum": 1, "mean": 1, "linalg_vector_norm": 2, "mv": 2, "dot": 2, "vdot": 2, "_softmax": 4}
PER_INPUT |= {"_fused_rms_norm": 4}
"""Operations for each element of the first input."""
UNNUMBERED = 1 << 62
"""Autograd's nodes that add to a leaf's gradient have a number beyond this one, whenever they were created."""


class Region(NamedTuple):
    """The bytes of an allocation that a tensor shows."""

    allocation: int  # a number that no other allocation under this meter gets
    view: tuple[Any, ...]  # offset, shape and strides, 0 where the size is 1
    bytes: int  # of its distinct elements; an expanded tensor has fewer than it shows
    whole: int  # bytes of the allocation


class Layout(NamedTuple):
    """A tensor's shape, strides and dtype."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Plain(NamedTuple):
    """An argument that is no tensor; its type keeps 1, 1.0 and True apart."""

    type: type
    value: Any


class Signature(NamedTuple):
    """A call without its data: what results on meta tensors depend on, and enough to run it again."""

    func: Any  # the overload
    args: tuple[Any, ...]  # a `Layout`, `Plain` or a tuple of them for each positional argument
    kwargs: tuple[tuple[str, Any], ...]  # names with the same

    def arguments(self, make: Callable[[Layout], Tensor], device: str) -> tuple[list[Any], dict[str, Any]]:
        """Arguments for `func` on a device, with a new tensor wherever there was one."""

        def again(leaf: Any) -> Any:
            if isinstance(leaf, Layout):
                return make(leaf)
            if isinstance(leaf, Plain):
                return torch.device(device) if leaf.type is torch.device else leaf.value
            return [again(inner) for inner in leaf]

        return [again(leaf) for leaf in self.args], {name: again(leaf) for name, leaf in self.kwargs}


class Call(NamedTuple):
    """An operation that moves something."""

    op: str  # its name in ATen; one from elsewhere has its namespace, as `twoaxis::sinkhorn`
    part: Hashable  # where in the model
    reads: tuple[Region, ...]  # regions, each once
    makes: tuple[Region, ...]  # new allocations
    changes: tuple[Region, ...] = ()  # regions of older ones that are written in place
    products: int = 0  # operations of a matrix product, a convolution or attention; 0 for everything else
    elementwise: int = 0  # other operations
    dims: tuple[int, ...] = ()  # (batch, rows, inner, columns) of a matrix product or attention
    number: int = -1  # of the call without its data, see `signature_of`; -1 where an argument cannot be hashed

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return sum(region.bytes for regions in (self.reads, self.makes, self.changes) for region in regions)


class Allocate(NamedTuple):
    """Bytes added to an allocation and not written yet, or taken from it by resizing."""

    part: Hashable
    allocation: int
    bytes: int


class Free(NamedTuple):
    """The end of an allocation, with the bytes that counted."""

    allocation: int
    bytes: int


Event = Call | Allocate | Free


class _Allocation:
    """A storage that is alive."""

    __slots__ = ("counts", "number", "part", "ref", "size", "sums")

    def __init__(self, number: int, part: Hashable, counts: bool, size: int, ref: Any) -> None:
        self.number, self.part, self.counts, self.size, self.ref = number, part, counts, size, ref
        self.sums: set[int] = set()  # offsets at which a product was written that a sum may go on from

    @property
    def bytes(self) -> int:
        """Its size, if it counts."""
        return self.size if self.counts else 0

    def region(self, tensor: Tensor) -> Region:
        """What a tensor shows of it."""
        strides, size = _extent(tensor.shape, tensor.stride(), tensor.dtype)
        return Region(self.number, (tensor.storage_offset(), tensor.shape, strides), size, self.size)


Seen = tuple[_Allocation, Tensor]
"""A tensor with what is behind it."""


class Meter(TorchDispatchMode):
    """Counts operations and bytes while active, and records them as events.

    Args:
        record: False counts only, for totals of real steps.

    Attributes:
        now: bytes alive.
        peak: the most since the start or since `reset`.
        flops: all operations so far.
        products: those of matrix products, convolutions and attention.
        views: calls that move nothing, by part.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled under a meter, and torch's guard against it takes longer than metering

    def __init__(self, record: bool = True) -> None:
        super().__init__()
        self.record = record
        self.now = self.peak = self.flops = self.products = 0
        self.views: Counter[Hashable] = Counter()
        self._events: list[Event] = []
        self._alive: dict[int, _Allocation] = {}
        self._count = 0
        self._part: Hashable = None
        self._inside = -1  # number of the autograd node during which the part was assigned
        self._begins: list[int] = [-1]  # node numbers at which parts begin ...
        self._parts: list[Hashable] = [None]  # ... and the parts

    @property
    def part(self) -> Hashable:
        """The part of the model that runs now; assign it in the forward pass only."""
        node = torch._C._current_autograd_node()
        if node is not None and self._inside != (number := node._sequence_nr()) and number < UNNUMBERED:
            self._part = self._parts[bisect_right(self._begins, number) - 1]
            self._inside = -1
        return self._part

    @part.setter
    def part(self, part: Hashable) -> None:
        self._part = part
        self._begins.append(torch.autograd._get_sequence_nr())  # pyright: ignore[reportPrivateImportUsage]
        self._parts.append(part)
        # A checkpointed block runs forward again inside a node of the backward pass: its parts hold in that node.
        node = torch._C._current_autograd_node()
        self._inside = -1 if node is None else node._sequence_nr()

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Count these from now on, although they were there before."""
        for tensor in tensors:
            allocation = self._see(tensor)
            if not allocation.counts:
                allocation.counts, allocation.part = True, self.part
                self._add(allocation, allocation.size)

    def reset(self) -> None:
        """Forget earlier peaks."""
        self.peak = self.now

    def take(self) -> list[Event]:
        """What happened since the last `take`."""
        events, self._events = self._events, []
        return events

    def alive(self) -> Counter[Hashable]:
        """Bytes alive by the part that allocated them: at the end of a forward pass, what each part saves."""
        bytes_of: Counter[Hashable] = Counter()
        for allocation in self._alive.values():
            bytes_of[allocation.part] += allocation.bytes
        return bytes_of

    def hand_over(self, tensors: Iterable[Tensor], part: Hashable) -> None:
        """From now on these count as allocated by `part`: what a sub-layer returns is the stream's to keep or drop."""
        for tensor in tensors:
            self._see(tensor).part = part

    def allocation(self, tensor: Tensor) -> int:
        """The number of the allocation behind a tensor."""
        return self._see(tensor).number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, about = kwargs or {}, _about(func)
        if about.composite:  # reaches a mode in inference only; its pieces are what runs
            with self:
                return func.decompose(*args, **kwargs)
        if about.view:  # half of all calls
            self._see(args[0])
            self.views[self.part] += 1
            return about.func(*args, **kwargs)
        inputs = tensors_in((*args, *kwargs.values()) if kwargs else args)
        seen = list(map(self._see, inputs))  # first, so that views of them are not taken for new allocations
        known = about.memo and bool(inputs) and all([tensor.is_meta for tensor in inputs])
        number = _number(func, args, kwargs) if self.record or known else -1
        out = _run(about, args, kwargs, inputs, number) if known else func(*args, **kwargs)
        before, results = self._count, tensors_in((out,))
        places = [self._see(tensor, counts=True) for tensor in results]
        fresh = [(place, tensor) for place, tensor in zip(places, results, strict=True) if place.number > before]
        if not fresh and not about.mutable:
            if results:
                self.views[self.part] += 1
            return out
        products, dims = _products(about, args, kwargs, out) if about.product else (0, ())
        elementwise = 0 if products else self._elementwise(about.name, args, out)
        self.products += products
        self.flops += products + elementwise
        if self.record and about.name in EMPTY:
            self._events += [Allocate(place.part, place.number, place.bytes) for place, _ in fresh]
        elif self.record:
            regions = self._regions(about, args, kwargs, zip(seen, inputs, strict=True), fresh)
            self._events.append(Call(about.name, self.part, *regions, products, elementwise, dims, number))
        return out

    def _see(self, tensor: Tensor, counts: bool = False) -> _Allocation:
        """The allocation behind a tensor, at its present size; one that is new counts or does not."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        known = self._alive.get(key)
        if known is None:
            self._count += 1
            gone = weakref.ref(storage, lambda _: self._free(key))
            known = self._alive[key] = _Allocation(self._count, self.part, counts, size, gone)
            if counts:
                self.now += size
                self.peak = max(self.peak, self.now)
        elif known.size != size:
            more, known.size = size - known.size, size
            if known.counts:
                self._add(known, more)
        return known

    def _add(self, allocation: _Allocation, more: int) -> None:
        self.now += more
        self.peak = max(self.peak, self.now)
        if self.record:
            self._events.append(Allocate(self.part, allocation.number, more))

    def _free(self, key: int) -> None:
        gone = self._alive.pop(key)
        self.now -= gone.bytes
        if self.record:
            self._events.append(Free(gone.number, gone.bytes))

    def _regions(
        self, about: _About, args: Any, kwargs: Any, inputs: Iterable[Seen], fresh: Iterable[Seen]
    ) -> tuple[tuple[Region, ...], tuple[Region, ...], tuple[Region, ...]]:
        """What a call reads, makes and changes."""
        makes = tuple(dict.fromkeys([place.region(tensor) for place, tensor in fresh]))
        reads = dict.fromkeys([place.region(tensor) for place, tensor in inputs])
        changes: tuple[Region, ...] = ()
        if about.mutable:
            updated, out = (
                [self._see(tensor).region(tensor) for tensor in tensors_in(written)]
                for written in (
                    [args[i] for i in about.written if i < len(args)],
                    [kwargs[name] for name in about.written_names if name in kwargs],
                )
            )
            changes = tuple(dict.fromkeys(updated + out))
            for region in out + (updated if about.name in OVERWRITE else []):
                reads.pop(region, None)
        if about.name in PARTLY_READ:
            table = next(iter(reads))
            del reads[table]
            reads[table._replace(bytes=min(table.bytes, sum(region.bytes for region in makes)))] = None
        return tuple(reads), makes, changes

    def _elementwise(self, name: str, args: Any, out: Any) -> int:
        """Operations of a call that is no product.

        A sum of products is 2 for each term wherever it runs. One that begins with a plain product and goes on in place
        has the first addition counted too, like the one inside a matrix product.
        """
        if name == "mul":
            self._see(out).sums.add(out.storage_offset())
        if name in ("addcmul", "addcmul_"):
            sums, start = self._see(out).sums, out.storage_offset()
            first = name == "addcmul_" and start in sums
            sums.discard(start)
            return (3 if first else 2) * out.numel()
        if name in ONE_PER_OUTPUT:
            return out.numel() if isinstance(out, Tensor) else 0
        if name == "native_layer_norm":  # mean, centring, mean square, scaling; then the learned scale and shift
            return (5 + sum(affine is not None for affine in args[2:4])) * args[0].numel()
        return PER_INPUT[name] * args[0].numel() if name in PER_INPUT else 0


class _About(NamedTuple):
    """What the schema of an operation says; the last two are the arguments that it changes."""

    func: Any
    name: str
    composite: bool
    view: bool
    product: bool
    mutable: bool
    memo: bool
    written: tuple[int, ...]
    written_names: tuple[str, ...]


@cache
def _about(func: Any) -> _About:
    schema = func._schema
    alias = [a.alias_info for a in schema.arguments]
    changed = [info is not None and info.is_write for info in alias]
    pairs = list(zip(schema.arguments, changed, strict=True))
    in_place = schema.name.endswith("_") and len(schema.returns) == 1
    view = any(info is not None and not info.is_write for info in alias) and not schema.is_mutable
    kernels = [key for key in ("CompositeImplicitAutograd", "CPU") if has_kernel(func.name(), key)]
    out = [a.name for a, yes in pairs if yes] == ["out"] and len(schema.returns) == 1
    name, product = schema.name.removeprefix("aten::"), func._overloadpacket in flop_registry
    if name == "_unsafe_view":  # below autograd a view like any other, and torch works it out in Python
        func, view = torch.ops.aten.view.default, True
    return _About(
        func,
        name,
        kernels == ["CompositeImplicitAutograd"],  # silu_backward and others have kernels of their own besides
        view,
        product or name in (*MATRIX, *GROUPED) or name.startswith(ATTENTION),
        schema.is_mutable,
        not view and (in_place or out or not schema.is_mutable) and func.namespace != "prim",
        tuple(i for i, (a, yes) in enumerate(pairs) if yes and not a.kwarg_only),
        tuple(a.name for a, yes in pairs if yes and a.kwarg_only),
    )


_NUMBERS: dict[Signature, int] = {}
"""Every call that was seen, and its number: a number is hashed faster than what it stands for."""
_SIGNATURES: list[Signature] = []
"""The same by number."""
_MEMO: dict[tuple[int, torch.dtype], tuple[Layout | None, ...] | None] = {}
"""Layouts of what calls on meta tensors return; None where the first argument or `out` comes back changed in place."""


def signature_of(number: int) -> Signature:
    """The call behind the number of a `Call`."""
    return _SIGNATURES[number]


def _run(about: _About, args: Any, kwargs: Any, inputs: list[Tensor], number: int) -> Any:
    """A call on meta tensors.

    Its result is remembered: a model repeats few calls often, and torch works out the shape of an elementwise result in
    Python, which takes ten times as long as everything else here.
    """
    key = (number, torch.get_default_dtype())
    layouts = _MEMO.get(key, ())
    if layouts is None:
        return kwargs["out"] if "out" in about.written_names else args[0]
    if layouts:
        made = [None if layout is None else empty(layout) for layout in layouts]
        return made[0] if len(made) == 1 else tuple(made)
    out = about.func(*args, **kwargs)
    if number < 0:
        return out
    if about.mutable:
        if _number(about.func, args, kwargs) == number:  # squeeze_ and an `out` of another size change: they must run
            _MEMO[key] = None
        return out
    results = (out,) if isinstance(out, Tensor) else out
    if isinstance(results, tuple) and all(_is_new(t, results, inputs) for t in results if t is not None):
        _MEMO[key] = tuple(None if t is None else _leaf(t) for t in results)
    return out


def _is_new(result: Any, results: tuple[Any, ...], inputs: list[Tensor]) -> bool:
    """Whether a result is a tensor with a storage of its own, as `empty` would make it."""
    if not isinstance(result, Tensor):
        return False
    storage = result.untyped_storage()
    others = [t.untyped_storage()._cdata for t in (*inputs, *results) if t is not None and t is not result]
    return storage._cdata not in others and storage.nbytes() == empty(_leaf(result)).untyped_storage().nbytes()


def empty(layout: Layout) -> Tensor:
    """A meta tensor of a layout."""
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")


def _number(func: Any, args: Any, kwargs: Any) -> int:
    signature = Signature(func, tuple(map(_leaf, args)), tuple((name, _leaf(v)) for name, v in kwargs.items()))
    try:
        number = _NUMBERS.setdefault(signature, len(_SIGNATURES))
    except TypeError:  # it cannot be hashed
        return -1
    if number == len(_SIGNATURES):
        _SIGNATURES.append(signature)
    return number


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Layout(value.shape, value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        return tuple(map(_leaf, value))
    return Plain(type(value), value)


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """The strided tensors among some arguments or results, those in lists and tuples too."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            if value.layout is torch.strided:
                tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += tensors_in(value)
    return tensors


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind tensors."""
    return sum({(s := t.untyped_storage())._cdata: s.nbytes() for t in tensors}.values())


def extent(tensor: Tensor) -> int:
    """Bytes of the distinct elements of a tensor."""
    return _extent(tensor.shape, tensor.stride(), tensor.dtype)[1]


@cache
def _extent(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> tuple[tuple[int, ...], int]:
    """Strides, 0 for a single element, where they mean nothing and meta tensors have others; and distinct bytes."""
    distinct = math.prod(size if stride else min(size, 1) for size, stride in zip(shape, strides, strict=True))
    told = tuple(0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))
    return told, distinct * dtype.itemsize


def _products(about: _About, args: Any, kwargs: Any, out: Any) -> tuple[int, tuple[int, ...]]:
    """Operations and dimensions of a matrix product, attention or a convolution."""
    name = about.name
    if name in MATRIX:
        a, b = args[:2] if name in ("mm", "bmm") else args[1:3]
        dims = (a.shape[0] if a.dim() == 3 else 1, a.shape[-2], a.shape[-1], b.shape[-1])
        return 2 * math.prod(dims), dims
    if name.startswith(ATTENTION):  # backward: four products; the scores that it computes again are not charged
        back = name.endswith("_backward")
        q, k = args[1:3] if back else args[:2]
        dims = (q.shape[0] * q.shape[1], q.shape[2], q.shape[3], k.shape[2])
        return (8 if back else 4) * math.prod(dims), dims
    if name in GROUPED:  # tokens sorted by expert, (N, K), and a matrix for each of these; or both sides of a gradient
        a, b = args[:2]
        return 2 * a.numel() * b.shape[-1], (1, a.shape[-2], a.shape[-1], b.shape[-1])
    return int(flop_registry[about.func._overloadpacket](*args, **kwargs, out_val=out)), ()
