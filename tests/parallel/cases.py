"""Models on several processes against one, for every stream, mixer and Blend: run by torchrun, one line per case.

    torchrun --nproc-per-node 2 -m tests.parallel.cases shard tensor pipeline ... [--all]

Each line of the first process is a JSON record: what, case, error (largest difference of any gradient as a part of the
largest gradient, or of the loss), payload (bytes per token over each boundary) and planned.
"""

from __future__ import annotations

import copy
import datetime
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from twoaxis.depth.registry import STREAMS, stream_names
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.model.stages import plan
from twoaxis.parallel.pipeline import Pipeline, shard_stage
from twoaxis.parallel.shard import materialise, shard, whole_tensor
from twoaxis.parallel.tensor import add_partial, spread_tensors
from twoaxis.sequence.registry import MIXERS, mixer_names

ROWS, CONTEXT, VOCABULARY = 8, 12, 40
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
}
FAST = (
    {"stream": "standard", "qk_norm": True, "tie_word_embeddings": False},
    {"stream": "attention_residuals"},
    {"stream": "denseformer", "stream_options": {"dilation": 2}},
    {"stream": "hyper_connections", "blend": True},
    {"stream": "deep_delta", "mixer": "short_conv"},
)
"""What `make test` runs: each family of memory, a Blend, a mixer, an untied head, norms of queries and keys."""


def cases(every: bool) -> Iterator[dict[str, Any]]:
    """Fields of models."""
    yield from FAST
    if every:
        for name in stream_names():
            for options in STREAMS.find(name).variants:
                yield {"stream": name, "stream_options": dict(options)}
            yield {"stream": name, "blend": True}
        for name in mixer_names():
            for options in MIXERS.find(name).variants:
                yield {"mixer": name, "mixer_options": dict(options)}


def make(fields: Mapping[str, Any]) -> Decoder:
    """A model whose routing is away from its start, where many gradients are zero."""
    model = Decoder(ModelConfig(**SHAPE | dict(fields)))
    shake(model)
    return model


@torch.no_grad()
def shake(model: nn.Module) -> None:
    """Move routing and norms, each tensor by its name."""
    for name, parameter in model.named_parameters():
        if "stream." in name or "norm" in name:
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.1)


def batch(seed: int = 5) -> Tensor:
    return torch.randint(0, VOCABULARY, (ROWS, CONTEXT), generator=torch.Generator().manual_seed(seed))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """A share of the mean loss of the batch, in the dtype of the logits."""
    nats = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return nats / (ROWS * (CONTEXT - 1))


def reference(model: Decoder) -> tuple[float, dict[str, Tensor | None]]:
    """Loss and gradients in one process."""
    whole, x = copy.deepcopy(model), batch()
    loss = loss_of(whole(x), x)
    loss.backward()
    return float(loss.detach()), {name: parameter.grad for name, parameter in whole.named_parameters()}


def worst(loss: float, grads: Mapping[str, Tensor | None], model: Decoder) -> float:
    """The largest error against one process."""
    return difference(loss, grads, *reference(model))


def difference(
    loss: float, grads: Mapping[str, Tensor | None], want_loss: float, want: Mapping[str, Tensor | None]
) -> float:
    """The largest error; a gradient that is missing or too many is infinitely wrong."""
    largest = max(float(g.abs().max()) for g in want.values() if g is not None)
    error = abs(loss - want_loss) / abs(want_loss)
    for name, g in want.items():
        mine = grads.get(name)
        if g is None and mine is None:
            continue
        if g is None or mine is None:
            # an engine may give zeros where autograd gives nothing
            other = mine if g is None else g
            error = max(error, 0.0 if other is not None and not other.any() else float("inf"))
            continue
        error = max(error, float((mine - g).abs().max()) / largest)
    return error


GRAFTS = (
    {"family": "llama", "stream": "attention_residuals"},
    {"family": "qwen3", "stream": "hyper_connections", "blend": True},
    {"family": "mixtral", "stream": "denseformer"},
    {"family": "llama", "stream": "deep_delta", "mixer": "short_conv"},
)
"""Families whose layers keep their own loop, one of them a mixture of experts."""


def make_graft(fields: Mapping[str, Any]) -> nn.Module:
    """A small transformers model with a stream, away from its start."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from twoaxis.model.graft import graft

    more = {"num_local_experts": 4, "num_experts_per_tok": 2} if fields["family"] == "mixtral" else {"head_dim": 4}
    names = SHAPE | {"max_position_embeddings": 64} | more
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields["family"], **names))
    methods = {name: value for name, value in fields.items() if name != "family"}
    made = graft(model, **methods, start="paper")
    shake(made)
    return made.train()


def check_graft(fields: Mapping[str, Any], *, tensor: bool = False) -> dict[str, Any]:
    """FSDP2 per layer, or the family's own plan of tensor parallelism, over all processes."""
    model, world, rank = make_graft(fields), dist.get_world_size(), dist.get_rank()
    mesh, parted, x = init_device_mesh("cpu", (world,)), copy.deepcopy(model), batch()
    whole = loss_of(model(input_ids=x, use_cache=False).logits, x)
    whole.backward()
    if tensor:
        tensors = spread_tensors(parted, mesh)
        loss = loss_of(parted(input_ids=x, use_cache=False).logits, x)
        loss.backward()
        add_partial(tensors, mesh)
    else:
        shard(parted, mesh)
        x = mine(x, rank, world)
        loss = loss_of(parted(input_ids=x, use_cache=False).logits, x) * world
        loss.backward()
    total = loss.detach()
    dist.all_reduce(total)
    want = {name: p.grad for name, p in model.named_parameters()}
    grads = {name: None if p.grad is None else whole_tensor(p.grad) for name, p in parted.named_parameters()}
    return {"error": difference(float(total) / world, grads, float(whole.detach()), want)}


