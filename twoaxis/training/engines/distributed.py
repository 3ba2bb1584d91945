"""The engines of models in parts: FSDP2, tensor parallelism and both, or a pipeline whose stages may be sharded."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from twoaxis.model.loss import summed_loss
from twoaxis.parallel.pipeline import Pipeline
from twoaxis.parallel.shard import find_blocks, materialise, prepare_blocks, shard, total_norm, units, whole_tensor
from twoaxis.parallel.tensor import add_partial, spread_tensors
from twoaxis.training.checkpoint import fill, save_model, weights
from twoaxis.training.config import TrainConfig
from twoaxis.training.engines.engine import Batch, Engine, Losses, Scores, count_parameters
from twoaxis.training.engines.processes import TIMEOUT, Degrees, Place


class ShardedEngine(Engine):
    """A model whose tensors lie in parts on several processes."""

    sharded = True
    _counted: Callable[[str], bool] = staticmethod(lambda name: True)  # whether it is this process's to count
    # modules that are run as a whole, and what is sharded in them: the model, or the stages of a pipeline
    roots: Sequence[nn.Module]

    def __init__(self, run: TrainConfig, place: Place, degrees: Degrees) -> None:
        super().__init__(run, place)
        self.degrees = degrees
        shape = {"pp": degrees.pp, "dp": degrees.dp, "fsdp": degrees.fsdp, "tp": degrees.tp}
        self.mesh = init_device_mesh(self.device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
        self.data = self.mesh["dp", "fsdp"] if degrees.dp > 1 else self.mesh["fsdp"]
        pp, dp, fsdp, tp = (self.mesh.get_local_rank(name) for name in shape)
        # the last stage has the logits; processes that share matrices have the same
        self._share(dp * degrees.fsdp + fsdp, degrees.shares, pp == degrees.pp - 1 and tp == 0)
        self.background = dist.new_group(backend="gloo", timeout=TIMEOUT)  # on CPUs, beside what trains

    def build(self, make: Callable[[], Any]) -> Any:
        """Make the model without weights, keep and shard what this process has of it, and fill that."""
        self.make = make
        if self.run.source is not None:  # it is read from files, which know no meta device
            whole = make()
            self.model = copy.deepcopy(whole).to("meta")
        else:
            with torch.device("meta"):
                self.model = make()
            whole = make() if self.rank == 0 else None
        self.parameters = count_parameters(self.model)
        self._spread()
        materialise(self.model, self.device, None if self.rank else whole)
        return self.model

    def _spread(self) -> None:
        self.norms = spread_tensors(self.model, self.mesh["tp"]) if self.degrees.tp > 1 else []
        if self.shares > 1:
            shard(self.model, self.data, compile=self.run.compiles)
        else:
            prepare_blocks(find_blocks(self.model), compile=self.run.compiles)
        self.replica, self.roots = self.model, [self.model]

    def start(self, examples: Any) -> None:
        """Nothing is left to be made."""

    def gradients(self, micro_batches: Sequence[Batch], tokens: Tensor) -> Losses:
        """Leave a step's gradients in the parameters."""
        losses = super().gradients(micro_batches, tokens)
        add_partial(self.norms, self.mesh["tp"])
        return losses

    def _exchanging(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        for unit in units(self.model):
            unit.set_requires_gradient_sync(last, recurse=False)
        return contextlib.nullcontext()

    def clip(self, largest: float) -> Tensor:
        """Over all stages and their parts, each parameter once; see `Engine.clip`."""
        named = {name: p for name, p in self.model.named_parameters() if p.grad is not None}
        norm = total_norm(p.grad for name, p in named.items() if p.grad is not None and self._counted(name))
        square = norm.square()
        dist.all_reduce(square, group=self.mesh.get_group("pp"))
        norm = square.sqrt()
        if largest:
            nn.utils.clip_grads_with_norm_(named.values(), largest, norm, foreach=False)
        return norm

    def score(self, examples: Any) -> Scores:
        """See `Engine.score`; afterwards the parameters are parts again."""
        scores = super().score(examples)
        for unit in (unit for root in self.roots for unit in units(root)):
            unit.reshard()
        return scores

    def weights(self) -> dict[str, Tensor]:
        """Every weight whole, by name, on the CPU of the first process; a tensor at a time is whole on a device."""
        own, gathered = weights(self.model), {}
        listed = self.gather({name: (tensor.shape, tensor.dtype) for name, tensor in own.items()})
        for name in dict.fromkeys(name for theirs in listed for name in theirs):
            holder = next(rank for rank, theirs in enumerate(listed) if name in theirs)
            shape, dtype = listed[holder][name]
            if name in own:
                full = whole_tensor(own[name]).contiguous()
            elif self.rank == 0:
                full = torch.empty(shape, dtype=dtype, device=self.device)
                dist.recv(full, holder)
            else:
                continue
            if self.rank == 0:
                gathered[name] = full.to("cpu")
            elif self.rank == holder:
                dist.send(full, 0)
        return gathered

    def export(self, folder: Path) -> None:
        """Put the whole weights into a model of the first process and save it."""
        gathered = self.weights()
        if self.rank == 0:
            whole = self.make()
            fill(weights(whole), gathered)
            save_model(folder, whole)


class PipelinedEngine(ShardedEngine):
    """A pipeline of the processes, or several that share every batch."""

    def _spread(self) -> None:
        run, degrees = self.run, self.degrees
        self.pipeline = Pipeline(
            self.model,
            schedule=degrees.kind,
            virtual=degrees.virtual,
            micro_batches=degrees.pieces,
            loss=lambda logits, labels: summed_loss(logits, labels) / self.tokens * self.shares,
            rows=self.size // degrees.pieces,
            context=run.context,
            group=self.mesh.get_group("pp"),
            data=self.data if self.shares > 1 else None,
            device=self.device,
            narrow=torch.bfloat16 if run.dtype == "bfloat16" else None,
            compile=run.compiles,
            recompute=run.recompute,
        )
        self._counted, self.roots = self.pipeline.counted, self.pipeline.stages

    def gradients(self, micro_batches: Sequence[Batch], tokens: Tensor) -> Losses:
        """Leave a step's gradients in the parameters; the last stage has the loss."""
        self.model.train()
        self.tokens, total = tokens, torch.zeros((), device=self.device)
        for batch in micro_batches:
            loss = self.pipeline.step(batch["input_ids"], batch["labels"], batch.get("position_ids"))
            if loss is not None:
                total += loss
        self.pipeline.add_shared()
        return Losses(total * self.degrees.pp, None)  # the mean over all processes is taken

    def _logits(self, batch: Batch) -> Tensor | None:
        """The logits, in the last stage. Boundaries have a fixed shape: a short batch is filled up."""
        rows = batch["input_ids"].shape[0]
        full = {name: F.pad(t, (0, 0, 0, self.size - rows)) for name, t in batch.items()}
        logits = self.pipeline.logits(full["input_ids"], full.get("position_ids"))
        return None if logits is None else logits[:rows]
