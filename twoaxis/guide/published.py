"""Published figures beside ours, each with the reason where they differ.

Counts must agree; where they do not, the papers count something else, and the last column says what. Speeds were
measured on other hardware with other kernels: ours are estimates, and a published one should lie near or between them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from twoaxis.costs.costs import Costs, cost
from twoaxis.costs.trace import meta_model, trace_step
from twoaxis.depth.counts import count_live
from twoaxis.model.config import ModelConfig
from twoaxis.model.deployment import Deployment
from twoaxis.model.flops import count_parameters, forward_flops
from twoaxis.model.presets import find_shape
from twoaxis.model.stages import Pipeline, plan
from twoaxis.show.document import Column, Table, table


class Figure(NamedTuple):
    """A published figure and ours.

    Attributes:
        source: the paper and the place in it.
        what: is counted or measured.
        published: as they give it.
        ours: as counted here.
        why: they differ, or that they do not.
    """

    source: str
    what: str
    published: str
    ours: str
    why: str


SAME = "equal"
ATTNRES, MUDD = "Attention Residuals, arXiv 2603.15031", "MUDDFormer, arXiv 2502.12170"
DDL, HC, MHC = "Deep Delta Learning", "Hyper-Connections, arXiv 2409.19606", "mHC, arXiv 2512.24880"
DENSE = "DenseFormer, arXiv 2402.02622"
SPEED = "an estimate: other hardware and kernels"


def compared() -> list[Figure]:
    """Every figure."""
    return [*_attention_residuals(), *_muddformer(), *_deep_delta(), *_hyper_connections(), *_denseformer()]


def published_table(rows: list[Figure]) -> Table:
    """As a table."""
    headers = ("source", "what", "published", "ours", "why they differ")
    return table([Column(head, number=False) for head in headers], rows)


# Attention Residuals.


def vectors_per_sublayer(stream: str, width: int = 2048, blocks: int = 64, **options: Any) -> float:
    """Vectors of the model's width that the stream moves per token and sub-layer, fused, the read-out left out."""
    config = ModelConfig(
        hidden_size=width, num_hidden_layers=blocks, num_attention_heads=16, stream=stream, stream_options=options
    )
    sites = trace_step(meta_model(config, "bfloat16"), 1, 4096).sites
    return sum(site.fused for site in sites[1:-1]) / (len(sites) - 2) / (2 * width)


def chunk_transfers(stages: int, virtual: int) -> Pipeline:
    """The pipeline in which every chunk is one block of Attention Residuals, as in the paper's equations."""
    config = ModelConfig(
        hidden_size=8,
        num_hidden_layers=stages * virtual,
        num_attention_heads=2,
        stream="attention_residuals",
        stream_options={"block_size": 2},
    )
    return plan(meta_model(config, "bfloat16"), stages, virtual)


