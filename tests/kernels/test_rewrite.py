"""What the rank-one rewrite is for."""

from __future__ import annotations

import pytest
import torch

from tests.support.numbers import randn
from twoaxis.kernels import using
from twoaxis.kernels.rewrite import delta_rewrite


@pytest.mark.parametrize("form", ["reference", "eager"])
@pytest.mark.parametrize("channels", [1, 4])
def test_the_rewrite_is_a_delta_rule(channels: int, form: str) -> None:
    """Along k the state becomes v at β = 1; at β = 0 every bit stays; no direction, no change."""
    x, h, v = randn(2, 3, channels, 5), randn(2, 3, 5, seed=1), randn(2, 3, channels, seed=2)
    k = h / h.norm(dim=-1, keepdim=True)
    with using(form):
        after = delta_rewrite(x, h, torch.zeros(2, 3, dtype=torch.float64), v, k_eps=1e-12)
        torch.testing.assert_close((after * k.unsqueeze(-2)).sum(-1), v, rtol=1e-12, atol=1e-12)
        gate = torch.full((2, 3), -torch.inf, dtype=torch.float64)
        assert torch.equal(delta_rewrite(x, h, gate, v, k_eps=1e-12), x)
        assert torch.equal(delta_rewrite(x, torch.zeros_like(h), randn(2, 3), v, k_eps=1e-5), x)


def test_a_direction_of_zero_at_the_least_epsilon_has_finite_gradients() -> None:
    shapes = (3, 2, 8), (3, 8), (3,), (3, 2)
    leaves = [randn(*shape, seed=i, dtype=torch.float32) for i, shape in enumerate(shapes)]
    leaves[1].zero_()
    out = delta_rewrite(*(t.requires_grad_() for t in leaves), k_eps=1e-12)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.square().sum(), leaves))
    with pytest.raises(ValueError, match=r"k_eps=0.0: a direction of zero .* give at least 1e-12"):
        delta_rewrite(*leaves, k_eps=0.0)
