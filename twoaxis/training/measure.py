"""What a training step takes on this machine: peak memory and tokens per second.

Everything here is measured on real steps (forward, backward, optimiser) and nothing is estimated. The model is left as
it was found: weights, gradients, training mode and random state.

    memory          before the step     end of the forward pass     end of the backward pass
    parameters      ████                ████                        ████
    optimizer       ████████            ████████                    ████████
    activations                         ██████████                                          what backward still needs
    gradients                                                       ████
                                                  ▲ peak, somewhere here: highest sum at any moment

The first step makes the optimiser's state, the second is measured. On a GPU the numbers are the allocator's, whose
blocks are rounded up. Elsewhere `LiveBytes` watches every tensor that an operation returns and counts each distinct
storage from its birth to its death; scratch space inside a single operation it does not see. The same step gives the
same number every time, and other processes do not change it.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Loss = Callable[[nn.Module, Tensor], Tensor]
"""The loss of a model on tokens (B, context + 1)."""
MakeOptimizer = Callable[[nn.Module], Optimizer]
"""The optimiser of a model."""

SEED = 0
"""Of the tokens that are trained on while measuring."""


class Memory(NamedTuple):
    """Bytes of a training step; see the drawing above.

    Attributes:
        parameters: and buffers, each storage once: a tied head shares the embedding's.
        gradients: at the end of the backward pass.
        optimizer: its state between steps.
        activations: what the forward pass leaves for the backward pass, logits and loss included.
        peak: the most that is alive at any moment. Less than the sum of the others where gradients appear while
            activations go; more where an operation needs room for the moment.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    peak: int


