"""The command that trains a model: train."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from twoaxis.commands.app import app
from twoaxis.commands.emit import emit
from twoaxis.training.config import TrainConfig

if TYPE_CHECKING:
    from twoaxis.training.results import Result

Several = tyro.conf.UseAppendAction


@dataclass(frozen=True, kw_only=True)
class Fields(TrainConfig):
    """The fields of a run as the command line spells them."""

    source: Annotated[str | None, tyro.conf.arg(name="from", metavar="DIR")] = None
    """Folder of a saved model to go on from, in place of a preset."""
    data: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SOURCE")] = ("stdlib",)
    """stdlib, files and folders, hf:DATASET, or task:NAME[:option=value,...]."""
    model: Annotated[  # pyright: ignore[reportIncompatibleVariableOverride]
        tuple[str, ...], Several, tyro.conf.arg(metavar="FIELD=VALUE[,FIELD=VALUE]")
    ] = ()
    """Fields of TwoAxisConfig that replace the preset's."""

    def __post_init__(self) -> None:
        """Nothing: a run is checked when it is put together with what a file gives."""


@app.command
def train(
    *,
    out: Annotated[str, tyro.conf.arg(metavar="DIR")],
    config: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None,
    use: Annotated[tuple[str, ...], Several, tyro.conf.arg(metavar="FILE.py")] = (),
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
    fields: Annotated[Fields, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name="")] = Fields(),  # noqa: B008
) -> int:
    """Train a model. The same command goes on with a run that was interrupted, to the same bits.

    Exit with 1 if the loss stopped being a number, with 130 after Ctrl-C.

    Args:
        out: Folder of the run: its configuration, log, checkpoints, model and result.
        config: TOML, JSON or YAML file with fields of a run, or the run.json of another one. What is given here counts
            more.
        use: Python file that registers streams and mixers of your own. It is run: name only files you trust.
        json_output: Print the result as one JSON document.
        fields: Of the run.
    """
    from twoaxis.training.config_file import merge, read_fields

    run = merge({} if config is None else read_fields(config), given_fields(fields, sys.argv[1:]))
    from twoaxis.base.interrupt import Interrupted
    from twoaxis.base.plugins import use_files
    from twoaxis.training.machine import rank
    from twoaxis.training.reporting import check_reports

    check_reports(run.report_to)
    use_files(use)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is the result's; some reports greet there
            result = _train(run, out)
    except Interrupted as stopped:
        print(f"twoaxis: {stopped}", file=sys.stderr)
        return 128 + (stopped.signal or 2)
    if rank() > 0:
        return result.exit_code
    return emit(result, "json" if json_output else "text")


def given_fields(fields: Fields, arguments: list[str]) -> dict[str, Any]:
    """The fields whose options stand on the command line: only these speak to a file."""
    from twoaxis.commands.compare import given
    from twoaxis.training.config_file import parse_model

    values = {field.name: getattr(fields, field.name) for field in dataclasses.fields(TrainConfig)}
    values["from"] = values.pop("source")
    found = given(values, arguments)
    if "from" in found:
        found["source"] = found.pop("from")
    if "model" in found:
        found["model"] = parse_model(found["model"])
    return found


def _train(run: TrainConfig, out: str) -> Result:
    """Load the data and train, with a bar for each."""
    from twoaxis.training.train import finished

    done = finished(run, out)  # before anything heavy
    if done is not None:
        return done
    from twoaxis.data.load import bars, load_data
    from twoaxis.model.load import quiet
    from twoaxis.training.build import check, resolve
    from twoaxis.training.machine import rank
    from twoaxis.training.train import train

    quiet()
    check(resolve(run))
    with bars() if rank() == 0 else contextlib.nullcontext() as watch:
        data = load_data(resolve(run), watch=watch)
    with training_bar(run) as show:
        return train(run, out, watch=show, data=data)


@contextlib.contextmanager
def training_bar(run: TrainConfig) -> Iterator[Callable[[int, float | None], None]]:
    """A `watch` for `train` that shows a bar with the loss, tokens per second and time left on stderr.

    Args:
        run: what is trained.
    """
    from twoaxis.base.progress import Progress

    each, bar = run.tokens_per_step, None
    with contextlib.ExitStack() as stack:

        def show(step: int, loss: float | None) -> None:
            nonlocal bar
            if bar is None:
                bar = stack.enter_context(Progress("train", run.total_steps * each, "tokens", initial=step * each))
            if loss is not None:
                speed = (bar.done + each - bar.initial) / max(bar.seconds, 1e-9)
                bar.advance(each, f"step {step:,}  loss {loss:.4f}  {speed:,.0f} tokens/s")

        yield show
