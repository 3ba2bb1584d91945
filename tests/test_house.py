"""The house: which room may import which, and what may be written only once.

Imports point down only, lazy ones and those for type checkers included; rooms of one floor do not import each other.
`show` and `base` are open to every room above them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "twoaxis"

FLOORS = (
    ("cli",),
    ("commands", "integrations"),
    ("guide",),
    ("comparison",),
    ("training", "costs"),
    ("pretrained", "parallel", "inspection", "verify"),
    ("model",),
    ("data", "depth", "sequence"),
    ("window",),
    ("kernels",),
    ("ring",),
    ("base",),
)
"""Rooms from the roof to the ground."""

HEIGHT = {room: height for height, rooms in enumerate(reversed(FLOORS)) for room in rooms}

WITHOUT_SHOW = {"kernels", "depth", "sequence", "window", "ring", "data", "base"}
"""Rooms that compute and never show anything."""

REPEATED: dict[str, tuple[str, int]] = {
    "did-you-mean": (r"difflib\.get_close", 1),
    "type check in an option class": (r"check_types\(self\)", 1),
    "hash of a file": (r"hashlib\.(file_digest|sha256\([^)]*read)", 1),
    "drawing": (r"(import|from) matplotlib", 1),
    "second look at the command line": (r"sys\.argv", 2),
}
"""What is written several times: a pattern, and in how many files it stands at the most. The aim is one each."""


def imports(path: Path) -> Iterator[str]:
    """The modules of this package that a file imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0 and node.module.startswith("twoaxis."):
            if node.module.count(".") > 1 or (PACKAGE / f"{node.module.split('.')[1]}.py").exists():
                yield node.module
            else:  # from a room, a module of it
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("twoaxis."))


def edges() -> Iterator[tuple[str, str]]:
    """Every import of the package, as dotted names below it."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] in ("__init__", "__main__"):
            continue
        for target in imports(path):
            yield ".".join(parts).removesuffix(".__init__"), target.removeprefix("twoaxis.")


def points_down(source: str, target: str) -> bool:
    """Whether an import is allowed by the floors."""
    here, there = source.split(".")[0], target.split(".")[0]
    if there == "show":
        return here not in WITHOUT_SHOW
    if here == "show":
        return there in ("show", "base")
    return here == there or HEIGHT[there] < HEIGHT[here]


def test_every_room_has_a_floor() -> None:
    rooms = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")}
    assert rooms - set(HEIGHT) - {"show", "__init__", "__main__"} == set()


def test_imports_point_down() -> None:
    upward = [f"{source} -> {target}" for source, target in edges() if not points_down(source, target)]
    assert upward == [], "upward imports: move the code to a lower room"


@pytest.mark.parametrize(
    ("source", "target", "allowed"),
    [
        ("training.loop", "data.load", True),
        ("data.load", "training.loop", False),
        ("training.loop", "costs.meter", False),
        ("depth.standard", "show.document", False),
        ("guide.advise", "show.document", True),
        ("show.page", "base.files", True),
        ("show.page", "model.config", False),
    ],
)
def test_floors(source: str, target: str, allowed: bool) -> None:
    assert points_down(source, target) is allowed


@pytest.mark.parametrize("what", REPEATED)
def test_what_is_repeated_becomes_less(what: str) -> None:
    pattern, limit = REPEATED[what]
    files = [str(f.relative_to(PACKAGE)) for f in PACKAGE.rglob("*.py") if re.search(pattern, f.read_text("utf-8"))]
    assert len(files) <= limit, f"one more {what}: {files}"
    assert len(files) == limit, f"there are {len(files)} now: lower the limit"
