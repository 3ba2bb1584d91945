"""`python -m benchmarks.recipe`: does the plain residual, with the settings that presets start from, train as well as a
plain GPT whose settings were searched?

The GPT is the usual one (layer norms, learned positions, GELU, biases, tied head, GPT-2's initial values) of the same
width, depth and about as many parameters, in a loop of its own. Its learning rate, initial scale and warm-up are
searched on seeds that are not compared, until neither half nor twice of any of them is better. Then both train on the
same tokens in the same order, seed by seed in turns, and are judged on the same held-out rows. `--write-docs` puts the
table into the page on training.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.page import replace_between
from twoaxis.base.machine import hardware_line
from twoaxis.data.load import Data, load_data
from twoaxis.training.config import TrainConfig
from twoaxis.training.train import train

PAGE = Path(__file__).parent.parent / "docs" / "howto" / "train.md"
MARKS = "<!-- recipe: written by python -m benchmarks.recipe --write-docs -->", "<!-- end of recipe -->"
SEARCHED = 1000
"""First of the seeds on which the GPT's settings are searched."""


class Settings(NamedTuple):
    """What is searched for the GPT."""

    lr: float
    std: float
    warmup: float


FIRST = Settings(4e-3, 0.06, 0.15)
"""Where the search begins."""
LONGEST = 0.6
"""Part of the steps that a warm-up may take."""


def search(score: Callable[[Settings], float], first: Settings = FIRST) -> dict[Settings, float]:
    """Scores of settings, until those beside the lowest, with one of them halved or doubled, are all tried.

    So the best of them lies at no edge of what was tried, other than that of a warm-up's length.
    """
    found = {first: score(first)}
    while True:
        best = min(found, key=lambda settings: found[settings])
        beside = [best._replace(**{name: getattr(best, name) * by}) for name in best._fields for by in (2.0, 0.5)]
        new = [settings for settings in beside if settings not in found and settings.warmup <= LONGEST]
        if not new:
            return found
        for settings in new:
            found[settings] = score(settings)
            if found[settings] < found[best]:
                break  # go on from there


class GPT(nn.Module):
    """A plain GPT."""

    def __init__(self, vocabulary: int, context: int, width: int, blocks: int, heads: int, std: float) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(GPTBlock(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                ends = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=std / math.sqrt(2 * blocks) if ends else std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tokens.weight.T


class GPTBlock(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.before(x)).chunk(3, -1))
        read = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(read.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


def loss(model: nn.Module, examples: list[dict[str, Tensor]]) -> Tensor:
    """Nats per token."""
    tokens = torch.stack([example["input_ids"] for example in examples])
    labels = torch.stack([example["labels"] for example in examples])
    return nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def train_gpt(run: TrainConfig, data: Data, shape: tuple[int, int, int], settings: Settings) -> float:
    """The held-out loss of the GPT with some settings after the tokens of a run."""
    torch.manual_seed(run.seed)
    model = GPT(data.vocab_size, run.context, *shape, settings.std)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": run.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(run.beta1, run.beta2))
    schedule = dataclasses.replace(run, warmup=settings.warmup, lr=settings.lr)
    examples = data.train(run.seed, run.total_steps * run.batch)
    for step in range(1, run.total_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * schedule.rate(step)
        loss(model, [examples[(step - 1) * run.batch + n] for n in range(run.batch)]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    held_out: Any = data.held_out(run.judged_examples)
    with torch.no_grad():
        parts = [loss(model, [held_out[n] for n in range(at, at + 16)]).item() for at in range(0, len(held_out), 16)]
    return statistics.fmean(parts)


def compared(
    preset: str, tokens: int, seeds: int, searched: int, known: Settings | None = None
) -> Iterator[tuple[str, ...]]:
    """The row of each: name, rate, initial scale, steps of warm-up, mean and standard deviation on the same tokens.

    `known` are settings of the GPT that an earlier search found.
    """
    from twoaxis.training.setup import model_config

    tokenizer = "bytes" if preset == "pico" else TrainConfig.tokenizer
    base = TrainConfig(
        preset=preset, tokenizer=tokenizer, tokens=tokens, threads=1, save_model=False, measure_memory=False
    )
    data = load_data(base)
    config = model_config(base, data.vocab_size)
    shape = config.hidden_size, config.num_hidden_layers, config.num_attention_heads

    def with_seed(seed: int) -> TrainConfig:
        return dataclasses.replace(base, seed=seed)

    def score(settings: Settings) -> float:
        tried = [train_gpt(with_seed(SEARCHED + n), data, shape, settings) for n in range(searched)]
        print(f"{preset} searching {settings}: {statistics.fmean(tried):.4f}", flush=True)
        return statistics.fmean(tried)

    found = search(score) if known is None else {known: 0.0}
    best = min(found, key=lambda settings: found[settings])
    losses: dict[str, list[float]] = {"ours": [], "gpt": []}
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            losses["ours"].append(train(with_seed(seed), folder, data=data).loss or math.nan)
        losses["gpt"].append(train_gpt(with_seed(seed), data, shape, best))
        print(f"{preset} seed {seed}: ours {losses['ours'][-1]:.4f}, GPT {losses['gpt'][-1]:.4f}", flush=True)
    ours = base.lr, config.initializer_range, base.warmup_steps
    theirs = best.lr, best.std, round(best.warmup * base.total_steps)
    for name, used, ended in (
        (f"`{preset}`, defaults", ours, losses["ours"]),
        (f"plain GPT, {f'the best of {len(found)}' if known is None else 'given'} settings", theirs, losses["gpt"]),
    ):
        mean, spread = statistics.fmean(ended), statistics.stdev(ended)
        yield name, *(f"{value:g}" for value in used), f"{mean:.3f}", f"{spread:.3f}"


def main() -> None:
    """Compare, print, and write the page if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recipe", description="Our defaults and a searched GPT.")
    parser.add_argument("--presets", nargs="+", default=["pico", "nano"])
    parser.add_argument("--tokens", type=int, default=160_000)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--searched", type=int, default=1, help="seeds of each setting that is searched")
    parser.add_argument("--given", nargs=3, type=float, metavar=("RATE", "SCALE", "WARMUP"), help="instead of a search")
    parser.add_argument("--write-docs", action="store_true", help="put the table into docs/howto/train.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = ["| model | rate | initial scale | warm-up steps | held-out loss | sd |", "|---|" + "---:|" * 5]
    for preset in options.presets:
        known = None if options.given is None else Settings(*options.given)
        rows = compared(preset, options.tokens, options.seeds, options.searched, known)
        lines += [f"| {' | '.join(row)} |" for row in rows]
    text = "\n".join(lines)
    how = "; settings of the GPT were searched on other seeds, until neither half nor twice of any was better"
    about = (
        f"{options.tokens:,} tokens of the Python standard library, {options.seeds} seeds, the same tokens and "
        f"held-out rows for both{how if options.given is None else ''}. {hardware_line()}; "
        "`python -m benchmarks.recipe`."
    )
    print(text, about, sep="\n\n")
    if options.write_docs:
        replace_between(PAGE, *MARKS, f"{text}\n\n{about}")


if __name__ == "__main__":
    main()
