"""Plant every fault of the list and see that its tests fail: `make faults`.

    python -m tests.faults.run [--only ID ...] [--jobs N] [--control]

The run works on copies of the tree as it stands at the start, one per job, so that neither the tree nor a process
beside it ever sees a fault. A fault is written into a copy, and a child is forked whose parent has imported torch,
transformers and pytest but nothing of twoaxis; it runs the fault's tests with `-x`, and child processes of a test
import the same copy through PYTHONPATH. All tests run once without a fault before (`--control`: that alone).

A fault is **caught** if a test fails in its own body, **NOT CAUGHT** if every test passes, and **broken** if that says
nothing: a test that does not pass without the fault either, one that is skipped, slow or unknown, an error in a fixture
or in collecting, a name or import error (the replacement is bad code rather than a wrong number), a module that does
not load, or no end within the time limit. `tests/faults/faults.py` says how to plant a fault anew.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.faults import ROOT, Fault, read_faults

SKIPPED = shutil.ignore_patterns(".*", "runs", "build", "dist", "*.egg-info")
WARM = ("torch", "numpy", "pytest", "hypothesis", "safetensors.torch", "tyro", "transformers.modeling_utils")
LIMIT = 180.0
"""Seconds after which a fault's tests are stopped."""
BAD_CODE = (ImportError, SyntaxError, NameError)


@dataclass
class Job:
    """Tests to run in one forked child, with a fault or without."""

    tests: tuple[str, ...]
    fault: Fault | None = None
    begun: float = 0.0
    seconds: float = 0.0
    answer: dict[str, Any] = field(default_factory=dict)

    def verdict(self, failing: dict[str, str]) -> tuple[str, str]:
        """Caught, NOT CAUGHT or broken, and why; `failing` are the tests that do not pass without a fault."""
        if not self.answer:
            return "broken", f"no answer within {LIMIT:.0f} s, or the process died"
        if why := next((f"{test}: {failing[test]} without the fault" for test in self.tests if test in failing), None):
            return "broken", why
        if self.answer["broken"]:
            return "broken", self.answer["broken"]
        if self.answer["failed"]:
            return "caught", self.answer["failed"]
        if unseen := [test for test in self.tests if not _passing(test, self.answer["passed"])]:
            return "broken", f"did not run: {', '.join(unseen)}"
        return "NOT CAUGHT", f"every test passes: {', '.join(self.tests)}"


class Watch:
    """A plugin of pytest that notes which tests pass, and how the first one fails."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed = self.broken = ""

    def pytest_sessionstart(self) -> None:
        """Take the first failing example as it is: making it small takes longer than all the rest."""
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("faults", parent=settings.get_profile("ci"), database=None, phases=phases)
        settings.load_profile("faults")

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test that ran to its end."""
        if report.when == "call" and report.passed:
            self.passed.append(report.nodeid)

    def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
        """A test that failed, or what kept it from running."""
        error = call.excinfo.value
        why = f"{node.nodeid}: {type(error).__name__}: {' '.join(str(error).split())}"[:300]
        if getattr(report, "when", "collect") != "call":
            self.broken = self.broken or f"{why} (outside the body of a test)"
        elif isinstance(error, BAD_CODE):
            self.broken = self.broken or why
        else:
            self.failed = self.failed or why


def _passing(test: str, passed: Sequence[str]) -> bool:
    """Whether a test of this name, with any parameter, is among those that passed."""
    return any(name == test or name.startswith((test + "[", test + "::")) for name in passed)


