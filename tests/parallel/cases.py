"""Models on several processes against one, for every stream, mixer and Blend: run by torchrun, one line per case.

    torchrun --nproc-per-node 2 -m tests.parallel.cases shard tensor 1f1b ... [--all] [--double] [--part=2/5]

Without --all five models are taken. Of those that are taken --part has the second, seventh, twelfth, ... alone, so that
a sweep of hours can be made in slices.

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
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from twoaxis.depth.registry import STREAMS, stream_names
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.model.loss import logits_of
from twoaxis.model.stages import plan
from twoaxis.parallel.pipeline import Pipeline
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


KV = "depth_kv", True
"""Stream and Blend whose gate mixes keys and values."""


def cases(every: bool) -> Iterator[dict[str, Any]]:
    """Fields of models."""
    yield from FAST
    if every:
        for name in stream_names():
            for options in STREAMS.find(name).variants:
                heads = {"kv_heads": SHAPE["num_key_value_heads"]} if "kv_heads" in options else {}
                yield {"stream": name, "stream_options": dict(options) | heads}
            with torch.device("meta"):
                blends = Decoder(ModelConfig(**SHAPE, stream=name)).stream.unblendable() is None
            if blends:
                yield {"stream": name, "blend": True}
        for name in mixer_names():
            for options in MIXERS.find(name).variants:
                yield {"mixer": name, "mixer_options": dict(options)}


def make(fields: Mapping[str, Any]) -> Any:
    """A decoder, or a transformers model of a family, away from its start, where many gradients are zero."""
    if "family" not in fields:
        model: Any = Decoder(ModelConfig(**SHAPE | dict(fields)))
    else:
        from transformers import AutoConfig, AutoModelForCausalLM

        from twoaxis.model.graft import graft

        more = {"num_local_experts": 4, "num_experts_per_tok": 2} if fields["family"] == "mixtral" else {"head_dim": 4}
        config = AutoConfig.for_model(fields["family"], **SHAPE, max_position_embeddings=64, **more)
        torch.manual_seed(0)
        methods = {name: value for name, value in fields.items() if name != "family"}
        model = graft(AutoModelForCausalLM.from_config(config), **methods, start="paper").train()
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


def backward(model: Any, x: Tensor, shares: int = 1) -> Tensor:
    """The loss of a batch, its gradients left in the parameters."""
    loss = loss_of(logits_of(model(input_ids=x, use_cache=False)), x) * shares
    loss.backward()
    return loss.detach()


def worst(loss: float, grads: Mapping[str, Tensor | None], model: Any) -> float:
    """The largest error against one process."""
    whole = copy.deepcopy(model)
    want = float(backward(whole, batch()))
    return difference(loss, grads, want, {name: p.grad for name, p in whole.named_parameters()})


def against_one(loss: Tensor, parted: nn.Module, model: Any) -> dict[str, Any]:
    """The error of a model in parts, whose processes have a loss each."""
    dist.all_reduce(loss)
    grads = {name: None if p.grad is None else whole_tensor(p.grad) for name, p in parted.named_parameters()}
    return {"error": worst(float(loss) / dist.get_world_size(), grads, model)}


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


def mine(x: Tensor, part: int, parts: int) -> Tensor:
    return x.chunk(parts)[part]


@cache
def mesh_of(**degrees: int) -> DeviceMesh:
    """A mesh of these dimensions, made once: every new one has groups whose threads wake up until the process ends."""
    return init_device_mesh("cpu", tuple(degrees.values()), mesh_dim_names=tuple(degrees))


def check_shard(fields: Mapping[str, Any], *, recompute: int = 0, meta: bool = False) -> dict[str, Any]:
    """FSDP2 over all processes, twice, so that what a first pass leaves is seen."""
    model, world, rank = make(fields), dist.get_world_size(), dist.get_rank()
    mesh = mesh_of(data=world)
    sharded = copy.deepcopy(model)
    if meta:
        with torch.device("meta"):
            sharded = Decoder(model.config)
    shard(sharded, mesh, recompute=recompute)
    if meta:
        materialise(sharded, torch.device("cpu"), model if rank == 0 else None)
    loss, x = torch.zeros(()), mine(batch(), rank, world)
    for _ in range(2):
        sharded.zero_grad()
        loss = backward(sharded, x, world)
    return against_one(loss, sharded, model)


def check_tensor(fields: Mapping[str, Any], *, data: int = 1) -> dict[str, Any]:
    """Tensor parallelism over all processes, or over halves of them with FSDP2 between."""
    model, world = make(fields), dist.get_world_size()
    mesh = mesh_of(data=data, tensor=world // data)
    spread = copy.deepcopy(model)
    norms = spread_tensors(spread, mesh["tensor"])
    if data > 1:
        shard(spread, mesh["data"])
    loss = backward(spread, mine(batch(), mesh.get_local_rank("data"), data), data)
    add_partial(norms, mesh["tensor"])
    return against_one(loss, spread, model)


def check_pipeline(
    fields: Mapping[str, Any], *, schedule: Any = "1f1b", virtual: int = 1, cached: bool = True, data: int = 1
) -> dict[str, Any]:
    """A pipeline over all processes, or over parts of them with FSDP2 between."""
    blocks = max(4, dist.get_world_size() // data * virtual)
    model, world = make(dict(fields) | {"num_hidden_layers": blocks}), dist.get_world_size()
    stages = world // data
    mesh = mesh_of(pipeline=stages, data=data)

    cut = copy.deepcopy(model)
    pipeline = Pipeline(
        cut,
        schedule=schedule,
        virtual=virtual,
        micro_batches=4,
        loss=lambda logits, labels: loss_of(logits, labels) * data,
        rows=ROWS // 4 // data,
        context=CONTEXT,
        group=mesh.get_group("pipeline"),
        data=mesh["data"] if data > 1 else None,
        cached=cached,
    )
    total = torch.zeros(())
    for _ in range(2):
        cut.zero_grad()
        x = mine(batch(), mesh.get_local_rank("data"), data)
        loss = pipeline.step(x, x)
        pipeline.add_shared()
        total = torch.zeros(()) if loss is None else loss.clone()
    dist.all_reduce(total)
    own = {name: None if p.grad is None else whole_tensor(p.grad) for name, p in cut.named_parameters()}
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, (own, [(stage.blocks.start, stage.sent) for stage in pipeline.stages]))
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
        "left": sum(len(shelf) for stage in pipeline.stages for shelf in stage.shelves),
    }


WHAT: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "shard": check_shard,
    "recompute": partial(check_shard, recompute=2),
    "meta": partial(check_shard, meta=True),
    "tensor": check_tensor,
    "shard-tensor": partial(check_tensor, data=2),
    "graft-shard": check_shard,
    "graft-tensor": check_tensor,
    "gpipe": partial(check_pipeline, schedule="gpipe"),
    "1f1b": partial(check_pipeline, schedule="1f1b"),
    "interleaved": partial(check_pipeline, schedule="interleaved", virtual=2),
    "interleaved-whole": partial(check_pipeline, schedule="interleaved", virtual=2, cached=False),
    "shard-pipeline": partial(check_pipeline, schedule="1f1b", data=2),
    "shard-interleaved": partial(check_pipeline, schedule="interleaved", virtual=2, data=2),
}


def main(words: list[str]) -> None:
    """See above."""
    assert "transformers" not in sys.modules, "a decoder on several processes needs torch alone"
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64 if "--double" in words else torch.float32)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    part, parts = next((map(int, word[7:].split("/")) for word in words if word.startswith("--part=")), (1, 1))
    for what in [word for word in words if not word.startswith("--")]:
        taken = GRAFTS if what.startswith("graft") else tuple(cases("--all" in words))
        for fields in taken[part - 1 :: parts]:
            learned = "over" in fields.get("stream_options", {}) or (fields.get("stream"), fields.get("blend")) == KV
            if "tensor" in what and learned:
                continue  # heads that a method learns to mix are not spread: refused by name
            record = {"what": what, "case": fields} | WHAT[what](fields)
            if dist.get_rank() == 0:
                print(json.dumps(record), flush=True)
    dist.barrier()  # nobody closes a connection that another process still reads from
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
