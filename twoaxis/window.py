"""The one operator: causal windowed attention along any ordered axis, whole or step by step over a ring.

A decoder has two ordered axes. The mixer ShortSWA calls `window_attention` with the time axis of (B, T, H, D); a
depth read calls it with the depth axis of (B, T, L, H, D). It is the same function on a transposed tensor: the
residual stream duality is this file.

    axis   ... i-3  i-2  i-1   i          window = 3: position i sees i-2, i-1 and itself
                     └────┴────┴─► out_i = softmax( q_i · k_j · scale + bias ) v_j      j in {i-2, i-1, i}

Running a network layer by layer is decoding along depth, so the same `Ring` that keeps the last tokens for a mixer
keeps the last layers for a depth read.

Axis letters: N queries, M keys along the ordered axis, H query heads, G query heads per key head, D head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from twoaxis.kernels.attention import attention
from twoaxis.ring import Ring, check_window


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None = None,
    axis: int = -3,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    reach: Tensor | None = None,
    fused: bool = True,
) -> Tensor:
    """Causal attention along `axis`: each position sees itself and the `window - 1` before it.

    Args:
        q: (..., H, D) with the ordered axis anywhere before the last two dimensions.
        k: like q, with a number of heads that divides H (grouped-query attention). The axis may be longer than the
            queries': the queries are then the last N of the M positions, which is a chunk with a prefix.
        v: like k; its head width may differ.
        window: how many positions are visible, the current one included; None is the full prefix. A window larger
            than the axis is allowed.
        axis: the ordered axis.
        scale: of the logits; 1/sqrt(D) unless given.
        bias: added to the logits, broadcastable to (..., H, N, M) with the ordered axis taken out of the `...`.
        sink: (H,) a logit per head that joins the softmax and carries no value.
        reach: integers (..., N), the ordered axis last: how many earlier positions belong to the query's document.
            See `document_reach` and `padding_reach`. Does not depend on how a sequence is cut into chunks.
        fused: False spells out logits, mask and softmax whatever the shape, for a look at the definition itself.

    Returns:
        Shaped like q with v's head width, in q's dtype; computed in float32 at least. Memory is linear in the axis
        whatever is asked for, but for a bias of the size of the logits.
    """
    axis = _check_attention(q, k, v, window, axis)
    _check_extras(q, k, axis, bias, sink, reach)
    q, k, v = (t.movedim(axis, -2) for t in (q, k, v))  # (..., H, N, D)
    n, m = q.shape[-2], k.shape[-2]
    if bias is None and window is not None and m > n + window - 1:
        k, v = k[..., m - (n + window - 1) :, :], v[..., m - (n + window - 1) :, :]
        m = k.shape[-2]
    if window is not None and window >= m:
        window = None
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    run = attention if fused else attention.reference
    return run(q, k, v, bias, sink, reach, window=window, scale=scale).movedim(-2, axis)


def document_reach(documents: Tensor) -> Tensor:
    """How many earlier positions belong to the same document, for packed sequences.

    Args:
        documents: integers (..., T); a new document starts wherever the number changes.

    Returns:
        (..., T) integers: 0 at the first token of each document, then 1, 2, ...
    """
    position = torch.arange(documents.shape[-1], device=documents.device).expand(documents.shape)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[..., 1:] = documents[..., 1:] != documents[..., :-1]
    return position - torch.where(starts, position, 0).cummax(-1).values


def padding_reach(mask: Tensor) -> Tensor:
    """How many earlier positions are real tokens, for left-padded batches.

    Args:
        mask: (B, T), non-zero where a token is real; padding stands on the left.
    """
    real = mask.to(torch.long)
    if bool((real.diff(dim=-1) < 0).any()):
        raise ValueError("padding must stand on the left: the mask falls from 1 to 0 along a row")
    return (real.cumsum(-1) - 1).clamp_min(0)


def attend(
    ring: Ring,
    q: Tensor,
    *,
    scale: float | None = None,
    sink: Tensor | None = None,
    reach: Tensor | None = None,
    fused: bool = True,
) -> Tensor:
    """Attention of the newest positions over a ring of (k, v); equals `window_attention` over the whole axis."""
    k, v = ring.tensors()
    return window_attention(q, k, v, ring.window, ring.axis, scale=scale, sink=sink, reach=reach, fused=fused)


def step(
    ring: Ring,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sink: Tensor | None = None,
    reach: Tensor | None = None,
    fused: bool = True,
) -> tuple[Tensor, Ring]:
    """Append a chunk of any length to a ring, attend, and only then evict."""
    ring = ring.append(k, v)
    return attend(ring, q, sink=sink, reach=reach, fused=fused), ring.evict()


def _check_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None, axis: int) -> int:
    """Validate the arguments and return the axis counted from the front."""
    if not all(isinstance(t, Tensor) for t in (q, k, v)):
        raise ValueError(f"q, k and v must be tensors, got {', '.join(type(t).__name__ for t in (q, k, v))}")
    dims = q.dim()
    check_window(window)
    if not isinstance(axis, int) or isinstance(axis, bool):
        raise ValueError(f"axis must be an integer, got {axis!r}")
    if k.dim() != dims or v.dim() != dims:
        raise ValueError(f"q, k and v must have as many dimensions, got {dims}, {k.dim()} and {v.dim()}")
    if dims < 3 or not -dims <= axis < dims or axis % dims >= dims - 2:
        raise ValueError(
            f"axis {axis} of a {dims}-dimensional tensor is no ordered axis: the last two are heads and head width"
        )
    axis %= dims
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"head widths of q ({q.shape[-1]}) and k ({k.shape[-1]}) differ")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"k and v differ before the head width: {tuple(k.shape)} and {tuple(v.shape)}")
    if q.shape[-2] % k.shape[-2]:
        raise ValueError(f"{q.shape[-2]} query heads cannot share {k.shape[-2]} key heads")
    if q.shape[axis] > k.shape[axis]:
        raise ValueError(
            f"{q.shape[axis]} queries but {k.shape[axis]} keys: queries are the last positions of the keys"
        )
    lead_q = [s for d, s in enumerate(q.shape[:-2]) if d != axis]
    lead_k = [s for d, s in enumerate(k.shape[:-2]) if d != axis]
    if lead_q != lead_k:
        raise ValueError(f"q and k differ in their leading dimensions: {lead_q} and {lead_k}")
    return axis


def _check_extras(
    q: Tensor, k: Tensor, axis: int, bias: Tensor | None, sink: Tensor | None, reach: Tensor | None
) -> None:
    """Validate what joins the logits."""
    lead = [size for d, size in enumerate(q.shape[:-2]) if d != axis]
    n, m, heads = q.shape[axis], k.shape[axis], q.shape[-2]
    if sink is not None and (not isinstance(sink, Tensor) or sink.shape != (heads,)):
        got = tuple(sink.shape) if isinstance(sink, Tensor) else sink
        raise ValueError(f"a sink is one logit per query head, ({heads},), got {got}")
    for name, tensor, shape in (("bias", bias, [*lead, heads, n, m]), ("reach", reach, [*lead, n])):
        if tensor is None:
            continue
        sizes = zip(reversed(tensor.shape), reversed(shape), strict=False)
        if tensor.dim() > len(shape) or any(size not in (1, want) for size, want in sizes):
            raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, which does not broadcast to {tuple(shape)}")
