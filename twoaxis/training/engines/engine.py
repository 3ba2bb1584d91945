"""The engine: one process, or several that each hold a replica of the model and train on a part of every batch.

Everything that knows about processes is in this room. The loop asks an engine for a step's gradients and never for a
forward or a backward pass, because a pipeline schedules the passes of all micro-batches itself. The engines of models
in parts override what they do otherwise: building, exchanging gradients, clipping, whole weights.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from twoaxis.model.loss import IGNORED, auxiliary_loss, labelled, logits_of, score, summed_loss
from twoaxis.training.checkpoint import save_model, weights
from twoaxis.training.config import TrainConfig
from twoaxis.training.engines.processes import Place, Said, gather

Batch = dict[str, Tensor]
"""Tensors of a forward pass, and `labels`."""


class Losses(NamedTuple):
    """Losses of a step in one process; their means over all processes are those of the step."""

    tokens: Tensor  # per labelled token
    auxiliary: Tensor | None  # of the model itself, such as the balance of experts; None where it has none


def autocast(run: TrainConfig, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Context manager for the precision of a run's passes; weights and optimiser stay in float32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=run.dtype == "bfloat16")


def load_batch(examples: Any, numbers: range, device: torch.device) -> Batch:
    """The examples of these numbers as one batch."""
    items = [examples[number] for number in numbers]
    return {name: torch.stack([item[name] for item in items]).to(device) for name in items[0]}


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Numbers of a model, and how many of them learn."""
    counts = [(p.numel(), p.numel() * p.requires_grad) for p in model.parameters()]
    return sum(count for count, _ in counts), sum(count for _, count in counts)


class Scores(NamedTuple):
    """Sums over the labelled tokens of held-out examples, of all processes."""

    nats: float  # of their losses
    right: float  # tokens predicted right
    tokens: float  # labelled
    rows: tuple[float | None, ...]  # mean loss of each example; None where nothing of it is labelled


