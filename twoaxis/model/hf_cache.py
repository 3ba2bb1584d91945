"""`TwoAxisCache`: one cache object for keys and values, mixers' rings, convolutions and Deep Delta's token side.

It follows transformers' cache protocol and holds a `Past`, which is a value: every operation replaces it, so a copy
of an old one stays valid. Local state is constant in the length of the sequence; depth streams keep nothing between
tokens except Deep Delta's TC and EC. What cannot be done is refused before a wrong number can come out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from twoaxis.model.decoder import Past, Trunk

EVERYTHING = 2**40
"""More spare positions than any sequence has: what a recording cache keeps until it is cropped."""


class TwoAxisCache(Cache):
    """What a two-axis model remembers between calls.

    Args:
        trunk: the model's trunk, which knows what its parts remember.
        spare: tokens that can be cropped at any time although a window has moved past them; `activate_past_recording`
            makes every later token croppable instead.
    """

    def __init__(self, trunk: Trunk, spare: int = 0) -> None:
        super().__init__(layers=[])
        self.spare = spare
        self.recording = False
        self.empty = trunk.start(spare)
        self.past: Past = self.empty
        self.blocks = trunk.config.num_hidden_layers
        self.made_for = trunk.config

    # What transformers asks.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, padding included."""
        return self.past.seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No limit."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Length and offset of what a mask would cover; the model makes its own."""
        return self.past.seen + query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Position of the next token."""
        return self.past.seen

    def __len__(self) -> int:
        return self.blocks

    def __repr__(self) -> str:
        return f"TwoAxisCache({self.past.seen} tokens, {self.nbytes()} bytes)"

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before the first token."""
        rows = (piece[0].shape[0] for ring in self.past.rings() for piece in ring.pieces)
        return next(rows, -1)

    @property
    def is_compileable(self) -> bool:
        """Shapes grow with the sequence: compiled models see them as dynamic."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether there are tokens."""
        return self.past.seen > 0

    @property
    def is_croppable(self) -> bool:
        """Every part can be put back as it was."""
        return True

    @property
    def is_sliding(self) -> list[bool]:
        """Windows are the model's own affair."""
        return [False] * self.blocks

    @property
    def is_linear(self) -> list[bool]:
        """No block is without attention."""
        return [False] * self.blocks

    # What transformers changes.

    def reset(self) -> None:
        """Forget everything."""
        self.past = self.empty
        if self.recording:
            self.activate_past_recording()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in another order, for beam search."""
        self.past = self.past.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        self.past = self.past.repeat(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        rows = indices if indices.dtype != torch.bool else indices.nonzero().squeeze(-1)
        self.past = self.past.reorder(rows)

    def activate_past_recording(self) -> None:
        """From now on nothing is forgotten until `crop`, so that any number of new tokens can be taken back."""
        self.recording = True
        self.past = self.past.map(lambda ring: ring._replace(spare=EVERYTHING))

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens.

        Args:
            tokens_to_remove: minus the number of tokens; a positive number is the length to keep, as older versions of
                transformers had it; 0 takes nothing back and lets a recording cache forget what no later token needs.
        """
        count = -tokens_to_remove if tokens_to_remove <= 0 else max(0, self.past.seen - tokens_to_remove)
        past = self.past.trim(count)
        if self.recording:
            small = past.map(lambda ring: ring._replace(spare=self.spare).evict())
            past = small.map(lambda ring: ring._replace(spare=EVERYTHING))
        self.past = past

    # What it does not have.

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: this cache is filled by its own model only."""
        raise ValueError("a TwoAxisCache is filled by its own model; other models need a cache of their own")

    update_conv_state = update
    update_recurrent_state = update
    update_indexer = update

    def offload(self, *args: Any, **kwargs: Any) -> None:
        """Refused."""
        raise ValueError("a TwoAxisCache cannot be offloaded")

    prefetch = offload
    early_initialization = offload

    # What is ours.

    def nbytes(self) -> int:
        """Bytes held."""
        return self.past.nbytes()

    def nbytes_by_part(self) -> dict[str, int]:
        """Bytes of what grows with the sequence, of local windows and convolutions, and of the residual stream."""
        return self.past.nbytes_by_part()
