"""The contract: registry, layout, placement, refusals, Blend, compose."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import twoaxis
from tests.support.streams import composed
from twoaxis.depth.site import Placement, make_sites


def test_options_may_stand_behind_the_name() -> None:
    made = twoaxis.stream("mhar:block_size=3,heads=2", blocks=2, width=8)
    said = twoaxis.stream("attention_residuals", blocks=2, width=8, block_size=3, heads=2)
    assert (made.name, made.config) == (said.name, said.config)
    assert twoaxis.stream("mhc:streams=2", blocks=2, width=8, streams=3).config.streams == 3
    assert twoaxis.mixer("swa:window=3,heads=2", heads=1).build("site", 8).config.window == 3
    with pytest.raises(ValueError, match="denseformer has no option 'dilaton'"):
        twoaxis.stream("denseformer:dilaton=2", blocks=2, width=8)


def test_unknown_names_and_options_list_what_exists() -> None:
    message = r"unknown stream 'densformer' \(did you mean 'denseformer'\?\); the streams are .*deep_delta \(ddl\), "
    with pytest.raises(ValueError, match=message):
        twoaxis.stream("densformer", blocks=2, width=8)
    message = r"no option 'dilution' \(did you mean 'dilation'\?\); its options are dilation, period"
    with pytest.raises(ValueError, match=message):
        twoaxis.stream("denseformer", blocks=2, width=8, dilution=2)
    with pytest.raises(ValueError, match=r"standard has no option 'x'; its options are none"):
        twoaxis.stream("standard", blocks=2, width=8, x=1)
    with pytest.raises(ValueError, match=r"unknown mixer 'canoon'.*short_swa"):
        twoaxis.mixer("canoon")


def test_sites_of_a_layout() -> None:
    sites = make_sites(2, [("mixer", "attention", "mlp"), ("parallel",)])
    assert [s.kind for s in sites] == ["mixer", "attention", "mlp", "parallel", "out"]
    assert [s.block for s in sites] == [0, 0, 0, 1, 2]
    assert [s.index for s in sites] == [0, 1, 2, 3, 4]
    assert [s.first for s in sites] == [True, False, False, True, True]
    assert [s.last for s in sites] == [False, False, True, True, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"blocks": 0}, "blocks must be a positive integer, got 0"),
        ({"width": 0}, "width must be a positive integer, got 0"),
        ({"kinds": ("attention", "moe")}, "unknown sub-layer kind 'moe' in block 0"),
        ({"kinds": [("attention",)] * 3}, "kinds describe 3 blocks, the stream has 2"),
        ({"kinds": [("attention",), ()]}, "block 1 has no sub-layer"),
        ({"placement": "5-9"}, "names block 5, but the stream has blocks 0 to 1 and out 2"),
        ({"placement": "0/mixerr"}, "unknown kind 'mixerr'"),
        ({"placement": "1-x"}, "cannot read the placement '1-x'"),
        ({"placement": {"layers": [1]}}, r"keys blocks and kinds, got \['layers'\]"),
    ],
)
def test_bad_layouts_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        twoaxis.stream("standard", **({"blocks": 2, "width": 8} | arguments))  # type: ignore[arg-type]


def test_placement_spellings() -> None:
    assert Placement.parse("8-11") == Placement(blocks=(8, 9, 10, 11))
    assert Placement.parse("0,2-3/attention+out") == Placement(blocks=(0, 2, 3), kinds=("attention", "out"))
    assert Placement.parse("mlp") == Placement(kinds=("mlp",))
    assert Placement.parse("none") == Placement(blocks=())
    assert Placement.parse({"blocks": [1], "kinds": None}) == Placement(blocks=(1,))
    assert Placement.parse(None) == Placement.parse("all") == Placement()


class TestBlend:
    def make(self, **options: Any) -> twoaxis.Blend:
        made = twoaxis.stream("deep_delta", blocks=2, width=8, blend=True, **options)
        assert isinstance(made, twoaxis.Blend)
        return made.double()

    def test_method_learns_once_the_gate_moves(self) -> None:
        blend = self.make()
        run = composed(blend)
        x = torch.randn(1, 3, 8, dtype=torch.float64)
        run(x).square().sum().backward()
        assert blend.gate.grad is not None
        assert blend.gate.grad[1:].abs().min() > 0  # the first read is the embedding on both sides
        assert all(p.grad is None or p.grad.abs().max() == 0 for p in blend.method.parameters())
        with torch.no_grad():
            blend.gate.fill_(0.5)
        run(x).square().sum().backward()
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in blend.method.parameters())

    def test_behind_a_half_open_gate_both_streams_continue_from_their_own_read(self) -> None:
        blend, x = self.make(), torch.randn(1, 3, 8, dtype=torch.float64)
        with torch.no_grad():
            blend.gate.fill_(0.5)
        state, own, plain = blend.open(x), blend.method.open(x), x
        for site in blend.sites:
            seen, alone = blend.read(state, site), blend.method.read(own, site)
            torch.testing.assert_close(seen.x, (plain + alone.x) / 2)
            y, c = torch.tanh(seen.x), seen._replace(aux=None)
            state, own = blend.write(state, site, y, seen, c), blend.method.write(own, site, y, alone, c)
            plain = plain + y
        torch.testing.assert_close(blend.close(state), (plain + blend.method.close(own)) / 2)

    def test_a_broken_method_behind_a_closed_gate_raises(self) -> None:
        blend = self.make()
        with torch.no_grad():
            blend.method.get_parameter("gate_bias")[1] = torch.nan
        run = composed(blend)
        with pytest.raises(RuntimeError, match="non-finite x at site 2 behind a closed gate"):
            run(torch.randn(1, 3, 8, dtype=torch.float64))

    def test_gate_is_float32_and_its_lerp_exact_in_bfloat16(self) -> None:
        blend = self.make().to(torch.bfloat16)
        blend.gate.data = blend.gate.data.float()
        x = torch.randn(1, 3, 8, dtype=torch.bfloat16)
        state = blend.open(x)
        assert torch.equal(blend.read(state, blend.sites[0]).x, x)


def test_a_stream_of_ones_own_is_registered_once() -> None:
    from twoaxis.depth.registry import METHODS
    from twoaxis.depth.standard import Standard

    class Mine(Standard):
        pass

    try:
        twoaxis.register("mine")(Mine)
        made = twoaxis.stream("mine", blocks=1, width=4)
        assert made.name == "mine"
        assert "mine" in twoaxis.stream_names()
        with pytest.raises(ValueError, match="already a stream named 'mine'"):
            twoaxis.register("mine")(Mine)
    finally:
        del METHODS["mine"]
