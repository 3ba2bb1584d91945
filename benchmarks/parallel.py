"""What several processes cost and save, measured in one run: throughput, bytes over boundaries, memory of each process.

    torchrun --nproc-per-node 2 -m benchmarks.parallel throughput boundaries [--quick]
    MALLOC_MMAP_THRESHOLD_=65536 MALLOC_TRIM_THRESHOLD_=65536 torchrun --nproc-per-node 2 -m benchmarks.parallel memory

The peak of memory is what the system sees of a process: without these variables freed memory stays with it.

Throughput is a ratio of steps that take turns: the first process alone, then all of them sharded by FSDP2, with as many
rows in each process. By the clock it says what this machine did, and by CPU time what it would do with a free core for
every process: waiting for the others counts only while it spins.
"""

from __future__ import annotations

import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from twoaxis import Decoder, ModelConfig
from twoaxis.model.loss import summed_loss
from twoaxis.model.stages import plan
from twoaxis.parallel.pipeline import Pipeline
from twoaxis.parallel.shard import shard

VOCABULARY = 1024


def make(quick: bool, blocks: int = 8) -> Decoder:
    """Block Attention Residuals, of a width at which matrices take most of the time."""
    width, heads = (32, 2) if quick else (512, 8)
    shape: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": width, "num_attention_heads": heads}
    options = {"block_size": 4}
    return Decoder(ModelConfig(**shape, num_hidden_layers=blocks, stream="attention_residuals", stream_options=options))


def rows(count: int, context: int, seed: int) -> Tensor:
    """Random tokens."""
    return torch.randint(0, VOCABULARY, (count, context), generator=torch.Generator().manual_seed(seed))


def step_of(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """A training step with AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)

    def run() -> None:
        (summed_loss(model(x), x) / x.numel()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    vars(run)["optimizer"] = optimizer
    return run


def kept_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Parameters, gradients and moments that this process holds."""
    tensors: list[Any] = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    tensors += [t for state in optimizer.state.values() for t in state.values()]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in local)


def resident() -> tuple[int, int]:
    """Bytes of this process in memory now, and at most since the last `forget_peak`."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]


def forget_peak() -> None:
    """Start the peak of `resident` anew."""
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def throughput(quick: bool, rounds: int) -> dict[str, float]:
    """Tokens per second of all processes over those of one, of sharded steps; the median of interleaved rounds."""
    x, mesh = rows(2, 32 if quick else 256, dist.get_rank()), init_device_mesh("cpu", (dist.get_world_size(),))
    alone, sharded = make(quick), make(quick)
    shard(sharded, mesh)
    one, all_of_them = step_of(alone, x), step_of(sharded, x)
    world, ratios = dist.get_world_size(), {"clock": [], "cpu": []}
    for number in range(rounds + 1):
        taken = []
        for run in (one if dist.get_rank() == 0 else lambda: None, all_of_them):
            dist.barrier()
            clock, cpu = time.perf_counter(), time.process_time()
            run()
            mine = torch.tensor([time.perf_counter() - clock, time.process_time() - cpu], dtype=torch.float64)
            dist.all_reduce(mine, dist.ReduceOp.MAX)
            taken.append(mine.tolist())
        if number:  # the first is warm-up
            for kind, first, second in zip(ratios, *taken, strict=True):
                ratios[kind].append(world * first / second)
    return {kind: statistics.median(values) for kind, values in ratios.items()}


def memory(quick: bool) -> dict[str, Any]:
    """What a step holds and its peak, in one process and in each of those that share the model."""
    found: dict[str, Any] = {}
    x = rows(1, 32, 0)
    for name in ("one", "sharded"):
        gc.collect()
        before, _ = resident()
        model = make(quick)
        if name == "sharded":
            shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
        run = step_of(model, x)
        run()
        forget_peak()
        run()
        found[name] = {"kept": kept_bytes(model, vars(run)["optimizer"]), "peak": resident()[1] - before}
        del model, run
    return found


def boundaries(quick: bool) -> list[dict[str, Any]]:
    """Bytes per token that cross each boundary of an interleaved pipeline, and what the cost model says of them."""
    found, stages = [], dist.get_world_size()
    for cached in (False, True):
        model = make(quick)
        pipeline = Pipeline(
            copy.deepcopy(model),
            schedule="interleaved",
            virtual=2,
            micro_batches=stages,
            loss=lambda logits, labels: summed_loss(logits, labels),
            rows=1,
            context=16,
            cached=cached,
        )
        x = rows(stages, 16, 0)
        pipeline.step(x, x)
        gathered: list[Any] = [None] * stages
        dist.all_gather_object(gathered, [(stage.blocks.start, stage.sent) for stage in pipeline.stages])
        sent = dict(pair for theirs in gathered for pair in theirs)
        with torch.device("meta"):
            empty = Decoder(model.config)
        layout = plan(empty, stages, 2) if cached else plan(empty, 2 * stages)
        measured = [sent[first] for first in sorted(sent)][:-1]
        found.append({"cached": cached, "measured": measured, "planned": [b.cached for b in layout.boundaries]})
    return found


def main(words: list[str]) -> None:
    """Print one JSON record."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    quick = "--quick" in words
    parts: dict[str, Callable[[], Any]] = {
        "memory": lambda: memory(quick),
        "boundaries": lambda: boundaries(quick),
        "throughput": lambda: throughput(quick, 1 if quick else 5),
    }
    record = {"processes": dist.get_world_size()} | {name: run() for name, run in parts.items() if name in words}
    if dist.get_rank() == 0:
        print(json.dumps(record))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
