"""The engine of a model whose tensors lie in parts on several processes: FSDP2, tensor parallelism, and both."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from twoaxis.model.decoder import Block
from twoaxis.parallel.clip import scale_gradients, squared_norm
from twoaxis.parallel.shard import gather_nothing, materialise, prepare_blocks, set_exchange, shard, whole_tensor
from twoaxis.parallel.tensor import add_partial, spread_tensors
from twoaxis.training.config import TrainConfig
from twoaxis.training.engines.degrees import Degrees
from twoaxis.training.engines.engine import Engine, Losses
from twoaxis.training.engines.place import Place
from twoaxis.training.tensors import load_weights, save_model, weights


class ShardedEngine(Engine):
    """A model in parts.

    Args:
        run: the run.
        place: this process.
        degrees: how processes share the model and the batch.
    """

    sharded = True

    def __init__(self, run: TrainConfig, place: Place, degrees: Degrees) -> None:
        self.degrees = degrees
        super().__init__(run, place)
        shape, names = (degrees.dp, degrees.fsdp, degrees.tp), ("dp", "fsdp", "tp")
        self.mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        dp, fsdp, tp = (self.mesh.get_local_rank(name) for name in names)
        self.share, self.shares, self.counts = dp * degrees.fsdp + fsdp, degrees.shares, tp == 0
        self._set_size()

    def build(self, make: Callable[[], Any]) -> Any:
        """Make the model without weights, spread and shard it, and give every process its parts."""
        self.make = make
        self.model, whole = empty_and_whole(make, self.run, self.rank)
        self.tensors = spread_tensors(self.model, self.mesh["tp"]) if self.degrees.tp > 1 else None
        if self.degrees.shares > 1:
            mesh = self.mesh["dp", "fsdp"] if self.degrees.dp > 1 else self.mesh["fsdp"]
            shard(self.model, mesh, compile=self.run.compile)
        elif self.run.compile:
            prepare_blocks([m for m in self.model.modules() if isinstance(m, Block)], compile=True)
        materialise(self.model, self.device, whole)
        return self.model

    def start(self, examples: Any) -> None:
        """Nothing is left to be made."""
        self.replica = self.model

    def gradients(self, micro_batches: Any, tokens: Tensor) -> Losses:
        """Leave a step's gradients in the parameters."""
        losses = super().gradients(micro_batches, tokens)
        if self.tensors is not None:
            add_partial(self.tensors, self.mesh["tp"])
        return losses

    def _exchanging(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        set_exchange(self.model, last)
        return contextlib.nullcontext()

    def clip(self, largest: float) -> Tensor:
        """Over the parts of all processes; see `Engine.clip`."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = squared_norm(grads, self.device).sqrt()
        scale_gradients(grads, norm, largest)
        return norm

    def score(self, examples: Any) -> Any:
        """See `Engine.score`; afterwards the parameters are parts again."""
        scores = super().score(examples)
        gather_nothing(self.model)
        return scores

    def weights(self) -> dict[str, Tensor]:
        """Every weight whole, by name."""
        return {name: whole_tensor(tensor) for name, tensor in weights(self.model).items()}

    def export(self, folder: Path) -> None:
        """Write the whole model; see `Engine.export`."""
        export(self, folder, self.make)


def empty_and_whole(make: Callable[[], Any], run: TrainConfig, rank: int) -> tuple[Any, Any]:
    """A run's model on the meta device, and in the first process its weights too, on the CPU."""
    if run.source is not None:  # it is read from files, which know no meta device
        whole = make()
        return copy.deepcopy(whole).to("meta"), None if rank else whole
    with torch.device("meta"):
        empty = make()
    return empty, make() if rank == 0 else None


def export(engine: Engine, folder: Path, make: Callable[[], Any]) -> None:
    """Gather all weights, put them into a model of the first process and save it."""
    gathered = engine.weights()
    if engine.rank == 0:
        whole = make()
        load_weights(whole, {name: tensor.to("cpu") for name, tensor in gathered.items()})
        save_model(folder, whole)
