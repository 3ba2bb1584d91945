"""`probe`: would a pretrained model use a residual stream or a mixer? Asked in minutes, on frozen weights.

    source, frozen ──► one rung of the ladder on it ──► its few parameters trained on text ──► loss on held-out text
                       for every data seed                                                     against the source's

A folder holds everything: `probe.json` is the plan, `results/RUNG/seed-N/result.json` one finished run each, and the
rest is the report. The same call goes on where it was stopped and redoes nothing; with more rungs or seeds it adds
them; with other settings it is refused. A worker loads the source's weights once, and its runs share them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from twoaxis.base.files import atomic_folder, claim, read_json, remove_partial, write_json
from twoaxis.base.machine import hardware_line, physical_cores, reproducible, versions
from twoaxis.base.options import from_record
from twoaxis.comparison.decisions import choose
from twoaxis.comparison.probe_plan import (
    PLAN,
    RATE_SEED,
    Amounts,
    ProbeConfig,
    ProbePlan,
    ProbeResult,
    Rung,
    choose_rungs,
)
from twoaxis.comparison.runner.launchers import Launcher, LocalLauncher
from twoaxis.comparison.runner.watch import Watch
from twoaxis.comparison.runner.worker import Beat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from transformers.modeling_utils import PreTrainedModel

    from twoaxis.comparison.probe_report import Probed
    from twoaxis.comparison.probe_run import Material
    from twoaxis.comparison.probe_text import ProbeText
    from twoaxis.pretrained.source import Source

RESULTS, FROZEN, RESULT = "results", "source", "result.json"
"""The folder of results, the frozen source's folder among them, and the file of a result."""
AT_HAND = ".source"
"""Folder of a source that was given as a model, while the probe runs."""
WORK = "twoaxis.comparison.probe:Probes"
"""What a worker of a probe loads."""
RATE_WINDOWS = 6
"""Windows of training text that a learning rate is chosen on."""


def probe(
    source: str | Path | PreTrainedModel,
    *,
    out: str | Path,
    streams: Sequence[str] = (),
    mixers: Sequence[str] = (),
    config: ProbeConfig | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    jobs: int | None = None,
    command: str | None = None,
    launcher: Launcher | None = None,
) -> Probed:
    """Measure what each rung gains on held-out text over the frozen source.

    Args:
        source: what `twoaxis.retrofit` takes.
        out: folder of the probe; new, empty, or one to go on with.
        streams: NAME[:option=value,...] of the streams to try instead of the default ladder.
        mixers: the same of mixers.
        config: how much is trained and measured.
        tokenizer: of a source that is a model at hand; without one, tokens are bytes.
        jobs: runs at once; None is one per core.
        command: how the probe was started, for the report.
        launcher: starts the worker; None is one on this machine.
    """
    from twoaxis.data.tokenizer import need_transformers

    need_transformers()
    from twoaxis.comparison.probe_report import Probed
    from twoaxis.pretrained.source import open_source

    out, config = Path(out), config or ProbeConfig()
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; give a folder")
    if out.is_dir() and not (out / PLAN).exists() and any(not p.name.startswith(".") for p in out.iterdir()):
        raise ValueError(f"{out} is not empty and holds no probe; choose another folder")
    rungs = choose_rungs(streams, mixers, config.rates)
    found = open_source(source)
    with reproducible(1), claim(out), _at_hand(found, tokenizer, out) as place:
        remove_partial(out)
        plan = _plan(found, _text(found, tokenizer, config), rungs, config, out)
        dataclasses.replace(plan, place=place, command=plan.command or command).save(out)
        work = Probes(out)
        count = physical_cores() if jobs is None else jobs
        failures = Watch("probe", work, unit="passes").run(launcher or LocalLauncher(), WORK, out, count)
        for rung in work.plan.rungs:
            if work.chosen(rung) is None and all(work.result(each, RATE_SEED) for each in rung.candidates):
                raise ValueError(
                    f"{rung.method} works with none of the learning rates tried: every training diverged; "
                    "give smaller --rates"
                )
        made = dataclasses.replace(Probed.load(out), failed=tuple(f"{name}: {told}" for name, told in failures))
        made.save()
        return made


