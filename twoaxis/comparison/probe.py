"""`probe`: would a pretrained model use a residual stream or a mixer? Asked in minutes, on frozen weights.

    source, frozen ──► one rung of the ladder on it ──► its few parameters trained on text ──► loss on held-out text
                       for every data seed                                                     against the source's

A folder holds everything: `probe.json` is the plan, `results/RUNG/seed-N/result.json` one finished run each, and the
rest is the report. The same call goes on where it was stopped and redoes nothing; with more rungs or seeds it adds
them; with other settings it is refused. A worker loads the source's weights once, and its runs share them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

from twoaxis.base.files import atomic_folder, claim, read_json, remove_partial, write_json
from twoaxis.base.interrupt import Interrupted
from twoaxis.base.machine import hardware_line, physical_cores, reproducible, versions
from twoaxis.base.options import Count, Options, Positive, at_least, check_type
from twoaxis.comparison.runner.launchers import Launcher, LocalLauncher
from twoaxis.comparison.runner.watch import Watch, failure
from twoaxis.comparison.runner.worker import TRIES, Beat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from transformers.modeling_utils import PreTrainedModel

    from twoaxis.comparison.ladder import Rung
    from twoaxis.comparison.probe_report import Probed
    from twoaxis.comparison.probe_run import Amounts, Material
    from twoaxis.comparison.probe_text import ProbeText
    from twoaxis.pretrained.source import Source

PLAN, RESULTS, FROZEN, RESULT = "probe.json", "results", "source", "result.json"
"""The plan's file, the folder of results, the frozen source's folder among them, and the file of a result."""
AT_HAND = ".source"
"""Folder of a source that was given as a model, while the probe runs."""
WORK = "twoaxis.comparison.probe:Probes"
"""What a worker of a probe loads."""
FORMAT = 2
RATE_SEED = 1000
"""The seed on which learning rates are chosen; it is no data seed."""
RATE_WINDOWS = 6
"""Windows of training text that a learning rate is chosen on."""
UNKNOWN = 0.1
"""A method that is not on the ladder is tried with these parts of the factors given too: its rate is anyone's guess."""


