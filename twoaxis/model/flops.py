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

**A family's graft** counts by the same rules: of a layer, its linear layers, its routers, and of its experts those that
a token is sent to; scores are 2 · heads · (query's + value's head width) · min(window, T), by the kind of the layer.
Norms, embeddings and biases have no products. A module that has weights and is none of these, and a sub-layer that
mixes tokens in another way than by attention (state spaces, linear attention), has **no rule**: `uncounted` names it,
and its matrices alone are in the numbers.

Left out, as in `Stream.flops`: a method's work that does not grow with the width, such as the softmax over its sources
or Sinkhorn's iterations; and the optimiser, which costs nothing per token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.model.sublayers import Attention
from twoaxis.sequence.mixer import LocalOperator

NORM = 4
"""Operations per channel of an RMSNorm with a learned scale."""
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
USED = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")
"""What families call the number of their experts, and of those that see a token."""
ATTENDS = re.compile(r"attention|attn", re.I)
NO_SOFTMAX = re.compile(r"linear|lightning|delta|mamba|ssm|recurrent|retention|conv|rwkv|kimi_?delta", re.I)
SEEN = {None: None, "full_attention": None, "sliding_attention": "sliding_window"}
SEEN |= {"chunked_attention": "attention_chunk_size"}
"""Kinds of layers whose attention has a rule, and the field that bounds what a token sees."""


class Flops(NamedTuple):
    """Floating-point operations per token of a sequence of `tokens`, by part; see the table above."""

    tokens: int
    embedding: int = 0
    projections: int = 0
    scores: int = 0
    mlp: int = 0
    head: int = 0
    stream: int = 0
    mixer: int = 0

    @property
    def matrix(self) -> int:
        """The backbone's matrix products."""
        return self.embedding + self.projections + self.scores + self.mlp + self.head

    @property
    def blocks(self) -> int:
        """All but the embedding and the head."""
        return self.total - self.embedding - self.head

    @property
    def total(self) -> int:
        """Per token: what matching by FLOPs matches."""
        return self.matrix + self.stream + self.mixer

    @property
    def sequence(self) -> int:
        """Per sequence of T tokens."""
        return self.total * self.tokens


