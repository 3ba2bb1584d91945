"""What a user of transformers' Trainer does, on two processes and on one: run by torchrun, or alone.

    torchrun --nproc-per-node 2 -m tests.parallel.ordinary FOLDER

Accelerate takes FSDP2 for GPUs alone and silently trains replicas on CPUs, so that it is switched on here by hand,
after Trainer is made and before it trains; from there on everything is Trainer's and accelerate's own.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")

from accelerate.state import AcceleratorState, PartialState  # noqa: E402
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments  # noqa: E402
from transformers.distributed.configuration_utils import DistributedConfig  # noqa: E402

from tests.parallel.cases import CONTEXT, VOCABULARY, differences, make  # noqa: E402
from twoaxis.integrations.trainer import Float32Stream  # noqa: E402
from twoaxis.model.graft import TwoAxisForCausalLM  # noqa: E402
from twoaxis.parallel.shard import whole_tensor  # noqa: E402

CASE = {"family": "llama", "stream": "attention_residuals"}


class Examples(torch.utils.data.Dataset[dict[str, Any]]):
    """Random rows."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = torch.randint(0, VOCABULARY, (CONTEXT,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Fsdp2(TrainerCallback):
    """Has accelerate shard on CPUs, before other callbacks see the trainer."""

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        plugin = FullyShardedDataParallelPlugin(**args.fsdp_plugin_args)
        if args.bf16:
            plugin.set_mixed_precision("bf16")
        AcceleratorState().fsdp_plugin = plugin
        for state_of in (PartialState, AcceleratorState):
            state_of._shared_state["distributed_type"] = DistributedType.FSDP


def train(folder: Path, model: Any, sharded: bool, bf16: bool = False, keep: bool = False) -> dict[str, Any]:
    """Losses and norms of Trainer's log, the units that were made, and the dtypes that the stream computes in."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=8 // world,
        max_steps=4,
        logging_steps=1,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        bf16=bf16,
        fsdp="full_shard" if sharded else None,
        optim="adamw_torch",
    )
    seen: set[str] = set()
    stream = type(model.stream)  # sharding gives it another one
    opened = stream._open

    def watched(self: Any, x: Any, *more: Any, **options: Any) -> Any:
        seen.update(str(parameter.dtype) for parameter in self.parameters())
        return opened(self, x, *more, **options)

    stream._open = watched
    callbacks = [*([Fsdp2()] if sharded else []), *([Float32Stream()] if keep else [])]
    trainer = Trainer(model, arguments, train_dataset=Examples(), callbacks=callbacks)
    trainer.is_fsdp_enabled = sharded
    trainer.train()
    stream._open = opened
    log = [{k: entry[k] for k in ("loss", "grad_norm")} for entry in trainer.state.log_history if "loss" in entry]
    units = sum(isinstance(module, FSDPModule) for module in model.modules())
    layers = sum(isinstance(module, FSDPModule) for module in model.backbone.model.layers)
    if sharded and not bf16:
        trainer.save_model(str(folder / "saved"))
        whole = {name: whole_tensor(p.detach()) for name, p in model.named_parameters()}
        dist.barrier()
        loaded = dict(TwoAxisForCausalLM.from_pretrained(folder / "saved").named_parameters())
        assert whole.keys() == loaded.keys()
        assert all(torch.equal(whole[name], loaded[name]) for name in whole)
    return {"log": log, "units": units, "layers": layers, "dtypes": sorted(seen)}


def main(folder: Path) -> None:
    """See above."""
    torch.set_num_threads(1)
    if "WORLD_SIZE" not in os.environ:
        made = make(CASE)
        made.save_pretrained(folder / "start")
        print(json.dumps(train(folder, made, False)))
        return
    records = {
        "plain": train(folder, make(CASE), True),
        "kept": train(folder, make(CASE), True, keep=True),
        "bf16": train(folder, make(CASE), True, bf16=True),
        "bf16 kept": train(folder, make(CASE), True, bf16=True, keep=True),
    }
    for number in range(20):  # every process writes at once
        make(CASE).save_pretrained(folder / f"several-{number % 2}")
    # transformers' own plans, without accelerate
    rank, tokens = dist.get_rank(), torch.stack([Examples()[index]["input_ids"] for index in range(8)])
    whole = TwoAxisForCausalLM.from_pretrained(folder / "start")
    alone = whole(input_ids=tokens, labels=tokens, use_cache=False).loss
    alone.backward()
    plans = {"fsdp": DistributedConfig(fsdp_size=2), "tp": DistributedConfig(tp_size=2)}
    for name, spread in plans.items():
        mine = tokens if name == "tp" else tokens.chunk(2)[rank]
        model = AutoModelForCausalLM.from_pretrained(folder / "start", distributed_config=spread)
        loss = model(input_ids=mine, labels=mine, use_cache=False).loss
        loss.backward()
        total = loss.detach()
        dist.all_reduce(total)
        want = {key: cast(torch.Tensor, p.grad) for key, p in whole.named_parameters()}
        grads = {key: whole_tensor(cast(torch.Tensor, p.grad)) for key, p in model.named_parameters()}
        records[name] = {
            "loss": float(total) / 2,
            "alone": float(alone),
            "error": max(differences(float(total) / 2, grads, float(alone), want).values()),
            "units": sum(isinstance(module, FSDPModule) for module in model.modules()),
            "parts": sum(isinstance(p, DTensor) and p.to_local().numel() < p.numel() for p in model.parameters()),
        }
    if rank == 0:
        print(json.dumps(records))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
