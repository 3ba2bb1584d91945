"""Running a comparison: plan it, have what is missing done, take it up again.

    options + what the folder holds -> plan -> rows -> runs without a result -> workers -> results

Every finished run is a file of its own, so a comparison can be killed at any moment: the same call finds what is done,
takes up what was begun and starts what is missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from twoaxis.base.files import Claimed, check_contents, claim, remove_partial
from twoaxis.base.interrupt import Interrupted
from twoaxis.base.machine import pick_device, reproducible
from twoaxis.base.options import read_fields
from twoaxis.base.plugins import fingerprints, use
from twoaxis.base.progress import console_here
from twoaxis.base.timer import Throughput
from twoaxis.comparison.budget import Measure, count_contender, make_rows, measure_speeds
from twoaxis.comparison.contenders import controls, low_rank_control, recipe_checks, with_budget, without_matching
from twoaxis.comparison.decisions import choose_rates, seeds_wanted
from twoaxis.comparison.forecast import forecast
from twoaxis.comparison.options import command_line, merge, parse
from twoaxis.comparison.plan import PLAN, Plan, Row, Run, data_label
from twoaxis.comparison.results import Comparison
from twoaxis.comparison.retrofit_rates import with_new_rates
from twoaxis.comparison.runner.launchers import Launcher, LocalLauncher, default_jobs
from twoaxis.comparison.runner.ranks import become_ranks, only_gpus
from twoaxis.comparison.runner.watch import Watch
from twoaxis.comparison.runner.worker import Beat, Unit, in_children
from twoaxis.comparison.statistics import from_scipy
from twoaxis.data.sources import check_outside
from twoaxis.model.config import Methods
from twoaxis.pretrained.model_for_training import hold, release, source_digest
from twoaxis.show.numbers import seconds
from twoaxis.training.engines.processes import Degrees
from twoaxis.training.result import Result, load_result

if TYPE_CHECKING:
    from twoaxis.data.load import Data
    from twoaxis.model.variant import Contender
    from twoaxis.training.config import TrainConfig

WORK = "twoaxis.comparison.run:Runs"
"""What a worker of a comparison loads."""
UNIT = 1e6
"""Progress is counted in millions of operations: time goes by them, not by runs of different sizes."""


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
    if "from" in held:  # as the command line calls it
        held["source"] = held.pop("from")
    if "rows" in held:
        held = Plan.from_dict(held, file).options()
        if more := [name for name in said if name != "use"]:
            raise ValueError(
                f"{file} is a whole comparison; give it alone, then add {', '.join(more)} in a second call"
            )
    _allow(file, held, said)
    return merge(held, said)


def _allow(where: str | Path, named: Mapping[str, Any], said: Mapping[str, Any]) -> None:
    """Refuse to run Python files that the options of a file name and those of the caller do not."""
    wanted, trusted = (parse({"use": options.get("use", ())}).get("use", ()) for options in (named, said))
    if secret := [name for name in wanted if name not in trusted]:
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
        _allow(Path(out) / PLAN, {"use": stored.use}, options)
    plan = Plan.new(options) if stored is None else stored.grow(options)
    about: dict[str, Any] = dict(plan.about)
    files = fingerprints(plan.use)
    _same("the file", about.get("use", {}), files)
    use(*plan.use)
    for each in map(without_matching, plan.contenders):  # a misspelt method shall not wait for the data
        Methods(stream=each.stream, stream_options=each.stream_options)
        Methods(mixer=each.mixer, mixer_options=each.mixer_options)
    if (source := plan.base.source) is not None:
        digest = source_digest(source)
        _same("the model", {source: about.get("source", digest)}, {source: digest})
        about["source"] = digest
        with reproducible(plan.base.threads or 1):
            hold(source)
    for sources in plan.data:
        check_outside(out, sources, "the comparison")
    loaded = load_all(plan)
    named = ("fingerprint", "vocab_size", "chance")
    facts = {label: it.describe() | {name: getattr(it, name) for name in named} for label, it in loaded.items()}
    before = {label: known.get("fingerprint") for label, known in about.get("data", {}).items()}
    _same("the data", before, {label: known["fingerprint"] for label, known in facts.items()})
    plan = _with_rows_apart(plan, facts, fixed=stored is not None or "final_examples" in options)
    vocabularies = {label: known["vocab_size"] for label, known in facts.items()}
    plan = _with_more(plan, options, vocabularies)
    if measure is None and plan.match == "time":
        measure = measure_speeds
    rows = make_rows(plan, vocabularies, plan.rows, measure=measure)
    commands = dict.fromkeys([*about.get("commands", []), *([command] if command else [])])
    about |= {"ngrams": _ngrams(plan, rows, loaded), "data": facts, "use": files, "commands": list(commands)}
    return dataclasses.replace(plan, rows=rows, about=_machine(plan) | about)


def compare(
    options: Mapping[str, Any],
    out: str | Path,
    *,
    jobs: int | None = None,
    command: str | None = None,
    launcher: Launcher | None = None,
    console: Console | None = None,
    report: bool = True,
) -> Comparison:
    """Run a comparison, or what is missing of it; where another process is at it, help it.

    Args:
        options: what is asked for; for a folder that holds a comparison, what is added to it.
        out: the folder.
        jobs: runs at once; None is as many as the launcher has places for.
        command: kept with the plan; None is the one that says the same.
        launcher: starts the workers; None is one on this machine.
        console: of rich, for progress and for what failed; None is stderr.
        report: whether to write the report.
    """
    out, console = Path(out), console_here() if console is None else console
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    if report:
        from_scipy("special")  # it is missed before the runs, not behind them
    if (begun := Plan.load(out)) is None:
        check_contents(out, PLAN)
        begun = Plan.new(options)  # what makes no sense is refused before there is a folder
    else:
        begun = begun.grow(options)
    command = command_line(out, None, options) if command is None else command
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    launcher, joined = LocalLauncher() if launcher is None else launcher, False
    if isinstance(launcher, LocalLauncher):
        pick_device(begun.base.device)  # refuses one that this machine does not have
    processes = Degrees.read(begun.base.parallel, None).world
    count = jobs or launcher.places(begun.base.device, processes)  # a cluster is missed before any work
    with contextlib.ExitStack() as stack:
        if not out.exists():
            stack.callback(_remove_empty, out)
        try:
            stack.enter_context(claim(out))
        except Claimed:
            if Plan.load(out) is None:
                raise
            joined = True
        plan = _planned(options, out, "" if joined else command, joined, say, jobs)
        if (left := _left(plan, out, count)) is not None:
            say(left)
        work = Runs(out)
        watch = Watch(work, console=console, changed=lambda: None if joined else work.keep_rates())
        try:
            failures = watch.run(launcher, WORK, out, count, plan.use, processes=processes, joined=joined)
        except Interrupted as stopped:
            again = "".join(f" --use {file}" for file in plan.use)
            message = f"stopped; go on with: twoaxis compare --out {out}{again}"
            raise Interrupted(message, stopped.signal) from stopped
        if joined:  # whoever began may be gone
            stack.enter_context(contextlib.suppress(Claimed))
            stack.enter_context(claim(out))
        work.keep_rates()
    found = Comparison.load(out)
    failed, missing = [f"{name}: {message}" for name, message in failures.items()], found.missing_runs
    told = {"failed": failed, "missing": missing, "diverged": found.diverged_runs}
    for text in [f"{kind}: {line}" for kind, lines in told.items() for line in lines]:
        say(f"twoaxis: {text}")
    if missing:
        say(f"twoaxis: the same command, or twoaxis compare --out {out}, tries these again")
    found = dataclasses.replace(found, failed=(*failed, *missing))
    if report:
        found.save()
    return found


def _planned(
    options: Mapping[str, Any], out: Path, command: str, joined: bool, say: Callable[[str], None], jobs: int | None
) -> Plan:
    """The plan as it stands in the folder from now on; whoever joins in may ask for nothing more."""

    def measure(configs: Mapping[str, TrainConfig], vocabulary: int) -> Mapping[str, Throughput]:
        say(f"measuring the throughput of {len(configs)} contenders in turns")
        # A contender that crashes would take this process along, and its run is where that is to be reported.
        (found,) = in_children([lambda: measure_speeds(configs, vocabulary)])
        if found is None:
            say("it could not be measured: a contender fails; throughput will be that of the runs themselves")
        return found or {}

    before, plan = Plan.load(out), prepare(options, out, command=command, measure=measure)
    if Degrees.read(plan.base.parallel, None).world > 1 and plan.match == "time":
        raise ValueError(
            f"parallel {plan.base.parallel}: budgets of equal time are measured in one process; match by tokens or "
            "flops"
        )
    if not joined and plan.base.source is not None:
        if before is None or plan.rows != before.rows:
            say("finding the rates at which new parameters may learn")
            plan = with_new_rates(plan, jobs)
        release()
    if before is not None and (changed := _changes(before.about, _machine(plan))):
        say(f"not as when the comparison began, so runs may differ for this reason alone: {'; '.join(changed)}")
    if not joined:
        remove_partial(out)
        plan.save(out)  # from here on the folder knows what it is
    elif before is not None and dataclasses.replace(plan, about=before.about) != before:
        raise Claimed(f"{out} is in use by another process; what it does not do yet can be added when it is done")
    else:
        say(f"joining the comparison in {out}, which another process began")
    return plan


def _remove_empty(folder: Path) -> None:
    """Take back a folder that was made for a comparison which was refused."""
    with contextlib.suppress(OSError):  # it has a plan, or another process has it
        folder.rmdir()


def _left(plan: Plan, out: Path, jobs: int) -> str | None:
    """How many runs are to come and about how long they take; None where none is left or throughput is unknown."""
    if not all(row.tokens_per_second for row in plan.rows):
        return None
    found = forecast(plan, out, jobs, lambda configs, vocabulary: {})
    most, runs = found.most.lower() or "about ", found.runs - found.finished
    return f"{runs} runs, {jobs} at a time: {most}{seconds(found.seconds)}" if runs else None


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
        from twoaxis.base.machine import quiet
        from twoaxis.data.tokenizer import gguf_file, load_tokenizer
        from twoaxis.training.setup import resolve

        quiet()
        plan = self.plan()
        if plan.base.source is not None:
            with reproducible(plan.base.threads or 1):
                hold(plan.base.source)
            source_digest(plan.base.source)  # remembered, as the weights are
            if gguf_file(named := resolve(plan.base).tokenizer) is not None:
                load_tokenizer(named)  # converting it takes seconds
        self.devices = default_jobs(plan.base.device, Degrees.read(plan.base.parallel, None).world)[1]
        began, now = plan.about.get("hardware", {}), _machine(plan)["hardware"]
        other = []
        for name, kind in (("cpu", str), ("gpus", set)):  # how many GPUs it has does not change the time of a run
            if name in began and kind(began[name]) != kind(now[name]):
                other.append(f"{name} {began[name]} -> {now[name]}")
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
        self._read = mark, choose_rates(self._read[1], self.result)
        return self._read[1]

    def result(self, run: Run) -> Result | None:
        """The result of a run, read once: a finished run does not change."""
        if run.folder not in self._results and (found := load_result(self.folder / run.folder)) is not None:
            self._results[run.folder] = found
        return self._results.get(run.folder)

    def runs(self, plan: Plan) -> list[Run]:
        """The compared runs that are to be made, as far as results tell."""
        wanted, places = seeds_wanted(plan, self.result), {seed: place for place, seed in enumerate(plan.seeds)}
        return [run for run in plan.runs() if places[run.seed] < wanted[run.row.folder]]

    def units(self) -> list[Unit]:
        """Rate-choosing runs of rows without a rate, then the compared runs of the others."""
        plan = self.plan()
        return [
            Unit(
                self.folder / run.folder,
                plan.name_of(run),
                run.row.flops / UNIT,
                partial(self._outcome, run),
                partial(self._perform, plan, run),
            )
            for run in (*plan.choosing_runs(), *self.runs(plan))
        ]

    def _outcome(self, run: Run) -> str | None:
        """Its loss or why it has none."""
        result = self.result(run)
        if result is None:
            return None
        loss = f"diverged: {result.message}" if result.loss is None else f"loss {result.loss:.4f}"
        return f"{loss} ({result.seconds:.0f} s)"

    def _perform(self, plan: Plan, run: Run, beat: Beat, slot: int) -> None:
        """Train; a run of several processes forks them."""
        from twoaxis.training.train import train

        device = self.devices[slot % len(self.devices)]
        if device is not None and device.startswith("cuda:"):
            device = only_gpus(device)
        config = plan.config(run)
        become_ranks(Degrees.read(config.parallel, None).world)
        config = dataclasses.replace(config, device=device, threads=config.threads or 1)

        def on_step(step: int, loss: float | None) -> None:
            beat(step / max(1, config.total_steps), "" if loss is None else f"loss {loss:.3f}")

        train(config, self.folder / run.folder, on_step=on_step)

    def later(self) -> list[float]:
        """Compared runs of rows whose rate is not known yet."""
        plan = self.plan()
        seeds = plan.seeds[: plan.looks[0].seeds]
        return [row.flops / UNIT for row in plan.rows if row.lr is None for _ in seeds]

    def keep_rates(self) -> None:
        """Write the rates that results have decided into compare.json."""
        plan, stored = self.plan(), Plan.load(self.folder)
        if stored is not None and stored.rows != plan.rows:
            plan.save(self.folder)


def load_all(plan: Plan) -> dict[str, Data]:
    """The data sets by label; tokenises what is not in the cache."""
    from twoaxis.data.load import bars, load_data
    from twoaxis.training.setup import resolve

    loaded: dict[str, Data] = {}
    for sources in plan.data:
        with bars() as watch:
            run = resolve(dataclasses.replace(plan.base, data=tuple(sources)))
            loaded[data_label(sources)] = load_data(run, watch=watch)
    return loaded


def _ngrams(plan: Plan, rows: Sequence[Row], loaded: Mapping[str, Data]) -> dict[str, dict[str, dict[str, float]]]:
    """Losses of tables of counts, by text and size; those that are known are kept."""
    from twoaxis.data.ngrams import count_ngrams

    found = {data: dict(sizes) for data, sizes in plan.about.get("ngrams", {}).items()}
    for row in rows if plan.base.source is None else ():  # a pretrained model has read more than these tokens
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

    def parameters(contender: Contender) -> int:
        words = vocabularies[data_label(plan.data[0])]
        return count_contender(plan, contender, plan.sizes[0], plan.data[0], words).row.parameters

    first, checks = plan.contender(plan.baseline_key), []
    if options.get("controls"):
        others = [contender for contender in plan.contenders if contender.label not in plan.checks]
        make = controls if plan.base.source is None else low_rank_control
        plan = plan.with_contenders(make(others, first, parameters))
    if plan.base.source is not None:
        checks.append(with_budget(first, 0, "frozen"))  # the source as it is, which training on is held against
    if options.get("recipe_check"):
        recipe = dataclasses.replace(plan.base, **{"lr": plan.lrs[0]} | first.train)
        checks += recipe_checks(first, recipe, rates=len(plan.lrs) == 1)
    if options.get("exchange"):  # what a lower loss is worth in tokens
        checks.append(with_budget(first, 2, f"{first.label}, twice the tokens"))
    return plan.with_contenders(checks, checks=True)


def _machine(plan: Plan) -> dict[str, Any]:
    """Versions and hardware, with the threads a run has."""
    from twoaxis.base.machine import hardware, hardware_line, versions

    with reproducible(plan.base.threads or 1):
        return {"versions": versions(), "hardware": hardware(), "hardware_line": hardware_line()}


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is another version or machine than when the folder began."""
    was, new = (about.get("versions", {}) | {"machine": about.get("hardware_line")} for about in (before, now))
    return [f"{name} {was[name]} -> {new[name]}" for name in new if name in was and was[name] != new[name]]


def _same(what: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse what has changed since the folder's runs were made."""
    for name, fingerprint in before.items():
        if name in now and now[name] != fingerprint:
            raise ValueError(
                f"{what} {name} is not what it was when the comparison began: its runs would not belong together; "
                "put it back, or choose another folder"
            )
