"""The written convention against torch's own counter, against every operation that runs, and against built models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from twoaxis.depth.compose import compose
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.model.flops import Flops, count_parameters, forward_flops, training_flops
from twoaxis.model.presets import PRESETS, preset
from twoaxis.sequence.dynamic_conv import DynamicConv
from twoaxis.sequence.registry import MIXERS

B, T = 2, 12
SHAPE: dict[str, Any] = {"vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "intermediate_size": 24}
MIXER_VARIANTS = [
    pytest.param(stream, name, options, marks=[pytest.mark.slow] if i % 3 else [])
    for name in MIXERS.names()
    for i, options in enumerate(MIXERS.find(name).variants)
    for stream in ("standard", "muddformer")
]
"""Beside a plain stream and one with ways; two variants of three are slow."""


def label(value: Any) -> str:
    return " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)


def spelled_out(model: Decoder, tokens: Tensor) -> Tensor:
    """Logits with attention as its definition: torch's counter does not know the fused kernel of the CPU."""
    info = model.info(tokens)._replace(fused=False)
    return model.logits(model.run(model.embed(tokens), info))


def products(config: ModelConfig, tokens: int = T, batch: int = B) -> tuple[int, int]:
    """What torch counts in the forward and in the backward pass."""
    model = Decoder(config)
    given = torch.arange(batch * tokens).remainder(config.vocab_size).view(batch, tokens)
    with FlopCounterMode(display=False) as forward:
        logits = spelled_out(model, given)
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def masked_keys(config: ModelConfig, tokens: int = T) -> int:
    """Operations per token on keys outside the attention's windows, which the definition computes and masks."""
    outside = sum(tokens - min(window or tokens, tokens) for window in config.attention_windows or ())
    return 4 * config.num_attention_heads * config.head_size * outside


@given(data=st.data(), tokens=st.integers(1, 20), batch=st.integers(1, 3))
def test_torch_counts_the_same(data: st.DataObject, tokens: int, batch: int) -> None:
    draw = data.draw
    blocks, heads = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 4]))
    ramp = draw(st.booleans())
    config = ModelConfig(
        vocab_size=draw(st.integers(5, 60)),
        hidden_size=draw(st.sampled_from([8, 16, 24])),
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=draw(st.sampled_from([None, *(n for n in (1, 2, 4) if heads % n == 0)])),
        head_dim=draw(st.sampled_from([None, 2, 6])),
        intermediate_size=256 if ramp else draw(st.sampled_from([None, 11])),
        hidden_ramp=ramp,
        parallel_block=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        attention_output_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        attention_windows=tuple(draw(st.sampled_from([None, 1, 3, 50])) for _ in range(blocks)),
        no_rope_blocks=(0,) if draw(st.booleans()) else (),
        tie_word_embeddings=draw(st.booleans()),
    )
    charged = forward_flops(config, tokens)
    forward, backward = products(config, tokens, batch)
    assert forward == batch * (charged.sequence + tokens * masked_keys(config, tokens))
    assert backward == 2 * forward
    trained = training_flops(config, tokens)
    assert forward + backward == batch * (trained.sequence + 3 * tokens * masked_keys(config, tokens))
    assert charged.stream == charged.mixer == charged.embedding == 0


def test_numbers_by_hand() -> None:
    config = ModelConfig(**SHAPE, attention_windows=(None, 3, 100))
    found = forward_flops(config, 10)
    assert found == Flops(
        tokens=10,
        embedding=0,
        projections=3 * 2 * (16 * 16 + 16 * 8 + 16 * 8 + 16 * 16),
        scores=4 * 16 * (10 + 3 + 10),
        mlp=3 * 2 * 3 * 16 * 24,
        head=2 * 16 * 37,
        stream=0,
        mixer=0,
    )
    assert found.total == found.matrix == 4608 + 1472 + 6912 + 1184
    assert found.sequence == 10 * found.total
    again = training_flops(config, 10, recompute=1)
    assert again.total == 3 * found.total + found.blocks
    assert again.total == 4 * (4608 + 1472 + 6912) + 3 * 1184
    half = training_flops(config, 10, recompute=2)  # blocks 0 and 2
    assert half.total == 3 * found.total + 2 * (1536 + 2304) + 4 * 16 * (10 + 10)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        training_flops(config, 10, recompute=-1)
    with pytest.raises(ValueError, match="at least one token, got 0"):
        forward_flops(config, 0)


