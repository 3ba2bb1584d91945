"""The shape of any family's model, from its config.json: what is asked of a decoder's shape, answered by the graft.

find_shape("folder/config.json")        a `FamilyShape` where the file is a family's or a graft's, whatever the family
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from twoaxis.base.registry import did_you_mean
from twoaxis.model.config import SHORT, Kinds, Methods

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from twoaxis.depth.stream import Stream
    from twoaxis.model.graft import TwoAxisForCausalLM
    from twoaxis.model.graft_survey import Architecture

KERNELS = "twoaxis_meta"
"""What the attention of models on meta tensors is called; see `attend`."""


@dataclass(frozen=True, kw_only=True)
class FamilyShape(Methods):
    """A family's configuration, and methods."""

    family: Mapping[str, Any] = field(default_factory=dict)
    """Its config.json, with `model_type`."""

    @cached_property
    def text(self) -> PreTrainedConfig:
        """The configuration of its decoder."""
        from twoaxis.model.graft_config import family_config

        return family_config(dict(self.family)).get_text_config(decoder=True)

    @cached_property
    def architecture(self) -> Architecture:
        """What its layers do."""
        from twoaxis.model.graft_survey import survey_of

        return survey_of(self.text)

    @property
    def hidden_size(self) -> int:
        """D, the width of the residual stream."""
        return self.architecture.width

    @property
    def num_hidden_layers(self) -> int:
        """Number of blocks."""
        return len(self.architecture.forms)

    @property
    def num_attention_heads(self) -> int:
        """Query heads."""
        return getattr(self.text, "num_attention_heads", 1)

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return getattr(self.text, "num_key_value_heads", None) or self.num_attention_heads

    @property
    def tie_word_embeddings(self) -> bool:
        """The head shares the embedding's weights."""
        return bool(self.text.tie_word_embeddings)

    def hidden_width(self, block: int) -> int:
        """Hidden width of an MLP; of experts that of one."""
        del block
        names = ("moe_intermediate_size", "intermediate_size", "n_inner", "ffn_dim")
        return next((n for name in names if isinstance(n := getattr(self.text, name, None), int)), 4 * self.hidden_size)

    def make_stream(self, *, width: int | None = None, kinds: Kinds | None = None, eps: float = 1e-6) -> Stream:
        """The residual stream for this shape."""
        kinds = kinds or self.with_mixer([form.kinds for form in self.architecture.forms])
        return super().make_stream(width=width or self.hidden_size, kinds=kinds, eps=eps)

    def changed(self, changes: Mapping[str, Any], label: str) -> FamilyShape:
        """The same with fields of the methods or of the family's configuration replaced."""
        own = {each.name for each in fields(Methods)}
        known = {*own, *self.text.to_dict(), *SHORT}
        for key in changes:
            if key not in known:
                family = self.family["model_type"]
                raise ValueError(f"{label}: {family} has no field {key!r}{did_you_mean(key, sorted(known))}")
        inside = {name: value for name, value in changes.items() if name not in own}
        methods = {name: value for name, value in changes.items() if name in own}
        shape = replace(self.plain(), **methods, family={**self.family, **inside})
        if not inside and "architecture" in self.__dict__:
            shape.__dict__["architecture"] = self.architecture  # a dry run that need not be made again
        return shape

    def on_meta(self, dtype: Any) -> TwoAxisForCausalLM:
        """The graft on meta tensors; nothing is allocated."""
        import torch

        from twoaxis.model.graft import TwoAxisForCausalLM
        from twoaxis.model.graft_config import TwoAxisConfig, as_fields
        from twoaxis.model.graft_modules import narrow_new_

        backbone, survey = self._backbone(dtype), self.architecture.to_dict()
        config = TwoAxisConfig(text_config=backbone.config, survey=survey, dtype=dtype, **as_fields(self.methods()))
        with torch.device("meta"):
            model = TwoAxisForCausalLM(config, backbone)
        narrow_new_(model, dtype, torch.device("meta"))
        return model

    def _backbone(self, dtype: Any) -> Any:
        """The family's model on meta tensors; attention is spelled out where the family has no choice of kernels."""
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        from twoaxis.model.graft_config import family_config

        # without a mask function of the same name transformers makes no masks, which would look at numbers
        ALL_ATTENTION_FUNCTIONS.register(KERNELS, attend)
        text = family_config(dict(self.family)).get_text_config(decoder=True)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(text, attn_implementation=KERNELS, dtype=dtype)
            if not (model._supports_attention_backend or model._can_set_attn_implementation()):
                model = AutoModelForCausalLM.from_config(text, attn_implementation="eager", dtype=dtype)
        return model


def attend(
    module: Any, q: Any, k: Any, v: Any, mask: Any = None, *, scaling: Any = None, sliding_window: Any = None, **_: Any
) -> tuple[Any, None]:
    """Fused causal attention of meta tensors (B, H, T, D): no mask is made, and a window reads no more keys."""
    import torch
    import torch.nn.functional as F

    del module, mask
    width, keys = v.shape[-1], sliding_window or k.shape[-2]
    # narrower values are padded, as fused kernels want them
    v = v if width == q.shape[-1] else F.pad(v, (0, q.shape[-1] - width))
    k, v = k[..., -keys:, :], v[..., -keys:, :]
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out = run(q, k, v, 0.0, q.shape[-2] > 1, scale=scaling)[0]
    return out[..., :width].transpose(1, 2).contiguous(), None
