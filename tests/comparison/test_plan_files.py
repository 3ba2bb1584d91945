"""Files that are not what they should be: compare.json, plan files and what they name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.comparison.comparing import make_options
from twoaxis.comparison.budget import make_rows
from twoaxis.comparison.options import COMPARED, FIELDS
from twoaxis.comparison.plan import Plan, data_label
from twoaxis.comparison.run import prepare, read_options

OPTIONS: dict[str, Any] = {"stream": ["deep_delta:label=mine", "standard:wider=mine"], "task": ["recall"]}
OPTIONS |= {"lr": [1e-3, 2e-3], "sizes": "nano,tiny:steps=7", "context": 32}
BOUNDED = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

words = st.sampled_from(["", "x", "../../x", "nano", "1,2", "a=b"])
plain = st.one_of(st.none(), st.booleans(), st.integers(-3, 10**20), st.floats(), words)
values = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """A whole compare.json."""
    plan = Plan.new(OPTIONS)
    rows = make_rows(plan, {data_label(sources): 256 for sources in plan.data})
    about = {"data": {data_label(d): {"vocab_size": 256, "fingerprint": "x"} for d in plan.data}, "commands": ["a"]}
    return json.loads(json.dumps(Plan(**{**vars(plan), "rows": rows, "about": about}).to_dict()))


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, part in inner for place in places(part, (*at, key)))]


@BOUNDED
@given(data=st.data())
def test_a_damaged_plan_is_read_or_refused_with_its_file_and_field(
    document: dict[str, Any], tmp_path: Path, data: st.DataObject
) -> None:
    damaged = copy.deepcopy(document)
    place = data.draw(st.sampled_from(places(document)[1:]))
    inner = damaged
    for key in place[:-1]:
        inner = inner[key]
    if data.draw(st.booleans()):
        inner[place[-1]] = data.draw(values)
    else:
        del inner[place[-1]]
    path = tmp_path / "compare.json"
    path.write_text(json.dumps(damaged))
    try:
        plan: Any = Plan.load(tmp_path)
        home = (tmp_path / "runs").resolve()
        for run in (*plan.choosing_runs(), *plan.runs()):
            assert (tmp_path / run.folder).resolve().is_relative_to(home)
            plan.config(run)
    except ValueError as error:
        if "has format" not in str(error) and str(path) in str(error):
            assert f"is damaged at {place[0]}" in str(error) or "is damaged at the whole" in str(error)  # noqa: PT017


@BOUNDED
@given(data=st.data())
def test_options_of_any_shape_make_a_plan_or_are_refused(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from((*COMPARED, *FIELDS)), min_size=1, max_size=3, unique=True))
    options = OPTIONS | {name: data.draw(values) for name in names}
    try:
        plan = Plan.new(options)
        assert plan.grow(options) == plan
        assert Plan.new(plan.options()) == plan
    except ValueError as error:
        assert str(error)  # noqa: PT017


@pytest.mark.parametrize("content", ["[]", "3", "null", '{"format": 2}', '{"format": 2, "rows": 3}', "{", '"x"'])
def test_files_that_are_no_plan(tmp_path: Path, content: str) -> None:
    for name in ("compare.json", "plan.json"):
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=r"compare\.json"):
        Plan.load(tmp_path)
    with pytest.raises(ValueError, match=r"plan\.json|has no option"):
        Plan.new(read_options(str(tmp_path / "plan.json"), {}))


def test_a_row_cannot_lead_out_of_the_folder(document: dict[str, Any], tmp_path: Path) -> None:
    for row in document["rows"]:
        row |= {"data_folder": "../../x", "folder": "../../x"}
    (tmp_path / "compare.json").write_text(json.dumps(document))
    plan: Any = Plan.load(tmp_path)
    assert {run.folder.parts[:2] for run in plan.choosing_runs()} == {("runs", "task-recall-48a801")}
    for name in ("data", "size", "contender"):
        moved = copy.deepcopy(document)
        moved["rows"][0][name] = "../../x"
        (tmp_path / "compare.json").write_text(json.dumps(moved))
        with pytest.raises(ValueError, match=r"compare\.json is damaged at .*belongs to nothing that is planned"):
            Plan.load(tmp_path)


def test_python_is_run_only_where_the_caller_names_it(tmp_path: Path) -> None:
    """Neither a plan file nor a folder can have code run, in a dry run or a real one."""
    own, ran = tmp_path / "own.py", tmp_path / "ran"
    own.write_text(f"from pathlib import Path\nPath({str(ran)!r}).touch()\n")
    file, out = tmp_path / "plan.json", tmp_path / "out"
    asked = make_options(tmp_path, stream=["deep_delta"], use=[str(own)])
    file.write_text(json.dumps(asked))
    with pytest.raises(ValueError, match=rf"wants the Python code in {own} to be run; read it, and give --use {own}"):
        read_options(str(file), {"seeds": 1})
    Plan.new(asked).save(out)
    with pytest.raises(ValueError, match=rf"compare\.json wants the Python code in {own} to be run"):
        prepare({}, out)
    with pytest.raises(ValueError, match=r"compare\.json wants the Python code"):
        read_options(str(out / "compare.json"), {})
    assert not ran.exists()
    assert read_options(str(file), {"use": [str(own)]})["use"] == [str(own), str(own)]
    assert prepare({"use": [str(own)]}, out).use == (str(own),)
    assert ran.exists()
