"""Times on this machine: every distinct call of a trace is run once more by itself, on tensors of the same layouts.

    replay      a call's inputs are warm and its results are kept for a while, as in a model, which reads what it has
                just written and writes to memory it has not touched for long
    overhead    what is left of a tiny model's time after its calls: Python, autograd and dispatch, per call

On one CPU thread times are the processor's, not the clock's, so that another process on the machine changes little.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.base.machine import hardware, hardware_line
from twoaxis.base.meter import ATTENTION, Layout, Plain, Signature, signature_of
from twoaxis.base.timer import seconds as timed
from twoaxis.costs.fuse import Kernel
from twoaxis.costs.hardware import Clock, Efficiency, Profile, Rates
from twoaxis.costs.trace import DTYPES, meta_model, trace_training
from twoaxis.kernels.attention import attention as windowed
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.model.loss import next_token_loss
from twoaxis.show.numbers import si

WINDOWED = "twoaxis::window_attention"
"""Fused attention over a window in the traces of GPUs."""
WARM = 2 * 2**20
"""Bytes that a replay's inputs take up together: a model has just written what it reads."""
COLD = 32 * 2**20
"""Bytes that a replay's results take up together before they are given back: a model keeps what it writes."""
TINY = ModelConfig(vocab_size=16, hidden_size=16, num_hidden_layers=4, num_attention_heads=2)
"""A shape whose time is all calls."""


class LiveClock(Clock):
    """Seconds of calls on a device with so many bytes, measured when they are first asked for."""

    def __init__(self, device: str, memory: float) -> None:
        x = torch.zeros(4, 4, device=device)
        super().__init__(overhead=0.0, view=shortest(lambda: x.view(16), device), calls={})
        self.device, self.memory = device, memory
        self._numbers: dict[int, float | None] = {}
        self.overhead = self._overhead()

    def _overhead(self) -> float:
        """Seconds per call that calls by themselves do not account for."""
        model, ids = Decoder(TINY).to(self.device), torch.zeros(1, 9, dtype=torch.long, device=self.device)
        work = trace_training(meta_model(TINY, "float32"), 1, 8, self.device).work("all").eager
        alone = sum((self.seconds(kernel) or 0.0) * count for kernel, count in work.items())
        whole = shortest(lambda: next_token_loss(model, ids).backward(), self.device, budget=0.05)
        return max(0.0, (whole - alone) / sum(work.values()))

    def call(self, kernel: Kernel) -> float | None:
        """One call without overhead; None where it cannot be run by itself."""
        if kernel.number not in self._numbers:
            found = self._numbers[kernel.number] = self._replay(kernel)
            if found is not None:
                self.calls[spelled(signature_of(kernel.number))] = found
        return self._numbers[kernel.number]

    def _replay(self, kernel: Kernel) -> float | None:
        """Seconds of one call, over several sets of its tensors in turn."""
        if 2 * kernel.bytes > self.memory:
            raise ValueError(
                f"a call of {kernel.op} moves {si(kernel.bytes)}, too much for the {si(self.memory)} of this machine; "
                "give a smaller shape or context, or a data sheet such as --hardware h100"
            )
        signature = signature_of(kernel.number)
        copies = max(1, min(16, WARM // max(kernel.bytes, 1)))
        kept = max(copies, min(64, COLD // max(kernel.bytes, 1)))
        make = lambda layout: filled(layout, self.device)  # noqa: E731
        sets = [signature.arguments(make, self.device) for _ in range(copies)]
        other = kernel.op.startswith((ATTENTION, WINDOWED)) and self.device != "cpu"
        run = attention(kernel.op) if other else signature.func
        results: list[Any] = []

        def once() -> None:
            args, kwargs = sets[len(results) % copies]
            results.append(run(*args, **kwargs))
            if len(results) == kept:
                results.clear()

        try:
            with torch.no_grad():
                return shortest(once, self.device, least=kept)
        except (RuntimeError, NotImplementedError):  # a call that only meta tensors have
            return None


def shortest(run: Callable[[], Any], device: str, *, budget: float = 0.003, least: int = 1) -> float:
    """The least seconds of a call, in three loops of about `budget` seconds and at least so many calls."""
    run()
    once = timed(run, device)
    count = max(least, min(2000, int(budget / max(once, 1e-7)))) if once < 0.1 else 1
    loops = (timed(lambda: [run() for _ in range(count)], device) / count for _ in range(3 if once < 1 else 1))
    return min(loops)


def filled(layout: Layout, device: str) -> Tensor:
    """A real tensor of a layout: ones where arithmetic wants numbers, zeros where an index must exist."""
    last = sum((size - 1) * stride for size, stride in zip(layout.shape, layout.stride, strict=True))
    make = torch.ones if layout.dtype.is_floating_point else torch.zeros
    return make(max(0, last) + 1, dtype=layout.dtype, device=device).as_strided(layout.shape, layout.stride)


def attention(op: str) -> Callable[..., Any]:
    """The fused attention of a device whose operator is not the one that traces have.

    These end in the dropout and whether they are causal, or in a window and the scale.
    """

    def forward(q: Tensor, k: Tensor, v: Tensor, first: Any, second: Any, **_: Any) -> Tensor:
        if op.startswith(WINDOWED):
            return windowed.forms["flex"].forward(q, k, v, None, None, None, window=first, scale=second)[0]
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=second, enable_gqa=grouped)

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Any:
        """The forward pass too: there is no portable way to run the other alone, and it is two thirds of both."""
        with torch.enable_grad():
            q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
            return torch.autograd.grad(forward(q, k, v, *rest[-2:]), (q, k, v), grad)

    return backward if op.endswith("_backward") else forward


def spelled(signature: Signature) -> str:
    """A call as text that another process and machine spell the same."""

    def text(leaf: Any) -> str:
        if isinstance(leaf, Layout):
            return f"{str(leaf.dtype).removeprefix('torch.')}{[*leaf.shape]}{[*leaf.stride]}"
        if isinstance(leaf, Plain):
            return "device" if leaf.type is torch.device else str(leaf.value)
        return f"({', '.join(map(text, leaf))})"

    named = (f"{name}={text(leaf)}" for name, leaf in signature.kwargs)
    return f"{signature.func.name()} {', '.join([*map(text, signature.args), *named])}"


@cache
def measure() -> Profile:
    """The profile of this machine: its accelerator, or its processor."""
    gpu = torch.cuda.is_available()
    device, about = "cuda" if gpu else "cpu", hardware()
    memory = float(torch.cuda.get_device_properties(0).total_memory if gpu else about["memory"] or 0)
    clock = LiveClock(device, memory)
    size = 8192 if gpu else 512
    squares = {name: torch.ones(size, size, dtype=dtype, device=device) for name, dtype in DTYPES.items()}
    a, b = torch.zeros(2 * COLD // 4, device=device), torch.zeros(2 * COLD // 4, device=device)
    return Profile(
        name="here",
        title=torch.cuda.get_device_name(0) if gpu else about["cpu"],
        kind="gpu" if gpu else "cpu",
        matmul=Rates(**{name: 2 * size**3 / shortest(lambda x=x: x @ x, device) for name, x in squares.items()}),
        bandwidth=4 * COLD / shortest(lambda: b.copy_(a), device),
        memory=memory,
        link=None,
        launch=clock.overhead,
        efficiency=Efficiency(matmul=1.0, bandwidth=1.0, link=1.0),
        source=f"measured: {hardware_line()}",
        clock=clock,
    )
