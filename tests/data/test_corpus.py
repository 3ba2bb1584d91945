"""The split does not move or leak, and the cache is whole, shared and rebuilt when it is not."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import multiprocessing.queues
import os
import resource
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.text_samples import text, write_folder
from twoaxis.data import corpus as corpora
from twoaxis.data import split
from twoaxis.data.corpus import Corpus, cache_folder, open_corpus
from twoaxis.data.options import DataOptions
from twoaxis.data.split import find_cut, sides, split_position, survey
from twoaxis.data.tokenizer import train_bpe


def open_(data: Path, cache: Path, watch: Any = None, *, check: bool = False, **changes: Any) -> Corpus:
    fields: dict[str, Any] = {"tokenizer": "bytes", "held_out": 0.2} | changes
    return open_corpus(DataOptions(data=(str(data),), cache=str(cache), **fields), watch=watch, check=check)


def documents(corpus: Corpus, part: str) -> list[str]:
    """The texts of one side, from its bytes."""
    tokens = np.array(getattr(corpus, part).tokens, dtype=np.uint8).tobytes()
    return [piece.decode() for piece in tokens.split(b"\0")[:-1]]


hashes = st.lists(st.binary(min_size=32, max_size=32), min_size=2, max_size=60, unique=True)


@given(known=hashes, added=st.lists(st.binary(min_size=31, max_size=31)), held_out=st.floats(0.01, 0.9))
def test_adding_documents_moves_no_other(known: list[bytes], added: list[bytes], held_out: float) -> None:
    before, after = sides(known, held_out), sides([*added, *known], held_out)[len(added) :]
    assert any(before)
    assert not all(before)
    for content, was, is_ in zip(known, before, after, strict=True):
        if was != is_:  # only one that stood in for an empty side
            assert before.count(was) == 1
            assert was == (split_position(content) >= held_out)
    moved = [content for content, was, is_ in zip(known, before, after, strict=True) if was != is_]
    assert len(moved) <= 1


def test_the_part_that_is_held_out() -> None:
    shares = np.array([split_position(hashlib.sha256(str(n).encode()).digest()) for n in range(20_000)])
    counts, _ = np.histogram(shares, bins=20, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # 19 degrees of freedom: exceeded once in a thousand


def test_no_held_out_document_is_in_training(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "texts", 50, words=30)
    for number in range(0, 50, 3):  # the same text under other names
        (folder / f"copy{number}.txt").write_bytes((folder / f"{number:03d}.txt").read_bytes())
    corpus = open_(folder, tmp_path / "cache")
    train, held = documents(corpus, "train"), documents(corpus, "held_out")
    everything = {text(number, 30) for number in range(50)}
    assert len(train) + len(held) == len(everything) == 50
    assert set(train) | set(held) == everything
    joined = "\0".join(train)
    assert not any(document in joined for document in held)
    assert 3 <= len(held) <= 20
    assert corpus.findings.duplicates == 17
    for part, texts in (("train", train), ("held_out", held)):
        size = sum(len(t.encode()) for t in texts)
        facts = {"documents": len(texts), "bytes": size, "tokens": size + len(texts)}
        assert corpus.facts[part] == facts
        begins = np.cumsum([0, *(len(t.encode()) + 1 for t in texts)])[:-1]
        assert getattr(corpus, part).starts.tolist() == begins.tolist()


def test_the_tokenizer_learns_from_training_documents_only(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "texts", 40, words=60)
    held = documents(open_(folder, tmp_path / "cache"), "held_out")
    train = documents(open_(folder, tmp_path / "cache"), "train")
    corpus: Any = open_(folder, tmp_path / "cache", tokenizer="bpe:400")
    vocabulary = corpus.tokenizer.tokenizer.get_vocab()
    assert vocabulary == train_bpe(train, 400).tokenizer.get_vocab()
    assert vocabulary != train_bpe(sorted(train + held), 400).tokenizer.get_vocab()
    assert corpus.facts["held_out"]["bytes"] == int(corpus.sizes.sum()) == sum(len(t.encode()) for t in held)
    assert len(corpus.held_out.tokens) < corpus.facts["held_out"]["bytes"]


def test_a_single_document_is_cut_at_a_line_end(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text(text(1, 400), encoding="utf-8")
    corpus = open_(path, tmp_path / "cache", held_out=0.25)
    (head,), (tail,) = documents(corpus, "train"), documents(corpus, "held_out")
    whole = path.read_text(encoding="utf-8")
    assert head + tail == whole
    assert head.endswith("\n")
    assert 0.125 * len(whole) < len(tail) <= 0.25 * len(whole)
    assert corpus.findings.cut == len(head)
    assert find_cut("a" * 100, 0.1) == 90  # no line end
    assert find_cut("a" * 92 + "\n" + "b" * 7, 0.1) == 93
    assert find_cut("a" * 96 + "\n" + "b" * 3, 0.1) == 90  # half of the tail would be lost
    path.write_text("x")
    with pytest.raises(ValueError, match=r"one.txt has 1 characters, too few to hold 25% of it out"):
        survey(DataOptions(data=(str(path),), held_out=0.25))
    with pytest.raises(ValueError, match=r"held_out is 0\.0: nothing would be left to evaluate on"):
        open_(path, tmp_path / "cache", held_out=0.0)


class Calls(list[tuple[str, int, int]]):
    """A watch that remembers."""

    def __call__(self, *call: Any) -> None:
        self.append(call)


def state(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_ino, p.stat().st_mtime_ns) for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_second_load_does_not_tokenise(tmp_path: Path) -> None:
    folder, cache = write_folder(tmp_path / "texts"), tmp_path / "cache"
    first, second = Calls(), Calls()
    built = open_(folder, cache, first, tokenizer="bpe:300")
    size = built.facts["train"]["bytes"] + built.facts["held_out"]["bytes"]
    assert [call for call in first if call[0] == "tokenizer"][-1][1:] == (built.facts["train"]["bytes"],) * 2
    assert first[-1] == ("tokenise", size, size)
    before = state(built.folder)
    again = open_(folder, cache, second, tokenizer="bpe:300")
    assert (second, state(again.folder)) == ([], before)
    assert np.array_equal(again.train.tokens, built.train.tokens)
    texts = [each.tokenizer.decode(each.held_out.tokens.tolist()) for each in (again, built)]
    assert texts[0] == texts[1]


def test_what_changes_a_token_changes_the_folder(tmp_path: Path) -> None:
    folder, cache = write_folder(tmp_path / "texts"), tmp_path / "cache"
    seen = {open_(folder, cache).folder, open_(folder, cache, held_out=0.5).folder}
    seen |= {open_(folder, cache, tokenizer="bpe:300").folder, open_(folder, cache, tokenizer="bpe:301").folder}
    (folder / "000.txt").write_text("changed")
    seen.add(open_(folder, cache).folder)
    assert len(seen) == 5
    (folder / "000.txt").rename(folder / "0000.txt")  # the same texts in the same order
    assert open_(folder, cache).folder in seen


def flip(data: bytes, bit: int) -> bytes:
    place = bit // 8 % len(data)
    return data[:place] + bytes([data[place] ^ (1 << bit % 8)]) + data[place + 1 :]


def opens_as_before(data: Path, built: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged corpus is built once more, with one line about it, and holds what it held."""
    cache, calls = built.folder.parent, Calls()
    capsys.readouterr()
    again = open_(data, cache, calls)
    assert len(calls) > 0
    for part in ("train", "held_out"):
        assert np.array_equal(getattr(again, part).tokens, getattr(built, part).tokens)
        assert np.array_equal(getattr(again, part).starts, getattr(built, part).starts)
    assert (again.folder, again.facts) == (built.folder, built.facts)
    assert np.array_equal(again.sizes, built.sizes)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("is damaged; the data is tokenised again")
    assert open_(data, cache, None).folder == built.folder
    assert capsys.readouterr().err == ""
    assert not list(cache.glob(".*partial*"))


