"""The command that compares methods: compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import tyro

from twoaxis.commands.parsing import File, Folder, Launcher, Names, Numbers, Rates, plain, word
from twoaxis.comparison.options import COMPARED, Match, Until
from twoaxis.training.config import SharedFields

if TYPE_CHECKING:
    from twoaxis.comparison.forecast import Forecast
    from twoaxis.comparison.results import Comparison

Several = tyro.conf.UseAppendAction


@plain
def compare(
    *,
    out: Folder,
    stream: Names = (),
    mixer: Names = (),
    contenders: tyro.conf.Suppress[Sequence[Any]] = (),
    grid: bool = False,
    baseline: Annotated[str | None, tyro.conf.arg(metavar="LABEL")] = None,
    controls: bool = False,
    file: File = None,
    data: Annotated[Sequence[Sequence[str]], Several, tyro.conf.arg(metavar="SOURCE")] = (),
    task: Names = (),
    seeds: Numbers = None,
    until: Until | None = None,
    margin: float | None = None,
    match: Match | None = None,
    flops: float | None = None,
    lr: Rates = None,
    lr_seeds: Numbers = None,
    sizes: Annotated[str | Sequence[str] | None, word("SIZE[,SIZE,...]")] = None,
    recipe_check: bool = False,
    exchange: bool = False,
    use: Annotated[Sequence[str], Several, tyro.conf.arg(metavar="FILE.py")] = (),
    jobs: int | None = None,
    launcher: Launcher = None,
    dry_run: bool = False,
    report: bool = True,
    **fields: Unpack[SharedFields],
) -> Comparison | Forecast:
    """Train contenders side by side and report what is better, by how much and how surely.

    The same call goes on where it was stopped; with more contenders, data, sizes or seeds it adds them to the folder.
    Exit with 1 if a run failed.

    Args:
        out: Folder of the comparison. Alone, it goes on with what the folder holds.
        stream: A residual stream to compare. An option label=TEXT names it in tables.
        mixer: A local mixer to compare, on the plain residual.
        contenders: Further ones, as tables of stream, mixer, label, model and train.
        grid: Every stream without a mixer and with each one.
        baseline: Contender the others are compared with. None is the plain residual.
        controls: Add the controls that belong to the contenders, such as a baseline with as many parameters.
        file: TOML, JSON or YAML file with these options, or the compare.json of another folder.
        data: A data set: stdlib, files and folders, hf:DATASET or task:NAME. Given again, another table.
        task: The same as --data task:NAME.
        seeds: How many, or which. None is six.
        until: resolved gives a contender 4 seeds, then 8, then up to --seeds (16), until its difference is resolved.
        margin: A difference in loss that does not matter: contenders within it are called equivalent.
        match: What is the same for all contenders. None is tokens.
        flops: Budget of a run for --match flops. None is what the baseline takes.
        lr: Learning rate; of several, each contender gets its best. None is 0.004.
        lr_seeds: Seeds for choosing the rate: how many from 1000 on, or which. None is six.
        sizes: Presets or changes of one, such as nano,tiny or width=64:blocks=2,width=96:blocks=3.
        recipe_check: Also run the baseline with half and twice the warm-up and the rate.
        exchange: Also run the baseline with twice the tokens, to tell what a lower loss is worth in tokens.
        use: Python file that registers streams and mixers of your own. It is run: name only files you trust.
        jobs: Runs at once. None is one per GPU, or one per core.
        launcher: Where runs are started. None is this machine; a second one joins by the same command on the same
            folder.
        dry_run: Show what would be run, how long and how much memory and disk it takes; write nothing.
        report: Make the report at the end.
        **fields: That all runs share; see `TrainConfig`.
    """
    own = locals()
    said: dict[str, Any] = {name: own[name] for name in COMPARED if own[name] is not False}
    said = {name: value for name, value in said.items() if value not in (None, (), [])} | fields
    from twoaxis.base.machine import quiet
    from twoaxis.comparison.run import read_options

    quiet()
    options = read_options(file, said)
    if dry_run:
        return _forecast(options, out, jobs)
    from twoaxis.comparison.options import command_line
    from twoaxis.comparison.run import compare
    from twoaxis.comparison.runner.launchers import find_launcher

    places, command = find_launcher(launcher), command_line(out, file, said)
    return compare(options, out, jobs=jobs, command=command, launcher=places, report=report)


def _forecast(options: Mapping[str, Any], out: str, jobs: int | None) -> Forecast:
    from twoaxis.comparison.budget import measure_speeds
    from twoaxis.comparison.forecast import forecast
    from twoaxis.comparison.run import prepare
    from twoaxis.comparison.runner.launchers import default_jobs

    plan = prepare(options, out)
    count = default_jobs(plan.base.device)[0] if jobs is None else jobs
    return forecast(plan, out, count, lambda configs, words: measure_speeds(configs, words, rounds=3, within=0.0))
