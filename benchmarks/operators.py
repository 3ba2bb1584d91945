"""The operators: reads over depth, rewriting a wide state, windowed attention over time, the depthwise convolution.

Each is held against the copy limit and against the form one would write first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.limit import Form, against_copy, both, copy
from benchmarks.scale import Scale
from benchmarks.tables import Table
from benchmarks.timing import Run, exponent, interleave
from twoaxis import window_attention
from twoaxis.base.meter import Meter
from twoaxis.kernels.dispatch import target
from twoaxis.kernels.history import rms_logits, softmax_read, source_dots, weighted_sum
from twoaxis.kernels.rewrite import delta_rewrite
from twoaxis.kernels.streams import mix_streams
from twoaxis.kernels.taps import depthwise_taps

Read = Callable[[Sequence[Tensor], Tensor], Tensor]


def naive_read(sources: Sequence[Tensor], query: Tensor) -> Tensor:
    """Stack and einsum; a query for all tokens (D,) or one for each (N, D)."""
    states = torch.stack(list(sources))
    weights = torch.einsum("snd,d->sn" if query.dim() == 1 else "snd,nd->sn", states, query).softmax(0)
    return torch.einsum("sn,snd->nd", weights, states)


def fused_read(sources: Sequence[Tensor], query: Tensor) -> Tensor:
    """The library's, over a list of sources: what Attention Residuals runs, and what queries per token need."""
    if query.dim() == 1:
        return fixed_read(sources, query, None)
    logits = source_dots(query.unsqueeze(-2), sources).squeeze(-2)
    return weighted_sum(sources, token=logits.softmax(-1).unsqueeze(-2))[0]


def fixed_read(sources: Sequence[Tensor], query: Tensor, eps: float | None) -> Tensor:
    """The read with one query (D,) for all tokens; keys are RMS-normalised unless `eps` is None."""
    return softmax_read(sources, [rms_logits(s, query.view(1, 1, -1), eps=eps)[..., 0] for s in sources])


def depth_reads(scale: Scale) -> Table:
    """Softmax reads over 16 and 64 sources, forward and with backward, against the copy limit."""
    tokens, width = scale.read
    rows: dict[str, dict[str, float]] = {}
    for count in scale.sources:
        sources = [torch.randn(tokens, width, requires_grad=True) for _ in range(count)]
        for kind, shape in (("one query", (width,)), ("a query per token", (tokens, width))):
            query = (torch.randn(shape) / width**0.5).requires_grad_()
            reads: dict[str, Read] = {"stack + einsum": naive_read, "twoaxis": fused_read}
            if not scale.quick and count <= 16:
                reads["compiled"] = torch.compile(fused_read, fullgraph=True)
            forms: dict[str, Form] = {
                f"{count} sources, {kind}: {name}": (lambda r=read, s=sources, q=query: r(s, q))
                for name, read in reads.items()
            }
            moved = ((count + 1) * tokens * width, (3 * count + 2) * tokens * width)
            rows |= against_copy(forms, [*sources, query], torch.randn(tokens, width), moved, scale.rounds)
    note = f"{tokens} tokens of width {width}; bytes that must move: S+1 states forward, 3S+2 with backward."
    return Table("Softmax read over depth, times the copy limit", note, rows)


def wide_states(scale: Scale) -> Table:
    """Mixing four streams and writing to them, and the delta rule on four channels, against the copy limit."""
    tokens, width = scale.read
    n, size = 4, tokens * width
    state, y = torch.randn(tokens, n, width, requires_grad=True), torch.randn(tokens, width, requires_grad=True)
    weights, gain = torch.randn(tokens, n, n, requires_grad=True), torch.randn(tokens, n, requires_grad=True)
    gate, value = torch.randn(tokens, requires_grad=True), torch.randn(tokens, n, requires_grad=True)

    def mix_naive() -> Tensor:
        return torch.einsum("twn,tnd->twd", weights, state) + torch.einsum("tw,td->twd", gain, y)

    def mix() -> Tensor:
        return mix_streams(state, weights, y, gain)

    def rewrite_naive() -> Tensor:
        return delta_rewrite.reference(state, y, gate, value, k_eps=1e-6)

    def rewrite() -> Tensor:
        return delta_rewrite(state, y, gate, value, k_eps=1e-6)

    # forward the state and y are read and the state is written; backward also reads its gradient and writes theirs
    moved, grad = ((2 * n + 1) * size, (5 * n + 3) * size), torch.randn(tokens, n, width)
    mixing: dict[str, Form] = {"mix 4 streams and write: einsum": mix_naive, "mix 4 streams and write: twoaxis": mix}
    delta: dict[str, Form] = {"delta rule, d_v=4: spelled out": rewrite_naive, "delta rule, d_v=4: twoaxis": rewrite}
    rows = against_copy(mixing, [state, weights, y, gain], grad, moved, scale.rounds)
    rows |= against_copy(delta, [state, y, gate, value], grad, moved, scale.rounds)
    return Table("Rewriting a wide state, times the copy limit", f"{tokens} tokens of width {width}, float32.", rows)


