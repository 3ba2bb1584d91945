"""Predicted against measured training steps on this machine: `python -m benchmarks.cost_model`.

Every form that a method suggests, on a small decoder; ratios are to the plain residual.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple, cast

import torch

from twoaxis.base.timer import take_turns
from twoaxis.costs.costs import CostModel
from twoaxis.guide.suggest import Place, candidates
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.model.deployment import Deployment
from twoaxis.model.loss import next_token_loss
from twoaxis.show import terminal
from twoaxis.show.document import Document, Prose, table

SHAPE, BATCH, TOKENS = ModelConfig(vocab_size=320, hidden_size=160, num_hidden_layers=5, num_attention_heads=5), 4, 128


class Checked(NamedTuple):
    """A method's training step: seconds, and ratios to the plain residual's.

    Attributes:
        method: with its options.
        seconds: predicted and measured.
        ratios: predicted and measured.
    """

    method: str
    seconds: tuple[float, float]
    ratios: tuple[float, float]

    @property
    def error(self) -> float:
        """Of the predicted ratio."""
        return self.ratios[0] / self.ratios[1] - 1


def check(rounds: int = 7) -> list[Checked]:
    """Predict and measure, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        deployment = Deployment(hardware="here", context=TOKENS, micro_batch=BATCH, dtype="float32")
        model = CostModel(SHAPE, deployment)
        spelled = [candidate.spelled(Place(SHAPE)) for candidate in candidates()]
        rows = {"standard": model.plain} | {each.method: model.of(each.contender) for each in spelled}
        guesses = {name: row.train_time.eager for name, row in rows.items()}
        taken = take_turns({name: _step(cast(ModelConfig, row.shape)) for name, row in rows.items()}, rounds)
    finally:
        torch.set_num_threads(threads)
    best = {name: min(times.values) for name, times in taken.items()}
    return [
        Checked(name, (guesses[name], best[name]), (guesses[name] / guesses["standard"], best[name] / best["standard"]))
        for name in rows
        if name != "standard"
    ]


def _step(config: ModelConfig) -> Callable[[], None]:
    torch.manual_seed(0)
    model, ids = Decoder(config), torch.randint(0, config.vocab_size, (BATCH, TOKENS + 1))

    def run() -> None:
        model.zero_grad(set_to_none=True)
        next_token_loss(model, ids).backward()

    return run


if __name__ == "__main__":
    found = check()
    cells = [
        (row.method, *(f"{1e3 * s:.1f}" for s in row.seconds), *(f"{r:.3f}" for r in row.ratios), f"{row.error:+.1%}")
        for row in found
    ]
    heads = ("method", "predicted ms", "measured ms", "predicted ratio", "measured ratio", "error")
    errors = [abs(row.error) for row in found]
    closing = Prose(f"Median error {statistics.median(errors):.1%}, worst {max(errors):.1%}.")
    terminal.show(Document("", (table(heads, cells), closing)), 120)
