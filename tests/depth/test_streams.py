"""What every stream promises beside the claims of `twoaxis check`, written once and run on all of their variants."""

from __future__ import annotations

import gc
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import twoaxis
from tests.support.numbers import close, randn
from twoaxis.base.registry import spell
from twoaxis.depth.plan import Plan, Read
from twoaxis.depth.registry import STREAMS, stream_names
from twoaxis.depth.stream import Apply, Layout, Seen, State, Stream
from twoaxis.depth.walk import apply_sublayer, visit
from twoaxis.kernels.operator import using

WIDTH, BLOCKS = 16, 4
PLAIN_BLOCK, MIXED_BLOCK = ("attention", "mlp"), ("mixer", "attention", "mlp")
VARIANTS = [
    pytest.param(name, options, id=spell(name, dict(options)))
    for name in stream_names()
    for options in STREAMS.find(name).variants
]
every_stream = pytest.mark.parametrize(("name", "options"), VARIANTS)
some_streams = pytest.mark.parametrize(("name", "options"), VARIANTS[::4])
every_method = pytest.mark.parametrize("name", stream_names())


def make(name: str, options: Any, kinds: Sequence[str] = PLAIN_BLOCK, **more: Any) -> Any:
    """A stream with parameters off their start."""
    stream = twoaxis.stream(name, blocks=BLOCKS, width=WIDTH, kinds=kinds, **options, **more).double()
    generator = torch.Generator().manual_seed(5)
    stream.reset_parameters(generator)
    with torch.no_grad():
        for parameter in stream.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return stream


def acting(stream: Stream) -> Apply:
    """A cheap sub-layer, another one at every site; it tells the ways apart, and keys from values."""

    def sublayer(c: Seen, index: int) -> Tensor:
        x, q, k, v = (c.x if way is None else way for way in c[:4])
        if c.kv is not None:
            k, v = (t.flatten(-2) for t in c.kv(*(t.unflatten(-1, (stream.kv_heads or 2, -1)) for t in (q, k, v))))
        return 0.5 * torch.tanh(x.roll(index + 1, -1) + 0.3 * q - 0.2 * k + 0.4 * v)

    return lambda site, seen: apply_sublayer(seen._replace(aux=None), lambda c: sublayer(c, site.index))


def run(stream: Stream, begin: Tensor | State) -> Tensor:
    """From an embedding, or from a state in the middle, to the output."""
    state = stream.open(begin) if isinstance(begin, Tensor) else begin
    return stream.close(visit(stream, state, stream.sites[state.index :], acting(stream)))


# The plan.


def brute_force(plan: Plan, boundary: int) -> list[int]:
    """The sources alive at a boundary, by looking at every pair of a site and a source."""
    readers = [read for index, read in plan.reads.items() if index >= boundary]
    return [
        n
        for index, n in sorted(plan.born.items())
        if index <= boundary and any(n in read.numbers or (read.first and n == 0) for read in readers)
    ]


@given(
    blocks=st.integers(1, 6),
    size=st.integers(1, 4),
    window=st.one_of(st.none(), st.integers(1, 4)),
    first=st.booleans(),
    step=st.integers(1, 3),
    late=st.integers(0, 2),
    reading=st.sets(st.integers(0, 12)),
)
def test_a_plan_knows_who_is_alive(
    blocks: int, size: int, window: int | None, first: bool, step: int, late: int, reading: set[int]
) -> None:
    layout = Layout.make(blocks, 4)
    born = {index: n for n, index in enumerate(range(late, len(layout.sites), size))}
    reads = {}
    for index in reading & set(range(late, len(layout.sites))):
        newest = (index - late) // size
        oldest = max(int(first), 0 if window is None else newest - window + 1)
        reads[index] = Read(range(oldest, newest + 1, step), first=first)
    plan = Plan(layout, born, reads, [str(n) for n in born.values()])
    for boundary in range(len(layout.sites)):
        alive = plan.alive(boundary)
        assert alive == brute_force(plan, boundary)
        if boundary in plan.reads and boundary + 1 < len(layout.sites):
            gone = set(alive) - set(plan.alive(boundary + 1))
            assert plan.ends.get(boundary, set()) == gone


@contextmanager
def steps_taken() -> Iterator[list[int]]:
    """How many lines of Python run."""
    count = [0]

    def look(frame: Any, event: str, arg: Any) -> Any:
        count[0] += event == "line"
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield count
    finally:
        sys.settrace(before)


@every_method
def test_building_is_linear_in_depth(name: str) -> None:
    """MUDDFormer and the other methods over all blocks make a parameter per block: their number is what is built."""
    counts = []
    for blocks in (50, 200):
        with torch.device("meta"), steps_taken() as count:
            twoaxis.stream(name, blocks=blocks, width=WIDTH)
        counts.append(count[0])
    assert counts[1] <= 4.6 * counts[0]