@dataclass(frozen=True, kw_only=True)
class ProbeConfig(Options):
    """How much a probe trains and measures."""

    data: tuple[str, ...] = ("stdlib",)
    """Text: stdlib, files, folders or hf:DATASET."""
    text_field: str = "text"
    """Where records keep their text."""
    context: Annotated[int, at_least(2)] = 128
    """Tokens of a window."""
    batch: Count = 1
    """Windows per training step."""
    steps: Count = 12
    """Training steps of each rung and seed."""
    seconds: Positive | None = None
    """Training time of each rung and seed instead of steps: turned into steps once, when the folder is new."""
    held_out: Count = 12
    """Held-out windows that each seed measures."""
    site_windows: Annotated[int, at_least(0)] = 3
    """Of them, those measured again with each group of sites switched off; 0 leaves the sites out."""
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    """Data seeds."""
    rates: tuple[Positive, ...] = (1.0, 0.3)
    """Factors of each rung's own learning rate; of several, each rung gets its best on training text. A method that is
    not on the ladder is also tried with a tenth of them."""

    def validate(self) -> None:
        """At least one seed and one rate, and no seed twice."""
        if not self.rates:
            raise ValueError("rates must be positive factors, at least one, got none")
        if len(set(self.seeds)) < len(self.seeds) or not self.seeds or min(self.seeds) < 0:
            raise ValueError(f"seeds must be different numbers from 0 on, at least one, got {list(self.seeds)}")
        if RATE_SEED in self.seeds:
            raise ValueError(f"seeds must not have {RATE_SEED}, on which learning rates are chosen")

    def fixed(self) -> dict[str, Any]:
        """What a folder's results have in common besides the source and the text."""
        names = ("context", "batch", "held_out", "site_windows", "seconds")
        given = {name: getattr(self, name) for name in names} | {"rates": list(self.rates)}
        return given | {"steps": self.steps if self.seconds is None else None}


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
    out, config = Path(out), config or ProbeConfig()
    from twoaxis.data.tokenizer import need_transformers

    need_transformers()
    from twoaxis.comparison.probe_report import Probed
    from twoaxis.pretrained.families import check_config
    from twoaxis.pretrained.source import open_source

    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    _check_out(out)
    rungs = choose_rungs(streams, mixers)
    found = open_source(source)
    check_config(found.config)
    with reproducible(1), claim(out), _at_hand(found, tokenizer, out) as place:
        remove_partial(out)
        costs = _check_rungs(found, rungs, config.context)
        text = _text(found, tokenizer, config)
        plan = _plan(out, found, text, config, command)
        plan["place"] = place
        known = [entry.method for entry in tried_of(plan)]
        new = [rung for rung in rungs if (rung.stream, rung.mixer) not in known]
        steps = _steps(found, text, new, config)
        for rung in new:
            candidates = _candidates(rung, config)
            plan["steps"] |= {each.key: plan["steps"].get(each.key, steps[rung]) for each in candidates}
            rates, its = [each.rate for each in candidates], costs[rung.stream, rung.mixer]
            plan["tried"].append({"rung": rung.to_dict(), "rates": rates, "costs": its})
        write_json(out / PLAN, plan)  # steps that were measured stay as they are
        work = Probes(out)
        watch = Watch("probe", work, unit="passes", changed=work.keep_rates)
        count = physical_cores() if jobs is None else jobs
        try:
            failures = watch.run(LocalLauncher() if launcher is None else launcher, WORK, out, count)
        except Interrupted as stopped:
            raise Interrupted("stopped; the same command goes on from there", stopped.signal) from stopped
        work.keep_rates()
        lost = [entry for entry in tried_of(work.plan()) if work.chosen(entry) is None and work.all_ended(entry)]
        if lost:
            told = next((each.message for each in failures), "every training diverged")
            method = lost[0].rung.method
            raise ValueError(f"{method} works with none of the learning rates tried: {told}; give smaller --rates")
        made = dataclasses.replace(Probed.load(out), failed=tuple(f"{name}: {told}" for name, told in failures))
        made.save()
        return made


def choose_rungs(streams: Sequence[str], mixers: Sequence[str]) -> tuple[Rung, ...]:
    """The control and the rungs asked for, or the whole ladder."""
    from twoaxis.comparison.ladder import CONTROL, LADDER, Rung, own_rate

    asked = [(stream, stream, None) for stream in streams]
    asked += [(mixer, "standard", mixer) for mixer in mixers]
    chosen = [
        Rung(name=name, what="as asked", stream=stream, mixer=mixer, rate=own_rate(stream, mixer) or Rung.rate)
        for name, stream, mixer in asked
    ]
    known = {(rung.stream, rung.mixer): rung for rung in LADDER}
    rungs = [known.get((rung.stream, rung.mixer), rung) for rung in chosen] or list(LADDER)
    if double := [rung.name for rung in rungs if rungs.count(rung) > 1]:
        raise ValueError(f"{double[0]} is asked for twice")
    if any(rung.control for rung in rungs):
        raise ValueError("standard adds nothing to a model; the control is always there")
    return (CONTROL, *rungs)


# The plan.


class Tried(NamedTuple):
    """A rung that was asked for, and the learning rates that are tried on it.

    Attributes:
        rung: with the rate of the ladder.
        candidates: the same with each rate that is tried.
        costs: see `ladder.Costs`.
    """

    rung: Rung
    candidates: tuple[Rung, ...]
    costs: dict[str, Any]

    @property
    def method(self) -> tuple[str, str | None]:
        """Its stream and mixer."""
        return self.rung.stream, self.rung.mixer


def rungs_of(plan: Mapping[str, Any]) -> list[Rung]:
    """The rungs of a plan whose rate is chosen, the control first."""
    from twoaxis.comparison.ladder import Rung

    return [Rung(**entry) for entry in plan["rungs"]]


