from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.sequence.helpers import (
    all_close,
    check_decoder_chunks,
    check_decoder_documents,
    close,
    in_chunks,
    normal,
    randomise,
    same_start,
    small_decoder,
)
from tests.support.commands import run_child
from twoaxis import Decoder, DecoderConfig, Ring, document_reach, mixer, padding_reach
from twoaxis.kernels.taps import depthwise_taps, depthwise_taps_reference
from twoaxis.sequence.short_conv import ShortConv

FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"activation": "none"},
    {"bias": True},
    {"where": "branch"},
    {"where": "branch", "residual": False, "bias": True, "activation": "none"},
    {"where": "qkv"},
    {"where": "qkv", "residual": True, "bias": True},
)


def made(channels: int = 6, seed: int = 1, **options: Any) -> ShortConv:
    local = ShortConv(channels, **options)
    randomise(local, seed=seed)
    return local


# The operator.


@pytest.mark.parametrize("bias", [False, True])
def test_nn_conv1d_takes_the_state_dict_as_it_is(bias: bool) -> None:
    local, x = made(kernel=4, activation="none", bias=bias), normal(2, 9, 6)
    conv = nn.Conv1d(6, 6, 4, groups=6, padding=3, bias=bias).double()
    conv.load_state_dict(local.state_dict())
    close(local(x), conv(x.mT)[..., :9].mT)


def test_the_last_tap_is_the_current_token() -> None:
    local = ShortConv(2, kernel=3, activation="none").double()
    with torch.no_grad():
        local.weight.copy_(torch.tensor([[[100.0, 10.0, 1.0]], [[-3.0, 0.0, 2.0]]]))
    x = torch.tensor([[[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [4.0, 4.0]]], dtype=torch.float64)
    want = [[1.0, 2.0], [12.0, 4.0], [123.0, 3.0], [234.0, 2.0]]
    assert torch.equal(local(x), torch.tensor([want], dtype=torch.float64))


def test_own_backward_equals_the_reference_and_its_second_derivatives() -> None:
    history, weight = normal(2, 8, 3, grad=True), normal(3, 4, seed=1, grad=True)
    reach = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 0, 1, 2]])
    g = normal(2, 5, 3, seed=2)
    for mask in (None, reach):
        ours, theirs = depthwise_taps(history, weight, mask), depthwise_taps_reference(history, weight, mask)
        close(ours, theirs, 1e-14)
        got, want = (torch.autograd.grad((y * g).sum(), (history, weight)) for y in (ours, theirs))
        all_close(got, want, 1e-14)
        assert torch.autograd.gradgradcheck(lambda h, w, m=mask: depthwise_taps(h, w, m), (history, weight))


def test_gradient_of_one_argument_only() -> None:
    history, weight, g = normal(1, 6, 3), normal(3, 4, seed=1), normal(1, 3, 3, seed=2)
    for which in (0, 1):
        args = [t.clone().requires_grad_(i == which) for i, t in enumerate((history, weight))]
        got, want = (
            torch.autograd.grad((f(*args) * g).sum(), args[which])[0]
            for f in (depthwise_taps, depthwise_taps_reference)
        )
        close(got, want, 1e-14)


def test_bfloat16_is_computed_in_float32_and_cast_once() -> None:
    local = made(where="branch", bias=True).to(torch.bfloat16)
    x = normal(2, 9, 6).to(torch.bfloat16)
    wide = made(where="branch", bias=True)
    wide.load_state_dict(local.state_dict())
    want = wide.float()(x.float())
    assert local(x).dtype == torch.bfloat16
    assert torch.equal(local(x), want.to(torch.bfloat16))
    local(x).float().sum().backward()
    assert local.weight.grad is not None
    assert local.weight.grad.dtype == torch.bfloat16


# Against flash-linear-attention, its kernels run by Triton's interpreter.


