"""What streams and mixers show of themselves, against the numbers of their own reads and writes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import twoaxis
from tests.support.decoders import SMALL, build, sample_tokens
from twoaxis.depth.deep_delta import REGIMES, DeepDelta
from twoaxis.inspection.measure import shares
from twoaxis.ring import Ring
from twoaxis.sequence.short_conv import ShortConv


def pass_over(stream: twoaxis.Stream, seed: int = 0) -> list[tuple[Any, Any, Any, Tensor, Any, Any]]:
    """Random increments through a stream: site, state, read, increment, normalised read, next state."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 5, stream.layout.width, generator=generator, dtype=torch.float64)
    state, found = stream.open(x), []
    for site in stream.sites:
        seen = stream.read(state, site)
        c = seen._replace(x=torch.nn.functional.rms_norm(seen.x, seen.x.shape[-1:]), aux=None)
        y = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        after = stream.write(state, site, y, seen, c)
        found.append((site, state, seen, y, c, after))
        state = after
    return found


def perturbed(name: str, **options: Any) -> twoaxis.Stream:
    stream = twoaxis.stream(name, blocks=2, width=6, **options).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in stream.parameters():
            parameter += 0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return stream


# Deep Delta Learning.


@pytest.mark.parametrize(
    "options",
    [{}, {"map": "v"}, {"value": "linear", "gate": "two_layer"}, {"value_channels": 3}, {"update": "write"}],
    ids=str,
)
@torch.no_grad()
def test_deep_delta_discrepancy_shrinks_by_its_factor(options: dict[str, Any]) -> None:
    stream = perturbed("deep_delta", **options)
    assert isinstance(stream, DeepDelta)
    for row, (site, state, seen, y, c, after) in enumerate(pass_over(stream)):
        probes = stream.quantities(state, site, y, seen, c)
        beta = probes["gate"].value
        k, _, v = stream.terms(row, y, seen.x, c.x)
        for when, held in (("before", state), ("after", after)):
            h = held.value.h
            error = torch.stack([(k * h[..., i, :]).sum(-1) - v[..., i] for i in range(h.shape[-2])], -1)
            expected = error.square().sum(-1).sqrt()
            torch.testing.assert_close(probes[f"discrepancy, {when} the write"].value, expected, rtol=1e-11, atol=1e-13)
        if stream.config.update == "delta":
            factor = (1 - beta * k.square().sum(-1)).abs()
            before = probes["discrepancy, before the write"].value
            torch.testing.assert_close(
                probes["discrepancy, after the write"].value, factor * before, rtol=1e-9, atol=1e-12
            )


@pytest.mark.parametrize(("beta", "regime"), [(0.0, 0), (0.05, 0), (0.5, 1), (0.95, 2), (1.0, 2), (1.5, 3), (2.0, 3)])
@torch.no_grad()
def test_regimes_at_planted_gates(beta: float, regime: int) -> None:
    stream = perturbed("deep_delta")
    assert isinstance(stream, DeepDelta)
    stream.gate_weight.zero_()
    stream.gate_bias.fill_(math.log(beta / (2 - beta)) if 0 < beta < 2 else math.copysign(800.0, beta - 1))
    for site, state, seen, y, c, _ in pass_over(stream):
        gate = stream.quantities(state, site, y, seen, c)["gate"]
        assert gate.value.unique().tolist() == pytest.approx([beta], abs=1e-12)
        assert gate.regimes == REGIMES
        assert shares(gate.value, gate.regimes) == [float(i == regime) for i in range(4)]
    assert [r.name for r in REGIMES] == ["skip", "under-relaxed", "match", "over-relaxed"]


def test_deep_delta_shows_nothing_where_it_does_not_act() -> None:
    for stream in (perturbed("deep_delta", update="add"), perturbed("deep_delta", placement="none")):
        for site, state, seen, y, c, _ in pass_over(stream):
            assert stream.quantities(state, site, y, seen, c) == {}
    stream = perturbed("deep_delta")
    *_, (_, _, _, _, _, last) = pass_over(stream)
    out = stream.layout.out
    assert stream.quantities(last, out, None, stream.read(last, out), None) == {}
    with pytest.raises(ValueError, match="sites out of order"):
        stream.quantities(last, stream.sites[0], None, stream.read(last, out), None)


# Hyper-connections.


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hyper_connections", {}),
        ("hyper_connections", {"dynamic": False, "streams": 3}),
        ("manifold_hyper_connections", {}),
        ("manifold_hyper_connections", {"form": "deepseek", "streams": 3, "iterations": 2}),
    ],
    ids=str,
)
@torch.no_grad()
def test_mix_and_write_make_the_next_streams(name: str, options: dict[str, Any]) -> None:
    stream = perturbed(name, **options)
    for site, state, seen, y, c, after in pass_over(stream):
        probes = stream.quantities(state, site, y, seen, c)
        mix, write = probes["mix"], probes["write"]
        assert mix.axes == ("to", "from")
        assert write.axes == ("stream",)
        assert mix.per_token == write.per_token == options.get("dynamic", True)
        total = write.value[..., None] * y.unsqueeze(-2) + torch.einsum("...ij,...jd->...id", mix.value, state.value.h)
        torch.testing.assert_close(total, after.value.h.expand_as(total), rtol=1e-11, atol=1e-12)


