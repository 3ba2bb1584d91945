"""Run as a program: how much memory a retrofit needs at its peak, beyond what the process holds before.

    python -m tests.pretrained.peak WARM SOURCE OUT STREAM

prints the peak in bytes. A retrofit of the small folder WARM goes first, so that imports do not count. Pages of mapped
files count, as the system counts them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from twoaxis.pretrained.retrofit import retrofit


def resident(field: str) -> int:
    """A size of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def main() -> None:
    """Measure."""
    torch.set_num_threads(1)
    warm, source, out, stream = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        retrofit(warm, stream=stream, out=Path(folder) / "warm", tokens=16)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    made = retrofit(source, stream=stream, out=out, tokens=64)
    print(resident("VmHWM") - before, sum(p.numel() * p.element_size() for p in made.model.parameters()))


if __name__ == "__main__":
    main()