@pytest.mark.slow
def test_equals_flash_linear_attention() -> None:
    for package in ("triton", "fla", "einops"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(
                f"{package} is not installed; the package's convolution is Triton only, interpreted here on the CPU"
            )
    done = run_child(program=("-m", "tests.sequence.fla_oracle"), TRITON_INTERPRET="1")
    assert done.code == 0, done.err[-2000:]
    errors = json.loads(done.out.splitlines()[-1])
    assert len(errors) == 25, errors
    assert max(errors.values()) < 1e-6, errors


# Chunks, documents, padding, the ring.


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    kernel=st.integers(1, 6),
    form=st.sampled_from(FORMS),
    spare=st.integers(0, 3),
)
def test_any_cut_into_chunks_equals_the_whole(
    lengths: list[int], kernel: int, form: dict[str, Any], spare: int
) -> None:
    local, x = made(kernel=kernel, **form), normal(2, sum(lengths), 6)
    y, ring = in_chunks(local, x, lengths, past=local.start(spare))
    close(y, local(x), 1e-14)
    assert ring.stored == min(sum(lengths), kernel - 1 + spare)


@given(cuts=st.lists(st.integers(1, 4), min_size=1, max_size=5), kernel=st.integers(1, 5), chunk=st.integers(1, 6))
def test_packed_documents_equal_separate_runs(cuts: list[int], kernel: int, chunk: int) -> None:
    local, x = made(kernel=kernel, bias=True), normal(1, sum(cuts), 6)
    numbers = torch.cat([torch.full((n,), i) for i, n in enumerate(cuts)])[None]
    want = torch.cat([local(part) for part in x.split(cuts, dim=1)], dim=1)
    reach = document_reach(numbers)
    close(local(x, reach=reach), want, 1e-14)
    lengths = [len(part) for part in torch.arange(sum(cuts)).split(chunk)]
    close(in_chunks(local, x, lengths, reach)[0], want, 1e-14)


def test_left_padding_equals_the_unpadded_run() -> None:
    local, x = made(where="branch"), normal(2, 6, 6)
    junk = torch.full((2, 3, 6), float("nan"), dtype=torch.float64)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]] * 2)
    y = local(torch.cat([junk, x], dim=1), reach=padding_reach(mask))
    close(y[:, 3:], local(x), 1e-14)
    uneven = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    y = local(normal(2, 4, 6), reach=padding_reach(uneven))
    close(y[0, 2:], local(normal(2, 4, 6)[:1, 2:])[0], 1e-14)
    close(y[1], local(normal(2, 4, 6)[1:])[0], 1e-14)


def test_gradients_stop_at_documents() -> None:
    local, x = made(), normal(1, 5, 6, grad=True)
    reach = document_reach(torch.tensor([[0, 0, 1, 1, 1]]))
    (grad,) = torch.autograd.grad(local(x, reach=reach)[:, 2:].sum(), x)
    assert torch.equal(grad[:, :2], torch.zeros_like(grad[:, :2]))
    assert grad[:, 2:].abs().min() > 0


def test_the_ring_keeps_one_input_less_than_the_kernel() -> None:
    local, x = made(kernel=4), normal(2, 9, 6)
    _, ring = local.step(x, local.start())
    assert (ring.stored, ring.seen, ring.nbytes()) == (3, 9, 2 * 3 * 6 * 8)
    assert torch.equal(ring.tensors()[0], x[:, -3:])
    assert local.cost().kept * 2 * 8 == ring.nbytes()
    one = made(kernel=1)
    assert one.step(x, one.start())[1].stored == 0


def test_trim_takes_tokens_back_and_old_rings_stay_valid() -> None:
    local, x, draft = made(), normal(2, 7, 6), normal(2, 4, 6, seed=9)
    _, before = local.step(x[:, :5], local.start(spare=4))
    _, after = local.step(draft, before)
    for ring in (before, after.trim(4)):
        close(local.step(x[:, 5:], ring)[0], local(x)[:, 5:], 1e-14)
    half = after.trim(2)
    want = local(torch.cat([x[:, :5], draft[:, :2], x[:, 5:]], dim=1))[:, 7:]
    close(local.step(x[:, 5:], half)[0], want, 1e-14)
    _, bare = local.step(x, local.start())
    with pytest.raises(ValueError, match="cannot trim 2 positions: 1 would remain and a window of 4 needs 3"):
        bare.trim(2)


