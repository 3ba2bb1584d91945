"""The machine and the process."""

from __future__ import annotations

import os
import re

import pytest
import torch

from twoaxis.base.machine import hardware, hardware_line, physical_cores, pick_device, reproducible, versions


def test_hardware_and_versions() -> None:
    threads, found, told = torch.get_num_threads(), hardware(), versions()
    assert list(found) == ["cpu", "cores", "memory", "gpus", "threads", "platform"]
    assert found["threads"] == threads
    assert 1 <= found["cores"] <= (os.cpu_count() or 1)
    assert found["memory"] > 2**28
    assert len(found["gpus"]) == torch.cuda.device_count()
    version = torch.__version__.partition("+")[0]
    assert re.fullmatch(rf".*, {found['cores']} core.*, torch {version} .*, {threads} threads?", hardware_line())
    assert list(told) == ["python", "twoaxis", "torch", "transformers", "tokenizers"]
    assert told["torch"].partition("+")[0] == version


def test_cores_and_devices() -> None:
    assert 1 <= physical_cores() <= len(os.sched_getaffinity(0))
    assert pick_device("cpu") == torch.device("cpu")
    for name in ("gpu", "", "meta", "cuda:99", "x" * 1000):
        with pytest.raises(ValueError, match=r"(cannot be used .*|finds no GPU here); give cpu,"):
            pick_device(name)


def test_reproducible_restores_what_it_changes() -> None:
    before = (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.get_rng_state().tolist())
    with reproducible(1):
        assert torch.get_num_threads() == 1
        torch.manual_seed(5)
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before[:2]
    assert torch.get_rng_state().tolist() == before[2]
    with pytest.raises(ValueError, match="threads must lie between 1 and 1024, got 1000000"), reproducible(1_000_000):
        pass
