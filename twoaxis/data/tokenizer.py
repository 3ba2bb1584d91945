"""Text to tokens and back: bytes, a byte-level BPE trained here, or a tokenizer of transformers.

    bytes        token n is the byte n; byte 0, which text does not have, ends a document
    bpe:SIZE     trained on the training documents only, so that held-out text has no part in it
    NAME         a folder or a hub name that transformers can load; its code, if it has any, is never run

A document becomes `[begin] text [end]`: begin where the tokenizer puts one by itself, end where it has such a token.
Words in it that look like special tokens are text. A long document is encoded in pieces cut at line ends. A prompt,
which a model is to continue, has no end, and special tokens that it spells are these tokens.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from twoaxis.base.files import read_json, user_path
from twoaxis.base.machine import needs

if TYPE_CHECKING:
    from numpy.typing import NDArray

END = "<|endoftext|>"
"""The token that ends a document in tokenizers trained here."""
PIECE = 2**20
"""Characters that are encoded at a time."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""A folder with one of these has a tokenizer."""


class Encoded(NamedTuple):
    """A text as tokens."""

    ids: NDArray[np.int64]  # their numbers, with those that begin and end a document
    # bytes of UTF-8 that each stands for, which add up to the text's; empty where nobody asked
    sizes: NDArray[np.int64]


TextStream = Callable[[int | None], str]
"""Called with tokens as they come, returns the text that each completes; with None at the end, what was held back."""


def load_tokenizer(spec: str | Path, vocab_size: int | None = None) -> Tokenizer:
    """A tokenizer that needs no training: `bytes`, or that of a folder or hub name.

    `vocab_size` is the number of tokens of the model it is for; None is its own number.
    """
    if not str(spec):
        raise ValueError("tokenizer is empty; give bytes, bpe:SIZE, or a folder or hub name")
    if spec == "bytes" or trained_on_bytes(spec):
        return Bytes(256 if vocab_size is None else vocab_size)
    return Pretrained(_load_pretrained(spec), str(spec), vocab_size)


def has_tokenizer(folder: str | Path) -> bool:
    """Whether a folder has the files of a tokenizer; a GGUF file has one in it."""
    return gguf_file(folder) is not None or any((Path(folder) / name).is_file() for name in TOKENIZER_FILES)


def trained_on_bytes(folder: str | Path) -> bool:
    """Whether a model's folder without a tokenizer stands in that of a run whose tokens were bytes."""
    path = user_path(folder).resolve()
    run = path.parent / "run.json"
    config = read_json(run).get("config") if path.is_dir() and run.is_file() and not has_tokenizer(path) else None
    return isinstance(config, dict) and config.get("tokenizer") == "bytes"


def gguf_file(place: str | Path) -> Path | None:
    """The GGUF file that a place is, or the only one in a folder that has no model of another kind."""
    path = user_path(place)
    if path.is_file():
        return path if path.suffix.lower() == ".gguf" else None
    found = [] if (path / "config.json").exists() else sorted(path.glob("*.gguf"))
    return found[0] if len(found) == 1 else None


def need_transformers() -> None:
    """Say what to install where transformers is not there."""
    try:
        import transformers  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(needs("this", "transformers")) from error


