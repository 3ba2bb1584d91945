"""torchtitan's own trainer on gloo processes: run by torchrun in an environment that has torchtitan.

    torchrun --nproc-per-node 2 -m tests.torchtitan.steps FOLDER

torchtitan knows GPUs alone. Here its device is the CPU and its monitor of GPU memory is told a fixed size; and it does
not shorten timeouts after the first step, for which torch 2.13 lacks `torch.distributed.set_timeout`. Everything else
is its own: configuration, meshes, parallelisation and pipelining through the model's spec, initial weights, loss,
clipping, optimiser and checkpoints.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.tools import utils


class Cpu(SimpleNamespace):
    """What torchtitan asks of a device's module."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name, lambda *_, **__: None)


utils.device_type = "cpu"
utils.device_module = Cpu(
    get_device_name=lambda _: "cpu",
    current_device=lambda: 0,
    get_device_properties=lambda _: SimpleNamespace(total_memory=2**30),
    memory_stats=lambda _: {},
)

from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from tests.torchtitan.cases import CASES, CONTEXT, SHAPE, STEPS, VOCABULARY, Case  # noqa: E402
from twoaxis.integrations.torchtitan import model_spec, write_config  # noqa: E402
from twoaxis.parallel.shard import whole_tensor  # noqa: E402

if not hasattr(dist, "set_timeout"):
    dist_utils.set_pg_timeouts = lambda **_: None


class Words(BaseTokenizer):
    """No words: rows are numbers already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, **kwargs: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Rows(BaseDataLoader):
    """Random rows, the same for any number of processes: each has its part of every batch of eight."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Any, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **kwargs: Any) -> None:
        self.share, self.size, self.at = (dp_rank, dp_world_size), local_batch_size, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            per = 8 // self.share[1]  # rows of this process in a batch, which it has in pieces of its size
            batch, row = divmod(self.at * self.size, per)
            first = batch * 8 + self.share[0] * per + row
            rows = [
                torch.randint(0, VOCABULARY, (CONTEXT + 1,), generator=torch.Generator().manual_seed(first + n))
                for n in range(self.size)
            ]
            self.at += 1
            tokens = torch.stack(rows)
            half = torch.arange(CONTEXT) % (CONTEXT // 2)  # two documents in each row
            yield {"input": tokens[:, :-1], "positions": half.expand(self.size, -1).contiguous()}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict["at"]


def config(folder: Path, case: Case) -> Trainer.Config:
    """A run of a few steps, the batch of all processes being eight rows."""
    shares = case.parallel.get("data_parallel_shard_degree", 1) * case.parallel.get("data_parallel_replicate_degree", 1)
    return Trainer.Config(
        model_spec=model_spec(case.name, **SHAPE | case.fields),
        dump_folder=str(folder),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        tokenizer=Words.Config(),
        dataloader=Rows.Config(),
        optimizer=default_adamw(lr=1e-2, implementation="for-loop"),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0),
        training=TrainingConfig(
            local_batch_size=8 // shares // case.accumulate,
            global_batch_size=8,
            seq_len=CONTEXT,
            steps=STEPS,
            max_norm=case.clip,
            mixed_precision_param=case.dtype,
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            spmd_backend="partial_dtensor", **{"data_parallel_shard_degree": 1} | case.parallel
        ),
        activation_checkpoint=FullAC.Config() if case.recompute else None,
        checkpoint=CheckpointManager.Config(
            enable=case.saved, interval=STEPS, last_save_model_only=True, last_save_in_hf=True
        ),
    )


def run(folder: Path, case: Case) -> dict[str, Any]:
    """Train: losses and norms of every step, and the sum of each weight at the end."""
    asked = config(folder / case.name, case)
    trainer = asked.build()
    log: list[Any] = []
    trainer.metrics_processor.should_log = lambda step: True
    trainer.metrics_processor.log = lambda step, loss, most, norm, **more: log.append((loss, norm))
    trainer.train()
    sums = {
        n: whole_tensor(p.detach()).double().abs().sum().item() for n, p in trainer.model_parts[0].named_parameters()
    }
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (log, sums))
    if dist.get_rank() == 0 and case.saved:
        write_config(asked.model_spec, folder / case.name / "checkpoint" / f"step-{STEPS}")
    trainer.close()
    whole = {name: value for _, theirs in gathered for name, value in theirs.items()}
    return {"case": case.name, "log": max((log for log, _ in gathered), key=lambda its: its[0][0]), "sums": whole}


def main(folder: Path) -> None:
    """Run the cases of as many processes as there are."""
    torch.set_num_threads(1)
    for case in CASES:
        if case.processes == int(os.environ["WORLD_SIZE"]):
            record = run(folder, case)
            if dist.get_rank() == 0:
                print(json.dumps(record), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
