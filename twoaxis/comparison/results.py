"""What a comparison found, read from its folder at any moment.

Comparison                  one folder: its plan (compare.json) and its runs
  Section                   one data set at one size
    Entry                   one contender: its runs, differences, costs, speed-up
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twoaxis.base.files import read_json
from twoaxis.comparison.plan import PLAN, Plan
from twoaxis.comparison.run_folders import read_runs
from twoaxis.comparison.scaling import Scaling, find_law
from twoaxis.comparison.sections import Entry, Section
from twoaxis.comparison.statistics import LEVEL
from twoaxis.show.document import Document, Saved, Showable
from twoaxis.training.folder import RUN

FORMAT = 1
"""Version of table.json."""
REPORT = "report"
"""Folder of the report in that of the comparison."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison(Showable):
    """What a comparison found: what `twoaxis.compare` and `twoaxis.report` return."""

    data_file = "table.json"
    folder: Path  # of the comparison
    plan: Plan  # what was asked for, and what it was run on
    sections: tuple[Section, ...]  # one for each data set and size
    failed: tuple[str, ...] = ()  # runs that could not be made, and why
    home: str | None = None  # how the folder is reached from where the report stands, for links to models; None is none

    @staticmethod
    def load(
        folder: str | Path, *, l_inf: float | None = None, alpha: float | None = None, margin: float | None = None
    ) -> Comparison:
        """Read a comparison, finished or not.

        Args:
            folder: the --out of `twoaxis compare`.
            l_inf: irreducible loss, for the effective speed-up. None fits it, which takes three sizes.
            alpha: exponent of the scaling law; with `l_inf` no size is fitted.
            margin: a difference smaller than this does not matter; None is the plan's.
        """
        if alpha is not None and l_inf is None:
            raise ValueError(f"--alpha {alpha:g} needs --l-inf too: a law is given whole, or fitted")
        folder = Path(folder)
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; give the --out of twoaxis compare")
        plan = Plan.load(folder)
        if plan is None:
            raise ValueError(f"{folder} has no {PLAN}; give the --out of twoaxis compare")
        if margin is not None:
            plan = dataclasses.replace(plan, margin=margin)
        runs = read_runs(folder, plan)
        places = dict.fromkeys((row.data, row.size) for row in plan.rows)
        sections = tuple(Section(plan, *place, runs) for place in places)
        for data in dict.fromkeys(data for data, _ in places) if len(plan.sizes) > 1 or alpha is not None else ():
            known = [section for section in sections if section.data == data]
            lines = [section.baseline for section in known if section.baseline.losses]
            compute = {entry.row.size: entry.row.flops for entry in lines}
            law = find_law(compute, {entry.row.size: entry.losses for entry in lines}, l_inf=l_inf, alpha=alpha)
            for section in known:
                section.scaling = law
        return Comparison(folder=folder, plan=plan, sections=sections)

    @property
    def laws(self) -> dict[str, Scaling]:
        """By data set."""
        return {section.data: section.scaling for section in self.sections}

    @property
    def name(self) -> str:
        """Of the folder."""
        return self.folder.resolve().name

    @property
    def exit_code(self) -> int:
        """1 if a run could not be made."""
        return 1 if self.failed else 0

    @property
    def losses(self) -> dict[str, dict[int, float]]:
        """Held-out losses at the end, by label and seed, of a comparison on one data set at one size."""
        return self._only.losses

    @property
    def verdicts(self) -> dict[str, str]:
        """By label, of a comparison on one data set at one size."""
        return self._only.verdicts

    @property
    def _only(self) -> Section:
        if len(self.sections) != 1:
            names = "; ".join(f"{section.data}, {section.size}" for section in self.sections)
            raise ValueError(f"there are {len(self.sections)} sections ({names}): ask one of .sections")
        return self.sections[0]

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Of all sections."""
        return tuple(entry for section in self.sections for entry in section.entries)

    @property
    def missing(self) -> int:
        """Number of runs that have not finished."""
        return sum(len(entry.missing) for entry in self.entries)

    @property
    def missing_runs(self) -> list[str]:
        """What they are; of a row without a learning rate all at once."""
        names = []
        for entry in self.entries:
            runs = [f"{entry.name}, seed {seed}" for seed in entry.missing]
            names += runs if entry.row.lr is not None else [f"{entry.name}: all seeds, no learning rate was chosen"]
        return names

    @property
    def diverged_runs(self) -> list[str]:
        """Runs whose loss stopped being a number, and when."""
        runs = [(entry, seed) for entry in self.entries for seed in entry.diverged]
        return [f"{entry.name}, seed {seed}: {entry.ended[seed].message}" for entry, seed in runs]

    @property
    def shared_rate(self) -> bool:
        """Whether all contenders had the one learning rate."""
        return len({entry.row.lr for entry in self.entries if not entry.check}) == 1 and len(self.plan.lrs) < 2

    @property
    def inits(self) -> tuple[str, ...]:
        """How initial weights were scaled."""
        return tuple(dict.fromkeys(entry.init for entry in self.entries))

    @property
    def machines(self) -> dict[str, int]:
        """Runs by the CPU and GPUs they began on."""
        found: Counter[str] = Counter()
        for record in (run for entry in self.entries for run in entry.runs.values()):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                machine = read_json(self.folder / record.folder / RUN)["hardware"]
                found[", ".join([machine["cpu"], *machine["gpus"]])] += 1
        return dict(found)

    def document(self) -> Document:
        """The report."""
        from twoaxis.comparison.report import document

        return document(self)

    def rows(self) -> list[dict[str, Any]]:
        """A row for every contender of every section: the values of its cells by the heads of the tables."""
        from twoaxis.comparison.report import rows

        return rows(self)

    def save(self, folder: str | Path | None = None, stem: str = "report") -> Saved:
        """Write the report; None is its place in the comparison's folder. Figures of an earlier one are deleted."""
        place = self.folder / REPORT if folder is None else Path(folder)
        home = Path(os.path.relpath(self.folder.resolve(), place.resolve())).as_posix()
        saved = super(Comparison, dataclasses.replace(self, home=home)).save(place, stem)
        for figure in {*place.glob(f"{stem}-*.svg"), *place.glob(f"{stem}-*.png")} - set(saved.files):
            figure.unlink(missing_ok=True)
        return saved

    def to_dict(self) -> dict[str, Any]:
        """Everything for JSON: what the report shows and what it is computed from."""
        about = self.plan.about
        return {
            "format": FORMAT,
            "name": self.name,
            "match": self.plan.match,
            "seeds": list(self.plan.seeds),
            "level": LEVEL,
            "correction": "Bonferroni over the contenders of a table and the looks",
            "until": self.plan.until,
            "looks": [look._asdict() for look in self.plan.looks],
            "margin": self.plan.margin,
            "lr": list(self.plan.lrs),
            "lr_seeds": list(self.plan.lr_seeds) if len(self.plan.lrs) > 1 else [],
            "shared_lr": self.shared_rate,
            "init": list(self.inits),
            "hardware": about.get("hardware_line", ""),
            "machines": self.machines,
            "versions": {name: str(version) for name, version in about.get("versions", {}).items()},
            "commands": list(about.get("commands", ())),
            "missing_runs": self.missing,
            "failed": list(self.failed),
            "laws": {data: scaling.to_dict() for data, scaling in self.laws.items()},
            "tables": [section.to_dict() for section in self.sections],
        }
