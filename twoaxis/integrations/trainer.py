"""transformers' Trainer with accelerate's FSDP2, for a model with a stream.

    Trainer(model, TrainingArguments(..., bf16=True, fsdp=True), callbacks=[Float32Stream()], ...)

A graft says itself which of its modules are units (`_no_split_modules`, the family's fsdp plan), so that without the
callback everything works in float32. In bfloat16 accelerate casts the parameters of every unit, those that route too,
and the state that a layer gets. The callback makes the stream a unit of its own, in float32, and leaves the state as it
is; layers compute in bfloat16, by their parameters and Trainer's autocast.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from accelerate.state import AcceleratorState
from torch.distributed.device_mesh import init_device_mesh
from transformers import TrainerCallback, TrainingArguments

from twoaxis.parallel.shard import shard_stream


class Float32Stream(TrainerCallback):
    """Callback that keeps a stream float32 when Trainer shards its model by FSDP2."""

    def on_init_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Shard the stream before accelerate shards the rest, which passes by what is sharded."""
        if not args.fsdp:
            return
        shard_stream(kwargs["model"], init_device_mesh(args.device.type, (args.world_size,)))
        plugin = getattr(AcceleratorState(), "fsdp_plugin", None)
        if plugin is not None and plugin.mixed_precision_policy is not None:
            kept = dataclasses.replace(plugin.mixed_precision_policy, cast_forward_inputs=False)
            plugin.mixed_precision_policy = kept
