"""Documents out of files, folders, records, data sets and the standard library."""

from __future__ import annotations

import json
import os
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from twoaxis.base.files import FileError
from twoaxis.data.sources import Document, list_sources, parse_hub, read_sources, source_name


def read(spec: str | Path, text_field: str = "text") -> tuple[list[Document], dict[str, int]]:
    skipped: Counter[str] = Counter()
    documents = list(read_sources([str(spec)], text_field, skipped))
    return documents, {kind: count for kind, count in skipped.items() if count}


def test_folders_pass_over_what_is_no_text_and_count_it(tmp_path: Path) -> None:
    for name, content in {
        ".git/one": "hidden",
        ".git/two": "hidden",
        ".env": "hidden",
        "b/code.rs": "fn größe() {}\r\n",
        "b.md": "after the folder b? no: names are compared part by part",
        "a.py": "print(1)",
        "empty.txt": "",
        "picture.png": b"\x89PNG\r\n\x1a\n\x00\x00",
        "latin.txt": b"stra\xdfe",
        "records.jsonl": '{"text": "one"}\n\n{"text": ""}\n{"text": "two", "id": 2}\n',
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / "again").symlink_to(tmp_path)
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    (tmp_path / "z.txt").symlink_to(tmp_path / "a.py")  # a link to a file is a file
    documents, skipped = read(tmp_path)
    assert [Path(d.name).name for d in documents] == [
        *("a.py", "code.rs", "b.md", "records.jsonl, line 1", "records.jsonl, line 4", "z.txt")
    ]
    assert documents[1].text == "fn größe() {}\r\n"
    assert skipped == {"hidden": 2, "empty": 2, "binary": 2, "linked": 1, "special": 1}


def test_what_is_no_text_is_named(tmp_path: Path) -> None:
    empty, hidden = tmp_path / "empty", tmp_path / "hidden"
    for folder in (empty, hidden):
        folder.mkdir()
    for name, content in {
        "zero": b"ab\0",
        "latin": b"stra\xdfe",
        "none": b"",
        "hidden/z": b"\0",
        "hidden/.h": b"x",
    }.items():
        (tmp_path / name).write_bytes(content)
    for spec, message in {
        empty: "has no files with text$",
        hidden: "has no files with text: 1 binary, 1 hidden passed over",
        tmp_path / "zero": "zero is not text: byte 2 is zero",
        tmp_path / "latin": "latin is not UTF-8 text: byte 4 is 0xdf",
        tmp_path / "none": "none is empty",
        tmp_path / "gone": "there is no file or folder .*gone; data is stdlib, files, folders, hf:DATASET or task:NAME",
        "stdlb": r"no file or folder stdlb \(did you mean 'stdlib'\?\)",
        "tasks:recall": r"no file or folder tasks:recall \(did you mean 'task'\?\)",
    }.items():
        with pytest.raises(ValueError, match=message):
            read(spec)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that is there and cannot be read")
def test_a_file_that_cannot_be_read_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "fine.txt").write_text("text")
    (tmp_path / "broken.txt").symlink_to("/proc/self/mem")
    with pytest.raises(FileError, match=r"broken.txt cannot be read"):
        read(tmp_path)
    with pytest.raises(ValueError, match=r"broken.txt cannot be read"):
        read(tmp_path / "broken.txt")


def write_records(path: Path, records: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow")
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(records), path, row_group_size=2)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


RECORDS = [{"body": "eins\n", "id": 1}, {"body": "", "id": 2}, {"body": "zwei ü", "id": 3}, {"body": None, "id": 4}]


@pytest.mark.parametrize("end", ["jsonl", "parquet"])
def test_records_are_documents(tmp_path: Path, end: str) -> None:
    path = write_records(tmp_path / f"r.{end}", RECORDS)
    documents, skipped = read(path, "body")
    word = "line" if end == "jsonl" else "row"
    assert documents == [Document(f"{path}, {word} 1", "eins\n"), Document(f"{path}, {word} 3", "zwei ü")]
    assert skipped == {"empty": 2}
    with pytest.raises(ValueError, match=r"has no field 'text'; its fields are body, id: choose one as text_field"):
        read(path)
    with pytest.raises(ValueError, match=r"no field 'bodi' \(did you mean 'body'\?\); its fields are body, id"):
        read(path, "bodi")
    with pytest.raises(ValueError, match=f"{word} 1: the field 'id' is int, not text"):
        read(path, "id")
    bare = write_records(tmp_path / f"bare.{end}", [{"body": ""}])
    with pytest.raises(ValueError, match=r"bare\.\w+ has no record with text in its field 'body'"):
        read(bare, "body")


