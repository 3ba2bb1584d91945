"""What is said of a deep model from two shallow ones is what tracing it whole gives."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.costs.helpers import FIRST, FIRST_MIXERS, MIXER_VARIANTS, STREAM_VARIANTS, Fields, label
from twoaxis.costs import deepen
from twoaxis.costs.fuse import Kernel, Work
from twoaxis.costs.trace import StepTrace, TrainTrace, meta_model, trace_decoding, trace_step, trace_training
from twoaxis.depth.registry import STREAMS
from twoaxis.model.config import ModelConfig

SHAPE = ModelConfig(vocab_size=64, hidden_size=32, num_hidden_layers=7, num_attention_heads=4)
PASSES: dict[str, Callable[[Any], TrainTrace | StepTrace]] = {
    "training": lambda model: trace_training(model, 2, 24),
    "recomputed": lambda model: trace_training(model, 2, 24, None, "block"),
    "prefill": lambda model: trace_step(model, 2, 24),
    "decoding": lambda model: trace_decoding(model, 2, 24),
}
ALIKE = [f for f in STREAM_VARIANTS + MIXER_VARIANTS if STREAMS.find(f.get("stream", "standard")).alike]
SOON = [fields for fields in FIRST + FIRST_MIXERS if fields in ALIKE]
LATER = [fields for fields in ALIKE if fields not in SOON]


def sums(kernels: Counter[Kernel]) -> dict[str, tuple[int, int, int]]:
    """Calls, bytes and operations by operator: which of several calls grew how far does not matter."""
    found: dict[str, tuple[int, int, int]] = {}
    for kernel, n in kernels.items():
        calls, size, flops = found.get(kernel.op, (0, 0, 0))
        found[kernel.op] = (calls + n, size + n * kernel.bytes, flops + n * kernel.flops)
    return found


def summed(works: Iterable[tuple[Any, Work]]) -> dict[Any, Any]:
    return {part: (sums(work.eager), sums(work.fused)) for part, work in works}


def compare(fields: Fields) -> None:
    config = dataclasses.replace(SHAPE, **fields)
    model, traced = meta_model(config, "bfloat16"), []

    def trace(run: Callable[[Any], Any], given: Any) -> Any:
        traced.append(given.stream.layout.blocks)
        return run(given)

    for name, run in PASSES.items():
        traced.clear()
        ours = deepen.trace_deep(model, config, "bfloat16", lambda given, run=run: trace(run, given))
        if name == "training":
            assert traced == [2, 3], "nothing was left out"
        whole: Any = run(model)
        if isinstance(ours, StepTrace):
            assert summed(ours.parts.items()) == summed(whole.parts.items())
            assert ours.kept == whole.kept
            assert [site[:2] for site in ours.sites] == [site[:2] for site in whole.sites]
            moved = [[n for site in each.sites for n in site[2:]] for each in (ours, whole)]
            assert moved[0] == pytest.approx(moved[1], rel=1e-12)
        else:
            assert summed(ours.forward.items()) == summed(whole.forward.items())
            assert summed(ours.backward.items()) == summed(whole.backward.items())
            assert (ours.alive, ours.extra, ours.sites) == (whole.alive, whole.extra, whole.sites)


@pytest.mark.parametrize("fields", SOON, ids=label)
def test_a_deep_model_from_two_shallow_ones(fields: Fields) -> None:
    compare(fields)


@pytest.mark.slow
@pytest.mark.parametrize("fields", LATER, ids=label)
def test_every_variant_from_two_shallow_ones(fields: Fields) -> None:
    compare(fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": "attention_residuals"},
        {"attention_windows": (None, 4, 4, 4, 4, 4, None)},
        {"mixer": "short_conv", "mixer_blocks": (1,)},
    ],
    ids=str,
)
def test_blocks_that_differ_are_traced_whole(fields: Fields) -> None:
    config = dataclasses.replace(SHAPE, **fields)
    assert not deepen.alike(meta_model(config, "bfloat16"), config)


def test_a_stream_whose_blocks_differ_after_all() -> None:
    """Two traces that do not fit together are not continued."""
    shapes = (("standard", 2), ("deep_delta", 3))
    configs = [dataclasses.replace(SHAPE, stream=stream, num_hidden_layers=blocks) for stream, blocks in shapes]
    few, more = (trace_training(meta_model(config, "bfloat16"), 2, 24) for config in configs)
    with pytest.raises(deepen._UnlikeError):
        deepen.deepen(few, more, 4)
