"""Public implementations of the same methods, in the same process and on the same tensors.

A package that is not installed has no row. flash-linear-attention's file is loaded by itself, because its package needs
Triton at import.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.limit import both, forward
from benchmarks.operators import fixed_read, fused_attention, leaves
from benchmarks.scale import Scale
from benchmarks.tables import Table, timed
from benchmarks.timing import Run, interleave, peak_bytes
from twoaxis import Decoder, ModelConfig, compose, stream, window_attention


def peers(scale: Scale) -> Table:
    """Time and peak memory of the others against ours: above one, we are faster or smaller."""
    rows: dict[str, dict[str, float]] = {}
    for title, make in (
        ("flash-linear-attention, naive_attnres", _attention_residuals),
        ("hyper-connections, HyperConnections n=4", _hyper_connections),
        ("deep-cross-attention, DCAGPT k=2, training step of 6 blocks", _deep_cross_attention),
        ("scaled_dot_product_attention with a dense band mask, w=16", _dense_mask),
        ("FlexAttention compiled, w=16, forward", _flex),
    ):
        made = make(scale)
        if made is None:
            continue
        ours, theirs = made
        timing = interleave({"ours": ours, "theirs": theirs}, scale.rounds)["theirs"]
        rows[title] = timed(timing)
        if make is not _flex:  # what compiled code makes inside is not seen
            rows[title]["memory"] = peak_bytes(theirs) / peak_bytes(ours)
    note = "Theirs through ours: above 1 we are faster, or need less. Forward + backward unless said."
    return Table("Against public implementations on the CPU", note, rows)


Pair = tuple[Run, Run] | None


def _load(package: str, file: str) -> Any:
    """One file of an installed package, without importing the package."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent / file
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.exists() or spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _attention_residuals(scale: Scale) -> Pair:
    """One read of Attention Residuals: RMS-normalised keys, one query for all tokens."""
    package = _load("fla", "ops/attnres/naive.py")
    if package is None:
        return None
    tokens, width = scale.read
    sources = [torch.randn(1, tokens, width, requires_grad=True) for _ in range(scale.sources[0])]
    query, norm = torch.randn(width, requires_grad=True), torch.ones(width, requires_grad=True)
    grad = torch.randn(1, tokens, width)

    def ours() -> Tensor:
        return fixed_read(sources, query * norm, 1e-6)

    def theirs() -> Tensor:
        return package.naive_attnres(query, sources, norm)

    variables = [query, norm, *sources]
    return both(ours, variables, grad), both(theirs, variables, grad)


def _hyper_connections(scale: Scale) -> Pair:
    """The stream alone: eight sub-layers that only scale their input."""
    if importlib.util.find_spec("hyper_connections") is None:
        return None
    package: Any = importlib.import_module("hyper_connections")
    width, x = scale.width, torch.randn(1, scale.length, scale.width, requires_grad=True)
    grad = torch.randn(1, scale.length, scale.width)
    made = stream("hyper_connections", blocks=4, width=width, norm="rms")
    ours = compose(made, [(site.kind, None, _scaled) for site in made.sites])
    expand, reduce = package.HyperConnections.get_expand_reduce_stream_functions(4)
    theirs = nn.Sequential(*(package.HyperConnections(4, dim=width, branch=_Scaled(), layer_index=i) for i in range(8)))
    return lambda: ours(x).backward(grad), lambda: reduce(theirs(expand(x))).backward(grad)


def _scaled(x: Tensor) -> Tensor:
    return x * 0.5


class _Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _scaled(x)


def _deep_cross_attention(scale: Scale) -> Pair:
    """A whole small model, because theirs stacks its history outside the operator.

    The rules differ a little: theirs reads the first and the last k states once a block.
    """
    if importlib.util.find_spec("deep_cross_attention") is None:
        return None
    from deep_cross_attention import DCAGPT

    heads, width, blocks = scale.heads, scale.width // 2, 6
    shape: dict[str, Any] = {
        "vocab_size": scale.vocabulary,
        "hidden_size": width,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
    }
    options: dict[str, Any] = {"stream": "deep_cross_attention", "stream_options": {"window": 2}}
    # their MLP is not gated: two matrices of 4 D are as many parameters as three of 8/3 D
    ours = Decoder(ModelConfig(**shape, intermediate_size=8 * width // 3, **options))
    theirs = DCAGPT(scale.vocabulary, width, blocks, past_layers_k=2, dim_head=width // heads, heads=heads)
    tokens = torch.randint(0, scale.vocabulary, (1, scale.length))
    return _language_step(ours, tokens), _language_step(theirs, tokens)


def _language_step(model: nn.Module, tokens: Tensor) -> Run:
    def run() -> None:
        model.zero_grad()
        F.cross_entropy(model(tokens)[0, :-1], tokens[0, 1:]).backward()

    return run


def _dense_mask(scale: Scale) -> Pair:
    length = scale.window_length // 4
    qkv, grad = leaves(length)
    lag = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    mask = (lag >= 0) & (lag < 16)

    def ours() -> Tensor:
        return window_attention(qkv[0], qkv[1], qkv[2], 16, 1)

    def theirs() -> Tensor:
        return fused_attention(qkv[0], qkv[1], qkv[2], attn_mask=mask)

    return both(ours, qkv, grad), both(theirs, qkv, grad)


def _flex(scale: Scale) -> Pair:
    """Forward only: FlexAttention has no backward pass on a CPU."""
    if scale.quick:
        return None
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length = scale.window_length // 4
    q, k, v = (t.detach() for t in leaves(length)[0])

    def band(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i - j < 16)

    mask = create_block_mask(band, None, None, length, length, device="cpu", BLOCK_SIZE=64)
    compiled: Callable[..., Tensor] = torch.compile(flex_attention)

    ours = forward(lambda: window_attention(q, k, v, 16, 1))
    q_h, k_h, v_h = (t.transpose(1, 2) for t in (q, k, v))
    return ours, forward(lambda: compiled(q_h, k_h, v_h, block_mask=mask))
