"""Models on several processes against one, for every stream, mixer and Blend: run by torchrun, one line per case.

    torchrun --nproc-per-node 2 -m tests.parallel.cases shard tensor 1f1b ... [--all] [--double] [--part=2/5]

Without --all a few models are taken. Of those that are taken --part has the second, seventh, twelfth, ... alone, so
that a sweep can be made in slices.

Each line of the first process is a JSON record: what, case, error (the largest of the loss and of any gradient, each as
a part of its own), payload (bytes per token over each boundary) and planned; or why it was refused. In float32
`roundings` is the largest of the errors above 2e-6 as a multiple of how far one process is off the exact gradient.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache, lru_cache, partial, partialmethod
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from twoaxis.depth.registry import STREAMS, stream_names
from twoaxis.model.config import Methods, ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.model.loss import logits_of
from twoaxis.model.stages import plan
from twoaxis.parallel.pipeline import Pipeline
from twoaxis.parallel.shard import materialise, shard, whole_tensor
from twoaxis.parallel.tensor import add_partial, spread_tensors
from twoaxis.sequence.registry import MIXERS, mixer_names

ROWS, CONTEXT, VOCABULARY = 8, 12, 40
SINGLE = 2e-6
"""The error that float32 may have."""
SMALL = 1e-4
"""Gradients below this part of the largest may be sums that cancel, and nothing but rounding."""
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
                heads = {"kv_heads": SHAPE["num_key_value_heads"]} if "kv_heads" in options else {}
                yield {"stream": name, "stream_options": dict(options) | heads}
            with torch.device("meta"):
                blends = Decoder(ModelConfig(**SHAPE, stream=name)).stream.unblendable() is None
            if blends:
                yield {"stream": name, "blend": True}
        for name in mixer_names():
            for options in MIXERS.find(name).variants:
                yield {"mixer": name, "mixer_options": dict(options)}


FAMILIES = "llama", "mixtral"
"""Whose layers keep their own loop; the second is a mixture of experts."""
GRAFTS = (
    {"family": "llama", "stream": "attention_residuals"},
    {"family": "mixtral", "stream": "hyper_connections", "blend": True},
    {"family": "mixtral", "stream": "denseformer"},
    {"family": "llama", "stream": "deep_delta", "mixer": "short_conv"},
)
"""What stands for them without --all."""


def grafts(every: bool) -> Iterator[dict[str, Any]]:
    """Fields of grafts: those of models that a family has."""
    yield from GRAFTS
    if every:
        for family in FAMILIES:
            yield from ({"family": family} | fields for fields in cases(True) if "qk_norm" not in fields)


def make(fields: Mapping[str, Any]) -> Any:
    """A decoder, or a transformers model of a family, away from its start, where many gradients are zero."""
    if "family" not in fields:
        model: Any = Decoder(ModelConfig(**SHAPE | dict(fields)))
    else:
        from transformers import AutoConfig, AutoModelForCausalLM

        from twoaxis.model.graft import graft

        more = {"num_local_experts": 4, "num_experts_per_tok": 2} if fields["family"] == "mixtral" else {"head_dim": 4}
        config = AutoConfig.for_model(fields["family"], **SHAPE, max_position_embeddings=64, **more)
        config._experts_implementation = "eager"  # others have no kernel for float64
        torch.manual_seed(0)
        methods = Methods(**{name: value for name, value in fields.items() if name != "family"})
        model = graft(AutoModelForCausalLM.from_config(config), methods, start="paper").train()
    shake(model)
    return model


@torch.no_grad()
def shake(model: nn.Module) -> None:
    """Move routing, norms and mixers, each tensor by its name.

    At a mixer that starts at zero Deep Delta has no direction, and gradients 1e4 times as large hide all others.
    """
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("stream.", "norm", "mixer.", "before.", "inside.")):
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


Gradients = Mapping[str, Tensor | None]


@lru_cache(2)
def alone(fields: str, double: bool = False, nudge: int | None = None) -> tuple[float, Gradients]:
    """Loss and gradients of one process, of a model that a nudge rounds otherwise."""
    model = make(json.loads(fields))
    model = model.double() if double else model
    if nudge is not None:
        round_otherwise(model, nudge)
    loss = float(backward(model, batch()))
    return loss, {name: p.grad for name, p in model.named_parameters()}


@torch.no_grad()
def round_otherwise(model: nn.Module, seed: int) -> None:
    """Move weights, and what layers are given and return, by up to half a unit in their last place, and round them."""
    drawn = torch.Generator().manual_seed(seed)

    def moved(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return (x * (1.0 + (torch.rand(x.shape, generator=drawn, dtype=torch.float64) * 2.0 - 1.0) * 2.0**-24)).to(x)

    for parameter in model.parameters():
        parameter.copy_(moved(parameter))
    for module in model.modules():
        if not list(module.children()):
            module.register_forward_pre_hook(lambda _, args: tuple(map(moved, args)))
            module.register_forward_hook(lambda _, args, out: moved(out))


@lru_cache(1)
def inexact(fields: str) -> Mapping[str, float]:
    """By parameter, how far gradients of one process in float32 may be off the exact ones, as values happen to round.

    Two that compute in float32 cannot be expected to be nearer to each other than both are off.
    """
    exact = alone(fields, True)
    found = [differences(*alone(fields, False, nudge), *exact) for nudge in range(8)]
    return {name: max(errors[name] for errors in found) for name in found[0]}


def against_one(loss: Tensor, grads: Gradients, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Errors of a model in parts, in the first process."""
    dist.all_reduce(loss)
    if dist.get_rank():
        return {}
    spelled = json.dumps(fields)
    errors = differences(float(loss), grads, *alone(spelled))
    found = {"error": max(errors.values())}
    if torch.get_default_dtype() == torch.float32:
        over = [error / inexact(spelled)[name] for name, error in errors.items() if error > SINGLE]
        found["roundings"] = max(over, default=0.0)
    return found