def arrays(folder: Path, built: Corpus) -> dict[str, Any]:
    """The parts of a corpus from a copy of it, since those of the original are mapped from files that are harmed."""
    parts = {part: corpora.Part(folder, part, built.facts["dtype"]) for part in ("train", "held_out")}
    return parts | {"sizes": np.fromfile(folder / "held_out.sizes.bin", dtype="<u4")}


def without(facts: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name != key}


def edited(edit: Any) -> tuple[str, Any]:
    return "corpus.json", lambda data: json.dumps(edit(json.loads(data))).encode()


OTHERS = ("held_out.starts.bin", "held_out.sizes.bin", "corpus.json")
HARM: dict[str, tuple[str, Any]] = {
    **{f"one bit of {name}": (name, lambda data: flip(data, 59)) for name in ("train.bin", *OTHERS)},
    **{f"{name} gone": (name, lambda data: None) for name in ("train.bin", *OTHERS)},
    "short": ("train.bin", lambda data: data[:-2]),
    "long": ("train.bin", lambda data: data + b"ab"),
    "empty": ("train.bin", lambda data: b""),
    "zeros": ("train.bin", lambda data: bytes(len(data))),
    **{f"no {key}": edited(lambda facts, key=key: without(facts, key)) for key in ("dtype", "files", "train", "seal")},
    "another dtype": edited(lambda facts: facts | {"dtype": "<u2"}),
    "a file less": edited(lambda facts: facts | {"files": without(facts["files"], "train.bin")}),
    "other numbers": edited(lambda facts: facts | {"train": facts["train"] | {"tokens": 1}}),
    "not a table": edited(lambda facts: [facts]),
    "null": edited(lambda facts: None),
    "nested": edited(lambda facts: {"files": {"train.bin": {}}}),
    "of another corpus": edited(lambda facts: split.sealed(without(facts, "seal") | {"name": "0123456789ab"})),
}


