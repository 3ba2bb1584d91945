"""Whole streams with hand-written backward passes under what autograd allows, against the references differentiated."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.numbers import randn
from twoaxis.depth.stream import State
from twoaxis.kernels import using
from twoaxis.verify.subject import Run, StreamSubject

STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("attention_residuals", {"block_size": 2, "read": "sum", "evaluation": "two_phase", "heads": 2}),
    ("attention_residuals", {"weighting": "sigmoid", "window": 3, "overflow": "sum"}),
    ("denseformer", {"dilation": 2}),
    ("muddformer", {"prenorm": True, "postnorm": True}),
    ("hyper_connections", {}),
    ("manifold_hyper_connections", {"streams": 3}),
    ("deep_delta", {"value_channels": 3, "expand": "conv"}),
]
every = pytest.mark.parametrize(("name", "options"), STREAMS)


class Asked:
    """A stream between sub-layers, its leaves, and the gradients that they should get."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.run: Run = StreamSubject(name, options).run(perturb=0.3, width=8)
        self.x = self.run.input(grad=True)
        self.leaves = [self.x, *self.run.parameters()]
        with using("reference"):
            self.want = self.grads(self.loss(self.run(self.x)))

    @staticmethod
    def loss(out: Tensor) -> Tensor:
        return (out * randn(*out.shape, seed=6)).sum()

    def grads(self, loss: Tensor, leaves: Sequence[Tensor] | None = None, **how: Any) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(loss, self.leaves if leaves is None else leaves, allow_unused=True, **how)

    def check(self, found: Sequence[Tensor | None]) -> None:
        close(found, self.want)

    def block(self, state: State, number: int) -> State:
        return self.run.go(state, self.run.stream.sites_of(number)[-1].index + 1)

    def by_blocks(self, x: Tensor, wrap: Any) -> Tensor:
        """The pass with each block behind `wrap`."""
        state = self.run.stream.open(x)
        for number in range(self.run.stream.layout.blocks):
            state = wrap(self.block, state, number)
        return self.run.stream.close(state)

    def by_stages(self, x: Tensor, wrap: Any) -> Tensor:
        """The pass with each block behind `wrap`, between `unpack` and `pack`."""
        stream = self.run.stream

        def stage(number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
            return stream.pack(self.block(stream.unpack(tensors, stream.sites_of(number)[0]), number))

        tensors = stream.pack(stream.open(x))
        for number in range(stream.layout.blocks):
            tensors = wrap(stage, number, *tensors)
        return stream.close(stream.unpack(tensors, stream.layout.out))


def close(found: Sequence[Tensor | None], want: Sequence[Tensor | None], bound: float = 1e-11) -> None:
    for i, (a, b) in enumerate(zip(found, want, strict=True)):
        if a is None or b is None:  # unused in one form, of gradient zero in the other
            rest = b if a is None else a
            assert rest is None or not rest.any(), i
            continue
        assert a.isfinite().all(), i
        assert (a - b).abs().max() <= bound * max(1.0, b.abs().max().item()), i


@every
def test_any_gradient_may_be_asked_for_any_number_of_times(name: str, options: dict[str, Any]) -> None:
    asked = Asked(name, options)
    loss = asked.loss(asked.run(asked.x))
    for i, leaf in enumerate(asked.leaves):
        close(asked.grads(loss, [leaf], retain_graph=True), asked.want[i : i + 1])
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(asked.grads(loss, retain_graph=True)))
    thread.start()
    thread.join()
    asked.check(found[0])
    asked.check(asked.grads(loss))
    with pytest.raises(RuntimeError, match="second time"):
        asked.grads(loss)
    for part in (slice(0, 1), slice(1, 2)):  # accumulated over parts of the batch
        (asked.run(asked.x.detach()[part]) * randn(*asked.x.shape, seed=6)[part]).sum().backward()
    close([leaf.grad for leaf in asked.leaves[1:]], asked.want[1:])


@every
def test_recomputed_and_offloaded(name: str, options: dict[str, Any]) -> None:
    asked = Asked(name, options)

    def again(run: Any, *arguments: Any) -> Any:
        return checkpoint(run, *arguments, use_reentrant=False)

    asked.check(asked.grads(asked.loss(again(lambda x: asked.by_blocks(x, again), asked.x))))  # nested
    with torch.autograd.graph.save_on_cpu():
        out = asked.run(asked.x)
    asked.check(asked.grads(asked.loss(out)))
    out = asked.by_stages(asked.x, lambda run, *arguments: checkpoint(run, *arguments, use_reentrant=True))
    asked.loss(out).backward()
    asked.check([leaf.grad for leaf in asked.leaves])


@every
def test_what_is_frozen_or_cut_off(name: str, options: dict[str, Any]) -> None:
    asked = Asked(name, options)
    stream, own = asked.run.stream, {id(p) for p in asked.run.stream.parameters()}

    def grads(x: Tensor, cut: bool) -> tuple[Tensor | None, ...]:
        def detach(run: Any, state: State, number: int) -> State:
            if number == 1 and cut:
                state = stream.unpack([t.detach() for t in stream.pack(state)], stream.sites_of(1)[0])
            return run(state, number)

        leaves = [t for t in (x, *asked.run.parameters()) if t.requires_grad]
        return asked.grads(asked.loss(asked.by_blocks(x, detach)), leaves)

    for streams_learn in (True, False):
        for p in asked.run.parameters():
            p.requires_grad_((id(p) in own) == streams_learn)
        for given in (asked.x.detach(), asked.x):
            for cut in (False, True):
                with using("reference"):
                    want = grads(given, cut)
                close(grads(given, cut), want)


def _parallel(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    try:
        for name, options in STREAMS:
            run = Asked(name, options).run
            wrapped = nn.parallel.DistributedDataParallel(run, find_unused_parameters=True)
            x, probe = randn(4, 3, 8, seed=1), randn(4, 3, 8, seed=2)
            part = slice(2 * rank, 2 * rank + 2)
            for _ in range(2):
                run.zero_grad()
                (wrapped(x[part]) * probe[part]).sum().backward()
            with using("reference"):
                loss = (run(x) * probe).sum() / 2  # gradients are averaged over the processes
                want = torch.autograd.grad(loss, list(run.parameters()), allow_unused=True)
            close([p.grad for p in run.parameters()], want)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_average_the_gradients() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_parallel, (port,), 2)  # pyright: ignore[reportPrivateImportUsage]
