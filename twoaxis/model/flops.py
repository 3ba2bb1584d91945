"""What a token costs: floating-point operations and parameters of a configuration, counted by one written convention.

The unit is one token of a sequence of T tokens. A multiply-add is two operations.

    part         per token, forward                                         what it is
    embedding    0                                                          a lookup
    projections  2 per weight of query, key, value and output               matrix products
    scores       4 · heads · head width · min(window, T) per block          query times key, weight times value
    mlp          2 per weight of gate, up and down                          matrix products
    head         2 · width · vocabulary, tied or not                        a matrix product
    stream       Stream.flops(), or counted, + 4 · width per way beyond     all a method does, of any kind
                 the first
    mixer        LocalOperator.flops() per operator and way it runs on,     all a mixer does, of any kind
                 + 5 · width for a site of its own

**Total = the model's matrix products + everything the methods add.** This is what matching by FLOPs matches. Of the
backbone only matrix products count: its norms, softmax, rotary positions, activations, biases and residual additions
are the same for all contenders of one shape. Of a method everything counts, so that none is cheaper for being
element-wise: weighted sums, norms, gates. That includes what it makes the trunk do: a pre-norm for each further way
(4 per channel: the mean square is two, the scaling and the learned scale one each), and for a mixer's own site a
pre-norm and a residual addition. `Stream.flops` is beyond the plain additions, so nothing counts twice.

**Attention is the full square.** A token is charged min(window, T) keys, a full prefix being a window of T, also at
the beginning of the sequence where fewer keys are there. Half of the square is masked; it counts because the usual
formulas and `torch.utils.flop_counter` count it, so that numbers here compare with published ones, and because a
token then costs the same wherever it stands. Where attention is spelled out (`fused=False`, "eager"), that counter
and this file agree to the last operation, backward pass included; fused kernels make the scores anew in their
backward pass, which is not charged. The price of the square: a kernel that skips the mask does half as much for a
full prefix but no less for a narrow window, so against it windowed attention looks up to twice as cheap as it is.

**Windows cost what the maths needs**, not what a kernel computes. `twoaxis.window_attention` computes more than the
charged w keys per token: all T keys in short sequences, w - 1 and a chunk of at least 16 keys in long ones. A mixer
does not know T: it is charged its whole window even where the sequence is shorter.

**Training is three times the forward pass**: a matrix product has two in its backward pass, one for each factor, and
what methods add is charged by the same rule. Activation checkpointing adds one more forward pass of the blocks it
recomputes, and of the stream in proportion. (torch stops before a block's last product, whose result nobody needs.)

Left out, as in `Stream.flops`: a method's work that does not grow with the width, such as the softmax over its sources
or Sinkhorn's iterations; and the optimiser, which costs nothing per token.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn

from twoaxis.depth.counts import flops_of
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Trunk
from twoaxis.model.family import FAMILIES
from twoaxis.model.sublayers import MLP, Attention, MixerSublayer, SiteNorm
from twoaxis.sequence.mixer import LocalOperator

M = TypeVar("M", bound=nn.Module)

NORM = 4
"""Operations per channel of an RMSNorm with a learned scale."""


class Flops(NamedTuple):
    """Floating-point operations per token; see the table above.

    Attributes:
        tokens: T, of the sequence the token stands in.
        embedding: 0, a lookup.
        projections: of the attention: query, key, value, output.
        scores: of the attention: logits and weighted values.
        mlp: of the MLPs.
        head: the logits.
        stream: what the residual stream adds to the plain one.
        mixer: what the local mixer adds.
    """

    tokens: int
    embedding: int
    projections: int
    scores: int
    mlp: int
    head: int
    stream: int
    mixer: int

    @property
    def matrix(self) -> int:
        """The backbone's matrix products."""
        return self.embedding + self.projections + self.scores + self.mlp + self.head

    @property
    def blocks(self) -> int:
        """All but the embedding and the head."""
        return self.projections + self.scores + self.mlp + self.stream + self.mixer

    @property
    def total(self) -> int:
        """Per token: what matching by FLOPs matches."""
        return self.matrix + self.stream + self.mixer

    @property
    def sequence(self) -> int:
        """Per sequence of T tokens."""
        return self.total * self.tokens


class Parameters(NamedTuple):
    """Numbers learned.

    Attributes:
        embedding: the tokens' vectors.
        head: 0 where it shares them.
        attention: projections, their biases and the norms of queries and keys.
        mlp: with its biases.
        norms: one scale per site and way, and the final norm.
        stream: of the residual stream.
        mixer: of the local mixers.
    """

    embedding: int
    head: int
    attention: int
    mlp: int
    norms: int
    stream: int
    mixer: int

    @property
    def total(self) -> int:
        """All of them, each counted once."""
        return sum(self)


def forward_flops(config: ModelConfig, tokens: int, *, trunk: Trunk | None = None) -> Flops:
    """Operations per token of a forward pass. Nothing is allocated, whatever the size.

    Args:
        config: the shape and the methods.
        tokens: T, the length of the sequences.
        trunk: its modules, where they have been made; None makes them.
    """
    if tokens < 1:
        raise ValueError(f"a sequence has at least one token, got {tokens}")
    shape, trunk = _trunk(config, trunk)
    sublayers = _add(_block_flops(trunk, block, tokens) for block in range(shape.num_hidden_layers))
    return sublayers._replace(
        head=2 * shape.hidden_size * shape.vocab_size, stream=flops_of(trunk.stream) + _further_norms(trunk)
    )