def test_hundreds_of_blocks_of_attention_residuals_run() -> None:
    stream = twoaxis.stream("attention_residuals", blocks=500, width=4, window=4, overflow="sum", read="sum")
    x = randn(1, 2, 4, dtype=torch.float32)
    state = stream.open(x)
    with torch.no_grad():
        for site in stream.sites:
            seen = stream.read(state, site)
            state = stream.write(state, site, 0.001 * x, seen, seen)
    assert len(state.value.kept) == 5
    close(stream.close(state), 2 * x, 1e-3)


# States.


@every_stream
def test_a_state_meets_parameters_that_were_written_to(name: str, options: Any) -> None:
    stream, x = make(name, options), randn(2, 3, WIDTH)
    with torch.no_grad():
        state = visit(stream, stream.open(x), [site for site in stream.sites if site.block < 2], acting(stream))
        for parameter in stream.parameters():
            parameter.mul_(1.5)
        fresh = stream.unpack(stream.pack(state), stream.layout.sites[state.index])
        close(run(stream, state), run(stream, fresh))


@every_stream
def test_a_residual_is_scaled_between_layers(name: str, options: Any) -> None:
    stream, x = make(name, options), randn(2, 3, WIDTH)
    plain = twoaxis.stream("standard", blocks=BLOCKS, width=WIDTH)

    def scaled(of: Stream) -> Tensor:
        state = of.open(x)
        for block in range(BLOCKS):
            state = of.rescale(visit(of, state, of.sites_of(block), acting(of)), 0.7)
        return of.close(state)

    if stream.neutral in ("bitwise", "rounding") and stream.normed(stream.sites[0]):
        stream.neutral_()
        close(scaled(stream), scaled(plain))
    else:
        close(run(stream, stream.rescale(stream.open(x), 0.7)), run(stream, 0.7 * x))


@pytest.mark.parametrize("name", ["deep_cross_attention", "muddformer"])
def test_placement_decides_per_way(name: str) -> None:
    """Only attentions on: their q, k and v are mixtures while the residual stays plain. First sites alone: one."""
    stream, x = make(name, {}, MIXED_BLOCK, placement="attention"), randn(2, 3, WIDTH)
    assert {read.ways for read in stream.plan.reads.values()} == {("q", "k", "v")}
    state, total = stream.open(x), x
    for site in stream.sites:
        seen = stream.read(state, site)
        assert torch.equal(seen.x, total)
        assert (seen.q is not None) == (site.kind == "attention" and site.index - 1 in stream.plan.reads)
        c, y = acting(stream)(site, seen)
        state, total = stream.write(state, site, y, seen, c), total + y
    assert torch.equal(stream.close(state), total)
    first = make(name, {}, MIXED_BLOCK, placement="mixer")
    assert {read.ways for read in first.plan.reads.values()} == {("x",)}
    assert {len(read.ways) for read in make(name, {}, ("mlp",)).plan.reads.values()} == {1}


@every_stream
def test_a_stream_can_be_pickled(name: str, options: Any) -> None:
    """Whole, as `torch.save` of a model and processes that are started with one do; it can be started anew."""
    stream = make(name, options)
    again = pickle.loads(pickle.dumps(stream))
    for each in (stream, again):
        each.reset_parameters(torch.Generator().manual_seed(1))
        each.neutral_() if each.neutral != "none" else None
    x = randn(2, 3, WIDTH)
    assert torch.equal(run(stream, x), run(again, x))


# Gradients are autograd's own.


@every_method
def test_every_parameter_is_in_the_graph(name: str) -> None:
    """A parameter that cannot learn gets a gradient of zero and not none, which data parallelism waits for in vain."""
    stream = make(name, {}, MIXED_BLOCK)
    run(stream, randn(2, 3, WIDTH, grad=True)).sum().backward()
    assert [n for n, p in stream.named_parameters() if p.grad is None] == []


