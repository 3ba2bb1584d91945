"""The notebook of examples/: its cells run in order."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.commands import process_restored
from tests.support.processes import ROOT

NOTEBOOK = ROOT / "examples" / "tour.ipynb"
CELLS = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def source(cell: dict[str, object]) -> str:
    return "".join(cell["source"])  # type: ignore[arg-type]


def test_it_keeps_its_outputs_and_nothing_of_a_machine() -> None:
    outputs = [json.dumps(cell["outputs"]) for cell in CELLS[1:]]
    assert "[]" not in outputs
    assert [found for text in outputs for found in re.findall(r"/(?:tmp|home|work|usr)/|stderr|Warning", text)] == []
    assert len(NOTEBOOK.read_bytes()) < 40_000


@pytest.mark.slow
def test_its_cells_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for path in sorted((ROOT / "twoaxis").rglob("*.py"))[:60]:
        (text / "_".join(path.relative_to(ROOT).parts)).write_text(path.read_text())
    tiny = {r'"stdlib", 60': f'"{text}", 2', r"seeds=3": "seeds=2", r'"runs/tour"': f'"{tmp_path}"'}
    names: dict[str, object] = {"__name__": "tour"}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with process_restored():
        monkeypatch.chdir(NOTEBOOK.parent)
        for cell in CELLS:
            code = source(cell)
            for pattern, small in tiny.items():
                code = re.sub(pattern, small, code)
            exec(compile(code, str(NOTEBOOK), "exec"), names)
    assert (tmp_path / "inside" / "inspect.html").is_file()
