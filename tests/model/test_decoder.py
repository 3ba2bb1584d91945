"""The decoder: the trunk, its memory, its initial weights, its errors."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from tests.support.decoders import SMALL, build, sample_tokens
from twoaxis import Decoder, ModelConfig, stream_names
from twoaxis.depth.site import Site
from twoaxis.depth.standard import Standard
from twoaxis.depth.stream import Seen
from twoaxis.model.sublayers import SiteNorm


def test_the_trunk_names_no_method() -> None:
    from twoaxis.model import config, decoder, initialise, sublayers

    for module in (config, decoder, initialise, sublayers):
        source = inspect.getsource(module).replace('stream: str = "standard"', "")
        for name in set(stream_names()) | {"short_swa", "canon", "short_conv"}:
            assert f'"{name}"' not in source, f"{module.__name__} names {name}"


def test_each_way_inside_an_attention_branch_has_a_memory() -> None:
    """A mixer in the branch of a stream that gives q, k and v separately runs on each of them."""
    local = {"mixer": "short_conv", "mixer_options": {"kernel": 3, "where": "branch", "start": "uniform"}}
    model = build(dataclasses.replace(SMALL, stream="muddformer", **local), 0, perturb=0.1)
    tokens, past, rows = sample_tokens(3, 9), model.start(), []
    for chunk in tokens.split([1, 3, 1, 4], dim=1):
        logits, past = model.step(chunk, past)
        rows.append(logits)
    assert (torch.cat(rows, dim=1) - model(tokens)).abs().max() <= 1e-11


def test_greedy_generation_equals_running_the_whole_sequence() -> None:
    model, tokens = build(SMALL, 5), sample_tokens(5, 4)
    grown = model.generate(tokens, 6)
    assert grown.shape == (2, 10)
    for at in range(4, 10):
        assert torch.equal(grown[:, at], model(grown[:, :at])[:, -1].argmax(-1))


def test_initial_values() -> None:
    model = Decoder(ModelConfig(hidden_size=256, num_hidden_layers=8, num_attention_heads=4, vocab_size=1000))
    stds = {name: p.std().item() for name, p in model.named_parameters() if p.dim() == 2}
    for name, std in stds.items():
        small = name.endswith(("o_proj.weight", "down_proj.weight"))
        assert std == pytest.approx(0.02 / 4 if small else 0.02, rel=0.05), name
    assert all(p.min() == p.max() == 1 for name, p in model.named_parameters() if "norm" in name)
    first = {name: p.flatten()[0].item() for name, p in model.named_parameters() if name in stds}
    assert len({*first.values()}) == len(first), "every tensor draws numbers of its own"


def test_paired_starts_every_stream_with_the_same_output_projections() -> None:
    wide = dataclasses.replace(SMALL, stream="hyper_connections", stream_options={"streams": 4})
    plain, paper = Decoder(SMALL, 5).state_dict(), Decoder(wide, 5).state_dict()
    paired = Decoder(dataclasses.replace(wide, init="paired"), 5).state_dict()
    scaled = [name for name in plain if name.endswith((".o_proj.weight", ".down_proj.weight"))]
    assert len(scaled) == 2 * SMALL.num_hidden_layers
    for name in scaled:
        assert torch.equal(paired[name], plain[name])
        assert torch.allclose(paper[name], 2 * plain[name])


def test_a_window_bounds_what_attention_remembers() -> None:
    model = Decoder(dataclasses.replace(SMALL, attention_windows=(3, None, 1)))
    _, past = model.step(torch.zeros(2, 20, dtype=torch.long), model.start())
    each = 2 * 2 * SMALL.kv_heads * SMALL.head_size * 4  # bytes of two rows' keys and values for one token
    assert past.nbytes_by_part() == {"attention": 20 * each, "local": 2 * each, "stream": 0}


def test_each_way_has_a_scale_of_its_own() -> None:
    norm, x, k = SiteNorm(("q", "k", "v"), 8, 1e-3), torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    with torch.no_grad():
        for way in "qkv":
            norm.scale(way).copy_(torch.randn(8))
    seen = norm(Seen(x, q=None, k=k, v=None))
    for way, scale, read in ((seen.q, norm.weight, x), (seen.k, norm.scale("k"), k), (seen.v, norm.scale("v"), x)):
        torch.testing.assert_close(way, read * (read.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * scale)


def test_shapes_of_the_options() -> None:
    ramp = ModelConfig(hidden_size=64, num_hidden_layers=3, intermediate_size=256, hidden_ramp=True)
    assert [ramp.hidden_width(b) for b in range(3)] == [128, 256, 384]
    assert sum(ramp.hidden_width(b) for b in range(3)) == 3 * 256
    with pytest.raises(ValueError, match="block 0 of 3 would get 0 of intermediate_size=100"):
        dataclasses.replace(ramp, intermediate_size=100).hidden_width(0)
    parallel = Decoder(dataclasses.replace(SMALL, parallel_block=True, tie_word_embeddings=False))
    assert [s.kind for s in parallel.stream.sites] == ["parallel"] * 3
    assert parallel.lm_head is not None
    assert parallel(sample_tokens(0)).shape == (2, 12, 61)
    some = dataclasses.replace(SMALL, mixer="short_swa:heads=2", mixer_blocks=(1,))
    kinds = " ".join(site.kind for site in Decoder(some).stream.sites)
    assert kinds == "attention mlp mixer attention mlp attention mlp"


class Shared(Standard):
    """Normalises every read itself, and attends to the values of the first block plus its own."""

    def normed(self, site: Site) -> bool:
        return False

    def _open(self, x: Tensor, tokens: Any) -> Any:
        return super()._open(x, tokens), None

    def _read(self, value: Any, site: Site) -> Seen:
        plain, first = value
        x = super()._read(plain, site).x
        kv = (lambda q, k, v: (k, v if first is None else v + first, v)) if site.kind == "attention" else None
        return Seen(torch.nn.functional.rms_norm(x, (16,), eps=SMALL.rms_norm_eps), aux=x, kv=kv)

    def _write(self, value: Any, site: Site, y: Tensor, seen: Seen, c: Seen) -> Any:
        plain, first = value
        assert (c.aux is None) == (site.kind != "attention")
        return super()._write(plain, site, y, seen._replace(x=seen.aux), c), c.aux if first is None else first


def test_a_stream_may_normalise_its_reads_and_change_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """No norm is built for it, its values are attended to and remembered, and what they leave reaches the write."""
    config, tokens = (
        dataclasses.replace(SMALL, hidden_size=16, num_attention_heads=2, num_key_value_heads=2),
        sample_tokens(3, 9),
    )
    plain = Decoder(config, 1).double()
    made = Shared(None, plain.stream.layout)
    monkeypatch.setattr(ModelConfig, "make_stream", lambda self: made)
    model = Decoder(config, 1).double()
    assert not [name for name, _ in model.named_parameters() if "norm" in name]
    logits, past = model.step(tokens[:, :5], model.start())
    more, past = model.step(tokens[:, 5:], past)
    torch.testing.assert_close(torch.cat([logits, more], 1), model(tokens))
    _, before = plain.step(tokens, plain.start())
    own = [past.rings[f"{block}.self_attn"].kept[1] for block in (0, 1)]
    torch.testing.assert_close(own[0], before.rings["0.self_attn"].kept[1])  # a plain scale
    assert not torch.allclose(own[1], before.rings["1.self_attn"].kept[1])
    with torch.no_grad():
        model.sublayer(made.sites[2]).v_proj.weight.zero_()  # type: ignore[union-attr]
    _, after = model.step(tokens, model.start())
    torch.testing.assert_close(after.rings["1.self_attn"].kept[1], own[0])  # nothing of its own: the first block's


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
        ({"num_attention_heads": 3}, r"num_attention_heads \(3\) must divide hidden_size \(128\)"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads \(3\) must divide num_attention_heads \(4\)"),
        ({"head_dim": 5}, "even head_dim, got 5"),
        ({"hidden_act": "silo"}, "unknown hidden_act 'silo' .did you mean 'silu'"),
        ({"stream": "denseformer:dilation=2", "stream_options": {"dilation": 3}}, "dilation is given in stream"),
        ({"stream": "denseformer:dilaton=2"}, "no option 'dilaton'"),
        ({"stream": "denseformer:blend=3"}, "blend must be True or False"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "unknown rope_type 'yarn'"),
        ({"rope_scaling": {"rope_type": {}}}, "unknown rope_type {}"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor does not fit"),
        ({"mixer_blocks": (1,)}, "no mixer"),
        ({"mixer": "short_swa", "mixer_blocks": (9,)}, "names block 9, the model has blocks 0 to 3"),
    ],
)
def test_bad_configurations(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokens must be"):
        Decoder(SMALL)(torch.zeros(3, dtype=torch.long))