def differences(loss: float, grads: Gradients, want_loss: float, want: Gradients) -> dict[str, float]:
    """Errors of the loss and of gradients by name, each as a part of its own largest number.

    A gradient that is missing or too many is infinitely wrong, and one below a part of the largest is a part of that.
    """
    largest = max(float(g.abs().max()) for g in want.values() if g is not None)
    errors = {"loss": abs(loss - want_loss) / abs(want_loss)}
    for name, g in want.items():
        mine = grads.get(name)
        if g is not None and mine is not None:
            errors[name] = float((mine - g).abs().max()) / max(float(g.abs().max()), SMALL * largest)
        else:  # an engine may give zeros where autograd gives nothing
            only = mine if g is None else g
            errors[name] = 0.0 if only is None or not only.any() else float("inf")
    return errors


def mine(x: Tensor, part: int, parts: int) -> Tensor:
    return x.chunk(parts)[part]


@cache
def mesh_of(**degrees: int) -> DeviceMesh:
    """A mesh of these dimensions, made once: every new one has groups whose threads wake up until the process ends."""
    return init_device_mesh("cpu", tuple(degrees.values()), mesh_dim_names=tuple(degrees))


def whole_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """By name; all processes that share a tensor take part."""
    return {name: None if p.grad is None else whole_tensor(p.grad) for name, p in model.named_parameters()}


def check_shard(
    fields: Mapping[str, Any], *, recompute: int = 0, compile: bool = False, meta: bool = False
) -> dict[str, Any]:
    """FSDP2 over all processes, twice, so that what a first pass leaves is seen."""
    world, rank = dist.get_world_size(), dist.get_rank()
    with torch.device("meta") if meta else contextlib.nullcontext():
        sharded = Decoder(ModelConfig(**SHAPE | dict(fields))) if meta else make(fields)
    shard(sharded, mesh_of(data=world), recompute=recompute, compile=compile)
    if meta:
        materialise(sharded, torch.device("cpu"), None if rank else make(fields))
    loss, x = torch.zeros(()), mine(batch(), rank, world)
    for _ in range(2):
        sharded.zero_grad()
        loss = backward(sharded, x, world) / world
    return against_one(loss, whole_gradients(sharded), fields)


