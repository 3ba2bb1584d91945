"""Hand-written backward passes under everything autograd allows, against the readable forms differentiated by torch."""

from __future__ import annotations

import copy
import gc
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.numbers import randn
from twoaxis.depth.registry import stream
from twoaxis.depth.stream import State
from twoaxis.kernels import using

WIDTH = 6

GATHERED: list[tuple[str, dict[str, Any]]] = [
    ("attention_residuals", {"block_size": 2, "read": "sum", "evaluation": "two_phase", "heads": 2}),
    ("attention_residuals", {"weighting": "sigmoid", "window": 3, "overflow": "sum"}),
    ("denseformer", {"dilation": 2}),
    ("muddformer", {"prenorm": True, "postnorm": True}),
]
CARRIED: list[tuple[str, dict[str, Any]]] = [
    ("hyper_connections", {}),
    ("manifold_hyper_connections", {"streams": 3}),
    ("deep_delta", {"value_channels": 3, "expand": "conv"}),
]
every = pytest.mark.parametrize(("name", "options"), GATHERED + CARRIED)


@contextmanager
def readable() -> Iterator[None]:
    """The readable forms, as they run under a compiler, differentiated by torch."""
    with pytest.MonkeyPatch.context() as patch, using("reference"):
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        yield


class Stack(nn.Module):
    """A stream around small sub-layers."""

    def __init__(self, name: str, options: dict[str, Any], blocks: int = 3) -> None:
        super().__init__()
        self.stream = stream(name, blocks=blocks, width=WIDTH, **options)
        self.maps = nn.ParameterList(randn(WIDTH, WIDTH, seed=i) for i, _ in enumerate(self.stream.sites))
        self.double()
        self.stream.reset_parameters(torch.Generator().manual_seed(1))
        with torch.no_grad():
            for i, p in enumerate(self.stream.parameters()):
                p.add_(0.3 * randn(*p.shape, seed=i))

    def block(self, state: State, number: int, watch: Callable[[int, Tensor], Any] | None = None) -> State:
        for site in self.stream.sites_of(number):
            seen = self.stream.read(state, site)
            x = seen.x if seen.q is None or seen.k is None or seen.v is None else seen.q * seen.k + seen.v
            y = torch.tanh(x @ self.maps[site.index])
            if watch is not None:
                watch(site.index, y)
            state = self.stream.write(state, site, y, seen, seen)
        return state

    def forward(self, x: Tensor, watch: Any = None, wrap: Any = None) -> Tensor:
        state = self.stream.open(x)
        for number in range(self.stream.layout.blocks):
            state = self.block(state, number, watch) if wrap is None else wrap(self.block, state, number, watch)
        return self.stream.close(state)

    def staged(self, x: Tensor, wrap: Any) -> Tensor:
        """Every block between `unpack` and `pack`."""

        def run(number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
            state = self.stream.unpack(tensors, self.stream.sites_of(number)[0])
            return self.stream.pack(self.block(state, number))

        tensors = self.stream.pack(self.stream.open(x))
        for number in range(self.stream.layout.blocks):
            tensors = wrap(run, number, *tensors)
        return self.stream.close(self.stream.unpack(tensors, self.stream.layout.out))


class Asked:
    """A stack, its leaves, and the gradients that they should get."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.model = Stack(name, options)
        self.x = randn(2, 3, WIDTH, seed=5).requires_grad_()
        self.leaves = [self.x, *self.model.parameters()]
        with readable():
            self.want = self.grads(self.loss(self.model(self.x)))

    @staticmethod
    def loss(out: Tensor) -> Tensor:
        return (out * randn(*out.shape, seed=6)).sum()

    def grads(self, loss: Tensor, leaves: Sequence[Tensor] | None = None, **how: Any) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(loss, self.leaves if leaves is None else leaves, allow_unused=True, **how)

    def check(self, found: Sequence[Tensor | None]) -> None:
        close(found, self.want)


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
    model, x = asked.model, asked.x
    loss = asked.loss(model(x))
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
        probe = randn(2, 3, WIDTH, seed=6)[part]
        (model(x.detach()[part]) * probe).sum().backward()
    close([p.grad for p in model.parameters()], asked.want[1:])


@every
def test_an_aborted_pass_leaves_nothing_behind(name: str, options: dict[str, Any]) -> None:
    asked = Asked(name, options)
    armed, seen = [True], []

    def trip(_: Tensor) -> None:
        if armed[0]:
            raise RuntimeError("tripped")

    def watch(index: int, y: Tensor) -> None:
        seen.append(weakref.ref(y))
        if index == 1:
            y.register_hook(trip)

    loss = asked.loss(asked.model(asked.x, watch))
    for _ in range(2):
        armed[0] = True
        with pytest.raises(RuntimeError, match="tripped"):
            asked.grads(loss, retain_graph=True)
        asked.check(asked.grads(asked.loss(asked.model(asked.x))))
        armed[0] = False
        asked.check(asked.grads(loss, retain_graph=True))
    del loss
    asked.model(asked.x, watch)  # and a pass that is never differentiated
    gc.collect()
    assert len(seen) == 12
    assert not any(ref() is not None for ref in seen)


@every
def test_recomputed_and_offloaded(name: str, options: dict[str, Any]) -> None:
    asked = Asked(name, options)
    model, x = asked.model, asked.x

    def again(run: Any, *arguments: Any) -> Any:
        return checkpoint(run, *arguments, use_reentrant=False)

    asked.check(asked.grads(asked.loss(again(lambda x: model(x, None, again), x))))  # nested
    with torch.autograd.graph.save_on_cpu():
        out = model(x)
    asked.check(asked.grads(asked.loss(out)))
    out = model.staged(x, lambda run, *arguments: checkpoint(run, *arguments, use_reentrant=True))
    asked.loss(out).backward()
    asked.check([leaf.grad for leaf in asked.leaves])


@every
def test_passes_of_two_models_run_inside_one_another(name: str, options: dict[str, Any]) -> None:
    asked = Asked(name, options)
    twin, inner = copy.deepcopy(asked.model), []
    with torch.inference_mode():
        twin(asked.x.detach())

    @torch.enable_grad()
    def differentiate(_: Tensor) -> None:
        inner.append(asked.grads(asked.loss(twin(asked.x)), [asked.x, *twin.parameters()]))

    loss = asked.loss(asked.model(asked.x, lambda index, y: y.register_hook(differentiate) if index == 2 else None))
    asked.check(asked.grads(loss))
    asked.check(inner[0])


@every
def test_what_is_frozen_or_cut_off(name: str, options: dict[str, Any]) -> None:
    model, x = Stack(name, options), randn(2, 3, WIDTH, seed=5)

    def grads(x: Tensor, cut: bool) -> tuple[Tensor | None, ...]:
        def detach(run: Any, state: State, number: int, watch: Any) -> State:
            if number == 1 and cut:
                tensors = model.stream.pack(state)
                state = model.stream.unpack([t.detach() for t in tensors], model.stream.sites_of(1)[0])
            return run(state, number, watch)

        leaves = [t for t in (x, *model.parameters()) if t.requires_grad]
        return torch.autograd.grad(Asked.loss(model(x, None, detach)), leaves, allow_unused=True)

    for trained in ("stream", "maps"):
        for key, p in model.named_parameters():
            p.requires_grad_(key.startswith(trained))
        for given in (x, x.clone().requires_grad_()):
            for cut in (False, True):
                with readable():
                    want = grads(given, cut)
                close(grads(given, cut), want)


@every
def test_changing_what_was_saved_raises(name: str, options: dict[str, Any]) -> None:
    asked = Asked(name, options)
    embedding = asked.x * 1.0
    loss = asked.loss(asked.model(embedding))
    with torch.no_grad():
        for tensor in (embedding, *asked.model.stream.parameters()):
            tensor.add_(1.0)
    with pytest.raises(RuntimeError, match=r"modified .*inplace"):
        asked.grads(loss)


def _parallel(rank: int, port: int, cases: list[tuple[str, dict[str, Any]]]) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    try:
        for name, options in cases:
            model = Stack(name, options)
            wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
            x, probe = randn(4, 3, WIDTH, seed=1), randn(4, 3, WIDTH, seed=2)
            part = slice(2 * rank, 2 * rank + 2)
            for _ in range(2):
                model.zero_grad()
                (wrapped(x[part]) * probe[part]).sum().backward()
            with readable():
                loss = (model(x) * probe).sum() / 2  # gradients are averaged over the processes
                want = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
            close([p.grad for p in model.parameters()], want)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_average_the_gradients() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_parallel, (port, GATHERED + CARRIED), 2)  # pyright: ignore[reportPrivateImportUsage]