def leaves(length: int) -> tuple[list[Tensor], Tensor]:
    """q, k, v of 8 heads of 64, and a gradient."""
    q, k, v, grad = (torch.randn(1, length, 8, 64) for _ in range(4))
    return [t.requires_grad_() for t in (q, k, v)], grad


def fused_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """torch's own kernel on (B, T, H, D)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def windows(scale: Scale) -> Table:
    """Windowed attention, forward and backward, against full causal attention and the copy limit; growth with T."""
    length, rows = scale.window_length, {}
    qkv, grad = leaves(length)
    full = both(lambda: fused_attention(qkv[0], qkv[1], qkv[2], is_causal=True), qkv, grad)
    contenders: dict[str, Run] = {"full causal": full, "copy": copy(12 * grad.numel())}
    for window in (4, 16, 128):
        contenders[f"w={window}"] = _windowed(qkv, grad, window, window_attention)
        if not scale.quick and window <= 16:
            compiled = torch.compile(window_attention, fullgraph=True)
            contenders[f"w={window}, compiled"] = _windowed(qkv, grad, window, compiled)
    timings = interleave(contenders, max(3, scale.rounds // 2))
    for name, timing in timings.items():
        rows[name] = {
            "times faster than full": 1 / timing.ratio,
            "times the copy": timing.milliseconds / timings["copy"].milliseconds,
        }
    rows["w=16"]["exponent of T"] = window_growth(scale)
    note = f"8 heads of 64, T = {length}, forward + backward; the exponent is 1 where time is linear in T."
    return Table("Windowed attention", note, rows)


def _windowed(qkv: Sequence[Tensor], grad: Tensor, window: int, attend: Callable[..., Tensor]) -> Run:
    return both(lambda: attend(*qkv, window, 1), qkv, grad)


def window_growth(scale: Scale) -> float:
    """The exponent of T in the time of a window of 16."""
    lengths = [scale.window_length // 4, scale.window_length // 2, scale.window_length]
    runs = {str(length): _windowed(*leaves(length), 16, window_attention) for length in lengths}
    found = interleave(runs, scale.rounds)
    return exponent(lengths, [found[str(length)].ratio for length in lengths])


def attention_memory(scale: Scale) -> Table:
    """The peak of attention's own tensors in both passes, counted on shapes without numbers, and its growth with T."""
    lengths = (4096, 16384)

    def peak(length: int, documents: bool, **options: Any) -> int:
        q, k, v = (torch.empty(1, length, 8, 64, device="meta", requires_grad=True) for _ in range(3))
        reach = torch.empty(1, length, dtype=torch.long, device="meta") if documents else None
        with target("cpu"), Meter() as meter:
            window_attention(q, k, v, axis=1, reach=reach, **options).sum().backward()
        return meter.peak

    cases: dict[str, dict[str, Any]] = {
        "full causal": {"documents": False},
        "full causal, documents": {"documents": True},
        "full causal, documents, spelled out": {"documents": True, "fused": False},
        "w=16, documents": {"documents": True, "window": 16},
        "w=1024": {"documents": False, "window": 1024},
    }
    rows = {}
    for name, options in cases.items():
        peaks = [peak(length, **options) for length in lengths]
        rows[name] = {f"MB at T = {t}": found / 1e6 for t, found in zip(lengths, peaks, strict=True)}
        rows[name]["exponent of T"] = exponent(lengths, peaks)
    note = "8 heads of 64, float32, forward + backward; the exponent is 1 where memory is linear in T."
    return Table("Peak memory of attention", note, rows)


def convolutions(scale: Scale) -> Table:
    """The causal depthwise convolution of four taps against nn.Conv1d and the copy limit."""
    tokens, width = scale.read
    history, weight = torch.randn(1, tokens + 3, width, requires_grad=True), torch.randn(width, 4, requires_grad=True)
    forms: dict[str, Form] = {
        "nn.Conv1d": lambda: F.conv1d(history.mT, weight.unsqueeze(1), groups=width).mT,
        "shifted products, spelled out": lambda: depthwise_taps.reference(history, weight),
        "twoaxis": lambda: depthwise_taps(history, weight),
    }
    if not scale.quick:
        compiled = torch.compile(depthwise_taps, fullgraph=True)
        forms["compiled"] = lambda: compiled(history, weight)
    moved, grad = (2 * tokens * width, 5 * tokens * width), torch.randn(1, tokens, width)
    rows = against_copy(forms, [history, weight], grad, moved, scale.rounds)
    return Table("Depthwise convolution of 4 taps, times the copy limit", f"{tokens} tokens, {width} channels.", rows)
