"""The algebra of single methods: Deep Delta's regimes, Attention Residuals' weights, DenseFormer's residue classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from twoaxis.depth.compose import compose
from twoaxis.depth.deep_delta import DeepDelta
from twoaxis.depth.registry import stream
from twoaxis.depth.stream import Seen, Stream
from twoaxis.verify.certificate import Certificate, deviation, gradient_deviation, random_tensors

FAMILY = "algebra"


def algebra(seed: int) -> Iterator[Certificate]:
    """Every certificate of single methods."""
    yield from delta_regimes(seed)
    yield from attention_residual_weights(seed)
    yield residue_classes(seed)


def _delta(seed: int, gate: float, dv: int, **options: Any) -> tuple[DeepDelta, Tensor, Tensor, Tensor, Seen]:
    """One write of Deep Delta with its gate held at `gate`: the module, X before, X after, the direction, the read."""
    made = stream("deep_delta", blocks=1, width=8, value_channels=dv, k_eps=1e-12, **options).double()
    assert isinstance(made, DeepDelta)
    x, y = random_tensors(seed, (2, 3, 8), (2, 3, 8))
    with torch.no_grad():
        made.gate_weight.zero_()
        made.gate_bias.fill_(torch.logit(torch.tensor(gate / 2, dtype=torch.float64)).item())
    state = made.open(x)
    if dv > 1:
        (matrix,) = random_tensors(seed + 1, (2, 3, 8, dv))
        state = state._replace(value=state.value._replace(x=matrix))
    site = made.sites[0]
    seen = made.read(state, site)
    after = made.write(state, site, y, seen, seen)
    wide = [t if dv > 1 else t.unsqueeze(-1) for t in (state.value.x, after.value.x)]
    return made, wide[0], wide[1], y / y.norm(dim=-1, keepdim=True), seen


def delta_regimes(seed: int) -> Iterator[Certificate]:
    """β = 0, 1, 2 and the contraction of the error, for vector and matrix states."""
    keep = overwrite = mirror = involution = contraction = 0.0
    for dv in (1, 4):
        _, before, after, k, seen = _delta(seed, 0.0, dv)
        keep = max(keep, (after - before).abs().max().item())
        made, before, after, k, seen = _delta(seed, 1.0, dv)
        overwrite = max(overwrite, deviation(_along(k, after), made.values(0, seen.x)))
        made, before, after, k, seen = _delta(seed, 2.0, dv, value="constant", value_constant=0.0)
        householder = torch.eye(8, dtype=torch.float64) - 2 * k.unsqueeze(-1) * k.unsqueeze(-2)
        mirror = max(mirror, deviation(after, householder @ before))
        involution = max(involution, deviation(householder @ after, before))
        for gate in (0.3, 0.9, 1.4, 1.95):
            made, before, after, k, seen = _delta(seed, gate, dv)
            v = made.values(0, seen.x)
            contraction = max(contraction, deviation(_along(k, after) - v, (1 - gate) * (_along(k, before) - v)))
    yield Certificate(FAMILY, "deep_delta, gate 0: the state is kept to the bit", keep, 0.0, 2)
    yield Certificate(FAMILY, "deep_delta, gate 1: kᵀX is overwritten by v exactly", overwrite, 1e-12, 2)
    yield Certificate(FAMILY, "deep_delta, gate 2: the shortcut is a Householder reflection", mirror, 1e-12, 2)
    yield Certificate(FAMILY, "deep_delta, gate 2: mirrored twice is the state again", involution, 1e-12, 2)
    yield Certificate(FAMILY, "deep_delta: the error kᵀX - v shrinks by exactly 1 - β", contraction, 1e-10, 8)


def _along(k: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("...d,...dv->...v", k, x)


def _run(made: Stream, x: Tensor, weights: Tensor) -> Tensor:
    sublayers = [("mlp", None, lambda t, w=w: torch.tanh(t @ w)) for w in weights]
    return compose(made, sublayers)(x)


def attention_residual_weights(seed: int) -> Iterator[Certificate]:
    """Convexity, and agreement of the two evaluations for every block size."""
    count, width, eps = 7, 8, 1e-6
    x, matrices, query, scale, probe = random_tensors(
        seed, (2, 3, width), (count, width, width), (count + 1, width), (count + 1, width), (2, 3, width)
    )
    matrices = (0.5 * matrices).requires_grad_()
    convex = phases_worst = 0.0
    for size in range(1, count + 2):
        outs = []
        for evaluation in ("direct", "two_phase"):
            made = stream(
                "attention_residuals",
                blocks=count,
                width=width,
                kinds=("mlp",),
                block_size=size,
                eps=eps,
                evaluation=evaluation,
            ).double()
            with torch.no_grad():
                made.get_parameter("query").copy_(query)
                made.get_parameter("norm_weight").copy_(scale)
            outs.append(_run(made, x, matrices))
            if evaluation == "direct":
                convex = max(convex, _convexity(made, x, matrices))
        phases_worst = max(
            phases_worst, deviation(outs[1], outs[0]), gradient_deviation(outs[1], outs[0], [matrices], probe)
        )
    yield Certificate(FAMILY, "attention_residuals: weights are non-negative and sum to one", convex, 1e-13, count + 1)
    yield Certificate(
        FAMILY, "attention_residuals: two-phase = direct (values, gradients)", phases_worst, 1e-11, count + 1
    )


def _convexity(made: Stream, x: Tensor, matrices: Tensor) -> float:
    state, worst = made.open(x), 0.0
    for site, matrix in zip(made.sites, matrices, strict=True):
        weights = made.weights(state, site)
        assert weights is not None
        worst = max(worst, (weights.sum(-1) - 1).abs().max().item(), (-weights).clamp_min(0).max().item())
        seen = made.read(state, site)
        state = made.write(state, site, torch.tanh(seen.x @ matrix), seen, seen)
    return worst


def residue_classes(seed: int, blocks: int = 9) -> Certificate:
    """The average after block j depends on slot s only if s = j modulo the dilation, and then it does."""
    worst, count = 0.0, 0
    for dilation in (1, 2, 3, 4):
        made = stream("denseformer", blocks=blocks, width=4, kinds=("mlp",), dilation=dilation).double()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for alpha in made.parameters():
                alpha.copy_(0.5 + torch.rand(alpha.shape, generator=generator, dtype=torch.float64))
        slots = [t.requires_grad_() for t in random_tensors(seed, *([(1, 2, 4)] * (blocks + 1)))]
        state = made.open(slots[0])
        for j, site in enumerate((*made.sites, made.layout.out)):
            seen = made.read(state, site)
            grads = torch.autograd.grad(seen.x.sum(), slots, allow_unused=True, retain_graph=True)
            for s, grad in enumerate(grads):
                touched = grad is not None and bool(grad.abs().max() > 0)
                wrong = touched != (s <= j and (j - s) % dilation == 0)
                worst, count = max(worst, float(wrong)), count + 1
            if site is not made.layout.out:
                # an increment that makes the block's output exactly the next slot, whatever was read
                state = made.write(state, site, slots[j + 1] - seen.x.detach(), seen._replace(x=seen.x.detach()), seen)
    return Certificate(
        FAMILY, "denseformer: an average touches exactly the slots of its residue class", worst, 0.0, count
    )
