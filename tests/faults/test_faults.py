"""The list of faults fits the package: every fault can be planted, and the tests it names are there."""

from __future__ import annotations

import ast
from collections import Counter
from typing import Any

import pytest

from tests.faults.faults import ROOT, Fault, read_faults
from tests.faults.run import Job

FAULTS = read_faults()


def functions(path: str) -> set[str]:
    """The tests of a file as they stand in node ids: `test_name`, or `Class::test_name`."""
    found = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {prefix + each.name for each in inside if isinstance(each, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("file", sorted({fault.file for fault in FAULTS}))
def test_faults_can_be_planted(file: str) -> None:
    assert file.startswith("twoaxis/")
    source = (ROOT / file).read_text()
    tree = ast.dump(ast.parse(source))
    for fault in (fault for fault in FAULTS if fault.file == file):
        assert ast.dump(ast.parse(fault.planted(source))) != tree, f"{fault.id}: nothing but the layout changes"
        assert fault.wrong.endswith("."), fault.id


def test_the_tests_of_the_faults_exist() -> None:
    named = {test.split("[")[0] for fault in FAULTS for test in fault.caught_by}
    by_file: dict[str, set[str]] = {}
    for name in named:
        path, _, function = name.partition("::")
        by_file.setdefault(path, set()).add(function)
    assert all(fault.caught_by for fault in FAULTS)
    assert {path: sorted(names - functions(path)) for path, names in by_file.items() if names - functions(path)} == {}


def test_the_list_is_long_and_has_every_name_once() -> None:
    assert len(FAULTS) >= 205
    assert [name for name, count in Counter(fault.id for fault in FAULTS).items() if count > 1] == []


def test_text_that_is_missing_or_ambiguous_is_refused() -> None:
    fault = Fault(id="x", wrong="Wrong.", file="twoaxis/x.py", before="a", after="b", caught_by=())
    assert fault.planted("cad") == "cbd"
    for source in ("cd", "aa"):
        with pytest.raises(ValueError, match=r"x: `before` occurs \d times in twoaxis/x.py"):
            fault.planted(source)


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ({"passed": [], "failed": "a.py::t[1]: AssertionError", "broken": ""}, "caught"),
        ({"passed": ["a.py::t[1]", "a.py::t[2]"], "failed": "", "broken": ""}, "NOT CAUGHT"),
        ({"passed": ["a.py::test"], "failed": "", "broken": ""}, "broken"),  # another test than the one named
        ({"passed": [], "failed": "a.py::t[1]: AssertionError", "broken": "does not load"}, "broken"),
        ({}, "broken"),  # it hung, or died
    ],
)
def test_verdicts(answer: dict[str, Any], verdict: str) -> None:
    job = Job(("a.py::t",), answer=answer)
    assert job.verdict({})[0] == verdict
    assert job.verdict({"a.py::t": "does not pass"})[0] == "broken", "a test that fails anyway shows nothing"
