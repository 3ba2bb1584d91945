"""`compose`: strangers' sub-layers through any stream."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twoaxis
from twoaxis.depth.site import Site
from twoaxis.depth.standard import Standard
from twoaxis.depth.stream import Layout, Seen


def tanhs(stream: twoaxis.Stream) -> list[Any]:
    """A sub-layer without weights at every site, whatever its ways."""
    return [(site.kind, None, lambda *ways: torch.tanh(torch.stack(ways).sum(0))) for site in stream.sites]


class Attend(nn.Module):
    """One head; `mask` is added to its logits, and `kv` changes its keys and values."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor | None = None, *, kv: Callable[..., Any] | None = None) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        k, v = (k, v) if kv is None else kv(q, k, v)
        return nn.functional.scaled_dot_product_attention(q, k, v, mask)


class Apart(Attend):
    """The same with a way for each projection."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return nn.functional.scaled_dot_product_attention(self.q(q), self.k(k), self.v(v), mask)


class MLP(nn.Linear):
    """A function that takes nothing but its read."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.tanh(super().forward(input))


def layers(blocks: int = 2, attention: type[Attend] = Attend) -> list[Any]:
    return [
        layer
        for _ in range(blocks)
        for layer in (("attention", nn.LayerNorm(8), attention()), ("mlp", nn.LayerNorm(8), MLP(8, 8)))
    ]


def test_a_keyword_reaches_the_sublayers_that_take_it() -> None:
    run, x = twoaxis.compose(twoaxis.stream("standard", blocks=2, width=8), layers()), torch.randn(2, 5, 8)
    mask = torch.full((5, 5), -torch.inf).triu(1)
    out = run(x, mask=mask)
    assert not torch.allclose(out, run(x))
    torch.testing.assert_close(run(x[:, :3], mask=mask[:3, :3]), out[:, :3])
    with pytest.raises(ValueError, match="no sub-layer takes the keyword 'msk'"):
        run(x, msk=mask)


def test_keywords_are_bound_to_one_sublayer() -> None:
    stream, given, mask = twoaxis.stream("standard", blocks=2, width=8), layers(), torch.zeros(5, 5)
    mask[:, 4] = -torch.inf
    kind, norm, attend = given[2]
    run = twoaxis.compose(stream, [*given[:2], (kind, norm, attend, {"mask": mask}), given[3]])
    x = torch.randn(1, 5, 8)
    both, first = twoaxis.compose(stream, given)(x, mask=mask), run(x)
    assert not torch.allclose(both, first)
    torch.testing.assert_close(run(x, mask=mask), both)
    with pytest.raises(ValueError, match="mlp of block 0 does not take the keyword 'mask' that is bound to it"):
        twoaxis.compose(stream, [given[0], (*given[1], {"mask": mask}), *given[2:]])


def test_separate_ways_are_checked_when_composing() -> None:
    stream = twoaxis.stream("muddformer", blocks=2, width=8)
    with pytest.raises(ValueError, match="muddformer gives q, k, v separately to the attention of block 1, and its"):
        twoaxis.compose(stream, layers())
    given = [*layers(1), *layers(1, Apart)]
    assert twoaxis.compose(stream, given)(torch.randn(2, 5, 8), mask=torch.zeros(5, 5)).shape == (2, 5, 8)
    partial = functools.partial(Apart().forward, torch.zeros(2, 5, 8))  # q is given: two ways are left
    with pytest.raises(ValueError, match="its function takes 2 of them: write it for 3 arguments"):
        twoaxis.compose(stream, [*given[:2], ("attention", None, partial), given[3]])


def test_every_weight_has_one_name() -> None:
    stream, norm, layer = twoaxis.stream("denseformer", blocks=2, width=8), nn.LayerNorm(8), Attend()
    given = [
        ("attention", norm, layer.forward),
        ("mlp", norm, layer.q),
        ("attention", norm, layer),
        ("mlp", None, torch.tanh),
    ]
    names = list(twoaxis.compose(stream, given).state_dict())
    assert [n for n in names if not n.startswith("stream.")] == [
        *("norms.0.weight", "norms.0.bias"),
        *(f"functions.0.{way}.{leaf}" for way in "qkv" for leaf in ("weight", "bias")),
    ]


class Model(nn.Module):
    """Keeps its sub-layers, and composes in `__init__` if it is told to."""

    def __init__(self, wrap: Callable[[Attend], Any], keep: bool, first: bool = True) -> None:
        super().__init__()
        attend, stream = Attend(), twoaxis.stream("standard", blocks=1, width=8)
        if keep and first:
            self.attend = attend
        self.run = twoaxis.compose(stream, [("attention", None, wrap(attend)), ("mlp", None, torch.tanh)])
        if keep and not first:
            self.attend = attend


def whole(attend: Attend) -> Attend:
    return attend


def method(attend: Attend) -> Any:
    return attend.forward


