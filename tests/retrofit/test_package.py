"""The package answers a call under every way of importing it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("transformers")

SCRIPTS = {
    "lazy": "import twoaxis; call = twoaxis.retrofit",
    "submodule first": "import twoaxis.retrofit.groups; import twoaxis; call = twoaxis.retrofit",
    "lazy then submodule": "import twoaxis; twoaxis.retrofit; import twoaxis.retrofit.groups as g; g.RATES; "
    "call = twoaxis.retrofit",
    "from": "from twoaxis import retrofit as call",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_can_be_called(name: str) -> None:
    check = "\ntry: call('x', dtype='int4')\nexcept ValueError as e: print(e)"
    check += "\nimport sys; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", SCRIPTS[name] + check], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("unknown dtype 'int4'"), done.stderr
    assert done.returncode == 0, done.stderr
