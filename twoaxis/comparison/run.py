"""Running a comparison: plan it, have what is missing done, take it up again.

    options + what the folder holds -> plan -> rows -> runs without a result -> workers -> results

Every finished run is a file of its own, so a comparison can be killed at any moment: the same call finds what is done,
takes up what was begun and starts what is missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from twoaxis.base.files import Claimed, claim, remove_partial
from twoaxis.base.interrupt import Interrupted
from twoaxis.base.options import read_fields
from twoaxis.base.plugins import fingerprints, use_files
from twoaxis.base.timer import Rounds
from twoaxis.comparison.budget import Measure, count_contender, make_rows, measure_speeds, threads_of
from twoaxis.comparison.contenders import controls, exchange_check, recipe_checks
from twoaxis.comparison.decisions import choose_rates, seeds_wanted
from twoaxis.comparison.entries import read_result
from twoaxis.comparison.options import command_line, merge, parse
from twoaxis.comparison.plan import PLAN, Plan, Row, Run, data_label
from twoaxis.comparison.runner.launchers import Launcher, LocalLauncher, default_jobs
from twoaxis.comparison.runner.watch import Failure, Watch
from twoaxis.comparison.runner.worker import Beat, in_child, only_gpu
from twoaxis.training.results import RESULT, Result

if TYPE_CHECKING:
    from twoaxis.data.load import Data

WORK = "twoaxis.comparison.run:Runs"
"""What a worker of a comparison loads."""
UNIT = 1e6
"""Progress is counted in millions of operations: time goes by them, not by runs of different sizes."""


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


def read_options(file: str | None, said: Mapping[str, Any]) -> dict[str, Any]:
    """What a file and a caller ask for together.

    A file never decides alone which Python is run: what it names under `use` must be said too.

    Args:
        file: TOML, JSON or YAML, or the compare.json of another folder; None is none.
        said: options by name, which count more.
    """
    if file is None:
        return dict(said)
    held = read_fields(file)
    if "rows" in held:
        held = Plan.from_dict(held, file).options()
        if more := [name for name in said if name != "use"]:
            raise ValueError(
                f"{file} is a whole comparison; give it alone, then add {', '.join(more)} in a second call"
            )
    named = parse({"use": held.get("use", ())}).get("use", ())
    _allow(file, named, parse({"use": said.get("use", ())}).get("use", ()))
    return merge(held, said)


def _allow(where: str | Path, named: Sequence[str], said: Sequence[str]) -> None:
    """Refuse to run Python files that a file names and the caller does not."""
    if secret := [name for name in named if name not in said]:
        again = " ".join(f"--use {name}" for name in secret)
        raise ValueError(
            f"{where} wants the Python code in {', '.join(secret)} to be run; read it, and give {again} if you trust it"
        )


def prepare(options: Mapping[str, Any], out: str | Path, *, command: str = "", measure: Measure | None = None) -> Plan:
    """The plan that options come to, with its rows; nothing is written but the cache of tokenised data.

    Args:
        options: what is asked for; of a folder that holds a comparison, what is added to it.
        out: the folder, which need not be there.
        command: kept with the plan.
        measure: throughput; None measures only where it decides a budget.
    """
    stored = Plan.load(out)
    if stored is not None:
        _allow(Path(out) / PLAN, stored.use, parse({"use": options.get("use", ())}).get("use", ()))
    plan = Plan.new(options) if stored is None else stored.grow(options)
    about: dict[str, Any] = dict(plan.about)
    files = fingerprints(plan.use)
    _same("the file", {name: digest for name, digest in about.get("use", {}).items() if name in files}, files)
    use_files(plan.use)
    loaded = load_all(plan)
    facts = {label: describe(data) for label, data in loaded.items()}
    before = {label: known.get("fingerprint") for label, known in about.get("data", {}).items()}
    _same("the data", before, {label: known["fingerprint"] for label, known in facts.items()})
    plan = _with_rows_apart(plan, facts, fixed=stored is not None or "final_examples" in options)
    vocabularies = {label: known["vocab_size"] for label, known in facts.items()}
    plan = _with_more(plan, options, vocabularies)
    if measure is None and plan.match == "time":
        measure = measure_speeds
    rows = make_rows(plan, vocabularies, plan.rows, measure=measure)
    about["ngrams"] = _ngrams(plan, rows, loaded)
    commands = [*about.get("commands", []), *([command] if command else [])]
    about |= {"data": facts, "use": files, "commands": list(dict.fromkeys(commands))}
    return dataclasses.replace(plan, rows=rows, about=_machine(plan) | about)


def compare(
    options: Mapping[str, Any],
    out: str | Path,
    *,
    jobs: int | None = None,
    command: str | None = None,
    launcher: Launcher | None = None,
    console: Console | None = None,
) -> Outcome:
    """Run a comparison, or what is missing of it; where another process is at it, help it.

    Args:
        options: what is asked for; for a folder that holds a comparison, what is added to it.
        out: the folder.
        jobs: runs at once; None is as many as the launcher has room for.
        command: kept with the plan; None is the one that says the same.
        launcher: starts the workers; None is one on this machine.
        console: of rich, for progress; None is stderr.
    """
    out = Path(out)
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    if (stored := Plan.load(out)) is None:
        Plan.new(options)  # what makes no sense is refused before there is a folder
    console = Console(stderr=True, highlight=False) if console is None else console

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    def measured(configs: Mapping[str, Any], vocabulary: int) -> dict[str, Rounds]:
        say(f"measuring the throughput of {len(configs)} contenders in turns")
        if (options.get("match") if stored is None else stored.match) == "time":
            return measure_speeds(configs, vocabulary)
        # A contender that crashes would take this process along, and its run is where that is to be told.
        found = in_child(lambda: {key: its.values for key, its in measure_speeds(configs, vocabulary).items()})
        if found is None:
            say("it could not be measured: a contender fails; throughput will be that of the runs themselves")
        return {key: Rounds(tuple(values)) for key, values in (found or {}).items()}

    launcher = LocalLauncher() if launcher is None else launcher
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(claim(out))
            joined = False
        except Claimed:
            joined = Plan.load(out) is not None
            if not joined:
                raise
        before = Plan.load(out)
        command = command_line(out, None, options) if command is None else command
        plan = prepare(options, out, command="" if joined else command, measure=measured)
        machine = _machine(plan)
        if before is not None and (changed := _changes(before.about, machine)):
            say(f"not as when the comparison began, so runs may differ for this reason alone: {'; '.join(changed)}")
        if joined:
            assert before is not None
            if dataclasses.replace(plan, about=before.about) != before:
                raise Claimed(
                    f"{out} is in use by another process; what it does not do yet can be added when it is done"
                )
            say(f"joining the comparison in {out}, which another process began")
        else:
            remove_partial(out)
            plan.save(out)  # from here on the folder knows what it is
        work = Runs(out)
        watch = Watch("compare", work, console=console, changed=lambda: None if joined else work.keep_rates())
        try:
            count = jobs or launcher.places(plan.base.device)
            failures = watch.run(launcher, WORK, out, count, plan.use, joined=joined)
        except Interrupted as stopped:
            again = "".join(f" --use {file}" for file in plan.use)
            message = f"stopped; go on with: twoaxis compare --out {out}{again}"
            raise Interrupted(message, stopped.signal) from stopped
        if joined:  # whoever began may be gone
            stack.enter_context(contextlib.suppress(Claimed))
            stack.enter_context(claim(out))
        work.keep_rates()
    return work.outcome(failures)


def tell(outcome: Outcome, out: str | Path) -> None:
    """Say on stderr what failed, what is missing and what diverged."""
    console = Console(stderr=True, highlight=False)
    lines = [f"failed: {name}: {message}" for name, message in outcome.failures]
    lines += [f"missing: {name}" for name in outcome.missing]
    lines += [f"diverged: {text}" for text in outcome.diverged]
    if outcome.missing:
        lines.append(f"the same command, or twoaxis compare --out {out}, tries these again")
    for line in lines:
        console.print(f"twoaxis: {line}", markup=False, highlight=False, soft_wrap=True)


class Runs:
    """The runs of a comparison's folder, as a worker and a coordinator see them.

    Args:
        folder: the comparison's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: tuple[Any, Plan] | None = None
        self._results: dict[Path, Result] = {}
        self.devices: list[str | None] = []

    def prepare(self) -> None:
        """Import what a run imports."""
        from twoaxis.model.load import quiet

        quiet()
        plan = self.plan()
        self.devices = default_jobs(plan.base.device)[1]
        began = plan.about.get("hardware", {})
        now = _machine(plan)["hardware"]
        known = [name for name in ("cpu", "gpus") if name in began]
        other = [f"{name} {began[name]} -> {now[name]}" for name in known if _other(began, now, name)]
        if plan.match == "time" and other:
            raise ValueError(
                f"budgets of equal time hold for the machine they were measured on, and {socket.gethostname()} is "
                f"another one ({'; '.join(other)}): use machines of one kind, or match by tokens or flops"
            )

    def plan(self) -> Plan:
        """The plan as it stands in the folder, with every rate that its results decide."""
        stat = (self.folder / PLAN).stat()
        mark = stat.st_ino, stat.st_mtime_ns
        if self._read is None or self._read[0] != mark:
            found = Plan.load(self.folder)
            assert found is not None
            self._read = mark, found
        plan = choose_rates(self._read[1], lambda run: self.result(run.folder))
        self._read = mark, plan
        return plan

    def result(self, place: Path) -> Result | None:
        """The result of a run, read once: a finished run does not change."""
        if place not in self._results and (self.folder / place / RESULT).exists():
            found = read_result(self.folder / place)
            if found is not None:
                self._results[place] = found
        return self._results.get(place)

    def runs(self, plan: Plan) -> list[Run]:
        """The compared runs that are to be made, as far as results tell."""
        wanted = seeds_wanted(plan, lambda run: self.result(run.folder))
        places = {seed: place for place, seed in enumerate(plan.seeds)}
        return [run for run in plan.runs() if places[run.seed] < wanted[run.row.folder]]

    def units(self) -> list[RunUnit]:
        """Rate-choosing runs of rows without a rate, then the compared runs of the others."""
        plan = self.plan()
        return [RunUnit(self, plan, run) for run in (*plan.choosing_runs(), *self.runs(plan))]

    def later(self) -> list[float]:
        """Compared runs of rows whose rate is not known yet."""
        plan = self.plan()
        seeds = plan.seeds[: plan.looks[0].seeds]
        return [row.tokens * row.flops_per_token / UNIT for row in plan.rows if row.lr is None for _ in seeds]

    def keep_rates(self) -> None:
        """Write the rates that results have decided into compare.json."""
        plan = self.plan()
        stored = Plan.load(self.folder)
        if stored is not None and stored.rows != plan.rows:
            plan.save(self.folder)

    def outcome(self, failures: list[Failure]) -> Outcome:
        """What is there, and what is not."""
        plan = self.plan()
        missing = [
            f"{plan.contender(row.contender).label}, {row.data}, {row.size}: all seeds, no learning rate was chosen"
            for row in plan.rows
            if row.lr is None
        ]
        diverged = []
        for run in self.runs(plan):
            result = self.result(run.folder)
            if result is None:
                missing.append(run.name)
            elif result.status == "diverged":
                diverged.append(f"{run.name}: {result.message}")
        return Outcome(plan, failures, missing, diverged)


