"""A model and its way with text, from a folder that `save_pretrained` wrote.

The classes are our own, so no code of the folder is run; weights are read from safetensors only; nothing is fetched.
What is missing or does not fit is a `ValueError` that says what to do.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from twoaxis.base.machine import pick_device

if TYPE_CHECKING:
    from twoaxis.model.hf_model import TwoAxisForCausalLM

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""A folder with one of these has a tokenizer."""


class Encoded(NamedTuple):
    """A text as tokens.

    Attributes:
        tokens: their numbers, with the beginning-of-text token in front where the tokenizer has one.
        sizes: bytes of UTF-8 that each token stands for; they add up to the text's.
    """

    tokens: list[int]
    sizes: list[int]


class Pieces(Protocol):
    """Turns tokens that come one by one into text, holding back what is not yet a whole character."""

    def push(self, token: int) -> str:
        """The text that `token` completes."""
        ...

    def finish(self) -> str:
        """What was held back."""
        ...


class Codec(Protocol):
    """Text to tokens and back."""

    name: str

    def encode(self, text: str) -> Encoded:
        """A text as tokens."""
        ...

    def pieces(self) -> Pieces:
        """A decoder for tokens that come one by one."""
        ...


def need_transformers() -> None:
    """Say what to install where transformers is not there."""
    try:
        import transformers  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(
            "this needs transformers, which is not installed: install twoaxis with its extra [hf]"
        ) from error


def quiet() -> None:
    """Keep transformers' own bars and notes off the terminal, which belongs to the command."""
    need_transformers()
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def load_model(folder: str | Path, device: str | None = None) -> TwoAxisForCausalLM:
    """The model of a folder, in the dtype it was saved in, ready to be used.

    Args:
        folder: written by `save_pretrained`.
        device: where to put it; None is a GPU where there is one.
    """
    check_folder(folder)
    need_transformers()
    target = pick_device(device)
    from safetensors import SafetensorError

    from twoaxis.model.hf_model import TwoAxisForCausalLM

    path = Path(folder)
    try:
        model = TwoAxisForCausalLM.from_pretrained(path, dtype="auto", use_safetensors=True, local_files_only=True)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"the weights in {path} cannot be read: {str(error).splitlines()[0]}") from error
    return model.to(target).eval()


def check_folder(folder: str | Path) -> None:
    """Refuse a folder that has no twoaxis model, without importing anything heavy."""
    path = Path(folder)
    if not path.exists():
        raise ValueError(f"there is no folder {path}")
    if not path.is_dir():
        raise ValueError(f"{path} is a file; give the folder that has config.json and the weights")
    config = path / "config.json"
    if not config.is_file():
        raise ValueError(f"{path} has no config.json; give a folder that save_pretrained of a twoaxis model wrote")
    try:
        document = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{config} cannot be read: {error}") from error
    kind = document.get("model_type") if isinstance(document, dict) else None
    if kind != "twoaxis":
        raise ValueError(f"{path} is not a twoaxis model: model_type in its config.json is {kind!r}, not 'twoaxis'")
    if not any(path.glob("*.safetensors")):
        raise ValueError(f"{path} has no weights: there is no .safetensors file in it, and no other kind is read")


