"""Checking a file: what is found in it, and what is said when it cannot be checked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from twoaxis.depth.registry import STREAMS
from twoaxis.sequence.registry import MIXERS
from twoaxis.verify import check_file

STREAM = """
import twoaxis
from twoaxis.depth.standard import Standard, StandardConfig

class Base(twoaxis.Stream):
    pass

@twoaxis.register("as_ever")
class AsEver(Standard):
    pass
"""

MIXER = """
from twoaxis.sequence.short_conv import ShortConv

class Conv(ShortConv):
    name = "conv"
    variants = ({"kernel": 2, "start": "uniform"},)
"""


def written(folder: Path, text: str, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_streams_and_mixers_of_a_file(tmp_path: Path) -> None:
    """One that is unfinished fails, and does not raise."""
    streams, mixers = STREAMS.names(), MIXERS.names()
    reports = check_file(written(tmp_path, STREAM + MIXER))
    assert [(report.title, report.ok) for report in reports] == [("Base", False), ("AsEver", True), ("Conv", True)]
    (unfinished,) = reports[0].results
    assert "Base does not define _open; Base does not define _read" in unfinished.detail
    assert (STREAMS.names(), MIXERS.names()) == (streams, mixers)
    assert "twoaxis_checked_mine" not in sys.modules


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "defines no subclass of twoaxis.Stream or of twoaxis.LocalOperator"),
        ("from twoaxis.depth.standard import Standard\n", "defines no subclass"),
        ("import torch\n\nx = 1 / 0\n", r"cannot be imported: raises ZeroDivisionError: .* \(mine.py, line 3\)"),
        ("import torch\nclass\n", r"cannot be imported: raises SyntaxError: .*\(mine.py, line 2\)"),
        ("import no_such_module_anywhere\n", "cannot be imported: raises ModuleNotFoundError"),
        ("import twoaxis\n@twoaxis.register('standard')\nclass A(twoaxis.Stream): pass\n", "already a stream named"),
    ],
)
def test_files_that_cannot_be_checked(tmp_path: Path, text: str, message: str) -> None:
    streams = STREAMS.names()
    with pytest.raises(ValueError, match=message):
        check_file(written(tmp_path, text))
    assert STREAMS.names() == streams


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no file"):
        check_file(tmp_path / "absent.py")
    with pytest.raises(ValueError, match="no Python file"):
        check_file(written(tmp_path, "", "mine.txt"))