def test_records_that_are_broken(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    cases = {
        '{"text": "a"}\n{"text": ': "r.jsonl, line 2, is not a JSON record",
        "[" * 100_000: "r.jsonl, line 1, is not a JSON record",
        '["text"]\n': "r.jsonl, line 1, is list, not a record with fields",
        '{"text": "a"}\n{}\n': "line 2, has no field 'text'; its fields are none",
    }
    for content, message in cases.items():
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            read(path)
    path.write_text('{"text": "half \\ud800"}\n{"text": "zero \\u0000"}\n{"text": "fine"}\n')
    documents, skipped = read(path)
    assert ([d.text for d in documents], skipped) == (["fine"], {"binary": 2})
    (tmp_path / "r.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match=r"r\.parquet is not a parquet file"):
        read(tmp_path / "r.parquet")


def test_the_spelling_of_data_sets(tmp_path: Path) -> None:
    assert parse_hub("hf:owner/name") == ("owner/name", None, "train")
    assert parse_hub("hf:owner/name:en@validation") == ("owner/name", "en", "validation")
    assert parse_hub("hf:name@test") == ("name", None, "test")
    for wrong in ("hf:", "hf:name:", "hf:name@", "hf::en"):
        with pytest.raises(ValueError, match="names no data set; write hf:NAME"):
            parse_hub(wrong)
    (tmp_path / "notes").mkdir()
    (tmp_path / "a.txt").touch()
    names = {f"{tmp_path}/notes/": "folder notes", f"{tmp_path}/a.txt": "file a.txt", "hf:a/b@test": "hf:a/b@test"}
    assert [source_name(spec) for spec in ("stdlib", *names)] == ["stdlib", *names.values()]


def test_a_data_set_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    (tmp_path / "set").mkdir()
    for split, words in (("train", ["eins", "zwei"]), ("test", ["drei", ""])):
        write_records(tmp_path / "set" / f"{split}.jsonl", [{"body": word} for word in words])
    spec = f"hf:{tmp_path / 'set'}"
    assert [d.text for d in read(spec, "body")[0]] == ["eins", "zwei"]
    listed = list_sources([spec])
    assert list_sources([spec]) == listed != list_sources([f"{spec}@test"])
    documents, skipped = read(f"{spec}@test", "body")
    assert (documents, skipped) == ([Document(f"{spec}@test, row 1", "drei")], {"empty": 1})
    with pytest.raises(ValueError, match=r"has no field 'text'; its fields are body"):
        read(spec)
    with pytest.raises(ValueError, match=r"cannot be loaded: .*fetched over the network unless"):
        read(f"{spec}@absent", "body")
    write_records(tmp_path / "set" / "train.jsonl", [{"body": "vier"}])
    assert [d.text for d in read(spec, "body")[0]] == ["vier"]
    assert list_sources([spec]) != listed


def test_a_data_set_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    for module in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="hf:nobody/nothing-of-this-name cannot be loaded: ") as caught:
        read("hf:nobody/nothing-of-this-name")
    assert str(caught.value).endswith("it is fetched over the network unless it is in the local cache")


def test_the_standard_library() -> None:
    documents, _ = read("stdlib")
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [Path(d.name).relative_to(root).as_posix() for d in documents]
    assert len(names) > 300
    assert sum(len(d.text.encode()) for d in documents) > 5_000_000
    assert names == sorted(names, key=lambda name: Path(name).parts)
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert not any(part in ("test", "tests", "site-packages") for name in names for part in Path(name).parts)
    at = names.index("argparse.py")
    assert documents[at].text.encode() == (root / "argparse.py").read_bytes()
    assert read("stdlib")[0] == documents


def test_listings_change_with_the_files(tmp_path: Path) -> None:
    """Also where size and time of modification are put back, and where what is passed over changes."""
    one, folder = tmp_path / "one.txt", tmp_path / "folder"
    folder.mkdir()
    for path in (one, folder / "a.txt", folder / "b.txt"):
        path.write_text("text")
    stat = one.stat()

    def rewrite() -> None:
        one.write_text("tixt")
        os.utime(one, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    sources = [str(one), str(folder), "stdlib"]
    seen = [list_sources(sources)]
    assert list_sources(sources) == seen[0]
    changes = (rewrite, lambda: (folder / "b.txt").rename(folder / "c.txt"), (folder / ".hidden").touch)
    for change in (*changes, (folder / "a.txt").unlink):
        change()
        seen.append(list_sources(sources))
    assert all(a != b for number, a in enumerate(seen) for b in seen[:number])
    assert len(json.dumps(seen[0])) > 10_000  # the modules of the standard library are in it