def check_compiled(fields: Mapping[str, Any]) -> dict[str, Any]:
    """FSDP2 with blocks that are compiled each by itself, more of them than dynamo would compile of one function.

    Graphs are run as they are taken: what the compiler makes of them has nothing to do with sharding.
    """
    torch._dynamo.reset()
    counters.clear()
    config = torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True)
    with config, mock.patch.object(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager")):
        found = check_shard(fields, compile=True)
    return found | {"broken": dict(counters["graph_break"]), "graphs": counters["stats"]["unique_graphs"]}


def check_tensor(fields: Mapping[str, Any], *, data: int = 1) -> dict[str, Any]:
    """Tensor parallelism over all processes, or over halves of them with FSDP2 between."""
    world, spread = dist.get_world_size(), make(fields)
    mesh = mesh_of(data=data, tensor=world // data)
    norms = spread_tensors(spread, mesh["tensor"])
    if data > 1:
        shard(spread, mesh["data"])
    loss = backward(spread, mine(batch(), mesh.get_local_rank("data"), data), data)
    add_partial(norms, mesh["tensor"])
    return against_one(loss / world, whole_gradients(spread), fields)


def check_pipeline(
    fields: Mapping[str, Any], *, schedule: Any = "1f1b", virtual: int = 1, cached: bool = True, data: int = 1
) -> dict[str, Any]:
    """A pipeline over all processes, or over parts of them with FSDP2 between."""
    world = dist.get_world_size()
    stages = world // data
    mesh = mesh_of(pipeline=stages, data=data)
    fields = dict(fields) | {"num_hidden_layers": max(4, stages * virtual)}
    model = make(fields)
    pipeline = Pipeline(
        model,
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
    total, x = torch.zeros(()), mine(batch(), mesh.get_local_rank("data"), data)
    for _ in range(2):
        model.zero_grad()
        loss = pipeline.step(x, x)
        pipeline.add_shared()
        total = torch.zeros(()) if loss is None else loss / data
    gathered: list[Any] | None = None if dist.get_rank() else [None] * world
    payload = {stage.blocks.start: stage.sent for stage in pipeline.stages}
    left = sum(len(shelf) for stage in pipeline.stages for shelf in stage.shelves)
    dist.gather_object((whole_gradients(model), payload, left), gathered)
    grads: dict[str, Tensor | None] = {}
    sent: dict[int, int] = {}
    for theirs, payload, _ in gathered or ():
        for name, grad in theirs.items():
            if (other := grads.get(name)) is not None:
                assert torch.allclose(other, grad, atol=1e-6), f"{name} differs between stages"
            grads[name] = grad
        sent |= payload
    found = against_one(total, grads, fields)
    if gathered is None:
        return found
    with torch.device("meta"):
        meta = Decoder(ModelConfig(**SHAPE | fields))
    planned = plan(meta, stages, virtual) if cached else plan(meta, stages * virtual)
    found |= {"payload": [sent[first] for first in sorted(sent)][:-1], "left": sum(left for *_, left in gathered)}
    return found | {"planned": [b.cached for b in planned.boundaries]}


WHAT: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "shard": check_shard,
    "recompute": partial(check_shard, recompute=2),
    "meta": partial(check_shard, meta=True),
    "compile": check_compiled,
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


def attempt(what: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return WHAT[what](fields)
    except ValueError as error:
        return {"refused": str(error)}


def main(words: list[str]) -> int:
    """See above."""
    if dist.is_torchelastic_launched():  # and not forked from something that needs more
        assert "transformers" not in sys.modules, "a decoder on several processes needs torch alone"
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64 if "--double" in words else torch.float32)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    part, parts = next((map(int, word[7:].split("/")) for word in words if word.startswith("--part=")), (1, 1))
    kinds = [word for word in words if not word.startswith("--")]
    for made, inside in ((cases, False), (grafts, True)):
        wanted = [what for what in kinds if what.startswith("graft") is inside]
        for fields in tuple(made("--all" in words))[part - 1 :: parts] if wanted else ():
            for what in wanted:  # one after the other: the gradients of one process are made once
                record = {"what": what, "case": fields} | attempt(what, fields)
                if dist.get_rank() == 0:
                    print(json.dumps(record), flush=True)
    dist.barrier()  # nobody closes a connection that another process still reads from
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
