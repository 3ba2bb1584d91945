"""Predicted bytes of training against real steps on the CPU."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.costs.helpers import FIRST, MIXER_VARIANTS, STREAM_VARIANTS, Fields, label
from twoaxis.costs.costs import cost
from twoaxis.costs.deployment import Deployment
from twoaxis.costs.memory import device_memory, in_flight
from twoaxis.costs.pipeline import plan
from twoaxis.costs.trace import Model
from twoaxis.model.config import DecoderConfig
from twoaxis.model.decoder import Decoder
from twoaxis.model.flops import count_parameters
from twoaxis.model.variant import Contender
from twoaxis.training.measure import peak_memory

B, T = 4, 48
SHAPE = DecoderConfig(vocabulary=64, width=64, blocks=5, heads=4, kv_heads=2)
OTHERS = [fields for fields in STREAM_VARIANTS + MIXER_VARIANTS if fields not in FIRST and fields != {"mixer": "canon"}]


def predict(config: DecoderConfig, **options: Any) -> Any:
    """Bytes of the only device."""
    deployment = Deployment(micro_batch=B, context=T, dtype="float32", **options)
    model = Model(config, "float32", "cpu")
    return device_memory(config, count_parameters(config), model.train(B, T), plan(model.trunk, 1), deployment)


def compare(fields: Fields) -> None:
    shallow, deep = (dataclasses.replace(SHAPE, blocks=n, **fields) for n in (3, 5))
    models = [Decoder(config) for config in (shallow, deep)]
    real = [peak_memory(model, B, T) for model in models]
    ours = [predict(config) for config in (shallow, deep)]
    for model, measured, memory in zip(models, real, ours, strict=True):
        assert memory.activations == pytest.approx(measured.activations, rel=0.02)
        frozen = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
        assert memory.weights == measured.parameters - frozen
        assert memory.gradients >= measured.gradients  # a parameter that is never used has none
        assert memory.optimizer <= measured.optimizer + 64 * 1000  # a step count beside each tensor's moments
    growth = real[1].activations - real[0].activations
    assert ours[1].activations - ours[0].activations == pytest.approx(growth, rel=0.03)
    over = [m.peak - m.parameters - m.optimizer for m in real]
    rise = sum(ours[1][4:]) - sum(ours[0][4:])
    assert rise == pytest.approx(over[1] - over[0], rel=0.1)


@pytest.mark.parametrize("fields", [*FIRST, {"mixer": "short_swa"}], ids=label)
def test_activations_and_peak_grow_with_depth_as_measured(fields: Fields) -> None:
    compare(fields)


@pytest.mark.slow
@pytest.mark.parametrize("fields", OTHERS, ids=label)
def test_every_variant_grows_as_measured(fields: Fields) -> None:
    compare(fields)


def recomputed_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Blocks made anew in the backward pass."""
    assert isinstance(model, Decoder)
    given, again = tokens[:, :-1], functools.partial(checkpoint, use_reentrant=False)
    out, _ = model.run(model.embed(given), None, model.info(given, 0, None), recompute=again)
    return F.cross_entropy(model.logits(out).flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("fields", FIRST, ids=label)
def test_recomputed_blocks_keep_what_is_measured(fields: Fields) -> None:
    config = dataclasses.replace(SHAPE, **fields)
    measured = peak_memory(Decoder(config), B, T, loss=recomputed_loss)
    ours, whole = predict(config, recompute="block"), predict(config)
    assert ours.activations == pytest.approx(measured.activations, rel=0.1)
    assert ours.activations < 0.5 * whole.activations


def test_chunks_in_flight() -> None:
    assert [in_flight(r, 4, 1) for r in range(4)] == [4, 3, 2, 1]
    assert [in_flight(r, 4, 2) for r in range(4)] == [11, 9, 7, 5]
    assert in_flight(0, 1, 1) == 1


def test_parallel_devices_share() -> None:
    """Tensor parallelism spreads sub-layers; the stream only with sequence parallelism; data the optimiser."""
    shape = DecoderConfig(vocabulary=64, width=64, blocks=4, heads=4)
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
    assert spread.activations == pytest.approx(one.activations / 2)
    assert memory(data_parallel=4).optimizer == pytest.approx(one.optimizer / 4)
    assert memory(data_parallel=4).weights == one.weights
    assert memory(recompute="full").activations <= memory(recompute="block").activations < one.activations
    staged = memory(pipeline_stages=4)
    assert staged.stage == 0
    assert staged.weights < 0.5 * one.weights
