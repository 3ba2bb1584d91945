"""Predicted bytes of training against real steps on the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.costs.helpers import MIXER_VARIANTS, STREAM_VARIANTS, WIDE_DELTA, Fields, label
from twoaxis.base.meter import Meter
from twoaxis.costs.costs import cost
from twoaxis.costs.fuse import Part, highest
from twoaxis.costs.memory import _activations, device_memory, in_flight
from twoaxis.costs.trace import meta_model, trace_training
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.model.deployment import Deployment
from twoaxis.model.flops import count_parameters
from twoaxis.model.loss import next_token_loss
from twoaxis.model.stages import plan
from twoaxis.model.variant import Contender
from twoaxis.parallel.pipeline import Stage
from twoaxis.training.measure import peak_memory

B, T = 4, 48
SHAPE = ModelConfig(vocab_size=64, hidden_size=64, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2)
KINDS: list[Fields] = [
    {"stream": "standard"},
    {"stream": "attention_residuals", "stream_options": {"block_size": 2}},
    {"stream": "muddformer"},
    {"stream": "hyper_connections"},
    WIDE_DELTA,
    {"mixer": "short_swa"},
]
"""One variant of each kind of memory: a vector, a history, one with ways, streams, rings of tokens, a mixer's."""
OTHERS = [fields for fields in STREAM_VARIANTS + MIXER_VARIANTS if fields not in KINDS]


def recomputed_loss(model: Any, tokens: Tensor) -> Tensor:
    """Blocks made anew in the backward pass."""
    given, again = tokens[:, :-1], functools.partial(checkpoint, use_reentrant=False)
    out = model.run(model.embed(given), model.info(given), recompute=again)
    return F.cross_entropy(model.logits(out).flatten(0, 1), tokens[:, 1:].flatten())


def no_state(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def compare(fields: Fields, recompute: Any) -> None:
    """Saved bytes and the peak are those of a real step, to the byte, and the device has what it is said to have."""
    heads = fields.get("stream_options", {}).get("kv_heads", 2)  # an option that repeats the shape's
    config = dataclasses.replace(SHAPE, **fields, num_key_value_heads=heads)
    loss = next_token_loss if recompute == "none" else recomputed_loss
    model = Decoder(config)
    measured = peak_memory(model, B, T, loss=loss, optimizer=no_state)
    blank = meta_model(config, "float32")
    whole = trace_training(blank, B, T, "cpu")
    trace = whole if recompute == "none" else trace_training(blank, B, T, "cpu", recompute)
    assert trace.saved == measured.activations
    assert trace.peak == measured.peak - measured.parameters
    deployment = Deployment(micro_batch=B, context=T, dtype="float32", recompute=recompute)
    again = None if recompute == "none" else trace
    memory = device_memory(config, count_parameters(config), whole, again, plan(blank, 1), deployment)
    frozen = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    assert memory.weights == measured.parameters - frozen
    assert memory.activations == measured.activations
    assert memory.gradients >= measured.gradients  # a parameter that is never used has none
    # an upper bound: the last gradients appear when most activations have gone
    over = measured.peak - measured.parameters
    assert over <= memory.gradients + memory.activations + memory.backward <= over + memory.gradients


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("fields", KINDS, ids=label)
def test_bytes_of_a_real_step(fields: Fields, recompute: str) -> None:
    compare(fields, recompute)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("fields", OTHERS, ids=label)
def test_bytes_of_every_variant(fields: Fields, recompute: str) -> None:
    compare(fields, recompute)


def test_the_stream_keeps_its_norms() -> None:
    """The plain stream keeps its sum where a norm needs it; the norm what it scales and its result, and the root."""
    shape = ModelConfig(vocab_size=64, hidden_size=64, num_hidden_layers=3, num_attention_heads=4)
    saved = trace_training(meta_model(shape, "float32"), 1, 32, "cpu").saved_by(1)
    vector = 32 * 64 * 4
    assert saved.stream == 2 * (3 * vector + 32 * 4)


def test_stages_share_what_one_device_keeps() -> None:
    """The passes in flight aside, two stages keep what one does, and what one receives from the other."""
    shape = ModelConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, stream="attention_residuals"
    )
    model = meta_model(shape, "float32")
    trace, again = trace_training(model, 1, 32), trace_training(model, 1, 32, recompute="block")
    for recompute, run in (("none", None), ("block", again)):
        options: Any = {"context": 32, "dtype": "float32", "recompute": recompute}
        kept = [
            _activations(stage, 4, trace, run, plan(model, stages), Deployment(pipeline_stages=stages, **options))[0]
            for stages in (1, 2)
            for stage in range(stages)
        ]
        received = plan(model, 2).held[1] * 32
        rope = (run or trace).saved_by_kind("embedding")
        # recomputing, neither stage counts what crosses as its own: it is the second's received state
        crossing = 0 if run is None else again.saved_by(1).stream
        assert kept[1] / 2 + kept[2] == kept[0] + received + rope - crossing


