"""Theorems: the duality of the two axes, the algebra of single methods, reductions of one to another, cost orders.

A theorem is a claim that is measured from a seed alone. Each names the methods that it is about; nothing else in the
room does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twoaxis.base.meter import Meter
from twoaxis.base.registry import parse
from twoaxis.depth.registry import stream
from twoaxis.depth.site import Site
from twoaxis.depth.standard import StandardConfig
from twoaxis.depth.stream import Applied, Seen, Stream, Tokens
from twoaxis.depth.walk import visit
from twoaxis.ring import Ring
from twoaxis.verify.claim import Result, claim, deviation, disagreement, random_tensors
from twoaxis.verify.depth import depends
from twoaxis.verify.subject import SMALL, Run, build, perturbed, stepping, with_toy_sublayers
from twoaxis.window import attend, window_attention

BLOCKS, WIDTH = 5, 8


def between_sublayers(
    name: str, seed: int, *, blocks: int = BLOCKS, kinds: Sequence[str] = ("attention", "mlp"), **options: Any
) -> Run:
    """A stream, `name:option=value,...`, with toy sub-layers, its parameters far off their initial values."""
    name, given = parse(name)
    made = stream(name, blocks=blocks, width=WIDTH, kinds=kinds, **given, **options).double()
    perturbed(made, 1.0, torch.Generator().manual_seed(seed))
    return Run(name, with_toy_sublayers(made, seed), seed)


# Duality: a depth read is the sequence operator on the transposed tensor, and the plain residual is a depth read.


@claim(
    "duality",
    "depth read, layer by layer with the ring = window_attention over depth (values, gradients)",
    (),
    bound=1e-12,
)
def layer_by_layer(seed: int, depths: int = 7) -> dict[str, float]:
    """Decoding along depth with the ring equals the operator over the whole depth axis, for every window."""
    errors = {}
    for kv_heads in (1, 2):
        (states,) = random_tensors(seed, (2, 3, depths, 8))
        projections = random_tensors(seed + 1, (8, 16), (8, 4 * kv_heads), (8, 4 * kv_heads))
        leaves = [t.requires_grad_() for t in (states, *projections)]
        q, k, v = (torch.unflatten(states @ p, -1, (-1, 4)) for p in projections)
        for window in [*range(1, depths + 1), None]:
            whole = window_attention(q, k, v, window, axis=2)
            ring, rows = Ring(window, axis=2), []
            for depth in range(depths):
                ring = ring.append(k[:, :, depth : depth + 1], v[:, :, depth : depth + 1])
                rows.append(attend(ring, q[:, :, depth : depth + 1]))
            errors[f"window {window}, {kv_heads} heads"] = disagreement(torch.cat(rows, dim=2), whole, leaves, seed)
    return errors


@claim("duality", "axis=depth = axis=sequence on the transposed tensor", (), bound=1e-15)
def transposed(seed: int) -> dict[str, float]:
    """The depth operator is the sequence operator after swapping the axes."""
    q, k, v = random_tensors(seed + 2, (2, 5, 6, 4, 4), (2, 5, 6, 2, 4), (2, 5, 6, 2, 4))
    errors = {}
    for window in [*range(1, 7), None]:
        turned_q, turned_k, turned_v = (t.transpose(1, 2) for t in (q, k, v))
        along_time = window_attention(turned_q, turned_k, turned_v, window, axis=1)
        errors[f"window {window}"] = deviation(window_attention(q, k, v, window, axis=2), along_time.transpose(1, 2))
    return errors


@claim("duality", "depth_attention between sub-layers = the operator over their states", (), bound=1e-12)
def depth_attention(seed: int) -> dict[str, float]:
    """What the stream reads at each site equals the operator over the residuals that the sub-layers made."""
    errors = {}
    for window in (1, 2, 3, 5, None):
        run = between_sublayers("depth_attention", seed, window=window, heads=2)
        x = run.input()
        steps, _ = run.steps(x)
        states = torch.stack([x, *(step.seen.x + step.y for step in steps[:-1])], dim=2)
        weights = [run.method.get_parameter(name)[0].mT for name in ("query", "key", "value", "output")]
        q, k, v = (torch.unflatten(states @ weight, -1, (2, -1)) for weight in weights[:3])
        read = states + window_attention(q, k, v, window, axis=2).flatten(-2) @ weights[3]
        for i, step in enumerate(steps):
            errors[f"window {window}, site {i}"] = deviation(step.seen.x, read[:, :, i])
    return errors


class ResidualAsRead(Stream):
    """The plain residual written as a causal attention read over depth.

    Queries and keys are zero, so the softmax over the n values so far is uniform; times n it is their sum.
    """

    name = "residual_as_read"
    Config = StandardConfig

    def _open(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, ...]:
        return (x,)

    def _read(self, value: tuple[Tensor, ...], site: Site) -> Seen:
        v = torch.stack(value, dim=2).unsqueeze(-2)  # (B, T, n, 1, D)
        k = torch.zeros_like(v[..., :1])
        return Seen(window_attention(k[:, :, -1:], k, v, None, axis=2)[:, :, 0, 0] * len(value))

    def _write(self, value: tuple[Tensor, ...], site: Site, y: Tensor, seen: Seen, c: Seen) -> tuple[Tensor, ...]:
        return (*value, y)


@claim("duality", "the plain residual as a uniform causal depth read = addition, in a Transformer", (), bound=1e-11)
def residual_as_read(seed: int) -> float:
    """In a small Transformer, addition and the uniform depth read give the same logits and gradients."""
    model = build(SMALL, seed)
    tokens = stepping(model, seed).inputs()
    added = model(tokens)
    model.stream = ResidualAsRead(StandardConfig(), model.stream.layout)
    return disagreement(model(tokens), added, list(model.parameters()), seed)


# Deep Delta's regimes.


class Rewrite(NamedTuple):
    """One write of Deep Delta: the state before and after, (..., d_v, D), the direction k and the value v."""

    before: Tensor
    after: Tensor
    k: Tensor
    v: Tensor

    def along(self, state: Tensor) -> Tensor:
        """kᵀX."""
        return torch.einsum("...d,...vd->...v", self.k, state)

    def mirrored(self, state: Tensor) -> Tensor:
        """X - 2 k kᵀX."""
        return state - 2 * self.along(state).unsqueeze(-1) * self.k.unsqueeze(-2)


@torch.no_grad()
def rewrite(seed: int, gate: float, channels: int, value: str) -> Rewrite:
    """A write with its gate held at `gate`, of a value that is linear in the read or, if constant, zero."""
    options: dict[str, Any] = {"value_channels": channels, "k_eps": 1e-12, "value": value, "value_constant": 0.0}
    method = between_sublayers("deep_delta", seed, blocks=1, kinds=("mlp",), **options).method
    method.gate_weight.zero_()
    method.gate_bias.fill_(torch.logit(torch.tensor(gate / 2, dtype=torch.float64)).item())
    x, y, matrix = random_tensors(seed, (2, 3, WIDTH), (2, 3, WIDTH), (2, 3, channels, WIDTH))
    state = method.open(x) if channels == 1 else method.unpack((matrix,), method.sites[0])
    v = torch.zeros(2, 3, channels, dtype=torch.float64)
    if value == "linear":
        v = method.read(state, method.sites[0]).x @ method.value_weight[0].mT + method.value_bias[0]
    after = visit(method, state, method.sites, lambda site, seen: Applied(seen._replace(aux=None), y))
    x, z = (method.pack(s)[0].reshape(2, 3, channels, WIDTH) for s in (state, after))
    return Rewrite(x, z, y / y.norm(dim=-1, keepdim=True), v)


@claim("algebra", "deep_delta: the error kᵀX - v shrinks by exactly 1 - β", (), bound=1e-12)
def shrinks(seed: int) -> dict[str, float]:
    """On vector and matrix states: a gate of 1 overwrites kᵀX by v, one of 0 keeps the state to the bit."""
    errors = {}
    for gate, channels in itertools.product((0.0, 0.3, 0.9, 1.0, 1.4, 1.95), (1, 4)):
        w = rewrite(seed, gate, channels, "linear")
        left, before = w.along(w.after) - w.v, w.along(w.before) - w.v
        errors[f"β = {gate}, d_v = {channels}"] = deviation(left, (1 - gate) * before)
        if gate == 0.0:
            errors[f"kept, d_v = {channels}"] = float(not torch.equal(w.after, w.before))
    return errors


@claim("algebra", "deep_delta, gate 2: the shortcut is a Householder reflection", (), bound=1e-12)
def reflects(seed: int) -> dict[str, float]:
    """On vector and matrix states; mirrored twice they are as they were."""
    errors = {}
    for channels in (1, 4):
        w = rewrite(seed, 2.0, channels, "constant")
        errors[f"once, d_v = {channels}"] = deviation(w.after, w.mirrored(w.before))
        errors[f"twice, d_v = {channels}"] = deviation(w.mirrored(w.after), w.before)
    return errors


# Weights of single methods.


@claim("algebra", "attention_residuals: weights are non-negative and sum to one", (), bound=1e-13)
@torch.no_grad()
def convex(seed: int) -> dict[str, float]:
    """For every block size, at every site."""
    errors = {}
    for size in range(1, 9):
        run = between_sublayers("attention_residuals", seed, blocks=7, kinds=("mlp",), block_size=size)
        for step in run.steps(run.input())[0]:
            weights = run.method.weights(step.before, step.site)
            assert weights is not None
            off, negative = (weights.sum(-1) - 1).abs().max().item(), (-weights).clamp_min(0).max().item()
            errors[f"block size {size}, site {step.site.index}"] = max(off, negative)
    return errors


@claim("algebra", "denseformer: an average touches exactly the slots of its residue class", ())
def residue_classes(seed: int, blocks: int = 9) -> dict[str, float]:
    """The average after block j depends on slot s only if s = j modulo the dilation, and then it does."""
    wrong: dict[str, float] = {}
    for dilation in (1, 2, 3, 4):
        method = between_sublayers("denseformer", seed, blocks=blocks, kinds=("mlp",), dilation=dilation).method
        slots = [t.requires_grad_() for t in random_tensors(seed, *([(1, 2, WIDTH)] * (blocks + 1)))]
        reads: list[Tensor] = []

        def act(site: Site, seen: Seen, slots: list[Tensor] = slots, reads: list[Tensor] = reads) -> Applied:
            reads.append(seen.x)
            return Applied(seen, slots[site.index + 1] - seen.x)  # the block's output is the next slot

        reads.append(method.close(visit(method, method.open(slots[0]), method.sites, act)))
        for (j, read), s in itertools.product(enumerate(reads), range(blocks + 1)):
            touched = s <= j and (j - s) % dilation == 0
            wrong[f"dilation {dilation}: {s} -> {j}"] = float(depends(read, slots)[s] != touched)
    return wrong


def mixings(seed: int) -> list[Tensor]:
    """mHC's mixing matrices (B, T, to, from) at every site of a pass, after 500 Sinkhorn iterations."""
    run = between_sublayers("manifold_hyper_connections", seed, streams=4, iterations=500)
    with torch.no_grad():
        for name, parameter in run.method.named_parameters():
            # at extreme logits the iteration, exact in the limit, is slow to get there
            parameter.mul_(0.3) if name != "scale" else parameter.fill_(1.0)
        steps, _ = run.steps(run.input())
        return [run.method.quantities(s.before, s.site, s.y, s.seen, s.c)["mix"].value.double() for s in steps]


