"""The command that compares methods: compare."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from twoaxis.training.config import TrainConfig

Several = tyro.conf.UseAppendAction
NotHere = Annotated[str, tyro.conf.Fixed, tyro.conf.Suppress]


@dataclass(frozen=True, kw_only=True)
class Shared(TrainConfig):
    """What all runs of a comparison share; its own options take the place of some fields."""

    stream: NotHere = ""
    mixer: NotHere = ""  # pyright: ignore[reportIncompatibleVariableOverride]
    data: NotHere = ""  # pyright: ignore[reportIncompatibleVariableOverride]
    lr: NotHere = ""  # pyright: ignore[reportIncompatibleVariableOverride]
    seed: NotHere = ""  # pyright: ignore[reportIncompatibleVariableOverride]
    source: NotHere = ""  # pyright: ignore[reportIncompatibleVariableOverride]
    train: NotHere = ""
    model: Annotated[  # pyright: ignore[reportIncompatibleVariableOverride]
        tuple[str, ...], Several, tyro.conf.arg(metavar="FIELD=VALUE[,...]")
    ] = ()
    """Fields of TwoAxisConfig that replace the preset's, for all contenders."""
    threads: int | None = None
    """CPU threads of each run; None is one."""

    def __post_init__(self) -> None:
        """Nothing: what was given is checked when the comparison is put together."""


def compare(
    *,
    out: Annotated[str, tyro.conf.arg(metavar="DIR")],
    stream: Annotated[tuple[str, ...], Several, tyro.conf.arg(metavar="NAME[:k=v,...]")] = (),
    mixer: Annotated[tuple[str, ...], Several, tyro.conf.arg(metavar="NAME[:k=v,...]")] = (),
    grid: bool = False,
    baseline: Annotated[str | None, tyro.conf.arg(metavar="LABEL")] = None,
    controls: bool = False,
    file: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None,
    data: Annotated[tuple[tuple[str, ...], ...], Several, tyro.conf.arg(metavar="SOURCE")] = (),
    task: Annotated[tuple[str, ...], Several, tyro.conf.arg(metavar="NAME[:k=v,...]")] = (),
    seeds: Annotated[str, tyro.conf.arg(metavar="N|A,B,C")] = "3",
    match: Literal["tokens", "flops", "time"] = "tokens",
    flops: float | None = None,
    lr: Annotated[str, tyro.conf.arg(metavar="RATE[,RATE,...]")] = "0.002",
    lr_seeds: Annotated[str, tyro.conf.arg(metavar="N|A,B,C")] = "2",
    sizes: Annotated[str | None, tyro.conf.arg(metavar="SIZE[,SIZE,...]")] = None,
    use: Annotated[tuple[str, ...], Several, tyro.conf.arg(metavar="FILE.py")] = (),
    jobs: int | None = None,
    dry_run: bool = False,
    report: bool = True,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
    shared: Annotated[Shared, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name="")] = Shared(),
) -> int:
    """Train contenders side by side and report what is better, by how much and how surely.

    The same command goes on where it was stopped; with more contenders, data, sizes or seeds it adds them to the
    folder. Exit with 1 if a run failed.

    Args:
        out: Folder of the comparison. Alone, it goes on with what the folder holds.
        stream: A residual stream to compare. An option label=TEXT names it in tables.
        mixer: A local mixer to compare, on the plain residual.
        grid: Every stream without a mixer and with each one.
        baseline: Contender the others are compared with. None is the plain residual.
        controls: Add the controls that belong to the contenders, such as a baseline with as many parameters.
        file: TOML, JSON or YAML file with these options, or the compare.json of another folder.
        data: A data set: stdlib, files and folders, hf:DATASET or task:NAME. Given again, another table.
        task: The same as --data task:NAME.
        seeds: How many, or which.
        match: What is the same for all contenders.
        flops: Budget of a run for --match flops. None is what the baseline takes.
        lr: Learning rate; of several, each contender gets its best.
        lr_seeds: Seeds for choosing the rate: how many from 1000 on, or which.
        sizes: Presets or changes of one, such as nano,tiny or width=64:blocks=2,width=96:blocks=3.
        use: Python file that registers streams and mixers of your own. It is run: name only files you trust.
        jobs: Runs at once. None is one per GPU, or one per core.
        dry_run: Show what would be run, how long and how much room it takes; write nothing.
        report: Make the report at the end.
        json_output: Print one JSON document instead of tables.
        shared: Fields that all runs share.
    """
    from twoaxis.base.options import read_fields
    from twoaxis.comparison.request_file import make_request, merge_options

    local = {name: value for name, value in locals().items() if name in LINE}
    options = given(local | shared_fields(shared), sys.argv[1:])
    held = {} if file is None else read_fields(file)
    request = make_request(merge_options(held, options) if "rows" not in held else held)
    if "rows" in held and options:
        raise ValueError(f"{file} is a whole comparison; give it alone, then add {', '.join(options)} in a second call")
    if dry_run:
        return _dry_run(request, out, jobs, json_output)
    return _compare(request, out, jobs, report, json_output)


