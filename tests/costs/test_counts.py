"""Parameters against built models, products against torch's counter, traces on meta tensors against real runs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.costs.helpers import FIRST, FIRST_MIXERS, SHAPE, Fields, counted, label, passes
from twoaxis.base.meter import ATTENTION, Call, Meter, extent
from twoaxis.costs.fuse import VIEW, Kernel
from twoaxis.costs.trace import SiteTraffic, meta_model, trace_step, trace_training
from twoaxis.model.flops import forward_flops


@pytest.mark.parametrize("fields", [*FIRST, *FIRST_MIXERS], ids=label)
def test_meta_tensors_count_like_real_ones(fields: Fields) -> None:
    """Every call of a real step with its bytes and operations, none besides, and the products of torch's own counter.

    Torch's counter does not know fused attention on the CPU. Only real tensors can be asked whether they are finite,
    which attention does by a sum.
    """
    config = dataclasses.replace(SHAPE, **fields)
    counter, meter, ours = FlopCounterMode(display=False), Meter(), Counter[Kernel]()
    run = passes(config, 2, 24)
    run(counter)
    run(meter)
    # a layout's strides of single elements differ on meta tensors, and with them the number of a call
    real = Counter(Kernel.of(event)._replace(number=0) for event in meter.take() if isinstance(event, Call))
    for kernel, n in counted(config, 2, 24).work("all").eager.items():
        ours[kernel._replace(number=0)] += n * (kernel != VIEW)
    assert not ours - real
    assert {kernel.op for kernel in real - ours} <= {"sum"}
    fused = {kernel: n for kernel, n in ours.items() if kernel.op.startswith(ATTENTION)}
    attention, rest = (sum(k.flops * n for k, n in part.items()) for part in (fused, ours - Counter(fused)))
    assert rest == counter.get_total_flops()
    plain = 3 * 2 * 24 * forward_flops(SHAPE, 24).scores
    more = fields.get("mixer") == "short_swa" or fields.get("stream") == "depth_attention"
    assert attention == plain or (more and attention > plain)


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize(("stream", "spared"), [("standard", True), ("muddformer", True), ("hyper_connections", False)])
def test_each_part_gets_its_own_backward_pass(stream: str, spared: bool, recompute: Any) -> None:
    """Twice the products of its forward pass, and those once more where it is made anew.

    The last product of a block is spared where no gradient needs its result.
    """
    config = dataclasses.replace(SHAPE, stream=stream)
    trace = trace_training(meta_model(config, "float32"), 2, 24, "cpu", recompute)
    forward, backward = ({kind: work.flops for kind, work in way.items()} for way in (trace.forward, trace.backward))
    again = recompute == "block"
    assert backward["attention"] == (2 + again) * forward["attention"] > 0
    assert backward["head"] == 2 * forward["head"] > 0
    last = SHAPE.num_hidden_layers * 2 * 2 * 24 * SHAPE.hidden_width(0) * SHAPE.hidden_size if again and spared else 0
    assert backward["mlp"] == (2 + again) * forward["mlp"] - last
    assert {*forward, *backward} == {"embedding", "stream", "attention", "mlp", "head"}


def test_copies_that_a_tensor_only_shows_are_no_bytes() -> None:
    one = torch.empty(2, 1, 8)
    assert extent(one) == extent(one.expand(2, 5, 8)) == 4 * 16
    assert extent(one.expand(2, 0, 8)) == 0


def sites(dtype: str, tokens: int, **fields: Any) -> list[SiteTraffic]:
    return [*trace_step(meta_model(dataclasses.replace(SHAPE, **fields), dtype), 1, tokens).sites]


def test_traffic_by_hand() -> None:
    """Vectors per token that a site reads and writes, weights and logits of a token aside."""
    found = sites("bfloat16", 64)
    # a site reads the residual and an increment and writes their sum; the first has nothing to do
    assert [site.fused for site in found] == [0.0] + [3 * 16 * 2.0] * 6
    assert [site.eager for site in found] == [site.fused for site in found]
    assert [site.kind for site in found] == ["attention", "mlp"] * 3 + ["out"]
    wide: Any = {"hidden_size": 512, "intermediate_size": None, "num_key_value_heads": None}
    # n sources, the newest just written, and one result
    found = sites("float32", 64, stream="attention_residuals", **wide)
    assert [found[n - 1].fused / (4 * 512) for n in (2, 5)] == pytest.approx([3, 6], abs=0.25)
    assert found[4].eager > 1.5 * found[4].fused
    # four streams and an increment come in, four streams and a read go out
    found = sites("float32", 4096, stream="hyper_connections", num_hidden_layers=6, **wide)
    assert [site.fused / (4 * 512) for site in found[2:]] == pytest.approx([10.0] * 11, abs=0.15)
