"""The two-axis model around pretrained tensors.

The model is built without storage; the source's tensors take their places one by one, the pre-norm's scale in every way
of its site. What the source does not have is made here: the stream, the mixers and the mixers' pre-norms, with their
usual initial values, then set to neutral.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from twoaxis.model.hf_config import TwoAxisConfig
from twoaxis.model.hf_model import TwoAxisForCausalLM
from twoaxis.model.initialise import named_generator
from twoaxis.pretrained.families import TRUNK
from twoaxis.pretrained.start import adopt_norms, is_norm, locals_of

if TYPE_CHECKING:
    from twoaxis.depth.stream import Stream


@torch.no_grad()
def build(
    config: TwoAxisConfig,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
    copy: bool = False,
) -> TwoAxisForCausalLM:
    """A model whose pretrained part is `tensors` and whose new part is neutral.

    Args:
        config: its shape and methods.
        tensors: the source's parameters by our names; see `families.state`.
        dtype: of the model; what a stream wants in float32 is at least that.
        device: of the new parameters; the tensors stay where they are.
        seed: of the new parameters that start at random.
        copy: make tensors of one's own; else the model takes over the given ones where dtype and shape allow.
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = TwoAxisForCausalLM(config)
    trunk = model.model.trunk
    model.model.rotary = LlamaRotaryEmbedding(cast(Any, config)).to(device)
    trunk.stream = _new_stream(config, dtype, seed).to(device)
    for name, local in locals_of(trunk):
        local.to_empty(device=device)
        local.reset_parameters(config.initializer_range, named_generator(seed, name, next(local.parameters())))
        local.to(dtype)
        local.neutral_()
    for name in mixer_norms(model):
        _put(model, name, torch.ones(model.get_parameter(name).shape, dtype=dtype, device=device))
    for name, tensor in adopt_norms(trunk.stream, tensors):
        _place(model, name, tensor, dtype, copy)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    missing = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    if missing:
        raise ValueError(
            f"the source lacks {len(missing)} of the weights its configuration asks for: {missing[0]}, ..."
        )
    model.config.dtype = dtype
    return model.eval()


def new_names(model: TwoAxisForCausalLM) -> list[str]:
    """Parameters that no source has: the stream's, the mixers' and the pre-norms of mixers."""
    heads = [f"{TRUNK}stream.", *(f"{TRUNK}{name}." for name, _ in locals_of(model.model.trunk))]
    inside = [name for name, _ in model.named_parameters() if name.startswith(tuple(heads))]
    return [*inside, *mixer_norms(model)]


def mixer_norms(model: TwoAxisForCausalLM) -> list[str]:
    """The pre-norms of mixers at sites of their own."""
    made = model.model.trunk.stream
    return [f"{TRUNK}layers.{s.block}.mixer.norm.weight" for s in made.sites if s.kind == "mixer" and made.normed(s)]


@torch.no_grad()
def plain_twin(model: TwoAxisForCausalLM) -> TwoAxisForCausalLM:
    """The same model with the plain stream and without a mixer; it shares the pretrained tensors."""
    methods = {"stream": "standard", "stream_options": None, "placement": None, "blend": False}
    methods |= {"mixer": None, "mixer_options": None, "mixer_blocks": None}
    fields = {
        name: value for name, value in model.config.to_dict().items() if name in TwoAxisConfig.__dataclass_fields__
    }
    config = TwoAxisConfig(**{**fields, **methods})
    config._attn_implementation = model.config._attn_implementation
    new = set(new_names(model))
    theirs = {n: t for n, t in model.named_parameters() if n not in new and ".norm_" not in n}
    dtype, device = model.model.embed_tokens.weight.dtype, model.model.embed_tokens.weight.device
    return build(config, theirs.items(), dtype=dtype, device=device)


def count(model: nn.Module) -> tuple[int, int]:
    """Parameters and their bytes, a shared one counted once."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() * p.element_size() for p in parameters)


def _new_stream(config: TwoAxisConfig, dtype: torch.dtype, seed: int) -> Stream:
    """The stream with its neutral values, set in its own dtype: biases that make it neutral may need every digit."""
    with torch.random.fork_rng(devices=[]):
        stream = config.decoder_config().make_stream()
    stream.reset_parameters(named_generator(seed, "stream", torch.empty(0)))
    for group in stream.parameter_groups():
        wanted = torch.promote_types(dtype, torch.float32) if group.float32 else dtype
        for name in group.names:
            parameter = stream.get_parameter(name)
            parameter.data = parameter.data.to(wanted)
    stream.neutral_()
    return stream


def _place(model: nn.Module, name: str, tensor: Tensor, dtype: torch.dtype, copy: bool) -> None:
    if not tensor.is_floating_point():
        raise ValueError(
            f"the source's {name} is {tensor.dtype}, not a floating-point tensor; quantised weights are refused"
        )
    try:
        place = model.get_parameter(name)
    except AttributeError:
        raise ValueError(f"the source has a weight for {name}, its configuration has none") from None
    if tensor.shape != place.shape:
        raise ValueError(f"the source's {name} is {tuple(tensor.shape)}, its configuration says {tuple(place.shape)}")
    taken = tensor.detach().to(dtype)
    if copy and taken.data_ptr() == tensor.data_ptr():
        taken = taken.clone()
    _put(model, name, taken.contiguous())
    if is_norm(name):  # the pretrained scale in every way
        owner = name.rpartition(".")[0]
        for way, _ in model.get_submodule(owner).named_children():
            _put(model, f"{owner}.{way}.weight", taken.clone())


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor))


def method_fields(config: TwoAxisConfig) -> Mapping[str, Any]:
    """The fields of a configuration that the retrofit chose."""
    names = ("stream", "stream_options", "placement", "blend", "mixer", "mixer_options", "mixer_blocks")
    return {name: getattr(config, name) for name in names}