def test_gradients_of_parameters_are_counted_once() -> None:
    """A product and its sum: beside the gradient of the weight, the backward pass needs that of the loss."""
    meter, weight = Meter(), torch.ones(8, requires_grad=True)
    with meter:
        meter.part = Part("mlp")
        loss = (weight * torch.ones(8)).sum()
        meter.take()
        loss.backward()
        backward = meter.take()
    assert highest(backward, set()) == {("blocks", 0): 4 + 4 * 8}
    assert highest(backward, {meter.allocation(cast(Tensor, weight.grad))}) == {("blocks", 0): 4}


@pytest.mark.parametrize("fields", KINDS[:4], ids=label)
def test_stages_need_what_real_ones_do(fields: Fields) -> None:
    """Four stages of a real model, one micro-batch: kept, received and the most of the backward pass, within 12%.

    A source that came from an earlier stage has its gradient on every stage that read it. What a stream derives from
    the state that it received is not seen: hyper-connections' six vectors are the 12%.
    """
    config = dataclasses.replace(SHAPE, num_hidden_layers=8, **fields)
    blank, model = meta_model(config, "float32"), Decoder(config)
    trace, found = trace_training(blank, B, T, "cpu"), plan(blank, 4)
    deployment = Deployment(micro_batch=B, context=T, dtype="float32", pipeline_stages=4)
    tokens, cuts = torch.zeros(B, T, dtype=torch.long), [None, *found.boundaries, None]
    given, passes, sizes = (tokens,), [], []
    with Meter() as meter:
        meter.part = Part("stream", 0)
        for stage, (came, goes) in enumerate(itertools.pairwise(cuts)):
            blocks, before = range(2 * stage, 2 * stage + 2), meter.now
            made = Stage(model, blocks, came, goes, [{}], False, contextlib.nullcontext)(*given)
            out = made if goes else (F.cross_entropy(made.flatten(0, 1), tokens.flatten()),)
            del made
            passes.append((given, out))
            sizes.append(meter.now - before)
            given = tuple(t.detach().requires_grad_() for t in out)
        del given, out  # pyright: ignore[reportPossiblyUnboundVariable]
        grads: Any = (None,)
        for stage in reversed(range(4)):
            given, out = passes.pop()
            meter.take()
            torch.autograd.backward(out, grads)
            own = {meter.allocation(p.grad) for p in model.parameters() if p.grad is not None}
            above = max(highest(meter.take(), own).values())
            held = sum(t.nbytes for t in grads if t is not None)
            real = sizes[stage] + found.held[stage] * B * T + above + held
            kept, backward = _activations(stage, 8, trace, None, found, deployment)
            assert kept / in_flight(stage, 4, 1) + backward == pytest.approx(real, rel=0.12)
            grads = tuple(torch.zeros_like(t) if t.grad is None else t.grad for t in given) if stage else ()
            del given, out


def test_chunks_in_flight() -> None:
    assert [in_flight(r, 4, 1) for r in range(4)] == [4, 3, 2, 1]
    assert [in_flight(r, 4, 2) for r in range(4)] == [11, 9, 7, 5]
    assert in_flight(0, 1, 1) == 1


def test_parallel_devices_share() -> None:
    """Tensor parallelism spreads sub-layers; the stream only with sequence parallelism; data the optimiser."""
    shape = ModelConfig(vocab_size=64, hidden_size=64, num_hidden_layers=4, num_attention_heads=4)
    method = Contender(label="it", stream="hyper_connections")

    def memory(**options: Any) -> Any:
        return cost(shape, method, Deployment(micro_batch=2, context=64, **options)).memory

    one, two = memory(), memory(tensor_parallel=2)
    # two moments of four bytes for every number, and a wide copy of those that are stored in two
    wide = memory(dtype="float32")
    assert one.optimizer == pytest.approx(12 / 2 * one.weights)
    assert wide.optimizer == pytest.approx(8 / 4 * wide.weights)
    assert one.gradients == one.weights == pytest.approx(wide.weights / 2)
    spread = memory(tensor_parallel=2, sequence_parallel=True)
    assert one.activations / 2 < two.activations < one.activations
    rope = 2 * 64 * 8 * 2  # angles of 64 tokens and 8 pairs of channels, which every device has
    assert spread.activations - rope == pytest.approx((one.activations - rope) / 2)
    assert memory(data_parallel=4).optimizer == pytest.approx(one.optimizer / 4)
    assert memory(data_parallel=4).weights == one.weights
    assert memory(recompute="full").activations <= memory(recompute="block").activations < one.activations
    staged = memory(pipeline_stages=4)
    assert staged.stage == 0
    assert staged.weights < 0.5 * one.weights
