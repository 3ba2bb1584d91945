"""The learning rate of every step, as a part of the peak.

    rate   cosine                 wsd                     constant
    1      . _                    . ________              . ______________
          .    .                 .          .            .
         .       .              .             .         .
    end .          - _         .                -      .
        |W|                    |W|        |  D  |      |W|

Steps are counted from 1. The warm-up takes the first W = `warmup_steps` of them, rises linearly and is at the peak in
step W. The cosine falls from there and is at `final_lr` in the last step; wsd stays and falls linearly
through the last D = round(decay · steps). A rate depends on the step alone, so a run that is resumed needs no
memory of it.
"""

from __future__ import annotations

import math

from twoaxis.training.config import TrainConfig


def rate(config: TrainConfig, step: int) -> float:
    """The learning rate of a step as a part of the peak.

    Args:
        config: the run.
        step: from 1; later than the last step is the last step's.
    """
    steps = config.total_steps
    warmup, decay = config.warmup_steps, config.decay_steps
    step = min(step, steps)
    if step <= warmup:
        return step / warmup
    if config.schedule == "cosine":
        passed = (step - warmup) / (steps - warmup)
        return config.final_lr + (1 - config.final_lr) * (1 + math.cos(math.pi * passed)) / 2
    if config.schedule == "wsd" and step > steps - decay:
        passed = (step - (steps - decay)) / decay
        return 1 - (1 - config.final_lr) * passed
    return 1.0
