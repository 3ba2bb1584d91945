"""The list of faults: mistakes that a rewrite of the package could make, and the tests that must see them.

`faults.toml` holds one table per fault:

    [[fault]]
    id = "denseformer-weight-on-oldest"        a name, unique
    wrong = "One sentence: what is wrong."
    file = "twoaxis/depth/denseformer.py"
    before = "zero_()[-1] = 1.0"               text that occurs exactly once in the file; may be several lines
    after = "zero_()[0] = 1.0"                 the faulty text in its place
    caught_by = ["tests/verify/test_claims.py::test_a_method_holds_what_is_claimed[denseformer-cost: live]"]

`caught_by` names tests of `make test`, as few and as fast as possible; a name without brackets means every parameter.

**To plant a fault anew.** Whoever ports or rewrites a file plants its faults again in the same commit: find the place
where the new code does the same thing, put its text into `before`, the same mistake into `after`, the test that has
taken over into `caught_by`, and run `make faults ONLY=<id>`. A fault goes only if the thing that could go wrong is
gone; a fault that no test catches wants a test, not a deletion.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).parent / "faults.toml"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One mistake, as a replacement of text in a file of the package."""

    id: str
    wrong: str
    file: str
    before: str
    after: str
    caught_by: tuple[str, ...]

    @property
    def module(self) -> str:
        """The name under which the file is imported."""
        return self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def planted(self, source: str) -> str:
        """The source of the file with the fault in it."""
        if (count := source.count(self.before)) != 1:
            raise ValueError(f"{self.id}: `before` occurs {count} times in {self.file}, it must occur exactly once")
        return source.replace(self.before, self.after)


def read_faults(path: Path = LIST) -> list[Fault]:
    """Every fault of the list, in its order."""
    entries = tomllib.loads(path.read_text())["fault"]
    return [Fault(**{**entry, "caught_by": tuple(entry["caught_by"])}) for entry in entries]
