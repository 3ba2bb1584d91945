"""The command that asks what a pretrained model would gain from a method: probe."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import tyro

Several = tyro.conf.UseAppendAction


def probe(
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")],
    *,
    out: Annotated[str, tyro.conf.arg(metavar="DIR")],
    stream: Annotated[tuple[str, ...], Several, tyro.conf.arg(metavar="NAME[:k=v,...]")] = (),
    mixer: Annotated[tuple[str, ...], Several, tyro.conf.arg(metavar="NAME[:k=v,...]")] = (),
    data: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SOURCE")] = ("stdlib",),
    text_field: str = "text",
    seeds: Annotated[str, tyro.conf.arg(metavar="N|A,B,C")] = "4",
    steps: int = 12,
    seconds: float | None = None,
    context: int = 128,
    batch: int = 1,
    held_out: int = 12,
    site_windows: int = 3,
    rates: Annotated[str, tyro.conf.arg(metavar="FACTOR[,FACTOR,...]")] = "1,0.3",
    jobs: int | None = None,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Would a pretrained model use a stream or a mixer? Train only the new parameters, on frozen weights.

    Up a ladder of methods, the gain on held-out text over the frozen model and over a control, with intervals over
    data seeds. It is a lower bound: the weights have adapted to the plain residual. The same command goes on where it
    was stopped; with more methods or seeds it adds them. Exit with 1 if a run failed.

    Args:
        source: What retrofit takes: a folder with safetensors, a GGUF file, or a name on the hub.
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
        json_output: Print one JSON document instead of tables.
    """
    from twoaxis.comparison.compare import command_line
    from twoaxis.comparison.probe import ProbeConfig
    from twoaxis.comparison.probe import probe as run
    from twoaxis.comparison.request_file import parse_seeds
    from twoaxis.model.load import quiet

    quiet()
    config = ProbeConfig(
        data=tuple(data),
        text_field=text_field,
        context=context,
        batch=batch,
        steps=steps,
        seconds=seconds,
        held_out=held_out,
        site_windows=site_windows,
        seeds=parse_seeds(seeds),
        rates=_factors(rates),
    )
    made = run(
        source,
        out=out,
        streams=stream,
        mixers=mixer,
        config=config,
        jobs=jobs,
        say=lambda line: print(f"probe: {line}", file=sys.stderr, flush=True),
        command=command_line(),
    )
    if json_output:
        print(json.dumps(made.to_dict(), indent=1))
    else:
        made.show()
        print("\n".join(str(path) for path in sorted(made.folder.glob("report*.*"))))
    for failure in made.failed:
        print(f"twoaxis: failed: {failure}", file=sys.stderr)
    return made.exit_code


def _factors(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"--rates are factors with commas between, such as 3,1,0.3, got {text!r}") from None
