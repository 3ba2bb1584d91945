"""`Block` is the unit that other people's tools hold: compiled, sharded and run by itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests.support.decoders import build, instances, sample_tokens
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder

FAST = {"standard", "attention_residuals", "deep_delta", "muddformer", "canon"}
"""One of each family of streams, and a mixer; the others take minutes together."""


def variants() -> Iterator[Any]:
    """Every variant of every method."""
    known: set[str] = set()
    for label, config in instances():
        name = config.mixer or config.stream
        yield pytest.param(config, id=label, marks=[] if name in FAST - known else [pytest.mark.slow])
        known.add(name)


EVERY = list(variants())


def outcome(model: Decoder, tokens: Tensor) -> list[Tensor]:
    """The logits and every gradient."""
    model.zero_grad(set_to_none=True)
    logits = model(tokens)
    logits.square().mean().backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return [logits.detach(), *(g.full_tensor() if isinstance(g, DTensor) else g for g in grads)]


@pytest.mark.slow
@pytest.mark.parametrize("config", EVERY)
def test_each_block_compiles_without_a_graph_break(config: ModelConfig) -> None:
    """As torchtitan compiles a model: block by block, each one graph; traced here, with autograd's own backward."""
    torch.compiler.reset()
    model, tokens = build(config, 1, perturb=0.1), sample_tokens(0)
    plain = outcome(model, tokens)
    for block in model.layers:
        block.compile(backend="aot_eager", fullgraph=True)
    for ours, expected in zip(outcome(model, tokens), plain, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)
    torch.compiler.reset()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process."""
    store = Path(tmp_path_factory.mktemp("group")) / "store"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("config", EVERY)
@pytest.mark.usefixtures("alone")
def test_each_block_shards(config: ModelConfig) -> None:
    """FSDP2 on every block and on the rest: a state passes through its hooks, and gradients are those without it."""
    model, tokens = build(config, 2, perturb=0.1), sample_tokens(1)
    plain = outcome(model, tokens)
    mesh = init_device_mesh("cpu", (1,))
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    fully_shard(model, mesh=mesh)
    for ours, expected in zip(outcome(model, tokens), plain, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)
