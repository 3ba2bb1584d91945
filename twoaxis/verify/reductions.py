"""Reductions: where one method, restricted, is another one, or a theorem holds of its mixing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from twoaxis.depth.compose import Composed, compose
from twoaxis.depth.manifold_hyper_connections import ManifoldHyperConnections
from twoaxis.depth.registry import stream
from twoaxis.depth.stream import Stream
from twoaxis.model.config import DecoderConfig
from twoaxis.model.decoder import Decoder
from twoaxis.verify.certificate import Certificate, deviation, gradient_deviation, random_tensors

FAMILY = "reduction"
BLOCKS, WIDTH = 5, 8


def reductions(seed: int) -> Iterator[Certificate]:
    """Every reduction."""
    yield mudd_is_denseformer(seed)
    yield one_stream_is_plain(seed)
    yield cross_attention_of_ones_is_plain(seed)
    yield scalars_are_elc_bert(seed)
    yield from wide_window_is_full(seed)
    yield canon_of_zeros_is_plain(seed)
    yield from doubly_stochastic(seed)


def _run(made: Stream, maps: Sequence[Tensor]) -> Composed:
    """Toy sub-layers through a stream; a site with several ways gets their sum."""
    functions = [lambda *ways, m=m: torch.tanh(torch.stack(ways).sum(0) @ m) for m in maps]
    return compose(made, [(site.kind, None, fn) for site, fn in zip(made.sites, functions, strict=True)])


def _agree(first: Stream, second: Stream, seed: int) -> float:
    """Largest deviation of two streams in outputs and in the gradients of embedding and sub-layers."""
    count = len(first.sites)
    x, maps, probe = random_tensors(seed, (2, 3, WIDTH), (count, WIDTH, WIDTH), (2, 3, WIDTH))
    leaves = [x.requires_grad_(), (0.4 * maps).requires_grad_()]
    outs = [_run(made, list(leaves[1]))(x) for made in (first, second)]
    return max(deviation(outs[0], outs[1]), gradient_deviation(outs[0], outs[1], leaves, probe))


def _randomise(made: Stream, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def mudd_is_denseformer(seed: int) -> Certificate:
    """One way and static weights: MUDDFormer is DenseFormer with the same numbers."""
    shape: dict[str, Any] = {"blocks": BLOCKS, "width": WIDTH}
    mudd = stream("muddformer", **shape, ways="one", dynamic=False).double()
    dense = stream("denseformer", **shape).double()
    _randomise(dense, seed)
    with torch.no_grad():
        for name, alpha in dense.named_parameters():
            mudd.get_parameter(name.replace("alpha", "static")).copy_(alpha[None])
    return Certificate(FAMILY, "muddformer, one way, static = denseformer", _agree(mudd, dense, seed), 1e-12)


def one_stream_is_plain(seed: int) -> Certificate:
    """Static hyper-connections with one stream at their start are the plain residual."""
    shape: dict[str, Any] = {"blocks": BLOCKS, "width": WIDTH}
    one = stream("hyper_connections", **shape, streams=1, dynamic=False).double()
    plain = stream("standard", **shape).double()
    return Certificate(FAMILY, "hyper_connections, n = 1, static = plain", _agree(one, plain, seed), 1e-12)


def cross_attention_of_ones_is_plain(seed: int) -> Certificate:
    """Scalar weights of one on every contribution: DeepCrossAttention is the plain residual."""
    shape: dict[str, Any] = {"blocks": BLOCKS, "width": WIDTH}
    ones = stream("deep_cross_attention", **shape, version=1, ways="single").double()
    with torch.no_grad():
        for parameter in ones.parameters():
            parameter.fill_(1.0)
    plain = stream("standard", **shape).double()
    return Certificate(FAMILY, "deep_cross_attention v1 single at ones = plain", _agree(ones, plain, seed), 1e-12)


def scalars_are_elc_bert(seed: int) -> Certificate:
    """Input-independent Attention Residuals are ELC-BERT's softmax scalars when both see the same sources.

    A block of one sub-layer makes ELC-BERT's slots single sub-layer outputs, and its weighted output the final read.
    """
    shape: dict[str, Any] = {"blocks": BLOCKS, "width": WIDTH, "kinds": ("attention",)}
    scalars = stream("attention_residuals", **shape, query="none").double()
    elc = stream("elc_bert", **shape, variant="weighted_output").double()
    _randomise(elc, seed)
    with torch.no_grad():
        for name, logits in elc.named_parameters():
            scalars.get_parameter(name.replace("logits", "scalars")).copy_(logits)
    statement = "attention_residuals, scalars = elc_bert's aggregation on the same sources"
    return Certificate(FAMILY, statement, _agree(scalars, elc, seed), 1e-12)


def wide_window_is_full(seed: int) -> Iterator[Certificate]:
    """A depth window as wide as the network is no window: k-DCA, Attention Residuals, depth attention."""
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "deep_cross_attention": ({"window": BLOCKS}, {}),
        "attention_residuals": ({"window": 2 * BLOCKS}, {}),
        "depth_attention": ({"window": 2 * BLOCKS + 1, "heads": 2}, {"window": None, "heads": 2}),
    }
    for name, (wide, full) in cases.items():
        first, second = (stream(name, blocks=BLOCKS, width=WIDTH, **options).double() for options in (wide, full))
        _randomise(first, seed)
        second.load_state_dict(first.state_dict())
        yield Certificate(FAMILY, f"{name}, window >= depth = full", _agree(first, second, seed), 1e-12)


def canon_of_zeros_is_plain(seed: int) -> Certificate:
    """Canon-A with one zero tap leaves the decoder as it is, to the bit."""
    shape: dict[str, Any] = {"vocabulary": 61, "width": 16, "blocks": 3, "heads": 2}
    options = {"set": "A", "kernel": 1, "start": "zero"}
    canon = Decoder(DecoderConfig(**shape, mixer="canon", mixer_options=options), seed).double()
    plain = Decoder(DecoderConfig(**shape), seed).double()
    tokens = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(seed))
    error = (canon(tokens) - plain(tokens)).abs().max().item()
    return Certificate(FAMILY, "canon A, one zero tap = plain decoder", error, 0.0)


def doubly_stochastic(seed: int) -> Iterator[Certificate]:
    """mHC's mixing: rows and columns sum to one, its spectral norm is at most one, and so it is for products."""
    made = stream("manifold_hyper_connections", blocks=BLOCKS, width=WIDTH, streams=4, iterations=500).double()
    assert isinstance(made, ManifoldHyperConnections)
    _randomise(made, seed)
    with torch.no_grad():
        made.fn.mul_(0.2)  # at extreme logits Sinkhorn's iteration, exact in the limit, is slow to get there
        made.base.mul_(0.5)
        made.scale.fill_(1.0)
    (h,) = random_tensors(seed, (3, 5, 4, WIDTH))
    product = torch.eye(4, dtype=torch.float64).expand(3, 5, 4, 4)
    rows = columns = norms = products = negative = 0.0
    for row in range(2 * BLOCKS):
        mixing = made.coefficients(h, row)[2].detach().mT  # (to, from)
        product = mixing @ product
        rows = max(rows, (mixing.sum(-1) - 1).abs().max().item())
        columns = max(columns, (mixing.sum(-2) - 1).abs().max().item())
        negative = max(negative, (-mixing).clamp_min(0).max().item())
        norms = max(norms, torch.linalg.matrix_norm(mixing, ord=2).max().item() - 1)
        products = max(products, torch.linalg.matrix_norm(product, ord=2).max().item() - 1)
    count = 2 * BLOCKS
    name = "manifold_hyper_connections"
    yield Certificate(FAMILY, f"{name}: mixing is non-negative, rows sum to one", max(rows, negative), 1e-12, count)
    yield Certificate(FAMILY, f"{name}: columns sum to one (500 iterations)", columns, 1e-8, count)
    yield Certificate(FAMILY, f"{name}: spectral norm is at most one", max(norms, 0.0), 1e-8, count)
    yield Certificate(FAMILY, f"{name}: and so is that of products over depth", max(products, 0.0), 1e-8, count)