class RunUnit(NamedTuple):
    """A run of a comparison as a worker's unit.

    Attributes:
        runs: whose it is.
        plan: as it was read.
        run: which.
    """

    runs: Runs
    plan: Plan
    run: Run

    @property
    def folder(self) -> Path:
        """Of the run."""
        return self.runs.folder / self.run.folder

    @property
    def name(self) -> str:
        """Of the run."""
        return self.run.name

    @property
    def size(self) -> float:
        """Its operations, in millions."""
        return self.run.flops / UNIT

    def outcome(self) -> str | None:
        """Its loss or why it has none; None while it is not finished."""
        result = self.runs.result(self.run.folder)
        if result is None:
            return None
        loss = f"diverged: {result.message}" if result.loss is None else f"loss {result.loss:.4f}"
        return f"{loss} ({result.seconds:.0f} s of training)"

    def perform(self, beat: Beat, slot: int) -> None:
        """Train."""
        from twoaxis.training.train import train

        device = self.runs.devices[slot % len(self.runs.devices)]
        if device is not None and device.startswith("cuda:"):
            device = only_gpu(device)
        config = self.plan.config(self.run)
        config = dataclasses.replace(config, device=device, threads=config.threads or 1)

        def on_step(step: int, loss: float | None) -> None:
            beat(step / config.total_steps, "" if loss is None else f"loss {loss:.3f}")

        train(config, self.folder, on_step=on_step)


