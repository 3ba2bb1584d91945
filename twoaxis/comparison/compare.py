"""Putting a comparison together: prepare it, run it, take it up again.

    request + what the folder holds -> plan -> rows -> runs that are missing -> processes -> results -> report

Every finished run is a file of its own, so a comparison can be killed at any moment: the same command finds what is
done, takes up what was begun and starts what is missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from twoaxis.base.files import claim, remove_partial
from twoaxis.base.plugins import fingerprints, use_files
from twoaxis.comparison.budget import Measure, count_contender, make_rows
from twoaxis.comparison.controls import controls
from twoaxis.comparison.live import Live
from twoaxis.comparison.plan import Plan, Run, data_label
from twoaxis.comparison.rates import settle
from twoaxis.comparison.request import Request, with_contenders
from twoaxis.comparison.workers import Workers, default_jobs
from twoaxis.training.config import TrainConfig
from twoaxis.training.results import load_result

OUTPUT = "output"
"""Folder of what failed runs printed."""
TRIES = 2
"""How often a run is started before it counts as failed."""


class Failure(NamedTuple):
    """A run that did not come to its end.

    Attributes:
        run: which.
        message: why, in words; with the end of what it printed where it crashed.
    """

    run: Run
    message: str


class Outcome(NamedTuple):
    """What came of a comparison.

    Attributes:
        plan: with the learning rates that were chosen.
        failures: runs that failed twice.
        missing: runs that were not done because of them.
        diverged: runs whose loss stopped being a number; they count as done.
    """

    plan: Plan
    failures: list[Failure]
    missing: list[str]
    diverged: list[str]


class Stopped(KeyboardInterrupt):
    """A comparison was asked to stop; its runs have saved where they were.

    Attributes:
        signal: the number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.signal = number


def compare(
    request: Request, out: str | Path, *, jobs: int | None = None, command: str = "", live: Live | None = None
) -> Outcome:
    """Run a comparison, or what is missing of it.

        compare(Request(contenders=make_contenders(["deep_delta"], []), base={"steps": 200}), "runs/first")

    Args:
        request: what is asked for; for a folder that holds a comparison, what is added to it.
        out: the folder.
        jobs: runs at once; None is one per GPU, else one per physical core.
        command: kept with the plan.
        live: shows progress; None is one on stderr.
    """
    out = Path(out)
    live = Live() if live is None else live
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    if Plan.load(out) is None:
        request.fresh()  # what makes no sense is refused before there is a folder
    with claim(out):
        remove_partial(out)
        stored = Plan.load(out)
        use = stored.use if stored is not None else ()
        with Workers(out / OUTPUT, use=[*use, *[u for u in request.use if u not in use]]) as workers:
            if stored is None or _outcome(stored, out, []).missing:
                workers.launch()

            def measured(configs: Mapping[str, TrainConfig], vocabulary: int) -> dict[str, float]:
                workers.ready()  # its imports would slow the first rounds
                live.say(f"measuring the throughput of {len(configs)} contenders")
                return measure(configs, vocabulary)

            plan = prepare(request, stored, command=command, measure=measured)
            _warn(stored, plan, live)
            plan.save(out)  # from here on the folder knows what it is
            crew = Crew(workers, out, jobs, plan.base.device, live)
            with stopping(crew):
                choosing, failures = plan.choosing_runs(), []
                if choosing:
                    failures += crew.execute(plan, choosing, "choose rates")
                    plan = settle(plan, lambda run: load_result(out / run.folder))
                    plan.save(out)
                failures += crew.execute(plan, plan.runs(), "compare")
    return _outcome(plan, out, failures)