def training_flops(config: ModelConfig, tokens: int, *, recompute: int = 0, trunk: Trunk | None = None) -> Flops:
    """Operations per token of a forward and backward pass in which all parameters learn.

    Args:
        config: the shape and the methods.
        tokens: T, the length of the sequences.
        recompute: activation checkpointing of every n-th block, the first among them; 0 is none, 1 is all.
        trunk: its modules, where they have been made; None makes them.
    """
    if recompute < 0:
        raise ValueError(f"recompute is every how many blocks, at least 0, got {recompute}")
    shape, trunk = _trunk(config, trunk)
    forward = forward_flops(shape, tokens, trunk=trunk)
    if not recompute:
        return _add([forward] * 3)
    again = range(0, shape.num_hidden_layers, recompute)
    stream = -(-forward.stream * len(again) // shape.num_hidden_layers)  # methods count as a whole, not by block
    return _add([forward, forward, forward, *(_block_flops(trunk, block, tokens) for block in again)], stream)


def step_flops(model: Any, tokens: int, *, recompute: int = 0) -> int:
    """Operations per token of a training step of a model; 6 per parameter in families that have no decoder of ours."""
    family = getattr(getattr(model.config, "text_config", None), "model_type", None)
    if family is None or family in FAMILIES:
        config = model.config if isinstance(model.config, ModelConfig) else model.config.decoder_config()
        return training_flops(config, tokens, recompute=recompute).total
    return 6 * sum(parameter.numel() for parameter in model.parameters())


def count_parameters(config: ModelConfig, *, trunk: Trunk | None = None) -> Parameters:
    """Parameters by part, exact. Nothing is allocated, whatever the size.

    Args:
        config: the shape and the methods.
        trunk: its modules, where they have been made; None makes them.
    """
    shape, trunk = _trunk(config, trunk)
    hosts = _all(trunk, Attention), _all(trunk, MLP)
    attention, mlp = (
        sum(_numbers(host) - sum(map(_numbers, _all(host, LocalOperator))) for host in kind) for kind in hosts
    )
    vectors = shape.vocab_size * shape.hidden_size
    return Parameters(
        embedding=vectors,
        head=0 if shape.tie_word_embeddings else vectors,
        attention=attention,
        mlp=mlp,
        norms=sum(map(_numbers, _all(trunk, SiteNorm))) + _numbers(trunk.norm),
        stream=_numbers(trunk.stream),
        mixer=sum(_numbers(local) for local in _all(trunk, LocalOperator)),
    )


def _trunk(config: ModelConfig, trunk: Trunk | None) -> tuple[ModelConfig, Trunk]:
    """The model's modules without their numbers: what is counted is what is built."""
    if trunk is not None:
        return config, trunk
    with torch.device("meta"):
        return config, Trunk(config)


def _block_flops(trunk: Trunk, block: int, tokens: int) -> Flops:
    """The sub-layers of one block. A mixer's operators count as often as they run, its own site with its norm."""
    projections = scores = mlp = mixer = 0
    for site in trunk.stream.sites_of(block):
        sublayer = trunk.sublayer(site)
        if isinstance(sublayer, MixerSublayer):
            site_work = (
                NORM * len(trunk.stream.ways(site)) + 1
            ) * trunk.config.hidden_size  # and the residual addition
            mixer += sublayer.local.flops() + site_work
            continue
        for a in _all(sublayer, Attention):
            projections += 2 * _weights(a.q_proj, a.k_proj, a.v_proj, a.o_proj)
            scores += 4 * a.o_proj.in_features * min(a.window or tokens, tokens)
            mixer += _hosted(a)
        for m in _all(sublayer, MLP):
            mlp += 2 * _weights(m.gate_proj, m.up_proj, m.down_proj)
            mixer += _hosted(m)
    return Flops(tokens, 0, projections, scores, mlp, head=0, stream=0, mixer=mixer)


def _hosted(host: Attention | MLP) -> int:
    """The operators inside a sub-layer, once for each way they run on."""
    return sum(cast(LocalOperator, host.operator(place)).flops() for place, _ in host.keys)


def _further_norms(trunk: Trunk) -> int:
    """Pre-norms of ways beyond the first. A mixer's site is the mixer's to pay."""
    ways = sum(len(trunk.stream.ways(site)) - 1 for site in trunk.stream.sites if site.kind != "mixer")
    return NORM * trunk.config.hidden_size * ways


def _add(counts: Iterable[Flops], stream: int = 0) -> Flops:
    """The sum of each part, and `stream` more of the stream."""
    tokens, *parts = zip(*counts, strict=True)
    total = Flops(tokens[0], *(sum(part) for part in parts))
    return total._replace(stream=total.stream + stream)


def _all(root: nn.Module, kind: type[M]) -> list[M]:
    return [module for module in root.modules() if isinstance(module, kind)]


def _weights(*linears: nn.Linear) -> int:
    return sum(linear.weight.numel() for linear in linears)


def _numbers(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
