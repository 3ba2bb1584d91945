"""Our decoder as a model of torchtitan 0.3: its trainer, data, optimiser and checkpoints, our streams and mixers.

`model_spec` is what torchtitan's `Trainer.Config` takes; docs/howto/scale.md has the file that starts a run.

Data parallelism, replicated and sharded, and pipelines are those of `twoaxis.parallel`, with the degrees of
torchtitan's configuration; the stream stays float32 whatever blocks compute in. What is not offered is refused by name
when the trainer reads its configuration: torchtitan's clipping wants all gradients on one mesh, and a stream that is
whole on every device of tensor parallelism or of a pipeline is on no mesh.
"""

# torchtitan is installed in an environment of its own.
# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from twoaxis.base.files import write_json
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.model.decoder_as_graft import decoder_key, graft_document, graft_key
from twoaxis.model.flops import training_flops
from twoaxis.parallel.pipeline import Pipeline, Schedule
from twoaxis.parallel.shard import materialise, shard, units

SCHEDULES: dict[str, Schedule] = {"GPipe": "gpipe", "1F1B": "1f1b", "Interleaved1F1B": "interleaved"}


class TwoAxisModel(Decoder, BaseModel):
    """A `Decoder` that torchtitan's trainer builds, parallelises and initialises."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """What torchtitan keeps of the model: fields of the decoder, and the seed of its weights."""

        fields: dict[str, Any] = field(default_factory=dict)
        seed: int = 0

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Refuse what is not offered, before anything is built."""
            asked, recompute, one_of = config.parallelism, config.activation_checkpoint, ", ".join(SCHEDULES)
            pipelined, schedule = asked.pipeline_parallel_degree > 1, asked.pipeline_parallel_schedule
            data = asked.data_parallel_shard_degree != 1 or asked.data_parallel_replicate_degree > 1
            every, chunked = isinstance(recompute, FullAC.Config | None), ChunkedLossWrapper.Config
            for refused, what in (
                (asked.spmd_backend != "partial_dtensor", f"spmd_backend {asked.spmd_backend}; give partial_dtensor"),
                (asked.context_parallel_degree > 1, "context_parallel_degree"),
                (asked.expert_parallel_degree > 1, "expert_parallel_degree"),
                (asked.tensor_parallel_degree > 1, "tensor_parallel_degree; twoaxis train --parallel tp=N does"),
                (pipelined and data, "pipeline_parallel_degree with data_parallel degrees other than 1"),
                (pipelined and schedule not in SCHEDULES, f"pipeline_parallel_schedule {schedule}; give {one_of}"),
                (isinstance(config.loss, chunked), "ChunkedLossWrapper, which wants the head; give CrossEntropyLoss"),
                (not every, f"activation_checkpoint {type(recompute).__qualname__}; give FullAC or None"),
            ):
                if refused:
                    raise ValueError(f"twoaxis models in torchtitan do not offer {what}")

        def get_nparams_and_flops(self, model: Any, seq_len: int) -> tuple[int, int]:
            """Parameters, and operations per token of a training step."""
            return sum(p.numel() for p in model.parameters()), training_flops(model, seq_len).total

    narrow: torch.dtype | None = None  # that blocks compute in; None is that of the weights

    def __init__(self, config: Config) -> None:
        Decoder.__init__(self, ModelConfig(**config.fields))
        self.seed = config.seed

    def verify_module_protocol(self) -> None:
        """Nothing: our modules are torch's own kind."""

    def forward(self, tokens: Tensor, positions: Tensor | None = None, **kwargs: Any) -> Tensor:  # pyright: ignore
        """Logits; `positions` start from 0 in every document."""
        # operators cast what they take, and nobody casts the stream's state
        with torch.autocast(tokens.device.type, self.narrow, enabled=self.narrow is not None):
            return super().forward(tokens, positions)

    @torch.no_grad()
    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Give every process its parts of the initial weights, which the first one makes."""
        with torch.device("cpu"):
            whole = Decoder(self.config, self.seed) if dist.get_rank() == 0 else None
        materialise(self, next(self.parameters()).device, whole)


def parallelize(model: TwoAxisModel, **given: Any) -> nn.Module:
    """Shard a model of the meta device in place, by torchtitan's meshes; its trainer divides gradients itself."""
    asked, blocks = SimpleNamespace(**given), _prepared(model, **given)
    names = ["dp_replicate", "fsdp"] if asked.parallel_dims.dp_replicate_enabled else ["fsdp"]
    reshard = asked.parallelism.fsdp_reshard_after_forward != "never"
    shard(model, asked.parallel_dims.get_mesh(names), dtype=model.narrow, reshard=reshard, **blocks)
    disable_fsdp_gradient_division(model)
    for unit in units(model):
        if not torch.cuda.is_available():
            unit.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it adds
    return model


