"""Text to tokens for training: bytes, a byte-level BPE of one's own, or a tokenizer of transformers.

    bytes        token n is the byte n; byte 0, which text does not have, ends a document
    bpe:SIZE     learned from the training documents only, so that held-out text has no part in it
    NAME         a folder or a hub name that transformers can load; its code, if it has any, is never run

A document becomes `[begin] text [end]`: begin where the tokenizer puts one by itself, end where it has such a token.
Words in the text that look like special tokens are taken as text. A long document is encoded in pieces cut at line
ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from twoaxis.model.load import TOKENIZER_FILES, exact_sizes, need_transformers, offset_sizes

if TYPE_CHECKING:
    from numpy.typing import NDArray

END = "<|endoftext|>"
"""The token that ends a document in tokenizers made here."""
PIECE = 2**20
"""Characters that are encoded at a time."""


class Tokens(NamedTuple):
    """A document as tokens.

    Attributes:
        ids: their numbers, with those that begin and end a document.
        sizes: bytes of UTF-8 that each stands for, which add up to the text's; None where nobody asked.
    """

    ids: NDArray[np.int64]
    sizes: NDArray[np.int64] | None


class Tokenizer(Protocol):
    """What makes tokens of documents."""

    name: str
    vocabulary: int
    end: int | None

    def encode(self, texts: Sequence[str], *, sizes: bool) -> list[Tokens]:
        """Some documents."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Tokens as text, for looking at."""
        ...

    def save(self, folder: str | Path) -> None:
        """Files that transformers loads; bytes need none."""
        ...


def check_spelling(spec: str) -> int | None:
    """The size if `spec` is `bpe:SIZE`, None if it is another tokenizer; a size that cannot be is an error."""
    kind, colon, size = spec.partition(":")
    if kind != "bpe":
        if not spec:
            raise ValueError("tokenizer is empty; give bytes, bpe:SIZE, or a folder or hub name")
        return None
    if not colon or not size.isdecimal():
        raise ValueError(f"tokenizer {spec!r} has no size; write bpe:SIZE, such as bpe:2048")
    if int(size) < 257:
        raise ValueError(f"tokenizer {spec!r} is too small: 256 bytes and the end-of-text token are 257")
    return int(size)


def key(spec: str, loaded: Tokenizer | None) -> str:
    """Stands for everything about a tokenizer that can change a token, apart from the documents it learns from.

    Args:
        spec: its spelling.
        loaded: the tokenizer, if it needs no training.
    """
    if isinstance(loaded, Pretrained):
        return loaded.key
    if check_spelling(spec) is None:
        return spec
    import tokenizers

    return f"{spec} tokenizers {tokenizers.__version__}"


def load(spec: str) -> Tokenizer | None:
    """The tokenizer of a spelling; None for one that has to be trained first."""
    if check_spelling(spec) is not None:
        return None
    return Bytes() if spec == "bytes" else Pretrained(load_pretrained(spec), spec)


def load_pretrained(spec: str | Path) -> Any:
    """A fast tokenizer of transformers, from a folder or the hub."""
    need_transformers()
    from transformers import AutoTokenizer

    from twoaxis.model import hf_model  # noqa: F401  makes our own models known to transformers

    path = Path(spec).expanduser()
    local = path.is_dir()
    if local and not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(f"the folder {path} has no tokenizer ({', '.join(TOKENIZER_FILES[:2])})")
    try:
        source = str(path) if local else str(spec)
        return AutoTokenizer.from_pretrained(source, local_files_only=local, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exceptions on files it cannot parse
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        where = "" if local else "; a tokenizer is bytes, bpe:SIZE, a folder, or a name on the hub"
        raise ValueError(f"the tokenizer {str(spec)!r} cannot be loaded: {first}{where}") from error


def train_bpe(texts: Iterable[str], size: int) -> Pretrained:
    """A byte-level BPE of at most `size` tokens; the same texts give the same one.

    Args:
        texts: what to learn from.
        size: tokens, the 256 bytes and the end-of-text token among them. Little text may give fewer.
    """
    need_transformers()
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    made.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, clean_up_tokenization_spaces=False)
    return Pretrained(wrapped, f"bpe:{size}")


