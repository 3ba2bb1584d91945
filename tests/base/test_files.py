"""Files that are whole or not there."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from twoaxis.base import files


def test_write_replaces_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    files.write_json(path, {"x": 1})
    files.write_json(path, {"x": [1.5, "ü"]})
    assert files.read_json(path) == {"x": [1.5, "ü"]}
    assert [p.name for p in path.parent.iterdir()] == ["b.json"]
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_json(path, {"x": float("nan")})
    assert files.read_json(path) == {"x": [1.5, "ü"]}


def test_names_that_are_no_text_are_kept_in_json(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff \\ud800")
    files.write_json(tmp_path / "a.json", [name])
    assert files.read_json(tmp_path / "a.json") == json.loads((tmp_path / "a.json").read_text("utf-8")) == [name]


def _fill_beyond_the_limit(path: str) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    try:
        files.write_bytes(path, b"new" * 1000)
    except files.FileError as error:
        os._exit(0 if Path(path).name in str(error) else 2)
    os._exit(1)


def test_a_refused_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    files.write_bytes(path, b"old")
    job = multiprocessing.get_context("fork").Process(target=_fill_beyond_the_limit, args=(str(path),))
    job.start()
    job.join()
    assert job.exitcode == 0
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["weights"]


def test_what_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"a": 1')
    with pytest.raises(ValueError, match=r"c\.json is not a JSON document"):
        files.read_json(tmp_path / "c.json")
    for call, message in (
        (lambda: files.read_json(tmp_path / "none.json"), r"none\.json cannot be read"),
        (lambda: files.write_text(tmp_path / "c.json" / "below", "x"), "cannot be written"),
        (lambda: files.JsonLines(Path("/dev/full")).append({"step": 1}), "/dev/full cannot be written: the disk is f"),
    ):
        with pytest.raises(files.FileError, match=message):
            call()


def test_new_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    place = tmp_path / "model"
    with pytest.raises(ZeroDivisionError), files.atomic_folder(place) as made:
        (made / "half").write_text(str(1 / 0))
    assert os.listdir(tmp_path) == []
    with files.atomic_folder(place) as made:
        (made / "whole").write_text("2")
        assert not place.exists()
    assert (place / "whole").read_text() == "2"
    with pytest.raises(ValueError, match="not an empty folder"), files.atomic_folder(place):
        pass
    with files.atomic_folder(place, replace=True) as made:
        (made / "other").write_text("3")
    assert os.listdir(place) == ["other"]
    (tmp_path / "file").touch()
    with files.atomic_folder(tmp_path / "file", replace=True):
        pass
    assert sorted(os.listdir(tmp_path)) == ["file", "model"]


def test_log_survives_a_cut_line(tmp_path: Path) -> None:
    log = files.JsonLines(tmp_path / "log.jsonl")
    assert log.read() == []
    for step in range(5):
        log.append({"step": step})
    with open(log.path, "ab") as file:
        file.write(b'{"step": 5, "lo')
    assert [record["step"] for record in log.read()] == [0, 1, 2, 3, 4]
    log.path.write_text('{"step": 1}\nbroken\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        log.read()


def test_lock_is_for_one_process_and_ends_with_it(tmp_path: Path) -> None:
    program = (
        "import sys; from twoaxis.base import files\n"
        f"with files.claim({str(tmp_path)!r}):\n"
        "    print('in', flush=True); sys.stdin.read()\n"
    )
    command, pipe = [sys.executable, "-c", program], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout.readline() == "in\n"
        said = f"in use by another process \\(process {other.pid} on "
        with pytest.raises(ValueError, match=said), files.claim(tmp_path):
            pass
        other.kill()
    with files.claim(tmp_path) as check:
        assert f"pid={os.getpid()}\n" in (tmp_path / files.LEASE).read_text()
        check()
    assert os.listdir(tmp_path) == []


def test_the_place_of_a_folder_is_claimed_beside_it(tmp_path: Path) -> None:
    place = tmp_path / "model"
    (tmp_path / f".model{files.PARTIAL}1").mkdir()
    (tmp_path / f".other{files.PARTIAL}1").mkdir()
    with files.claim(place, beside=True):
        with pytest.raises(files.Claimed, match=f"{place} is in use"), files.claim(place, beside=True):
            pass
        files.remove_partial(tmp_path, "model")
        with files.atomic_folder(place) as made:
            (made / "whole").write_text("2")
    assert sorted(os.listdir(tmp_path)) == [f".other{files.PARTIAL}1", "model"]


@pytest.mark.parametrize("torn", [b"", b"\xff\0", b"pid=1\n"])
def test_a_lease_that_names_nobody_ends(torn: bytes, tmp_path: Path) -> None:
    """As after a loss of power: a fresh one may be half written, an old one is nobody's."""
    (tmp_path / files.LEASE).write_bytes(torn)
    with pytest.raises(files.Claimed, match=f"if there is none, remove {tmp_path}"), files.claim(tmp_path):
        pass
    os.utime(tmp_path / files.LEASE, (1, 1))
    with files.claim(tmp_path):
        assert f"pid={os.getpid()}\n" in (tmp_path / files.LEASE).read_text()


def test_a_claim_of_another_machine_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can ask whether its process lives, so it is watched; one that was refreshed lately is left alone."""
    monkeypatch.setattr(files, "LEASE_SECONDS", 2.0)
    lease = tmp_path / files.LEASE
    lease.write_text("filelock/2\npid=1\nhost=elsewhere\nmode=lease\ntoken=1\nduration=2.0\nstart=1\n")
    with pytest.raises(files.Claimed, match="process 1 on elsewhere"), files.claim(tmp_path):
        pass
    os.utime(lease, (1, 1))
    with files.claim(tmp_path):
        assert f"pid={os.getpid()}\n" in lease.read_text()


def test_a_lost_lease_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LEASE_SECONDS", 0.3)
    with files.claim(tmp_path) as check:
        (tmp_path / files.LEASE).unlink()  # as a process that takes over does first
        said, end = "", time.monotonic() + 10
        while not said and time.monotonic() < end:
            time.sleep(0.02)
            try:
                check()
            except files.Claimed as error:
                said = str(error)
        assert "was taken over by another process" in said


def test_digest_does_not_depend_on_the_order_of_keys() -> None:
    assert files.short_hash({"a": 1, "b": [2, 3]}) == files.short_hash(json.loads('{"b": [2, 3], "a": 1}'))
    assert files.short_hash({"a": 1}) != files.short_hash({"a": 2})
    assert len(files.short_hash({})) == 12