@torch.no_grad()
def test_distance_from_doubly_stochastic() -> None:
    stream = perturbed("manifold_hyper_connections", iterations=1, order="columns_last")
    worst = 0.0
    for site, state, seen, y, c, _ in pass_over(stream):
        probes = stream.quantities(state, site, y, seen, c)
        mix, off = probes["mix"].value, probes["distance from doubly stochastic"].value
        rows, columns = ((mix.sum(dim) - 1).abs().amax(-1) for dim in (-1, -2))
        assert columns.max() < 1e-12
        torch.testing.assert_close(off, torch.maximum(rows, columns), rtol=0, atol=1e-14)
        worst = max(worst, off.max().item())
    assert worst > 1e-3  # one iteration has not converged
    converged = perturbed("manifold_hyper_connections", iterations=400)
    for site, state, seen, y, c, _ in pass_over(converged):
        assert converged.quantities(state, site, y, seen, c)["distance from doubly stochastic"].value.max() < 1e-9


# Blend.


@torch.no_grad()
def test_blend_shows_its_gates_and_what_the_method_shows() -> None:
    config = dataclasses.replace(SMALL, stream="deep_delta", blend=True)
    model, tokens = build(config, 2, perturb=0.1), sample_tokens(3)
    assert isinstance(model.stream, twoaxis.Blend)
    model.stream.gate.copy_(torch.linspace(0, 1, 7))
    with twoaxis.trace(model) as seen:
        model(tokens)
    gates = [look.probes["blend gate"].value.item() for look in seen]
    assert gates == pytest.approx([i / 6 for i in range(7)])
    method = {"gate", "discrepancy, before the write", "discrepancy, after the write"}
    assert set(seen[0].probes) == {"blend gate", *method}
    assert set(seen[6].probes) == {"blend gate"}


# Mixers.


@pytest.mark.parametrize(
    "options",
    [
        {"window": 3, "heads": 2},
        {"window": 1, "heads": 1},
        {"window": 9, "heads": 4, "kv_heads": 2, "qk_norm": True, "sink": True},
        {"window": 4, "heads": 2, "head_width": 3, "rope": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("documents", [False, True])
@torch.no_grad()
def test_attention_by_distance_is_what_short_swa_computes_with(options: dict[str, Any], documents: bool) -> None:
    torch.manual_seed(0)
    local = twoaxis.ShortSWA(8, **options, start="normal").double()
    for parameter in local.parameters():
        parameter.normal_(0, 0.7)
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 2, 2]])
    reach = twoaxis.document_reach(ids) if documents else None
    attention = local.quantities(x, local.start(), reach=reach)["attention"]
    assert attention.axes == ("head", "distance")
    weights = attention.value
    assert weights.shape == (2, 7, options["heads"], options["window"])
    if local.sink is None:
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1], dtype=torch.float64))
    else:
        assert ((weights.sum(-1) > 0) & (weights.sum(-1) < 1)).all()
    value = (
        local.value(x).unflatten(-1, (-1, local.head_width)).repeat_interleave(options["heads"] // local.kv_heads, -2)
    )
    mixed = torch.zeros(2, 7, options["heads"], local.head_width, dtype=torch.float64)
    for t in range(7):
        for lag in range(options["window"]):
            if lag > t:
                assert (weights[:, t, :, lag] == 0).all()
            else:
                mixed[:, t] += weights[:, t, :, lag, None] * value[:, t - lag]
    torch.testing.assert_close(local.output(mixed.flatten(-2)), local(x, reach=reach), rtol=1e-10, atol=1e-11)
    if reach is not None:
        assert (weights[0, 3, :, 1:] == 0).all()  # a document begins
    # the same numbers in chunks, from what the ring remembers
    past, found = local.start(spare=2), []
    for chunk in (slice(0, 4), slice(4, 5), slice(5, 7)):
        part = None if reach is None else reach[:, chunk]
        found.append(local.quantities(x[:, chunk], past, reach=part)["attention"].value)
        past = local.step(x[:, chunk], past, reach=part)[1]
    torch.testing.assert_close(torch.cat(found, 1), weights, rtol=0, atol=1e-12)


@torch.no_grad()
def test_taps_are_root_mean_squares_with_the_current_token_first() -> None:
    local = ShortConv(2, kernel=3, start="uniform")
    local.weight.copy_(torch.tensor([[[1.0, 2.0, -3.0]], [[7.0, 0.0, 4.0]]]))
    taps = local.quantities(torch.zeros(1, 2, 2), Ring(3, 1))["taps"]
    assert taps.value.tolist() == pytest.approx([math.sqrt(12.5), math.sqrt(2.0), 5.0])
    assert taps.axes == ("distance",)
    assert not taps.per_token


def test_mixers_are_found_where_they_act() -> None:
    tokens = sample_tokens(4)

    def names(**changes: Any) -> list[list[str]]:
        model = build(dataclasses.replace(SMALL, num_hidden_layers=1, **changes), 0)
        with twoaxis.trace(model) as seen:
            model(tokens)
        return [[inner.name for inner in look.inner] for look in seen]

    swa = {"mixer": "short_swa", "mixer_options": {"window": 3}}
    assert names(**swa) == [["ShortSWA"], [], [], []]
    assert names(mixer="canon") == [
        ["Canon attention", "Canon qkv"],
        ["Canon mlp", "Canon hidden"],
        [],
    ]
    assert names(mixer="canon", parallel_block=True) == [
        ["Canon attention", "Canon qkv", "Canon mlp", "Canon hidden"],
        [],
    ]
    separate = names(
        mixer="canon", stream="muddformer", stream_options={"first_norms": "separate"}, mixer_options={"set": "A"}
    )
    assert separate[0] == ["Canon attention", "Canon attention, way 2", "Canon attention, way 3"]
    assert names() == [[], [], []]
