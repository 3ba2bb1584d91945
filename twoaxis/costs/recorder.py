"""Watching operations run: what they read, write and compute, what they leave alive, and what fusing them would save.

    x ──mul──► a ──add──► b ──sum──► c          naive   every operation reads its inputs and writes its outputs
        └───────── one segment ──────┘          fused   what comes from outside is read once, what survives written once

The recorder is a dispatch mode: it sees every operation that really runs, forward and backward, whatever the method and
however it is implemented. On `meta` tensors nothing is computed, so a shape of any size is counted in seconds. Views
move nothing and count as calls only.

A **segment** is a stretch of operations that one kernel could do. It ends where the caller says so and, if `splits` is
on, at every matrix product.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from twoaxis.base.meter import ATTENTION, OVERWRITE, PARTLY_READ, extent, tensors_in

ROOM = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
"""Operations that make room and move nothing."""


class Op(NamedTuple):
    """One kind of call.

    Attributes:
        name: of the operation.
        reads: bytes of its inputs.
        writes: bytes of its outputs.
        flops: of matrix products and attention; 0 for everything else.
        dims: (batch, rows, inner, columns) of a matrix product.
        form: `flat`, or `strided` where an operand is broadcast or not contiguous.
    """

    name: str
    reads: int
    writes: int
    flops: int = 0
    dims: tuple[int, ...] = ()
    form: str = "flat"

    @property
    def bytes(self) -> int:
        """Moved."""
        return self.reads + self.writes


class Work(NamedTuple):
    """What some operations amount to.

    Attributes:
        ops: every kind of call that moves something, and how often it runs.
        views: calls that move nothing.
        fused_bytes: what segments must move at least; matrix products that split segments are not in it.
        segments: how many there are.
        heavy: those of `ops` that end segments.
    """

    ops: Counter[Op]
    views: int
    fused_bytes: int
    segments: int
    heavy: Counter[Op]

    @property
    def naive_bytes(self) -> int:
        """Moved when every operation runs for itself."""
        return sum(op.bytes * n for op, n in self.ops.items())

    @property
    def flops(self) -> int:
        """Of matrix products and attention."""
        return sum(op.flops * n for op, n in self.ops.items())

    @property
    def calls(self) -> int:
        """Operations that move something."""
        return sum(self.ops.values())

    def times(self, count: int) -> Work:
        """The same `count` times."""
        ops, heavy = (Counter({op: n * count for op, n in kind.items()}) for kind in (self.ops, self.heavy))
        return Work(ops, self.views * count, self.fused_bytes * count, self.segments * count, heavy)


def nothing() -> Work:
    """No work."""
    return Work(Counter(), 0, 0, 0, Counter())


def total(works: Iterable[Work]) -> Work:
    """All together."""
    ops: Counter[Op] = Counter()
    heavy: Counter[Op] = Counter()
    views = fused = segments = 0
    for work in works:
        ops.update(work.ops)
        heavy.update(work.heavy)
        views, fused, segments = views + work.views, fused + work.fused_bytes, segments + work.segments
    return Work(ops, views, fused, segments, heavy)


class Recorder(TorchDispatchMode):
    """Counts while active.

    Args:
        splits: whether matrix products end segments, as in sub-layers; in a stream only wide ones do, because a product
            with few columns is bound by memory and fuses with its neighbours.

    Attributes:
        label: what storages made from now on are booked under.
        now: bytes of living storages that were made under this recorder.
        peak: the most since the start or since `reset`.
    """

    NARROW = 64
    """Columns below which a product of a stream fuses."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled under a recorder; torch's guard against it would take as long as the counting."""
        return False

    def __init__(self, splits: bool = True) -> None:
        super().__init__()
        self.splits = splits
        self.label: Any = None
        self.now = self.peak = 0
        self._alive: dict[int, _Storage] = {}
        self._births = 0
        self._work = nothing()
        self._outside, self._changed = _Touched(), _Touched()
        self._inside: set[int] = set()
        self._room: set[int] = set()
        self._busy = False

    # What callers use.

    def take(self) -> Work:
        """The work since the last `take`; ends the segment."""
        self.cut()
        work, self._work = self._work, nothing()
        return work

    def cut(self) -> int:
        """End the segment and return the bytes it must move."""
        written = sum(self._alive[key].size for key in self._inside if key in self._alive)
        moved = self._outside.bytes + self._changed.bytes + written
        if self._busy:
            work = self._work
            self._work = work._replace(fused_bytes=work.fused_bytes + moved, segments=work.segments + 1)
        self._outside, self._changed, self._inside, self._room = _Touched(), _Touched(), set(), set()
        self._busy = False
        return moved

    def reset(self) -> None:
        """Forget earlier peaks."""
        self.peak = self.now

    def living(self) -> Counter[Any]:
        """Bytes of living storages by the label they were made under."""
        found: Counter[Any] = Counter()
        for storage in self._alive.values():
            found[storage.label] += storage.size
        return found

    def birth(self, tensor: Tensor) -> int:
        """A number of the storage behind a tensor that no later storage gets; one made elsewhere is told by its key."""
        key = key_of(tensor)
        return self._alive[key].birth if key in self._alive else -key

    # What torch calls.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = tensors_in((*args, *kwargs.values()))
        key = signature(func, args, kwargs, inputs)
        if key in KNOWN:
            op, specs = KNOWN[key]
            if specs is None:
                self._count(op, inputs, [], True)
                return args[0]
            fresh = [torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in specs]
            self._count(op, inputs, fresh, False)
            return fresh[0] if len(fresh) == 1 else tuple(fresh)
        out = func(*args, **kwargs)
        if func.namespace == "prim":
            return out
        outputs = tensors_in((out,))
        name = func._schema.name.partition("::")[2]
        keys = {key_of(t) for t in inputs}
        fresh = [t for t in outputs if key_of(t) not in keys]
        changes = func._schema.is_mutable
        if name in ROOM or not (fresh or changes):
            self._born(fresh)
            self._room.update(key_of(t) for t in fresh)
            self._work = self._work._replace(views=self._work.views + 1)
            return out
        op = describe(func, name, args, kwargs, inputs, outputs, fresh, changes, out)
        if key is not None and changes:
            KNOWN[key] = (op, None)
        elif key is not None and _plain(out, fresh):
            KNOWN[key] = (op, [(t.shape, t.stride(), t.dtype) for t in fresh])
        self._count(op, inputs, fresh, changes)
        return out

    def _count(self, op: Op, inputs: list[Tensor], fresh: list[Tensor], changes: bool) -> None:
        """One call: into the segment, or as the end of it."""
        wide = min(op.dims[1:], default=0) >= self.NARROW or op.name.startswith(ATTENTION)
        heavy = op.flops > 0 and (self.splits or wide)
        if heavy:
            self.cut()
            self._born(fresh)
            self._work.heavy[op] += 1
        else:
            self._busy = True
            skip = key_of(inputs[0]) if op.name in OVERWRITE else None
            for tensor in inputs:
                if (key := key_of(tensor)) not in self._inside and key not in self._room and key != skip:
                    partly = op.name in PARTLY_READ and tensor is inputs[0]
                    self._outside.touch(tensor, min(extent(tensor), op.writes) if partly else extent(tensor))
            self._born(fresh)
            self._inside.update(key_of(t) for t in fresh)
            target = key_of(inputs[0]) if changes else None
            if target in self._room:
                self._inside.add(target)
            elif target is not None and target not in self._inside:
                self._changed.touch(inputs[0], extent(inputs[0]))
        self._work.ops[op] += 1

    def _born(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._alive:
                ref = weakref.ref(storage, lambda _, key=key: self._dead(key))
                self._births += 1
                self._alive[key] = _Storage(ref, storage.nbytes(), self.label, self._births)
                self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _dead(self, key: int) -> None:
        self.now -= self._alive.pop(key).size
        self._inside.discard(key)


class _Touched:
    """Parts of storages that a segment reads or writes, each once and none beyond its storage."""

    def __init__(self) -> None:
        self._parts: dict[int, dict[Any, int]] = {}
        self._whole: dict[int, int] = {}

    def touch(self, tensor: Tensor, size: int) -> None:
        """Bytes of what a tensor shows of its storage."""
        key = key_of(tensor)
        self._whole[key] = tensor.untyped_storage().nbytes()
        self._parts.setdefault(key, {})[tensor.storage_offset(), tensor.shape, tensor.stride()] = size

    @property
    def bytes(self) -> int:
        """All of them; parts that overlap count twice as long as that is less than the storage."""
        return sum(min(self._whole[key], sum(parts.values())) for key, parts in self._parts.items())


class _Storage(NamedTuple):
    """A storage that lives: the one watching it, its bytes, the label it was made under, the how-manieth it is."""

    ref: Any
    size: int
    label: Any
    birth: int


KNOWN: dict[Any, tuple[Op, list[Any] | None]] = {}
"""What calls on tensors without numbers are counted as and return, by `signature`; None returns the first argument. A
model repeats few of them often, and working out a result's shape takes torch longer than everything else here."""


def signature(func: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> Any:
    """What the result of a call on tensors without numbers depends on; None where it is not that alone."""
    in_place = func._schema.name.endswith("_")
    if (func._schema.is_mutable and not in_place) or not inputs or not all(t.is_meta for t in inputs):
        return None
    storages: dict[int, int] = {}
    starts: dict[tuple[int, int], int] = {}  # where a tensor begins does not matter, but which begin at the same place

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            which = storages.setdefault(value.untyped_storage()._cdata, len(storages))
            start = starts.setdefault((which, int(value.storage_offset())), len(starts))
            return value.shape, value.stride(), value.dtype, which, start
        if isinstance(value, list | tuple):
            return tuple(map(leaf, value))
        return type(value), value

    try:
        key = (func, leaf(args), tuple((name, leaf(value)) for name, value in kwargs.items()))
        hash(key)
    except TypeError:
        return None
    return key


def _plain(out: Any, fresh: list[Tensor]) -> bool:
    """Whether a result is one new tensor or a tuple of them."""
    return isinstance(out, Tensor) or (isinstance(out, tuple) and len(out) == len(fresh))


def key_of(tensor: Tensor) -> int:
    """Stands for the storage behind a tensor as long as it lives."""
    return tensor.untyped_storage()._cdata


def describe(
    func: Any,
    name: str,
    args: Any,
    kwargs: Any,
    inputs: list[Tensor],
    outputs: list[Tensor],
    fresh: list[Tensor],
    changes: bool,
    out: Any,
) -> Op:
    """An operation by what it moves and computes."""
    distinct = {(key_of(t), t.storage_offset(), tuple(t.shape)): extent(t) for t in inputs}
    reads, writes = sum(distinct.values()), sum(extent(t) for t in fresh)
    if changes:
        writes += extent(inputs[0])
        reads -= extent(inputs[0]) if name in OVERWRITE else 0
    if name in PARTLY_READ:
        reads += min(extent(inputs[0]), writes) - extent(inputs[0])
    widest = max((t.numel() for t in outputs), default=0)
    even = all(t.is_contiguous() and t.numel() in (1, widest) for t in inputs)
    form = "flat" if even else "strided"
    flops, dims = product(func, name, args, kwargs, out)
    return Op(name, reads, writes, flops, dims, "flat" if dims else form)


def product(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> tuple[int, tuple[int, ...]]:
    """Operations and dimensions of a matrix product, an attention or a convolution; (0, ()) for everything else."""
    if name in ("mm", "addmm"):
        a, b = args[-2:] if name == "mm" else args[1:3]
        dims = (1, a.shape[0], a.shape[1], b.shape[1])
    elif name in ("bmm", "baddbmm"):
        a, b = args[-2:] if name == "bmm" else args[1:3]
        dims = (a.shape[0], a.shape[1], a.shape[2], b.shape[2])
    elif name == ATTENTION:
        q, k = args[0], args[1]
        dims = (q.shape[0] * q.shape[1], q.shape[2], q.shape[3], k.shape[2])
        return 4 * dims[0] * dims[1] * dims[2] * dims[3], dims
    elif name == f"{ATTENTION}_backward":
        q, k = args[1], args[2]
        dims = (q.shape[0] * q.shape[1], q.shape[2], q.shape[3], k.shape[2])
        return 8 * dims[0] * dims[1] * dims[2] * dims[3], dims
    elif func._overloadpacket in flop_registry:
        flops = flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
        return int(flops), (1, 0, 0, 0)
    else:
        return 0, ()
    return 2 * dims[0] * dims[1] * dims[2] * dims[3], dims


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor without numbers."""
    return torch.empty(*shape, dtype=dtype, device="meta")
