"""Sub-layers, head and embedding counted one at a time, on tensors without numbers.

A decoder's sub-layers of one kind and shape all cost the same, so each distinct one is run once, forward and backward,
under a `Recorder`, and multiplied. What is counted is what runs: the model's own modules.

Attention over a full prefix is booked as one fused kernel that reads q, k, v, writes its output and keeps a number per
query for the backward pass, as on the CPU and on every accelerator.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from twoaxis.costs.recorder import ATTENTION, Op, Recorder, Work, extent, meta
from twoaxis.depth.stream import Seen
from twoaxis.model.sublayers import Sublayer, TokenInfo
from twoaxis.ring import Ring
from twoaxis.sequence.rope import make_rope


class Piece(NamedTuple):
    """One sub-layer, forward and backward.

    Attributes:
        forward: its work.
        backward: and that of its gradients.
        saved: bytes it keeps for the backward pass beyond its inputs.
        keeps: for each input, whether it is kept.
        extra: bytes the backward pass needs for the moment, gradients of weights left out.
    """

    forward: Work
    backward: Work
    saved: int
    keeps: tuple[bool, ...]
    extra: int


class Step(NamedTuple):
    """One sub-layer without gradients, and what it remembers.

    Attributes:
        work: of the tokens.
        attention: bytes kept that grow with the sequence.
        local: bytes kept by windows and convolutions.
    """

    work: Work
    attention: int
    local: int


class FusedAttention(TorchFunctionMode):
    """Books attention as the fused kernel it is where numbers exist, which `meta` tensors would spell out.

    Args:
        recorder: told of it.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return _Attention.apply(self.recorder, *args[:3])


class _Attention(torch.autograd.Function):
    """Fused attention: output and one number per query forward, three gradients backward."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = _room(q, v.shape[-1])
        sums = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        dims = (q.shape[0] * q.shape[1], q.shape[2], q.shape[3], k.shape[2])
        flops = 4 * dims[0] * dims[1] * dims[2] * dims[3]
        reads = sum(map(extent, (q, k, v)))
        recorder.book(Op(ATTENTION, reads, extent(out) + extent(sums), flops, dims))
        ctx.recorder, ctx.dims, ctx.flops = recorder, dims, 2 * flops
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, sums = ctx.saved_tensors
        made = [_room(t, t.shape[-1]) for t in (q, k, v)]
        reads = sum(map(extent, (q, k, v, out, sums, grads[0])))
        ctx.recorder.book(Op(f"{ATTENTION}_backward", reads, sum(map(extent, made)), ctx.flops, ctx.dims))
        return None, *made


def _room(like: Tensor, width: int) -> Tensor:
    """(B, H, T, width), laid out (B, T, H, width) as fused kernels do: joining the heads needs no copy."""
    batch, heads, tokens, _ = like.shape
    return torch.empty(batch, tokens, heads, width, dtype=like.dtype, device=like.device).transpose(1, 2)


class _Pretend(TorchFunctionMode):
    """Tensors without numbers say that they are on a device, so that methods run the kernels they have for it.

    Args:
        device: its name.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = torch.device(device)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DEVICE:  # a new wrapper at every access: equal, never the same
            return self.device
        if kwargs and kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **(kwargs or {}))


_DEVICE = torch.Tensor.device.__get__  # type: ignore[attr-defined]


def pretend(device: str | None) -> contextlib.AbstractContextManager[Any]:
    """Count the kernels of a device; None are those that every accelerator has."""
    return contextlib.nullcontext() if device is None else _Pretend(device)


@contextlib.contextmanager
def recording(splits: bool = True) -> Iterator[Recorder]:
    """A recorder with fused attention."""
    recorder = Recorder(splits)
    with FusedAttention(recorder), recorder:
        yield recorder


def make_info(tokens: int, seen: int, size: int, theta: float, dtype: torch.dtype) -> TokenInfo:
    """What sub-layers know of tokens without numbers."""
    positions = torch.arange(seen, seen + tokens, device="meta")
    return TokenInfo(None, make_rope(positions, size, theta, dtype))


class Fresh(torch.autograd.Function):
    """A tensor that wants a gradient and that nobody keeps unless it is needed, as a leaf would be."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Room of the anchor's dtype."""
        return torch.empty(shape, dtype=anchor.dtype, device="meta")

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Its gradient goes nowhere."""
        return None, None


def ways_of(ways: tuple[str, ...], batch: int, tokens: int, width: int, dtype: torch.dtype) -> Seen:
    """A normalised read without numbers, one tensor per way, with gradients where they are on."""
    anchor = meta(1, dtype=dtype).requires_grad_()
    made: dict[str, Tensor] = {way: Fresh.apply(anchor, (batch, tokens, width)) for way in ways}
    return Seen(**made) if "x" in made else Seen(made["q"], **made)


def train_piece(
    run: Callable[[Seen], Tensor], module: nn.Module, make: Callable[[], Seen], *, scalar: bool = False
) -> Piece:
    """Forward and backward of something that maps a normalised read to one tensor.

    Args:
        run: the map.
        module: whose parameters get gradients.
        make: its input; made here so that nobody else keeps it.
        scalar: the result is a loss.
    """
    c = make()
    inputs = list({id(t): t for t in (c.x, c.q, c.k, c.v) if t is not None}.values())
    refs = [weakref.ref(t.untyped_storage()) for t in inputs]
    for parameter in module.parameters():
        parameter.grad = None
    with recording() as recorder:
        y = run(c)
        forward = recorder.take()
        shape, out = y.shape, extent(y)
        del c, inputs
        keeps = tuple(ref() is not None for ref in refs)
        saved = recorder.now - out
        recorder.reset()
        gradient = None if scalar else meta(*shape, dtype=y.dtype)
        recorder.cut()
        before = recorder.now
        y.backward(gradient)
        weights = sum(extent(p.grad) for p in module.parameters() if p.grad is not None)
        backward = recorder.take()
        extra = max(0, recorder.peak - before - weights)
    for parameter in module.parameters():
        parameter.grad = None
    return Piece(forward, backward, saved, keeps, extra)


@torch.no_grad()
def infer_piece(sublayer: Sublayer, c: Seen, before: Seen | None, infos: tuple[TokenInfo, TokenInfo]) -> Step:
    """The tokens of `c` after those of `before`, remembered.

    Args:
        sublayer: the model's.
        c: the normalised read of the tokens that are counted.
        before: of the tokens before them, which are not; None is the beginning of the sequence.
        infos: of the tokens before and of those counted.
    """
    past: tuple[Ring, ...] | None = sublayer.start()
    if before is not None:
        with recording():
            _, past = sublayer(before, past, infos[0])
    with recording() as recorder:
        _, rings = sublayer(c, past, infos[1])
        work = recorder.take()
    assert rings is not None
    attention = sum(ring.nbytes() for ring in rings if ring.window is None)
    return Step(work, attention, sum(ring.nbytes() for ring in rings) - attention)


@torch.no_grad()
def pass_piece(run: Callable[[Seen], Any], c: Seen) -> Work:
    """Forward only, nothing remembered."""
    with recording() as recorder:
        run(c)
        return recorder.take()
