"""Properties every method must have, measured on small decoders: neutral class, Blend, causality, chunking.

Each function returns the largest deviation on one decoder; the certificates below run them over every registered
method and its `variants`, and the conformance kit runs them on a stranger's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from twoaxis.depth.blend import Blend
from twoaxis.depth.registry import STREAMS, stream_names
from twoaxis.model.config import DecoderConfig
from twoaxis.model.decoder import Decoder
from twoaxis.sequence.registry import MIXERS, mixer_names
from twoaxis.verify.certificate import Certificate, deviation

SMALL = DecoderConfig(vocabulary=61, width=16, blocks=3, heads=2, kv_heads=1, hidden=24)
"""The decoder the properties are measured on; norms have an epsilon of 1e-5."""

NEUTRAL_BOUND = {"bitwise": 0.0, "rounding": 1e-12, "scale": 1e-10}


def instances(**changes: Any) -> Iterator[tuple[str, DecoderConfig]]:
    """A decoder configuration for every variant of every stream and mixer, with its label."""
    for name in stream_names():
        for options in STREAMS.find(name).variants:
            yield label(name, options), dataclasses.replace(SMALL, stream=name, stream_options=options, **changes)
    for name in mixer_names():
        for options in MIXERS.find(name).variants:
            yield label(name, options), dataclasses.replace(SMALL, mixer=name, mixer_options=options, **changes)


def label(name: str, options: Any) -> str:
    """`name:option=value,...`, the spelling of the command line."""
    return name + (":" + ",".join(f"{k}={v}" for k, v in options.items()) if options else "")


def sample_tokens(seed: int, length: int = 12, config: DecoderConfig = SMALL) -> Tensor:
    """A small random batch."""
    return torch.randint(0, config.vocabulary, (2, length), generator=torch.Generator().manual_seed(seed))


def build(config: DecoderConfig, seed: int, *, perturb: float = 0.0) -> Decoder:
    """A float64 decoder; `perturb` moves the stream's and mixers' parameters off their initial values."""
    model = Decoder(config, seed).double()
    if perturb:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.stream.parameters():
                parameter += perturb * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


def neutral_deviation(config: DecoderConfig, seed: int) -> float:
    """How far a method at its neutral parameters is from the plain decoder; see `Neutral` for the classes."""
    probe = build(config, seed)
    if probe.stream.neutral == "scale":
        # equal up to the pre-norm's epsilon: without one it is equal to rounding
        config = dataclasses.replace(config, norm_eps=1e-60)
    model = build(config, seed, perturb=0.1)
    model.stream.neutral_()
    plain = Decoder(dataclasses.replace(config, stream="standard", stream_options={}, placement=None), seed).double()
    share_weights(plain, model)
    tokens = sample_tokens(seed)
    return deviation(model(tokens), plain(tokens))


def share_weights(plain: Decoder, model: Decoder) -> None:
    """Copy everything but the stream from `plain` into `model`; a pre-norm's scale goes into every way."""
    with torch.no_grad():
        theirs = dict(plain.named_parameters())
        for name, parameter in model.named_parameters():
            if not name.startswith("stream."):
                parameter.copy_(theirs[name].expand_as(parameter))


def blend_deviations(config: DecoderConfig, seed: int) -> tuple[float, float]:
    """Closed gates against the plain decoder, and open gates against the method: absolute differences."""
    method = build(config, seed, perturb=0.1)
    blended = Decoder(dataclasses.replace(config, blend=True), seed).double()
    assert isinstance(blended.stream, Blend)
    blended.stream.method.load_state_dict(method.stream.state_dict())
    plain = Decoder(dataclasses.replace(config, stream="standard", stream_options={}, placement=None), seed).double()
    tokens = sample_tokens(seed)
    share_weights(plain, blended)
    closed = (blended(tokens) - plain(tokens)).abs().max().item()
    with torch.no_grad():
        blended.stream.gate.fill_(1.0)
        for name, parameter in blended.named_parameters():
            if not name.startswith("stream."):
                parameter.copy_(method.get_parameter(name))
    return closed, (blended(tokens) - method(tokens)).abs().max().item()


def causality_deviation(config: DecoderConfig, seed: int) -> float:
    """How much the logits before a changed token move."""
    model, tokens = build(config, seed, perturb=0.1), sample_tokens(seed)
    before, worst = model(tokens), 0.0
    for position in (1, 5, tokens.shape[1] - 1):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % config.vocabulary
        worst = max(worst, (model(changed)[:, :position] - before[:, :position]).abs().max().item())
    return worst


def chunking_deviation(config: DecoderConfig, seed: int, splits: tuple[tuple[int, ...], ...] | None = None) -> float:
    """How far a prompt in chunks, with the memory carried along, is from one pass."""
    model, tokens = build(config, seed, perturb=0.1), sample_tokens(seed)
    length = tokens.shape[1]
    whole, worst = model(tokens), 0.0
    for cuts in splits or ((1,) * length, (2, 1, 5, length - 8), (length - 3, 1, 1, 1), random_split(seed, length)):
        past, rows = model.start(), []
        for chunk in tokens.split(list(cuts), dim=1):
            logits, past = model.step(chunk, past)
            rows.append(logits)
        worst = max(worst, deviation(torch.cat(rows, dim=1), whole))
    return worst


def random_split(seed: int, length: int) -> tuple[int, ...]:
    """A random cut of `length` into chunks."""
    generator = torch.Generator().manual_seed(seed)
    cuts, left = [], length
    while left:
        cuts.append(int(torch.randint(1, left + 1, (1,), generator=generator)))
        left -= cuts[-1]
    return tuple(cuts)


def neutral_classes(seed: int) -> Iterator[Certificate]:
    """One certificate per stream variant that declares a neutral class."""
    for name, config in instances():
        if config.mixer is not None:
            continue
        kind = config.make_stream().neutral
        if kind != "none":
            yield Certificate(
                "neutral", f"{name} is plain: {kind}", neutral_deviation(config, seed), NEUTRAL_BOUND[kind]
            )


def blends(seed: int) -> Iterator[Certificate]:
    """Blend at gate zero and at gate one, over every stream variant."""
    for name in stream_names():
        pairs = [
            blend_deviations(config, seed) for _, config in instances() if config.stream == name and not config.mixer
        ]
        closed, opened = (max(column) for column in zip(*pairs, strict=True))
        yield Certificate("blend", f"{name}: gate 0 = the plain decoder", closed, 0.0, len(pairs))
        yield Certificate("blend", f"{name}: gate 1 = the method", opened, 0.0, len(pairs))


def sequence_side(seed: int) -> Iterator[Certificate]:
    """Causality in time and independence of chunking, over every stream and mixer variant."""
    names = [*stream_names(), *mixer_names()]
    for name in names:
        mine = [c for n, c in instances() if (c.mixer or c.stream) == name]
        worst = max(causality_deviation(config, seed) for config in mine)
        yield Certificate("sequence", f"{name}: the past does not see the future", worst, 1e-13, len(mine))
        worst = max(chunking_deviation(config, seed) for config in mine)
        yield Certificate("sequence", f"{name}: a prompt in chunks = one pass", worst, 1e-12, 4 * len(mine))