class Engine:
    """A model on its device, with a replica in every process (DistributedDataParallel)."""

    model: Any  # the model itself; its parameters are what the optimiser and checkpoints see
    parameters: tuple[int, int]  # numbers of the whole model, and how many of them learn
    sharded = False  # whether a process has other parameters, or parts of them, than the others
    background: Any = None  # the processes of a sharded model once more, for what a thread exchanges

    def __init__(self, run: TrainConfig, place: Place) -> None:
        self.run = run
        self.rank, self.world, self.device = place
        self._share(self.rank, self.world, True)

    def _share(self, share: int, shares: int, counts: bool) -> None:
        self.share, self.shares = share, shares  # which part of every batch this process has, of how many
        self.counts = counts  # whether it speaks for its part, which others may have too
        self.size = self.run.batch // (self.run.accumulate * shares)

    def build(self, make: Callable[[], Any]) -> Any:
        """Make the model and put it where it is trained."""
        self.model = make().to(self.device)
        self.parameters = count_parameters(self.model)
        return self.model

    def start(self, examples: Any) -> None:
        """Make ready for the first step of this process.

        DistributedDataParallel sums gradients in the order of the parameters in its first pass and in the order of
        their arrival in all later ones. From three processes on that changes last bits, and a resumed run would not
        repeat an uninterrupted one: one pass that nobody uses comes first.
        """
        if self.run.compiles:
            self.model.compile()
        self.replica = self.model
        if self.world > 1:
            self.replica = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        if self.world > 2:
            batches = [load_batch(examples, range(self.size), self.device)]
            self.gradients(batches, self.labelled(batches))
            self.model.zero_grad(set_to_none=True)

    def micro_batches(self, examples: Any, step: int) -> list[Batch]:
        """This process's examples of a step; the micro-batches of a step are dealt out to the processes in turn."""
        first = (step - 1) * self.run.batch + self.share * self.size
        starts = (first + number * self.shares * self.size for number in range(self.run.accumulate))
        return [load_batch(examples, range(start, start + self.size), self.device) for start in starts]

    def labelled(self, micro_batches: Sequence[Batch]) -> Tensor:
        """Labelled tokens of a step, of all processes."""
        return self._sum(torch.stack([labelled(batch["labels"]) for batch in micro_batches]).sum() * self.counts)

    def gradients(self, micro_batches: Sequence[Batch], tokens: Tensor) -> Losses:
        """Leave a step's gradients in the parameters; its loss is divided by the labelled tokens of all processes."""
        self.model.train()
        total, auxiliary = torch.zeros((), device=self.device), None
        for number, batch in enumerate(micro_batches, start=1):
            last = number == len(micro_batches)
            inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
            with self._exchanging(last):
                with autocast(self.run, self.device):
                    output = self.replica(**inputs, use_cache=False)
                    # gradients are averaged over the shares, and the shares are to be added
                    loss = summed_loss(logits_of(output), batch["labels"]) / tokens * self.shares
                total += loss.detach()
                extra = auxiliary_loss(self.model, output)
                if extra is not None:
                    extra = extra / len(micro_batches)
                    auxiliary = extra.detach() + (0 if auxiliary is None else auxiliary)
                    loss = loss + extra
                loss.backward()
        return Losses(total, auxiliary)

    def _exchanging(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Context manager of a backward pass; gradients go to the other processes with the last one of a step."""
        return contextlib.nullcontext() if last or self.world == 1 else self.replica.no_sync()

    def clip(self, largest: float) -> Tensor:
        """Scale all gradients together to a norm of at most `largest`; returns the norm before. 0 only measures."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), largest or math.inf)

    @torch.no_grad()
    def score(self, examples: Any) -> Scores:
        """Losses of held-out examples.

        Every process makes as many passes as the others, which a sharded model needs: one that has no examples left
        scores some whose labels are all ignored.
        """
        sums = torch.zeros(3 + 2 * len(examples), dtype=torch.float64, device=self.device)
        rows = sums[3:].view(-1, 2)  # nats and tokens of each example: one exchange has them all
        training = self.model.training
        self.model.eval()
        for first in range(0, len(examples), self.shares * self.size):
            start = first + self.share * self.size
            mine = range(start, min(start + self.size, len(examples)))
            batch = load_batch(examples, mine or range(1), self.device)
            labels = batch.pop("labels")
            if not mine:
                labels.fill_(IGNORED)
            logits = self._logits(batch)
            if self.counts and logits is not None:
                batch_sums, batch_rows = score(logits, labels)
                sums[:3] += batch_sums
                rows[mine.start : mine.stop] = batch_rows[: len(mine)]
        self.model.train(training)
        nats, right, tokens = self._sum(sums)[:3].tolist()
        return Scores(nats, right, tokens, tuple(total / count if count else None for total, count in rows.tolist()))

    def _logits(self, batch: Batch) -> Tensor | None:
        """The logits of a batch; None in a process that does not get them."""
        with autocast(self.run, self.device):
            return logits_of(self.model(**batch, use_cache=False))

    def weights(self) -> dict[str, Tensor]:
        """Every weight whole, by name, in the first process; all of them take part."""
        return weights(self.model)

    def export(self, folder: Path) -> None:
        """Write the model as a folder of its own, in the first process; all of them take part."""
        if self.rank == 0:
            save_model(folder, self.model)

    def mean(self, *values: Any) -> list[float]:
        """Numbers averaged over all processes, in one exchange."""
        numbers = [torch.as_tensor(value, dtype=torch.float64, device=self.device) for value in values]
        return (self._sum(torch.stack(numbers)) / self.world).tolist()

    def gather(self, said: Said) -> list[Said]:
        """What every process says, in all of them."""
        return gather(said, self.world)

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.world > 1:
            dist.barrier()

    def _sum(self, values: Tensor) -> Tensor:
        if self.world > 1:
            dist.all_reduce(values)
        return values
