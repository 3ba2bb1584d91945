"""Delta Attention Residuals: what its sources are, by hand, and what is refused. Its numbers: tests/verify."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import twoaxis


def walk(blocks: int = 4, **options: Any) -> tuple[twoaxis.Stream, list[list[Tensor]], list[Tensor]]:
    """The sources before each site and the residuals, of increments that are powers of ten."""
    stream = twoaxis.stream("delta_attention_residuals", blocks=blocks, width=2, **options).double()
    x = torch.ones(1, 1, 2, dtype=torch.float64)
    state, sources, residuals = stream.open(x), [], [x]
    for site in stream.sites:
        sources.append([source.x for source in state.value.kept])
        seen = stream.read(state, site)
        state = stream.write(state, site, x * 10.0 ** (site.index + 1), seen, seen)
        residuals.append(residuals[-1] + x * 10.0 ** (site.index + 1))
    assert torch.equal(stream.close(state), residuals[-1])  # the residual is the output, whatever was routed
    return stream, sources, residuals


def test_the_released_difference_is_of_the_state_and_the_last_source() -> None:
    """d_1 = h_1 - d_0 is an increment, d_2 = h_2 - d_1 is one and the embedding, d_3 = h_3 - d_2 ..."""
    stream, sources, h = walk(block_size=2, delta="recursive")
    d = [h[0]]
    for n in (1, 2, 3):
        d.append(h[2 * n] - d[-1])
    assert [s[0, 0, 0].item() for s in sources[7]] == [s[0, 0, 0].item() for s in d] == [1, 110, 11001, 1100110]
    # a source is known one sub-layer after it is complete
    assert [len(stream.sources(site)) for site in stream.sites] == [0, 1, 1, 2, 2, 3, 3, 4]


def test_a_run_hands_on_its_own_increment() -> None:
    stream, sources, h = walk(block_size=2)
    assert torch.equal(torch.stack(sources[6]), torch.stack([h[0], h[2] - h[0], h[4] - h[2], h[6] - h[4]]))
    assert [len(stream.sources(site)) for site in stream.sites] == [0, 1, 2, 2, 3, 3, 4, 4]
    assert stream.sources(stream.layout.out) == ()


def test_a_null_source_takes_its_part() -> None:
    """Queries of zero weigh all alike: one of three parts is nothing."""
    stream = twoaxis.stream("delta_attention_residuals", blocks=2, width=4, null=True).double()
    x = torch.randn(1, 2, 4, dtype=torch.float64)
    state = stream.open(x)
    seen = stream.read(state, stream.sites[0])
    assert torch.equal(seen.x, x)
    state = stream.write(state, stream.sites[0], 2 * x, seen, seen)
    torch.testing.assert_close(stream.read(state, stream.sites[1]).x, 3 * x + (x + 2 * x) / 3)
    assert stream.sources(stream.sites[1]) == ("null", "embedding", "sub-layer 0")
