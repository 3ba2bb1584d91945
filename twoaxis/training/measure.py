"""What a training step takes on this machine: peak memory and tokens per second.

Everything here is measured on real steps (forward, backward, optimiser) and nothing is estimated. The model is left as
it was: weights, gradients, training mode and random state.

    memory          before the step     end of the forward pass     end of the backward pass
    parameters      ████                ████                        ████
    optimizer       ████████            ████████                    ████████
    activations                         ██████████                                          what backward still needs
    gradients                                                       ████
                                                  ▲ peak, somewhere here: highest sum at any moment

The first step makes the optimiser's state, the second is measured. On a GPU the numbers are the allocator's, whose
blocks are rounded up. Elsewhere they are those of a `Meter`: each distinct storage from the operation that returns it
until it is freed. The same step gives the same number every time, and other processes do not change it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from twoaxis.base.meter import Meter, storage_bytes
from twoaxis.base.timer import Rounds, Throughput, no_collection, take_turns
from twoaxis.model.loss import next_token_loss

Loss = Callable[[nn.Module, Tensor], Tensor]
"""The loss of a model on tokens (B, context + 1)."""
MakeOptimizer = Callable[[nn.Module], Optimizer]
"""The optimiser of a model."""

SEED = 0
"""Of the tokens that are trained on while measuring."""


class Memory(NamedTuple):
    """Bytes of a training step; see the drawing above."""

    parameters: int  # and buffers, each storage once: a tied head shares the embedding's
    gradients: int  # at the end of the backward pass
    optimizer: int  # its state between steps
    activations: int  # what the forward pass leaves for the backward pass, logits and loss included
    # the most that is alive at any moment. Less than the sum of the others where gradients appear while activations go;
    # more where an operation needs bytes for the moment.
    peak: int


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

    The weights are copied to main memory meanwhile and put back, whatever the optimiser does to them. A compiled model
    is refused: it allocates behind the operations' backs.

    Args:
        batch: sequences per step, in `accumulate` passes.
        context: tokens of a sequence.
    """
    device, passes = _device(model), _passes(model, batch, context, accumulate)
    if getattr(model, "_orig_mod", None) is not None or model._compiled_call_impl is not None:
        raise ValueError("peak memory is measured on the model before torch.compile; give that one")
    with _unchanged(model), no_collection(), contextlib.ExitStack() as stack:
        meter = _Allocator(device) if device.type == "cuda" else stack.enter_context(Meter(record=False))
        weights = [*model.parameters(), *model.buffers()]
        meter.watch(weights)
        parameters = storage_bytes(weights)
        elsewhere = meter.now - parameters  # other tensors on the device
        chosen = optimizer(model)
        _step(model, passes, loss, chosen)
        chosen.zero_grad(set_to_none=True)
        meter.reset()
        before, after = meter.now, []
        _step(model, passes, loss, chosen, lambda: after.append(meter.now))
        gradients = storage_bytes(p.grad for p in model.parameters() if p.grad is not None)
        state = storage_bytes(leaf for leaf in tree_leaves(dict(chosen.state)) if isinstance(leaf, Tensor))
        return Memory(parameters, gradients, state, after[0] - before, meter.peak - elsewhere)


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
    fixed: bool = False,
    within: float = 0.0,
    report: Callable[[int], None] | None = None,
) -> dict[str, Throughput]:
    """Tokens per second of several models, measured in turns so that their ratios come from one run.

    The seconds are those of `twoaxis.base.timer`: CPU time on the CPU in one thread, the wall clock elsewhere. All
    models and their optimisers are in memory at once, on one device.

    Args:
        models: by name, functions that build them on their device.
        batch: sequences per step, in `accumulate` passes.
        context: tokens of a sequence.
        rounds: timed, after one that is not.
        steps: of each model in a round.
        fixed: also time a step of two tokens in every round.
        within: seconds for each kind of step of a model within which more rounds are timed; see `take_turns`.
        report: called with the number of rounds that are done.
    """
    if not models:
        raise ValueError("there are no models to time")
    if rounds < 1 or steps < 1:
        raise ValueError(f"at least one round of one step must be timed, got rounds={rounds} and steps={steps}")
    runs: dict[tuple[str, str], Callable[[], Any]] = {}
    devices: set[torch.device] = set()
    with contextlib.ExitStack() as stack:
        for name, build in models.items():
            model = build()
            devices.add(_device(model))
            stack.enter_context(_unchanged(model, restore=False))
            chosen = optimizer(model)
            kinds = {"whole": (batch, context, accumulate)} | ({"fixed": (1, 2, 1)} if fixed else {})
            for kind, sizes in kinds.items():
                arguments = (model, _passes(model, *sizes), loss, chosen)
                runs[name, kind] = lambda arguments=arguments: [_step(*arguments) for _ in range(steps)]
        if len(devices) > 1:
            raise ValueError(f"models are timed on one device, these are on {', '.join(sorted(map(str, devices)))}")
        times = take_turns(runs, rounds, device=devices.pop(), within=within, report=report)
    tokens = batch * context * steps
    return {
        name: Throughput(
            Rounds(tuple(tokens / seconds for seconds in times[name, "whole"].values)),
            min(1.0, times[name, "fixed"].over(times[name, "whole"]).median) if fixed else None,
        )
        for name in models
    }


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


class _Allocator:
    """The numbers of CUDA's own allocator, asked like a `Meter`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def now(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """The allocator has counted them already."""
