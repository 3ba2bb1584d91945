"""Every stream and mixer equals its definition, and a definition uses nothing of what it is compared with."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.verify.streams import Gain
from twoaxis.base.registry import spell
from twoaxis.depth.registry import STREAMS, stream_names
from twoaxis.depth.stream import Stream
from twoaxis.sequence.registry import MIXERS, mixer_names
from twoaxis.show import terminal
from twoaxis.verify import check
from twoaxis.verify.claim import disagreement
from twoaxis.verify.definition import BOUND, PERTURB, from_definition, given, watching
from twoaxis.verify.subject import LAYOUTS, MixerSubject, StreamSubject

MIXERS_ANYWHERE = (("mixer", "mixer", "attention", "mlp"), ("attention", "mixer", "mlp"), ("mixer",) * 3)
"""Beside the layouts of the kit: several mixers ahead, one inside a block, a block of nothing else."""

FURTHER: dict[str, list[dict[str, Any]]] = {
    "depth_attention": [
        {"window": window, "heads": heads, "kv_heads": kv_heads, "head_width": 4, "inject": inject, "shared": shared}
        for (window, inject, shared), (heads, kv_heads) in zip(
            itertools.product((None, 1, 3), ("add", "replace"), (True, False)),
            itertools.cycle([(1, 1), (2, 2), (4, 2)]),
            strict=False,
        )
    ],
    "denseformer": [{"dilation": 3}, {"period": 2}],
    "attention_residuals": [
        *({"block_size": size} for size in (4, 5, 7, 20)),
        {"block_size": 4, "evaluation": "two_phase", "group": 8},
        {"window": 1, "overflow": "sum", "scale": 0.25},
        {"window": 1, "keep_first": False, "eps": 0.3},
        {"query": "input", "key_norm": False, "window": 2, "overflow": "sum", "heads": 4},
        {"weighting": "sigmoid", "heads": 2, "block_size": 2},
        {"query": "none", "weighting": "sigmoid", "window": 3},
    ],
    "delta_attention_residuals": [
        *({"block_size": 5}, {"block_size": 3, "delta": "recursive", "null": True, "heads": 2}),
        {"heads": 4, "gate": "zero", "eps": 0.3},
    ],
    "lime": [
        *({"every": "sublayer", "normaliser": "softmax"}, {"every": "sublayer", "ways": "x", "weights": "token"}),
        *({"over": "heads", "kv_heads": 4}, {"weights": "token", "normaliser": "relu", "eps": 0.3}),
    ],
    "depth_kv": [{"stride": 3}, {"window": 2}],
    "deep_delta": [
        {"value_channels": 4, "map": "v", "gate": "two_layer", "gate_hidden": 3, "value": "linear"},
        {"value_channels": 3, "compress": "token", "token_taps": 7, "expand": "conv", "expand_taps": 2},
        {"value_channels": 5, "update": "write", "value_scale": 1.5, "k_eps": 0.3},
    ],
    "hyper_connections": [
        {"streams": 3, **options}
        for options in (
            *({"tanh": False}, {"norm": "rms", "affine": False}, {"norm": "none"}, {"affine": False}, {"eps": 0.5}),
            *({"dynamic": False}, {"frozen": "width"}, {"frozen": "depth"}, {"frozen": "both"}),
        )
    ]
    + [
        {"streams": 3, "fractions": 2, "frozen": "depth", "write": "all"},
        {"streams": 1, "fractions": 2, "write": "all", "tanh": False, "affine": False},
        {"streams": 2, "fractions": 4, "frozen": "width", "norm": "none", "readout": "mean"},
    ],
    "manifold_hyper_connections": [
        {"form": "deepseek", "norm_weight": True, "pre_eps": 0.1, "sinkhorn_eps": 0.05, "norm_eps": 0.3, "streams": 3},
        {"iterations": 1},
        {"iterations": 3, "order": "columns_last", "sinkhorn_eps": 0.05},
        {"post_scale": 1.0, "readout": "mean", "streams": 2},
        {"streams": 1, "readout": "head"},
        {"mix": "orthogonal", "form": "deepseek", "norm_weight": True, "start": "lite"},
        {"mix": "identity", "pre_eps": 0.1, "post_eps": 0.2, "post_scale": 0.5, "streams": 2, "norm_weight": True},
    ],
    "gated_streams": [{"streams": 2, "rank": 1, "eps": 0.3}],
    "wide_residual": [{"retention": True, "forget": 0.9, "retention_start": 0.5, "readout": "mean"}],
    "scaled": [
        {"form": "laurel", "rank": 20, "post_norm": True},
        {"form": "affine", "post_norm": True, "eps": 0.3},
        {"form": "schedule", "eps": 0.1},
        {"form": "variance", "temperature": 2.0, "post_norm": False},
    ],
    "elc_bert": [{"variant": "normalized", "eps": 0.5}],
    "vertical_attention": [
        {"norm": norm, "inner_residual": inner, "eps": eps}
        for norm, inner, eps in itertools.product(("l2", "rms"), (True, False), (0.0, 0.3))
    ],
    "deep_cross_attention": [
        {"version": version, "ways": ways, "window": window}
        for version, ways, window in itertools.product((1, 2, 3), ("qkv", "single"), (None, 1, 2, 99))
    ],
    "muddformer": [
        {"expand_last": True},
        {"ways": "one", "expand_last": True, "round64": True},
        {"prenorm": True, "postnorm": True, "gelu": "tanh", "eps": 0.3, "generator_eps": 0.01},
        {"postnorm": True, "eps": 0.1, "ways": "one", "generator_scale": True},
        {"prenorm": True, "postnorm": True, "dynamic": False},
        {"prenorm": True, "generator_scale": False, "first_norms": "separate"},
    ],
    "short_swa": [
        {"window": window, **options}
        for window in (2, 5, 100)
        for options in (
            {"heads": 4, "kv_heads": 1, "sink": True},
            {"heads": 2, "rope": False, "head_width": 3},
            {"heads": 2, "head_width": 4, "where": "branch", "rope_theta": 100.0},
            {"heads": 4, "kv_heads": 2, "head_width": 6, "sink": True, "qk_norm": True, "where": "branch"},
        )
    ],
    "short_conv": [
        {"kernel": kernel, **options}
        for kernel in (1, 2, 7)
        for options in ({"bias": True}, {"where": "branch"}, {"where": "qkv", "residual": True, "bias": True})
    ],
    "canon": [{"kernel": 6, "activation": True, "residual": False}],
    "dynamic_conv": [{"kernel": 7, "heads": 2}, {"kernel": 2, "rank": 40, "static": False, "residual": False}],
}
"""Options beside the variants of a method, so that every option has met most others."""


def cases(names: tuple[str, ...]) -> list[Any]:
    """One parameter set per method and further options; its variants are measured with the claims."""
    pairs = [(name, options) for name in names for options in FURTHER.get(name, [])]
    return [pytest.param(name, dict(options), id=spell(name, dict(options))) for name, options in pairs]


@pytest.mark.parametrize(("name", "options"), cases(stream_names()))
def test_a_stream_equals_its_definition(name: str, options: dict[str, Any]) -> None:
    subject = StreamSubject(name, options, seed=1)
    runs = [subject.run(layout, perturb=PERTURB, width=8) for layout in (*LAYOUTS, MIXERS_ANYWHERE)]
    found = {run.where: from_definition(run) for run in runs}
    assert {layout: error for layout, error in found.items() if not error <= BOUND} == {}


@pytest.mark.parametrize(("name", "options"), cases(mixer_names()))
def test_an_operator_equals_its_definition(name: str, options: dict[str, Any]) -> None:
    for run in MixerSubject(name, options, seed=1).runs(perturb=PERTURB):
        for time in (1, 2, 24, 60):  # a short window over many tokens is computed in a band
            x = run.input(time=time, grad=True)
            assert disagreement(run(x), run.definition(x), run.leaves(x), 1) <= BOUND


@pytest.mark.parametrize("name", stream_names())
def test_the_fast_form_does_not_run_with_the_definition_s_means(name: str) -> None:
    run = next(StreamSubject(name, STREAMS.find(name).variants[0]).runs())
    with watching(STREAMS.find(name)) as used:
        run(run.input())
    assert {"_open", "_read", "_write"} <= used.keys()


def test_every_method_of_the_library_gives_a_definition() -> None:
    classes = [STREAMS.find(name) for name in stream_names()] + [MIXERS.find(name) for name in mixer_names()]
    assert [cls.name for cls in classes if not given(cls)] == []


class Undefined(Gain):
    definition = Stream.definition


def test_a_method_without_a_definition_is_said_to_have_none() -> None:
    report = check(Undefined, only=["definition", "gradients: finite differences"])
    assert report.ok
    assert [result.instances for result in report.results] == [0, 0, 2]
    assert "none given" in terminal.render(report.document())
    run = StreamSubject("standard").run()
    with pytest.raises(NotImplementedError, match="Undefined does not give its definition"):
        Undefined(Undefined.Config(), run.method.layout).definition(run.input(), run.act)
