"""The commands that follow advice: probe a trained model, cost the short list in full, put it on, compare it small."""

from __future__ import annotations

import dataclasses
import shlex
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from twoaxis.base.files import user_path
from twoaxis.guide.suggest import Place
from twoaxis.model.deployment import Deployment
from twoaxis.model.presets import find_shape, preset_fields
from twoaxis.show.numbers import seconds

if TYPE_CHECKING:
    from twoaxis.guide.advise import Advice, Choice

SMALL = "nano"
"""The preset on which the short list is compared: minutes on a laptop, with compare's own budget and seeds."""
SEEDS = 3
"""Seeds that `twoaxis compare` takes by itself."""


class Command(NamedTuple):
    """A command to run next."""

    why: str  # what it tells
    text: str  # the command, ready for a shell
    seconds: float | None = None  # about how long it takes on this machine, where that is known

    def __str__(self) -> str:
        time = "" if self.seconds is None else f"; about {seconds(self.seconds)} on this machine"
        return f"# {self.why}{time}\n{self.text}"


def next_steps(advice: Advice) -> tuple[Command, ...]:
    """Commands for the short list of a ranking."""
    chosen = advice.ranked[: advice.top]
    if not chosen:
        return ()
    question = advice.question
    retrofit = question.start == "retrofit"
    steps = [_probe(question.shape, chosen)] if retrofit else []
    steps.append(
        Command(
            "everything they would cost at your shape",
            _join("cost", "--shape", question.shape, *_methods(chosen), *deployment_flags(question.deployment)),
        )
    )
    if retrofit:
        steps += [step for choice in chosen for step in _retrofit(question.shape, choice)]
    place = Place(find_shape(SMALL))
    small = [word for choice in chosen for word in (_flag(choice), choice.candidate.spelled(place).method)]
    steps.append(
        Command(
            "whether they help at all, on a small model (--data FOLDER for your own text; the thorough form has "
            "--seeds 5 --controls --lr 1e-3,2e-3,4e-3 and takes many times as long: --dry-run tells)",
            _join("compare", "--out", "runs/advice", *small, "--preset", SMALL, "--data", "stdlib"),
            comparison_seconds(len(chosen)),
        )
    )
    return tuple(steps)


@cache
def comparison_seconds(methods: int) -> float:
    """About how long the plain residual and so many methods take, from steps of the plain one on this machine."""
    from twoaxis.comparison.budget import measure_speeds
    from twoaxis.comparison.forecast import START
    from twoaxis.comparison.runner.launchers import default_jobs
    from twoaxis.training.config import TrainConfig

    config = TrainConfig(preset=SMALL, data=("stdlib",))
    vocabulary = preset_fields(SMALL)["vocab_size"]
    speed = measure_speeds({"plain": config}, vocabulary, rounds=1, within=0.0)["plain"].rate.median
    tokens = config.total_steps * config.tokens_per_step + 10 * config.eval_examples * config.context / 3
    return (1 + methods) * SEEDS * (START + tokens / speed) / default_jobs(config.device)[0]


def _source(shape: str) -> str:
    """The trained model, where the shape was read from its folder."""
    path = user_path(shape)
    return "MODEL" if not path.exists() else str(path.parent if path.is_file() else path)


def _probe(shape: str, chosen: tuple[Choice, ...]) -> Command:
    """Frozen weights first: minutes, and no model to keep."""
    source = _source(shape)
    named = " (MODEL: its folder, or its name on the hub)" if source == "MODEL" else ""
    return Command(
        f"would the model use them at all? Only they and the norms' scales learn; a lower bound{named}",
        _join("probe", source, *_methods(chosen), "--out", "probes/advice"),
    )


def _retrofit(shape: str, choice: Choice) -> tuple[Command, ...]:
    """Onto the model, then a first training run, then a look inside."""
    source = _source(shape)
    name = f"{choice.candidate.name}-{choice.candidate.form}".replace(" ", "-").replace("=", "").rstrip("-")
    folder = f"models/{name}"
    made = _join("retrofit", source, _flag(choice), choice.method, "--out", folder)
    return (
        Command(f"{choice.candidate.title} onto the model, equal at step 0", made),
        Command("and trained on from there", _join("train", "--from", folder, "--out", f"runs/{name}")),
        Command("and what its sites read", _join("inspect", f"runs/{name}/model", "--prompt", "The capital of France")),
    )


def _flag(choice: Choice) -> str:
    return f"--{choice.candidate.axis}"


def _methods(chosen: tuple[Choice, ...]) -> list[str]:
    return [word for choice in chosen for word in (_flag(choice), choice.method)]


def deployment_flags(deployment: Deployment) -> list[str]:
    """The options of `twoaxis cost` that give a deployment, defaults left out."""
    values = ((entry, getattr(deployment, entry.name)) for entry in dataclasses.fields(Deployment))
    given = {f"--{entry.name.replace('_', '-')}": value for entry, value in values if value != entry.default}
    return [word for flag, value in given.items() for word in ([flag] if value is True else [flag, str(value)])]


def _join(*words: str) -> str:
    return shlex.join(["twoaxis", *words])
