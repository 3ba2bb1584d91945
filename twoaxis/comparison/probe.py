"""`probe`: would a pretrained model use a residual stream or a mixer? Asked in minutes, on frozen weights.

    source, frozen ──► one rung of the ladder on it ──► its few parameters trained on text ──► loss on held-out text
                       for every data seed                                                     against the source's

A folder holds everything: `probe.json` is the plan, `results/RUNG/seed-N.json` one finished run each, and the rest is
the report. The same call goes on where it was stopped and redoes nothing; with more rungs or seeds it adds them; with
other settings it is refused. Runs are spread over processes of one thread, which share the source's weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from twoaxis.base.files import FileError, claim, read_json, remove_partial, write_json
from twoaxis.base.interrupt import allow, deferred

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from transformers.modeling_utils import PreTrainedModel

    from twoaxis.comparison.ladder import Rung
    from twoaxis.comparison.probe_report import Probed
    from twoaxis.comparison.probe_run import Amounts, Material
    from twoaxis.comparison.probe_text import ProbeText
    from twoaxis.pretrained.source import Source

PLAN, RESULTS, FROZEN = "probe.json", "results", "source"
"""The plan's file, the folder of results, and the folder of the frozen source's among them."""
FORMAT = 1
RATE_SEED = 1000
"""The seed on which learning rates are chosen; it is no data seed."""
RATE_WINDOWS = 6
"""Windows of training text that a learning rate is chosen on."""
UNKNOWN = 0.1
"""A method that is not on the ladder is tried with these parts of the factors given too: its rate is anyone's guess."""


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """How much a probe trains and measures."""

    data: tuple[str, ...] = ("stdlib",)
    """Text: stdlib, files, folders or hf:DATASET."""
    text_field: str = "text"
    """Where records keep their text."""
    context: int = 128
    """Tokens of a window."""
    batch: int = 1
    """Windows per training step."""
    steps: int = 12
    """Training steps of each rung and seed."""
    seconds: float | None = None
    """Training time of each rung and seed instead of steps: turned into steps once, when the folder is new."""
    held_out: int = 12
    """Held-out windows that each seed measures."""
    site_windows: int = 3
    """Of them, those measured again with each group of sites switched off; 0 leaves the sites out."""
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    """Data seeds."""
    rates: tuple[float, ...] = (1.0, 0.3)
    """Factors of each rung's own learning rate; of several, each rung gets its best on training text. A method that is
    not on the ladder is also tried with a tenth of them."""

    def __post_init__(self) -> None:
        for name, least in (("context", 2), ("batch", 1), ("steps", 1), ("held_out", 1), ("site_windows", 0)):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.seconds is not None and not 0 < self.seconds < float("inf"):
            raise ValueError(f"seconds must be positive, got {self.seconds}")
        if not self.rates or not all(0 < factor < float("inf") for factor in self.rates):
            raise ValueError(f"rates must be positive factors, at least one, got {list(self.rates)}")
        if len(set(self.seeds)) < len(self.seeds) or not self.seeds or min(self.seeds) < 0:
            raise ValueError(f"seeds must be different numbers from 0 on, at least one, got {list(self.seeds)}")
        if RATE_SEED in self.seeds:
            raise ValueError(f"seeds must not have {RATE_SEED}, on which learning rates are chosen")

    def fixed(self) -> dict[str, Any]:
        """What a folder's results have in common besides the source and the text."""
        names = ("context", "batch", "held_out", "site_windows", "seconds")
        given = {name: getattr(self, name) for name in names} | {"rates": list(self.rates)}
        return given | {"steps": self.steps if self.seconds is None else None}


class Task(NamedTuple):
    """One run that is not done; `rung` None is the frozen source."""

    rung: Rung | None
    seed: int

    def path(self, out: Path) -> Path:
        """Its result's file."""
        return result_path(out, self.rung, self.seed)

    @property
    def name(self) -> str:
        """For people."""
        return f"{'source' if self.rung is None else self.rung.name}, seed {self.seed}"


def result_path(out: Path, rung: Rung | None, seed: int) -> Path:
    """Where the result of a rung, or of the source, stands."""
    name = FROZEN if rung is None else rung.key
    return out / RESULTS / name / f"seed-{seed}.json"