def pipeline(model: TwoAxisModel, **given: Any) -> tuple[Any, list[nn.Module], bool, bool]:
    """The schedule, this process's part of the model, and whether it has the first and the last stage."""
    asked, blocks = SimpleNamespace(**given), _prepared(model, **given)
    chosen, stages = asked.parallelism, asked.parallel_dims.pp
    schedule, rows = SCHEDULES[chosen.pipeline_parallel_schedule], chosen.pipeline_parallel_microbatch_size
    per = chosen.pipeline_parallel_layers_per_stage
    chunks = 2 if per is None else model.config.num_hidden_layers // (per * stages)
    made = Pipeline(
        model,
        schedule=schedule,
        virtual=chunks if schedule == "interleaved" else 1,
        micro_batches=asked.training.local_batch_size // rows,
        loss=lambda logits, labels, **more: asked.loss_fn(logits, labels, **more)[0],
        rows=rows,
        context=asked.training.seq_len,
        group=asked.parallel_dims.get_mesh("pp").get_group(),
        device=asked.device,
        narrow=model.narrow,
        **blocks,
    )
    return SharedSchedule(made, model), [model], made.first, made.last


def _prepared(model: TwoAxisModel, training: Any, compile_config: Any, ac_config: Any, **_: Any) -> dict[str, Any]:
    """How blocks are run, as `shard` and `Pipeline` take it."""
    dtype = TORCH_DTYPE_MAP[training.mixed_precision_param]
    model.narrow = None if dtype == torch.float32 else dtype
    compile = compile_config.enable and "model" in compile_config.components
    return {"recompute": 0 if ac_config is None else 1, "compile": compile}


class SharedSchedule:
    """A pipeline's schedule that completes the gradients of parameters which several stages have."""

    def __init__(self, pipeline: Pipeline, model: nn.Module) -> None:
        self.pipeline, self.model = pipeline, model

    def step(self, **kwargs: Any) -> Any:
        """As torchtitan calls it; the sums of earlier calls stay in one process alone, so that they are added once."""
        for name, parameter in self.model.named_parameters():
            if not self.pipeline.counted(name):
                parameter.grad = None
        out = _whole(self.pipeline.schedule.step, **kwargs)
        self.pipeline.add_shared()
        return out

    def eval(self, **kwargs: Any) -> Any:
        """As torchtitan calls it."""
        return _whole(self.pipeline.schedule.eval, **kwargs)


def _whole(run: Any, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None, **more: Any) -> Any:
    """Run torch's schedule on a batch, from its micro-batches; it cuts the batch again itself."""
    tokens = [torch.cat([given[0] for given in arg_mbs])] if arg_mbs else []
    if target_mbs:
        more["target"] = torch.cat(target_mbs)
    positions = [given["positions"] for given in kwarg_mbs or () if given.get("positions") is not None]
    return run(*tokens, **more | ({"reach": torch.cat(positions)} if positions else {}))


class GraftAdapter(StateDictAdapter):
    """Renames weights to those of the graft of a family, which `AutoModelForCausalLM` opens, and back."""

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """By the names of the graft."""
        return {graft_key(name): tensor for name, tensor in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """By the names of the decoder."""
        return {decoder_key(name): tensor for name, tensor in hf_state_dict.items()}


def model_spec(name: str = "twoaxis", *, seed: int = 0, **fields: Any) -> ModelSpec:
    """What torchtitan's trainer needs of a model with these fields of `ModelConfig`, called `name` in its log."""
    ModelConfig(**fields)  # what does not fit is refused here
    return ModelSpec(
        name="twoaxis",
        flavor=name,
        model=cast(Any, TwoAxisModel.Config)(fields=fields, seed=seed),
        parallelize_fn=parallelize,
        pipelining_fn=pipeline,
        post_optimizer_build_fn=None,
        state_dict_adapter=GraftAdapter,
    )


def write_config(spec: ModelSpec, folder: str | Path) -> None:
    """Write the config.json that belongs to weights which torchtitan saved by `last_save_in_hf`."""
    made = ModelConfig(**cast(Any, spec.model).fields)
    write_json(Path(folder) / "config.json", graft_document(made, torch.float32))