class Throughput(NamedTuple):
    """Speed of training.

    Attributes:
        rate: tokens per second, the median of the rounds.
        rounds: tokens per second of each round, in order.
    """

    rate: float
    rounds: tuple[float, ...]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations make while it is active, as long as they live.

    Storages that are there before it starts count only if they are given to `watch`.

    Attributes:
        now: bytes alive.
        peak: the most since the start or since `reset`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Count these from now on."""
        for tensor in tensors:
            if self._sizes.get(key := tensor.untyped_storage()._cdata) == 0:
                self._die(key)  # seen before without counting it
            self._see(tensor, counts=True)

    def reset(self) -> None:
        """Forget earlier peaks."""
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            self._see(leaf, counts=False)  # not made here: what is a view of it does not count either
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            self._see(leaf, counts=True)
        return out

    def _see(self, tensor: Any, *, counts: bool) -> None:
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes() if counts else 0
            self._refs[key] = weakref.ref(storage, lambda _, key=key: self._die(key))
            self.now += self._sizes[key]
        elif self._sizes[key]:  # it may have been resized
            self.now += storage.nbytes() - self._sizes[key]
            self._sizes[key] = storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _die(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
        del self._refs[key]


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of each token given those before it.

    Args:
        model: a `Decoder` or a transformers model.
        tokens: (B, context + 1).
    """
    given, target = tokens[:, :-1], tokens[:, 1:]
    logits = model(given, use_cache=False).logits if hasattr(model, "generation_config") else model(given)
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def adamw(model: nn.Module) -> Optimizer:
    """AdamW on every parameter that learns: two numbers of state for each of them."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def peak_memory(
    model: nn.Module,
    batch: int,
    context: int,
    *,
    accumulate: int = 1,
    loss: Loss = next_token_loss,
    optimizer: MakeOptimizer = adamw,
) -> Memory:
    """Bytes of one real training step of `model` on the device it is on.

    The weights are copied to main memory meanwhile and put back, whatever the optimiser does to them.

    Args:
        model: not compiled: a compiled one allocates behind the operations' backs.
        batch: sequences per step.
        context: tokens of a sequence.
        accumulate: passes a step is made of; it must divide `batch`.
        loss: of a model on (sequences, context + 1) tokens.
        optimizer: makes the optimiser whose step is measured.
    """
    device, passes = _device(model), _passes(model, batch, context, accumulate)
    if getattr(model, "_orig_mod", None) is not None or model._compiled_call_impl is not None:
        raise ValueError("peak memory is measured on the model before torch.compile; give that one")
    with _unchanged(model), _no_collection():
        meter = _cuda_meter(device) if device.type == "cuda" else _live_meter()
        with meter as (now, peak, reset, watch):
            watch([*model.parameters(), *model.buffers()])
            parameters = _bytes([*model.parameters(), *model.buffers()])
            elsewhere = now() - parameters  # other tensors on the device
            chosen = optimizer(model)
            _step(model, passes, loss, chosen)
            chosen.zero_grad(set_to_none=True)
            reset()
            before, after = now(), []
            _step(model, passes, loss, chosen, lambda: after.append(now()))
            gradients = _bytes(p.grad for p in model.parameters() if p.grad is not None)
            state = _bytes(leaf for leaf in tree_leaves(dict(chosen.state)) if isinstance(leaf, Tensor))
            return Memory(parameters, gradients, state, after[0] - before, peak() - elsewhere)


def throughput(
    model: nn.Module,
    batch: int,
    context: int,
    steps: int = 10,
    *,
    warmup: int = 2,
    accumulate: int = 1,
    loss: Loss = next_token_loss,
    optimizer: MakeOptimizer = adamw,
) -> float:
    """Tokens per second of `steps` real training steps, after `warmup` others. See `throughputs` for comparisons.

    Args:
        model: on the device it is on.
        batch: sequences per step.
        context: tokens of a sequence.
        steps: timed.
        warmup: steps before them.
        accumulate: passes a step is made of; it must divide `batch`.
        loss: of a model on (sequences, context + 1) tokens.
        optimizer: makes the optimiser.
    """
    if steps < 1:
        raise ValueError(f"at least one step must be timed, got steps={steps}")
    device, passes = _device(model), _passes(model, batch, context, accumulate)
    with _unchanged(model):
        chosen = optimizer(model)
        for _ in range(warmup):
            _step(model, passes, loss, chosen)
        return batch * context * steps / _seconds(model, passes, loss, chosen, steps, device)


def throughputs(
    models: Mapping[str, Callable[[], nn.Module]],
    batch: int,
    context: int,
    *,
    rounds: int = 7,
    steps: int = 2,
    accumulate: int = 1,
    loss: Loss = next_token_loss,
    optimizer: MakeOptimizer = adamw,
    report: Callable[[int], None] | None = None,
) -> dict[str, Throughput]:
    """Tokens per second of several models, measured in turns so that their ratios come from one run.

        round 1   a a  b b  c c
        round 2   b b  c c  a a          each round begins with another model
        round 3   c c  a a  b b

    A machine that slows down for a while slows all of them, and the median passes over it. All models and their
    optimisers are in memory at once.

    Args:
        models: by name, functions that build them on their device.
        batch: sequences per step.
        context: tokens of a sequence.
        rounds: timed, after one that is not.
        steps: of each model in a round.
        accumulate: passes a step is made of; it must divide `batch`.
        loss: of a model on (sequences, context + 1) tokens.
        optimizer: makes the optimiser of each.
        report: called with the number of rounds that are done.
    """
    if not models:
        raise ValueError("there are no models to time")
    if rounds < 1 or steps < 1:
        raise ValueError(f"at least one round of one step must be timed, got rounds={rounds} and steps={steps}")
    runs: dict[str, Callable[[], float]] = {}
    with contextlib.ExitStack() as stack:
        for name, build in models.items():
            model = build()
            device, passes = _device(model), _passes(model, batch, context, accumulate)
            stack.enter_context(_unchanged(model, restore=False))
            arguments = (model, passes, loss, optimizer(model), steps, device)
            runs[name] = lambda arguments=arguments: batch * context * steps / _seconds(*arguments)
        names, rates = list(runs), {name: [] for name in runs}
        for run in runs.values():
            run()
        for done in range(rounds):
            first = done % len(names)
            for name in names[first:] + names[:first]:
                rates[name].append(runs[name]())
            if report is not None:
                report(done + 1)
    return {name: Throughput(statistics.median(found), tuple(found)) for name, found in rates.items()}


def _step(
    model: nn.Module,
    passes: tuple[Tensor, ...],
    loss: Loss,
    optimizer: Optimizer,
    forward_done: Callable[[], None] | None = None,
) -> None:
    """One optimiser step over all passes."""
    optimizer.zero_grad(set_to_none=True)
    for tokens in passes:
        value = loss(model, tokens)
        if len(passes) > 1:
            value = value / len(passes)
        if forward_done is not None:
            forward_done()
        value.backward()
    optimizer.step()


def _seconds(
    model: nn.Module, passes: tuple[Tensor, ...], loss: Loss, optimizer: Optimizer, steps: int, device: torch.device
) -> float:
    _wait(device)
    begin = time.perf_counter()
    for _ in range(steps):
        _step(model, passes, loss, optimizer)
    _wait(device)
    return time.perf_counter() - begin


def _wait(device: torch.device) -> None:
    """Work on an accelerator runs on after a call returns."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _device(model: nn.Module) -> torch.device:
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1 or "meta" in {d.type for d in devices}:
        found = ", ".join(sorted(map(str, devices))) or "no device"
        raise ValueError(f"a step is measured with all parameters on one real device; they are on {found}")
    return devices.pop()


