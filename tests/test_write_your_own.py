"""The page that shows how to write a stream: its code is the example's, and the example passes the kit."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from tests.support.commands import run_line
from twoaxis.verify.contract import COMPILE

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "my_stream.py"
PAGE = ROOT / "docs" / "write_your_own.md"


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def test_the_example_passes_the_kit() -> None:
    """Compiled too, as the command does it."""
    torch._dynamo.reset()
    done = run_line("twoaxis check examples/my_stream.py")
    assert done.code == 0, done.out
    assert done.out.startswith("FadingMemory\n")
    assert re.search(r"\n(4\d) of \1 hold", done.out)
    assert COMPILE in done.out
    assert "none given" not in done.out


def test_the_code_of_the_page_is_the_example() -> None:
    pieces = re.findall(r"^```text\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(pieces) == 7
    assert lines("\n".join(pieces)) == lines(EXAMPLE.read_text())