def child(job: Job, tree: Path, answer: Path) -> None:
    """What the forked process does: run the tests in `tree` and write down what came of them."""
    import pytest

    os.setsid()
    os.chdir(tree)
    os.environ.update(PYTHONPATH=str(tree), OMP_NUM_THREADS="1", PYTEST_ADDOPTS="", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    sys.path[0] = str(tree)
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "twoaxis")]:
        del sys.modules[name]
    output = os.open(answer.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    watch = Watch()
    # the options of pyproject.toml name plugins that are not loaded here
    options = ["-o", "addopts=--strict-markers", "-m", "not slow", "-p", "hypothesispytest", "-p", "no:cacheprovider"]
    options += ["--rootdir", str(tree)]
    options += ["-x"] if job.fault else []
    code = pytest.main([*options, "--basetemp", str(tree / ".temporary"), "--tb=short", *job.tests], plugins=[watch])
    if not watch.broken and not watch.failed and code != pytest.ExitCode.OK:
        watch.broken = f"pytest ended with {pytest.ExitCode(code).name}: is every test known?"
    if job.fault and not watch.broken:
        try:
            importlib.import_module(job.fault.module)
        except Exception as error:
            watch.broken = f"{job.fault.module} does not load: {type(error).__name__}: {error}"
    answer.write_text(json.dumps({"passed": watch.passed, "failed": watch.failed, "broken": watch.broken}))


@contextlib.contextmanager
def planted(fault: Fault | None, tree: Path) -> Any:
    """The fault in the file of `tree`, and the file as it was afterwards."""
    if fault is None:
        yield
        return
    path = tree / fault.file
    stamp, source = path.stat(), path.read_text()
    compiled = path.parent / "__pycache__"
    stem = path.stem
    try:
        path.write_text(fault.planted(source))
        for old in compiled.glob(f"{stem}.*.pyc"):  # a rewrite of the same second and length would pass for it
            old.unlink()
        yield
    finally:
        path.write_text(source)
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        for old in compiled.glob(f"{stem}.*.pyc"):
            old.unlink()


class Runner:
    """Jobs in forked children, as many at once as there are trees."""

    def __init__(self, trees: Sequence[Path]) -> None:
        self.trees = list(trees)
        self.running: dict[int, tuple[Job, Path, contextlib.ExitStack]] = {}

    def run(self, jobs: Sequence[Job], done: Any) -> None:
        """Run every job and call `done(job)` after each."""
        waiting = list(jobs)
        try:
            while waiting or self.running:
                while waiting and self.trees:
                    self._start(waiting.pop(0), self.trees.pop())
                time.sleep(0.02)
                for job in self._ended():
                    done(job)
        finally:
            for pid in list(self.running):
                self._stop(pid)

    def _start(self, job: Job, tree: Path) -> None:
        stack = contextlib.ExitStack()
        stack.enter_context(planted(job.fault, tree))
        answer = tree.with_suffix(".json")
        answer.unlink(missing_ok=True)
        job.begun = time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                child(job, tree, answer)
                code = 0
            finally:
                os._exit(code)  # nothing of the parent may be cleaned up twice
        self.running[pid] = (job, tree, stack)

    def _ended(self) -> list[Job]:
        ended = []
        for pid, (job, _, _) in list(self.running.items()):
            late = job.fault is not None and time.monotonic() - job.begun > LIMIT
            if late or os.waitpid(pid, os.WNOHANG)[0] == pid:
                self._stop(pid, alive=late)
                ended.append(job)
        return ended

    def _stop(self, pid: int, *, alive: bool = True) -> None:
        job, tree, stack = self.running.pop(pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # the child leads a group: what its tests started ends with it
        if alive:
            os.waitpid(pid, 0)
        job.seconds = time.monotonic() - job.begun
        answer = tree.with_suffix(".json")
        if not alive and answer.exists():
            job.answer = json.loads(answer.read_text())
        stack.close()
        self.trees.append(tree)


def control(runner: Runner, faults: Sequence[Fault]) -> dict[str, str]:
    """The tests of `faults` that do not pass without a fault, and what is the matter with each."""
    tests = sorted({test for fault in faults for test in fault.caught_by})
    by_file: dict[str, list[str]] = {}
    for test in tests:
        by_file.setdefault(test.split("::")[0], []).append(test)
    passed: list[str] = []
    wrong: list[str] = []
    alone: list[Job] = []

    def done(job: Job) -> None:
        if not job.answer.get("passed") and len(job.tests) > 1:
            alone.extend(Job((test,)) for test in job.tests)  # pytest runs none where one of them is unknown
            return
        passed.extend(job.answer.get("passed", ()))
        wrong.extend(job.answer.get(key, "") for key in ("failed", "broken"))
        wrong.extend([] if job.answer else [f"the process died: {', '.join(job.tests)}"])

    begun = time.monotonic()
    runner.run([Job(tuple(some)) for some in by_file.values()], done)
    runner.run(list(alone), done)
    print(f"{len(tests)} tests without a fault: {time.monotonic() - begun:.1f} s", flush=True)
    for why in dict.fromkeys(filter(None, wrong)):
        print(f"  {why}", flush=True)
    return {test: "does not pass" for test in tests if not _passing(test, passed)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 1 if a fault is not caught or the list is broken."""
    parser = argparse.ArgumentParser(description="Plant every fault of tests/faults/faults.toml: each must be caught.")
    parser.add_argument("--only", nargs="+", default=[], metavar="ID", help="just these faults")
    parser.add_argument("--jobs", type=int, default=2, help="faults at once (default: %(default)s)")
    parser.add_argument("--control", action="store_true", help="run the tests without a fault, and no more")
    args = parser.parse_args(arguments)
    faults = read_faults()
    if unknown := set(args.only) - {fault.id for fault in faults}:
        parser.error(f"--only {' '.join(sorted(unknown))}: no such fault in tests/faults/faults.toml")
    faults = [fault for fault in faults if not args.only or fault.id in args.only]
    begun = time.monotonic()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in WARM:
        importlib.import_module(name)
    gc.freeze()  # no child need look through what the parent has made
    print(f"{', '.join(WARM)} imported: {time.monotonic() - begun:.1f} s", flush=True)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        trees = [Path(folder) / f"tree{number}" for number in range(max(1, args.jobs))]
        for tree in trees:
            shutil.copytree(ROOT, tree, ignore=SKIPPED)
        runner = Runner(trees)
        failing = control(runner, faults)
        if args.control:
            for test in failing:
                print(f"DOES NOT PASS {test}")
            print(f"control: {len(failing)} tests do not pass, {time.monotonic() - begun:.0f} s")
            return int(bool(failing))
        count: dict[str, list[str]] = {"caught": [], "NOT CAUGHT": [], "broken": []}

        def done(job: Job) -> None:
            assert job.fault is not None
            verdict, why = job.verdict(failing)
            count[verdict].append(job.fault.id)
            number = sum(map(len, count.values()))
            print(f"{number:3}/{len(faults)} {verdict:10} {job.seconds:5.1f} s  {job.fault.id}", flush=True)
            if verdict != "caught" or args.only:
                print(f"            {job.fault.wrong}\n            {why}", flush=True)

        runner.run([Job(fault.caught_by, fault) for fault in faults], done)
    summary = ", ".join(f"{len(ids)} {verdict}" for verdict, ids in count.items())
    print(f"{len(faults)} faults: {summary}; {time.monotonic() - begun:.0f} s")
    return int(len(count["caught"]) != len(faults))


if __name__ == "__main__":
    sys.exit(main())