def load_all(plan: Plan) -> dict[str, Data]:
    """The data sets by label; tokenises what is not in the cache."""
    from twoaxis.data.load import bars, load_data

    loaded: dict[str, Data] = {}
    for sources in plan.data:
        with bars() as watch:
            loaded[data_label(sources)] = load_data(dataclasses.replace(plan.base, data=tuple(sources)), watch=watch)
    return loaded


def describe(data: Data) -> dict[str, Any]:
    """Description, fingerprint and vocabulary."""
    return data.describe() | {name: getattr(data, name) for name in ("fingerprint", "vocab_size", "chance")}


def _ngrams(plan: Plan, rows: Sequence[Row], loaded: Mapping[str, Data]) -> dict[str, dict[str, dict[str, float]]]:
    """Losses of tables of counts, by text and size; those that are known are kept."""
    from twoaxis.data.ngrams import count_ngrams

    found = {data: dict(sizes) for data, sizes in plan.about.get("ngrams", {}).items()}
    for row in rows:
        data = loaded[row.data]
        if row.contender == plan.baseline_key and not data.answers and row.size not in found.get(row.data, {}):
            examples = data.train(plan.seeds[0], row.tokens // plan.base.context)
            counted = count_ngrams(examples, data.held_out(plan.base.judged_examples), data.vocab_size)
            found.setdefault(row.data, {})[row.size] = counted._asdict()
    return found


def _with_rows_apart(plan: Plan, facts: Mapping[str, Mapping[str, Any]], *, fixed: bool) -> Plan:
    """The plan with so few rows to judge by that rates are chosen on as many others; refused where they are `fixed`."""
    rows = [known["held_out"]["rows"] // 2 for known in facts.values() if "held_out" in known]
    judged = max(1, min([plan.base.judged_examples, *rows]))
    if len(plan.lrs) < 2 or judged == plan.base.judged_examples:
        return plan
    if fixed:
        raise ValueError(
            f"--lr with several rates chooses on as many held-out rows as it judges by, and on others: there are "
            f"{2 * judged:,} for twice {plan.base.judged_examples:,}; give --final-examples {judged}, a larger "
            "--held-out or more text"
        )
    fewer = {"final_examples": judged, "eval_examples": min(plan.base.eval_examples, judged)}
    return dataclasses.replace(plan, base=dataclasses.replace(plan.base, **fewer))


def _with_more(plan: Plan, options: Mapping[str, Any], vocabularies: Mapping[str, int]) -> Plan:
    """The plan with the controls of its contenders and the checks of its baseline that are asked for."""
    if options.get("controls"):
        sources = plan.data[0]
        words = vocabularies[data_label(sources)]
        found = controls(
            plan.contenders,
            plan.baseline,
            lambda contender: count_contender(plan, contender, plan.sizes[0], sources, words).parameters,
        )
        plan = plan.with_contenders(found)
    first, checks = plan.contender(plan.baseline_key), []
    if options.get("recipe_check"):
        recipe = dataclasses.replace(plan.base, **{"lr": plan.lrs[0]} | first.train)
        checks += recipe_checks(first, recipe, rates=len(plan.lrs) == 1)
    if options.get("exchange"):
        checks.append(exchange_check(first))
    return plan.with_contenders(checks, checks=True)


def _machine(plan: Plan) -> dict[str, Any]:
    """Versions and hardware, with the threads a run has."""
    from twoaxis.base.machine import hardware, hardware_line, versions

    with threads_of(plan.base):
        return {"versions": versions(), "hardware": hardware(), "hardware_line": hardware_line()}


def _other(before: Mapping[str, Any], now: Mapping[str, Any], name: str) -> bool:
    """Whether a machine has another CPU, or other kinds of GPUs; how many it has does not change the time of a run."""
    was, here = before[name], now[name]
    return set(was) != set(here) if name == "gpus" else was != here


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is another version or machine than when the folder began."""
    was = {**before.get("versions", {}), "machine": before.get("hardware_line")}
    pairs = {**now["versions"], "machine": now["hardware_line"]}
    return [f"{name} {was[name]} -> {new}" for name, new in pairs.items() if name in was and was[name] != new]


def _same(what: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse what has changed since the folder's runs were made."""
    for name, fingerprint in before.items():
        if name in now and now[name] != fingerprint:
            raise ValueError(
                f"{what} {name} is not what it was when the comparison began: its runs would not belong together; "
                "put it back, or choose another folder"
            )