def load_codec(folder: str | Path, vocabulary: int, *, as_bytes: bool = False) -> Codec:
    """The tokenizer of a folder, or bytes.

    Args:
        folder: the model's.
        vocabulary: the model's `vocab_size`.
        as_bytes: tokens 0 to 255 are the bytes of UTF-8; the folder needs no tokenizer then.
    """
    if as_bytes:
        return ByteCodec(vocabulary)
    path = Path(folder)
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        hint = "if its tokens are bytes, say --bytes" if vocabulary >= 256 else "save its tokenizer beside it"
        raise ValueError(f"{path} has no tokenizer ({', '.join(TOKENIZER_FILES[:2])}); {hint}")
    from transformers import AutoTokenizer

    from twoaxis.model.hf_config import TwoAxisConfig

    try:
        config = TwoAxisConfig.from_pretrained(path)  # given, so that nothing looks for code in the folder
        tokenizer = AutoTokenizer.from_pretrained(path, config=config, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exceptions on files it cannot parse
        raise ValueError(f"the tokenizer in {path} cannot be read: {str(error).splitlines()[0]}") from error
    return TokenizerCodec(tokenizer, vocabulary)


class ByteCodec:
    """Tokens are the bytes of UTF-8.

    Args:
        vocabulary: the model's `vocab_size`, at least 256; tokens beyond the bytes stand for no text.
    """

    name = "bytes"

    def __init__(self, vocabulary: int) -> None:
        if vocabulary < 256:
            raise ValueError(f"bytes need a vocabulary of at least 256 tokens, the model has {vocabulary}")

    def encode(self, text: str) -> Encoded:
        """One token per byte."""
        tokens = list(text.encode())
        return Encoded(tokens, [1] * len(tokens))

    def pieces(self) -> Pieces:
        """Whole characters; what is no UTF-8 becomes the replacement character."""
        return _BytePieces()


class _BytePieces:
    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self.decoder.decode(bytes([token])) if token < 256 else ""

    def finish(self) -> str:
        return self.decoder.decode(b"", final=True)


class TokenizerCodec:
    """A transformers tokenizer.

    Args:
        tokenizer: of the fast kind, which knows where in the text a token stands.
        vocabulary: the model's `vocab_size`.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        if not tokenizer.is_fast:
            raise ValueError(f"{type(tokenizer).__name__} does not say where its tokens stand; a fast tokenizer does")
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self.name = type(tokenizer).__name__
        begin = tokenizer.bos_token_id
        self.lead = [begin] if begin is not None and begin in tokenizer("").input_ids else []

    def encode(self, text: str) -> Encoded:
        """Tokens with the bytes each stands for; the beginning-of-text token stands for none."""
        made = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        tokens: list[int] = made["input_ids"]
        largest = max([*self.lead, *tokens], default=0)
        if largest >= self.vocabulary:
            word = self.tokenizer.convert_ids_to_tokens(largest)
            raise ValueError(
                f"the tokenizer gives token {largest} ({word!r}), the model has a vocabulary of {self.vocabulary}: "
                "they do not belong together"
            )
        sizes = exact_sizes(self.tokenizer.convert_ids_to_tokens(tokens), text)
        if sizes is None:
            sizes = offset_sizes([end for _, end in made["offset_mapping"]], text)
        return Encoded(self.lead + tokens, [0] * len(self.lead) + sizes)

    def pieces(self) -> Pieces:
        """Text as the tokenizer decodes it, special tokens left out."""
        return _TokenPieces(self.tokenizer)


class _TokenPieces:
    """Decodes the newest tokens together with those before them, since a tokenizer may join them differently."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.begin = 0  # of the tokens that are decoded again for context
        self.said = 0  # tokens whose text is out

    def _decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def push(self, token: int) -> str:
        self.tokens.append(token)
        return self._new(final=False)

    def finish(self) -> str:
        return self._new(final=True)

    def _new(self, *, final: bool) -> str:
        before, now = self._decode(self.tokens[self.begin : self.said]), self._decode(self.tokens[self.begin :])
        if not final and (len(now) <= len(before) or now.endswith("\N{REPLACEMENT CHARACTER}")):
            return ""  # a character that is not whole yet
        self.begin, self.said = self.said, len(self.tokens)
        return now[len(before) :]


def exact_sizes(strings: Sequence[str], text: str) -> list[int] | None:
    """Bytes of each token of a byte-level tokenizer, whose strings spell bytes; None if these do not spell `text`.

    Args:
        strings: the tokens as the vocabulary writes them.
        text: what they stand for.
    """
    table = _spelling()
    try:
        spelled = [bytes(table[character] for character in string) for string in strings]
    except KeyError:
        return None
    return [len(piece) for piece in spelled] if b"".join(spelled) == text.encode() else None


def offset_sizes(ends: Sequence[int], text: str) -> list[int]:
    """Bytes of each token from where it ends in the text.

    Gaps go to the token after them. Where tokens share a character, its first one gets the bytes.

    Args:
        ends: character positions after each token.
        text: what they stand for.
    """
    sizes, done = [], 0
    for number, end in enumerate(ends):
        stop = len(text) if number == len(ends) - 1 else max(done, end)
        sizes.append(len(text[done:stop].encode()))
        done = stop
    return sizes


def _spelling() -> dict[str, int]:
    """How byte-level vocabularies write bytes: printable Latin-1 as itself, the others as characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