@pytest.mark.parametrize("harm", [*HARM, "in the way"])
def test_a_harmed_cache_is_built_again(harm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, cache = write_folder(tmp_path / "texts", 12, words=40), tmp_path / "cache"
    built = open_(data, cache)
    kept = shutil.copytree(built.folder, tmp_path / "kept")
    if harm in HARM:
        name, change = HARM[harm]
        damaged = change((built.folder / name).read_bytes())
        (built.folder / name).unlink()
        if damaged is not None:
            (built.folder / name).write_bytes(damaged)
    else:  # something else stands in the place of the corpus
        shutil.rmtree(built.folder)
        built.folder.write_text(harm)
    opens_as_before(data, built._replace(**arrays(kept, built)), capsys)


def test_large_arrays_are_hashed_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corpora, "SMALL", 100)
    data, cache = write_folder(tmp_path / "texts", 12, words=40), tmp_path / "cache"

    def opened(*watch: Any, **options: Any) -> Corpus:
        return open_(data, cache, *watch, tokenizer="bpe:300", **options)

    def healed(name: str, **options: Any) -> None:
        """The tokens are what they were, and one line says which file was not."""
        assert np.array_equal(opened(**options).train.tokens, copy.train.tokens)
        assert capsys.readouterr().err.count(f"{name} is damaged; the data is tokenised again") == 1

    built, calls = opened(), Calls()
    copy = built._replace(**arrays(shutil.copytree(built.folder, tmp_path / "kept"), built))
    target, tokenizer = built.folder / "train.bin", built.folder / "tokenizer" / "tokenizer.json"
    target.write_bytes(flip(target.read_bytes(), 59))
    opened(calls)
    assert calls == []  # its size is right
    healed("train.bin", check=True)
    target.write_bytes(target.read_bytes()[:-2])
    healed("train.bin")
    tokenizer.write_bytes(tokenizer.read_bytes().replace(b"Merges", b"merges", 1).replace(b'"a"', b'"b"', 1))
    healed("tokenizer.json")