LINE = (
    *("stream", "mixer", "grid", "baseline", "controls", "data", "task", "seeds", "match", "flops", "lr", "lr_seeds"),
    *("sizes", "use"),
)
"""Arguments that say what is compared."""


def shared_fields(shared: Shared) -> dict[str, Any]:
    """The fields of a run that a comparison takes as they are, the model's parsed."""
    from twoaxis.comparison.request_file import FIELDS
    from twoaxis.training.fields import parse_model

    return {name: getattr(shared, name) for name in FIELDS} | {"model": parse_model(shared.model)}


def given(values: dict[str, Any], arguments: list[str]) -> dict[str, Any]:
    """Of values by option those whose option stands on the command line: only these speak to a folder or a file."""
    words = {argument.partition("=")[0].replace("_", "-") for argument in arguments if argument.startswith("--")}
    spelled = {name: name.replace("_", "-") for name in values}
    return {name: values[name] for name, dashed in spelled.items() if {f"--{dashed}", f"--no-{dashed}"} & words}


def _dry_run(request: Any, out: str, jobs: int | None, json_output: bool) -> int:
    from twoaxis.comparison.compare import measure, prepare
    from twoaxis.comparison.forecast import forecast, render
    from twoaxis.comparison.plan import Plan
    from twoaxis.comparison.workers import default_jobs
    from twoaxis.model.load import quiet

    quiet()
    plan = prepare(request, Plan.load(out), measure=measure)
    if jobs is None:
        jobs, _ = default_jobs(plan.base.device)
    found = forecast(plan, out, jobs, lambda configs, words: measure(configs, words, rounds=3, steps=1))
    print(json.dumps(found.to_dict(), indent=1) if json_output else render(found, out))
    return 0


def _compare(request: Any, out: str, jobs: int | None, report: bool, json_output: bool) -> int:
    from twoaxis.comparison.compare import Stopped, command_line, compare
    from twoaxis.model.load import quiet

    quiet()
    try:
        outcome = compare(request, out, jobs=jobs, command=command_line())
    except Stopped as stopped:
        print(f"twoaxis: stopped; go on with: twoaxis compare --out {out}", file=sys.stderr)
        return 128 + stopped.signal
    if report:
        from twoaxis.comparison.results import Comparison

        found = Comparison.load(out)
        saved = found.save()
        if json_output:
            print(json.dumps(found.to_dict(), indent=1, allow_nan=False))
        else:
            found.show()
            print("\n".join(map(str, saved.files)))
            if saved.note:
                print(saved.note)
    for failure in outcome.failures:
        print(f"twoaxis: failed: {failure.run.name}: {failure.message}", file=sys.stderr)
    for name in outcome.missing:
        print(f"twoaxis: missing: {name}", file=sys.stderr)
    for text in outcome.diverged:
        print(f"twoaxis: diverged: {text}", file=sys.stderr)
    if outcome.missing:
        print(f"twoaxis: the same command, or twoaxis compare --out {out}, tries these again", file=sys.stderr)
    return 1 if outcome.failures or outcome.missing else 0
