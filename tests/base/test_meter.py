"""The meter against real training steps, torch's own counter and calls by hand; meta tensors against real ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from twoaxis.base import meter as meter_module
from twoaxis.base.meter import (
    ATTENTION,
    Allocate,
    Call,
    Event,
    Free,
    Meter,
    empty,
    extent,
    signature_of,
    storage_bytes,
    tensors_in,
)
from twoaxis.base.timer import no_collection
from twoaxis.kernels import using
from twoaxis.kernels.dispatch import target
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.model.loss import next_token_loss

SHAPE: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2}
BATCH, CONTEXT, N = 2, 128, 1000
METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "attention_residuals": {"stream": "attention_residuals"},
    "attention_residuals in blocks": {"stream": "attention_residuals", "stream_options": {"block_size": 4}},
    "hyper_connections": {"stream": "hyper_connections"},
    "deep_delta": {"stream": "deep_delta"},
    "short_swa": {"mixer": "short_swa", "mixer_options": {"window": 4}},
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with no_collection():
        yield


def metered(fields: dict[str, Any], device: str) -> tuple[int, Meter, list[Event]]:
    """Saved bytes of a forward pass, and the meter and the events of both passes."""
    with torch.device(device):
        model, tokens = Decoder(ModelConfig(**SHAPE, **fields)), torch.zeros(BATCH, CONTEXT + 1, dtype=torch.long)
    with target("cpu"), Meter() as meter:
        value = next_token_loss(model, tokens)
        saved = meter.now
        value.backward()
    return saved, meter, meter.take()


def described(events: list[Event]) -> list[Any]:
    """Events without signatures, whose strides differ on meta tensors where a size is 1."""
    return [event._replace(number=-1) if isinstance(event, Call) else event for event in events]


def highest(events: Iterable[Event]) -> int:
    """The most bytes alive, from the events alone."""
    now = most = 0
    for event in events:
        if isinstance(event, Free):
            now -= event.bytes
        elif isinstance(event, Allocate):
            now += event.bytes
        else:
            now += sum({region.allocation: region.whole for region in event.makes}.values())
        most = max(most, now)
    return most


@pytest.mark.parametrize("name", METHODS)
def test_meta_tensors_are_metered_as_real_ones(name: str) -> None:
    """Every call of a training step: what it reads, makes, changes and computes, and what is alive at each moment."""
    saved, meter, events = metered(METHODS[name], "meta")
    real, on_cpu, calls = metered(METHODS[name], "cpu")
    assert (saved, meter.peak, meter.peak) == (real, on_cpu.peak, highest(events))
    assert (meter.flops, meter.products, meter.views) == (on_cpu.flops, on_cpu.products, on_cpu.views)
    assert described(events) == described(calls)


def test_memo_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for fields in METHODS.values():
        metered(fields, "meta")
        _, _, events = metered(fields, "meta")
        with monkeypatch.context() as patch:
            patch.setattr(meter_module, "_run", lambda about, args, kwargs, *_: about.func(*args, **kwargs))
            _, _, calls = metered(fields, "meta")
        assert events == calls


def test_memo_of_odd_results() -> None:
    """Calls that change a shape in place, return nothing in places or depend on the default dtype."""
    for _ in range(2):
        with Meter():
            x = torch.empty(1, 3, device="meta")
            assert x.squeeze_(0).shape == (3,)
            image, weight = torch.empty(2, 3, 8, device="meta"), torch.empty(4, 3, 2, device="meta")
            given = torch.ops.aten.convolution_backward.default(
                torch.empty(2, 4, 7, device="meta"), image, weight, [4], [1], [0], [1], False, [0], 1, [1, 0, 1]
            )
            assert given[1] is None
            assert [t.shape for t in given if t is not None] == [image.shape, (4,)]
            whole = torch.empty(3, dtype=torch.long, device="meta")
            assert (whole / 2).dtype == torch.float32
            torch.set_default_dtype(torch.float64)
            try:
                assert (whole / 2).dtype == torch.float64
            finally:
                torch.set_default_dtype(torch.float32)


def _fused_products(q: list[int], k: list[int], **_: Any) -> int:
    """Queries by keys and weights by values, of every pair: torch has no rule for its CPU kernel."""
    return 4 * q[0] * q[1] * q[2] * k[2] * q[3]


FUSED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, *_, **__: _fused_products(q, k),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, *_, **__: 2 * _fused_products(q, k)
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_products_are_those_of_torch(name: str) -> None:
    """Forward and backward, with attention spelled out and in the fused kernel, which is charged the same products."""
    model = Decoder(ModelConfig(**SHAPE, **METHODS[name]))
    tokens = torch.zeros(BATCH, CONTEXT + 1, dtype=torch.long)
    with using("sdpa"), sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as counter:
            next_token_loss(model, tokens).backward()
        with Meter() as meter:
            next_token_loss(model, tokens).backward()
    assert meter.products == counter.get_total_flops() > 0
    assert not any(event.op.startswith(ATTENTION) for event in meter.take() if isinstance(event, Call))
    _, fused, events = metered(METHODS[name], "meta")
    with FlopCounterMode(display=False, custom_mapping=FUSED) as counter:
        next_token_loss(model, tokens).backward()
    assert fused.products == counter.get_total_flops()
    assert fused.products == meter.products or name != "plain"  # references of streams have other products
    assert any(event.op.startswith(ATTENTION) for event in events if isinstance(event, Call))


def test_single_operations() -> None:
    """Torch's rule for convolutions; in inference mode linear layers reach a mode whole and count as their products;
    what has a kernel besides its spelled-out form is counted as the kernel, which makes one tensor."""
    layer, x, signal = nn.Linear(6, 5), torch.ones(3, 6), torch.ones(2, 4, 9)
    with FlopCounterMode(display=False) as counter, Meter() as meter:
        F.conv1d(signal, torch.ones(3, 4, 2, requires_grad=True)).sum().backward()
    assert meter.products == counter.get_total_flops() == 2 * 2 * (2 * 3 * 8 * 4 * 2)
    with torch.inference_mode(), Meter(record=False) as meter:
        layer(x)
    assert meter.products == 2 * 3 * 6 * 5
    with Meter() as meter:
        F.silu(torch.ones(N, requires_grad=True)).backward(torch.ones(N))
    assert meter.peak == 4 * 4 * N
    calls = [event for event in meter.take() if isinstance(event, Call) and event.makes]
    assert [call.op for call in calls] == ["ones", "silu", "ones", "silu_backward"]
    with Meter() as meter:
        torch.matmul(torch.ones(3, 5, 7), torch.ones(3, 7, 2))
    call = [event for event in meter.take() if isinstance(event, Call)][-1]
    assert (call.op, call.dims, call.products, call.elementwise) == ("bmm", (3, 5, 7, 2), 2 * 3 * 5 * 7 * 2, 0)
    assert call.bytes == 4 * 3 * (35 + 14 + 10)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_elementwise_operations(device: str) -> None:
    """One for each element, 2 for each term of a sum of products: its first product and addition are one term."""
    a, b = (torch.ones(10, 4, device=device) for _ in range(2))
    with Meter() as meter:
        total = a * b
        total.addcmul_(a, b)
        total.addcmul_(a, b)
    assert meter.flops == 3 * 2 * 40
    assert meter.products == 0
    with Meter(record=False) as meter:
        (a @ b.T + 1.0).sum()
        F.layer_norm(a, (4,), torch.ones(4, device=device))
        a[0].dot(b[0])
    assert meter.flops == 2 * 10 * 4 * 10 + 100 + 100 + 6 * 40 + 2 * 4
    assert meter.products == 2 * 10 * 4 * 10
    assert not meter.take()


def only(meter: Meter) -> Call:
    (call,) = [event for event in meter.take() if isinstance(event, Call)]
    return call


def sizes(call: Call) -> tuple[list[int], list[int], list[int]]:
    """Bytes of the regions that a call reads, makes and changes."""
    reads, makes, changes = ([region.bytes for region in part] for part in (call.reads, call.makes, call.changes))
    return reads, makes, changes


def test_regions_by_hand() -> None:
    x, table, index = torch.ones(10, 4), torch.ones(100, 8), torch.zeros(3, dtype=torch.long)
    with Meter() as meter:
        torch.mul(x, x)
        assert sizes(only(meter)) == ([160], [160], [])  # the same region is read once
        x[:5].add_(x[5:])
        assert sizes(only(meter)) == ([80, 80], [], [80])
        x2 = torch.empty(10, 4)
        torch.mul(x, 2, out=x2)
        assert sizes(only(meter)) == ([160], [], [160])  # what `out` held is not read
        x.copy_(x2)
        assert sizes(only(meter)) == ([160], [], [160])
        torch.add(x, x[:1].expand(10, 4))
        assert sizes(only(meter)) == ([160, 16], [160], [])  # an expanded tensor is read as small as it is
        F.embedding(index, table)
        assert sorted(sizes(only(meter))[0]) == [24, 96]  # three rows of the table
        before = meter.views.total()
        x.view(4, 10)
        assert meter.views.total() == before + 1
        assert not [event for event in meter.take() if isinstance(event, Call)]
    assert extent(x[:1].expand(10, 4)) == 16
    assert extent(x[::2]) == 80
    assert storage_bytes([x, x[1:], index]) == 160 + 24


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_shared_and_resized_storages(device: str) -> None:
    given = torch.empty(N, device=device)
    with Meter() as meter:
        a = given + 1
        parts = [a[: N // 2], a.detach(), a.view(2, -1)]
        assert meter.now == 4 * N
        number = meter.allocation(parts[0])
        assert number == meter.allocation(a) != meter.allocation(given)
        a.resize_(3 * N)
        assert meter.now == 12 * N
        a.untyped_storage().resize_(0)
        a.detach()
        assert meter.now == 0
        a.untyped_storage().resize_(8 * N)
        a.detach()
        assert (meter.now, meter.peak) == (8 * N, 12 * N)
        del a
        assert meter.now == 8 * N  # the parts hold it
        del parts
        assert meter.now == 0
        meter.watch([given, given[1:]])
        assert meter.now == 4 * N
        del given
    assert meter.now == 0
    events = meter.take()
    assert highest(events) == meter.peak
    assert sum(event.bytes for event in events if isinstance(event, Free)) == 8 * N + 4 * N
    assert next(event.allocation for event in events if isinstance(event, Free)) == number
    with Meter() as meter:
        assert len({meter.allocation(torch.ones(N) * 2) for _ in range(20)}) == 20, "a number is never used again"


class Parts(nn.Module):
    """Three layers, each a part of its own; the middle one may be recomputed."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
        self.recompute = recompute

    def forward(self, x: Tensor, meter: Meter) -> Tensor:
        def middle(x: Tensor) -> Tensor:
            meter.part = "gate"
            gate = self.layers[1](x).sigmoid()
            meter.part = "product"
            return (gate * x) @ self.layers[1].weight

        meter.part = "first"
        x = self.layers[0](x)
        x = checkpoint(middle, x, use_reentrant=False) if self.recompute else middle(x)  # type: ignore[assignment]
        meter.part = "last"
        return self.layers[2](x).sum()


