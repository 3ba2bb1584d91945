"""A retrofit needs at most twice the memory of the source's weights, and far less in practice."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests.support.commands import run_child
from tests.support.foreign import byte_llama, save


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
    limits = {"MALLOC_MMAP_THRESHOLD_": small, "MALLOC_TRIM_THRESHOLD_": small}
    done = run_child(*arguments, program=("-m", "tests.pretrained.peak"), **limits)
    assert done.code == 0, done.err
    peak, made = map(int, done.out.split())
    assert made >= weights
    assert weights * 0.5 < peak <= 2 * weights, (peak, weights)
