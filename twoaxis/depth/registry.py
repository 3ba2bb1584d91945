"""The registry of streams: one line per method, and the function that builds them by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from twoaxis.base.options import check_type
from twoaxis.base.registry import Registry

if TYPE_CHECKING:
    from twoaxis.depth.site import Placement
    from twoaxis.depth.stream import Stream

METHODS: dict[str, str | type[Stream]] = {
    "standard": "twoaxis.depth.standard:Standard",
    "scaled": "twoaxis.depth.scaled:Scaled",
    "depth_attention": "twoaxis.depth.depth_attention:DepthAttention",
    "denseformer": "twoaxis.depth.denseformer:DenseFormer",
    "attention_residuals": "twoaxis.depth.attention_residuals:AttentionResiduals",
    "delta_attention_residuals": "twoaxis.depth.delta_attention_residuals:DeltaAttentionResiduals",
    "deep_delta": "twoaxis.depth.deep_delta:DeepDelta",
    "hyper_connections": "twoaxis.depth.hyper_connections:HyperConnections",
    "manifold_hyper_connections": "twoaxis.depth.manifold_hyper_connections:ManifoldHyperConnections",
    "gated_streams": "twoaxis.depth.gated_streams:GatedStreams",
    "wide_residual": "twoaxis.depth.wide_residual:WideResidual",
    "elc_bert": "twoaxis.depth.elc_bert:ElcBert",
    "vertical_attention": "twoaxis.depth.vertical_attention:VerticalAttention",
    "deep_cross_attention": "twoaxis.depth.deep_cross_attention:DeepCrossAttention",
    "muddformer": "twoaxis.depth.muddformer:MuddFormer",
    "lime": "twoaxis.depth.lime:Lime",
    "depth_kv": "twoaxis.depth.depth_kv:DepthKV",
}

STREAMS: Registry[Stream] = Registry("stream", METHODS)


def stream_names() -> tuple[str, ...]:
    """The names `stream` takes; it takes those that people use too, such as mhc and ddl."""
    return STREAMS.names()


def stream(
    name: str,
    *,
    blocks: int,
    width: int,
    kinds: Sequence[str] | Sequence[Sequence[str]] = ("attention", "mlp"),
    placement: Placement | str | dict[str, Any] | None = None,
    blend: bool = False,
    model_eps: float = 1e-6,
    **options: Any,
) -> Stream:
    """Build a residual stream.

        stream("attention_residuals", blocks=12, width=768, block_size=8)

    Args:
        name: one of `stream_names()`, or NAME:option=value,... as on the command line.
        blocks: number of blocks.
        width: of the residual stream.
        kinds: the sub-layers of a block, or one sequence of them per block.
        placement: which blocks and sites use the method, e.g. "8-11/attention"; see `Placement`.
        blend: start from the plain residual whatever the method; see `Blend`.
        model_eps: inside the root of the model's norms, for a method that normalises its own reads.
        **options: the method's own; see its Config.
    """
    from twoaxis.depth.stream import Layout

    check_type("blend", blend, bool)
    cls = STREAMS.find(name)
    made = cls(STREAMS.config(name, options), Layout.make(blocks, width, kinds, placement, model_eps))
    made.reset_parameters()
    if not blend:
        return made
    from twoaxis.depth.blend import Blend

    return Blend(made)
