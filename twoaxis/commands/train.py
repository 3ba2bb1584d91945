"""The command that trains a model: train."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from twoaxis.commands.parsing import File, Folder, plain
from twoaxis.training.config import RunFields

if TYPE_CHECKING:
    from twoaxis.commands.train_plan import TrainPlan
    from twoaxis.training.config import TrainConfig
    from twoaxis.training.result import Result


@plain
def train(
    *,
    out: Folder,
    config: File = None,
    dry_run: bool = False,
    **fields: Unpack[RunFields],
) -> Result | TrainPlan:
    """Train a model. The same call goes on with a run that was interrupted, to the same bits.

    Exit with 1 if the loss stopped being a number, with 130 after Ctrl-C.

    Args:
        out: Folder of the run: its configuration, log, checkpoints, model and result.
        config: TOML, JSON or YAML file with fields of a run, or the run.json of another one. What is given here counts
            more.
        dry_run: Show how processes would share the run and how much memory the fullest needs; train nothing.
        **fields: Of the run; see `TrainConfig`.
    """
    from twoaxis.training import train as training
    from twoaxis.training.config import merge, read_fields

    run = merge({} if config is None else read_fields(config), fields)
    if dry_run:
        from twoaxis.commands.train_plan import plan_training
        from twoaxis.data.load import load_data

        return plan_training(run, load_data(run).vocab_size)
    # stdout is the result's; some loggers greet there
    with contextlib.redirect_stdout(sys.stderr), training_bar(run) as show:
        result = training.train(run, out, on_step=show)
    _say_format(Path(out) / "model")
    return result


def _say_format(folder: Path) -> None:
    """Name the option that keeps a trained model from being one that transformers opens."""
    from twoaxis.base.files import read_json
    from twoaxis.model.save import CONFIG, DECODER, read_config, why_no_graft
    from twoaxis.training.engines.processes import warn

    if (folder / CONFIG).is_file() and read_json(folder / CONFIG).get("model_type") == DECODER:
        warn(f"transformers cannot open {folder}: {why_no_graft(read_config(folder / CONFIG))}")


@contextlib.contextmanager
def training_bar(run: TrainConfig) -> Iterator[Callable[[int, float | None], None]]:
    """Context manager with a callback for `train` that shows a bar with the loss, tokens per second and time left.

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
