from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.sequence.helpers import randomise
from tests.support.commands import run_child
from tests.support.numbers import close, randn
from twoaxis import mixer
from twoaxis.sequence.dynamic_conv import DynamicConv
from twoaxis.sequence.short_conv import ShortConv


def made(channels: int = 6, seed: int = 1, **options: Any) -> ShortConv:
    local = ShortConv(channels, **options)
    randomise(local, seed=seed)
    return local


# The operator.


@pytest.mark.parametrize("bias", [False, True])
def test_nn_conv1d_takes_the_state_dict_as_it_is(bias: bool) -> None:
    local, x = made(kernel=4, activation="none", bias=bias), randn(2, 9, 6)
    conv = nn.Conv1d(6, 6, 4, groups=6, padding=3, bias=bias).double()
    conv.load_state_dict(local.state_dict())
    close(local(x), conv(x.mT)[..., :9].mT)


def test_dynamic_filters_start_as_a_static_convolution_with_residual() -> None:
    local, x = DynamicConv(6, kernel=3).double(), randn(2, 9, 6)
    assert local.static is not None
    weight = local.static.flip(0).T.unsqueeze(1)  # a convolution has the current token's tap last
    close(local(x), x + F.conv1d(F.pad(x.mT, (2, 0)), weight, groups=6).mT)
    assert local.static.abs().max() <= 3**-0.5


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


# Initial values.


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
    uniform.reset_parameters(generator)
    first = uniform.weight.clone()
    uniform.reset_parameters(generator.manual_seed(3))
    assert torch.equal(first, uniform.weight)


# In the decoder.