def pieces(text: str) -> Iterator[str]:
    """A text in parts of at most `PIECE` characters, cut at line ends where there are any."""
    begin = 0
    while len(text) - begin > PIECE:
        line = text.rfind("\n", begin, begin + PIECE)
        stop = line + 1 if line > begin else begin + PIECE
        yield text[begin:stop]
        begin = stop
    yield text[begin:]


class Bytes:
    """Tokens are the bytes of UTF-8."""

    name = "bytes"
    vocabulary = 256
    end: int | None = 0

    def encode(self, texts: Sequence[str], *, sizes: bool) -> list[Tokens]:
        """One token per byte and byte 0 at the end, which stands for no text."""
        made = []
        for text in texts:
            ids = np.frombuffer(text.encode() + b"\0", dtype=np.uint8).astype(np.int64)
            made.append(Tokens(ids, np.append(np.ones(len(ids) - 1, dtype=np.int64), 0) if sizes else None))
        return made

    def decode(self, ids: Sequence[int]) -> str:
        """As UTF-8; what is none becomes the replacement character."""
        return bytes(ids).decode(errors="replace")

    def save(self, folder: str | Path) -> None:
        """Nothing to save."""


class Pretrained:
    """A fast tokenizer of transformers.

    Args:
        tokenizer: the tokenizer.
        name: what it is called.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        if not tokenizer.is_fast:
            raise ValueError(f"{name}: {type(tokenizer).__name__} does not say where its tokens stand; give a fast one")
        self.tokenizer, self.name = tokenizer, name
        self.vocabulary: int = len(tokenizer)
        self.end: int | None = tokenizer.eos_token_id
        begin = tokenizer.bos_token_id
        self.begin: list[int] = [begin] if begin is not None and begin in tokenizer("").input_ids else []

    @property
    def key(self) -> str:
        """Stands for the whole tokenizer."""
        text = f"{self.tokenizer.backend_tokenizer.to_str()}\n{self.begin}\n{self.end}\n{self.vocabulary}"
        return hashlib.sha256(text.encode()).hexdigest()

    def encode(self, texts: Sequence[str], *, sizes: bool) -> list[Tokens]:
        """Documents with the tokens that begin and end them, which stand for no text."""
        parts = [list(pieces(text)) for text in texts]
        flat = [piece for some in parts for piece in some]
        encodings = iter(zip(flat, self._encode(flat, places=sizes), strict=True))
        end = [] if self.end is None else [self.end]
        made = []
        for some in parts:
            ids, lengths = list(self.begin), [0] * len(self.begin)
            for _ in some:
                piece, encoding = next(encodings)
                ids += encoding.ids
                if sizes:
                    exact = exact_sizes(encoding.tokens, piece)
                    lengths += offset_sizes([e for _, e in encoding.offsets], piece) if exact is None else exact
            made.append(
                Tokens(np.array(ids + end, np.int64), np.array(lengths + [0] * len(end), np.int64) if sizes else None)
            )
        return made

    def _encode(self, texts: list[str], *, places: bool) -> list[Any]:
        backend = self.tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        before = backend.encode_special_tokens
        backend.encode_special_tokens = True  # an end-of-text token that a text spells does not end it
        try:
            encode = backend.encode_batch if places else backend.encode_batch_fast  # the fast one knows no places
            return encode(texts, add_special_tokens=False)
        finally:
            backend.encode_special_tokens = before

    def decode(self, ids: Sequence[int]) -> str:
        """As the tokenizer writes them, special tokens shown."""
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def save(self, folder: str | Path) -> None:
        """As transformers does."""
        self.tokenizer.save_pretrained(folder)
