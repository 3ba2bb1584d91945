"""A retrofit needs at most twice the memory of the source's weights, and far less in practice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests.pretrained.helpers import byte_llama, save


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is read from /proc")
@pytest.mark.parametrize("stream", ["standard", "muddformer"])
def test_the_peak_is_at_most_twice_the_weights(tmp_path: Path, stream: str) -> None:
    big = byte_llama(hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=12)
    weights = sum(p.numel() * p.element_size() for p in big.parameters())
    assert weights > 190e6
    save(big, tmp_path / "big", max_shard_size="60MB")
    save(byte_llama(), tmp_path / "small")
    del big
    arguments = [str(tmp_path / "small"), str(tmp_path / "big"), str(tmp_path / "out"), stream]
    small = "65536"  # freed memory goes back to the system, so that the peak is the program's and not the allocator's
    environment = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": small, "MALLOC_TRIM_THRESHOLD_": small}
    done = subprocess.run(
        [sys.executable, "-m", "tests.pretrained.peak", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    peak, made = map(int, done.stdout.split())
    assert made >= weights
    assert weights * 0.5 < peak <= 2 * weights, (peak, weights)
