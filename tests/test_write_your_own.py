"""The page that shows how to write a stream: its code is the example's, and the example passes the kit."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from tests.golden_formats.base import trace
from twoaxis.depth.registry import STREAMS
from twoaxis.depth.stream import Layout
from twoaxis.verify import check_file

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "my_stream.py"
PAGE = ROOT / "docs" / "write_your_own.md"


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def test_the_example_passes_the_kit() -> None:
    names = STREAMS.names()
    (report,) = check_file(EXAMPLE)
    report.raise_if_failed()
    assert report.subject == "MemoryMix"
    assert len(report.variants) == 2
    assert len(report.checks) >= 30
    assert STREAMS.names() == names


def test_the_code_of_the_page_is_the_example() -> None:
    pieces = re.findall(r"^```text\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(pieces) == 9
    assert lines("\n".join(pieces)) == lines(EXAMPLE.read_text())


def test_the_example_computes_its_equation() -> None:
    from examples.my_stream import MemoryMix, MemoryMixConfig

    made = MemoryMix(MemoryMixConfig(), Layout.make(3, 8)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for theta in made.theta.values():
            theta.normal_(generator=generator)
    x = torch.randn(2, 3, 8, generator=generator, dtype=torch.float64)
    weights = torch.randn(6, 8, 8, generator=generator, dtype=torch.float64)
    out, steps, _ = trace(made, x, [lambda t, w=w: torch.tanh(t @ w) for w in weights])
    residual, memories = x, []
    for index, weight in enumerate(weights):
        read = residual
        if index % 2 == 0:
            memories.append(residual)
            alpha = made.theta[str(index)].softmax(-1)
            read = sum((a * m for a, m in zip(alpha, memories, strict=True)), torch.zeros_like(x))
        assert torch.allclose(steps[index]["seen"].x, read, atol=1e-13)
        residual = residual + torch.tanh(read @ weight)
    assert torch.allclose(out, residual, atol=1e-13)
