"""After a retrofit the new parameters learn: 30 steps on real text lower the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import twoaxis
from tests.pretrained.helpers import library_bytes
from tests.support.foreign import byte_llama
from twoaxis.model.groups import param_groups, trainable
from twoaxis.pretrained.record import learning_rates, new_parameters, parameter_origins

STEPS, BATCH, LENGTH = 30, 8, 48
CODE = library_bytes("argparse.py", 40_000)
"""What the source has learned."""
TRAINED = 32_000
PROSE = library_bytes("pydoc_data/topics.py", TRAINED + 60 * 128)
"""What it is trained on afterwards: Python's manual instead of its code; the end is held out."""

METHODS: dict[str, dict[str, Any]] = {
    "denseformer": {"stream": "denseformer"},
    "block attention_residuals": {"stream": "attention_residuals:block_size=2"},
    "hyper_connections": {"stream": "hyper_connections:streams=2"},
    "muddformer": {"stream": "muddformer"},
    "deep_delta": {"stream": "deep_delta"},
    "short_swa": {"mixer": "short_swa:window=4"},
}
ONE_OF_EACH_KIND = {"deep_delta", "short_swa"}
"""A blend with a path that stays closed, a mixer that starts at random; the others are slow."""


def batch(text: Tensor, generator: torch.Generator) -> Tensor:
    starts = torch.randint(0, len(text) - LENGTH, (BATCH,), generator=generator)
    return torch.stack([text[int(s) : int(s) + LENGTH] for s in starts])


def train(model: Any, optimizer: torch.optim.Optimizer, text: Tensor, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens = batch(text, generator)
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()


def optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(param_groups(model, lr=3e-3, rates=learning_rates(model)))


@torch.no_grad()
def measure(model: Any) -> float:
    """The loss on the part of the new text that is not trained on."""
    tokens = PROSE[TRAINED:].view(-1, 128)
    return model(input_ids=tokens, labels=tokens).loss.item()


@pytest.fixture(scope="module")
def source() -> Any:
    """A tiny Llama that has learned a little of the standard library's bytes."""
    torch.manual_seed(2)
    model: Any = byte_llama(num_hidden_layers=3, tie_word_embeddings=True)
    model.apply(model._init_weights)
    train(model, torch.optim.AdamW(model.parameters(), 6e-3), CODE, 60, seed=0)
    return model.eval()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ONE_OF_EACH_KIND else [pytest.mark.slow]) for n in METHODS]
)
def test_new_parameters_learn(source: Any, name: str) -> None:
    made = twoaxis.retrofit(source, **METHODS[name], tokens=8)
    model = made.model
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    loss = measure(model)
    assert loss == pytest.approx(measure(source), abs=1e-5)
    trainable(model, new_parameters(model))
    train(model, optimizer(model), PROSE[:TRAINED], STEPS, seed=1)
    after = measure(model)
    assert after < loss - 0.01, (loss, after)
    for parameter, role in parameter_origins(model).items():
        moved = not torch.equal(model.get_parameter(parameter), before[parameter])
        assert moved == (role == "new" and parameter not in made.record.stuck), parameter
