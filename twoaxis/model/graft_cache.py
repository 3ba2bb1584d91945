"""What a grafted model knows of tokens: the cache of earlier ones, and which of them belong together.

The cache is the family's own, and one layer more for what mixes tokens:

    [ family's layer 0 | ... | family's last layer | RingLayer ]        the last one only where something mixes tokens

A cache of transformers is a list of layers and forwards every operation to them, so beams, repetition, recording and
resetting need nothing else. Rings are values: every operation replaces them. Where nothing mixes tokens any cache of
transformers works, static ones included. A mask tells documents and padding apart, or positions that begin anew do.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from twoaxis.base.meter import tensors_in
from twoaxis.model.memory import Past
from twoaxis.window import document_reach

EVERYTHING = 2**40
"""More spare positions than any sequence has: what a recording cache keeps until it is cropped."""


class RingLayer(CacheLayerMixin):
    """One more layer of a cache: the rings of mixers and of streams that mix tokens."""

    is_croppable, supports_early_init = True, False
    is_compileable = True  # asked of the whole cache, to find out whether it is static; the family's layers decide

    def __init__(self, made_for: Any, spare: int = 0, sliding: bool = False) -> None:
        super().__init__()
        self.is_sliding = sliding
        self.made_for, self.spare, self.recording = made_for, spare, False
        self.past = Past(spare=spare)

    def reset(self) -> None:
        """Forget everything."""
        self.past = Past(spare=self.past.spare)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in another order, for beam search."""
        self.past = self.past.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        self.past = self.past.repeat(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        rows = indices.nonzero().squeeze(-1) if indices.dtype == torch.bool else indices
        self.past = self.past.reorder(rows)

    def activate_past_recording(self) -> None:
        """From now on nothing is forgotten until `crop`, so that any number of new tokens can be taken back."""
        self.recording = True
        self.past = self.past.map(lambda ring: ring._replace(spare=EVERYTHING))._replace(spare=EVERYTHING)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens; minus their number, as in transformers. Refused where too few are kept."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of tokens to take back, got {tokens_to_remove}")
        tokens_to_remove = int(tokens_to_remove)  # versions of transformers hand over a tensor, which sums would change
        self.past = self.past.trim(-tokens_to_remove)
        if self.recording:
            small = self.spare
            self.past = self.past.map(lambda ring: ring._replace(spare=small).evict()._replace(spare=EVERYTHING))

    def get_seq_length(self) -> int:
        """Tokens seen; a hybrid cache may ask the first layer that is not linear, which can be this one."""
        return self.past.seen

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what a mask would cover."""
        return self.past.seen + query_length, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: rings begin with their first token."""

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: there are no keys and values here."""
        raise ValueError("this layer of the cache holds rings, no keys and values")


class WithRings(Cache):
    """Mixed into the class of a cache that has a `RingLayer`: it is cropped as a whole or not at all."""

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens of every layer, of the rings first, which may refuse."""
        ring = ring_layer(self)
        assert ring is not None
        ring.crop(tokens_to_remove)
        layer: Any
        for layer in self.layers:
            if layer is not ring:
                layer.crop(tokens_to_remove)


def ring_layer(cache: Cache) -> RingLayer | None:
    """The layer of a cache that holds rings, if it has one."""
    return next((layer for layer in getattr(cache, "layers", ()) if isinstance(layer, RingLayer)), None)


def add_rings(cache: Cache, blocks: int, made_for: Any, spare: int = 0) -> Cache:
    """`cache` with a layer for rings, after those of the family's `blocks`."""
    if not hasattr(cache, "layers"):
        raise ValueError(f"{type(cache).__name__} has no layers to add rings to; leave past_key_values out")
    while cache.layer_class_to_replicate is not None and len(cache.layers) < blocks:
        cache.layers.append(cache.layer_class_to_replicate())  # else the first key would land in the layer of rings
    # a mask is as long as the first layer of its kind says, which must not be this one
    sliding = bool(cache.layers) and all(getattr(layer, "is_sliding", False) for layer in cache.layers)
    cache.layers.append(RingLayer(made_for, spare, sliding))
    cache.__class__ = type(type(cache).__name__, (WithRings, type(cache)), {})
    return cache


def rings_of(cache: Cache, blocks: int, made_for: Any) -> RingLayer:
    """The layer of a cache that holds a model's rings; one that was filled without them, or by another, is refused."""
    if ring_layer(cache) is None:
        if cache.get_seq_length():
            raise ValueError("this cache was filled by another model: it has no rings; use this model's make_cache()")
        add_rings(cache, blocks, made_for)
    ring = ring_layer(cache)
    assert ring is not None
    if ring.made_for != made_for:
        raise ValueError("this cache was made for another model; use this model's make_cache()")
    return ring


def nbytes_by_part(cache: Cache) -> dict[str, int]:
    """Bytes of what the family keeps, of mixers' rings, and of the residual stream's."""
    found = {"backbone": 0, "mixer": 0, "stream": 0}
    for layer in cache.layers:
        if isinstance(layer, RingLayer):
            kept = layer.past.nbytes_by_part()
            found["stream"], found["mixer"] = kept["stream"], kept["local"]
        else:
            found["backbone"] += sum(t.numel() * t.element_size() for t in tensors_in(list(vars(layer).values())))
    return found


HOLE = "attention_mask has a hole: padding may stand on the left or on the right, not inside a row"


def text_positions(positions: Tensor | None) -> Tensor | None:
    """Those along the text: of four rows, three of them in images, the first; three tell nothing of documents."""
    if positions is None or positions.dim() < 3:
        return positions
    return positions[0] if len(positions) > 3 else None


def check_packed(positions: Tensor | None, mask: Any, cached: bool | None, packs: bool, where: str) -> bool | None:
    """Whether a pass is cached: as given, and None becomes False for packed documents, whom a cache would join.

    Positions that begin anew tell documents apart; where they would see each other all the same, they are refused.
    """
    if positions is None or mask is not None or positions.shape[-1] < 2 or (packs and cached is False):
        return cached
    if torch.compiler.is_compiling():  # which cannot look at numbers
        return bool(cached)
    if bool((positions.diff(dim=-1) == 1).all()):
        return cached
    if cached or not packs:
        why = "with a cache" if packs else f"in {where}"
        raise ValueError(f"packed documents (positions that begin anew) would see each other {why}; give them apart")
    return False


def find_reach(mask: Any, positions: Tensor | None, given: Tensor, seen: int) -> Tensor | None:
    """How many earlier tokens belong to each token's document, (B, T); None is all of them."""
    rows, length = given.shape[:2]
    if mask is None:
        return None if positions is None else position_reach(positions.reshape(-1, length)[-rows:], seen)
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] != seen + length:
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask must be (batch, {seen} earlier + {length}) where tokens are mixed, got {got}")
    real = (mask != 0).long()
    hole = (F.pad(real, (1, 0)).diff(dim=-1) == 1).sum(-1).gt(1).any()
    if mask.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(~hole, HOLE)  # pyright: ignore[reportPrivateImportUsage]
    elif bool(hole):
        raise ValueError(HOLE)
    return (real.cumsum(-1) - 1).clamp_min(0)[:, -length:]


def position_reach(positions: Tensor, seen: int) -> Tensor:
    """How many earlier tokens belong to each token's document, (1 or B, T), where positions tell documents apart."""
    document = F.pad(positions.diff(dim=-1) != 1, (1, 0)).cumsum(-1)
    reach = document_reach(document)
    # the document that an earlier chunk began reaches back as far as its own positions say
    return reach if seen == 0 else torch.where(document == 0, positions.clamp_min(0), reach)