@claim("reduction", "manifold_hyper_connections: mixing is non-negative, rows and columns sum to one", (), bound=1e-8)
def doubly_stochastic(seed: int) -> dict[str, float]:
    """Rows and columns of every mixing matrix."""
    found = torch.stack(mixings(seed))
    sums = {f"dimension {dim}": (found.sum(dim) - 1).abs().max().item() for dim in (-1, -2)}
    return sums | {"negative": (-found).clamp_min(0).max().item()}


@claim(
    "reduction", "manifold_hyper_connections: the spectral norm of products over depth is at most one", (), bound=1e-8
)
def norms(seed: int) -> dict[str, float]:
    """Of every product of consecutive mixing matrices from the first on."""
    errors, product = {}, torch.eye(4, dtype=torch.float64)
    for site, mixing in enumerate(mixings(seed)):
        product = mixing @ product
        errors[f"site {site}"] = max(torch.linalg.matrix_norm(product, ord=2).max().item() - 1, 0.0)
    return errors


# Reductions: where one method, restricted, is another one.


def _same(first: Stream, second: Stream) -> None:
    first.load_state_dict(second.state_dict())


def _start(first: Stream, second: Stream) -> None:
    first.reset_parameters()


def _ones(first: Stream, second: Stream) -> None:
    for parameter in first.parameters():
        parameter.fill_(1.0)