def _load_pretrained(spec: str | Path) -> Any:
    """A tokenizer of transformers, from a folder, a GGUF file or the hub."""
    need_transformers()
    from transformers import AutoTokenizer, PreTrainedConfig

    path = user_path(spec)
    file, local = gguf_file(path), path.is_dir()
    if local and not has_tokenizer(path):
        raise ValueError(
            f"{path} has no tokenizer ({', '.join(TOKENIZER_FILES[:2])}); if its tokens are bytes, say --bytes "
            "(--tokenizer bytes in training), else save its tokenizer there"
        )
    # transformers looks for the class of the folder's model first and warns of one that it does not know, such as ours.
    config = PreTrainedConfig() if local and str(_model_type(path)).startswith("twoaxis") else None
    try:
        if file is not None:
            return _from_gguf(file, file.stat().st_mtime_ns)
        source = str(path) if local else str(spec)
        return AutoTokenizer.from_pretrained(source, config=config, local_files_only=local, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exceptions on files it cannot parse
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        where = "" if local or file else "; a tokenizer is bytes, bpe:SIZE, a folder, or a name on the hub"
        raise ValueError(f"the tokenizer {str(spec)!r} cannot be loaded: {first}{where}") from error


@lru_cache(maxsize=1)
def _from_gguf(file: Path, changed: int) -> Any:
    """The tokenizer in a GGUF file as it is since it was `changed`; every run on it wants the seconds of work again."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)


def _model_type(folder: Path) -> str | None:
    try:
        return json.loads((folder / "config.json").read_bytes())["model_type"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def train_bpe(texts: Iterable[str], size: int) -> Pretrained:
    """A byte-level BPE of at most `size` tokens, the 256 bytes and the end among them; the same texts give the same."""
    need_transformers()
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, clean_up_tokenization_spaces=False)
    return Pretrained(wrapped, f"bpe:{size}")


def pieces(text: str, size: int | None = None) -> Iterator[str]:
    """A text in parts of at most `size` characters, None is `PIECE`, cut at line ends where there are any."""
    begin, size = 0, size or PIECE
    while len(text) - begin > size:
        line = text.rfind("\n", begin, begin + size)
        stop = line + 1 if line > begin else begin + size
        yield text[begin:stop]
        begin = stop
    yield text[begin:]


class Bytes:
    """The tokenizer whose tokens are the bytes of UTF-8; those of its model beyond the bytes stand for no text."""

    name = "bytes"
    key = "bytes"  # stands for everything that can change a token
    end: int | None = 0  # the token that ends a document, or None
    begin: Sequence[int] = ()  # the tokens that begin one

    def __init__(self, vocab_size: int = 256) -> None:
        if vocab_size < 256:
            raise ValueError(f"bytes need a vocabulary of at least 256 tokens, the model has {vocab_size}")
        self.vocab_size = vocab_size

    def encode(self, texts: Sequence[str], *, sizes: bool = False, prompt: bool = False) -> list[Encoded]:
        """Documents as tokens, one per byte; byte 0 at the end stands for no text.

        With `sizes` the bytes of each token are counted too. A `prompt` is not ended, and what it spells of special
        tokens is read as such.
        """
        end = b"" if prompt else b"\0"
        encoded = []
        for data in map(str.encode, texts):
            counted = np.repeat([1, 0], [len(data), len(end)]) if sizes else np.zeros(0, np.int64)
            encoded.append(Encoded(np.frombuffer(data + end, np.uint8).astype(np.int64), counted))
        return encoded

    def decode(self, ids: Sequence[int]) -> str:
        """Tokens as text, for looking at; what is no UTF-8 becomes the replacement character."""
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def stream(self) -> TextStream:
        """A decoder for tokens that come one by one: whole characters, without special tokens."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

        def push(token: int | None) -> str:
            if token is None:
                return decoder.decode(b"", final=True)
            return decoder.decode(bytes([token])) if token < 256 else ""

        return push

    def save(self, folder: str | Path) -> None:
        """Write the files that transformers loads; bytes need none."""


class Pretrained:
    """A fast tokenizer of transformers, which knows where in the text a token stands; used like `Bytes`."""

    def __init__(self, tokenizer: Any, name: str, vocab_size: int | None = None) -> None:
        if not tokenizer.is_fast:
            raise ValueError(f"{name}: {type(tokenizer).__name__} does not say where its tokens stand; give a fast one")
        self.tokenizer, self.name = tokenizer, name
        self.vocab_size: int = len(tokenizer) if vocab_size is None else vocab_size
        self.end: int | None = tokenizer.eos_token_id
        begin = tokenizer.bos_token_id
        self.begin: Sequence[int] = [begin] if begin is not None and begin in tokenizer("").input_ids else []

    @property
    def key(self) -> str:
        """A hash of the whole tokenizer."""
        text = f"{self.tokenizer.backend_tokenizer.to_str()}\n{self.begin}\n{self.end}\n{self.vocab_size}"
        return hashlib.sha256(text.encode()).hexdigest()

    def encode(self, texts: Sequence[str], *, sizes: bool = False, prompt: bool = False) -> list[Encoded]:
        """Documents with the tokens that begin and end them, which stand for no text."""
        parts = [[text] if prompt else list(pieces(text)) for text in texts]
        flat = [piece for some in parts for piece in some]
        encodings = iter(zip(flat, self._encode(flat, places=sizes, special=prompt), strict=True))
        end = [] if self.end is None or prompt else [self.end]
        encoded = []
        for some in parts:
            ids, counted = list(self.begin), [0] * len(self.begin)
            for _ in some:
                piece, encoding = next(encodings)
                ids += encoding.ids
                if sizes:
                    exact = exact_sizes(encoding.tokens, piece)
                    counted += offset_sizes([e for _, e in encoding.offsets], piece) if exact is None else exact
            if (largest := max(ids, default=0)) >= self.vocab_size:
                word = self.tokenizer.convert_ids_to_tokens(largest)
                raise ValueError(
                    f"the tokenizer {self.name} gives token {largest} ({word!r}), the vocabulary has "
                    f"{self.vocab_size}: they do not belong together"
                )
            counted = counted + [0] * len(end) if sizes else []
            encoded.append(Encoded(np.array(ids + end, np.int64), np.array(counted, np.int64)))
        return encoded

    def _encode(self, texts: list[str], *, places: bool, special: bool) -> list[Any]:
        backend = self.tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        before = backend.encode_special_tokens
        backend.encode_special_tokens = not special  # True: an end-of-text token that a text spells does not end it
        try:
            encode = backend.encode_batch if places else backend.encode_batch_fast  # the fast one knows no places
            return encode(texts, add_special_tokens=False)
        finally:
            backend.encode_special_tokens = before

    def decode(self, ids: Sequence[int]) -> str:
        """As the tokenizer writes them."""
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def stream(self) -> TextStream:
        """As the tokenizer decodes them together with those before."""
        from tokenizers.decoders import DecodeStream

        backend, decoder = self.tokenizer.backend_tokenizer, DecodeStream(skip_special_tokens=True)
        held_back: list[int] = []

        def push(token: int | None) -> str:
            nonlocal decoder
            if token is None:
                return backend.decode(held_back, skip_special_tokens=True)
            held_back.append(token)
            try:
                text = decoder.step(backend, token)
            except Exception:  # a bare one: bytes that are no UTF-8 change what byte fallback made of those before
                text = backend.decode(held_back, skip_special_tokens=True)
                decoder = DecodeStream(held_back, skip_special_tokens=True)
            if text is not None:
                held_back.clear()
            return text or ""

        return push

    def save(self, folder: str | Path) -> None:
        """As transformers does."""
        self.tokenizer.save_pretrained(folder)


Tokenizer = Bytes | Pretrained
"""Text to tokens and back."""


def exact_sizes(strings: Sequence[str], text: str) -> list[int] | None:
    """Bytes of each token of a byte-level tokenizer, whose strings spell bytes; None if these do not spell `text`."""
    table = _spelling()
    try:
        spelled = [bytes(table[character] for character in string) for string in strings]
    except KeyError:
        return None
    return [len(piece) for piece in spelled] if b"".join(spelled) == text.encode() else None


def offset_sizes(ends: Sequence[int], text: str) -> list[int]:
    """Bytes of each token from where it ends in the text, in characters.

    Gaps go to the token after them. Where tokens share a character, its first one gets the bytes.
    """
    sizes, done = [], 0
    for number, end in enumerate(ends):
        stop = len(text) if number == len(ends) - 1 else max(done, end)
        sizes.append(len(text[done:stop].encode()))
        done = stop
    return sizes


@cache
def _spelling() -> dict[str, int]:
    """How byte-level vocabularies write bytes: printable Latin-1 as itself, the others as characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
