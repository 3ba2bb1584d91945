"""Text from a model, piece by piece as it is made."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from twoaxis.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from twoaxis.model.hf_model import TwoAxisForCausalLM


class Generated(NamedTuple):
    """What was made, and at what cost.

    Attributes:
        text: the continuation, without the prompt.
        tokens: how many it took.
        prompt_tokens: length of the prompt.
        seconds: for everything, the prompt included.
        cache_bytes: what the model remembers at the end, by part.
    """

    text: str
    tokens: int
    prompt_tokens: int
    seconds: float
    cache_bytes: dict[str, int]

    @property
    def rate(self) -> float:
        """Tokens made per second."""
        return self.tokens / self.seconds


def generate(
    model: TwoAxisForCausalLM,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int = 64,
    temperature: float = 0.0,
    top_p: float | None = None,
    seed: int = 0,
    say: Callable[[str], None] | None = None,
) -> Generated:
    """Continue a prompt.

    Args:
        model: from `load_model`.
        tokenizer: the model's, from `load_tokenizer`.
        prompt: what to continue; not empty.
        tokens: how many to make, unless an end-of-text token comes first.
        temperature: of the sampling; 0 takes the likeliest token.
        top_p: sample from the likeliest tokens that have this much of the probability; None is all of them.
        seed: of the sampling.
        say: gets each piece of text as soon as it is whole.
    """
    check(prompt, tokens, temperature, top_p)
    (encoded,) = tokenizer.encode([prompt], prompt=True)
    ids = torch.from_numpy(encoded.ids)[None].to(model.device)
    cache = model.make_cache()
    streamer = _Streamer(tokenizer, say)
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p or 1.0, "top_k": 0}
    ends = model.generation_config.eos_token_id
    torch.manual_seed(seed)
    started = time.perf_counter()
    cast(Any, model).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        num_beams=1,
        pad_token_id=0 if ends is None else (ends[0] if isinstance(ends, list) else ends),
        past_key_values=cache,
        streamer=streamer,
        logits_processor=LogitsProcessorList([_Finite()]),
        **(sampling if temperature > 0 else {"do_sample": False}),
    )
    seconds = time.perf_counter() - started
    sizes = cast(Any, model).cache_bytes(cache) if hasattr(model, "cache_bytes") else cast(Any, cache).nbytes_by_part()
    return Generated("".join(streamer.said), streamer.count, ids.shape[1], seconds, sizes)


def check(prompt: str, tokens: int, temperature: float, top_p: float | None) -> None:
    """Refuse what `generate` cannot do with these arguments."""
    if not prompt:
        raise ValueError("the prompt is empty: give some text with --prompt, or --prompt - to read it from stdin")
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {tokens}")
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be a number from 0 (the likeliest token) up, got {temperature}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")
    if top_p is not None and temperature == 0:
        raise ValueError(f"top_p={top_p} has no effect at temperature 0; give a temperature such as 0.8")


class _Streamer(BaseStreamer):
    """Gets the prompt, then each token."""

    def __init__(self, tokenizer: Tokenizer, say: Callable[[str], None] | None) -> None:
        self.stream = tokenizer.stream()
        self.say = say
        self.said: list[str] = []
        self.count = -1  # the first call brings the prompt

    def put(self, value: Tensor) -> None:
        self.count += 1
        if self.count > 0:
            self._out("".join(self.stream(token) for token in value.flatten().tolist()))

    def end(self) -> None:
        self._out(self.stream(None))

    def _out(self, piece: str) -> None:
        if piece:
            self.said.append(piece)
            if self.say is not None:
                self.say(piece)


class _Finite(LogitsProcessor):
    """Stops a model that has diverged, whose likeliest token would mean nothing."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if bool(scores.isnan().any()):
            raise ValueError(f"the model's logits after {input_ids.shape[1]} tokens are not numbers")
        return scores
