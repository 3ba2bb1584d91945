"""The engine of a pipeline: processes share the depth, and replicas of the pipeline share every batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from twoaxis.model.loss import summed_loss
from twoaxis.parallel.clip import scale_gradients, squared_norm
from twoaxis.parallel.pipeline import Pipeline, shard_stage
from twoaxis.parallel.shard import gather_nothing, materialise, whole_tensor
from twoaxis.training.config import TrainConfig
from twoaxis.training.engines.degrees import Degrees
from twoaxis.training.engines.engine import Batch, Engine, Losses, autocast
from twoaxis.training.engines.place import Place
from twoaxis.training.engines.sharded import empty_and_whole, export
from twoaxis.training.tensors import weights


class PipelinedEngine(Engine):
    """A pipeline of the processes, or several that share every batch.

    Args:
        run: the run.
        place: this process.
        degrees: how processes share the model and the batch.
    """

    sharded = True

    def __init__(self, run: TrainConfig, place: Place, degrees: Degrees) -> None:
        self.degrees = degrees
        super().__init__(run, place)
        shape, names = (degrees.pp, degrees.dp, degrees.fsdp), ("pp", "dp", "fsdp")
        self.mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        pp, dp, fsdp = (self.mesh.get_local_rank(name) for name in names)
        self.share, self.shares = dp * degrees.fsdp + fsdp, degrees.shares
        self.counts = pp == degrees.pp - 1  # the last stage has the logits
        self._set_size()

    def build(self, make: Callable[[], Any]) -> Any:
        """Make the model without weights, keep the stages of this process, shard them, and give them their weights."""
        self.make = make
        self.model, whole = empty_and_whole(make, self.run, self.rank)
        names = [(name, t.shape, t.dtype) for name, t in [*self.model.named_parameters(), *self.model.named_buffers()]]
        self.numbers = super().parameters
        data = self.mesh["dp", "fsdp"] if self.degrees.dp > 1 else self.mesh["fsdp"]
        run, degrees = self.run, self.degrees
        self.pipeline = Pipeline(
            self.model,
            schedule=degrees.kind,
            stages=degrees.pp,
            virtual=degrees.virtual,
            micro_batches=degrees.pieces,
            loss=self._loss,
            rows=self.size // degrees.pieces,
            context=run.context,
            group=self.mesh.get_group("pp"),
            device=self.device,
            increments=torch.bfloat16 if run.dtype == "bfloat16" else None,
            compile=run.compile,
            recompute=run.recompute,
            shard=(lambda stage: shard_stage(stage, data)) if self.shares > 1 else (lambda stage: None),
            context_manager=lambda: autocast(run, self.device),
        )
        keep_only(self.model, [stage.decoder for stage in self.pipeline.stages])
        materialise(self.model, self.device, whole, names)
        return self.model

    @property
    def parameters(self) -> tuple[int, int]:
        """Numbers of the whole model, and how many of them learn."""
        return self.numbers

    def start(self, examples: Any) -> None:
        """Nothing is left to be made."""

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return summed_loss(logits, labels) / self.tokens * self.shares

    def gradients(self, micro_batches: Sequence[Batch], tokens: Tensor) -> Losses:
        """Leave a step's gradients in the parameters; the last stage has the loss."""
        self.model.train()
        self.tokens, total = tokens, torch.zeros((), device=self.device)
        for batch in micro_batches:
            loss = self.pipeline.step(batch["input_ids"], batch["labels"], batch.get("position_ids"))
            if loss is not None:
                total += loss
        self.pipeline.add_shared()
        if self.shares > 1:
            for name in ("dp", "fsdp"):
                self.pipeline.add_data(self.mesh[name])
        return Losses(total * self.degrees.pp, None)  # the mean over all processes is taken

    def clip(self, largest: float) -> Tensor:
        """Over all stages and their parts, each parameter once; see `Engine.clip`."""
        named = [(name, p.grad) for name, p in self.pipeline.named_parameters() if p.grad is not None]
        square = squared_norm((grad for name, grad in named if self.pipeline.counted(name)), self.device)
        dist.all_reduce(square, group=self.mesh.get_group("pp"))
        norm = square.sqrt()
        scale_gradients((grad for _, grad in named), norm, largest)
        return norm

    def score(self, examples: Any) -> Any:
        """See `Engine.score`; afterwards the parameters are parts again."""
        scores = super().score(examples)
        for stage in self.pipeline.stages:
            gather_nothing(stage)
        return scores

    def _logits(self, batch: Batch) -> Tensor | None:
        """The logits, in the last stage. Boundaries have a fixed shape: a short batch is filled up."""
        rows = batch["input_ids"].shape[0]
        full = {name: F.pad(t, (0, 0, 0, self.size - rows)) for name, t in batch.items()}
        logits = self.pipeline.logits(full["input_ids"], full.get("position_ids"))
        return None if logits is None else logits[:rows]

    def weights(self) -> dict[str, Tensor]:
        """Every weight whole, by name, in the first process."""
        own = {name: whole_tensor(tensor).detach() for name, tensor in weights(self.model).items()}
        listed: list[Any] = [None] * self.world
        dist.all_gather_object(listed, {name: (tuple(t.shape), t.dtype) for name, t in own.items()})
        gathered = dict(own)
        for name in dict.fromkeys(name for theirs in listed for name in theirs):
            holder = next(rank for rank, theirs in enumerate(listed) if name in theirs)
            if holder == 0:
                continue
            if self.rank == holder:
                dist.send(own[name].contiguous(), 0)
            elif self.rank == 0:
                shape, dtype = listed[holder][name]
                gathered[name] = torch.empty(shape, dtype=dtype, device=self.device)
                dist.recv(gathered[name], holder)
        return gathered

    def export(self, folder: Path) -> None:
        """Write the whole model; see `Engine.export`."""
        export(self, folder, self.make)


def keep_only(model: nn.Module, kept: Sequence[nn.Module]) -> None:
    """Replace the modules of a model that no stage of this process has by empty ones; the names of the others stay."""
    wanted = {id(module) for root in kept for module in root.modules()}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            holds = any(True for _ in child.parameters(recurse=False))
            if holds and id(child) not in wanted:
                setattr(parent, name, nn.Module())
