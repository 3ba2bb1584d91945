"""A plugin of pytest: CPU seconds by file, and the heaviest files first, so that two workers end together.

`make durations` measures and writes the table. A file that is not in it is new and may be heavy: it starts first.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

TABLE = Path(__file__).parents[1] / "durations.json"
"""Seconds by file, from the heaviest to the lightest."""


def cpu_seconds() -> float:
    """CPU time of this process and of the children it has waited for."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


class Durations:
    """Measures every test where it runs, adds up by file where the reports arrive."""

    def __init__(self, record: bool) -> None:
        self.record = record
        self.before = cpu_seconds()
        self.files: dict[str, float] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Put the heaviest files first; the order within a file stays."""
        known: dict[str, float] = json.loads(TABLE.read_text()) if TABLE.exists() else {}
        items.sort(key=lambda item: -known.get(item.nodeid.partition("::")[0], math.inf))
        self.before = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        """Note in the report what the test took since the last one; a fixture counts where it is built."""
        report = yield
        now = cpu_seconds()
        report.cpu_seconds, self.before = now - self.before, now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up what arrives, from this process or from a worker."""
        file = report.nodeid.partition("::")[0]
        self.files[file] = self.files.get(file, 0.0) + getattr(report, "cpu_seconds", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the slowest files and write the table."""
        if not self.record:
            return
        ordered = sorted(self.files.items(), key=lambda pair: -pair[1])
        TABLE.write_text(json.dumps({name: round(seconds, 1) for name, seconds in ordered}, indent=1) + "\n")
        terminalreporter.section("CPU seconds by file")
        for name, seconds in ordered[:30]:
            terminalreporter.line(f"{seconds:8.1f}  {name}")
        total = sum(self.files.values())
        terminalreporter.line(f"{total:8.1f}  all {len(self.files)} files, {total / 60:.1f} minutes")
