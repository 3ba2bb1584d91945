"""The command that asks what a pretrained model would gain from a method: probe."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from twoaxis.commands.parsing import word

if TYPE_CHECKING:
    from twoaxis.comparison.probe_report import Probed

Several = tyro.conf.UseAppendAction
Spelling = Annotated[Sequence[str], Several, tyro.conf.arg(metavar="NAME[:k=v,...]")]


def probe(
    source: Annotated[Any, tyro.conf.Positional, word("SOURCE")],
    *,
    out: Annotated[str, tyro.conf.arg(metavar="DIR")],
    stream: Spelling = (),
    mixer: Spelling = (),
    data: Annotated[Sequence[str], tyro.conf.arg(metavar="SOURCE")] = ("stdlib",),
    text_field: str = "text",
    seeds: Annotated[int | str | Sequence[int], word("N|A,B,C")] = 4,
    steps: int = 12,
    seconds: float | None = None,
    context: int = 128,
    batch: int = 1,
    held_out: int = 12,
    site_windows: int = 3,
    rates: Annotated[str | Sequence[float], word("FACTOR[,FACTOR,...]")] = (1.0, 0.3),
    jobs: int | None = None,
) -> Probed:
    """Would a pretrained model use a stream or a mixer? Train only the new parameters, on frozen weights.

    Up a ladder of methods, the gain on held-out text over the frozen model and over a control, with intervals over
    data seeds. It is a lower bound: the weights have adapted to the plain residual. The same command goes on where it
    was stopped; with more methods or seeds it adds them. Exit with 1 if a run failed.

    Args:
        source: What retrofit takes: a folder with safetensors, a GGUF file, a name on the hub, or in Python a model.
        out: Folder of the probe.
        stream: A residual stream to try instead of the ladder.
        mixer: A local mixer to try instead of the ladder.
        data: Text to train and measure on: stdlib, files, folders or hf:DATASET.
        text_field: Where records keep their text.
        seeds: Data seeds: how many, or which. Each has its own training text and its own held-out documents.
        steps: Training steps of each method and seed.
        seconds: Training time of each method and seed instead of steps; measured once, then kept.
        context: Tokens of a window.
        batch: Windows per step.
        held_out: Held-out windows of each seed.
        site_windows: Of them, those measured with a third of the sites switched off; 0 leaves this out.
        rates: Factors of each method's own learning rate; of several, each method gets its best on training text.
        jobs: Runs at once. None is one per core.
    """
    from twoaxis.comparison.options import parse_seeds
    from twoaxis.comparison.probe import ProbeConfig, probe
    from twoaxis.model.load import quiet

    quiet()
    amounts: dict[str, Any] = {
        "text_field": text_field,
        "context": context,
        "batch": batch,
        "steps": steps,
        "seconds": seconds,
        "held_out": held_out,
        "site_windows": site_windows,
    }
    config = ProbeConfig(data=tuple(data), seeds=parse_seeds(seeds), rates=_factors(rates), **amounts)
    source = Path(source) if isinstance(source, os.PathLike) else source
    named = source if isinstance(source, str | Path) else "MODEL"
    words = ["twoaxis", "probe", str(named), "--out", out, *(f"--stream={each}" for each in stream)]
    words += [*(f"--mixer={each}" for each in mixer), *(("--data", *data) if tuple(data) != ("stdlib",) else ())]
    plain = ProbeConfig()
    words += [f"--{n.replace('_', '-')}={value}" for n, value in amounts.items() if value != getattr(plain, n)]
    if config.seeds != plain.seeds:
        words.append(f"--seeds={','.join(map(str, config.seeds))}")
    if config.rates != plain.rates:
        words.append(f"--rates={','.join(f'{rate:g}' for rate in config.rates)}")
    command = shlex.join(words)
    return probe(source, out=out, streams=stream, mixers=mixer, config=config, jobs=jobs, command=command)


def _factors(given: str | Sequence[float]) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in (given.split(",") if isinstance(given, str) else given) if part != "")
    except (TypeError, ValueError):
        raise ValueError(f"--rates are factors with commas between, such as 3,1,0.3, got {given!r}") from None
