"""The operators: a softmax read over depth, windowed attention over time, the depthwise convolution.

Each is held against the copy limit, the time of a plain copy that moves as many bytes as the operator must at least
read and write, and against the form one would write first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.scale import Scale
from benchmarks.tables import Table, timed
from benchmarks.timing import Run, exponent, interleave
from twoaxis import window_attention
from twoaxis.kernels.taps import depthwise_taps
from twoaxis.kernels.weighted_sum import rms_logits, source_dots, weighted_sum

Read = Callable[[Sequence[Tensor], Tensor], Tensor]


def copy(numbers: int) -> Run:
    """Move `numbers` float32 numbers: half of them read, half of them written."""
    source = torch.ones(max(1, numbers // 2))
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def naive_read(sources: Sequence[Tensor], query: Tensor) -> Tensor:
    """Stack and einsum; a query for all tokens (D,) or one for each (N, D)."""
    states = torch.stack(list(sources))
    weights = torch.einsum("snd,d->sn" if query.dim() == 1 else "snd,nd->sn", states, query).softmax(0)
    return torch.einsum("sn,snd->nd", weights, states)


def fused_read(sources: Sequence[Tensor], query: Tensor) -> Tensor:
    """The library's: logits, then the weighted sum over a list of sources."""
    if query.dim() == 1:
        u = query.view(1, 1, -1)
        logits = torch.cat([rms_logits(s, u, None)[:, 0] for s in sources], dim=-1)
    else:
        logits = source_dots(query.unsqueeze(-2), sources).squeeze(-2)
    return weighted_sum(sources, token=logits.softmax(-1).unsqueeze(-2))[0]


def depth_reads(scale: Scale) -> Table:
    """Softmax reads over 16 and 64 sources, forward and with backward, against the copy limit."""
    tokens, width = scale.read
    rows = {}
    for count in scale.sources:
        sources = [torch.randn(tokens, width, requires_grad=True) for _ in range(count)]
        for kind, shape in (("one query", (width,)), ("a query per token", (tokens, width))):
            query = (torch.randn(shape) / width**0.5).requires_grad_()
            compiled = None if scale.quick or count > 16 else torch.compile(fused_read, fullgraph=True)
            for form, read in (("stack + einsum", naive_read), ("twoaxis", fused_read), ("compiled", compiled)):
                if read is not None:
                    rows[f"{count} sources, {kind}: {form}"] = _read_row(read, sources, query, scale.rounds)
    note = f"{tokens} tokens of width {width}; bytes that must move: S+1 states forward, 3S+2 with backward."
    return Table("Softmax read over depth, times the copy limit", note, rows)


def _read_row(read: Read, sources: list[Tensor], query: Tensor, rounds: int) -> dict[str, float]:
    count, size = len(sources), sources[0].numel()
    grad = torch.randn_like(sources[0])

    def forward() -> None:
        with torch.no_grad():
            read(sources, query)

    def both() -> None:
        for leaf in (*sources, query):
            leaf.grad = None
        read(sources, query).backward(grad)

    row = {}
    for column, run, states in (("forward", forward, count + 1), ("forward + backward", both, 3 * count + 2)):
        timing = interleave({"copy": copy(states * size), "read": run}, rounds)["read"]
        row |= timed(timing, column)
    return row


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
    (q, k, v), grad = leaves(length)

    def full() -> None:
        fused_attention(q, k, v, is_causal=True).backward(grad)

    contenders: dict[str, Run] = {"full causal": full, "copy": copy(12 * q.numel())}
    for window in (4, 16, 128):
        contenders[f"w={window}"] = _windowed(q, k, v, grad, window, window_attention)
        if not scale.quick and window <= 16:
            compiled = torch.compile(window_attention, fullgraph=True)
            contenders[f"w={window}, compiled"] = _windowed(q, k, v, grad, window, compiled)
    timings = interleave(contenders, max(3, scale.rounds // 2))
    for name, timing in timings.items():
        rows[name] = {
            "times faster than full": 1 / timing.ratio,
            "times the copy": timing.milliseconds / timings["copy"].milliseconds,
        }
    rows["w=16"]["exponent of T"] = window_growth(scale)
    note = f"8 heads of 64, T = {length}, forward + backward; the exponent is 1 where time is linear in T."
    return Table("Windowed attention", note, rows)


def _windowed(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, window: int, attend: Callable[..., Tensor]) -> Run:
    return lambda: attend(q, k, v, window, 1).backward(grad)


def window_growth(scale: Scale) -> float:
    """The exponent of T in the time of a window of 16."""
    lengths = [scale.window_length // 4, scale.window_length // 2, scale.window_length]
    runs = {}
    for length in lengths:
        (q, k, v), grad = leaves(length)
        runs[str(length)] = _windowed(q, k, v, grad, 16, window_attention)
    found = interleave(runs, scale.rounds)
    return exponent(lengths, [found[str(length)].ratio for length in lengths])


def convolutions(scale: Scale) -> Table:
    """The causal depthwise convolution of four taps against nn.Conv1d and the copy limit."""
    tokens, width = scale.read
    history, weight = torch.randn(1, tokens + 3, width).requires_grad_(), torch.randn(width, 4).requires_grad_()
    grad = torch.randn(1, tokens, width)

    def conv1d() -> Tensor:
        return F.conv1d(history.mT, weight.unsqueeze(1), groups=width).mT

    def taps() -> Tensor:
        return depthwise_taps(history, weight)

    rows: dict[str, dict[str, float]] = {}
    for column, units in (("forward", 2), ("forward + backward", 5)):
        contenders: dict[str, Run] = {"copy": copy(units * grad.numel())}
        for name, form in (("nn.Conv1d", conv1d), ("twoaxis", taps)):
            contenders[name] = _forward(form) if units == 2 else _both(form, grad)
        for name, timing in interleave(contenders, scale.rounds).items():
            if name != "copy":
                rows[name] = rows.get(name, {}) | timed(timing, column)
    return Table("Depthwise convolution of 4 taps, times the copy limit", f"{tokens} tokens, {width} channels.", rows)


def _forward(form: Callable[[], Tensor]) -> Run:
    def run() -> None:
        with torch.no_grad():
            form()

    return run


def _both(form: Callable[[], Tensor], grad: Tensor) -> Run:
    return lambda: form().backward(grad)
