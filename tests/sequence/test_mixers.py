"""What holds for every local mixer beyond the claims of `twoaxis check`: in the decoder, its start, its refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import twoaxis
from tests.sequence.helpers import randomise, small_decoder
from tests.support.numbers import close, randn
from twoaxis import Ring, mixer, padding_reach
from twoaxis.sequence.mixer import LocalOperator
from twoaxis.sequence.registry import MIXERS, mixer_names

VARIANTS = [(name, dict(options)) for name in mixer_names() for options in MIXERS.find(name).variants]
each_variant = pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)


def test_every_mixer_is_exported_by_the_package() -> None:
    for name in mixer_names():
        cls = MIXERS.find(name)
        assert getattr(twoaxis, cls.__name__) is cls
        assert cls.__name__ in dir(twoaxis)


@pytest.mark.parametrize(
    ("name", "channels", "options", "cost"),
    [
        ("short_conv", 10, {"kernel": 3, "bias": True}, (4 * 10, 7 * 10, 2 * 10)),
        ("short_conv", 10, {"kernel": 2, "where": "branch"}, (2 * 10, 5 * 10, 10)),
        ("short_conv", 10, {"kernel": 1, "where": "qkv"}, (10, 20, 0)),
        ("dynamic_conv", 6, {}, (15 * 6 + 15 * 4 * 6 + 4 * 6, 2 * (15 * 6 + 15 * 4 * 6) + 16 * 6 + 6, 3 * 6)),
        ("short_swa", 64, {"heads": 2, "head_width": 8}, (4 * 64 * 16, 8 * 64 * 16 + 4 * 16 * 16, 2 * 15 * 16)),
        (
            "short_swa",
            64,
            {"window": 8, "kv_heads": 1, "sink": True, "qk_norm": True},
            (2 * 64 * 64 + 2 * 64 * 16 + 4 + 2 * 16, 2 * 64 * (128 + 32) + 4 * 8 * 64, 2 * 7 * 16),
        ),
    ],
)
def test_cost(name: str, channels: int, options: dict[str, Any], cost: tuple[int, int, int]) -> None:
    assert tuple(MIXERS.find(name)(channels, **options).cost()) == cost


@pytest.mark.parametrize(
    ("name", "where", "channels"),
    [
        ("short_conv", "residual", {"mixer.local": 8}),
        ("short_conv", "branch", {"self_attn.before": 8}),
        ("short_conv", "qkv", {"self_attn.inside": 16}),
        ("dynamic_conv", "residual", {"mixer.local": 8}),
        ("dynamic_conv", "branch", {"self_attn.before": 8}),
        ("dynamic_conv", "qkv", {"self_attn.inside": 16}),
        ("dynamic_conv", "linear", {"self_attn.inside": 16, "mlp.inside": 24}),
    ],
)
def test_places_and_channels_in_a_decoder(name: str, where: str, channels: dict[str, int]) -> None:
    model = small_decoder(mixer=name, mixer_options={"where": where})
    found = {path: module.channels for path, module in model.named_modules() if isinstance(module, LocalOperator)}
    assert found == {f"layers.{b}.{path}": width for b in (0, 1) for path, width in channels.items()}
    some = small_decoder(mixer=name, mixer_options={"where": where}, mixer_blocks=(1,))
    assert sum(site.kind == "mixer" for site in some.stream.sites) == ("mixer.local" in channels)


@each_variant
@pytest.mark.parametrize("length", [9, 80])
def test_what_is_no_number_in_padding_stays_there(name: str, options: dict[str, Any], length: int) -> None:
    made = mixer(name, **options)
    for point in made.points:
        local = made.build(point, 8)
        randomise(local)
        x, mask = randn(2, length, 8), torch.ones(2, length)
        x[0, :5], mask[0, :5] = torch.nan, 0
        y = local(x, reach=padding_reach(mask))
        close(y[0, 5:], local(x[:1, 5:])[0])
        close(y[1], local(x[1:])[0])
        ring = local.step(x[:, :6], local.start(), reach=padding_reach(mask)[:, :6])[1]
        close(local.step(x[:, 6:], ring, reach=padding_reach(mask)[:, 6:])[0], y[:, 6:])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("short_swa", {"heads": 4, "kv_heads": 3}, r"kv_heads \(3\) must divide heads \(4\)"),
        ("short_swa", {"head_width": 3}, "rotary positions need an even head_width, got 3"),
        ("short_conv", {"residual": True}, "adds the input twice"),
        ("short_conv", {"where": "qkv", "start": "zero"}, "silences the attention"),
        ("short_conv", {"where": "branch", "start": "identity"}, "doubles the input"),
        ("canon", {"set": "ABE"}, "set 'ABE' names 'E'; the Canon layers are A, B, C and D"),
        ("canon", {"set": "AbCD"}, "set 'AbCD' names 'b'"),
        ("canon", {"set": ""}, "set '' names 0 of the 4 Canon layers"),
        ("canon", {"set": "ABA"}, "set 'ABA' has 3 letters, 2 of them different"),
        ("canon", {"start": "zero", "residual": False}, "silences the branch"),
        ("dynamic_conv", {"start": "zero", "residual": False}, "silences the branch"),
        ("dynamic_conv", {"start": "identity"}, "doubles the input"),
        ("dynamic_conv", {"start": "zero", "static": False}, "speaks of static filters"),
    ],
)
def test_bad_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mixer(name, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: twoaxis.ShortSWA(8, heads=3), r"heads \(3\) must divide the width \(8\)"),
        (lambda: twoaxis.ShortSWA(6, heads=2), "rotary positions need an even head width, got 3"),
        (lambda: twoaxis.ShortConv(6)(torch.zeros(2, 3, 5)), r"shape \(2, 3, 5\), short_conv needs \(batch, time, 6\)"),
        (lambda: twoaxis.ShortConv(6)(torch.zeros(3, 6)), r"shape \(3, 6\)"),
        (lambda: twoaxis.ShortConv(6).step(torch.zeros(1, 2, 6), Ring(3, axis=1)), "window 3, short_conv here sees 4"),
        (lambda: twoaxis.ShortConv(6)(torch.zeros(1, 2, 6), reach=torch.zeros(1, 5)), "reach covers 5 .* input has 2"),
        (lambda: twoaxis.DynamicConv(6, heads=4), r"heads \(4\) must divide the channels \(6\)"),
        (
            lambda: twoaxis.DynamicConv(6, residual=False, static=False).neutral_(),
            "no neutral parameters with",
        ),
        (lambda: twoaxis.ShortConv(0), "channels must be a positive integer, got 0"),
        (lambda: twoaxis.ShortConv(6, mixer("short_conv").config, kernel=3), "not both: got kernel"),
        (lambda: mixer("short_conv").build("qkv", 6), "short_conv acts at site, not at 'qkv'"),
        (
            lambda: mixer("canon", set="AD").build("site", 8),
            "canon acts at attention, hidden, not at 'site': .*set='AD'",
        ),
    ],
)
def test_bad_calls(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