def test_reorder_and_repeat_the_batch() -> None:
    local, x = made(), normal(3, 6, 6)
    _, ring = local.step(x[:, :4], local.start())
    order = torch.tensor([2, 0, 0])
    close(local.step(x[order, 4:], ring.reorder(order))[0], local(x[order])[:, 4:], 1e-14)
    twice = x.repeat_interleave(2, 0)
    close(local.step(twice[:, 4:], ring.repeat(2))[0], local(twice)[:, 4:], 1e-14)


# Initial values and cost.


def test_starts() -> None:
    assert [mixer("short_conv", where=w).config.resolved_start for w in ("residual", "branch", "qkv")] == [
        "zero",
        "zero",
        "uniform",
    ]
    for kernel in (1, 4, 9):
        local = ShortConv(4096, kernel=kernel, bias=True, start="uniform")
        bound = kernel**-0.5
        for parameter in local.parameters():
            assert 0.99 * bound < parameter.max() <= bound
            assert -bound <= parameter.min() < -0.99 * bound
            assert abs(parameter.std() - bound / 3**0.5) < 0.03 * bound
    local = ShortConv(3, where="qkv", activation="none", start="identity", bias=True)
    x = torch.randn(2, 5, 3)
    assert torch.equal(local(x), x)
    generator = torch.Generator().manual_seed(3)
    uniform = ShortConv(3, start="uniform")
    uniform.reset_parameters(0.02, generator)
    first = uniform.weight.clone()
    uniform.reset_parameters(0.02, generator.manual_seed(3))
    assert torch.equal(first, uniform.weight)


def test_a_zero_start_still_learns() -> None:
    local, x = ShortConv(6, bias=True).double(), normal(2, 5, 6)
    assert torch.equal(local(x), torch.zeros_like(x))
    (local(x) * normal(2, 5, 6, seed=1)).sum().backward()
    for parameter in local.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().min() > 0


@pytest.mark.parametrize("where", ["residual", "branch"])
def test_default_start_is_the_plain_decoder_to_the_bit(where: str) -> None:
    shape: dict[str, Any] = {"vocabulary": 17, "width": 8, "blocks": 2, "heads": 2}
    with_mixer = Decoder(DecoderConfig(**shape, mixer="short_conv", mixer_options={"where": where}))
    same_start(with_mixer, Decoder(DecoderConfig(**shape)))


@pytest.mark.parametrize(
    ("options", "parameters", "flops", "kept"),
    [
        ({}, 4 * 10, 8 * 10, 30),
        ({"kernel": 3, "bias": True}, 4 * 10, 7 * 10, 20),
        ({"kernel": 2, "where": "branch", "bias": True}, 3 * 10, 6 * 10, 10),
        ({"kernel": 1, "where": "qkv"}, 10, 20, 0),
    ],
)
def test_cost(options: dict[str, Any], parameters: int, flops: int, kept: int) -> None:
    local = ShortConv(10, **options)
    assert tuple(local.cost()) == (parameters, flops, kept)
    assert local.weight.shape == (10, 1, local.config.kernel)


# In the decoder.


@pytest.mark.parametrize(
    "stream",
    [
        {"stream": "standard"},
        {"stream": "deep_delta"},
        {"stream": "deep_delta", "stream_options": {"value_channels": 2, "compress": "token", "expand": "conv"}},
        {"stream": "standard", "block": "parallel"},
    ],
    ids=str,
)
@pytest.mark.parametrize("options", ShortConv.variants, ids=str)
def test_decoder_chunks_documents_and_padding(stream: dict[str, Any], options: dict[str, Any]) -> None:
    model = small_decoder(mixer="short_conv", mixer_options=options, **stream)
    check_decoder_chunks(model)
    check_decoder_documents(model)


