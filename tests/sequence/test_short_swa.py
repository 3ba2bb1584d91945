from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.sequence.helpers import (
    check_decoder_chunks,
    check_decoder_documents,
    close,
    in_chunks,
    normal,
    randomise,
    same_start,
    small_decoder,
)
from twoaxis import Decoder, DecoderConfig, Seen, ShortSWA, document_reach, mixer, padding_reach


def made(width: int = 8, **options: Any) -> ShortSWA:
    local = ShortSWA(width, **options)
    randomise(local)
    return local


# The operator.


def test_gradients_reach_every_parameter() -> None:
    local, x = made(window=4, heads=4, kv_heads=2, sink=True, qk_norm=True), normal(2, 9, 8)
    (local(x) * normal(2, 9, 8, seed=1)).sum().backward()
    for name, parameter in local.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().min() > 0, name


def test_window_one_is_the_value_alone() -> None:
    for options in ({}, {"rope": False}, {"qk_norm": True}):
        local, x = made(window=1, heads=2, **options), normal(2, 7, 8)
        close(local(x), x @ local.value.weight.T @ local.output.weight.T)


def test_only_distances_count() -> None:
    local, x = made(window=4, heads=2), normal(2, 12, 8)
    close(local(x)[:, 8:], local(x[:, 5:])[:, 3:])


# Forms.


@pytest.mark.parametrize("options", [{}, {"sink": True, "qk_norm": True}], ids=str)
def test_branch_is_the_input_plus_the_residual_form(options: dict[str, Any]) -> None:
    residual, branch = made(window=3, heads=2, **options), made(window=3, heads=2, where="branch", **options)
    x = normal(2, 9, 8)
    assert torch.equal(branch(x), x + residual(x))


def test_points_and_places_in_the_decoder() -> None:
    residual = small_decoder(mixer="short_swa", mixer_options={"window": 3, "heads": 2})
    assert [site.kind for site in residual.stream.sites] == ["mixer", "attention", "mlp"] * 2
    branch = small_decoder(mixer="short_swa", mixer_options={"window": 3, "heads": 2, "where": "branch"})
    assert [site.kind for site in branch.stream.sites] == ["attention", "mlp"] * 2
    assert mixer("short_swa").points == ("site",)
    assert mixer("short_swa", where="branch").points == ("attention",)


def test_residual_form_is_the_papers_block() -> None:
    model = small_decoder(mixer="short_swa", mixer_options={"window": 3, "heads": 2}, blocks=1)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    h = model.embed(ids)
    p = dict(model.named_parameters())
    local: Any = model.blocks[0].mixer.local

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight

    s = h + local.definition(norm(h, p["blocks.0.norms.mixer.weight"][0]))
    attention: Any = model.blocks[0].attention
    mlp: Any = model.blocks[0].mlp
    info = model.info(ids, 0, None)
    a = s + attention(Seen(norm(s, p["blocks.0.norms.attention.weight"][0])), None, info)[0]
    out = a + mlp(Seen(norm(a, p["blocks.0.norms.mlp.weight"][0])), None, info)[0]
    close(model(ids), norm(out, p["final_norm.weight"]) @ p["embedding.weight"].T)


def test_thin_heads_count_and_cost() -> None:
    thin = ShortSWA(64, window=16, heads=2, head_width=8)
    assert tuple(thin.cost()) == (4 * 64 * 16, 8 * 64 * 16 + 4 * 16 * 16, 2 * 15 * 16)
    full = ShortSWA(64, window=16, heads=4)
    assert full.cost().parameters == 4 * 64 * 64
    grouped = ShortSWA(64, window=8, heads=4, kv_heads=1, sink=True, qk_norm=True)
    assert grouped.cost().parameters == 2 * 64 * 64 + 2 * 64 * 16 + 4 + 2 * 16
    assert grouped.cost().kept == 2 * 7 * 16
    _, ring = thin.step(torch.randn(3, 40, 64), thin.start())
    assert ring.nbytes() == 3 * 4 * thin.cost().kept


def test_starts() -> None:
    local = ShortSWA(64, window=4, heads=2, sink=True, qk_norm=True)
    assert not local.output.weight.any()
    for linear in (local.query, local.key, local.value):
        assert abs(linear.weight.std() - 0.02) < 0.002
    for parameter, value in ((local.sink, 0.0), (local.query_norm, 1.0), (local.key_norm, 1.0)):
        assert parameter is not None
        assert torch.equal(parameter, torch.full_like(parameter, value))
    local = ShortSWA(64, heads=2, start="normal")
    assert abs(local.output.weight.std() - 0.02) < 0.002


@pytest.mark.parametrize("where", ["residual", "branch"])
def test_zero_start_is_the_plain_decoder_to_the_bit(where: str) -> None:
    shape: dict[str, Any] = {"vocabulary": 17, "width": 8, "blocks": 2, "heads": 2}
    options = {"window": 3, "heads": 2, "where": where}
    same_start(
        Decoder(DecoderConfig(**shape, mixer="short_swa", mixer_options=options)), Decoder(DecoderConfig(**shape))
    )