def tried_of(plan: Mapping[str, Any]) -> list[Tried]:
    """All rungs of a plan, with the rates that are tried."""
    from twoaxis.comparison.ladder import Rung

    found = []
    for entry in plan["tried"]:
        rung = Rung(**entry["rung"])
        candidates = tuple(dataclasses.replace(rung, rate=rate) for rate in entry["rates"])
        found.append(Tried(rung, candidates, entry["costs"]))
    return found


def read_plan(out: Path) -> dict[str, Any]:
    """The plan of a folder; one of another version, or damaged, is an error that names file and field."""
    path, plan = out / PLAN, read_json(out / PLAN)
    if not isinstance(plan, dict) or plan.get("format") != FORMAT:
        raise ValueError(f"{path} is not the plan of a probe of this version; choose another folder")
    kinds = {"source": dict, "groups": list, "data": list, "fixed": dict, "seeds": list, "rungs": list, "tried": list}
    at = ""
    try:
        for at, kind in (kinds | {"costs": dict, "steps": dict}).items():
            if not isinstance(plan.get(at), kind):
                raise ValueError(f"a {kind.__name__} is wanted, got {plan.get(at)!r}")
        at = "seeds"
        check_type("seeds", tuple(plan["seeds"]), tuple[int, ...])
        at = "rungs"
        keys = [rung.key for rung in rungs_of(plan)]
        at = "tried"
        keys += [rung.key for entry in tried_of(plan) for rung in entry.candidates]
        at = "steps"
        for key in keys:
            check_type(f"steps of {key}", plan["steps"][key], Count)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged at {at}: {error}. Put back what stood there") from error
    return plan


def _plan(out: Path, source: Source, text: ProbeText, config: ProbeConfig, command: str | None) -> dict[str, Any]:
    """The folder's plan: a new one without rungs, or the one that stands there; with the seeds asked for."""
    from twoaxis.comparison.ladder import group_names

    shape: Any = source.config
    fixed = config.fixed() | {"source": source.digest(), "text": text.fingerprint}
    if (out / PLAN).exists():
        plan = read_plan(out)
        changed = [
            f"{name}: {plan['fixed'].get(name)} there, {value} now"
            for name, value in fixed.items()
            if plan["fixed"].get(name) != value
        ]
        if changed:
            raise ValueError(
                f"{out} holds a probe with other settings ({'; '.join(changed)}); choose another folder, or give the "
                "settings that stand in its probe.json"
            )
    else:
        plan = {
            "format": FORMAT,
            "source": {"name": source.name, "kind": source.kind, "family": shape.model_type},
            "groups": list(group_names(shape.num_hidden_layers)),
            "width": shape.hidden_size,
            "blocks": shape.num_hidden_layers,
            "text": text.describe(),
            "fixed": fixed,
            "seeds": [],
            "rungs": [],
            "tried": [],
            "costs": {},
            "steps": {},
            "command": command,
            "hardware": hardware_line(),
            "versions": versions(),
        }
    plan["data"], plan["text_field"] = list(config.data), config.text_field
    plan["seeds"] += [seed for seed in config.seeds if seed not in plan["seeds"]]
    plan["shared_documents"] = text.shared(plan["seeds"], config.held_out)
    return plan


def _candidates(rung: Rung, config: ProbeConfig) -> list[Rung]:
    """The rung with each learning rate that is tried."""
    from twoaxis.comparison.ladder import own_rate

    factors = config.rates
    if len(factors) > 1 and own_rate(rung.stream, rung.mixer) is None:
        factors += tuple(factor * UNKNOWN for factor in config.rates)
    return [dataclasses.replace(rung, rate=rung.rate * factor) for factor in dict.fromkeys(factors)]


def _steps(source: Source, text: ProbeText, rungs: Sequence[Rung], config: ProbeConfig) -> dict[Rung, int]:
    """Steps of each rung: those given, or as many as fit into the seconds given."""
    if config.seconds is None or not rungs:
        return dict.fromkeys(rungs, config.steps)
    from twoaxis.comparison.probe_run import Amounts, step_seconds

    material, amounts = _material(source, text), Amounts(0, config.batch, config.held_out, config.site_windows)
    return {rung: max(1, int(config.seconds / step_seconds(material, rung, amounts))) for rung in rungs}