def probe(
    source: str | Path | PreTrainedModel,
    *,
    out: str | Path,
    streams: Sequence[str] = (),
    mixers: Sequence[str] = (),
    config: ProbeConfig | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    jobs: int | None = None,
    say: Callable[[str], None] | None = None,
    command: str | None = None,
) -> Probed:
    """Measure what each rung gains on held-out text over the frozen source.

    Args:
        source: what `twoaxis.retrofit` takes.
        out: folder of the probe; new, empty, or one to go on with.
        streams: NAME[:option=value,...] of the streams to try instead of the default ladder.
        mixers: the same of mixers.
        config: how much is trained and measured.
        tokenizer: of a source that is a model at hand; without one, tokens are bytes.
        jobs: runs at once; None is one per core, 1 runs in this process.
        say: told what is being done, for a person who waits.
        command: how the probe was started, for the report.
    """
    say, config = say or (lambda _: None), config or ProbeConfig()
    from twoaxis.data.tokenizer import need_transformers

    need_transformers()
    from twoaxis.base.machine import physical_cores, reproducible
    from twoaxis.comparison.probe_report import Probed
    from twoaxis.pretrained.families import check_config
    from twoaxis.pretrained.source import open_source

    out = Path(out)
    _check_out(out)
    rungs = choose_rungs(streams, mixers)
    found = open_source(source)
    check_config(found.config)
    with reproducible(1), claim(out):
        remove_partial(out)
        costs = _check_rungs(found, rungs, config.context)
        say("reading text")
        text = _text(found, tokenizer, config)
        load = _Loader(found, text, say)
        plan = _plan(out, found, text, config, command)
        wanted = physical_cores() if jobs is None else max(1, jobs)
        known = {(rung.stream, rung.mixer) for rung in rungs_of(plan)}
        new = [rung for rung in rungs if (rung.stream, rung.mixer) not in known]
        for rung in _choose_rates(out, load, new, plan, config, wanted):
            plan["rungs"].append(rung.to_dict())
            plan["costs"][rung.key] = costs[rung.stream, rung.mixer]
        write_json(out / PLAN, plan)
        failures = _run_all(out, load, list(_tasks(plan)), plan, wanted, "probe")
        found = Probed.load(out)
        found.save()
        return dataclasses.replace(found, failed=tuple(f"{name}: {message}" for name, message in failures.items()))


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


def _text(source: Source, tokenizer: Any, config: ProbeConfig) -> ProbeText:
    from twoaxis.comparison.probe_text import read_text
    from twoaxis.data.tokenizer import Bytes, Pretrained

    size = cast(Any, source.config).vocab_size
    tokenizer = source.tokenizer() if tokenizer is None else tokenizer
    known = Bytes(size) if tokenizer is None else Pretrained(tokenizer, source.name, size)
    return read_text(config.data, known, config.context, config.text_field)


class _Loader:
    """Loads the weights when they are needed, and once."""

    def __init__(self, source: Source, text: ProbeText, say: Callable[[str], None]) -> None:
        self.source, self.text, self.say = source, text, say
        self.made: Material | None = None

    def __call__(self) -> Material:
        if self.made is None:
            import torch

            from twoaxis.comparison.probe_run import Material
            from twoaxis.pretrained.families import state

            self.say("loading the source")
            model: Any = self.source.load(torch.float32)
            tensors = {name: tensor.detach().float() for name, tensor in state(model)}
            self.made = Material(self.source.config, tensors, self.text)
        return self.made


# The plan


def _plan(out: Path, source: Source, text: ProbeText, config: ProbeConfig, command: str | None) -> dict[str, Any]:
    """The folder's plan: a new one without rungs, or the one that stands there; with the seeds asked for."""
    from twoaxis.base.machine import hardware_line, versions
    from twoaxis.comparison.ladder import group_names

    shape: Any = source.config
    fixed = config.fixed() | {"source": source.digest(), "text": text.fingerprint}
    path = out / PLAN
    if path.exists():
        plan = read_json(path)
        if not isinstance(plan, dict) or plan.get("format") != FORMAT:
            raise ValueError(f"{path} is not the plan of a probe of this version; choose another folder")
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
            "data": list(config.data),
            "text": text.describe(),
            "fixed": fixed,
            "seeds": [],
            "rungs": [],
            "costs": {},
            "steps": {},
            "command": command,
            "hardware": hardware_line(),
            "versions": versions(),
        }
    plan["seeds"] += [seed for seed in config.seeds if seed not in plan["seeds"]]
    plan["shared_documents"] = text.shared(plan["seeds"], config.held_out)
    write_json(path, plan)
    return plan


def _choose_rates(
    out: Path, load: _Loader, rungs: Sequence[Rung], plan: dict[str, Any], config: ProbeConfig, jobs: int
) -> Iterator[Rung]:
    """The rungs with their learning rates: of several, the best one on training text of a seed that is no data seed."""
    from twoaxis.comparison.ladder import own_rate

    tried: dict[Rung, list[Rung]] = {}
    for rung in rungs:
        factors = config.rates
        if len(factors) > 1 and own_rate(rung.stream, rung.mixer) is None:
            factors += tuple(factor * UNKNOWN for factor in config.rates)
        tried[rung] = [dataclasses.replace(rung, rate=rung.rate * factor) for factor in dict.fromkeys(factors)]
        if tried[rung][0].key not in plan["steps"]:
            plan["steps"] |= dict.fromkeys((candidate.key for candidate in tried[rung]), _steps(rung, config, load))
    write_json(out / PLAN, plan)  # steps that were measured stay as they are
    if len(config.rates) == 1:
        yield from (candidates[0] for candidates in tried.values())
        return
    tasks = [Task(candidate, RATE_SEED) for candidates in tried.values() for candidate in candidates]
    failures = _run_all(out, load, tasks, plan, jobs, "rates")
    for rung, candidates in tried.items():
        found = {
            candidate: read_json(path)["loss"]
            for candidate in candidates
            if (path := result_path(out, candidate, RATE_SEED)).exists()
        }
        losses = {candidate: loss for candidate, loss in found.items() if loss is not None}
        if not losses:
            told = next(iter(failures.values()), "every training diverged")
            raise ValueError(f"{rung.method} works with none of the learning rates tried: {told}; give smaller --rates")
        yield min(losses, key=lambda candidate: losses[candidate])


