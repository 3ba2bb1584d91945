"""`probe`: would a pretrained model use a residual stream or a mixer? A comparison on frozen weights, in minutes.

    frozen             the source as it is                              a check, no contender
    norms              the scales of its norms learn                    the baseline
    norms + LoRA r     and low-rank additions to its linear layers      as many parameters as the largest method
    each method        and what the method adds

A model gains on a text by adapting to it, whatever learns: what the norms' scales gain in the same steps is not the
method's merit. They learn in every contender, so a method is judged by what it adds to them. The folder is that of a
comparison (`twoaxis compare --from SOURCE --train new+norms --controls`): more methods and seeds are added to it, and
`twoaxis report` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twoaxis.base.files import atomic_folder
from twoaxis.comparison.options import AMOUNTS, command_line
from twoaxis.comparison.plan import Plan
from twoaxis.comparison.results import Comparison
from twoaxis.comparison.run import compare
from twoaxis.comparison.runner.launchers import Launcher
from twoaxis.pretrained.model_for_training import is_ours

BASELINE = "standard:label=norms"
STREAMS, MIXERS = ("depth_attention:heads=3,head_width=16",), ("short_swa:heads=3,head_width=16",)
"""What is tried where nothing is named: the same attention over the last sub-layers and over the last tokens."""
AT_HAND = "source"
"""Folder of a source that was given as a model, in that of the probe."""


def probe(
    source: Any,
    out: str | Path,
    options: Mapping[str, Any],
    *,
    jobs: int | None = None,
    launcher: Launcher | None = None,
) -> Comparison:
    """Run a probe, or what is missing of it; its report is written.

    Args:
        source: what `retrofit` takes. The tokens of a model at hand are bytes unless `tokenizer` is among the options.
        out: the folder; new, or one to go on with or to add to.
        options: of a comparison; `stream` and `mixer` replace the methods that are tried.
        jobs: runs at once; None is as many as the launcher can run.
        launcher: starts the workers; None is one on this machine.
    """
    place, said = Path(out), dict(options)
    if not isinstance(source, str | Path):
        said, source = {"tokenizer": "bytes"} | said, _save(source, place / AT_HAND)
    elif is_ours(str(source)):
        raise ValueError(
            f"{source} is a model of twoaxis, which twoaxis train --from goes on with; a probe takes a model of "
            "transformers: a folder with safetensors, a GGUF file or a name on the hub"
        )
    command = command_line(out, None, options, ["probe", str(source)])
    asked = said | {"source": str(source), "controls": True}
    if Plan.load(place) is None:
        asked = new_options(asked)
    return compare(asked, place, jobs=jobs, command=command, launcher=launcher)


def new_options(said: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a comparison that a new probe is."""
    asked = {**AMOUNTS, "train": "new+norms", **said}
    if "stream" not in said and "mixer" not in said:
        asked |= {"stream": STREAMS, "mixer": MIXERS}
    steps = asked["steps"] if "tokens" not in said else None
    if steps is None:
        del asked["steps"]
    else:
        asked.setdefault("eval_every", max(1, steps))  # its evaluation costs as much as many steps
    return asked | {"stream": (BASELINE, *_texts(asked.get("stream", ()))), "baseline": "norms"}


def _texts(given: str | Sequence[str]) -> Sequence[str]:
    return (given,) if isinstance(given, str) else given


def _save(model: Any, folder: Path) -> Path:
    """Write a model at hand where workers can read it."""
    from twoaxis.pretrained.source import open_source

    open_source(model)  # refuses what is none
    with atomic_folder(folder, replace=True) as partial:
        model.save_pretrained(partial)
    return folder
