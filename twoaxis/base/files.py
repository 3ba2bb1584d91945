"""Files that are whole or not there, whatever happens while they are written.

A file is written beside its place, flushed to the disk and renamed; so is a folder. A log is appended a line at a time,
and a last line that a crash cut short is dropped when it is opened again. What the system refuses (no space, no
permission, a read-only disk) becomes an error that names the file.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PARTIAL = ".partial-"
"""In the name of everything that is not finished."""

_REASONS = {
    errno.ENOSPC: "the disk is full; make room and start again, what was finished is kept",
    errno.EDQUOT: "the quota of the disk is used up; make room and start again, what was finished is kept",
    errno.EROFS: "the disk is read-only; choose another folder",
    errno.EACCES: "no permission; choose a folder of your own",
    errno.EPERM: "no permission; choose a folder of your own",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
}


class FileError(ValueError):
    """The system refused a file; the message names it and says what to do."""


@contextlib.contextmanager
def file_errors(path: str | Path, doing: str = "written") -> Iterator[None]:
    """Turn the system's refusals into `FileError` that names `path`."""
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
        raise FileError(f"{error.filename or path} cannot be {doing}: {reason}") from error


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a file whole: after a crash there is the old one or the new one."""
    path = Path(path)
    with file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}{PARTIAL}", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o666 & ~_umask())
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
        _sync(path.parent)


def write_text(path: str | Path, text: str) -> None:
    """The same for text."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: str | Path, value: Any) -> None:
    """The same for a JSON document; NaN and infinities are refused, as JSON has none."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def read_json(path: str | Path) -> Any:
    """A JSON document."""
    with file_errors(path, "read"):
        data = Path(path).read_bytes()
    try:
        return json.loads(data)
    except ValueError as error:
        raise ValueError(f"{path} is not a JSON document: {error}") from error


@contextlib.contextmanager
def atomic_folder(path: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """A folder to fill, which takes its place when the block ends without an error and vanishes when not.

    Args:
        path: its place. It must not exist, or be empty, unless `replace`.
        replace: take the place of what stands there.
    """
    path = Path(path)
    if not replace and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} exists and is not an empty folder; choose another place or remove it")
    with file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{path.name}{PARTIAL}", dir=path.parent))
    try:
        with file_errors(path):
            yield made
            for file in made.rglob("*"):
                _sync(file)
            os.chmod(made, 0o777 & ~_umask())
            if path.exists():
                old = Path(tempfile.mkdtemp(prefix=f".{path.name}{PARTIAL}", dir=path.parent))
                os.replace(path, old)
                os.replace(made, path)
                shutil.rmtree(old, ignore_errors=True)
            else:
                os.replace(made, path)
            _sync(path.parent)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def remove_partial(folder: str | Path) -> None:
    """Remove what a killed process left unfinished in `folder`; only while nobody else writes there (see `claim`)."""
    for left in Path(folder).glob(f".*{PARTIAL}*"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


@contextlib.contextmanager
def claim(folder: str | Path, *, wait: bool = False) -> Iterator[None]:
    """Keep a folder to one process; the lock ends with the process, however it ends.

    Args:
        folder: made if it is not there.
        wait: for a process that has it, instead of refusing.
    """
    folder = Path(folder)
    with file_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "a+")  # noqa: SIM115  it stays open while the lock is held
    try:
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            file.seek(0)
            raise ValueError(f"{folder} is in use by another process ({file.read().strip() or 'unknown'})") from error
        file.truncate(0)
        file.write(f"process {os.getpid()}")
        file.flush()
        yield
    finally:
        file.close()


class JsonLines:
    """A log of JSON records, one per line, that survives a crash.

    Args:
        path: the file; made when the first record comes.
    """

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
                records.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{self.path}, line {number}, is not a JSON record") from error
        return records

    def truncate(self, wanted: Any) -> None:
        """Rewrite the log with the records for which `wanted(record)` holds, as when going back to a checkpoint."""
        if self.path.exists():
            kept = [record for record in self.read() if wanted(record)]
            write_text(self.path, "".join(json.dumps(record, allow_nan=False) + "\n" for record in kept))


def short_hash(value: Any) -> str:
    """Twelve hexadecimal digits that stand for a JSON value, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _sync(path: Path) -> None:
    """Flush a file or a folder's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