def test_points_and_channels() -> None:
    shape: dict[str, Any] = {"width": 8, "heads": 2, "kv_heads": 1}
    found = {}
    for where in ("residual", "branch", "qkv"):
        model = small_decoder(mixer="short_conv", mixer_options={"where": where, "kernel": 3}, **shape)
        found[where] = {n: m.channels for n, m in model.named_modules() if isinstance(m, ShortConv)}
    assert found["residual"] == {f"blocks.{b}.mixer.local": 8 for b in (0, 1)}
    assert found["branch"] == {f"blocks.{b}.attention.points.locals.attention": 8 for b in (0, 1)}
    assert found["qkv"] == {f"blocks.{b}.attention.points.locals.qkv": 16 for b in (0, 1)}
    some = small_decoder(mixer="short_conv", mixer_blocks=(1,))
    assert [site.kind for site in some.stream.sites] == ["attention", "mlp", "mixer", "attention", "mlp"]


def test_qkv_is_three_convolutions_on_the_projections() -> None:
    model = small_decoder(mixer="short_conv", mixer_options={"where": "qkv", "kernel": 3}, blocks=1)
    attention: Any = model.blocks[0].attention
    joined = attention.points.locals["qkv"].weight  # q: 8, k: 4, v: 4 channels
    x = normal(2, 6, 8)

    def branch(linear: nn.Linear, weight: Tensor) -> Tensor:
        y = F.conv1d(F.pad(linear(x).transpose(1, 2), (2, 0)), weight, groups=len(weight))
        return F.silu(y).transpose(1, 2)

    weights = joined.split([8, 4, 4])
    q, k, v = (
        branch(lin, w) for lin, w in zip((attention.query, attention.key, attention.value), weights, strict=True)
    )
    got = attention.points.run(
        "qkv", torch.cat([f(x) for f in (attention.query, attention.key, attention.value)], -1), None, None
    )
    close(got, torch.cat([q, k, v], dim=-1))


# Errors.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": 0}, "kernel must be at least 1, got 0"),
        ({"kernel": 2.0}, "got 2.0"),
        ({"kernel": True}, "got True"),
        ({"activation": "relu"}, "unknown activation 'relu'.*it is one of silu, none"),
        ({"where": "mlp"}, "unknown where 'mlp'.*it is one of residual, branch, qkv"),
        ({"start": "normal"}, "unknown start 'normal'.*it is one of uniform, zero, identity"),
        ({"bias": 2}, "bias must be True or False, got 2"),
        ({"residual": True}, "adds the input twice"),
        ({"where": "qkv", "start": "zero"}, "silences the attention"),
        ({"where": "branch", "start": "identity"}, "doubles the input"),
        ({"kernal": 3}, "did you mean 'kernel'"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mixer("short_conv", **options)


def test_bad_calls() -> None:
    local = ShortConv(6)
    with pytest.raises(ValueError, match=r"shape \(2, 3, 5\), short_conv needs \(batch, time, 6\)"):
        local(torch.zeros(2, 3, 5))
    with pytest.raises(ValueError, match=r"shape \(3, 6\)"):
        local(torch.zeros(3, 6))
    with pytest.raises(ValueError, match="window 3, short_conv here sees 4"):
        local.step(torch.zeros(1, 2, 6), Ring(3, axis=1))
    with pytest.raises(ValueError, match="reach covers 5 tokens, the input has 2"):
        local(torch.zeros(1, 2, 6), reach=torch.zeros(1, 5, dtype=torch.long))
    with pytest.raises(ValueError, match="channels must be a positive integer, got 0"):
        ShortConv(0)
    with pytest.raises(ValueError, match="not both: got kernel"):
        ShortConv(6, local.config, kernel=3)
    with pytest.raises(ValueError, match="short_conv acts at site, not at 'qkv'"):
        mixer("short_conv").build("qkv", 6)
