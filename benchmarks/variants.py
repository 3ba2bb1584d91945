"""`python -m benchmarks.variants`: what each choice of the recipe is worth to the plain residual of small presets.

Every variant trains on the tokens, in the order and with the seeds of the recipe as it is; the table has the mean of
the paired differences and their standard deviation over seeds. Which groups decay and how the embedding starts are no
options of a run: they are changed here alone. `--write-docs` puts the table into the page on training.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from benchmarks.page import replace_between
from twoaxis.base.machine import hardware_line
from twoaxis.data.load import Data, load_data
from twoaxis.model import groups
from twoaxis.training import setup
from twoaxis.training import train as training
from twoaxis.training.config import TrainConfig

PAGE = Path(__file__).parent.parent / "docs" / "howto" / "train.md"
MARKS = "<!-- variants: written by python -m benchmarks.variants --write-docs -->", "<!-- end of variants -->"


class Variant(NamedTuple):
    """A change of the recipe.

    Attributes:
        fields: of the run.
        model: of its model.
        scale: factor of the standard deviation of all initial weights.
        embedding: factor of the embedding's, which is the head's too.
        roles: parameters by a part of their name, and the role whose weight decay they get.
    """

    fields: Mapping[str, Any] = {}
    model: Mapping[str, Any] = {}
    scale: float = 1.0
    embedding: float = 1.0
    roles: Mapping[str, groups.Role] = {}


AS_IT_IS = "as it is"
VARIANTS = {
    AS_IT_IS: Variant(),
    "no QK-norm": Variant(model={"qk_norm": False}),
    "half the initial scale": Variant(scale=0.5),
    "twice the initial scale": Variant(scale=2.0),
    "half the embedding's initial scale": Variant(embedding=0.5),
    "twice the embedding's initial scale": Variant(embedding=2.0),
    "no weight decay": Variant(fields={"weight_decay": 0.0}),
    "three times the weight decay": Variant(fields={"weight_decay": 0.3}),
    "the embedding does not decay": Variant(roles={"embed_tokens": "other"}),
    "norms decay too": Variant(roles={"norm": "matrix"}),
    "a Qwen3 of transformers in place of our decoder": Variant(fields={"family": "qwen3"}),
}


@contextlib.contextmanager
def applied(variant: Variant) -> Iterator[None]:
    """Context manager in which runs start and decay as a variant says."""
    known, make = groups.roles, setup.make_model

    def roles(model: Any) -> dict[str, groups.Role]:
        found = known(model)
        for part, role in variant.roles.items():
            found.update(dict.fromkeys([name for name in found if part in name], role))
        return found

    def make_model(*args: Any) -> Any:
        model: Any = make(*args)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("embed_tokens.weight"):
                    parameter.mul_(variant.embedding)
        return model

    with patch.object(groups, "roles", roles), patch.object(training, "make_model", make_model):
        yield


def loss(base: TrainConfig, variant: Variant, data: Data) -> float:
    """The held-out loss of a run with a variant."""
    usual = setup.model_config(base, data.vocab_size).initializer_range
    model = {**base.model, **variant.model, "initializer_range": usual * variant.scale}
    with applied(variant), tempfile.TemporaryDirectory() as folder:
        run = dataclasses.replace(base, model=model, **variant.fields)
        return training.train(run, folder, data=data).loss or math.nan


def preset_losses(preset: str, tokens: int, seeds: int) -> dict[str, list[float]]:
    """Losses by variant, seed by seed, the variants of a seed in turns."""
    base = TrainConfig(
        preset=preset,
        tokenizer="bytes" if preset == "pico" else TrainConfig.tokenizer,
        tokens=tokens,
        threads=1,
        save_model=False,
        measure_memory=False,
        eval_every=10**6,
    )
    data, found = load_data(base), {name: [] for name in VARIANTS}
    for seed in range(seeds):
        for name, variant in VARIANTS.items():
            found[name].append(loss(dataclasses.replace(base, seed=seed), variant, data))
            print(f"{preset} seed {seed} {name}: {found[name][-1]:.4f}", flush=True)
    return found


def cell(found: dict[str, list[float]], name: str) -> str:
    """The mean loss as it is, or the mean difference to it, with a standard deviation over seeds."""
    own, sign = found[name], ""
    if name != AS_IT_IS:
        own, sign = [mine - its for mine, its in zip(own, found[AS_IT_IS], strict=True)], "+"
    return f"{statistics.fmean(own):{sign}.3f} ({statistics.stdev(own):.3f})"


def main() -> None:
    """Train, print, and write the page if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.variants", description="Choices of the recipe.")
    parser.add_argument("--presets", nargs="+", default=["pico", "nano"])
    parser.add_argument("--tokens", type=int, default=160_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write-docs", action="store_true", help="put the table into docs/howto/train.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {preset: preset_losses(preset, options.tokens, options.seeds) for preset in options.presets}
    lines = [f"| | {' | '.join(f'`{preset}`' for preset in found)} |", "|---|" + "---:|" * len(found)]
    lines += [f"| {name} | {' | '.join(cell(losses, name) for losses in found.values())} |" for name in VARIANTS]
    about = (
        f"Held-out loss as it is, and by how much each change moves it; in brackets the standard deviation over "
        f"{options.seeds} seeds. {options.tokens:,} tokens of the standard library. {hardware_line()}; "
        "`python -m benchmarks.variants`."
    )
    text = "\n".join([*lines, "", about])
    print(text)
    if options.write_docs:
        replace_between(PAGE, *MARKS, text)


if __name__ == "__main__":
    main()