def closure(attend: Attend) -> Any:
    return lambda x: attend(x)


def default(attend: Attend) -> Any:
    def run(x: Tensor, inner: Attend = attend) -> Tensor:
        return inner(x)

    return run


def test_a_model_has_its_weights_once_or_is_refused() -> None:
    assert len(Model(whole, keep=False).state_dict()) == len(Model(method, keep=False).state_dict()) == 6
    for wrap in (whole, method):
        for first in (True, False):
            with pytest.raises(ValueError, match="Model would hold the same weights twice"):
                Model(wrap, keep=True, first=first)
    for wrap in (closure, default):
        assert len(Model(wrap, keep=True).state_dict()) == 6
        with pytest.raises(ValueError, match="weights of Attend, which the function of the attention of block 0 uses"):
            Model(wrap, keep=False)
        alone = twoaxis.compose(
            twoaxis.stream("standard", blocks=1, width=8),
            [("attention", None, wrap(Attend())), ("mlp", None, torch.tanh)],
        )
        assert alone(torch.randn(1, 3, 8)).shape == (1, 3, 8)
        with pytest.raises(ValueError, match="belong to no module of the model: give compose the module itself"):
            list(alone.parameters())


class Normed(Standard):
    """Normalises what attention reads itself, halves its keys and adds a tenth of them to its values."""

    def normed(self, site: Site) -> bool:
        return site.kind != "attention"

    def _read(self, value: Any, site: Site) -> Seen:
        seen = super()._read(value, site)
        if site.kind != "attention":
            return seen
        return Seen(nn.functional.rms_norm(seen.x, (8,)), aux=seen.x, kv=lambda q, k, v: (k / 2, v + k / 10, k))

    def _write(self, value: Any, site: Site, y: Tensor, seen: Seen, c: Seen) -> Any:
        if site.kind != "attention":
            return super()._write(value, site, y, seen, c)
        return super()._write(value, site, y + c.aux, seen._replace(x=seen.aux), c)


def test_reads_that_are_normalised_and_keys_and_values_that_are_changed() -> None:
    stream, x = Normed(None, Layout.make(1, 8)), torch.randn(2, 3, 8)
    attend, mlp, norm = Attend(), MLP(8, 8), nn.LayerNorm(8)
    out = twoaxis.compose(stream, [("attention", None, attend), ("mlp", norm, mlp)])(x)
    read = nn.functional.rms_norm(x, (8,))
    q, k, v = attend.q(read), attend.k(read), attend.v(read)
    h = x + nn.functional.scaled_dot_product_attention(q, k / 2, v + k / 10) + k
    torch.testing.assert_close(out, h + mlp(norm(h)))
    with pytest.raises(
        ValueError, match="normalises what the attention of block 0 reads itself: give None as its norm"
    ):
        twoaxis.compose(stream, [("attention", norm, attend), ("mlp", norm, mlp)])
    with pytest.raises(ValueError, match=r"function must take the keyword kv and attend to k, v = kv\(q, k, v\) in"):
        twoaxis.compose(stream, [("attention", None, mlp), ("mlp", norm, mlp)])(x)

    def forgets(x: Tensor, kv: Any) -> Tensor:
        return attend(x)

    with pytest.raises(ValueError, match="which asked 0 times, not once"):
        twoaxis.compose(stream, [("attention", None, forgets), ("mlp", norm, mlp)])(x)


def test_refuses_sublayers_that_do_not_match() -> None:
    stream = twoaxis.stream("standard", blocks=2, width=4)
    with pytest.raises(ValueError, match="built for 4 sub-layers, got 1: too few or too many"):
        twoaxis.compose(stream, [("attention", None, torch.tanh)])
    with pytest.raises(ValueError, match="at 1 it is 'attention' instead of 'mlp'"):
        twoaxis.compose(stream, [("attention", None, torch.tanh)] * 4)
    with pytest.raises(ValueError, match=r"sub-layer 1 has the class LayerNorm: give one, LayerNorm\(...\)"):
        twoaxis.compose(stream, [("attention", None, torch.tanh), ("mlp", nn.LayerNorm, torch.tanh)] * 2)
    with pytest.raises(ValueError, match="2 norms for the 1 ways x"):
        twoaxis.compose(stream, [(s.kind, (torch.tanh, torch.tanh), torch.tanh) for s in stream.sites])


def test_carries_the_memory_of_streams_that_mix_tokens() -> None:
    options = {"value_channels": 2, "compress": "token", "expand": "conv"}
    stream = twoaxis.stream("deep_delta", blocks=2, width=8, **options).double()
    run = twoaxis.compose(stream, tanhs(stream))
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    past, rows = (), []
    for chunk in x.split([1, 3, 2, 1], dim=1):
        out, past = run.run(chunk, past, keep=True)
        rows.append(out)
    assert (torch.cat(rows, dim=1) - run(x)).abs().max() <= 1e-13