def _passes(model: nn.Module, batch: int, context: int, accumulate: int) -> tuple[Tensor, ...]:
    """The tokens of each pass of a step, the same for every model of one vocabulary."""
    for name, value in (("batch", batch), ("context", context), ("accumulate", accumulate)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if batch % accumulate:
        raise ValueError(f"accumulate ({accumulate}) must divide batch ({batch})")
    config = getattr(model, "config", None)
    vocabulary = getattr(config, "vocabulary", None) or getattr(config, "vocab_size", None)
    if vocabulary is None:
        raise ValueError(f"{type(model).__name__} has no config with a vocabulary or vocab_size to draw tokens from")
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(0, vocabulary, (batch, context + 1), generator=generator).to(_device(model))
    return tokens.chunk(accumulate)


@contextlib.contextmanager
def _unchanged(model: nn.Module, restore: bool = True) -> Iterator[None]:
    """Training mode inside; afterwards the weights, gradients, modes and random state of before."""
    modes = {module: module.training for module in model.modules()}
    gradients = {p: p.grad for p in model.parameters()}
    held = [*model.parameters(), *model.buffers()] if restore else []
    copies = [t.detach().to("cpu", copy=True) for t in held]
    accelerators = [_device(model)] if _device(model).type == "cuda" else []
    with torch.random.fork_rng(accelerators):
        for p in gradients:
            p.grad = None
        model.train()
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, copy in zip(held, copies, strict=True):
                    tensor.copy_(copy)
            for p, gradient in gradients.items():
                p.grad = gradient
            for module, mode in modes.items():
                module.training = mode


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage is collected before and not inside, where its timing would change the numbers."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


Meter = tuple[Callable[[], int], Callable[[], int], Callable[[], None], Callable[[Iterable[Tensor]], None]]
"""Bytes now, their peak, the start of a new peak, and tensors to count that are there already."""


@contextlib.contextmanager
def _live_meter() -> Iterator[Meter]:
    with LiveBytes() as live:
        yield (lambda: live.now), (lambda: live.peak), live.reset, live.watch


@contextlib.contextmanager
def _cuda_meter(device: torch.device) -> Iterator[Meter]:
    yield (
        lambda: torch.cuda.memory_allocated(device),
        lambda: torch.cuda.max_memory_allocated(device),
        lambda: torch.cuda.reset_peak_memory_stats(device),
        lambda tensors: None,  # the allocator has counted them already
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of the distinct storages behind tensors."""
    return sum({(s := t.untyped_storage())._cdata: s.nbytes() for t in tensors}.values())
