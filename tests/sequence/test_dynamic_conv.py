"""Dynamic ShortConv: the static convolution it starts as, its filters by hand, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.sequence.helpers import small_decoder
from tests.support.numbers import close, randn
from twoaxis.sequence.dynamic_conv import DynamicConv


def test_starts_as_a_static_convolution_with_residual() -> None:
    local, x = DynamicConv(6, kernel=3).double(), randn(2, 9, 6)
    assert local.static is not None
    weight = local.static.flip(0).T.unsqueeze(1)  # a convolution has the current token's tap last
    close(local(x), x + F.conv1d(F.pad(x.mT, (2, 0)), weight, groups=6).mT)
    assert local.static.abs().max() <= 3**-0.5


@pytest.mark.parametrize("heads", [None, 1])
def test_filters_by_hand(heads: int | None) -> None:
    """One number per token makes the filter: here its own input, for the lag of one token alone."""
    local = DynamicConv(1, kernel=2, rank=1, heads=heads, where="residual").double()
    with torch.no_grad():
        for parameter in local.parameters():
            parameter.fill_(1.0)
        local.proj_out.copy_(torch.tensor([0.0, 1.0]).view(1, 2, 1))  # lags 0 and 1
        assert local.static is not None
        local.static.copy_(torch.tensor([[0.0], [100.0]]))
    x = torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64).view(1, 3, 1)
    assert local(x).flatten().tolist() == [0.0, (3 + 100) * 2, (5 + 100) * 3]


def test_the_ring_keeps_one_input_less_than_the_kernel() -> None:
    local, x = DynamicConv(6, kernel=4).double(), randn(2, 9, 6)
    _, ring = local.step(x, local.start())
    assert torch.equal(ring.tensors()[0], x[:, -3:])
    assert local.cost() == (15 * 6 + 15 * 4 * 6 + 4 * 6, 2 * (15 * 6 + 15 * 4 * 6) + 16 * 6 + 6, 3 * 6)


def test_points_and_channels() -> None:
    found = {}
    for where in ("qkv", "linear", "branch", "residual"):
        model = small_decoder(mixer="dynamic_conv", mixer_options={"where": where})
        found[where] = [m.channels for m in model.layers[0].modules() if isinstance(m, DynamicConv)]
    hidden = 2 * model.config.hidden_width(0)
    assert found == {"qkv": [16], "linear": [16, hidden], "branch": [8], "residual": [8]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 4}, r"heads \(4\) must divide the channels \(6\)"),
        ({"start": "zero", "residual": False}, "silences the branch"),
        ({"start": "identity"}, "doubles the input"),
        ({"start": "zero", "static": False}, "speaks of static filters"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DynamicConv(6, **options)
    with pytest.raises(ValueError, match="no neutral parameters"):
        DynamicConv(6, residual=False, static=False).neutral_()
