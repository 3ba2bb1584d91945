"""Attention Residuals: an outside oracle, the options one by one, and the published counts."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import twoaxis
from twoaxis.depth.attention_residuals import AttentionResiduals
from twoaxis.depth.compose import compose
from twoaxis.model.config import ModelConfig
from twoaxis.model.variant import make_contender


def make(blocks: int = 3, width: int = 8, *, spread: float = 0.5, **options: Any) -> AttentionResiduals:
    made = twoaxis.stream("attention_residuals", blocks=blocks, width=width, **options).double()
    assert isinstance(made, AttentionResiduals)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += spread * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return made


def run(stream: twoaxis.Stream, x: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Reads, increments and output with fixed random sub-layers."""
    generator = torch.Generator().manual_seed(4)
    state, reads, outs = stream.open(x), [], []
    for site in stream.sites:
        m = torch.randn(x.shape[-1], x.shape[-1], generator=generator, dtype=torch.float64) / 3
        seen = stream.read(state, site)
        reads.append(seen.x)
        outs.append(torch.tanh(seen.x @ m))
        state = stream.write(state, site, outs[-1], seen, seen)
    return reads, outs, stream.close(state)


@pytest.fixture(scope="module")
def naive_attnres() -> Callable[..., Tensor]:
    """flash-linear-attention's reference, loaded from its file: the package itself wants a GPU compiler."""
    pytest.importorskip("einops")
    found = importlib.util.find_spec("fla")
    if found is None or not found.submodule_search_locations:
        pytest.skip("flash-linear-attention is not installed")
    path = Path(found.submodule_search_locations[0]) / "ops" / "attnres" / "naive.py"
    spec = importlib.util.spec_from_file_location("fla_naive_attnres", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.naive_attnres


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_equals_flash_linear_attention(naive_attnres: Callable[..., Tensor], size: int, scale: float) -> None:
    stream = make(block_size=size, scale=scale)
    assert stream.query is not None
    assert stream.norm_weight is not None
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    reads, outs, out = run(stream, x)
    for index, read in enumerate([*reads, out]):
        bank = [x] + [sum(outs[i : i + size]) for i in range(0, index - index % size, size)]  # type: ignore[list-item]
        if index % size:
            bank.append(sum(outs[index - index % size : index]))  # type: ignore[arg-type]
        theirs = naive_attnres(stream.query[index], bank, stream.norm_weight[index], scale=scale)
        assert (read - theirs).abs().max() <= 2e-6  # the oracle computes in float32
        if index:
            ours_grad, their_grad = (
                torch.autograd.grad(t.square().sum(), [x, stream.query], retain_graph=True) for t in (read, theirs)
            )
            for a, b in zip(ours_grad, their_grad, strict=True):
                assert (a - b).abs().max() <= 2e-5 * max(1.0, b.abs().max().item())


def test_an_absent_partial_is_not_a_zero_source() -> None:
    stream = make(blocks=2, spread=0.0, block_size=2)
    x = torch.ones(1, 1, 8, dtype=torch.float64)
    run_ = compose(stream, [(s.kind, None, torch.zeros_like) for s in stream.sites])
    state = stream.open(x)
    assert torch.equal(stream.read(state, stream.sites[0]).x, x)
    assert run_(x)[0, 0, 0].item() == pytest.approx(1 / 3)  # the embedding and two finished zero sums


def test_mhar_is_four_heads() -> None:
    """An alias that stands for options gives way to those that are given, wherever a stream is named."""
    assert twoaxis.stream("mhar", blocks=2, width=8).config.heads == 4
    assert twoaxis.stream("MHAR", blocks=2, width=8, heads=2).config.heads == 2
    config = ModelConfig(stream="mhar:eps=0.1")
    assert (config.stream, config.stream_options) == ("attention_residuals", {"heads": 4, "eps": 0.1})
    assert make_contender("mhar").stream_options == {"heads": 4}


def test_the_controls_of_heads_are_one_head() -> None:
    """One as it is, and one whose logits are as large as those of a sum over a quarter of the channels."""
    config = AttentionResiduals.Config(heads=4, scale=2.0)
    assert AttentionResiduals.controls(config) == ({"heads": 1}, {"heads": 1, "scale": 1.0})
    assert AttentionResiduals.controls(AttentionResiduals.Config()) == ()
