"""Text from a model, piece by piece as it is made."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twoaxis.data.tokenizer import Tokenizer
from twoaxis.model.decoder import Decoder, Model


class Generated(NamedTuple):
    """What was made: the continuation without the prompt, its tokens, those of the prompt, seconds for both, and the
    bytes that the model remembers at the end, by part."""

    text: str
    tokens: int
    prompt_tokens: int
    seconds: float
    cache_bytes: dict[str, int]

    @property
    def rate(self) -> float:
        """Tokens made per second."""
        return self.tokens / self.seconds


def step(model: Model, ids: Tensor, memory: Any) -> tuple[Tensor, Any]:
    """Logits (B, vocabulary) of the token after (B, T) further ones, and what is remembered then."""
    if isinstance(model, Decoder):
        logits, memory = model.step(ids, memory, logits_to_keep=1)
    else:
        logits = model(input_ids=ids, past_key_values=memory, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1], memory


@torch.inference_mode()
def generate(
    model: Model,
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
    ids = torch.from_numpy(encoded.ids)[None].to(next(model.parameters()).device)
    memory: Any = model.start() if isinstance(model, Decoder) else model.make_cache()
    decode, ends = tokenizer.stream(), end_tokens(model)
    generator = torch.Generator(device=ids.device).manual_seed(seed)
    made, count, started = [], 0, time.perf_counter()
    new = ids
    for count in range(1, tokens + 1):
        rows, memory = step(model, new, memory)
        logits = rows[0].float()
        if bool(logits.isnan().any()):
            raise ValueError(f"the model's logits after {ids.shape[1] + count - 1} tokens are not numbers")
        new = pick(logits, temperature, top_p, generator).view(1, 1)
        token = int(new)
        made.append("" if token in ends else decode(token))
        if say is not None and made[-1]:
            say(made[-1])
        if token in ends:
            break
    made.append(decode(None))
    if say is not None and made[-1]:
        say(made[-1])
    seconds = time.perf_counter() - started
    kept = memory.nbytes_by_part() if isinstance(model, Decoder) else model.cache_bytes(memory)
    return Generated("".join(made), count, ids.shape[1], seconds, kept)


def pick(logits: Tensor, temperature: float, top_p: float | None, generator: torch.Generator) -> Tensor:
    """The next token of logits (vocabulary): the likeliest at temperature 0, or one that is drawn."""
    if temperature == 0:
        return logits.argmax()
    shares, order = (logits / temperature).softmax(-1).sort(descending=True)
    if top_p is not None:
        shares = shares * (shares.cumsum(-1) - shares < top_p)  # the first one that reaches it belongs to them
    return order[torch.multinomial(shares, 1, generator=generator)]


def end_tokens(model: Model) -> set[int]:
    """The tokens that end a text; a model of transformers may name them in its generation settings."""
    settings = getattr(model, "generation_config", None)
    ends = model.config.eos_token_id if settings is None else settings.eos_token_id
    return set(ends) if isinstance(ends, list | tuple) else set() if ends is None else {ends}


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
