"""Counts of methods as published, their operations by hand, and the options that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import twoaxis
from twoaxis.depth.counts import count

CC, TC = {"value_channels": 4}, {"value_channels": 4, "compress": "token"}
EC = {"expand": "conv"}
RELEASED = {"expand_last": True, "round64": True}
MIXED_BLOCK = {"kinds": ("mixer", "attention", "mlp")}


@pytest.mark.parametrize(
    ("name", "blocks", "width", "options", "published"),
    [
        ("attention_residuals", 93, 7168, {"block_size": 24}, 2 * 7168 * 187),  # Kimi-K3
        ("deep_cross_attention", 6, 512, {}, 49152 - 7 * 512),  # lucidrains' without its norm scales
        ("deep_delta", 12, 768, {}, 36_912),
        ("deep_delta", 12, 768, TC, 252_076),
        ("deep_delta", 12, 768, TC | EC, 264_364),
        ("deep_delta", 12, 768, CC, 132_268),
        ("deep_delta", 12, 768, CC | EC, 144_556),
        ("deep_delta", 24, 1024, {}, 98_400),
        ("deep_delta", 24, 1024, TC | EC, 672_084),
        ("deep_delta", 24, 1024, CC | EC, 364_884),
        ("denseformer", 48, 4, {}, 1224),
        ("denseformer", 48, 4, {"dilation": 4}, 324),
        ("denseformer", 48, 4, {"dilation": 4, "period": 5}, 62),
        ("denseformer", 72, 4, {"dilation": 4, "period": 5}, 140),
        ("denseformer", 4, 4, {"dilation": 2, "period": 7}, 0),
        ("elc_bert", 12, 8, {}, 78),
        ("elc_bert", 12, 8, {"variant": "weighted_output"}, 91),
        ("vertical_attention", 12, 8, {}, 78),
        ("hyper_connections", 16, 2048, {"dynamic": False}, 768),
        ("hyper_connections", 16, 2048, {"affine": False}, 394_048),
        ("hyper_connections", 16, 2048, {"norm": "rms"}, 394_048 + 32 * 2048),
        ("hyper_connections", 16, 2048, {}, 394_048 + 2 * 32 * 2048),
        ("manifold_hyper_connections", 3, 256, {}, 6 * (96 * 256 + 27)),
        ("manifold_hyper_connections", 3, 256, {"form": "deepseek"}, 6 * (96 * 256 + 27) + 16 * 256 + 4 + 1),
        ("manifold_hyper_connections", 3, 256, {"norm_weight": True}, 6 * (100 * 256 + 27)),
        ("muddformer", 24, 1024, {}, 1_330_534),  # "1.33 M", and below 2.36 M, 5.67 M and 8.78 M
        ("muddformer", 24, 1024, RELEASED, 2_355_269),
        ("muddformer", 32, 2560, {}, 5_667_214),
        ("muddformer", 32, 2560, RELEASED, 8_775_709),
    ],
)
def test_parameters(name: str, blocks: int, width: int, options: dict[str, Any], published: int) -> None:
    with torch.device("meta"):
        stream = twoaxis.stream(name, blocks=blocks, width=width, **options)
    assert sum(p.numel() for p in stream.parameters()) == published


MUDD = 4 * (2 + 3 + 4) + 5
"""Pairs of a way and a slot: four ways over 2, 3, 4 slots, and one way over 5."""
DCA = 3 * 15 + 6
"""Three ways over 1 to 5 slots, and one way over 6."""


@pytest.mark.parametrize(
    ("name", "blocks", "options", "flops", "reads", "live"),
    [
        ("attention_residuals", 27, {}, None, 55 * 56 // 2, None),
        ("attention_residuals", 27, {"block_size": 6}, None, 325, None),
        # the skip's addition is saved, and comes back in front of the MLP
        ("elc_bert", 4, {"variant": "base"}, 2 * 10 - 4, 10, None),
        ("elc_bert", 4, {}, 2 * 10, 10, None),
        ("elc_bert", 4, {"variant": "normalized"}, 2 * 10 + 5 * 4, 10, None),
        ("elc_bert", 4, {"variant": "weighted_output"}, 2 * 15, 15, None),
        # a norm per source that is read, which the last block's output is not
        ("vertical_attention", 12, {"norm": "none"}, 2 * 78, 78, 12),
        ("vertical_attention", 12, {"norm": "rms"}, 2 * 78 + 2 * 12, 78, 12),
        ("muddformer", 4, {}, 4 * MUDD + 3 * 4, 14, 5),
        ("muddformer", 4, {"dynamic": False}, 2 * MUDD, 14, 5),
        ("muddformer", 4, {"dynamic": False, "ways": "one"}, 2 * 14, 14, 5),
        ("muddformer", 4, {"prenorm": True, "postnorm": True}, 4 * MUDD + 3 * 4 + 20 + 4 + 13 + 16, 14, None),
        # a mixer's output is added to every way that waits
        ("muddformer", 4, MIXED_BLOCK, 4 * MUDD + 3 * 4 + 3 * 3, 14, None),
        # all slots of the last block, the residual and its contribution so far
        ("deep_cross_attention", 5, {}, 5 * DCA, 21, 7),
        ("deep_cross_attention", 5, {"version": 2, "ways": "single"}, 2 * 21, 21, 7),
        # 1, 2, 3, 3, 3 slots, then 3; the sum is added to before blocks 3, 4 and the head
        ("deep_cross_attention", 5, {"version": 1, "window": 1}, 2 * (3 * 12 + 3) + 3, 15, None),
        # to k and v in every block, and once more to the block's contribution
        ("deep_cross_attention", 5, MIXED_BLOCK, 5 * DCA + 3 * 5, 21, None),
        # the paper's counts, and the summed read-out
        ("hyper_connections", 16, {"dynamic": False}, 32 * 2 * (4 * 5 + 4) + 3, 33 * 4, 4),
        ("hyper_connections", 16, {"norm": "none"}, 32 * 2 * (4 * 5 + 4 + 4 * 6) + 3, 33 * 4, 4),
        # projections, mix, read and write, the mean square; the read-out
        ("manifold_hyper_connections", 3, {}, 6 * (192 + 2 * 16 + 16 + 8) + 3, 7 * 4, 4),
        # of two routers over keys and values of so many heads, beside the plain residual
        ("lime", 3, {"over": "heads", "kv_heads": 4, "blend": True}, None, 3, 6),
    ],
)
def test_costs(
    name: str, blocks: int, options: dict[str, Any], flops: int | None, reads: int | None, live: int | None
) -> None:
    """Operations and live numbers per channel, and vectors read."""
    with torch.device("meta"):
        cost = count(twoaxis.stream(name, blocks=blocks, width=16, **options))
    assert flops is None or cost.flops == 16 * flops
    assert live is None or cost.live == 16 * live
    assert reads is None or cost.reads == reads


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        # a sub-layer whose output starts at zero has no length to divide by
        *((name, {"eps": 0.0}, "eps must be positive, got 0.0") for name in ("attention_residuals", "muddformer")),
        ("attention_residuals", {"heads": 3}, r"heads \(3\) must divide the width \(8\)"),
        ("attention_residuals", {"evaluation": "two_phase", "window": 3}, "two_phase needs window=None.*got window=3"),
        (
            "attention_residuals",
            {"evaluation": "two_phase", "block_size": 4, "group": 6},
            r"group \(6\) must be a multiple of block_size \(4\)",
        ),
        ("attention_residuals", {"query": "none", "heads": 2}, "query='none' needs heads=1, got 2"),
        ("attention_residuals", {"query": "none", "temperature": "learned"}, "weights that are learned already"),
        ("deep_delta", {"expand": "conv"}, "expand='conv' needs value_channels > 1, got value_channels=1"),
        ("deep_delta", {"gate_start": 2.5}, "gate_start must be at most 2, got 2.5"),
        ("delta_attention_residuals", {"heads": 3}, r"heads \(3\) must divide the width \(8\)"),
        ("depth_attention", {"heads": 3}, r"heads \(3\) must divide the width \(8\)"),
        ("depth_attention", {"heads": 4, "kv_heads": 3}, r"kv_heads \(3\) must divide heads \(4\)"),
        ("hyper_connections", {"fractions": 3}, "fractions=3 must divide the width 8"),
        ("hyper_connections", {"write": "all"}, "write='all' is about slices: give fractions"),
        ("lime", {"over": "heads"}, "over='heads' and kv_heads belong together"),
        ("lime", {"kv_heads": 2}, "over='heads' and kv_heads belong together"),
        ("lime", {"over": "heads", "kv_heads": 2, "ways": "x"}, "over='heads' has one form"),
        ("manifold_hyper_connections", {"form": None}, "unknown form None"),
        ("manifold_hyper_connections", {"sinkhorn_eps": -1e-6}, "sinkhorn_eps must not be negative, got -1e-06"),
        ("manifold_hyper_connections", {"norm_eps": float("nan")}, "norm_eps must be a finite number or None, got nan"),
        ("manifold_hyper_connections", {"mix": "orthogonal", "streams": 2}, "turns four streams.*got streams=2"),
        ("muddformer", {"dynamic": False, "round64": True}, "round64=True sizes the generator of dynamic weights"),
        ("muddformer", {"dynamic": False, "generator_scale": True}, "generator_scale=True is of the generator"),
        ("scaled", {"form": "affine", "start": 0.5}, "start=0.5 is the b of rezero and layerscale"),
        ("wide_residual", {"retention": True, "retention_start": 0.5}, "must lie above 1 - forget = 0.9"),
    ],
)
def test_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        twoaxis.stream(name, blocks=2, width=8, **options)
