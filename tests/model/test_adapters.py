"""Foreign checkpoints: names found under any prefix, families recognised, mistakes named, the way back, the document.

What the loaded streams compute is compared with the originals in test_adapter_numbers.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import twoaxis
from docs._make.fill import DOCS, filled, parts
from tests.model import adapter_samples as samples
from tests.model.adapter_samples import SAMPLES, WIDTH, Sample
from twoaxis.base.registry import parse
from twoaxis.depth.stream import Stream
from twoaxis.model.originals import FAMILIES, original_config, read_stream, to_original

PAGE = DOCS / "howto" / "foreign_checkpoints.md"
each_sample = pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.family)
Tensors = dict[str, Tensor]


def own_keys(sample: Sample) -> list[str]:
    return list(read(sample).consumed)


def read(sample: Sample, tensors: Tensors | None = None, told: dict[str, Any] | None = None, **more: Any) -> Any:
    """As its family, with its configuration and what else is told."""
    tensors = sample.tensors if tensors is None else tensors
    return read_stream(tensors, sample.family, config=sample.config | (told or {}), **more)


# Finding and recognising.


@each_sample
def test_builds_a_stream_that_holds_the_numbers(sample: Sample) -> None:
    adapted = read(sample)
    stream = adapted.build(width=WIDTH)
    assert stream.name == adapted.stream == FAMILIES[sample.family].stream
    assert len(adapted.state) == len(list(stream.parameters()))
    for name, parameter in stream.named_parameters():
        assert parameter.dtype == torch.float64
        assert torch.equal(parameter, adapted.state[name])
    total = sum(sample.tensors[key].numel() for key in adapted.consumed)
    spare = sum(t.numel() for t in adapted.norms.values())
    assert sum(p.numel() for p in stream.parameters()) + spare == total
    assert json.loads(json.dumps(adapted.options)) == adapted.options
    assert not any(key.startswith(("lm_head", "mtp")) or ".mlp.up_proj" in key for key in adapted.consumed)


@each_sample
def test_the_family_is_recognised(sample: Sample) -> None:
    if sample.family == "glm5_next":  # a DeepSeek-V4 checkpoint that lost its head looks the same
        with pytest.raises(ValueError, match=r"deepseek_v4: missing hc_head\.hc_fn, hc_head\.hc_base"):
            read_stream(sample.tensors, config=sample.config)
    else:
        found, told = read_stream(sample.tensors, config=sample.config), read(sample)
        assert found.family == sample.family
        assert (found.options, found.consumed) == (told.options, told.consumed)


@each_sample
@pytest.mark.parametrize("prefix", ["", "module.net."])
def test_prefixes_are_found(sample: Sample, prefix: str) -> None:
    bare = {key: sample.tensors[key] for key in own_keys(sample)}
    moved = read(sample, {prefix + key: t for key, t in bare.items()})
    here = read(sample)
    assert moved.options == here.options
    assert [key.removeprefix(prefix) for key in moved.consumed] == list(here.consumed)
    assert all(torch.equal(moved.state[name], here.state[name]) for name in here.state)


def test_two_models_in_one_state_dict() -> None:
    sample = samples.kimi_k3(model="")
    both = {f"{who}.{key}": t * scale for who, scale in (("a", 1), ("b", 2)) for key, t in sample.tensors.items()}
    with pytest.raises(ValueError, match=r"several prefixes, 'a\.layers\.', 'b\.layers\.'; give prefix="):
        read(sample, both)
    assert torch.equal(read(sample, both, prefix="b.").state["query"], 2 * read(sample).state["query"])


def test_two_spellings_may_mix_but_not_double() -> None:
    sample = samples.deepseek_v4()
    mixed = {re.sub(r"\.(attn|ffn)_hc\.(\w+)", r".hc_\1_\2", key): t for key, t in sample.tensors.items()}
    here = read(sample)
    assert all(torch.equal(t, here.state[name]) for name, t in read(sample, mixed).state.items())
    with pytest.raises(ValueError, match=r"two spellings of one tensor"):
        read(sample, sample.tensors | mixed)


def test_what_is_not_recognised_lists_what_is() -> None:
    with pytest.raises(ValueError, match="no family's names were recognised among 1 keys") as error:
        read_stream({"x.weight": torch.ones(1)})
    for name, family in FAMILIES.items():
        assert f"{name}: {family.rows[0].theirs}" in str(error.value)
    with pytest.raises(ValueError, match=f"unknown family 'kimi'; the families are {', '.join(FAMILIES)}"):
        read_stream({}, "kimi")
    with pytest.raises(ValueError, match=r"muddformer: none of its names is there; they look like dynamic_dense"):
        read_stream({"x.weight": torch.ones(1)}, "muddformer")
    two = samples.kimi_k3().tensors | samples.deepseek_v4().tensors
    with pytest.raises(ValueError, match="names of kimi_k3 or deepseek_v4; give like="):
        read_stream(two)


# Mistakes.


@each_sample
def test_every_missing_key_is_named(sample: Sample) -> None:
    for key in own_keys(sample):
        rest = {k: t for k, t in sample.tensors.items() if k != key}
        if key.endswith(sample.optional or ("-",)):
            assert key not in read(sample, rest).consumed
            continue
        with pytest.raises(ValueError, match=f"{sample.family}: ") as error:
            read(sample, rest)
        assert key in str(error.value), (key, str(error.value))


@each_sample
def test_a_left_over_key_is_named(sample: Sample) -> None:
    with pytest.raises(ValueError, match=f"{sample.family}: .*{re.escape(sample.stray)}"):
        read(sample, sample.tensors | {sample.stray: torch.ones(1, 1)})


@each_sample
def test_every_wrong_shape_is_named(sample: Sample) -> None:
    for key in own_keys(sample):
        for wrong in (sample.tensors[key][None], torch.cat([sample.tensors[key].reshape(-1), torch.ones(1)])):
            with pytest.raises(ValueError, match=f"{sample.family}") as error:
                read(sample, sample.tensors | {key: wrong})
            assert "shape" in str(error.value) or "weights" in str(error.value) or "ways" in str(error.value)


def changed(sample: Sample, *, wrong: Tensors | None = None, pattern: str = "", to: str = "") -> Tensors:
    """Its tensors with some others, and with keys spelt in another way."""
    return {re.sub(pattern, to, key) if pattern else key: t for key, t in (sample.tensors | (wrong or {})).items()}


KIMI, MUDD, DENSE, DELTA = samples.kimi_k3(), samples.muddformer(), samples.denseformer(), samples.deep_delta()
V4, PACKAGE = samples.deepseek_v4(), samples.hyper_connections_package(4)
LAST_NORM = "language_model.model.layers.3.mlp_res_norm.weight"
CAUSAL = {"ddl_state_dv_shortconv_causal": True}
MISTAKES: list[tuple[Callable[[], Any], str]] = [
    # in the tensors
    (
        lambda: read(KIMI, changed(KIMI, wrong={LAST_NORM: torch.ones(7)})),
        rf"kimi_k3: {re.escape(LAST_NORM)} has shape \(7,\), expected \(8,\)",
    ),
    (
        lambda: read(KIMI, changed(KIMI, pattern=r"1\.mlp_res_proj", to="1.mlp_res_project")),
        r"missing \S+1\.mlp_res_proj\.weight; nothing takes \S+1\.mlp_res_project\.weight",
    ),
    (
        lambda: read(PACKAGE, changed(PACKAGE, pattern=r"blocks\.([13])\.residual", to=r"blocks.\1.ffn")),
        r"called blocks\.#\.ffn\., blocks\.#\.residual\.; which of them comes first",
    ),
    # what tensors do not tell
    (lambda: read_stream(KIMI.tensors), r"do not tell attn_res_block_size \(counts Transformer layers"),
    (lambda: read(KIMI, told={"attn_res_block_size": 0}), "block_size must be at least 1, got 0"),
    (lambda: read_stream(DENSE.tensors, config={"period": 3}), r"with a period of 3: give config=\{'n_blocks'"),
    (lambda: read_stream(samples.denseformer_experiments().tensors), "do not tell increase_T_every"),
    (lambda: read(DENSE).build(), "do not tell the width of the model: give width="),
    (lambda: read(DELTA, told=CAUSAL), "give channel_padding='causal' or 'same'"),
    # a configuration that contradicts them
    (lambda: read(V4, told={"hc_mult": 4}), "has hc_mult=4, the tensors 3"),
    (lambda: read(MUDD, told={"round64": False}), r"generator_in\.1 is \(8, 64\) instead of \(8, 8\)"),
    (lambda: read(DENSE, told={"dilation": 4}), r"alphas\.2\.weight has shape \(1, 2\), expected \(1, 1\)"),
    (lambda: read(DENSE, told={"period": 2}), r"missing dwa_modules\.alphas\.1\.weight"),
    (lambda: read(DENSE, told={"n_blocks": 9}), r"missing dwa_modules\.alphas\.8\.weight"),
    (lambda: read(DELTA, told={"ddl_value_channels": 4}), "has ddl_value_channels=4, the tensors 3"),
    (lambda: read(DELTA, told={"residual_branch_mult": 0.5}), "residual_branch_mult=0.5 has no counterpart"),
    (lambda: read(DENSE, told={"dilation": False}), "denseformer: dilation must be an integer, got False"),
    (lambda: read(DENSE, told={"period": []}), r"denseformer: period must be an integer, got \[\]"),
    (lambda: read(DENSE, told={"n_blocks": 2**40}), "denseformer: n_blocks must be at most"),
    (lambda: read(KIMI, told={"attn_res_block_size": {"a": 1}}), "kimi_k3: attn_res_block_size must be an integer"),
    (lambda: read_stream(KIMI.tensors, config=[12]), "a configuration is a mapping or has to_dict, got list"),
    # options that do not go with them
    (
        lambda: read(V4, streams=2),
        r"do not fit manifold_hyper_connections .* base is \(4, 15\) instead of \(4, 8\)",
    ),
    (lambda: read(KIMI, blocksize=2), "attention_residuals has no option 'blocksize'"),
    (lambda: read(KIMI).build(width=9), "has width 8, got width=9"),
]


@pytest.mark.parametrize(("call", "message"), MISTAKES)
def test_what_does_not_fit_is_said(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_options_of_ours_are_taken() -> None:
    assert read(DELTA, told=CAUSAL, channel_padding="causal").options["channel_padding"] == "causal"
    assert read(KIMI, evaluation="two_phase").build().config.evaluation == "two_phase"


# What the names and shapes tell.


def test_block_sizes_count_transformer_layers() -> None:
    assert read(samples.kimi_k3(size=12)).options == {"block_size": 24, "eps": 1e-3}


def test_modules_are_in_the_order_of_their_numbers() -> None:
    sample = samples.hyper_connections_package(12)
    shuffled = dict(sorted(sample.tensors.items()))  # 0, 1, 10, 11, 2, ...: as safetensors files are
    alpha = read(sample, shuffled).state["static_alpha"]
    for i in range(12):
        assert torch.equal(alpha[i], sample.tensors[f"blocks.{i}.residual.static_alpha"])


@pytest.mark.parametrize("blocks", [1, 5])
@pytest.mark.parametrize("ways", [1, 4])
def test_ways_of_muddformer_are_inferred(blocks: int, ways: int) -> None:
    sample = samples.muddformer(blocks, ways)
    options = read(sample, {key: t for key, t in sample.tensors.items() if "norms" not in key}).options
    assert options["ways"] == ("qkvr" if ways == 4 or blocks == 1 else "one")


def test_norms_of_the_ways_are_handed_over() -> None:
    tensors = {key: t for key, t in MUDD.tensors.items() if not key.endswith("bias")}
    norms = read(MUDD, tensors).norms
    assert sorted(norms) == [f"{block}.{way}.weight" for block in (1, 2, 3) for way in "kqv"]
    for block in (1, 2, 3):
        for number, way in enumerate("qkv"):
            theirs = tensors[f"layers.{block}.attention_norms.{number}.weight"]
            assert torch.equal(norms[f"{block}.{way}.weight"], theirs)
    assert tuple(read_stream(tensors, config={"use_parallel_residual": True}).kinds) == ("parallel",)


def test_a_constant_value_leaves_its_projection_unused() -> None:
    for sample, name in ((samples.deep_delta(dv=1), "ddl_v_dim1_constant"), (samples.deep_delta(), "ddl_v_constant")):
        adapted = read_stream(sample.tensors, config={name: True, f"{name}_value": 1.5})
        assert adapted.options["value"] == "constant"
        assert adapted.options["value_constant"] == 1.5
        assert "value_weight" not in adapted.state
        assert any("v_proj" in key for key in adapted.consumed)
        assert adapted.build().config.value == "constant"


def test_half_precision_files_load_in_full() -> None:
    sample = samples.kimi_k3()
    stream = read(sample, {key: t.bfloat16() for key, t in sample.tensors.items()}).build()
    assert {p.dtype for p in stream.parameters()} == {torch.float32}


def test_a_nested_configuration_and_an_object() -> None:
    sample = samples.kimi_k3()
    nested = read_stream(sample.tensors, config={"text_config": sample.config, "vision_config": {"rms_norm_eps": 9.0}})
    assert nested.options == read(sample).options

    class Config:
        def to_dict(self) -> dict[str, Any]:
            return sample.config

    assert read_stream(sample.tensors, config=Config()).options == nested.options


# The way back.


def scattered(stream: Stream) -> Stream:
    draw = samples.Draw(9)
    stream = stream.double()
    with torch.no_grad():
        for parameter in stream.parameters():
            parameter.copy_(draw(*parameter.shape))
    return stream


WRITTEN: list[tuple[str, str | None, dict[str, Any]]] = [
    ("attention_residuals", None, {"block_size": 4, "eps": 1e-4, "evaluation": "two_phase"}),
    ("manifold_hyper_connections", None, {"form": "deepseek", "streams": 3, "iterations": 5, "norm_eps": 1e-4}),
    ("manifold_hyper_connections", "glm5_next", {"form": "deepseek", "readout": "mean"}),
    ("muddformer", None, {"eps": 1e-4}),
    ("muddformer", None, {"ways": "one", "expand_last": True, "round64": True}),
    ("muddformer", None, {"kinds": ("parallel",), "round64": True}),
    ("denseformer", None, {"dilation": 4, "period": 3}),
    ("denseformer", "denseformer_experiments", {"dilation": 4, "period": 2}),
    ("deep_delta", None, {"value": "linear", "k_eps": 1e-3}),
    ("deep_delta", None, {"value_channels": 3, "gate": "two_layer", "gate_hidden": 5, "value_scale": 2.0}),
    ("deep_delta", None, {"value_channels": 2, "compress": "token", "token_taps": 3, "expand": "conv"}),
    ("hyper_connections", None, {"streams": 3, "tanh": False, "eps": 1e-4, "readout": "mean"}),
    ("hyper_connections", None, {"dynamic": False, "affine": False}),
    ("hyper_connections", None, {"affine": False}),
    ("manifold_hyper_connections", "hy_v4", {"form": "hy_v4", "streams": 3, "post_scale": 1.5}),
    ("gated_streams", None, {"streams": 3, "rank": 5, "eps": 1e-4}),
    ("scaled", None, {}),
    ("scaled", "muse_spark", {"form": "variance", "post_norm": False, "temperature": 0.5}),
    ("scaled", "zaya", {"form": "affine"}),
]


@pytest.mark.parametrize(("name", "like", "options"), WRITTEN)
def test_there_and_back(name: str, like: str | None, options: dict[str, Any]) -> None:
    stream = scattered(twoaxis.stream(name, blocks=4, width=WIDTH, **options))
    tensors, config = to_original(stream, like, prefix="model."), original_config(stream, like)
    assert json.loads(json.dumps(config)) == config
    assert all(key.startswith("model.") for key in tensors)
    assert all(t.is_contiguous() and not t.requires_grad for t in tensors.values())
    adapted = read_stream(tensors, like, config=config)
    assert sorted(adapted.consumed) == sorted(tensors)
    again = adapted.build(width=WIDTH)
    skip = {"evaluation", "start"}  # how it is computed, and where it once began
    for field in vars(stream.config):
        assert field in skip or getattr(again.config, field) == getattr(stream.config, field), field
    assert again.layout.sites == stream.layout.sites
    for key, parameter in stream.named_parameters():
        assert torch.equal(again.get_parameter(key), parameter)
    twice = to_original(again, like, prefix="model.")
    assert all(torch.equal(twice[key], tensors[key]) for key in tensors)


@pytest.mark.parametrize(
    ("spelled", "like", "message"),
    [
        ("attention_residuals:block_size=3", None, "kimi_k3 has no block_size=3, only multiples of 2"),
        ("attention_residuals:block_size=2,heads=2", None, "kimi_k3 has no heads=2, only 1"),
        ('attention_residuals:block_size=2,placement="0"', None, "attention site of block 1 does not"),
        ('attention_residuals:block_size=2,kinds=["mlp"]', None, "kimi_k3 has blocks of attention . mlp"),
        ("manifold_hyper_connections", None, "has hc_head.hc_fn; .* with its defaults has no head_fn"),
        ("manifold_hyper_connections:form=deepseek,pre_eps=0.001", None, "has no pre_eps=0.001, only 1e-06"),
        ("muddformer:prenorm=true,postnorm=true", None, "has no generator_scale.1, muddformer with prenorm=True"),
        ("muddformer:generator_eps=0.001", None, "has no generator_eps=0.001, only None"),
        ("denseformer:period=3", "denseformer_experiments", "period=3, blocks=2, dilation=1"),
        ("deep_delta:value=constant", None, "deep_delta with value='constant' has no value_weight"),
        ("hyper_connections:norm=rms", None, "has no norm='rms', only 'layer'"),
        ("elc_bert", None, "no original's names are known for elc_bert; they are for attention_residuals"),
        ("deep_delta:blend=true", None, "write its method: deep_delta"),
        ("deep_delta", "kimi_k3", "deep_delta can be written like deep_delta, not like 'kimi_k3'"),
    ],
)
def test_what_the_originals_do_not_have_is_refused(spelled: str, like: str | None, message: str) -> None:
    name, options = parse(spelled)
    with pytest.raises(ValueError, match=message):
        to_original(twoaxis.stream(name, blocks=2, width=WIDTH, **options), like)


def test_the_page_has_every_name_and_setting() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert list(parts(page)) == ["original names", "original settings"]
    assert filled(page) == page, "run make docs"