def prepare(
    request: Request,
    stored: Plan | None,
    *,
    command: str = "",
    measure: Measure | None = None,
) -> Plan:
    """The comparison a request comes to; nothing is written but the cache of tokenised data.

    Args:
        request: what is asked for.
        stored: what the folder holds.
        command: kept with the plan.
        measure: throughput, for match="time".
    """
    plan = request.fresh() if stored is None else request.grow(stored)
    about: dict[str, Any] = {} if stored is None else dict(stored.about)
    files = fingerprints(plan.use)
    _same("the file", {name: digest for name, digest in about.get("use", {}).items() if name in files}, files)
    use_files(plan.use)
    facts = load_facts(plan)
    before = {label: known["fingerprint"] for label, known in about.get("data", {}).items()}
    _same("the data", before, {label: known["fingerprint"] for label, known in facts.items()})
    vocabularies = {label: known["vocab_size"] for label, known in facts.items()}
    if request.controls:
        first = plan.data[0]
        words = vocabularies[data_label(first)]
        found = controls(
            plan.contenders,
            plan.baseline,
            lambda contender: count_contender(plan, contender, plan.sizes[0], first, words).parameters,
        )
        plan = with_contenders(plan, found)
    rows = make_rows(plan, vocabularies, () if stored is None else stored.rows, measure=measure)
    commands = [*about.get("commands", []), *([command] if command else [])]
    about |= {"data": facts, "use": files, "commands": list(dict.fromkeys(commands))}
    return dataclasses.replace(plan, rows=rows, about=_machine(plan) | about)


def _machine(plan: Plan) -> dict[str, Any]:
    """Versions and hardware, with the threads a run has."""
    from twoaxis.base.machine import hardware, hardware_line, versions

    with _threads(plan.base):
        return {"versions": versions(), "hardware": hardware(), "hardware_line": hardware_line()}


def _warn(stored: Plan | None, plan: Plan, live: Live) -> None:
    """Say when runs of one folder are made by different versions or on different machines."""
    if stored is None:
        return
    now, before = _machine(plan), stored.about
    pairs = {name: (was, now["versions"].get(name)) for name, was in before["versions"].items()}
    changed = [f"{name} {was} -> {new}" for name, (was, new) in pairs.items() if was != new]
    if before["hardware_line"] != now["hardware_line"]:
        changed.append(f"{before['hardware_line']} -> {now['hardware_line']}")
    if changed:
        live.say(f"not as when the comparison began, so runs may differ for this reason alone: {'; '.join(changed)}")


