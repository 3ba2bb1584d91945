"""A depth read is the sequence operator on the transposed tensor; and the plain residual is a depth read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from twoaxis.depth.depth_attention import DepthAttention
from twoaxis.depth.site import Site
from twoaxis.depth.stream import Layout, Seen, Stream, Tokens
from twoaxis.model.config import DecoderConfig
from twoaxis.model.decoder import Decoder
from twoaxis.ring import Ring
from twoaxis.verify.certificate import Certificate, deviation, gradient_deviation, random_tensors
from twoaxis.window import attend, window_attention

FAMILY = "duality"


def duality(seed: int) -> Iterator[Certificate]:
    """Every certificate of the duality."""
    yield layer_by_layer(seed)
    yield transposed(seed)
    yield stream_in_a_decoder(seed)
    yield from residual_as_read(seed)


def layer_by_layer(seed: int, depths: int = 7) -> Certificate:
    """Decoding along depth with the ring equals the operator over the whole depth axis, for every window."""
    worst, count = 0.0, 0
    for kv_heads in (1, 2):
        (states, probe) = random_tensors(seed, (2, 3, depths, 8), (2, 3, depths, 4, 4))
        projections = random_tensors(seed + 1, (8, 16), (8, 4 * kv_heads), (8, 4 * kv_heads))
        leaves = [t.requires_grad_() for t in (states, *projections)]
        q, k, v = (torch.unflatten(states @ p, -1, (-1, 4)) for p in projections)
        for window in [*range(1, depths + 1), None]:
            whole = window_attention(q, k, v, window, axis=2)
            ring, rows = Ring(window, axis=2, merge=False), []
            for depth in range(depths):
                ring = ring.append(k[:, :, depth : depth + 1], v[:, :, depth : depth + 1])
                rows.append(attend(ring, q[:, :, depth : depth + 1]))
            stepped = torch.cat(rows, dim=2)
            worst = max(worst, deviation(stepped, whole), gradient_deviation(stepped, whole, leaves, probe))
            count += 1
    return Certificate(
        FAMILY,
        "depth read, layer by layer with the ring = window_attention over depth (values, gradients)",
        worst,
        1e-12,
        count,
    )


def transposed(seed: int) -> Certificate:
    """The depth operator is the sequence operator after swapping the axes, to the last bit."""
    worst, count = 0.0, 0
    q, k, v = random_tensors(seed + 2, (2, 5, 6, 4, 4), (2, 5, 6, 2, 4), (2, 5, 6, 2, 4))
    for window in [*range(1, 7), None]:
        depth = window_attention(q, k, v, window, axis=2)
        swapped = [t.transpose(1, 2) for t in (q, k, v)]
        sequence = window_attention(swapped[0], swapped[1], swapped[2], window, axis=1).transpose(1, 2)
        worst, count = max(worst, (depth - sequence).abs().max().item()), count + 1
    return Certificate(FAMILY, "axis=depth = axis=sequence on the transposed tensor", worst, 1e-15, count)


def stream_in_a_decoder(seed: int) -> Certificate:
    """What the depth_attention stream reads inside a decoder equals the operator over the states it passed."""
    worst, count = 0.0, 0
    for window in (1, 2, 3, 5, None):
        config = DecoderConfig(
            width=16, blocks=3, heads=2, stream="depth_attention", stream_options={"window": window, "heads": 2}
        )
        model = Decoder(config, seed).double()
        stream = model.stream
        assert isinstance(stream, DepthAttention)
        with torch.no_grad():
            stream.output.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(seed))
        tokens = torch.randint(0, 256, (2, 5), generator=torch.Generator().manual_seed(seed))
        states, reads = _watch(model, tokens)
        q, k, v = ((states @ w[0].mT).unflatten(-1, (2, -1)) for w in (stream.query, stream.key, stream.value))
        z = window_attention(q, k, v, window, axis=2).flatten(-2)
        worst, count = max(worst, deviation(states + z @ stream.output[0].mT, reads)), count + 1
    return Certificate(
        FAMILY, "depth_attention inside a decoder = the operator over its own states", worst, 1e-12, count
    )


def _watch(model: Decoder, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """States before, and reads at, every sub-layer: (B, T, L, D) each."""
    stream, states, reads = model.stream, [], []
    state, info = stream.open(model.embed(tokens)), model.info(tokens, 0, None)
    for site in stream.sites:
        seen = stream.read(state, site)
        states.append(state.value.x)
        reads.append(seen.x)
        c = model.norm(site)(seen)
        y, _ = model.sublayer(site)(c, None, info)
        state = stream.write(state, site, y, seen, c)
    return torch.stack(states, dim=2), torch.stack(reads, dim=2)


class Increments(NamedTuple):
    """The embedding and every increment so far."""

    values: tuple[Tensor, ...]


class ResidualAsRead(Stream):
    """The plain residual written as a causal attention read over depth.

    Queries and keys are zero, so the softmax over the n values so far is uniform; times n it is their sum.
    """

    name = "residual_as_read"
    Config = type(None)

    def _open(self, x: Tensor, tokens: Tokens) -> Increments:
        return Increments((x,))

    def _read(self, value: Increments, site: Site) -> Seen:
        v = torch.stack(value.values, dim=2).unsqueeze(-2)  # (B, T, n, 1, D)
        k = torch.zeros_like(v[..., :1])
        q = k[:, :, -1:]
        return Seen(window_attention(q, k, v, None, axis=2)[:, :, 0, 0] * len(value.values))

    def _write(self, value: Increments, site: Site, y: Tensor, seen: Seen, c: Seen) -> Increments:
        return Increments((*value.values, y))


def residual_as_read(seed: int) -> Iterator[Certificate]:
    """In a real small Transformer, addition and the uniform depth read give the same logits and gradients."""
    logits_worst = gradient_worst = 0.0
    shapes = ((2, 16), (5, 24))
    for blocks, width in shapes:
        plain = Decoder(DecoderConfig(width=width, blocks=blocks, heads=2), seed).double()
        rewritten = Decoder(DecoderConfig(width=width, blocks=blocks, heads=2), seed).double()
        rewritten.stream = ResidualAsRead(None, Layout.make(blocks, width))
        rewritten.load_state_dict(plain.state_dict())
        tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(seed))
        first, second = plain(tokens), rewritten(tokens)
        logits_worst = max(logits_worst, deviation(second, first))
        (probe,) = random_tensors(seed, tuple(first.shape))
        ours = torch.autograd.grad(first, list(plain.parameters()), probe)
        theirs = torch.autograd.grad(second, list(rewritten.parameters()), probe)
        gradient_worst = max(gradient_worst, *(deviation(b, a) for a, b in zip(ours, theirs, strict=True)))
    statement = "the plain residual as a uniform causal depth read = addition, in a Transformer: "
    yield Certificate(FAMILY, statement + "logits", logits_worst, 1e-12, len(shapes))
    yield Certificate(FAMILY, statement + "every gradient", gradient_worst, 1e-10, len(shapes))
