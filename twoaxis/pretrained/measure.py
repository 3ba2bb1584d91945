"""How far a retrofitted model is from its source, on real text.

The text is a few kilobytes of the running interpreter's standard library unless the user gives one, in the source's own
tokens. The source's logits are taken before anything of it is touched.
"""

from __future__ import annotations

import platform
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

WINDOW = 256
"""Tokens of a pass."""


class Text(NamedTuple):
    """What is measured on: where it comes from, windows of (1, T), and bytes of the text that was tokenised."""

    name: str
    tokens: tuple[Tensor, ...]
    bytes: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return sum(window.numel() for window in self.tokens)


class Difference(NamedTuple):
    """How far two models' logits are apart.

    Attributes:
        largest: absolute difference.
        relative: the same divided by the largest logit.
        agree: tokens at which the likeliest next token is the same.
        tokens: all of them.
    """

    largest: float
    relative: float
    agree: int
    tokens: int


def make_text(
    tokenizer: Any, vocabulary: int, positions: int | None, tokens: int, path: str | Path | None = None
) -> Text:
    """The first `tokens` tokens of a text in windows.

    Args:
        tokenizer: the source's; None takes bytes, modulo the vocabulary.
        vocabulary: of the model.
        positions: that the model is made for, where it says so; a window is not longer.
        tokens: how many at most.
        path: of the text; None is the standard library's.
    """
    import torch

    if tokens < 2:
        raise ValueError(f"the difference is measured on at least 2 tokens, got {tokens}")
    name = f"textwrap.py of Python {platform.python_version()}" if path is None else str(path)
    try:
        text = Path(path or textwrap.__file__).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: byte {error.start} cannot be read") from error
    text = text[: 16 * tokens]  # no tokenizer of text needs more characters than that for a token
    if tokenizer is None:
        ids, name = [byte % vocabulary for byte in text.encode()], f"{name} as bytes"
    else:
        try:
            ids = tokenizer(text, verbose=False)["input_ids"]
        except Exception as error:  # of settings that nobody looks at before there is text
            place = tokenizer.name_or_path
            raise ValueError(f"the tokenizer of {place} cannot be used: {type(error).__name__}: {error}") from error
    ids = ids[:tokens]
    if len(ids) < 2:
        raise ValueError(f"{name} has {len(ids)} tokens; the difference is measured on at least 2")
    if max(ids) >= vocabulary:
        raise ValueError(f"the tokenizer gives token {max(ids)}, the model has a vocabulary of {vocabulary}")
    size = len(text.encode()) if tokenizer is None else len(tokenizer.decode(ids, skip_special_tokens=True).encode())
    window = min(WINDOW, positions) if positions and positions > 0 else WINDOW  # XLNet says -1 for any number
    return Text(name, torch.tensor([ids]).split(window, dim=1), size)


def logits(model: Any, text: Text) -> list[Tensor]:
    """The logits of every window, (T, vocabulary)."""
    import torch

    device = next(model.parameters()).device
    try:
        with torch.no_grad():
            return [model(input_ids=window.to(device), use_cache=False).logits[0] for window in text.tokens]
    except RuntimeError as error:
        if "non-finite" not in str(error):
            raise
        raise ValueError(f"the method cannot follow this model: {str(error).splitlines()[0]}") from error


def difference(ours: list[Tensor], theirs: list[Tensor]) -> Difference:
    """How far `ours` is from `theirs`; a number that is not finite is an error."""
    largest, scale, agree, tokens = 0.0, 0.0, 0, 0
    for a, b in zip(ours, theirs, strict=True):
        for i in range(len(a)):  # a token at a time: a whole window would need its size again in float64
            x, y = a[i].double(), b[i].double()
            largest = max(largest, (x - y).abs().max().item()) if bool(x.isfinite().all()) else float("nan")
            scale = max(scale, y.abs().max().item())
            agree += int(x.argmax() == y.argmax())
        tokens += len(a)
        if largest != largest or scale != scale:
            raise ValueError("the logits are not finite: the source overflows in this dtype; choose another")
    return Difference(largest, largest / max(scale, 1e-30), agree, tokens)