class Parameters(NamedTuple):
    """Numbers learned, by part.

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


def meta_model(of: Any) -> Any:
    """The decoder or the graft of a configuration, or of a model, without its numbers."""
    config = getattr(of, "config", of)
    if isinstance(config, ModelConfig):
        if isinstance(of, Decoder) and of.embed_tokens.weight.is_meta:
            return of
        with torch.device("meta"):
            return Decoder(config)  # one that runs may be spread over devices
    if isinstance(of, nn.Module):
        return of
    from twoaxis.model.graft_from_scratch import on_meta

    return on_meta(of)


def forward_flops(of: Any, tokens: int) -> Flops:
    """Operations per token of a forward pass. Nothing is allocated, whatever the size.

    Args:
        of: a configuration, of a decoder or of a family with methods in it; or a model, which may be on meta tensors.
        tokens: T, the length of the sequences.
    """
    model = meta_model(of)
    return _add([*_blocks(model, tokens), _ends(model, tokens)])


def training_flops(of: Any, tokens: int, *, recompute: int = 0) -> Flops:
    """Operations per token of a forward and backward pass in which all parameters learn.

    Args:
        of: as in `forward_flops`.
        tokens: T, the length of the sequences.
        recompute: activation checkpointing of every n-th block, the first among them; 0 is none, 1 is all.
    """
    if recompute < 0:
        raise ValueError(f"recompute is every how many blocks, at least 0, got {recompute}")
    model = meta_model(of)
    blocks = _blocks(model, tokens)
    forward, again = _add([*blocks, _ends(model, tokens)]), blocks[::recompute] if recompute else []
    stream = -(-forward.stream * len(again) // len(blocks))  # methods count as a whole, not by block
    total = _add([forward, forward, forward, *again])
    return total._replace(stream=total.stream + stream)


def count(of: Any, tokens: int, *, recompute: int = 0) -> tuple[int, int, tuple[str, ...]]:
    """Parameters, operations per token of a training step, and what has no rule; arguments as `training_flops`."""
    model = meta_model(of)
    return _numbers(model), training_flops(model, tokens, recompute=recompute).total, uncounted(model)


def parameters(of: Any) -> int:
    """Parameters of a model or of a configuration."""
    return _numbers(meta_model(of))


def count_parameters(of: Any) -> Parameters:
    """Parameters by part of a model or of a configuration, exact."""
    model = meta_model(of)
    attention = mlp = 0
    for _, children in _layers(model):
        for kind, child in children:
            own = (
                0 if kind == "norm" else _numbers(child) - sum(_numbers(operator) for _, operator in _operators(child))
            )
            attention, mlp = (attention + own, mlp) if kind == "attention" else (attention, mlp + own)
    stream, mixer = _numbers(model.stream), sum(_numbers(operator) for _, operator in _operators(model))
    tables = [module for module in _outside(model) if isinstance(module, nn.Embedding)]
    embedding, head = sum(map(_numbers, tables)), _head(model)
    own_head = 0 if any(head is table.weight for table in tables) else head.numel()
    norms = _numbers(model) - embedding - own_head - attention - mlp - stream - mixer
    return Parameters(embedding, own_head, attention, mlp, norms, stream, mixer)


def uncounted(model: Any) -> tuple[str, ...]:
    """Classes of modules that have no rule: the operations of a model that has some are more than what is counted."""
    found = dict[str, None]()
    for number, (_, children) in enumerate(_layers(model)):
        for kind, child in children:
            if kind == "attention" and _scores(model, number, child, 1) is None:
                found[_class_name(child)] = None
            found |= {_class_name(m): None for m in _theirs(child) if _product(model, m) is None}
    return tuple(found)


def _layers(model: Any) -> Iterator[tuple[nn.Module, list[tuple[str, nn.Module]]]]:
    """The blocks of a model, each with its sub-layers and norms by kind: attention, norm, or anything else."""
    if isinstance(model, Decoder):
        for block in model.layers:
            named = [(name, child) for name, child in block.named_children() if name != "mixer"]
            yield block, [({"self_attn": "attention", "mlp": "mlp"}.get(name, "norm"), child) for name, child in named]
        return
    from twoaxis.model.graft_layers import children_of, find_layers

    for layer in find_layers(model.backbone):
        children: list[tuple[str, Any]] = list(children_of(layer))
        yield layer, [(child.joint.kind, child) for _, child in children]


def _outside(model: Any) -> Iterator[nn.Module]:
    """The backbone's modules that are in no layer."""
    inside = {id(m) for part in (model.stream, *(layer for layer, _ in _layers(model))) for m in part.modules()}
    return (module for module in getattr(model, "backbone", model).modules() if id(module) not in inside)


def _head(model: Any) -> Tensor:
    if isinstance(model, Decoder):
        return (model.embed_tokens if model.lm_head is None else model.lm_head).weight
    return model.get_output_embeddings().weight


def _text(model: Any) -> Any:
    """The configuration that has the sizes."""
    return model.config if isinstance(model, Decoder) else model.config.get_text_config(decoder=True)


def _blocks(model: Any, tokens: int) -> list[Flops]:
    """The sub-layers of each block. A mixer's operators count as often as they run, its own site with its norm."""
    if tokens < 1:
        raise ValueError(f"a sequence has at least one token, got {tokens}")
    found = []
    for number, (layer, children) in enumerate(_layers(model)):
        sites = model.stream.sites_of(number)
        separate = any("q" in model.stream.ways(site) for site in sites)
        mixer = sum(
            (NORM + 1) * model.stream.layout.width for site in sites if site.kind == "mixer"
        )  # and its addition
        mixer += sum(operator.flops() for _, operator in _operators(layer))
        projections = scores = mlp = 0
        for kind, child in children:
            work = sum(_product(model, module) or 0 for module in _theirs(child))
            if kind != "attention":
                mlp += work
                continue
            projections, scores = projections + work, scores + (_scores(model, number, child, tokens) or 0)
            if separate:  # queries, keys and values go through what stands before one after the other
                mixer += 2 * sum(op.flops() for name, op in _operators(child) if name.endswith("before"))
        found.append(Flops(tokens, projections=projections, scores=scores, mlp=mlp, mixer=mixer))
    return found


