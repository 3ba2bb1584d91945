"""One rung on one data seed: train its few parameters, measure, switch groups of sites off, measure again.

Everything is in float32 on one thread, the learning rate rises over the first quarter of the steps and falls linearly
to a tenth of itself, gradients are clipped to the norm 1. The rise matters: the first steps of Adam move every number
by the whole rate, whatever the gradient. The same arguments give the same bits on the same machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.comparison.ladder import make_model, sizes, switched
from twoaxis.comparison.probe_plan import CONTROL, ROWS, Amounts, ProbeResult, Rung, group_names
from twoaxis.model.groups import param_groups

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from twoaxis.comparison.probe_text import ProbeText
    from twoaxis.model.graft import TwoAxisForCausalLM

WARM_UP, LAST = 0.25, 0.1
"""Part of the steps in which the rate rises; what is left of it at the end."""


class Material(NamedTuple):
    """What all runs share.

    Attributes:
        source: the pretrained model.
        text: what is trained and measured on.
    """

    source: PreTrainedModel
    text: ProbeText


def run(
    material: Material, rung: Rung | None, seed: int, amounts: Amounts, watch: Callable[[], None] = lambda: None
) -> ProbeResult:
    """Train and measure.

    Args:
        material: the source and the text.
        rung: what is put on it; None measures the source.
        seed: data seed, also of the new parameters that start at random.
        amounts: how much; with 0 steps the rung stays as it starts.
        watch: called after each step and each pass.
    """
    begun, busy = time.perf_counter(), time.process_time()
    on, text = rung or CONTROL, material.text
    model = make_model(material.source, on, seed)
    start = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    trained = list(_train(model, on, text, seed, amounts, watch))
    held = (text.choosing_windows if amounts.choosing else text.held_out_windows)(seed, amounts.held_out)
    windows = measure(model, held, watch)
    loss, sites = _mean(windows), {}
    if amounts.steps and amounts.site_windows and loss is not None:
        few = slice(0, amounts.site_windows)
        sites = _sites(model, on, start, held[few], _mean(windows[few]), watch)
    return ProbeResult(
        rung="source" if rung is None else rung.name,
        rate=0.0 if rung is None else rung.rate,
        seed=seed,
        loss=loss,
        windows=() if loss is None else tuple(windows),
        training=tuple(loss if math.isfinite(loss) else None for loss in trained),
        **sites,
        seconds=time.perf_counter() - begun,
        cpu_seconds=time.process_time() - busy,
    )


def step_seconds(material: Material, rung: Rung, batch: int) -> float:
    """Time of one training step, after one to warm up."""
    model = make_model(material.source, rung, 0)
    three = Amounts(3, batch, 0, 0)
    ends = [time.perf_counter() for _ in _train(model, rung, material.text, 0, three, lambda: None)]
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def schedule(step: int, steps: int) -> float:
    """Multiplier of the learning rate at a step."""
    warm = math.ceil(WARM_UP * steps)
    if step < warm:
        return (step + 1) / (warm + 1)
    return 1 - (1 - LAST) * (step - warm) / max(1, steps - 1 - warm)


def _train(
    model: TwoAxisForCausalLM, rung: Rung, text: ProbeText, seed: int, amounts: Amounts, watch: Callable[[], None]
) -> Iterator[float]:
    """Train what gets gradients; the loss of each step."""
    optimizer = torch.optim.Adam(param_groups(model, lr=rung.rate), betas=(0.9, 0.95))
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for step in range(amounts.steps):
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * schedule(step, amounts.steps)
        rows = text.training_batch(seed, step, amounts.batch)
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(learning, 1.0)
        if bool(norm.isfinite()):  # a step along NaN would hide at which step it diverged
            optimizer.step()
        watch()
        yield loss.item()


@torch.no_grad()
def measure(model: TwoAxisForCausalLM, windows: Tensor, watch: Callable[[], None] = lambda: None) -> list[float]:
    """Mean loss of each window, in nats per predicted token."""
    found: list[float] = []
    for rows in windows.split(ROWS):
        logits = model(input_ids=rows, use_cache=False).logits[:, :-1].float()
        losses = F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none")
        found += losses.double().mean(1).tolist()
        watch()
    return found


@torch.no_grad()
def _sites(
    model: TwoAxisForCausalLM,
    rung: Rung,
    start: Mapping[str, Tensor],
    windows: Tensor,
    whole: float | None,
    watch: Callable[[], None],
) -> dict[str, Any]:
    """What each group of sites is good for; `whole` is the loss of `windows` with all of them on."""
    departures: dict[int, float] = {}
    if rung.stream != "standard":
        with switched(model, rung, None, start) as stream:
            assert stream is not None
            measure(model, windows[:1])  # a size, not a gain: one window will do
            departures = stream.departures
    off: dict[str, float | None] = {}
    for group in group_names(model.stream.layout.blocks):
        with switched(model, rung, group, start):
            loss = _mean(measure(model, windows, watch))
        off[group] = None if loss is None or whole is None else loss - whole
    return {"off": off, "size": sizes(model, rung, start, departures)}


def _mean(values: list[float]) -> float | None:
    mean = math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.nan
    return mean if math.isfinite(mean) else None
