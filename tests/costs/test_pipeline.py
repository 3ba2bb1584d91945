"""Predicted transfers against the paper's equations, and against two processes that really send the state."""

from __future__ import annotations

import dataclasses
import socket
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from tests.costs.helpers import FIRST, Fields, label
from twoaxis.costs.trace import meta_model
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.model.stages import Pipeline, boundaries, plan

SHAPE = ModelConfig(vocab_size=40, hidden_size=16, num_hidden_layers=4, num_attention_heads=4, intermediate_size=24)
B, T = 2, 5
SENDING = [
    {"stream": "attention_residuals", "stream_options": {"block_size": 2}},
    {"stream": "muddformer"},
    {"stream": "deep_delta", "stream_options": {"value_channels": 4, "expand": "conv"}},
    {"stream": "manifold_hyper_connections"},
]


@given(stages=st.integers(2, 6), virtual=st.integers(1, 4))
def test_the_papers_equations(stages: int, virtual: int) -> None:
    """Equations 7 and 8 count blocks; the state has the embedding too, and no stage is sent what it made itself."""
    chunks, vector = stages * virtual, 8 * 2
    fields: Any = {"hidden_size": 8, "num_hidden_layers": chunks, "num_attention_heads": 2}
    config = ModelConfig(**fields, stream="attention_residuals:block_size=2")
    found = plan(meta_model(config, "bfloat16"), stages, virtual)
    assert found.whole == (chunks * (chunks - 1) // 2 + chunks - 1) * vector
    paper = stages * (stages - 1) // 2 + (virtual - 1) * stages**2
    assert found.cached == (paper - (virtual - 1) * stages + stages - 1) * vector
    assert [b.receiver for b in found.boundaries] == [chunk % stages for chunk in range(1, chunks)]


@given(stages=st.sampled_from([2, 3, 4, 6]))
def test_streams_of_one_form_send_the_same_everywhere(stages: int) -> None:
    for fields, vectors in (({}, 1), ({"stream": "hyper_connections"}, 4)):
        found = plan(meta_model(dataclasses.replace(SHAPE, num_hidden_layers=12, **fields), "bfloat16"), stages)
        assert {b.whole for b in found.boundaries} == {vectors * 16 * 2}
        assert found.cached == found.whole


@pytest.mark.parametrize("fields", FIRST, ids=label)
def test_caching_never_costs_and_needs_virtual_stages(fields: Fields) -> None:
    trunk = meta_model(dataclasses.replace(SHAPE, num_hidden_layers=8, **fields), "bfloat16")
    once, twice = plan(trunk, 4), plan(trunk, 2, 2)
    assert once.cached == once.whole
    assert twice.cached <= twice.whole == once.whole
    assert sum(twice.held) == twice.cached


class Traffic:
    """Sends and receives tensors of known shapes and counts their bytes."""

    def __init__(self) -> None:
        self.bytes = 0

    def send(self, tensor: Tensor, to: int) -> None:
        self.bytes += tensor.numel() * tensor.element_size()
        dist.send(tensor.contiguous(), to)

    def receive(self, shape: tuple[int, ...], sender: int) -> Tensor:
        room = torch.empty(shape)
        dist.recv(room, sender)
        return room


@torch.no_grad()
def run_stage(rank: int, fields: Fields, transfers: Pipeline, shapes: list[Any], port: int, cached: bool) -> None:
    """The chunks of one stage; the last sends what the head gets to stage 0, which compares it."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    model = Decoder(dataclasses.replace(SHAPE, **fields))
    stream, tokens = model.stream, torch.arange(B * T).view(B, T) % 40
    info, store, traffic, want = model.info(tokens, 0, None), {}, Traffic(), 0
    chunks = len(transfers.boundaries) + 1
    per = SHAPE.num_hidden_layers // chunks
    for chunk in range(rank, chunks, 2):
        first = stream.sites_of(chunk * per)[0]
        if chunk:
            boundary = transfers.boundaries[chunk - 1]
            coming = boundary.sent if cached else boundary.tensors
            for number in coming:
                store[number] = traffic.receive(shapes[chunk - 1][boundary.tensors.index(number)], boundary.sender)
            state = stream.unpack([store[number] for number in boundary.tensors], first)
        else:
            state = stream.open(model.embed(tokens))
        for block in range(chunk * per, (chunk + 1) * per):
            state, _ = model.block(block)(stream, state, None, info)
        if chunk + 1 == chunks:
            dist.send(model.norm(stream.close(state)).contiguous(), 0)
            break
        boundary = transfers.boundaries[chunk]
        store |= dict(zip(boundary.tensors, stream.pack(state), strict=True))
        for number in boundary.sent if cached else boundary.tensors:
            traffic.send(store[number], boundary.receiver)
        sizes = boundary.cached if cached else boundary.whole
        want += sizes * B * T
    assert traffic.bytes == want, (traffic.bytes, want)
    if rank == 0:
        whole = model.run(model.embed(tokens), None, info)[0]
        torch.testing.assert_close(traffic.receive(tuple(whole.shape), 1), whole, rtol=1e-5, atol=1e-6)
    dist.barrier()
    dist.destroy_process_group()


def packed_shapes(fields: Fields, transfers: Pipeline) -> list[list[tuple[int, ...]]]:
    """Shapes of the packed state at each boundary."""
    packed = boundaries(meta_model(dataclasses.replace(SHAPE, **fields), "float32"))
    return [[(B, T, *t.shape[2:]) for t in packed[b.block]] for b in transfers.boundaries]


@pytest.mark.slow
@pytest.mark.parametrize("cached", [False, True], ids=["whole", "cached"])
@pytest.mark.parametrize("fields", SENDING, ids=label)
def test_two_processes_send_what_was_predicted(fields: Fields, cached: bool) -> None:
    """Two stages of two virtual ones over gloo: the bytes on the wire, and the same output as one process."""
    transfers = plan(meta_model(dataclasses.replace(SHAPE, **fields), "float32"), 2, 2)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    arguments = (fields, transfers, packed_shapes(fields, transfers), port, cached)
    spawn(run_stage, args=arguments, nprocs=2, join=True)
