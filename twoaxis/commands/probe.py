"""The command that asks what a pretrained model would gain from a method: probe."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import tyro

from twoaxis.base.plugins import used
from twoaxis.commands.parsing import File, Folder, Launcher, Names, Numbers, Rates, plain, showing, word
from twoaxis.comparison.options import AMOUNTS, Until
from twoaxis.training.config import CommonFields

if TYPE_CHECKING:
    from twoaxis.comparison.results import Comparison


@showing(AMOUNTS)
@plain
def probe(
    source: Annotated[Any, tyro.conf.Positional, word("SOURCE")],
    *,
    out: Folder,
    stream: Names = (),
    mixer: Names = (),
    data: Annotated[Sequence[str], tyro.conf.arg(metavar="SOURCE")] = (),
    seeds: Numbers = None,
    until: Until | None = None,
    lr: Rates = None,
    jobs: int | None = None,
    launcher: Launcher = None,
    html: File = None,
    **fields: Unpack[CommonFields],
) -> Comparison:
    """Would a pretrained model use a stream or a mixer? A comparison of methods on frozen weights.

    Only what a method adds and the scales of the norms learn, for a few steps; the baseline is the norms alone, and
    low-rank additions with as many parameters run beside. Gains are lower bounds: the weights have adapted to the plain
    residual. The same command goes on where it was stopped; with more methods or seeds it adds them.
    Exit with 1 if a run failed.

    Args:
        source: What retrofit takes: a folder with safetensors, a GGUF file, a name on the hub, or in Python a model.
        out: Folder of the probe, which is that of a comparison.
        stream: A residual stream to try instead of the default ones.
        mixer: A local mixer to try instead of the default ones.
        data: Text to train and measure on. None is stdlib.
        seeds: How many, or which. None is four.
        until: resolved gives a method more seeds, as far as --seeds (16) go, until its difference is resolved.
        lr: Rate of the norms' scales, 0.003 if none is given; of several, each method gets its best. The rate of
            what is new is found.
        jobs: Runs at once. None is one per GPU, or one per core.
        launcher: Where runs are started. None is this machine.
        html: File for the report as a page; it is in DIR/report too.
        **fields: That all runs share; see `TrainConfig`.
    """
    named = (data,) if isinstance(data, str) else tuple(data)
    own = {"stream": stream, "mixer": mixer, "data": [named] if named else (), "seeds": seeds, "lr": lr, "use": used()}
    said = {name: value for name, value in (own | {"until": until}).items() if value not in (None, (), [])} | fields
    from twoaxis.base.machine import quiet
    from twoaxis.comparison.probe import probe
    from twoaxis.comparison.runner.launchers import find_launcher

    quiet()
    source = Path(source) if isinstance(source, os.PathLike) else source
    found = probe(source, out, said, jobs=jobs, launcher=find_launcher(launcher))
    if html is not None:
        from twoaxis.base.files import write_text
        from twoaxis.show import page

        write_text(html, page.render(found.document()))
        print(f"wrote {html}", file=sys.stderr)
    return found