@contextlib.contextmanager
def _threads(config: TrainConfig) -> Iterator[None]:
    """As many threads as a run has, inside."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(config.threads or 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def load_facts(plan: Plan) -> dict[str, dict[str, Any]]:
    """Description, fingerprint and vocabulary of each data set; tokenises what is not in the cache."""
    from twoaxis.data.load import bars, load_data

    facts = {}
    for sources in plan.data:
        with bars() as watch:
            data = load_data(dataclasses.replace(plan.base, data=tuple(sources)), watch=watch)
        known = {"fingerprint": data.fingerprint, "vocab_size": data.vocab_size, "chance": data.chance}
        facts[data_label(sources)] = data.describe() | known
    return facts


def measure(
    configs: Mapping[str, TrainConfig], vocabulary: int, *, rounds: int = 7, steps: int = 2
) -> dict[str, float]:
    """Tokens per second of training steps as the runs make them, by name, in turns.

    Args:
        configs: of one batch, context and precision.
        vocabulary: of their data.
        rounds: of measuring all of them.
        steps: of each in a round.
    """
    import torch

    from twoaxis.base.machine import pick_device
    from twoaxis.model.loss import next_token_loss
    from twoaxis.training.engines.engine import autocast
    from twoaxis.training.measure import throughputs
    from twoaxis.training.setup import make_model, make_optimizer

    first = next(iter(configs.values()))
    device = pick_device(first.device)
    owners: dict[int, TrainConfig] = {}

    def build(config: TrainConfig) -> Any:
        model: Any = make_model(config, vocabulary)
        model.to(device)
        owners[id(model)] = config
        if config.compile:
            model.compile()
        return model

    def loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        with autocast(first, device):
            return next_token_loss(model, tokens)

    with _threads(first):
        found = throughputs(
            {name: lambda config=config: build(config) for name, config in configs.items()},
            first.batch,
            first.context,
            rounds=rounds,
            steps=steps,
            accumulate=first.accumulate,
            loss=loss,
            optimizer=lambda model: make_optimizer(owners[id(model)], model),
        )
    return {name: speed.median for name, speed in found.items()}


class Crew:
    """Carries out runs, several at once.

    Args:
        workers: the processes.
        out: the comparison's folder.
        jobs: runs at once; None is one per device.
        device: what the user asked for.
        live: shows progress.
    """

    def __init__(self, workers: Workers, out: Path, jobs: int | None, device: str | None, live: Live) -> None:
        self.workers, self.out, self.live = workers, out, live
        count, devices = default_jobs(device)
        self.free: list[str | None] = [devices[n % len(devices)] for n in range(jobs or count)]

    def execute(self, plan: Plan, runs: Sequence[Run], what: str) -> list[Failure]:
        """Do the runs that are not finished, in their order; those that fail twice are returned.

        Args:
            plan: whose runs they are.
            runs: all of them.
            what: for the progress bar.
        """
        todo = [run for run in runs if load_result(self.out / run.folder) is None]
        pending, running = deque(todo), {}
        tries: Counter[Path] = Counter()
        failures: list[Failure] = []
        refused = False  # the system refuses files: no more runs are started
        with self.live.showing(what, todo, len(runs)) as shown:
            while running or (pending and not refused):
                while pending and self.free and not refused:
                    run, device = pending.popleft(), self.free.pop(0)
                    tries[run.folder] += 1
                    config = self._config(plan, run, device)
                    running[self.workers.start(config, self.out / run.folder)] = (run, device)
                for report in self.workers.wait(0.5):
                    run, device = running[report.job]
                    if not report.ended:
                        shown.step(run, report.step or 0, report.loss)
                        continue
                    del running[report.job]
                    self.free.append(device)
                    result = load_result(self.out / run.folder)
                    if result is not None:
                        shown.done(run, result)
                    elif report.trouble or tries[run.folder] >= TRIES:
                        refused = refused or report.trouble
                        failures.append(Failure(run, report.error or "ended without a result"))
                        shown.failed(run, failures[-1].message)
                    else:
                        shown.again(run, report.error or "ended without a result")
                        pending.append(run)
        return failures

    def stop(self) -> None:
        """Have what runs save and end."""
        if self.workers.running:
            self.live.say("stopping: the runs save where they are (once more to stop at once)")
            self.workers.stop()

    def _config(self, plan: Plan, run: Run, device: str | None) -> TrainConfig:
        config = plan.config(run)
        return dataclasses.replace(config, device=device, threads=config.threads or 1)


@contextlib.contextmanager
def stopping(crew: Crew) -> Iterator[None]:
    """Ctrl-C, SIGTERM and a closed terminal stop the runs after a checkpoint; a second one stops at once."""

    def heard(number: int, frame: Any) -> None:
        raise Stopped(number)

    here = threading.current_thread() is threading.main_thread()
    asked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if here else ()
    numbers = [number for number in asked if signal.getsignal(number) != signal.SIG_IGN]  # as under nohup
    before = {number: signal.signal(number, heard) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        crew.stop()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _outcome(plan: Plan, out: Path, failures: list[Failure]) -> Outcome:
    """What is there, and what is not."""
    missing, diverged = [], []
    for row in plan.rows:
        if row.lr is None:
            label = plan.contender(row.contender).label
            missing.append(f"{label}, {row.data}, {row.size}: all seeds, its learning rate could not be chosen")
    for run in plan.runs():
        result = load_result(out / run.folder)
        if result is None:
            missing.append(run.name)
        elif result.status == "diverged":
            diverged.append(f"{run.name}: {result.message}")
    return Outcome(plan, failures, missing, diverged)


def _same(what: str, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Refuse what has changed since the folder's runs were made."""
    for name, fingerprint in before.items():
        if name in now and now[name] != fingerprint:
            raise ValueError(
                f"{what} {name} is not what it was when the comparison began: its runs would not belong together; "
                "put it back, or choose another folder"
            )


def command_line() -> str:
    """The command as it was typed."""
    import shlex

    return shlex.join(["twoaxis", *sys.argv[1:]]) if sys.argv[1:] else os.path.basename(sys.argv[0])
