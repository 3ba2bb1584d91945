"""Dynamic ShortConv: the static convolution it starts as, its filters by hand, and what is refused."""

from __future__ import annotations

import torch.nn.functional as F

from tests.support.numbers import close, randn
from twoaxis.sequence.dynamic_conv import DynamicConv


def test_starts_as_a_static_convolution_with_residual() -> None:
    local, x = DynamicConv(6, kernel=3).double(), randn(2, 9, 6)
    assert local.static is not None
    weight = local.static.flip(0).T.unsqueeze(1)  # a convolution has the current token's tap last
    close(local(x), x + F.conv1d(F.pad(x.mT, (2, 0)), weight, groups=6).mT)
    assert local.static.abs().max() <= 3**-0.5