def mine(x: Tensor, part: int, parts: int) -> Tensor:
    return x.chunk(parts)[part]


def check_shard(fields: Mapping[str, Any], *, recompute: int = 0, meta: bool = False) -> dict[str, Any]:
    """FSDP2 over all processes, twice, so that what a first pass leaves is seen."""
    model, world, rank = make(fields), dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world,))
    sharded = copy.deepcopy(model)
    if meta:
        with torch.device("meta"):
            sharded = Decoder(model.config)
    shard(sharded, mesh, recompute=recompute)
    if meta:
        materialise(sharded, torch.device("cpu"), model if rank == 0 else None)
    loss = torch.zeros(())
    for _ in range(2):
        sharded.zero_grad()
        x = mine(batch(), rank, world)
        loss = loss_of(sharded(x), x) * world
        loss.backward()
    loss = loss.detach()
    dist.all_reduce(loss)
    grads = {name: None if p.grad is None else whole_tensor(p.grad) for name, p in sharded.named_parameters()}
    return {"error": worst(float(loss) / world, grads, model)}


def check_tensor(fields: Mapping[str, Any], *, data: int = 1) -> dict[str, Any]:
    """Tensor parallelism over all processes, or over halves of them with FSDP2 between."""
    model, world = make(fields), dist.get_world_size()
    mesh = init_device_mesh("cpu", (data, world // data), mesh_dim_names=("data", "tensor"))
    spread = copy.deepcopy(model)
    tensors = spread_tensors(spread, mesh["tensor"])
    if data > 1:
        shard(spread, mesh["data"])
    x = mine(batch(), mesh.get_local_rank("data"), data)
    loss = loss_of(spread(x), x) * data
    loss.backward()
    add_partial(tensors, mesh["tensor"])
    loss = loss.detach()
    dist.all_reduce(loss)
    grads = {name: None if p.grad is None else whole_tensor(p.grad) for name, p in spread.named_parameters()}
    return {"error": worst(float(loss) / world, grads, model), "spread": len(tensors.spread)}


def check_pipeline(
    fields: Mapping[str, Any], *, schedule: Any = "1f1b", virtual: int = 1, cached: bool = True, data: int = 1
) -> dict[str, Any]:
    """A pipeline over all processes, or over parts of them with FSDP2 between."""
    blocks = max(4, dist.get_world_size() // data * virtual)
    model, world = make(dict(fields) | {"num_hidden_layers": blocks}), dist.get_world_size()
    stages = world // data
    mesh = init_device_mesh("cpu", (stages, data), mesh_dim_names=("pipeline", "data"))

    pipeline = Pipeline(
        copy.deepcopy(model),
        schedule=schedule,
        stages=stages,
        virtual=virtual,
        micro_batches=4,
        loss=lambda logits, labels: loss_of(logits, labels) * data,
        rows=ROWS // 4 // data,
        context=CONTEXT,
        group=mesh.get_group("pipeline"),
        cached=cached,
        shard=(lambda stage: shard_stage(stage, mesh["data"])) if data > 1 else (lambda stage: None),
    )
    total = torch.zeros(())
    for _ in range(2):
        for _, p in pipeline.named_parameters():
            p.grad = None
        x = mine(batch(), mesh.get_local_rank("data"), data)
        loss = pipeline.step(x, x)
        pipeline.add_shared()
        pipeline.add_data(mesh["data"]) if data > 1 else None
        total = torch.zeros(()) if loss is None else loss.clone()
    dist.all_reduce(total)
    own = {name: None if p.grad is None else whole_tensor(p.grad) for name, p in pipeline.named_parameters()}
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, (own, [(stage.first, stage.sent) for stage in pipeline.stages]))
    grads: dict[str, Tensor | None] = {}
    sent: dict[int, int] = {}
    for theirs, payload in gathered:
        for name, grad in theirs.items():
            if name in grads and grads[name] is not None:
                assert torch.allclose(grads[name], grad, atol=1e-6), f"{name} differs between stages"  # type: ignore[arg-type]
            grads[name] = grad
        sent |= dict(payload)
    with torch.device("meta"):
        meta = Decoder(model.config)
    planned = plan(meta, stages, virtual) if cached else plan(meta, stages * virtual)
    return {
        "error": worst(float(total) / data, grads, model),
        "payload": [sent[first] for first in sorted(sent)][:-1],
        "planned": [b.cached for b in planned.boundaries],
        "left": sum(len(s.shelves or {}) for s in pipeline.stages),
    }


WHAT: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "shard": check_shard,
    "recompute": partial(check_shard, recompute=2),
    "meta": partial(check_shard, meta=True),
    "tensor": check_tensor,
    "shard-tensor": partial(check_tensor, data=2),
    "graft-shard": check_graft,
    "graft-tensor": partial(check_graft, tensor=True),
    "gpipe": partial(check_pipeline, schedule="gpipe"),
    "1f1b": partial(check_pipeline, schedule="1f1b"),
    "interleaved": partial(check_pipeline, schedule="interleaved", virtual=2),
    "interleaved-whole": partial(check_pipeline, schedule="interleaved", virtual=2, cached=False),
    "shard-pipeline": partial(check_pipeline, schedule="1f1b", data=2),
    "shard-interleaved": partial(check_pipeline, schedule="interleaved", virtual=2, data=2),
}


def main(words: list[str]) -> None:
    """See above."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64 if "--double" in words else torch.float32)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    for what in [word for word in words if not word.startswith("--")]:
        for fields in GRAFTS if what.startswith("graft") else cases("--all" in words):
            record = {"what": what, "case": fields} | WHAT[what](fields)
            if dist.get_rank() == 0:
                print(json.dumps(record), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
