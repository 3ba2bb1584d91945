"""Tiny pretrained models, their folders and their tokenizer, for the tests of retrofitting."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from tests.model.hf_helpers import shake
from tests.model.test_hf_families import TINY, Make, wide_norms
from twoaxis.base.spec import spell
from twoaxis.depth.registry import STREAMS, stream_names
from twoaxis.model.hf_model import TwoAxisForCausalLM
from twoaxis.pretrained.build import build
from twoaxis.pretrained.families import state
from twoaxis.pretrained.start import choose, read_method
from twoaxis.sequence.registry import MIXERS, mixer_names

VOCABULARY = 300

STREAM_SPELLINGS = [spell(n, dict(o)) for n in stream_names() for o in STREAMS.find(n).variants]
MIXER_SPELLINGS = [spell(n, dict(o)) for n in mixer_names() for o in MIXERS.find(n).variants]


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
    """A tiny Llama whose tokens are bytes and a few more."""
    torch.manual_seed(1)
    fields = {**TINY, "vocab_size": VOCABULARY, "max_position_embeddings": 128, "eos_token_id": 299, **changes}
    model = LlamaForCausalLM(LlamaConfig(**fields))
    shake(model, by=0.2)
    return model.eval()


def byte_tokenizer(more: int = 0) -> PreTrainedTokenizerFast:
    """Every byte is a token; `more` further ones stand for nothing."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    inner.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    tokenizer.add_tokens([f"<extra {n}>" for n in range(more)])
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    return tokenizer


def save(model: PreTrainedModel, folder: Path, tokenizer: Any = None, **arguments: Any) -> Path:
    """A folder as people download them."""
    model.save_pretrained(folder, **arguments)
    (tokenizer or byte_tokenizer()).save_pretrained(folder)
    return folder


def convert(theirs: PreTrainedModel, stream: str = "standard", mixer: str | None = None, **more: Any) -> Any:
    """`retrofit` without the measurements: the model and how it starts."""
    start = choose(theirs.config, read_method(stream, mixer, **more))
    dtype = cast(Any, theirs.get_input_embeddings()).weight.dtype
    model: TwoAxisForCausalLM = build(start.config, state(theirs), dtype=dtype, copy=True)
    return model, start


def tokens(batch: int = 2, length: int = 22, vocabulary: int = 61, seed: int = 1) -> Tensor:
    """Random tokens."""
    return torch.randint(1, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def library_bytes(name: str = "argparse.py", size: int = 40_000) -> Tensor:
    """Bytes of a module of the standard library, as tokens."""
    path = Path(sysconfig.get_paths()["stdlib"]) / name
    return torch.tensor(list(path.read_bytes()[:size]))