def _ends(model: Any, tokens: int) -> Flops:
    """What is in no layer: the head, projections of an embedding, and the stream as a whole."""
    stream, head = model.stream, _head(model)
    outside = (m for m in _outside(model) if getattr(m, "weight", None) is not head)
    further = sum(len(stream.ways(site)) - 1 for site in stream.sites if site.kind != "mixer")  # their pre-norms
    carried = stream.flops() + NORM * stream.layout.width * further
    projections = sum(_product(model, module) or 0 for module in outside)
    return Flops(tokens, projections=projections, head=2 * head.numel(), stream=carried)


def _operators(module: nn.Module) -> list[tuple[str, LocalOperator]]:
    return [(name, part) for name, part in module.named_modules() if isinstance(part, LocalOperator)]


def _theirs(child: nn.Module) -> Iterator[nn.Module]:
    """The modules of a sub-layer, without a mixer's."""
    ours = {id(part) for _, operator in _operators(child) for part in operator.modules()}
    return (module for module in child.modules() if id(module) not in ours)


def _product(model: Any, module: nn.Module) -> int | None:
    """Operations of a module's own matrices and one token; None where it has weights and no rule."""
    own = {n: p for n, p in module.named_parameters(recurse=False) if p.dim() > 1 and not n.endswith("bias")}
    if not own or isinstance(module, nn.Embedding):
        return 0
    text = _text(model)
    experts, used = (next((n for a in names if (n := getattr(text, a, None))), 0) for names in (EXPERTS, USED))
    total = 0
    for weight in own.values():
        if weight.dim() == 2 and (isinstance(module, nn.Linear) or hasattr(module, "nf") or weight.shape[0] == experts):
            total += 2 * weight.numel()  # a linear layer, GPT-2's, or a router
        elif weight.dim() == 3 and experts and used and weight.shape[0] == experts:
            total += 2 * weight.numel() * used // experts
        else:
            return None
    return total


def _scores(model: Any, number: int, child: Any, tokens: int) -> int | None:
    """Operations of the scores and the weighted values of one token; None where it is no attention that has a rule."""
    if isinstance(child, Attention):
        return 4 * child.o_proj.in_features * min(child.window or tokens, tokens)
    text, name = _text(model), _class_name(child)
    text = text.per_layer_config[number] if getattr(text, "is_heterogeneous", False) else text
    kinds = getattr(text, "layer_types", None)
    kind = kinds[number] if kinds else None
    if not ATTENDS.search(name) or NO_SOFTMAX.search(name) or kind not in SEEN:
        return None
    field = SEEN[kind] if kinds else "sliding_window"
    window = getattr(text, field, None) if field else None
    heads = next((n for n in (getattr(child, "num_heads", None), text.num_attention_heads) if isinstance(n, int)), 1)
    plain = getattr(child, "head_dim", None) or getattr(text, "head_dim", None) or text.hidden_size // heads
    wide = [getattr(child, name, None) or plain for name in ("qk_head_dim", "v_head_dim")]
    return 2 * heads * sum(wide) * min(window or tokens, tokens)


def _class_name(module: nn.Module) -> str:
    from twoaxis.model.graft_layers import original_class

    return original_class(module).__name__


def _add(counts: Iterable[Flops]) -> Flops:
    """The sum of each part."""
    tokens, *parts = zip(*counts, strict=True)
    return Flops(tokens[0], *(sum(part) for part in parts))


def _numbers(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
