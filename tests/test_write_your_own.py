"""The page that shows how to write a stream: its code is the example's, and the example passes the kit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.support.commands import Done, run, run_line
from twoaxis.verify.contract import COMPILE
from twoaxis.verify.run import claims

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "my_stream.py"
PAGE = ROOT / "docs" / "howto" / "write_a_stream.md"


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def passes(done: Done, *, left_out: int = 0) -> None:
    assert done.code == 0, done.out
    assert done.out.startswith("FadingMemory\n")
    count = len(claims("depth")) - left_out
    assert f"\n{count} of {count} hold" in done.out
    assert "none given" not in done.out


def test_the_example_passes_the_kit() -> None:
    """All but what is compiled, which is named by itself."""
    passes(run("check", str(EXAMPLE), "--only", *{claim.family: None for claim in claims("depth")}), left_out=1)


@pytest.mark.slow
def test_the_example_passes_the_kit_compiled() -> None:
    torch._dynamo.reset()
    done = run_line("twoaxis check examples/my_stream.py")
    passes(done)
    assert COMPILE in done.out


def test_the_code_of_the_page_is_the_example() -> None:
    pieces = re.findall(r"^```text\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(pieces) == 7
    assert lines("\n".join(pieces)) == lines(EXAMPLE.read_text())