# Chunks, documents, padding.


@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    window=st.integers(1, 9),
    options=st.sampled_from([{}, {"sink": True, "kv_heads": 1}, {"rope": False, "qk_norm": True, "where": "branch"}]),
)
def test_any_cut_into_chunks_equals_the_whole(lengths: list[int], window: int, options: dict[str, Any]) -> None:
    local, x = made(window=window, heads=2, **options), normal(2, sum(lengths), 8)
    y, ring = in_chunks(local, x, lengths)
    close(y, local(x))
    assert ring.stored == min(sum(lengths), window - 1)


@pytest.mark.parametrize("window", [1, 3, 5])
@pytest.mark.parametrize("repeats", [1, 6], ids=["dense", "banded"])
def test_packed_documents(window: int, repeats: int) -> None:
    local = made(window=window, heads=2, sink=True)
    documents = torch.tensor([[0, 0, 1, 2, 2, 2, 2, 3, 3], [0, 0, 0, 0, 0, 0, 1, 1, 2]]).repeat(1, repeats)
    documents = (documents.diff(dim=1, prepend=documents[:, :1]) != 0).cumsum(1)
    x = normal(*documents.shape, 8)
    reach = document_reach(documents)
    rows = [
        [local.definition(row[None, marks == mark]) for mark in marks.unique()]
        for row, marks in zip(x, documents, strict=True)
    ]
    want = torch.cat([torch.cat(parts, dim=1) for parts in rows])
    close(local(x, reach=reach), want)
    lengths = [len(part) for part in torch.arange(x.shape[1]).split(4)]
    close(in_chunks(local, x, lengths, reach)[0], want)


def test_left_padding() -> None:
    local, x = made(window=4, heads=2), normal(2, 6, 8)
    padded = torch.cat([normal(2, 3, 8, seed=8), x], dim=1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]] * 2)
    close(local(padded, reach=padding_reach(mask))[:, 3:], local(x))


def test_trim_and_reorder() -> None:
    local, x = made(window=4, heads=2), normal(2, 9, 8)
    _, ring = local.step(x[:, :6], local.start(spare=2))
    _, drafted = local.step(normal(2, 2, 8, seed=8), ring)
    close(local.step(x[:, 6:], drafted.trim(2))[0], local(x)[:, 6:])
    order = torch.tensor([1, 0, 1])
    close(local.step(x[order, 6:], ring.reorder(order))[0], local(x)[order, 6:])


@pytest.mark.parametrize("stream", ["standard", "deep_delta"])
@pytest.mark.parametrize("options", ShortSWA.variants, ids=str)
def test_decoder_chunks_documents_and_padding(stream: str, options: dict[str, Any]) -> None:
    model = small_decoder(mixer="short_swa", mixer_options=options, stream=stream)
    check_decoder_chunks(model)
    check_decoder_documents(model)


# Errors.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"heads": 0}, "heads must be at least 1, got 0"),
        ({"kv_heads": 0}, "kv_heads must be at least 1, got 0"),
        ({"head_width": -2}, "head_width must be at least 1, got -2"),
        ({"heads": 4, "kv_heads": 3}, r"kv_heads \(3\) must divide heads \(4\)"),
        ({"where": "qkv"}, "unknown where 'qkv'.*it is one of residual, branch"),
        ({"start": "uniform"}, "unknown start 'uniform'.*it is one of zero, normal"),
        ({"head_width": 3}, "rotary positions need an even head_width, got 3"),
        ({"windows": 3}, "did you mean 'window'"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mixer("short_swa", **options)


def test_bad_calls() -> None:
    with pytest.raises(ValueError, match=r"heads \(3\) must divide the width \(8\)"):
        ShortSWA(8, heads=3)
    with pytest.raises(ValueError, match="rotary positions need an even head width, got 3"):
        ShortSWA(6, heads=2)
    local = ShortSWA(8, heads=2)
    with pytest.raises(ValueError, match=r"shape \(1, 2, 6\), short_swa needs \(batch, time, 8\)"):
        local(torch.zeros(1, 2, 6))
    with pytest.raises(ValueError, match="not both: got window"):
        ShortSWA(8, local.config, window=3)
    with pytest.raises(ValueError, match="short_swa acts at site, not at 'attention'"):
        mixer("short_swa").build("attention", 8)


def test_a_bias_free_module_has_only_the_documented_parameters() -> None:
    names = [name for name, _ in ShortSWA(8, heads=2, sink=True, qk_norm=True).named_parameters()]
    assert sorted(names) == sorted(
        ["query.weight", "key.weight", "value.weight", "output.weight", "sink", "query_norm", "key_norm"]
    )
