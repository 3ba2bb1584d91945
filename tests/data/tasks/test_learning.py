"""A small model learns a task, from the outside: what the harness does, in ten lines."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from twoaxis.data.tasks import UNSCORED, Task, make_task
from twoaxis.model.decoder import Decoder
from twoaxis.model.loss import labelled, summed_loss
from twoaxis.model.presets import preset


def accuracy_after(task: Task, steps: int, batch: int, **fields: Any) -> float:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 168, "num_hidden_layers": 2}
    model = Decoder(preset("nano", vocab_size=task.vocab_size, **(shape | fields)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    for step in range(steps):
        ids, labels = map(torch.from_numpy, task.examples(0, step * batch, batch))
        loss = summed_loss(model(ids), labels) / labelled(labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    ids, labels = map(torch.from_numpy, task.examples(0, 0, 128, held_out=True))
    with torch.no_grad():
        logits = model(ids)
    asked = labels[:, 1:] != UNSCORED
    return (logits[:, :-1].argmax(-1) == labels[:, 1:])[asked].float().mean().item()


def test_a_standard_model_learns_a_short_local_task() -> None:
    task = make_task("local", context=24, window=2, symbols=4)
    assert accuracy_after(task, 100, 16) > 0.9  # chance is 0.25


@pytest.mark.slow
def test_a_local_mixer_learns_the_default_local_task() -> None:
    """Plain attention does on some seeds only, so one seed of it says nothing."""
    assert accuracy_after(make_task("local"), 240, 4, mixer="short_swa", mixer_options={"window": 4}) > 0.9


@pytest.mark.slow
def test_recall_separates_a_short_convolution_from_plain_attention() -> None:
    task = make_task("recall")
    assert accuracy_after(task, 200, 32) < 0.4  # 0.24 is what the bag of tokens gives
    assert accuracy_after(task, 200, 32, mixer="short_conv") > 0.9