def stream_products(config: ModelConfig) -> tuple[int, int]:
    """What torch counts in the stream alone, around sub-layers without matrix products."""
    made = config.make_stream()

    def sublayer(*ways: Tensor, kv: Any = None) -> Tensor:
        y = torch.tanh(torch.stack(ways).sum(0))
        heads = (config.kv_heads, config.head_size)  # as the decoder has them
        shaped = y[..., : heads[0] * heads[1]].unflatten(-1, heads)
        return y if kv is None else y + kv(shaped, shaped, shaped)[1].sum((-2, -1))[..., None]

    run = compose(made, [(site.kind, None, sublayer) for site in made.sites])
    x = torch.randn(B, T, config.hidden_size, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        out = run(x)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize(
    ("name", "options", "per_token", "beside"),
    [
        # query, key, value and output maps at six sites; logits and values of 1 + 2 + 4 * 3 states; the six additions
        ("depth_attention", {"heads": 2, "window": 3}, 6 * 4 * 2 * 16 * 16, 15 * 4 * 16 + 6 * 16),
        ("depth_attention", {"heads": 2, "window": 1, "head_width": 4}, 6 * 4 * 2 * 16 * 8, 6 * 4 * 8 + 6 * 16),
        # a map, a gate and a value of the width; the direction's length, read, and write less the plain sum
        ("deep_delta", {"map": "v"}, 6 * (2 * 16 * 16 + 2 * 16 + 2 * 16), 6 * (2 + 2 + 2 - 1) * 16),
        # 24 logits from four streams of the width, and the mix; their mean square, read and write; the sum read out
        ("manifold_hyper_connections", {}, 6 * (2 * 24 + 8) * 64, 6 * (2 + 2 + 2) * 64 + 3 * 16),
    ],
    ids=label,
)
def test_products_of_streams_by_hand(name: str, options: dict[str, Any], per_token: int, beside: int) -> None:
    """Where a method's work is in matrix products, torch counts them and the rest is charged beside them."""
    config = ModelConfig(**SHAPE, stream=name, stream_options=options)
    assert stream_products(config)[0] == B * T * per_token
    assert forward_flops(config, T).stream == per_token + beside


def inner_widths(width: int, options: Mapping[str, Any]) -> tuple[int, int]:
    """Width of ShortSWA's queries and of its keys."""
    heads = options.get("heads", 4)
    size = options.get("head_width") or width // heads
    return heads * size, (options.get("kv_heads") or heads) * size


@pytest.mark.parametrize(("stream", "name", "options"), MIXER_VARIANTS, ids=label)
def test_mixers(stream: str, name: str, options: dict[str, Any]) -> None:
    """ShortSWA's products to the last one, masked keys included; of convolutions those that make filters have some."""
    tokens = 24
    config = ModelConfig(**SHAPE, mixer=name, mixer_options=options, mixer_blocks=(0, 2), stream=stream)
    charged = forward_flops(config, tokens)
    forward, backward = products(config, tokens)
    own_forward, own_backward = (own * tokens // T for own in stream_products(config))
    own = forward - own_forward - B * tokens * charged.matrix
    assert backward - own_backward - 2 * B * tokens * charged.matrix == 2 * own
    if name != "short_swa":
        filters = [m for m in Decoder(config).modules() if isinstance(m, DynamicConv)]  # made of each token
        made = [2 * sum(p.numel() for key, p in m.named_parameters() if key != "static") for m in filters]
        ways = (1, 3) if options.get("where") == "branch" and stream == "muddformer" else (1,) * len(made)
        assert own == B * tokens * sum(n * each for n, each in zip(ways, made, strict=False))
        assert charged.mixer > 0
        return
    queries, keys = inner_widths(16, options)
    per_call = 2 * 16 * (2 * queries + 2 * keys) + 4 * queries * tokens
    branch = options.get("where") == "branch"
    calls = 1 + 3 if branch and stream == "muddformer" else 2  # block 0 has one way: q, k, v are the embedding's
    assert own == B * tokens * calls * per_call
    site = 0 if branch else 5 * 16
    assert charged.mixer == calls * (per_call - 4 * queries * (tokens - options["window"]) + site)


@pytest.mark.parametrize(
    ("options", "stream", "per_block"),
    [
        ({"set": "A", "kernel": 4}, "standard", 16 * (2 * 4 + 1)),
        ({"set": "A", "kernel": 4}, "deep_cross_attention", 3 * 16 * (2 * 4 + 1)),
        ({"set": "B", "kernel": 3, "residual": False}, "deep_cross_attention", 32 * 2 * 3),
        ({"set": "CD", "kernel": 2}, "standard", (16 + 48) * (2 * 2 + 1)),
    ],
)
def test_convolutions_by_hand(options: dict[str, Any], stream: str, per_block: int) -> None:
    """A mixer runs on q, k and v one by one where the stream gives them separately."""
    shape = ModelConfig(**SHAPE, mixer="canon", mixer_options=options, stream=stream)
    assert forward_flops(shape, T).mixer == 3 * per_block


def test_parts_that_methods_add_sum_up() -> None:
    """Both axes at once are the two by themselves, where the mixer has no site that the stream would see."""
    both = forward_flops(ModelConfig(**SHAPE, stream="deep_delta", mixer="canon"), T)
    plain = forward_flops(ModelConfig(**SHAPE), T)
    assert both.stream == forward_flops(ModelConfig(**SHAPE, stream="deep_delta"), T).stream > 0
    assert both.mixer == forward_flops(ModelConfig(**SHAPE, mixer="canon"), T).mixer > 0
    assert both.total == sum(both[1:]) == plain.total + both.stream + both.mixer
    some = forward_flops(ModelConfig(**SHAPE, mixer="canon", mixer_blocks=(1,)), T)
    assert 3 * some.mixer == both.mixer


def hf_step(model: Any, tokens: Tensor) -> int:
    with FlopCounterMode(display=False) as count:
        model(tokens, labels=tokens, use_cache=False).loss.backward()
    return count.get_total_flops()


@pytest.mark.parametrize(("windows", "every"), [(None, 1), ([5, None, None, 5], 1), ([5, None, 5, 5], 3)])
def test_transformers_model_with_and_without_checkpointing(windows: list[int | None] | None, every: int) -> None:
    pytest.importorskip("transformers")
    from tests.model.graft_helpers import to_family
    from twoaxis.model.graft import TwoAxisConfig, TwoAxisForCausalLM

    config = preset("nano", intermediate_size=40, hidden_size=32, head_dim=8, attention_windows=windows)
    fields: dict[str, Any] = {"text_config": to_family(config), "attn_implementation": "eager"}
    model = TwoAxisForCausalLM(TwoAxisConfig(**fields)).train()
    tokens = torch.arange(2 * 16).view(2, 16)
    masked, chosen = masked_keys(config, 16), range(0, 4, every)
    again = sum(4 * 32 * (16 - min((windows or [None] * 4)[b] or 16, 16)) for b in chosen)
    with FlopCounterMode(display=False) as angles:  # versions of transformers make them by a matrix product
        cast(Any, model.backbone).model.rotary_emb(torch.zeros(1), torch.arange(16)[None])
    positions = angles.get_total_flops()
    assert hf_step(model, tokens) == 2 * training_flops(config, 16).sequence + 2 * 16 * 3 * masked + positions
    model.activation_checkpointing_enable(every_n_layers=every)
    whole = 2 * training_flops(config, 16, recompute=every).sequence + 2 * 16 * (3 * masked + again) + positions
    with set_checkpoint_early_stop(False):
        assert hf_step(model, tokens) == whole
    last_products = 2 * 16 * len(chosen) * 2 * 40 * 32  # torch leaves out each block's down projection
    assert hf_step(model, tokens) == whole - last_products


@pytest.mark.parametrize("name", PRESETS)
def test_rule_of_thumb(name: str) -> None:
    """6 per parameter, but for what it leaves out (scores) and what it counts (norms, biases, an untied lookup)."""
    pytest.importorskip("transformers")
    config = preset(name)
    found, trained = count_parameters(config), training_flops(config, 1024)
    assert found.total == PRESETS[name].parameters
    heads, inner = config.num_attention_heads + 2 * config.kv_heads, config.num_hidden_layers * config.head_size
    idle = found.norms + (0 if config.tie_word_embeddings else found.embedding)
    idle += inner * (2 * config.qk_norm + heads * config.attention_bias)
    scores = 12 * inner * config.num_attention_heads * 1024
    assert trained.total == 6 * (found.total - idle) + scores
    if found.total > 10**9:  # where width outweighs the length of the sequence, the rule itself is good to a tenth
        assert trained.total == pytest.approx(6 * found.total, rel=0.1)


@pytest.mark.parametrize("name", ["standard", "muddformer", "hyper_connections", "gated_streams:rank=6"])
def test_parameters_by_part(name: str) -> None:
    """Without parameters, with ways and their norms, with the plain norms, and in the place of norms."""
    switches: dict[str, Any] = {"attention_bias": True, "mlp_bias": True, "qk_norm": True, "tie_word_embeddings": False}
    mixers = [(None, {}), ("canon", {}), ("short_swa", {"head_width": 4})]
    for parallel, (mixer, chosen) in zip((False, True, True), mixers, strict=True):
        methods: dict[str, Any] = {"stream": name, "mixer": mixer, "mixer_options": chosen}
        config = ModelConfig(**SHAPE, **switches, **methods, parallel_block=parallel)
        found, sizes = count_parameters(config), dict.fromkeys(count_parameters(config)._fields, 0)
        for key, parameter in Decoder(config).named_parameters():
            sizes[part_of(key)] += parameter.numel()
        assert found._asdict() == sizes
        assert found.stream == sum(p.numel() for p in config.make_stream().parameters())


def part_of(key: str) -> str:
    first, *rest = key.split(".")
    if first != "layers":
        return {"norm": "norms", "embed_tokens": "embedding", "lm_head": "head"}.get(first, first)
    if {"input_layernorm", "post_attention_layernorm"} & {*rest} or rest[1:3] == ["mixer", "norm"]:
        return "norms"
    if {"before", "inside", "mixer"} & {*rest}:
        return "mixer"
    return "attention" if "self_attn" in rest else "mlp"