def _check_out(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; give a folder")
    if out.is_dir() and not (out / PLAN).exists() and any(not p.name.startswith(".") for p in out.iterdir()):
        raise ValueError(f"{out} is not empty and holds no probe; choose another folder")


def _check_rungs(source: Source, rungs: Sequence[Rung], context: int) -> dict[tuple[str, str | None], dict[str, Any]]:
    """The costs of each rung by its methods; a method that does not fit the source is an error before anything runs."""
    from twoaxis.comparison.ladder import costs

    positions = getattr(source.config, "max_position_embeddings", None)
    if positions is not None and context > positions:
        raise ValueError(f"context is {context}, the source is made for {positions} positions")
    return {(rung.stream, rung.mixer): costs(source.config, rung, context)._asdict() for rung in rungs}


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
    from twoaxis.pretrained.families import state

    model: Any = source.load(torch.float32)
    return Material(source.config, {name: tensor.detach().float() for name, tensor in state(model)}, text)


# Running.


class Probes:
    """The runs of a probe's folder, as a worker and a coordinator see them.

    Args:
        folder: the probe's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.material: Material | None = None
        self._losses: dict[Path, float | None] = {}
        self._read: tuple[int, dict[str, Any]] | None = None

    def prepare(self) -> None:
        """Load the source and the text: runs have them without loading them again."""
        from twoaxis.model.load import quiet
        from twoaxis.pretrained.source import open_source

        quiet()
        plan = self.plan()
        source = open_source(plan["place"])
        config = ProbeConfig(data=tuple(plan["data"]), text_field=plan["text_field"], context=plan["fixed"]["context"])
        with reproducible(1):
            text = _text(source, None, config)
            if text.fingerprint != plan["fixed"]["text"]:
                raise ValueError(f"the text {', '.join(config.data)} has changed since the probe was planned")
            self.material = _material(source, text)

    def plan(self) -> dict[str, Any]:
        """As it stands in the folder."""
        mark = (self.folder / PLAN).stat().st_mtime_ns
        if self._read is None or self._read[0] != mark:
            self._read = mark, read_plan(self.folder)
        return self._read[1]

    def units(self) -> list[ProbeUnit]:
        """Runs that choose rates, then every rung whose rate is known, seed by seed: whole seeds come first."""
        plan = self.plan()
        tried, decided = tried_of(plan), self._decided(plan)
        choosing = [
            (entry, self._unit(plan, rung, RATE_SEED))
            for entry in tried
            for rung in entry.candidates
            if _several(entry)
        ]
        units = [unit for entry, unit in choosing if entry.method not in decided or unit.outcome() is not None]
        known = [rung for entry in tried if (rung := self.chosen(entry)) is not None]
        for seed in plan["seeds"]:
            units += [self._unit(plan, rung, seed) for rung in (None, *known)]
        return units

    def later(self) -> list[float]:
        """Runs of rungs whose rate is not known yet."""
        plan = self.plan()
        waiting = [entry for entry in tried_of(plan) if self.chosen(entry) is None]
        return [self._unit(plan, entry.candidates[0], seed).size for entry in waiting for seed in plan["seeds"]]

    def chosen(self, entry: Tried) -> Rung | None:
        """The rung with the best rate, once all its runs have ended; None before, and where every one diverged."""
        if not _several(entry):
            return entry.candidates[0]
        if (known := self._decided(self.plan()).get(entry.method)) is not None:
            return known  # for good, even if a rate that failed could be tried again
        losses = {rung: self.loss(result_path(self.folder, rung, RATE_SEED)) for rung in entry.candidates}
        finite = {rung: loss for rung, loss in losses.items() if loss is not None}
        return min(finite, key=lambda rung: finite[rung]) if finite and self.all_ended(entry) else None

    def all_ended(self, entry: Tried) -> bool:
        """Whether every rate has a result or has failed for good."""
        plan = self.plan()
        for rung in entry.candidates:
            unit = self._unit(plan, rung, RATE_SEED)
            if unit.outcome() is None and ((found := failure(unit)) is None or found[1] < TRIES):
                return False
        return True

    def loss(self, path: Path) -> float | None:
        """The loss in a result, read once; None where it diverged or is not there."""
        if path not in self._losses and path.exists():
            result = read_json(path)
            try:
                check_type("loss", result["loss"], float | None)
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path} is damaged: {error}. Remove it, and the run is made again") from error
            self._losses[path] = result["loss"]
        return self._losses.get(path)

    def keep_rates(self) -> None:
        """Write the rungs whose rate is chosen into the plan, in the order in which they were asked for."""
        plan, rungs = self.plan(), []
        for entry in tried_of(plan):
            if (rung := self.chosen(entry)) is None:
                break
            rungs.append(rung.to_dict())
            plan["costs"][rung.key] = entry.costs
        if rungs != plan["rungs"]:
            plan["rungs"] = rungs
            write_json(self.folder / PLAN, plan)

    def _decided(self, plan: dict[str, Any]) -> dict[tuple[str, str | None], Rung]:
        """Rungs whose rate stands in the plan, by their methods."""
        return {(rung.stream, rung.mixer): rung for rung in rungs_of(plan)}

    def _unit(self, plan: dict[str, Any], rung: Rung | None, seed: int) -> ProbeUnit:
        from twoaxis.comparison.probe_run import Amounts

        fixed, steps = plan["fixed"], 0 if rung is None else plan["steps"][rung.key]
        amounts = Amounts(steps, fixed["batch"], fixed["held_out"], fixed["site_windows"])
        if seed == RATE_SEED:
            amounts = Amounts(steps, fixed["batch"], RATE_WINDOWS, 0, choosing=True)
        return ProbeUnit(self, rung, seed, amounts, len(plan["groups"]))


class ProbeUnit(NamedTuple):
    """One run of a probe as a worker's unit.

    Attributes:
        probes: whose it is.
        rung: what is put on the source; None is the frozen source itself.
        seed: of the data.
        amounts: how much is trained and measured.
        groups: of sites.
    """

    probes: Probes
    rung: Rung | None
    seed: int
    amounts: Amounts
    groups: int

    @property
    def folder(self) -> Path:
        """Of the run."""
        return result_path(self.probes.folder, self.rung, self.seed).parent

    @property
    def name(self) -> str:
        """For people."""
        rate = f", rate {self.rung.rate:g}" if self.seed == RATE_SEED and self.rung is not None else ""
        return f"{FROZEN if self.rung is None else self.rung.name}, seed {self.seed}{rate}"

    @property
    def size(self) -> float:
        """Passes through the model."""
        from twoaxis.comparison.probe_run import passes

        return passes(self.amounts, self.groups)

    def outcome(self) -> str | None:
        """Its loss; None while it is not finished."""
        path = self.folder / RESULT
        loss = self.probes.loss(path)
        if loss is None and path not in self.probes._losses:
            return None
        return "diverged" if loss is None else f"loss {loss:.4f}"

    def perform(self, beat: Beat, slot: int) -> None:
        """Train and measure."""
        from twoaxis.comparison.ladder import CONTROL
        from twoaxis.comparison.probe_run import run

        assert self.probes.material is not None
        done = 0

        def watch() -> None:
            nonlocal done
            done += 1
            beat(done / self.size, "")

        with reproducible(1), claim(self.folder):
            remove_partial(self.folder)
            result = run(self.probes.material, self.rung or CONTROL, self.seed, self.amounts, watch)
            write_json(self.folder / RESULT, result | ({"rung": None} if self.rung is None else {}))


def result_path(out: Path, rung: Rung | None, seed: int) -> Path:
    """Where the result of a rung, or of the source, stands."""
    return out / RESULTS / (FROZEN if rung is None else rung.key) / f"seed-{seed}" / RESULT


def _several(entry: Tried) -> bool:
    return len(entry.candidates) > 1