def _plan(source: Source, text: ProbeText, rungs: Sequence[Rung], config: ProbeConfig, out: Path) -> ProbePlan:
    """The folder's plan, or a new one, with what is asked for; a method that does not fit the source is refused."""
    from twoaxis.comparison.ladder import costs
    from twoaxis.comparison.probe_run import step_seconds

    shape: Any = source.config
    positions = getattr(shape, "max_position_embeddings", None)
    if positions is not None and config.context > positions:
        raise ValueError(f"context is {config.context}, the source is made for {positions} positions")
    plan = ProbePlan(
        config=config,
        source=source.name,
        family=shape.model_type,
        blocks=shape.num_hidden_layers,
        digest=source.digest(),
        place="",
        text=text.facts(),
        hardware=hardware_line(),
        versions=versions(),
    )
    if (stored := ProbePlan.load(out)) is not None:
        plan = stored.grow(out, plan)
    known = [rung.spelling for rung in plan.rungs]
    new = [rung for rung in rungs if rung.spelling not in known]
    material = _material(source, text) if new else None
    if material is not None:
        model, context = material.source, config.context
        new = [dataclasses.replace(rung, costs=costs(model, rung, context), steps=config.steps) for rung in new]
    if config.seconds is not None and material is not None:  # measured once: the plan keeps it
        seconds = config.seconds
        steps = [max(1, int(seconds / step_seconds(material, rung, config.batch))) for rung in new]
        new = [dataclasses.replace(rung, steps=count) for rung, count in zip(new, steps, strict=True)]
    shared = text.shared(plan.config.seeds, config.held_out)
    return dataclasses.replace(plan, rungs=(*plan.rungs, *new), shared=shared)


# Source and text, in the coordinator and in the worker.


@contextlib.contextmanager
def _at_hand(source: Source, tokenizer: Any, out: Path) -> Iterator[str]:
    """Context manager with the place from which a worker can load the source; a model at hand is saved there."""
    if source.model is None:
        yield str(Path(source.name).resolve()) if Path(source.name).exists() else source.name
        return
    place = out / AT_HAND
    with atomic_folder(place, replace=True) as partial:
        source.model.save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
    try:
        yield str(place.resolve())
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _text(source: Source, tokenizer: Any, config: ProbeConfig) -> ProbeText:
    from twoaxis.comparison.probe_text import read_text
    from twoaxis.data.tokenizer import Bytes, Pretrained

    size = cast(Any, source.config).vocab_size
    tokenizer = source.tokenizer() if tokenizer is None else tokenizer
    known = Bytes(size) if tokenizer is None else Pretrained(tokenizer, source.name, size)
    return read_text(config.data, known, config.context, config.text_field)


def _material(source: Source, text: ProbeText) -> Material:
    """The source's weights and the text."""
    import torch

    from twoaxis.comparison.probe_run import Material

    model = source.load(torch.float32)
    if source.model is not None:
        model = copy.deepcopy(model).float()
    return Material(model.eval().requires_grad_(False), text)


# Running.


