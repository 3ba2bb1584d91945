"""What the operators on a history are, against sums written out, and their gradients in a chain of reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.numbers import close, randn
from twoaxis.kernels.history import query_read, rms_logits, softmax_read, source_dots, weighted_sum


@pytest.mark.parametrize("heads", [None, 1, 2])
def test_a_softmax_read_is_an_average_by_heads(heads: int | None) -> None:
    sources = [randn(2, 3, 6, seed=i, grad=True) for i in range(3)]
    logits = [randn(2, 3, *([] if heads is None else [heads]), seed=9 + i, grad=True) for i in range(3)]

    def naive(*tensors: Tensor) -> Tensor:
        weights = torch.stack(tensors[3:], -1).softmax(-1).unbind(-1)
        each = [w.unsqueeze(-1) if heads is None else w.repeat_interleave(6 // heads, -1) for w in weights]
        return torch.stack([3.0 * w * x for w, x in zip(each, tensors[:3], strict=True)]).sum(0)

    def ours(*tensors: Tensor) -> Tensor:
        return softmax_read(tensors[:3], tensors[3:], scale=3.0)

    close(ours(*sources, *logits), naive(*sources, *logits))
    probe = randn(2, 3, 6, seed=20)
    found, want = (torch.autograd.grad(f(*sources, *logits), (*sources, *logits), probe) for f in (ours, naive))
    for a, b in zip(found, want, strict=True):
        close(a, b)


@pytest.mark.parametrize("eps", [None, 0.1])
@pytest.mark.parametrize("heads", [1, 2])
def test_a_query_reads_normalised_sources(heads: int, eps: float | None) -> None:
    sources, query = [randn(2, 3, 6, seed=i) for i in range(3)], randn(heads, 6 // heads, seed=9)
    norms = [x if eps is None else x / (x.square().mean(-1, keepdim=True) + eps).sqrt() for x in sources]
    logits = [(n.unflatten(-1, (heads, -1)) * query).sum(-1) for n in norms]
    close(query_read(sources, query, eps=eps, scale=2.0), softmax_read(sources, logits, scale=2.0))
    close(rms_logits(sources[0], query[None], eps=eps)[..., 0], logits[0])
    close(source_dots(query.flatten()[None], norms)[..., 0, :].unsqueeze(-1), torch.stack(logits, -2).sum(-1, True))


def test_a_source_used_elsewhere_too_gets_both_gradients() -> None:
    x = torch.ones(3, requires_grad=True)
    (weighted_sum([x], static=torch.ones(1, 1))[0] + x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("sources", "weights", "message"),
    [
        ([], {"static": (1, 0)}, "at least one source, got 0"),
        ([(2, 3)], {}, "give static, token or channel"),
        ([(2, 3), (2, 4)], {"static": (1, 2)}, r"source 1 has shape \(2, 4\), source 0 has \(2, 3\)"),
        ([(2, 3)], {"token": (2, 1, 2)}, r"token weights have shape \(2, 1, 2\), these sources need \(2, 1, 1\)"),
        ([(2, 3)], {"channel": (1, 1, 2)}, r"channel weights have shape \(1, 1, 2\), these sources need \(1, 1, 3\)"),
        ([(2, 3)], {"token": (2, 1, 1), "static": (2, 1)}, r"token weights have shape .* need \(2, 2, 1\)"),
    ],
)
def test_weights_that_do_not_fit(sources: list[tuple[int, ...]], weights: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        weighted_sum([randn(*s) for s in sources], **{name: randn(*shape) for name, shape in weights.items()})
