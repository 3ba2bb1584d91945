"""Depth-Attention: before an attention looks along the sequence, its query looks along depth and mixes the values.

Zeng, Hao, Wang, Song, Li, Song, Liu, He, Wang, Lin: Depth-Attention: Cross-Layer Value Mixing for Language Models,
arXiv 2606.05014 (2026). Code: LUMIA-Group/Depth-Attention, read in the copy hyq718/Depth-Attention.

    q_l, k_l, v_l                                            of one token in attention l, after norms and positions
    a_i = softmax_i( < q_l , k_i > / sqrt(d) )               over earlier attentions i of the stride, and l itself
    u_l = Σ_i a_i u_i + a_l v_l                              u_i: what attention i mixed, for the first one v
    y_l = attention along the sequence with q, k and u       u_l takes the place of v_l in the cache

    token t    (k_0,u_0)   (k_4,u_4)   (k_8,v_8)
                   └───────────┴───── q_8 ─┘──► u_8 ──► attention over tokens ≤ t of layer 8
    residual   x ──(+)── ... ──(+)── ... ──(+)──►            plain

It has no parameters, and between tokens nothing is kept but the usual keys and values. Along depth the keys and mixed
values of one token travel with the residual. Queries and keys stand at the same position, so that rotary positions
cancel in their products, unless some layers have none. With grouped queries the mean of a group looks along depth, so
that keys and values stay as many as they are. The paper writes the softmax over all earlier layers (`stride=1`); its
released configurations take every 4th (410M) or 16th (3B). `depth_attention` is another method: it has projections of
its own and reads states of the residual.

Readings: a layer that the placement leaves out is no source for others either; the stride counts the layers that take
part. Where an attention normalises its keys, the code here mixes by the keys that the attention compares, which are
normalised before the rotation; the released Llama code does so after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twoaxis.base.method import history_card
from twoaxis.base.options import Count, Options
from twoaxis.depth.history import Exchanged, HistoryStream, View
from twoaxis.depth.plan import attention_plan
from twoaxis.depth.site import Site
from twoaxis.depth.stream import Apply, Layout, Seen
from twoaxis.kernels.history import source_dots, weighted_sum


@dataclass(frozen=True, kw_only=True)
class DepthKVConfig(Options):
    """Options of Depth-Attention."""

    stride: Count = 1
    """Every `stride`-th attention is looked back at, from the first on."""
    window: Count | None = None
    """How many of the last of them are looked back at; None is all."""


class DepthKV(HistoryStream):
    """Values mixed over depth by the attention's own queries and keys."""

    source, goes_on = "kv", "own"
    tensors = 2

    name = "depth_kv"
    Config = DepthKVConfig
    config: DepthKVConfig
    variants = ({}, {"stride": 2}, {"window": 1}, {"stride": 2, "window": 1})
    card = history_card(
        title="Depth-Attention",
        purpose="each attention's values are mixed with earlier layers' by its queries and keys; nothing is learned",
        source="keys and values of an earlier attention",
        query="the attention's queries",
        key="keys of earlier attentions at the same token",
        value="their mixed values",
        literal_qkv=True,
        normaliser="softmax",
        adaptivity="per token and head",
        window="all earlier attentions, every stride-th, or the last few",
        granularity="per attention",
        ways="values",
        injection="replaces the attention's values, in the cache too",
        sharing="no parameters",
        depth_state="keys and values with a reader ahead, and the residual",
        paper="Zeng et al., Depth-Attention, arXiv 2606.05014",
    )

    def __init__(self, config: DepthKVConfig, layout: Layout) -> None:
        super().__init__(config, layout)
        self.follow(attention_plan(layout, self.uses, config.stride, config.window))
        self.neutral = "none" if self.plan.reads else "bitwise"

    def exchange(self, q: Tensor, k: Tensor, v: Tensor, view: View | None, site: Site) -> Exchanged:
        """Mixed values in place of the attention's own; they are the source for later attentions."""
        if view is not None:
            asking = q.unflatten(-2, (k.shape[-2], -1)).mean(-2, keepdim=True)  # (..., Hkv, 1, d)
            keys = [*(source.also[0] for source in view.kept), k]
            weights = (source_dots(asking, keys) * k.shape[-1] ** -0.5).softmax(-1)
            (v,) = weighted_sum([*view.sources, v], token=weights)
        return k, v, (v, k)

    def definition(self, x: Tensor, apply: Apply) -> Tensor:
        """Attention by attention; keys and mixed values are lists."""
        keys: list[Tensor] = []
        mixed: list[Tensor] = []

        def mix(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, None]:
            chosen = range(0, len(keys), self.config.stride)
            chosen = chosen if self.config.window is None else chosen[-self.config.window :]
            groups = q.unflatten(-2, (k.shape[-2], q.shape[-2] // k.shape[-2]))
            asking = sum(groups.unbind(-2)) / groups.shape[-2]
            logits = (asking * torch.stack([*(keys[i] for i in chosen), k])).sum(-1) / k.shape[-1] ** 0.5
            u = (logits.softmax(0).unsqueeze(-1) * torch.stack([*(mixed[i] for i in chosen), v])).sum(0)
            keys.append(k)
            mixed.append(u)
            return k, u, None

        met: set[int] = set()  # blocks whose attention has been
        for site in self.sites:
            attends = site.kind in ("attention", "parallel") and site.block not in met
            met |= {site.block} if attends else set()
            x = x + apply(site, Seen(x, kv=mix if attends else None)).y
        return x