class Probes:
    """The runs of a probe's folder, as a worker, a coordinator and a report see them.

    Args:
        folder: the probe's.
    """

    def __init__(self, folder: Path) -> None:
        plan = ProbePlan.load(folder)
        if plan is None:
            raise ValueError(f"{folder} holds no probe: there is no {PLAN} in it")
        self.folder, self.plan = folder, plan
        self.material: Material | None = None
        self._results: dict[Path, ProbeResult] = {}

    def prepare(self) -> None:
        """Load the source and the text: runs have them without loading them again."""
        from twoaxis.model.load import quiet
        from twoaxis.pretrained.source import open_source

        quiet()
        source = open_source(self.plan.place)
        with reproducible(1):
            text = _text(source, None, self.plan.config)
            if text.fingerprint != self.plan.text.fingerprint:
                data = ", ".join(self.plan.config.data)
                raise ValueError(f"the text {data} has changed since the probe was planned")
            self.material = _material(source, text)

    def units(self) -> list[ProbeUnit]:
        """Runs that choose rates, then every rung whose rate is known, seed by seed: whole seeds come first."""
        several = [rung for rung in self.plan.rungs if len(rung.rates) > 1]
        units = [ProbeUnit(self, each, RATE_SEED) for rung in several for each in rung.candidates]
        known = [rung for each in self.plan.rungs if (rung := self.chosen(each)) is not None]
        return units + [ProbeUnit(self, rung, seed) for seed in self.plan.config.seeds for rung in (None, *known)]

    def later(self) -> list[float]:
        """Runs of rungs whose rate is not known yet."""
        waiting = [rung for rung in self.plan.rungs if self.chosen(rung) is None]
        return [ProbeUnit(self, rung, seed).size for rung in waiting for seed in self.plan.config.seeds]

    def chosen(self, rung: Rung) -> Rung | None:
        """The rung with the best rate, once all have a result; None before, and where every one diverged."""
        if len(rung.rates) == 1:
            return rung.candidates[0]
        found = {each.rate: self.result(each, RATE_SEED) for each in rung.candidates}
        ended = {rate: [result.loss] for rate, result in found.items() if result is not None}
        if len(ended) < len(found):
            return None
        choice = choose(ended)
        return None if choice.losses[choice.lr] is None else dataclasses.replace(rung, rate=choice.lr)

    def result(self, rung: Rung | None, seed: int) -> ProbeResult | None:
        """The result of a run, read once; None where it is not finished."""
        path = ProbeUnit(self, rung, seed).folder / RESULT
        if path not in self._results and path.exists():
            remedy = "Remove it, and the run is made again"
            self._results[path] = from_record(ProbeResult, read_json(path), str(path), remedy)
        return self._results.get(path)


class ProbeUnit(NamedTuple):
    """One run of a probe as a worker's unit.

    Attributes:
        probes: whose it is.
        rung: what is put on the source; None is the frozen source itself.
        seed: of the data.
    """

    probes: Probes
    rung: Rung | None
    seed: int

    @property
    def folder(self) -> Path:
        """Of the run."""
        return self.probes.folder / RESULTS / (FROZEN if self.rung is None else self.rung.key) / f"seed-{self.seed}"

    @property
    def name(self) -> str:
        """For people."""
        rate = f", rate {self.rung.rate:g}" if self.seed == RATE_SEED and self.rung is not None else ""
        return f"{FROZEN if self.rung is None else self.rung.name}, seed {self.seed}{rate}"

    @property
    def amounts(self) -> Amounts:
        """How much is trained and measured."""
        config, steps = self.probes.plan.config, 0 if self.rung is None else self.rung.steps
        if self.seed == RATE_SEED:
            return Amounts(steps, config.batch, RATE_WINDOWS, 0, choosing=True)
        return Amounts(steps, config.batch, config.held_out, config.site_windows)

    @property
    def size(self) -> float:
        """Passes through the model."""
        return self.amounts.passes(len(self.probes.plan.groups))

    def outcome(self) -> str | None:
        """Its loss; None while it is not finished."""
        result = self.probes.result(self.rung, self.seed)
        return result and ("diverged" if result.loss is None else f"loss {result.loss:.4f}")

    def perform(self, beat: Beat, slot: int) -> None:
        """Train and measure."""
        from twoaxis.comparison.probe_run import run

        assert self.probes.material is not None
        done = 0

        def watch() -> None:
            nonlocal done
            done += 1
            beat(done / self.size, "")

        with reproducible(1), claim(self.folder):
            remove_partial(self.folder)
            result = run(self.probes.material, self.rung, self.seed, self.amounts, watch)
            write_json(self.folder / RESULT, result.to_dict())
