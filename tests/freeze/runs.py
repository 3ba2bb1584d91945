"""Recorder of runs: small trainings to the end, stopped in the middle, and continued.

    runs/NAME/initial.safetensors   weights before the first step
    runs/NAME/final.safetensors     weights at the end
    runs/NAME/stopped.safetensors   weights and moments of AdamW in the checkpoint of the stopped run
    runs/NAME/log.jsonl             of the whole run, every step and every evaluation
    runs/NAME/result.json           its result, with the SHA-256 of the weights
    runs/NAME/stopped.jsonl         the log of the stopped run
    runs/NAME/summary.json          the step it stopped at; whether the continued run ended like the whole one

The data is text that is made here from a fixed sequence of random numbers, so that it is the same on every machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from safetensors.torch import save_file
from torch import Tensor

from tests.freeze import names

STOP = 13
"""The step after which a run is asked to stop."""
MODEL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
COMMON: dict[str, Any] = {
    "context": 48,
    "batch": 12,
    "steps": 30,
    "warmup": 0.05,
    "held_out": 0.1,
    "tokenizer": "bytes",
    "log_every": 1,
    "eval_every": 10,
    "eval_examples": 20,
    "measure_memory": False,
    "threads": 1,
    "device": "cpu",
    "seed": 5,
}
BLOCKS = "attention_residuals:block_size=2"
CASES: dict[str, dict[str, Any]] = {
    f"{stream}-{accumulate}": {"stream": stream, "accumulate": accumulate}
    for stream in ("standard", "attention_residuals", "deep_delta", "hyper_connections")
    for accumulate in (1, 2)
} | {
    "bf16": {"stream": BLOCKS, "dtype": "bfloat16", "accumulate": 2},
    "bf16-isolate": {"stream": "deep_delta", "dtype": "bfloat16", "accumulate": 3, "isolate": True},
    "isolate-1": {"stream": "deep_delta:value_channels=2,compress=token", "mixer": "short_swa", "isolate": True},
    "isolate-2": {"stream": BLOCKS, "mixer": "canon", "isolate": True, "accumulate": 2},
    "from-all": {"source": "deep_delta", "train": "all"},
    "from-new": {"source": f"{BLOCKS}+short_conv", "train": "new", "accumulate": 2},
    "task-wsd": {"stream": "denseformer", "data": ("task:recall:pairs=4",), "schedule": "wsd", "clip": 0.0},
    "recompute": {"stream": BLOCKS, "recompute": 2, "schedule": "constant", "init_seed": 9},
}
TOGETHER: dict[str, dict[str, Any]] = {
    "two-deep_delta": {"stream": "deep_delta", "accumulate": 2},
    "two-isolate": {"stream": BLOCKS, "mixer": "short_swa", "isolate": True},
    "two-bf16": {"stream": "hyper_connections", "dtype": "bfloat16"},
    "two-from-all": {"source": "deep_delta", "train": "all"},
}
"""Runs of two processes."""


def write_text(folder: Path) -> None:
    """Sixty documents of made-up words, in which a word depends on the one before it."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(7).random  # Python promises this sequence for ever
    letters = "abcdefghijklmnopqrstuvwxyzäöü"
    words = ["".join(letters[int(draw() * 29)] for _ in range(2 + int(draw() * 6))) for _ in range(150)]
    for number in range(60):
        text, word = [], int(draw() * 150)
        for _ in range(40 + int(draw() * 160)):
            text.append(words[word])
            word = (word * 7 + int(draw() * 4)) % 150
        (folder / f"{number:02d}.txt").write_text(" ".join(text) + ".\n")


def write_source(folder: Path, spelling: str) -> None:
    """A tiny Llama of transformers with `spelling` (STREAM or STREAM+MIXER) put on it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = MODEL | {"num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(**shape, bos_token_id=None, eos_token_id=0))
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.05)
            if p.dim() == 2:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.08)
    stream, _, mixer = spelling.partition("+")
    shutil.rmtree(folder, ignore_errors=True)
    names.retrofit(model.eval(), folder, stream, mixer or None)


def fields_of(case: dict[str, Any], place: Path) -> dict[str, Any]:
    """The fields of a case's run; `place` has the text and the saved models to go on from."""
    fields = COMMON | {"data": (str(place / "text"),), "cache": str(place / "cache")} | case
    if "source" in case:
        return fields | {"source": str(place / "sources" / slug(case["source"]))}
    return fields | {"model": dict(MODEL)}


def slug(spelling: str) -> str:
    """A folder's name."""
    return "".join(letter if letter.isalnum() else "-" for letter in spelling)


def prepare(place: Path, cases: dict[str, dict[str, Any]]) -> None:
    """Text and saved models."""
    write_text(place / "text")
    for spelling in sorted({case["source"] for case in cases.values() if "source" in case}):
        write_source(place / "sources" / slug(spelling), spelling)


def record(out: Path, work: Path, case: dict[str, Any]) -> None:
    """Record one case; with several processes each of them calls this, and the first one writes."""
    fields = fields_of(case, work)

    def stop(step: int, loss: float | None) -> None:
        if step == STOP:
            os.kill(os.getpid(), signal.SIGINT)

    whole, halted = (work / f"{out.name}-{kind}" for kind in ("whole", "halted"))
    first = names.find("rank")() == 0
    if first:
        out.mkdir(parents=True)
        save(out / "initial.safetensors", names.initial_weights(fields))
    assert names.train(fields, whole, lambda step, loss: None), "the whole run was interrupted"
    assert not names.train(fields, halted, stop), "the run did not stop"
    wait()
    if first:
        save(out / "stopped.safetensors", names.checkpoint(halted))
        shutil.copy(halted / "log.jsonl", out / "stopped.jsonl")
    wait()
    assert names.train(fields, halted, lambda step, loss: None), "the continued run was interrupted"
    if first:
        final, again = names.final_weights(whole), names.final_weights(halted)
        save(out / "final.safetensors", final)
        for name in ("log.jsonl", "result.json"):
            shutil.copy(whole / name, out / name)
        steps = [json.loads(line)["step"] for line in (out / "stopped.jsonl").read_text().splitlines()]
        same = set(final) == set(again) and all(torch.equal(final[name], again[name]) for name in final)
        summary = {"stopped": steps[-1], "continued_like_whole": same}
        (out / "summary.json").write_text(json.dumps(summary))


def wait() -> None:
    """Let all processes get here: the first one may still write the checkpoint that the others go on from."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def save(path: Path, tensors: dict[str, Tensor]) -> None:
    """A safetensors file; tied tensors are written once for each name."""
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, path)


def main() -> None:
    """Command line; starts itself again with two processes for the cases of two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--case", nargs="*", default=[*CASES, *TOGETHER])
    given = parser.parse_args()
    names.check_tree()
    torch.set_num_threads(1)
    work = given.out / "work"
    several = "WORLD_SIZE" in os.environ
    cases = {name: case for name, case in (TOGETHER if several else CASES | TOGETHER).items() if name in given.case}
    if not several:
        for old in (work, *(given.out / name for name in cases)):
            shutil.rmtree(old, ignore_errors=True)
        prepare(work, cases)
    for name, case in cases.items():
        if several or name in CASES:
            record(given.out / name, work, case)
    together = [name for name in cases if name in TOGETHER]
    if together and not several:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
        subprocess.run([*launch, "tests.freeze.runs", str(given.out), "--case", *together], check=True)
    if not several:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
