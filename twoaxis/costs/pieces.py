"""Sub-layers, head and embedding counted one at a time, on tensors without numbers.

A decoder's sub-layers of one kind and shape all cost the same, so each distinct one is run once, forward and backward,
under a `Recorder`, and multiplied. What is counted is what runs: the model's own modules.

Attention over a full prefix is one fused kernel, as on the CPU and on every accelerator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from twoaxis.base.meter import extent
from twoaxis.costs.recorder import Recorder, Work, meta
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
    made: dict[str, Any] = {way: Fresh.apply(anchor, (batch, tokens, width)) for way in ways}
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
    with Recorder() as recorder:
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
        with Recorder():
            _, past = sublayer(before, past, infos[0])
    with Recorder() as recorder:
        _, rings = sublayer(c, past, infos[1])
        work = recorder.take()
    assert rings is not None
    attention = sum(ring.nbytes() for ring in rings if ring.window is None)
    return Step(work, attention, sum(ring.nbytes() for ring in rings) - attention)


@torch.no_grad()
def pass_piece(run: Callable[[Seen], Any], c: Seen) -> Work:
    """Forward only, nothing remembered."""
    with Recorder() as recorder:
        run(c)
        return recorder.take()