def test_documents_are_read_again_only_if_a_file_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, cache = write_folder(tmp_path / "texts", 12, words=40), tmp_path / "cache"
    reads = []
    read = split.read_sources
    monkeypatch.setattr(split, "read_sources", lambda *given: reads.append(1) or read(*given))

    def passes(**changes: Any) -> int:
        reads.clear()
        open_(data, cache, **changes)
        return len(reads)

    assert passes() == 2  # for the survey and for the tokens
    assert passes() == 1  # the files are so new that another change might not show
    monkeypatch.setattr(split, "SETTLED", -(10**12))
    assert [passes(), passes(), passes(check=True), passes(held_out=0.5)] == [1, 0, 1, 2]
    before = open_(data, cache)
    stat = (data / "003.txt").stat()
    (data / "003.txt").write_text((data / "003.txt").read_text().replace("a", "b"))
    os.utime(data / "003.txt", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert passes() == 2
    assert open_(data, cache).findings.text_hash != before.findings.text_hash
    assert passes() == 0
    for memory in (cache / "surveys").iterdir():
        memory.write_bytes(flip(memory.read_bytes(), 100))
    assert [passes(), passes()] == [1, 0]  # a damaged memory is no memory
    shutil.rmtree(open_(data, cache).folder)
    assert passes() == 2
    for memory in (cache / "surveys").iterdir():
        memory.unlink()
    (cache / "surveys").rmdir()
    (cache / "surveys").write_text("in the way")
    assert [passes(), passes()] == [1, 1]  # a memory that cannot be written costs time only


def build(data: Path, cache: Path, end: multiprocessing.queues.Queue[Any], kill: bool) -> None:
    """In a process of its own: open the corpus slowly and say whether this process has built it."""
    calls = Calls()

    def watch(*call: Any) -> None:
        calls(*call)
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)  # so that the others come while it builds

    made = open_(data, cache, watch)
    end.put((made.folder.name, made.facts["train"]["tokens"], len(calls) > 0))


def start(data: Path, cache: Path, *, kill: bool = False) -> tuple[Any, Any]:
    fork = multiprocessing.get_context("fork")
    end = fork.Queue()
    process = fork.Process(target=build, args=(data, cache, end, kill))
    process.start()
    return process, end


def test_processes_that_want_the_same_build_it_once(tmp_path: Path) -> None:
    data, cache = write_folder(tmp_path / "texts"), tmp_path / "cache"
    running = [start(data, cache) for _ in range(4)]
    found = [end.get(timeout=60) for _, end in running]
    for process, _ in running:
        process.join(60)
    assert [process.exitcode for process, _ in running] == [0] * 4
    tokens = len(open_(data, cache).train.tokens)
    assert {words[:2] for words in found} == {(open_(data, cache).folder.name, tokens)}
    assert sorted(words[2] for words in found) == [False, False, False, True]
    assert not list(cache.glob(".*partial*"))


def test_a_builder_that_is_killed_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    data, cache = write_folder(tmp_path / "texts"), tmp_path / "cache"
    killed, _ = start(data, cache, kill=True)
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    assert len(list(cache.glob(".*partial*"))) == 1
    made = open_(data, cache)
    assert not list(cache.glob(".*partial*"))
    assert json.loads((made.folder / "corpus.json").read_text())["train"]["tokens"] == len(made.train.tokens)


def test_a_disk_that_takes_no_more(tmp_path: Path) -> None:
    data, cache = write_folder(tmp_path / "texts"), tmp_path / "cache"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # no file may be larger
    try:
        with pytest.raises(ValueError, match="cannot be written: File too large"):
            open_(data, cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(cache.iterdir()) == []
    assert len(open_(data, cache).train.tokens) > 4096


def test_documents_that_change_meanwhile(tmp_path: Path) -> None:
    data, cache = write_folder(tmp_path / "texts"), tmp_path / "cache"

    def change(what: str, done: int, total: int) -> None:
        (data / "039.txt").write_text("another text")

    with pytest.raises(ValueError, match=r"039\.txt changed while it was read; start again"):
        open_(data, cache, change, tokenizer="bpe:300")

    def remove(what: str, done: int, total: int) -> None:
        if done == total:  # the pass that trains the tokenizer is over, the next one reads again
            (data / "039.txt").unlink(missing_ok=True)

    with pytest.raises(ValueError, match="documents vanished while they were read; start again"):
        open_(data, cache, remove, tokenizer="bpe:300")


def test_the_users_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder(None) == tmp_path / "twoaxis" / "data"
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert cache_folder(None) == tmp_path / "home" / ".cache" / "twoaxis" / "data"
    assert cache_folder("~/here") == tmp_path / "home" / "here"
    data = write_folder(tmp_path / "texts")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be written: a part of the path is a file, not a folder"):
        open_(data, tmp_path / "file" / "cache")