@every_stream
def test_second_derivatives_and_forward_mode(name: str, options: Any) -> None:
    """Of the fast form against its reference, and against the ordinary backward pass where there are parameters."""
    stream, x, probe = make(name, options), randn(1, 2, WIDTH, grad=True), randn(1, 2, WIDTH, seed=8)
    whole, leaves = Whole(stream), [x, *stream.parameters()]

    def second() -> list[Tensor]:
        out = run(stream, x) * probe  # a normalised output alone has a sum of squares that nothing changes
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        found = torch.autograd.grad(first.square().sum(), leaves, allow_unused=True)
        return [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, found, strict=True)]

    ours = second()
    with using("reference"):
        theirs = second()
    largest = max(b.abs().max().item() for b in theirs)  # the small ones are differences of large ones
    for a, b in zip(ours, theirs, strict=True):
        close(a, b, least=0.01 * largest)
    if len(leaves) > 1:
        own = {n: p.detach() for n, p in whole.named_parameters()}
        moved = {n: randn(*p.shape, seed=3) for n, p in own.items()}
        slope = torch.func.jvp(lambda own: (functional_call(whole, own, (x,)) * probe).sum(), (own,), (moved,))[1]
        grads = torch.autograd.grad((whole(x) * probe).sum(), list(whole.parameters()), allow_unused=True)
        along = torch.stack([(g * moved[n]).sum() for n, g in zip(own, grads, strict=True) if g is not None])
        close(slope, along.sum(), 1e-10, least=along.abs().sum().item())


def gradients(out: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Of a random cotangent in what is not frozen, zero where it is not used."""
    learning = [leaf for leaf in leaves if leaf.requires_grad]
    if not out.requires_grad:
        return [torch.zeros_like(leaf) for leaf in learning]
    found = torch.autograd.grad(out, learning, randn(*out.shape, seed=6), allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(learning, found, strict=True)]


def by_stages(stream: Stream, x: Tensor, around: Callable[..., tuple[Tensor, ...]]) -> Tensor:
    """The pass with each block behind `around`, between `unpack` and `pack`."""

    def stage(number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        sites = stream.sites_of(number)
        return stream.pack(visit(stream, stream.unpack(tensors, sites[0]), sites, acting(stream)))

    tensors = stream.pack(stream.open(x))
    for number in range(BLOCKS):
        tensors = around(stage, number, *tensors)
    return stream.close(stream.unpack(tensors, stream.layout.out))


@some_streams
def test_recomputed_and_offloaded(name: str, options: Any) -> None:
    """Blocks recomputed in a pass that is recomputed, by both kinds of checkpoints, and saved tensors elsewhere."""
    stream, x = make(name, options), randn(2, 3, WIDTH, grad=True)
    leaves, again = [x, *stream.parameters()], partial(checkpoint, use_reentrant=False)
    with using("reference"):
        want = gradients(run(stream, x), leaves)
    with torch.autograd.graph.save_on_cpu():
        out = run(stream, x)
    found = [gradients(out, leaves), gradients(again(lambda x: by_stages(stream, x, again), x), leaves)]
    out = by_stages(stream, x, partial(checkpoint, use_reentrant=True))  # the kind that `autograd.grad` refuses
    (out * randn(*out.shape, seed=6)).sum().backward()
    found.append([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves])
    least = max(g.abs().max().item() for g in want)
    for each in found:
        for a, b in zip(each, want, strict=True):
            close(a, b, 1e-11, least=least)


@some_streams
def test_what_is_frozen_or_cut_off(name: str, options: Any) -> None:
    """No, every other and every parameter frozen; an input with and without a gradient; detached between blocks."""
    stream = make(name, options)

    def cut(stage: Callable[..., tuple[Tensor, ...]], number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return stage(number, *(t.detach() if number == 1 else t for t in tensors))

    for frozen in ((), (0,), (0, 1)):
        for number, parameter in enumerate(stream.parameters()):
            parameter.requires_grad_(number % 2 not in frozen)
        for x in (randn(2, 3, WIDTH), randn(2, 3, WIDTH, grad=True)):
            leaves = [x, *stream.parameters()]
            with using("reference"):
                want = gradients(by_stages(stream, x, cut), leaves)
            least = max((g.abs().max().item() for g in want), default=0.0)
            for a, b in zip(gradients(by_stages(stream, x, cut), leaves), want, strict=True):
                close(a, b, 1e-11, least=max(least, 1e-3))


class Whole(nn.Module):
    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream

    def forward(self, x: Tensor) -> Tensor:
        return run(self.stream, x)


def test_data_parallelism_takes_two_steps() -> None:
    """A parameter outside the graph makes the second step fail."""

    def two_steps() -> None:
        model = DistributedDataParallel(Whole(make("attention_residuals", {"query": "none"})))
        for _ in range(2):
            model(randn(2, 3, WIDTH)).sum().backward()

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        two_steps()
    finally:
        # The model goes first: if it is the last to hold the group, torch waits for gloo's threads and holds the
        # interpreter's lock meanwhile, for which one of them may wait.
        gc.collect()
        dist.destroy_process_group()


@every_method
def test_no_module_is_called_like_a_projection(name: str) -> None:
    """Adapters look for modules by the ends of their names, and take a dictionary called query for a projection."""
    ends = {found.rpartition(".")[2] for found, _ in make(name, {}).named_modules()}
    assert ends.isdisjoint({"query", "key", "value", "output"})