def _renamed(theirs: str, ours: str) -> Callable[[Stream, Stream], None]:
    def align(first: Stream, second: Stream) -> None:
        for name, parameter in second.named_parameters():
            target = first.get_parameter(name.replace(theirs, ours))
            target.copy_(parameter.view_as(target))

    return align


PAIR, ONE = ("attention", "mlp"), ("attention",)  # with one sub-layer per block ELC-BERT's slots are sub-layer outputs


def one_stream(first: str, second: str, align: Callable[..., None], kinds: tuple[str, ...], seed: int) -> float:
    """Deviation of two streams, one aligned with the other, in outputs and gradients of embedding and sub-layers."""
    method, run = (between_sublayers(name, seed, kinds=kinds) for name in (first, second))
    method = method.method
    with torch.no_grad():
        align(method, run.method)
    x = run.input(grad=True)
    return disagreement(run.end(method.open(x), method), run(x), [x, *run.run.functions.parameters()], seed)


def reduces(first: str, second: str, align: Callable[[Stream, Stream], None], kinds: tuple[str, ...] = PAIR) -> None:
    """Register the claim that two streams are one; `align` gives the second one's parameters to the first."""

    def measured(seed: int) -> float:
        """Outputs, and the gradients of embedding and sub-layers."""
        return one_stream(first, second, align, kinds, seed)

    claim("reduction", f"{first} = {second}", (), bound=1e-12)(measured)


