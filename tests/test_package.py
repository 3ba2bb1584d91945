"""What is installed: the built wheel has every file the package reads, and the top level the names people use."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import twoaxis

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_wheel_has_everything_that_is_not_python(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", str(tmp_path), str(ROOT)], check=True)
    wheel = zipfile.ZipFile(next(tmp_path.glob("*.whl")))
    there = {name for name in wheel.namelist() if name.startswith("twoaxis/")}
    wanted = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "twoaxis").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert wanted - there == set()


def test_commands_are_functions_of_the_package() -> None:
    """A command of the rebuilt rooms and the function of its name are one object."""
    from twoaxis import cli

    for name in ("train", "methods", "check"):
        assert getattr(twoaxis, name) is cli.find(name)