def _attention_residuals() -> list[Figure]:
    io = f"{ATTNRES}, table 1"
    what = "vectors moved per token and sub-layer, 128 sub-layers"
    both = "theirs is an upper bound: keys and values are two reads, and every group reads as much as the last"
    rows = [
        Figure(io, f"{what}: plain residual", "3", f"{vectors_per_sublayer('standard'):.3g}", SAME),
        Figure(
            io,
            f"{what}: full, two-phase, groups of 16",
            "24",
            f"{vectors_per_sublayer('attention_residuals', evaluation='two_phase', group=16):.3g}",
            both,
        ),
        Figure(
            io,
            f"{what}: 8 blocks, two-phase",
            "5.5",
            f"{vectors_per_sublayer('attention_residuals', evaluation='two_phase', block_size=16):.3g}",
            "ours writes the batched reads of a block and reads them again, and logits beside them",
        ),
        Figure(
            io,
            f"{what}: mHC, 4 streams",
            "34",
            f"{vectors_per_sublayer('manifold_hyper_connections'):.3g}",
            "theirs is kernel by kernel, ours one kernel between two sub-layers",
        ),
    ]
    for stages, virtual, naive, cached in ((4, 2, 28, 22), (8, 4, 496, 220)):
        found, place = chunk_transfers(stages, virtual), f"{stages} stages, {virtual} virtual, one block a chunk"
        rows += [
            Figure(
                f"{ATTNRES}, eq. 7",
                f"vectors sent per token, naive; {place}",
                str(naive),
                str(found.naive // 16),
                f"the embedding too, over {stages * virtual - 1} boundaries",
            ),
            Figure(
                f"{ATTNRES}, eq. 8",
                f"vectors sent per token, cached; {place}",
                str(cached),
                str(found.cached // 16),
                f"the embedding once to {stages - 1} stages; nothing that the receiver made itself, "
                f"{(virtual - 1) * stages} times",
            ),
        ]
    k3 = ModelConfig(
        hidden_size=7168,
        num_hidden_layers=93,
        num_attention_heads=56,
        stream="attention_residuals",
        stream_options={"block_size": 24},
    )
    stream = meta_model(k3, "bfloat16").stream
    learned = sum(p.numel() for p in stream.parameters())
    return [
        *rows,
        Figure("Kimi-K3, names and shapes of its weights", "parameters", "2,680,832", f"{learned:,}", SAME),
        Figure(
            ATTNRES,
            "sources of a prefill of 131,072 tokens, width 7168, 8 blocks",
            "15 GB",
            f"{count_live(stream) * 2 * 131_072 / 1e9:.3g} GB",
            "the embedding too",
        ),
    ]


# MUDDFormer.


def mudd_shape(blocks: int, width: int, **options: Any) -> ModelConfig:
    """Pythia's shape with MUDDFormer."""
    hidden = 8 * width // 3
    return ModelConfig(
        vocab_size=50_304,
        hidden_size=width,
        num_hidden_layers=blocks,
        num_attention_heads=width // 64,
        intermediate_size=hidden,
        tie_word_embeddings=False,
        stream="muddformer",
        stream_options=options,
    )


def _muddformer() -> list[Figure]:
    paper, released = mudd_shape(32, 2560), mudd_shape(32, 2560, round64=True, expand_last=True)
    whole = 12 * 32 * 2560**2
    parts = [count_parameters(config).stream for config in (paper, released)]
    flops = forward_flops(paper, 4096)
    beside = flops.projections + flops.scores + flops.mlp
    found = _cost(paper, Deployment(context=2048, micro_batch=4))
    saved = found.activations / _plain(found).activations - 1
    return [
        Figure(
            MUDD,
            "parameters at 2.8B (32 blocks of 2560), share of 12 L D²",
            "0.23%",
            f"{parts[0] / whole:.2%}",
            SAME,
        ),
        Figure(
            "MUDDFormer, released code",
            "the same as released (rounded to 64, wide last module)",
            "0.23%",
            f"{parts[1] / whole:.2%}",
            "the paper's formula leaves the rounding out",
        ),
        Figure(
            MUDD,
            "operations at 2.8B, 4096 tokens, share of the blocks'",
            "0.40%",
            f"{flops.stream / beside:.2%}",
            "ours leaves out what does not grow with the width: the second product of the generator",
        ),
        Figure(MUDD, "activation memory", "+17% to +29%", f"{saved:+.0%}", _MEMORY),
        Figure(MUDD, "training speed at 2.8B, TPU v5p", "0.840", _speed(found), SPEED),
    ]


_MEMORY = "theirs is the measured peak of a device with weights; ours what the backward pass keeps, without recomputing"


# Deep Delta Learning.


def _deep_delta() -> list[Figure]:
    wide, conv, token = {"value_channels": 4}, {"expand": "conv"}, {"compress": "token"}
    variants = (
        ("d_v=1", {}, 36_912, 98_400),
        ("TC without EC", {**wide, **token}, 252_076, 655_700),
        ("TC", {**wide, **token, **conv}, 264_364, 672_084),
        ("CC without EC", wide, 132_268, 348_500),
        ("CC", {**wide, **conv}, 144_556, 364_884),
    )
    rows = []
    for title, options, small, medium in variants:
        ours = [count_parameters(_ddl(name, options)).stream for name in ("small", "medium")]
        rows.append(
            Figure(
                "Deep Delta Learning, official code",
                f"parameters added, {title}, small and medium",
                f"{small:,} and {medium:,}",
                " and ".join(f"{n:,}" for n in ours),
                SAME if ours == [small, medium] else "see the method's page",
            )
        )
    for name, before, after in (("small", 1509.6, 1158.0), ("medium", 537.1, 422.3)):
        found = _cost(_ddl(name, {**wide, **conv}), Deployment(hardware="h200", context=1024, micro_batch=32))
        what = f"training speed of CC, {name}, H200"
        rows.append(Figure(DDL, what, f"{after / before:.3f}", _speed(found), SPEED))
    return rows


def _ddl(name: str, options: dict[str, Any]) -> ModelConfig:
    import dataclasses

    return dataclasses.replace(find_shape(name), stream="deep_delta", stream_options=options)


# Hyper-Connections.


def _hyper_connections() -> list[Figure]:
    import dataclasses

    shape = find_shape("olmo-1b")
    dynamic = dataclasses.replace(shape, stream="hyper_connections", stream_options={"affine": False})
    static = dataclasses.replace(shape, stream="hyper_connections", stream_options={"dynamic": False})
    found = _cost(dynamic, Deployment(context=2048, micro_batch=4))
    saved = found.activations / _plain(found).activations - 1
    flops = forward_flops(dynamic, 2048)
    mixed = ModelConfig(
        hidden_size=2560, num_hidden_layers=30, num_attention_heads=20, stream="manifold_hyper_connections"
    )
    per_site = count_parameters(mixed).stream / 60
    times = _cost(dataclasses.replace(mixed, vocab_size=129_280, tie_word_embeddings=False), Deployment(context=4096))
    return [
        Figure(HC, "parameters, OLMo-1B, DHC x4", "394,048", f"{count_parameters(dynamic).stream:,}", SAME),
        Figure(HC, "parameters, OLMo-1B, SHC x4", "768", f"{count_parameters(static).stream:,}", SAME),
        Figure(
            f"{HC}, table 8",
            "operations, OLMo-1B, DHC x4",
            "+0.200%",
            f"{flops.stream / (flops.total - flops.stream):+.3%}",
            "ours counts a multiply-add as 2 throughout and the norm of every stream",
        ),
        Figure(HC, "memory, OLMo-1B, DHC x4", "+26.1%", f"{saved:+.1%}", _MEMORY),
        Figure(
            f"{MHC}, equations 7 to 9",
            "parameters per sub-layer at width 2560, 4 streams",
            "245,787",
            f"{per_site:,.0f}",
            SAME,
        ),
        Figure(MHC, "training time, 27B, fused kernels", "+6.7%", f"{times.train.fused - 1:+.1%}", SPEED),
    ]


# DenseFormer.


def _denseformer() -> list[Figure]:
    shape = ModelConfig(
        vocab_size=50_304, hidden_size=768, num_hidden_layers=48, num_attention_heads=12, stream="denseformer"
    )
    import dataclasses

    thin = dataclasses.replace(shape, stream_options={"dilation": 4, "period": 5})
    rows = []
    for title, config, speed in (("1x1", shape, 4.65 / 5.94), ("4x5", thin, 5.72 / 5.94)):
        found = _cost(config, Deployment(hardware="a100", context=256, micro_batch=1, batch=64))
        ours = f"{1 / found.prefill.naive:.3f} to {1 / found.prefill.fused:.3f}"
        rows.append(Figure(f"{DENSE}, table 1", f"inference speed, 48 blocks, {title}", f"{speed:.3f}", ours, SPEED))
    return rows


def _cost(config: ModelConfig, deployment: Deployment) -> Costs:
    from twoaxis.model.variant import Contender

    method = Contender(label=config.stream, stream=config.stream, stream_options=dict(config.stream_options))
    return cost(config, method, deployment)


def _plain(found: Costs) -> Costs:
    return cost(found.shape, None, found.deployment)


def _speed(found: Costs) -> str:
    """Speed against the plain residual, as written to fused."""
    return f"{1 / found.train.naive:.3f} to {1 / found.train.fused:.3f}"