reduces("muddformer:ways=one,dynamic=false", "denseformer", _renamed("alpha", "static"))
reduces("hyper_connections:streams=1,dynamic=false", "standard", _start)
reduces("deep_cross_attention:version=1,ways=single", "standard", _ones)
reduces("attention_residuals:query=none", "elc_bert:variant=weighted_output", _renamed("logits", "scalars"), ONE)
reduces(f"deep_cross_attention:window={BLOCKS}", "deep_cross_attention", _same)
reduces(f"attention_residuals:window={2 * BLOCKS}", "attention_residuals", _same)
reduces(f"depth_attention:window={2 * BLOCKS + 1},heads=2", "depth_attention:window=null,heads=2", _same)


@claim("algebra", "attention_residuals: two-phase = direct (values, gradients)", (), bound=1e-11)
def two_phases(seed: int) -> dict[str, float]:
    """For every block size."""
    names = [f"attention_residuals:block_size={size}" for size in range(1, 9)]
    return {name: one_stream(f"{name},evaluation=two_phase", name, _same, PAIR, seed) for name in names}


@claim("reduction", "canon A, one zero tap = plain decoder", ())
@torch.no_grad()
def canon_of_zeros(seed: int) -> float:
    """Canon-A with one zero tap leaves the decoder as it is, to the bit."""
    plain = build(SMALL, seed)
    canon = build(replace(SMALL, mixer="canon", mixer_options={"set": "A", "kernel": 1, "start": "zero"}), seed)
    tokens = stepping(plain, seed).inputs()
    return deviation(canon(tokens), plain(tokens))


# Orders: the reads alone are counted, because both axes pay projections alike.


def sequence_read(tokens: int, window: int, width: int) -> int:
    """Operations of a windowed read along time."""
    q, k, v = (torch.ones(1, tokens, 1, width) for _ in range(3))
    with Meter(record=False) as count:
        window_attention(q, k, v, window, axis=1)
    return count.flops


def depth_read(tokens: int, window: int | None, depths: int, width: int) -> int:
    """Operations of reading over depth at every layer, one layer after the other."""
    q, k, v = (torch.ones(1, tokens, 1, 1, width) for _ in range(3))
    with Meter(record=False) as count:
        ring = Ring(window, axis=2)
        for _ in range(depths):
            ring = ring.append(k, v)
            attend(ring, q)
    return count.flops


SEQUENCE = {"tokens": 1024, "window": 33, "width": 32}
DEPTH = {"tokens": 8, "window": 4, "depths": 64, "width": 64}


def order(
    statement: str, count: Callable[..., int], small: dict[str, Any], change: dict[str, Any], power: float
) -> None:
    """Register the claim that operations grow with a power of the size that is changed, to twice what it is."""

    def measured(seed: int) -> Result:
        """The exponent when the size doubles; counts are exact, the seed is not needed."""
        exponent = math.log2(count(**(small | change)) / count(**small))
        return Result(abs(exponent - power), 0.1, f"{exponent:.3f}")

    claim("orders", f"{statement} = {power:g}", ())(measured)


order("ShortSWA O(T w d): exponent of T", sequence_read, SEQUENCE, {"tokens": 2048}, 1.0)
order("ShortSWA O(T w d): exponent of w", sequence_read, SEQUENCE, {"window": 65}, 1.0)  # w - 1 doubles
order("depth window O(T K L d): exponent of T", depth_read, DEPTH, {"tokens": 16}, 1.0)
order("depth window O(T K L d): exponent of K", depth_read, DEPTH, {"window": 8}, 1.0)
order("depth window O(T K L d): exponent of L", depth_read, DEPTH, {"depths": 128}, 1.0)
order("full depth O(T L² d): exponent of L", depth_read, DEPTH | {"window": None}, {"depths": 128}, 2.0)