@pytest.mark.parametrize("recompute", [False, True])
def test_backward_belongs_to_the_part_that_made_its_node(recompute: bool) -> None:
    """Two products backward for each one forward, and what is recomputed counts where it was computed."""
    model, x = Parts(recompute), torch.ones(4, 8, requires_grad=True)
    with Meter() as meter:
        loss = model(x, meter)
        forward = products_by_part(meter.take())
        loss.backward()
        backward = products_by_part(meter.take())
    assert forward == dict.fromkeys(("first", "gate", "product", "last"), 2 * 4 * 8 * 8)
    again = {"gate": 1} if recompute else {}  # torch stops before the last product, whose result nobody needs
    assert backward == {part: (2 + again.get(part, 0)) * n for part, n in forward.items()}
    with Meter() as meter:  # the node that adds to a gradient that is there has no number of its own
        loss = model(x, meter)
        meter.take()
        loss.backward()
        added = [event.part for event in meter.take() if isinstance(event, Call) and event.op == "add_"]
    assert {"first", "gate", "last"} <= set(added)


def products_by_part(events: list[Event]) -> dict[Any, int]:
    counts: Counter[Any] = Counter()
    for event in events:
        if isinstance(event, Call) and event.products:
            counts[event.part] += event.products
    return dict(counts)


def test_bytes_alive_by_part() -> None:
    with Meter() as meter:
        meter.part = "one"
        a = torch.ones(N)
        meter.part = "two"
        b = torch.ones(2 * N)
        assert meter.alive() == {"one": 4 * N, "two": 8 * N}
        meter.hand_over([a], "two")
        assert meter.alive()["two"] == 12 * N
        del a, b
    assert meter.alive().total() == 0


def test_signatures_run_again() -> None:
    """A call is rebuilt from its signature: the same operation on tensors of the same layouts."""
    _, _, events = metered(METHODS["attention_residuals"], "cpu")
    calls = {event.number: event for event in events if isinstance(event, Call) and event.number >= 0}
    assert len(calls) > 50
    for number, call in calls.items():
        signature = signature_of(number)
        args, kwargs = signature.arguments(empty, "meta")
        with torch.no_grad(), Meter() as meter:
            out = signature.func(*args, **kwargs)
        assert all(tensor.is_meta for tensor in tensors_in((out,)))
        again = only(meter)
        assert (again.op, again.products, again.dims) == (call.op, call.products, call.dims)
        assert [region.bytes for region in again.makes] == [region.bytes for region in call.makes]
