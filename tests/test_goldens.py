"""Every golden file: forward arrays to 1e-10, gradients to 1e-9 of the array's largest entry, in float64.

    pytest tests/test_goldens.py --goldens DIR

runs on any folder of such files. Settings come from inside a file; a file nobody recognises is a failure.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden_formats import check_file


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    folder = Path(str(metafunc.config.getoption("goldens")))
    files = sorted(folder.glob("*.npz"))
    if not files:
        raise pytest.UsageError(f"--goldens {folder}: no .npz files there")
    metafunc.parametrize("path", files, ids=[f.stem for f in files])


def test_golden(path: Path) -> None:
    compared = check_file(path)
    assert compared >= 6, f"only {compared} arrays of {path.name} were compared"