def _steps(rung: Rung, config: ProbeConfig, load: _Loader) -> int:
    """Steps of a rung: those given, or as many as fit into the seconds given."""
    if config.seconds is None:
        return config.steps
    from twoaxis.comparison.probe_run import Amounts, step_seconds

    load.say(f"timing {rung.name}")
    each = step_seconds(load(), rung, Amounts(0, config.batch, config.held_out, config.site_windows))
    return max(1, int(config.seconds / each))


def rungs_of(plan: dict[str, Any]) -> list[Rung]:
    """The rungs of a plan, the control first."""
    from twoaxis.comparison.ladder import Rung

    return [Rung(**entry) for entry in plan["rungs"]]


def _tasks(plan: dict[str, Any]) -> Iterator[Task]:
    """Every run of a plan, seed by seed, so that a probe that was stopped has whole seeds."""
    for seed in plan["seeds"]:
        yield Task(None, seed)
        yield from (Task(rung, seed) for rung in rungs_of(plan))


# Running


def _amounts(plan: dict[str, Any], task: Task) -> Amounts:
    from twoaxis.comparison.probe_run import Amounts

    fixed = plan["fixed"]
    steps = 0 if task.rung is None else plan["steps"][task.rung.key]
    if task.seed == RATE_SEED:
        return Amounts(steps, fixed["batch"], RATE_WINDOWS, 0, choosing=True)
    return Amounts(steps, fixed["batch"], fixed["held_out"], fixed["site_windows"])


def _run(out: Path, material: Material, plan: dict[str, Any], task: Task, watch: Callable[[], None]) -> None:
    """One run, and its file."""
    from twoaxis.comparison.ladder import CONTROL
    from twoaxis.comparison.probe_run import run

    result = run(material, task.rung or CONTROL, task.seed, _amounts(plan, task), watch)
    write_json(task.path(out), result | ({"rung": None} if task.rung is None else {}))


def _run_all(out: Path, load: _Loader, tasks: list[Task], plan: dict[str, Any], jobs: int, what: str) -> dict[str, str]:
    """Every task that has no result, `jobs` at once; the messages of those that failed."""
    from twoaxis.base.progress import Progress
    from twoaxis.comparison.probe_run import passes

    tasks = [task for task in tasks if not task.path(out).exists()]
    if not tasks:
        return {}
    material, jobs = load(), min(jobs, len(tasks))
    total = sum(passes(_amounts(plan, task), len(plan["groups"])) for task in tasks)
    with Progress(what, total, "passes") as bar:
        if jobs > 1 and sys.platform != "win32":
            return _run_forked(out, material, tasks, plan, jobs, lambda task: bar.advance(1, task.name))
        failures = {}
        for task in tasks:
            try:
                _run(out, material, plan, task, lambda name=task.name: bar.advance(1, name))
            except FileError:
                raise
            except (ValueError, RuntimeError) as error:
                failures[task.name] = _line(error)
        return failures


def _run_forked(
    out: Path,
    material: Material,
    tasks: list[Task],
    plan: dict[str, Any],
    jobs: int,
    watch: Callable[[Task], None],
) -> dict[str, str]:
    """The same in processes of their own. A forked process has the source's weights without loading them again."""
    fork, waiting = get_context("fork"), list(reversed(tasks))
    running: dict[Any, tuple[Task, Any]] = {}
    failures: dict[str, str] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                task = waiting.pop()
                ours, theirs = fork.Pipe(duplex=False)
                arguments = (theirs, os.getpid(), out, material, plan, task)
                process = fork.Process(target=_child, args=arguments, daemon=True)
                with deferred():
                    process.start()
                theirs.close()
                running[ours] = (task, process)
            for pipe in connection.wait(list(running)):
                task, process = running[pipe]
                try:
                    said = pipe.recv_bytes().decode()  # type: ignore[union-attr]
                except EOFError:
                    process.join()
                    del running[pipe]
                    if not task.path(out).exists():
                        failures.setdefault(task.name, f"its process ended with {process.exitcode}")
                    continue
                if said:
                    failures[task.name] = said
                else:
                    watch(task)
    finally:
        for _, process in running.values():
            process.kill()
            process.join()
    return failures


def _child(pipe: Any, parent: int, out: Path, material: Material, plan: dict[str, Any], task: Task) -> None:
    """What a forked process does: it sends nothing but an empty message for each pass, or the message of its error."""
    from twoaxis.comparison.fork_server import die_with

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too and ends this process
    allow()
    die_with(parent)
    try:
        _run(out, material, plan, task, lambda: pipe.send_bytes(b""))
    except Exception as error:  # whatever it is, it ends this run only
        with contextlib.suppress(OSError):
            pipe.send_bytes(_line(error).encode() or type(error).__name__.encode())


def _line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
