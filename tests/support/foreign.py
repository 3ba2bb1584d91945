"""Other people's models, tiny: the families of transformers, byte tokenizers, and their folders."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""Fields that all five families have."""

Make = Callable[[], PreTrainedModel]


def llama(**changes: Any) -> Make:
    return lambda: LlamaForCausalLM(LlamaConfig(**{**TINY, **changes}))


def mistral(**changes: Any) -> Make:
    return lambda: MistralForCausalLM(MistralConfig(**{**TINY, **changes}))


def qwen2(**changes: Any) -> Make:
    return lambda: Qwen2ForCausalLM(Qwen2Config(**{**TINY, **changes}))


def qwen3(**changes: Any) -> Make:
    return lambda: Qwen3ForCausalLM(Qwen3Config(**{**TINY, **changes}))


def smollm3(**changes: Any) -> Make:
    return lambda: SmolLM3ForCausalLM(SmolLM3Config(**{**TINY, **changes}))


def shake(model: torch.nn.Module, seed: int = 0, by: float = 0.3) -> None:
    """Add noise to every parameter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += by * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def wide_norms(model: PreTrainedModel) -> None:
    """Let their norms compute in the model's own dtype.

    They cast to float32 inside whatever the model's dtype, which leaves errors of 1e-7 in a float64 model.
    """

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = forward.__get__(module)  # type: ignore[method-assign]


def pretrained(make: Make, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """One of their models with weights that do something; in float64 it computes in float64 throughout."""
    torch.manual_seed(0)
    model = make()
    shake(model, by=0.2)
    model = cast(Any, model).to(dtype).eval()
    if dtype == torch.float64:
        wide_norms(model)
    return model


def byte_llama(**changes: Any) -> LlamaForCausalLM:
    """A tiny Llama whose 300 tokens are bytes and a few more."""
    torch.manual_seed(1)
    fields = {**TINY, "vocab_size": 300, "max_position_embeddings": 128, "eos_token_id": 299, **changes}
    model = LlamaForCausalLM(LlamaConfig(**fields))
    shake(model, by=0.2)
    return model.eval()


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return tokenizer


def byte_tokenizer(more: int = 0, merges: Sequence[tuple[str, str]] = ()) -> PreTrainedTokenizerFast:
    """Every byte is a token, then each of the merged pairs; `more` further tokens stand for nothing."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate([*alphabet, *(a + b for a, b in merges)])}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_byte_level(models.BPE(words, [*merges])))
    tokenizer.add_tokens([f"<extra {n}>" for n in range(more)])
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    return tokenizer


@functools.cache
def trained_tokenizer(text: str, special: str, *, begin: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of at most 300 tokens that was trained on a text; with `begin` a text starts with
    the special token."""
    tokenizer = _byte_level(models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=300,  # type: ignore[call-arg]
        special_tokens=[special],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    if begin:
        template = processors.TemplateProcessing(single=f"{special} $A", special_tokens=[(special, 0)])
        tokenizer.post_processor = template  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=special, eos_token=special, pad_token=special)


def save(model: PreTrainedModel, folder: Path, tokenizer: Any = None, **arguments: Any) -> Path:
    """A folder as people download them."""
    model.save_pretrained(folder, **arguments)
    (tokenizer or byte_tokenizer()).save_pretrained(folder)
    return folder
