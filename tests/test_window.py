"""The operator against dense-masked attention, and the ring against the operator."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import twoaxis
from tests.support.decoders import SMALL
from tests.support.numbers import randn
from twoaxis import Decoder, document_reach, padding_reach, window_attention
from twoaxis.base.meter import Meter
from twoaxis.kernels.dispatch import target


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    documents: Tensor | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Dense-masked attention of (B, T, H, D): torch's own, or a spelled-out softmax where a sink is asked for."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    n, m = q.shape[2], k.shape[2]
    lag = torch.arange(m - n, m)[:, None] - torch.arange(m)[None, :]
    seen = (lag >= 0) & (lag < (window or m))
    if documents is not None:
        seen = seen & (documents[:, None, -n:, None] == documents[:, None, None, :])
    mask = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -torch.inf)
    if bias is not None:
        mask = mask + bias
    if sink is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)
    logits = q @ k.transpose(-2, -1) * (scale or q.shape[-1] ** -0.5) + mask
    top = torch.maximum(logits.amax(-1, keepdim=True), sink[:, None, None])
    mass = (logits - top).exp()
    return (mass @ v / (mass.sum(-1, keepdim=True) + (sink[:, None, None] - top).exp())).transpose(1, 2)


def same(ours: Tensor, theirs: Tensor, leaves: list[Tensor], bound: float = 1e-12) -> None:
    """Values and gradients in every leaf."""
    assert (ours - theirs).abs().max() <= bound
    probe = randn(*theirs.shape, seed=99)
    for a, b in zip(torch.autograd.grad(ours, leaves, probe), torch.autograd.grad(theirs, leaves, probe), strict=True):
        assert (a - b).abs().max() <= bound * max(1.0, b.abs().max().item())


@given(
    length=st.one_of(st.integers(1, 40), st.integers(100, 300)),
    extra=st.integers(0, 9),
    window=st.one_of(st.none(), st.integers(1, 40), st.just(500)),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    sink=st.booleans(),
    packed=st.booleans(),
    scale=st.sampled_from([None, 0.3]),
)
def test_equals_dense_masked_attention(
    length: int, extra: int, window: int | None, heads: tuple[int, int], sink: bool, packed: bool, scale: float | None
) -> None:
    query_heads, kv_heads = heads
    q = randn(2, length, query_heads, 4, seed=1).requires_grad_()
    k = randn(2, length + extra, kv_heads, 4, seed=2).requires_grad_()
    v = randn(2, length + extra, kv_heads, 5, seed=3).requires_grad_()
    leaves, sinks, documents, reach = [q, k, v], None, None, None
    if sink:
        sinks = randn(query_heads, seed=4).requires_grad_()
        leaves.append(sinks)
    if packed:
        generator = torch.Generator().manual_seed(length)
        documents = (torch.rand(2, length + extra, generator=generator) < 0.2).cumsum(-1)
        reach = document_reach(documents)[:, extra:]
    ours = window_attention(q, k, v, window, axis=1, scale=scale, sink=sinks, reach=reach)
    same(ours, oracle(q, k, v, window, scale=scale, documents=documents, sink=sinks), leaves)


@pytest.mark.parametrize("window", [None, 1, 3, 7])
def test_bias(window: int | None) -> None:
    q, k, v = (randn(2, 7, 2, 4, seed=s).requires_grad_() for s in range(3))
    bias = randn(2, 7, 7, seed=5).requires_grad_()
    same(window_attention(q, k, v, window, 1, bias=bias), oracle(q, k, v, window, bias=bias), [q, k, v, bias])


def test_padding_reach() -> None:
    assert padding_reach(torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])).tolist() == [
        [0, 0, 0, 1, 2],
        [0, 1, 2, 3, 4],
    ]
    with pytest.raises(ValueError, match="on the left"):
        padding_reach(torch.tensor([[1, 1, 0]]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "window must be a positive integer.*got 0"),
        ({"window": -3}, "got -3"),
        ({"axis": 2}, "axis 2 of a 4-dimensional tensor"),
        ({"axis": 7}, "axis 7"),
        ({"k": randn(2, 5, 3, 4), "v": randn(2, 5, 3, 4)}, "4 query heads cannot share 3 key heads"),
        ({"k": randn(2, 5, 2, 6)}, r"head widths of q \(4\) and k \(6\)"),
        ({"v": randn(2, 4, 2, 4)}, "k and v differ"),
        ({"q": randn(2, 9, 4, 4)}, "9 queries but 5 keys"),
        ({"q": randn(3, 5, 4, 4)}, "leading dimensions"),
    ],
)
def test_bad_input_is_refused_with_its_numbers(change: dict[str, object], message: str) -> None:
    arguments = {"q": randn(2, 5, 4, 4), "k": randn(2, 5, 2, 4), "v": randn(2, 5, 2, 4), "window": 2, "axis": 1}
    with pytest.raises(ValueError, match=message):
        twoaxis.window_attention(**(arguments | change))  # type: ignore[arg-type]


def test_a_bias_of_another_dtype_is_cast() -> None:
    q, k, v = (randn(2, 7, 2, 4, seed=s, dtype=torch.float32, grad=True) for s in range(3))
    bias = randn(2, 7, 7, seed=5, grad=True)
    out = window_attention(q, k, v, 3, 1, bias=bias)
    assert out.dtype == torch.float32
    same(out.double(), oracle(q.double(), k.double(), v.double(), 3, bias=bias), [q, k, v, bias], 1e-5)


@pytest.mark.parametrize("device", ["cpu", None])
@pytest.mark.parametrize("options", [{}, {"attention_windows": (16, None, None)}, {"mixer": "short_swa"}], ids=str)
def test_the_memory_of_a_decoder_is_linear_in_its_tokens(options: dict[str, Any], device: str | None) -> None:
    """With documents, both passes; counted on shapes without numbers."""
    with torch.device("meta"):
        model = Decoder(dataclasses.replace(SMALL, **options))

    def peak(length: int) -> int:
        ids, reach = (torch.zeros(1, length, dtype=torch.long, device="meta") for _ in range(2))
        with target(device), Meter() as meter:
            model(ids, reach=reach).sum().backward()
        return meter.peak

    assert peak(4096) <= 4.1 * peak(1024)
