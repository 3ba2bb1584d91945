"""Files that are whole or not there, whatever happens while they are written.

A file is written beside its place, flushed to the disk and renamed; so is a folder. A log is appended a line at a time,
and a last line that a crash cut short is dropped when it is opened again. A folder that one process works in is claimed
by a lease. What the system refuses (no space, no permission, a read-only disk) becomes an error that names the file.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PARTIAL = ".partial-"
"""In the name of everything that is not finished."""
LEASE = ".lease"
"""Name of the file by which a process claims a folder."""
LEASE_SECONDS = 120.0
"""How long a claim outlives the last sign of life of its holder on another machine, and how long it is then watched for
one. On one machine a dead holder is noticed at once, by its process number."""

_REMEDIES = {
    errno.ENOSPC: "the disk is full; free some space and start again, what was finished is kept",
    errno.EDQUOT: "the quota of the disk is used up; free some space and start again, what was finished is kept",
    errno.EROFS: "the disk is read-only; choose another folder",
    errno.EACCES: "no permission; choose a folder of your own",
    errno.EPERM: "no permission; choose a folder of your own",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.ENAMETOOLONG: "the name is too long for the file system; choose a shorter one",
}


class FileError(ValueError):
    """The system refused a file; the message names it and says what to do."""


class Claimed(ValueError):
    """Another process works in the folder."""


@contextlib.contextmanager
def file_errors(path: str | Path, doing: str = "written") -> Iterator[None]:
    """Context manager that turns an `OSError` into a `FileError` with the remedy and the file's name.

    That is `path` where the error itself names no file; `doing` is what could not be done with it.
    """
    try:
        yield
    except OSError as error:
        reason = _REMEDIES.get(error.errno or 0, error.strerror or str(error))
        raise FileError(f"{error.filename or path} cannot be {doing}: {reason}") from error


def user_path(given: str | Path) -> Path:
    """A path as people write it, with ~ for a home folder; where nobody is called so, ~name is a name like others."""
    return Path(os.path.expanduser(given))


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a file whole: after a crash there is the old one or the new one."""
    path = Path(path)
    with file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = _partial(path)
        try:
            with open(partial, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        finally:
            _remove(partial)
        _sync(path.parent)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file whole, in UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: str | Path, value: Any) -> None:
    """Write a JSON document whole; NaN and infinities are refused, as JSON has none."""
    write_text(path, json_text(value))


def json_text(value: Any) -> str:
    """A JSON document as this program writes it everywhere."""
    text = json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False)
    # bytes of a file's name that are no UTF-8, which JSON can spell
    return re.sub("[\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"


def read_json(path: str | Path) -> Any:
    """Read a JSON document."""
    with file_errors(path, "read"):
        data = Path(path).read_bytes()
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a JSON document: {error}") from error


@contextlib.contextmanager
def atomic_folder(path: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """Context manager with an empty folder to fill, which takes its place if the block ends without an error.

    The place must not exist, or be empty, unless `replace`.
    """
    path = Path(path)
    if not replace:
        check_empty(path)
    partial, old = _partial(path), _partial(path)
    try:
        with file_errors(path):
            partial.mkdir(parents=True)
            yield partial
            for file in partial.rglob("*"):
                _sync(file)
            if path.exists():
                os.replace(path, old)
            os.replace(partial, path)
            _remove(old)
            _sync(path.parent)
    finally:
        _remove(partial)


def check_empty(path: Path) -> None:
    """Refuse a place for a folder where something stands."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} exists and is not an empty folder; choose another place or remove it")


CONTENTS = {"run.json": "a training run", "compare.json": "a comparison", "config.json": "a model"}
"""What a folder holds, by the file that only such a folder has."""


def check_contents(folder: Path, own: str) -> None:
    """Refuse a folder in which another command keeps something else than what the file `own` stands for."""
    for name, what in CONTENTS.items():
        if name != own and (folder / name).is_file():
            raise ValueError(f"{folder} holds {what}; choose another folder for --out")


def remove_partial(folder: str | Path, of: str = "") -> None:
    """Remove what a killed process left unfinished, `of` one name or of all, in a folder that this one has claimed."""
    for left in Path(folder).glob(f".{glob.escape(of) or '*'}{PARTIAL}*"):
        _remove(left)


@contextlib.contextmanager
def claim(folder: str | Path, *, wait: bool = False, beside: bool = False) -> Iterator[Callable[[], None]]:
    """Context manager that keeps a folder to one process, also across machines that share a file system.

    A claim ends with its process, however that ends. `Claimed` is raised if another process has the folder. The context
    is a function to call before writing: it raises `Claimed` if the lease was lost, as after the machine slept for
    longer than it lasts.

    Args:
        folder: created if it is not there.
        wait: for the process that has it, instead of refusing.
        beside: claim the place of a folder that is still to be made; the lease then lies beside it.
    """
    import filelock

    folder = Path(folder)
    lease = folder.with_name(f".{folder.name}{LEASE}") if beside else folder / LEASE
    with file_errors(folder):
        lease.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.SoftFileLease(lease, lease_duration=LEASE_SECONDS, thread_local=False)
        with contextlib.suppress(OSError):  # one that names nobody, as after a loss of power, would never end
            if lock.owner is None and time.time() - lease.stat().st_mtime > LEASE_SECONDS:
                lease.unlink()
        # A dead holder is recognised at the second look, so even a claim that does not wait looks for a second. One of
        # another machine counts as dead when nobody has seen it refresh its lease for so long: that takes watching.
        seconds = 1.0
        with contextlib.suppress(OSError):
            if time.time() - lease.stat().st_mtime > LEASE_SECONDS:
                seconds += LEASE_SECONDS
        try:
            lock.acquire(timeout=-1 if wait else seconds)
        except filelock.Timeout as error:
            found = lock.owner
            nobody = f"unknown; if there is none, remove {lease}"
            holder = nobody if found is None else f"process {found.pid} on {found.hostname}"
            raise Claimed(f"{folder} is in use by another process ({holder})") from error

    def check() -> None:
        if lock.compromise is not None:
            raise Claimed(f"{folder} was taken over by another process while this one did not answer; stopping")

    try:
        yield check
    finally:
        with contextlib.suppress(OSError):  # the folder may be gone, and the lease with it
            lock.release()


class JsonLines:
    """A log of JSON records, one per line, that survives a crash; the file is created with the first record."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def append(self, record: dict[str, Any]) -> None:
        """Add a record and hand it to the system."""
        with file_errors(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """Every whole record; a last line cut short is passed over, a broken one before it is an error."""
        if not self.path.exists():
            return []
        with file_errors(self.path, "read"):
            lines = self.path.read_bytes().split(b"\n")
        records = []
        for number, line in enumerate(lines[:-1], start=1):  # what follows the last line end was cut short
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict):
                raise ValueError(f"{self.path}, line {number}, is not a JSON record")
            records.append(record)
        return records


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file's content, in hexadecimal digits."""
    with file_errors(path, "read"), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def short_hash(value: Any) -> str:
    """Twelve hexadecimal digits that stand for a JSON value, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _remove(path: Path) -> None:
    """Remove a file or a folder if it is there."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Flush a file or a folder's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _partial(path: Path) -> Path:
    """A new name beside a file or folder, for what is not finished of it."""
    return path.with_name(f".{path.name}{PARTIAL}{secrets.token_hex(4)}")
