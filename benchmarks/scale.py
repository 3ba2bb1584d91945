"""The sizes of a run: the ones the targets name, and small ones that only show that everything works."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.timing import Run, peak_bytes
from twoaxis import Decoder, ModelConfig
from twoaxis.model.config import SHORT


class Scale(NamedTuple):
    """Sizes and rounds.

    Attributes:
        quick: whether these are the small ones; then nothing is compiled.
        rounds: of operators; whole models take fewer.
        model_rounds: of training steps.
        width, heads, hidden, vocabulary, blocks, length: the decoder and its sequence.
        read: tokens and width of a depth read.
        sources: how many sources a depth read has.
        window_length: tokens of the windowed attention.
        depths: blocks of the decoders whose memory is fitted against depth.
        cached: tokens before the first decoded one.
    """

    quick: bool
    rounds: int
    model_rounds: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    blocks: int
    length: int
    read: tuple[int, int]
    sources: tuple[int, ...]
    window_length: int
    depths: tuple[int, ...]
    cached: int


FULL = Scale(
    quick=False,
    rounds=9,
    model_rounds=5,
    width=768,
    heads=12,
    hidden=2048,
    vocabulary=8192,
    blocks=12,
    length=512,
    read=(2048, 512),
    sources=(16, 64),
    window_length=8192,
    depths=(6, 12, 24, 48),
    cached=256,
)
QUICK = Scale(
    quick=True,
    rounds=3,
    model_rounds=1,
    width=48,
    heads=3,
    hidden=64,
    vocabulary=128,
    blocks=2,
    length=32,
    read=(64, 32),
    sources=(4,),
    window_length=256,
    depths=(2, 4),
    cached=16,
)

CONTENDERS: dict[str, dict[str, Any]] = {
    "standard": {},
    "DenseFormer 4x5": {"stream": "denseformer", "stream_options": {"dilation": 4, "period": 5}},
    "DenseFormer 1x1": {"stream": "denseformer"},
    "Attention Residuals, block S=8": {"stream": "attention_residuals", "stream_options": {"block_size": 8}},
    "Attention Residuals, full": {"stream": "attention_residuals"},
    "MHAR, 4 heads": {"stream": "attention_residuals", "stream_options": {"heads": 4}},
    "Delta Attention Residuals": {"stream": "delta_attention_residuals"},
    "Delta Attention Residuals, block S=8": {
        "stream": "delta_attention_residuals",
        "stream_options": {"block_size": 8},
    },
    "DDL d_v=1": {"stream": "deep_delta"},
    "DDL CC d_v=4 with EC": {"stream": "deep_delta", "stream_options": {"value_channels": 4, "expand": "conv"}},
    "hyper-connections n=4, static": {"stream": "hyper_connections", "stream_options": {"dynamic": False}},
    "hyper-connections n=4, dynamic": {"stream": "hyper_connections"},
    "Frac-connections m=4": {"stream": "hyper_connections", "stream_options": {"streams": 1, "fractions": 4}},
    "mHC n=4": {"stream": "manifold_hyper_connections"},
    "iHC (HY-V4)": {"stream": "manifold_hyper_connections", "stream_options": {"form": "hy_v4"}},
    "MUDDFormer": {"stream": "muddformer"},
    "DCA k=2": {"stream": "deep_cross_attention", "stream_options": {"window": 2}},
    "LIMe over heads": {"stream": "lime", "stream_options": {"over": "heads", "kv_heads": 12}},
    "LIMe over states": {"stream": "lime"},
    "Depth-Attention": {"stream": "depth_kv"},
    "gated streams": {"stream": "gated_streams"},
    "wide residual": {"stream": "wide_residual"},
    "scaled, x0": {"stream": "scaled"},
    "scaled, LAuReL": {"stream": "scaled", "stream_options": {"form": "laurel"}},
    "depth attention K=4": {"stream": "depth_attention"},
    "vertical attention": {"stream": "vertical_attention"},
    "ELC-BERT": {"stream": "elc_bert"},
    "ShortSWA w=16": {"mixer": "short_swa", "mixer_options": {"window": 16}},
    "ShortSWA w=16, heads as the attention": {"mixer": "short_swa", "mixer_options": {"window": 16, "heads": 12}},
    "ShortSWA w=16, thin": {"mixer": "short_swa", "mixer_options": {"window": 16, "heads": 3, "head_width": 64}},
    "ShortConv k=4": {"mixer": "short_conv"},
    "Canon ABCD k=4": {"mixer": "canon"},
    "Dynamic ShortConv on q, k, v": {"mixer": "dynamic_conv"},
}
"""Decoders by name: every stream and every mixer, in the variants that have a target."""


def config(name: str, scale: Scale, **changes: Any) -> ModelConfig:
    """The decoder of a contender; heads shrink with a small model."""
    options = dict(CONTENDERS[name])
    small = scale.width < FULL.width
    if small and "kv_heads" in options.get("stream_options", {}):
        options["stream_options"] = options["stream_options"] | {"kv_heads": scale.heads}
    if small and options.get("stream") == "gated_streams":
        options["stream_options"] = {"rank": scale.width // 8}
    if small and "heads" in options.get("mixer_options", {}):
        options["mixer_options"] = options["mixer_options"] | {"heads": 3, "head_width": 4}
    shape = {SHORT[key]: getattr(scale, key) for key in ("vocabulary", "width", "blocks", "heads", "hidden")}
    return ModelConfig(**(shape | options | changes))


def training_step(model: Decoder, length: int) -> Run:
    """A forward and backward pass, the gradients made anew."""
    size = model.config.vocab_size
    tokens = torch.randint(0, size, (1, length), generator=torch.Generator().manual_seed(0))

    def run() -> None:
        model.zero_grad()
        F.cross_entropy(model(tokens)[0, :-1], tokens[0, 1:]).backward()

    return run


def activation_peak(model: Decoder, length: int) -> int:
    """The most bytes that activations and what passes between operations take at once; parameters' gradients apart."""
    tokens = torch.randint(0, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # gradients are added to these, so none is made while counting
    found = peak_bytes(lambda: F.cross_entropy(model(tokens)[0, :-1], tokens[0, 1:]).backward())
    model.zero_grad()
    return found
